"""Benchmarks of parts of the engine: memory over micro-batches, compiled layers, weights, the executor."""

from __future__ import annotations

import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from tests.support.project import make_plan
from tools.bench.harness import Row, case
from tools.bench.runs import bench_model, make_run, run_ranks, wide_plan
from yuan_train.config.devices import Backend
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.plan import Plan
from yuan_train.config.run import Recompute, RunConfig
from yuan_train.models.layers import DropoutSeed
from yuan_train.models.transformer import Transformer, initial_rows
from yuan_train.parallel.apply import make_bridge, parallelize, pipeline_schedule
from yuan_train.parallel.board import join_role
from yuan_train.parallel.device import CPU, Device
from yuan_train.parallel.executor import Boundary, Executor, Stopwatch
from yuan_train.parallel.grid import Grid
from yuan_train.parallel.groups import enter_role, init_distributed, make_groups, shutdown
from yuan_train.parallel.transfer import (
    Holdings,
    MoveBucket,
    Outlet,
    RankLink,
    make_buckets,
    plan_holdings,
    take_weights,
    transfer_table,
)
from yuan_train.parallel.zero import EngineOptions
from yuan_train.planner.evaluate.simulator import StageTimes, simulate
from yuan_train.profile.links import link_ends, measure_links
from yuan_train.schedule.schedules import post_early
from yuan_train.train.build import DTYPES, compile_part, model_parts
from yuan_train.train.job import Position, choose_device

REPEATS = 5


# --- memory ------------------------------------------------------------------------------------------------


@case("engine/memory", hidden=(512,), tokens=(1024,), stages=(3,), device=("cpu",), micro_batches=(8, 64))
def memory(hidden: int, tokens: int, stages: int, device: str, micro_batches: int) -> Row:
    """Growth of each rank's peak memory in a step, MiB, which must not depend on the micro-batches.

    Under 1F1B a stage keeps as many in flight as there are stages from it to the end. Two layers a stage.
    """
    model = bench_model(2 * stages, hidden, num_attention_heads=8, max_sequence_length=tokens)
    plan = make_plan(make_run(model, batch=micro_batches), [[2] * stages])
    found = run_ranks(_memory_rank, stages, plan, device)
    row: Row = {"micro-batches": micro_batches}
    return row | {f"stage {stage}": round(grown) for stage, grown in enumerate(found)}


def _memory_rank(rank: int, plan: Plan, kind: str) -> float:
    """Run one step of one stage; the growth of peak memory in MiB."""
    device = choose_device(kind, Position(rank, plan.world_size, rank, plan.world_size))
    init_distributed(device=device, timeout_seconds=300)
    options = EngineOptions(torch.float32)
    parts = model_parts(plan.model, torch.float32, initial=partial(initial_rows, plan.model, seed=0))
    runtime = parallelize(plan, rank, parts, device=device, options=options)
    works = {
        s: RandomTokens(cast(Transformer, part), plan.sequence_length, device)
        for s, part in runtime.parts.items()
    }
    executor = Executor(works, runtime.bridge, Stopwatch(device))
    before = peak_mib(device)
    executor.run(runtime.program)
    device.finish()
    grown = peak_mib(device) - before
    shutdown()
    return grown


def peak_mib(device: Device) -> float:
    """The most memory that tensors have taken of a card, or this process of its host."""
    card = device.memory()
    if card is not None:
        return card.most_allocated / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Unsplit:
    """What an executor asks of a stage's work, without data, under 1F1B, which does not split backwards."""

    def load(self, micro_batch: int) -> None:
        """There is no data."""

    def splitting(self, micro_batch: int, split: bool) -> AbstractContextManager[None]:
        assert not split
        return nullcontext()

    def backward_weight(self, micro_batch: int) -> None:
        raise AssertionError("no backward is split")


class RandomTokens(Unsplit):
    """Runs one stage's part of the model on random tokens, always the same."""

    def __init__(self, model: Transformer, sequence_length: int, device: Device) -> None:
        self.model = model
        self.tokens_BS = torch.randint(model.config.vocab_size, (1, sequence_length), device=device.torch)

    def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
        output = self.model(self.tokens_BS if hidden_BSH is None else hidden_BSH)
        return self.model.loss(output, self.tokens_BS) if self.model.has_head else output


# --- compiled layers ---------------------------------------------------------------------------------------


