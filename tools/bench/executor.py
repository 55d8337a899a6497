"""The overhead of the executor over the simulator, of 1F1B over gloo, each stage a process of its own."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.project import make_plan
from tests.support.spawn import as_rank, free_port
from tools.bench.harness import Row, case
from tools.bench.runs import make_run
from yuan_train.config.devices import Backend
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan
from yuan_train.parallel.apply import make_bridge, pipeline_schedule
from yuan_train.parallel.bridge import Boundary
from yuan_train.parallel.device import CPU
from yuan_train.parallel.executor import Executor, Stopwatch
from yuan_train.parallel.grid import Grid
from yuan_train.parallel.groups import init_distributed, make_groups, shutdown
from yuan_train.planner.evaluate.simulator import StageTimes, simulate
from yuan_train.profile.links import link_ends, measure_links
from yuan_train.schedule.messages import post_early

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
        model = ModelConfig(
            name="work",
            num_layers=self.num_stages,
            hidden_size=HIDDEN_SIZE,
            num_attention_heads=1,
            ffn_hidden_size=HIDDEN_SIZE,
            vocab_size=128,
            max_sequence_length=SEQUENCE_LENGTH,
        )
        return make_plan(make_run(model, batch=self.num_micro_batches), [[1] * self.num_stages])


class Work:
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

    def load(self, micro_batch: int) -> None:
        """There is no data."""

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

    def splitting(self, micro_batch: int, split: bool) -> AbstractContextManager[None]:
        """1F1B does not split backwards."""
        assert not split
        return nullcontext()

    def backward_weight(self, micro_batch: int) -> None:
        """1F1B does not split backwards."""
        raise AssertionError


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


def run_rank(rank: int, given: Pipeline, port: int, out: str) -> None:
    """Run one stage; rank 0 writes the seconds of messages and of every step to the file `out`."""
    as_rank(rank, given.num_stages, port)
    init_distributed(device=CPU, timeout_seconds=60)
    try:
        sends = _measure_sends(given)
        rows = _run_steps(given, rank)
        if rank == 0:
            torch.save((sends, rows), out)
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
    with tempfile.TemporaryDirectory() as folder, keep_awake(awake):
        out = str(Path(folder) / "rows.pt")
        mp.spawn(run_rank, args=(given, free_port(), out), nprocs=stages)
        sends, rows = torch.load(out)
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