@case(
    "engine/compile",
    formats={
        **{"plain ms": ".1f", "compiled ms": ".1f", "ratio": ".2f", "first s": ".1f"},
        **{"saved, plain": ".1f", "saved, compiled": ".1f"},
    },
    costs={"ratio": 0.1},
    kind=("fp32 none", "fp32 selective", "bf16 none", "bf16 selective", "fp32 full", "fp32 none dropout"),
    hidden=(256,),
    layers=(4,),
    tokens=(512,),
    turns=(15,),
    device=("cpu",),
)
def compiled(kind: str, hidden: int, layers: int, tokens: int, turns: int, device: str) -> Row:
    """A forward and backward with compiled layers against plain ones, in turns: the median.

    As the engine runs them, weight gradients and buckets included; the vocabulary is small. CPU time of one
    thread, which other processes hardly affect, or a card's. Bytes are what autograd saves, in hidden states
    per layer.
    """
    precision, recompute, *dropout = kind.split()
    keys = {"vocab_size": 512, "max_sequence_length": tokens, "hidden_dropout": 0.1 if dropout else 0.0}
    model = bench_model(layers, hidden, **keys)
    plain, fused = (
        WholeModel(make_run(model), precision, cast(Recompute, recompute), device, compile=own)
        for own in (False, True)
    )
    torch.compiler.reset()
    plain.step()
    start = time.perf_counter()
    fused.step()
    first = time.perf_counter() - start
    pairs = [(plain.step(), fused.step()) for _ in range(turns)]
    seconds = [statistics.median(times) for times in zip(*pairs, strict=True)]
    saved = [model.saved_hidden_states() / layers for model in (plain, fused)]
    row: Row = {"kind": kind, "plain ms": 1e3 * seconds[0], "compiled ms": 1e3 * seconds[1]}
    row |= {"ratio": seconds[1] / seconds[0], "saved, plain": saved[0], "saved, compiled": saved[1]}
    return row | {"first s": first}


class WholeModel:
    """A whole model with its buckets, and one micro-batch."""

    def __init__(
        self, run: RunConfig, precision: str, recompute: Recompute, device: str, *, compile: bool
    ) -> None:
        model, dtype = run.model, DTYPES[precision]
        first = partial(initial_rows, model, seed=0)
        parts = model_parts(model, dtype, initial=first, compile=compile_part if compile else None)
        self.device = choose_device(device, Position())
        plan = make_plan(run, [[model.num_layers]], recompute=recompute)
        runtime = parallelize(plan, 0, parts, device=self.device, options=EngineOptions(dtype))
        self.model = cast(Transformer, runtime.parts[0])
        shape = (1, run.data.sequence_length)
        self.tokens_BS = torch.randint(run.model.vocab_size, shape, device=self.device.torch)

    def forward(self) -> torch.Tensor:
        """The loss."""
        hidden_BSH = self.model(self.tokens_BS, dropout_seed=DropoutSeed(0, 0))
        return self.model.loss(hidden_BSH, self.tokens_BS, gradient_scale=1.0)

    def step(self) -> float:
        """Seconds of a forward and its backward: of a card, or of this process."""
        clock = time.perf_counter if self.device.is_card else time.process_time
        self.device.finish()
        start = clock()
        self.forward().backward()
        self.device.finish()
        return clock() - start

    def saved_hidden_states(self) -> float:
        """Bytes that autograd saves besides weights, each storage once, over those of a hidden state."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            self.forward()
        dtype = next(self.model.parameters()).dtype
        return sum(saved.values()) / (self.tokens_BS.numel() * self.model.config.hidden_size * dtype.itemsize)


# --- weights between unlike plans --------------------------------------------------------------------------


def _elements_of(targets: Holdings) -> int:
    """Of the targets' parts: no table that fills them moves fewer."""
    return sum(math.prod(shard.local_shape) for held in targets.values() for shard in held.values())


@case("engine/table", formats={"GB": ".1f", "bound GB": ".1f", "table CPU s": ".1f"})
def table_of_51b() -> Row:
    """Who sends what, 51B in bf16: 2 pipelines of 4 uneven stages of width 8, to 16 engines of width 4."""
    model = load_model("configs/model/yuan2-51b.yaml")
    policy = wide_plan(make_run(model, batch=2), [[(11, 8), (11, 8), (10, 8), (10, 8)]] * 2)
    engines = wide_plan(make_run(model, batch=16), [[(42, 4)]] * 16)
    began = time.process_time()
    sources, targets = plan_holdings(policy), plan_holdings(engines, first_rank=policy.world_size)
    table = transfer_table(sources, targets)
    made = time.process_time()
    load: dict[int, int] = {}
    for move in table:
        load[move.source] = load.get(move.source, 0) + 2 * move.num_elements
    return {
        "moves": len(table),
        "pairs": len({(move.source, move.target) for move in table}),
        "GB": sum(load.values()) / 1e9,
        "bound GB": 2 * _elements_of(targets) / 1e9,
        "senders GB": f"{min(load.values()) / 1e9:.2f} to {max(load.values()) / 1e9:.2f}",
        "table CPU s": made - began,
    }


@case(
    "engine/transfer",
    formats={
        **dict.fromkeys(("MB", "buckets ms", "a tensor at a time ms", "1% changed ms", "copy ms"), ".0f"),
        "ratio": ".2f",
    },
    costs={"buckets ms": 0.2, "1% changed ms": 0.2},
    ranks=(2, 3, 4),
    layers=(24,),
    hidden=(256,),
)
def transfer(ranks: int, layers: int, hidden: int) -> Row:
    """Weights between unlike plans over gloo: in buckets, by tensor, by difference; the best of five.

    The first half holds the policy, one pipeline of uneven stages, the others hold an engine each.
    """
    model = load_model("configs/model/tiny.yaml")
    model = replace(model, num_layers=layers, hidden_size=hidden, ffn_hidden_size=4 * hidden)
    model = replace(model, head_dim=hidden // model.num_attention_heads)
    return run_ranks(_transfer_rank, ranks, ranks, model)[0]


def _transfer_rank(rank: int, num_ranks: int, model: ModelConfig) -> Row | None:
    """One process: move the weights in buckets, then box by box; the first returns the row."""
    num_policy, most = max(num_ranks // 2, 1), model.num_layers * 2 // 3
    cut = [most, model.num_layers - most] if num_policy == 2 else [model.num_layers]
    policy = make_plan(make_run(model), [cut])
    number = num_ranks - num_policy
    engines = make_plan(make_run(model, batch=number), [[model.num_layers]] * number)
    roles = {"policy": range(num_policy), "generation": range(num_policy, num_ranks)}
    position = join_role(roles, startup_seconds=60)
    enter_role(position, device=CPU, timeout_seconds=60)
    link = RankLink("weights", range(num_ranks), position, timeout_seconds=60)
    sources, targets = plan_holdings(policy), plan_holdings(engines, first_rank=num_policy)
    table = transfer_table(sources, targets)
    own = (sources | targets)[rank]
    tensors = {name: torch.ones(shard.local_shape) for name, shard in own.items()}
    ways = {
        "buckets ms": [make_buckets(table, itemsize=4)],
        "a tensor at a time ms": [[MoveBucket(move.source, move.target, (move,))] for move in table],
        "1% changed ms": [make_buckets(table, itemsize=4)],
    }
    best = dict.fromkeys(ways, float("inf"))
    for name, parts in ways.items():
        own_parts = {"link": link, "dtype": torch.float32}
        outlets = [Outlet(buckets, **own_parts, by_difference="changed" in name) for buckets in parts]
        for turn in range(REPEATS + 1):
            for tensor in tensors.values() if rank in roles["policy"] else ():
                tensor.view(-1)[::100] += 1
            _barrier(link, rank, num_ranks)
            began = time.perf_counter()
            for buckets, outlet in zip(parts, outlets, strict=True):
                _, waits = outlet.post(tensors, own)
                take_weights(buckets, tensors, own, **own_parts)
                for wait in waits:
                    wait()
            _barrier(link, rank, num_ranks)
            # The first turn of what is sent by difference is whole.
            best[name] = min(best[name], 1e3 * (time.perf_counter() - began)) if turn else best[name]
    if rank:
        return None
    source = torch.ones(_elements_of(targets))
    copies = min(_copy_ms(source) for _ in range(REPEATS))
    row: Row = {"ranks": f"{num_policy} to {num_ranks - num_policy}", "boxes": len(table)}
    row |= {"MB": source.nbytes / 1e6, **best}
    return row | {"ratio": best["a tensor at a time ms"] / best["buckets ms"], "copy ms": copies}


def _copy_ms(source: torch.Tensor) -> float:
    target = torch.empty_like(source)
    began = time.perf_counter()
    target.copy_(source)
    return 1e3 * (time.perf_counter() - began)


def _barrier(link: RankLink, rank: int, num_ranks: int) -> None:
    """Wait for all ranks of a link."""
    token = torch.zeros(1)
    for other in range(1, num_ranks):
        if rank == 0:
            link.receive(token, other)()
            link.send(token, other)()
        elif rank == other:
            link.send(token, 0)()
            link.receive(token, 0)()


# --- the executor beside the simulator -----------------------------------------------------------------

FORWARD_SHARE = 1 / 3
SEQUENCE_LENGTH, HIDDEN_SIZE = 256, 512
MATRIX = 128
"""Rows and columns of the matrices; a product takes about 0.1 ms of a core."""
WARM_UP_STEPS = 2

Kind = Literal["sleep", "products"]


@dataclass(frozen=True)
class Pipeline:
    """One pipeline to measure."""

    kind: Kind
    num_stages: int
    num_micro_batches: int
    work_seconds: float
    """Seconds of a stage per micro-batch, forward and backward."""
    steps: int

    @property
    def plan(self) -> Plan:
        """One layer per stage; the model only determines the size of the messages."""
        keys = {"num_attention_heads": 1, "max_sequence_length": SEQUENCE_LENGTH}
        model = bench_model(self.num_stages, HIDDEN_SIZE, **keys)
        return make_plan(make_run(model, batch=self.num_micro_batches), [[1] * self.num_stages])


class Work(Unsplit):
    """A stage's work on a micro-batch, of known duration; its outputs have no meaning."""

    def __init__(self, given: Pipeline, *, last: bool) -> None:
        self._kind = given.kind
        self._last = last
        self._matrix = torch.randn(MATRIX, MATRIX)
        self._products = 1
        self._seconds = given.work_seconds
        self.forward_seconds = 0.0
        """Seconds spent in forwards so far."""
        if given.kind == "products":
            self._products = _calibrate(self._matrix, given.work_seconds)

    def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
        """Work for FORWARD_SHARE of the time; the backward takes the rest."""
        start = time.perf_counter()
        if hidden_BSH is None:
            hidden_BSH = torch.ones(1, SEQUENCE_LENGTH, HIDDEN_SIZE, requires_grad=True)
        output: Any = _TimedWork.apply(hidden_BSH, self)
        self.work(FORWARD_SHARE)
        self.forward_seconds += time.perf_counter() - start
        return output.sum() if self._last else output

    def work(self, share: float) -> None:
        """Work for a fraction of the time of a micro-batch."""
        if self._kind == "sleep":
            time.sleep(share * self._seconds)
            return
        for _ in range(round(share * self._products)):
            torch.mm(self._matrix, self._matrix)


class _TimedWork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_BSH: torch.Tensor, work: Work) -> torch.Tensor:
        ctx.work = work
        return hidden_BSH.clone()

    @staticmethod
    def backward(ctx: Any, *gradients_BSH: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.work.work(1 - FORWARD_SHARE)
        return gradients_BSH[0], None


def _calibrate(matrix: torch.Tensor, seconds: float) -> int:
    """The number of products that take `seconds` when all stages work at the same time."""
    times: list[float] = []
    for _ in range(50):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(20):
            torch.mm(matrix, matrix)
        times.append((time.perf_counter() - start) / 20)
    return max(1, round(seconds / statistics.median(times)))


def _run_stage(rank: int, given: Pipeline) -> tuple[tuple[list[float], list[float]], Any]:
    """Run one stage; the seconds of messages and of every step."""
    init_distributed(device=CPU, timeout_seconds=60)
    try:
        return _measure_sends(given), _run_steps(given, rank).tolist()
    finally:
        shutdown()


def _measure_sends(given: Pipeline) -> tuple[list[float], list[float]]:
    """Seconds of a message over each cut: activations, then gradients."""
    names = [str(rank) for rank in range(given.num_stages)]
    sizes = (1 << 16, SEQUENCE_LENGTH * HIDDEN_SIZE * 4)
    backends: list[Backend] = ["nccl"] * given.num_stages
    ends = link_ends(names, [""] * given.num_stages, backends, None)
    links = measure_links(ends, device=CPU, sizes=sizes, all_pairs=True)
    seconds = {(link.from_, link.to): link.seconds[-1] for link in links}
    pairs = list(zip(names, names[1:], strict=False))
    return [seconds[a, b] for a, b in pairs], [seconds[b, a] for a, b in pairs]


def _run_steps(given: Pipeline, rank: int) -> torch.Tensor:
    """[steps, stages, 3]: step, forward and backward seconds of each stage."""
    plan = given.plan
    grid = Grid(plan)
    coord = grid.coords[rank]
    schedule = pipeline_schedule(plan, 0)
    groups = make_groups(grid, device=CPU, timeout_seconds=60)
    boundary = Boundary((1, SEQUENCE_LENGTH, HIDDEN_SIZE), torch.float32, CPU.torch)
    bridge = make_bridge(grid, coord, groups, boundary, schedule)
    work, stopwatch = Work(given, last=rank == given.num_stages - 1), Stopwatch(CPU)
    executor = Executor({rank: work}, bridge, stopwatch)
    program = post_early(schedule[coord.worker], grid.workers(0), bridge.holds_up_nothing)
    rows: list[torch.Tensor] = []
    for _ in range(WARM_UP_STEPS + given.steps):
        work.forward_seconds = 0.0
        dist.barrier()
        start = time.perf_counter()
        executor.run(program)
        seconds = time.perf_counter() - start
        forward, busy = work.forward_seconds, stopwatch.read()
        own = torch.tensor([seconds, forward, busy - forward], dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(given.num_stages)]
        dist.all_gather(gathered, own)
        rows.append(torch.stack(gathered))
    return torch.stack(rows[WARM_UP_STEPS:])


@case(
    "engine/executor",
    formats={"work ms": ".1f", "step s": ".3f"},
    kind=("sleep", "products"),
    stages=(4,),
    micro_batches=(16,),
    milliseconds=(20.0,),
    steps=(10,),
    awake=(False,),
)
def executor(
    kind: Kind, stages: int, micro_batches: int, milliseconds: float, steps: int, awake: bool
) -> Row:
    """How much longer a step takes than simulated with the work as it was measured; median (least to most).

    Work of a stage for a micro-batch, a third of it forward: a sleep, which leaves the cores free, or matrix
    products, of at most one stage a core. The simulator's messages take no time, so that they count as
    overhead, or what they take between idle stages. `awake` keeps cores from sleep states: waking up is no
    overhead of the executor.
    """
    if kind == "products":
        stages = min(stages, len(os.sched_getaffinity(0)))
    given = Pipeline(kind, stages, micro_batches, milliseconds / 1e3, steps)
    with keep_awake(awake):
        sends, seconds = run_ranks(_run_stage, stages, given)[0]
    rows = torch.tensor(seconds, dtype=torch.float64)
    none = [0.0] * (stages - 1)
    work = float(rows[:, :, 1:].sum(dim=2).median()) / micro_batches
    row: Row = {"kind": kind, "stages": stages, "micro-batches": micro_batches, "work ms": 1e3 * work}
    row["step s"] = float(rows[:, :, 0].amax(dim=1).median())
    row["overhead with messages"] = _overhead(given, rows, (none, none))
    return row | {"without": _overhead(given, rows, sends)}


def _overhead(given: Pipeline, rows: torch.Tensor, sends: tuple[list[float], list[float]]) -> str:
    """How much longer steps [steps, stages, 3] take than simulated: median, minimum, maximum in percent."""
    schedule = pipeline_schedule(given.plan, 0)
    overheads: list[float] = []
    for step in rows:
        forward, backward = (step[:, i] / given.num_micro_batches for i in (1, 2))
        times = StageTimes(
            forward_seconds=tuple(forward.tolist()),
            backward_seconds=tuple(backward.tolist()),
            send_activation_seconds=tuple(sends[0]),
            send_gradient_seconds=tuple(sends[1]),
        )
        overheads.append(float(step[:, 0].max()) / simulate(schedule, times).step_seconds - 1)
    return f"{statistics.median(overheads):.1%} ({min(overheads):.1%} to {max(overheads):.1%})"


_SPIN_LOOP = """
import os, sys, time
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, {int(sys.argv[1])})
end = time.monotonic() + 600
while time.monotonic() < end:
    pass
"""


@contextmanager
def keep_awake(wanted: bool) -> Iterator[None]:
    """Inside, if `wanted`, an idle-priority loop on each core keeps the core from entering a sleep state."""
    cores = sorted(os.sched_getaffinity(0)) if wanted else []
    loops = [subprocess.Popen([sys.executable, "-c", _SPIN_LOOP, str(core)]) for core in cores]
    try:
        yield
    finally:
        for loop in loops:
            loop.terminate()
            loop.wait()
