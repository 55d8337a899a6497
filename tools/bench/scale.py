"""Benchmarks of one rank among 1,024 and 8,192, on a fake process group: what it costs its host.

Nothing is sent: the groups are made, and their operations return at once. So the figures are one rank's own:
seconds and private memory of its set-up (the plan file, the data, the comparison of jobs, groups, buckets),
the groups of which it is a member, and a training step whose model does nothing. Seconds are processor time,
the least of the steps: other programs, which share caches and the cores of a virtual machine, only add to it.

Steps are taken with the operations that gloo gets, one for each range of a slice, and with those of nccl, one
for all ranges if they are equal. What torch itself takes of the reductions is measured by starting those of a
step again, without anything around them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tools.bench.harness import Row, case
from tools.bench.runs import bench_model, make_run, wide_plan
from yuan_train.config.plan import Plan, RankPlan
from yuan_train.config.plan_constraints import load_plan, save_plan
from yuan_train.config.run import LogConfig, RunConfig, Source
from yuan_train.data.indexed import HEADER, MAGIC, VERSION, IndexedWriter, bin_path, idx_path
from yuan_train.data.loader import SampleSpec, open_corpora
from yuan_train.models.transformer import Transformer
from yuan_train.parallel import transport
from yuan_train.parallel.executor import Executor
from yuan_train.parallel.groups import Groups
from yuan_train.parallel.transport import GlooTransport, NcclTransport
from yuan_train.parallel.zero import OwnedState
from yuan_train.train.agreement import check_same_job
from yuan_train.train.build import build
from yuan_train.train.engine import StepRequest, measure_step
from yuan_train.train.job import Position, prepare
from yuan_train.train.stage import Passes
from yuan_train.train.step import Trainer, train_step
from yuan_train.train.trace import device_clock

STEPS, WARM_UP = 30, 5
OPERATIONS = ("allreduce", "reduce", "broadcast", "reduce_scatter_single", "all_gather_single")
"""Those of a group that reductions and weight sync use, by torch's names for them."""
REDUCTION = ("start_grad_reduce", "finish_grad_reduce", "start_weight_sync", "finish_weight_sync")
SEQUENCE_LENGTH = 64
MODEL = bench_model(32, 512, name="scale", head_dim=8, ffn_hidden_size=32, attention="plain")
"""Small, but as in the published models each layer divides into as many ranges as it has owners."""


@dataclass(frozen=True)
class Shape:
    """Equal pipelines of equal stages, each a tensor-parallel group on a node."""

    pipelines: int
    stages: int
    width: int
    num_micro_batches: int = 32

    @property
    def num_ranks(self) -> int:
        return self.pipelines * self.stages * self.width


def make_plan(shape: Shape) -> Plan:
    """A plan of a shape, on cards that the catalogue knows."""
    cuts = [round(MODEL.num_layers * s / shape.stages) for s in range(shape.stages + 1)]
    stages = [(after - before, shape.width) for before, after in itertools.pairwise(cuts)]
    batch = shape.pipelines * shape.num_micro_batches
    run = make_run(MODEL, tokens=SEQUENCE_LENGTH, batch=batch)
    plan = wide_plan(run, [stages] * shape.pipelines, optimizer_sharding=True)
    types = ("A100-80G", "H100-80G")
    ranks = (
        RankPlan(rank=i, device=f"node-{i // 8}/{i % 8}", type=types[i // 8 % 2])
        for i in range(plan.world_size)
    )
    return replace(plan, ranks=tuple(ranks))


def run_of(plan: Plan, corpus: Path) -> RunConfig:
    """A run of the plan on the CPU, with a corpus of its own."""
    with IndexedWriter(corpus, dtype=np.dtype("<u2")) as writer:
        for length in range(20, 520):
            writer.add(np.arange(length, dtype="<u2") % MODEL.vocab_size)
    batch = plan.global_batch_size
    run = make_run(MODEL, tokens=SEQUENCE_LENGTH, batch=batch, steps=STEPS, precision="fp32")
    data = replace(run.data, train=(Source(prefix=str(corpus)),))
    return replace(run, data=data, log=LogConfig(every=10))


class NullStage:
    """In place of a stage runner: takes its micro-batches, and computes nothing."""

    def __init__(self, feed: Passes, *, takes: bool, is_last: bool) -> None:
        self._feed, self._takes, self._is_last = feed, takes, is_last
        self._unit = torch.ones((), requires_grad=True)
        self._hidden_BSH = torch.zeros(1, SEQUENCE_LENGTH, MODEL.hidden_size)
        self.loss = torch.zeros((), dtype=torch.float64)

    def begin(self, **_: Any) -> None:
        """Start on a batch."""

    def load(self, micro_batch: int) -> None:
        """Take a micro-batch."""
        if self._takes:
            self._feed.take(micro_batch)

    def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
        """A tensor for the next stage, or a loss, with a graph for the backward."""
        output = (self._hidden_BSH if hidden_BSH is None else hidden_BSH) * self._unit
        return output[0, 0, 0] if self._is_last else output

    def splitting(self, micro_batch: int, split: bool) -> AbstractContextManager[None]:
        """Around a backward; nothing is split."""
        return nullcontext()


class _FakeNccl(NcclTransport):
    """Issues what nccl would get; a fake operation never says that it has ended."""

    _polls = False


@contextmanager
def fake_ranks(num_ranks: int, rank: int, *, library: str = "gloo") -> Iterator[None]:
    """As rank `rank` of a world whose other ranks do not exist, and which uses the library's operations."""

    def fake_group(ranks: Sequence[int], **_: Any) -> object:
        return new_group(list(ranks), backend="fake")

    new_group = dist.new_group
    kind = {"gloo": GlooTransport, "nccl": _FakeNccl}[library]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        with (
            mock.patch.object(dist, "new_group", fake_group),
            mock.patch.object(transport, "_kind_of", lambda device, *, via_host: kind),
        ):
            yield
    finally:
        dist.destroy_process_group()


@case(
    "scale/rank",
    formats={
        **{"ranks": ",", "rank": ",", "set-up s": ".2f", "of that, plan file s": ".2f", "private MiB": ".0f"},
        **dict.fromkeys(("micro-batches ms", "rest ms", "step ms"), ".1f"),
        **dict.fromkeys(("reductions ms", "fake group's ms"), ".2f"),
    },
    costs={"set-up s": 0.3, "step ms": 0.3},
    shape=((16, 8, 8), (64, 16, 1), (128, 8, 8), (512, 16, 1)),
    place=(0.0, 0.5, 1.0),
    library=("gloo", "nccl"),
)
def rank(shape: Sequence[int], place: float, library: str) -> Row:
    """Set-up and 30 steps of the first rank, of one behind the middle, or of the last, of 32 micro-batches.

    `shape`: pipelines, their stages, ranks of each; what the fake group itself takes is no part of `step ms`.
    """
    large = Shape(*shape)
    with tempfile.TemporaryDirectory() as folder:
        # Modules are imported and torch is warm: that is no cost of the number of ranks.
        measure(Shape(2, 2, 1), 0, Path(folder), library=library, steps=1)
        number = min(int(place * large.num_ranks) + (0 < place < 1), large.num_ranks - 1)
        return measure(large, number, Path(folder), library=library)


@case(
    "scale/index",
    formats={"documents": ",", "first batch s": ".2f", "private MiB": ".1f"},
    documents=(100_000_000,),
)
def index(documents: int) -> Iterator[Row]:
    """A rank that maps an index of so many documents (20 bytes each): the first of a node, and another."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        write_index(prefix, documents)
        for name in ("the first, writes the files", "another, maps them"):
            yield {"documents": documents, "rank of the node": name} | measure_index(prefix)


def measure(shape: Shape, rank: int, folder: Path, *, library: str = "gloo", steps: int = STEPS) -> Row:
    """Set up one rank of a plan of this shape, run steps, and say what that took."""
    save_plan(folder / "plan.yaml", make_plan(shape))
    gc.collect()
    held, start = private_bytes(), time.process_time()
    plan = load_plan(folder / "plan.yaml")
    plan_seconds = time.process_time() - start
    run = run_of(plan, folder / "corpus")
    with fake_ranks(shape.num_ranks, rank, library=library):
        job = prepare(run, plan, Position(rank, shape.num_ranks, rank % 8, 8))
        # The others do not answer, so they cannot have other jobs.
        check_same_job(job)
        trainer, _ = build(job)
        setup_seconds = time.process_time() - start
        setup_bytes = private_bytes() - held
        trainer = _without_model(trainer)
        clock = device_clock(job.device)

        def take_step(step: int) -> None:
            first = step * plan.global_batch_size
            train_step(trainer, StepRequest(job.train, first_sample=first, lr=0.0, clip=1.0))
            measure_step(job, trainer, step + 1, clock)

        model = [_Timer(NullStage, "forward"), _Timer(torch.autograd, "backward")]
        timers = [_Timer(Executor, "run"), *(_Timer(OwnedState, name) for name in REDUCTION), *model]
        turns: list[tuple[float, ...]] = []
        with trainer.feed:
            for step in range(steps):
                with contextlib.ExitStack() as stack:
                    for timer in timers:
                        stack.enter_context(timer.running())
                    start = time.thread_time()
                    take_step(step)
                    total = time.thread_time() - start
                run_, started, *ended, forward, backward = [timer.read() for timer in timers]
                null = forward + backward
                turns.append((null, run_ - started - null, started + sum(ended), total - run_ - sum(ended)))
            reductions = _Recorder()
            with reductions.running():
                take_step(steps)
            torch_seconds = min(reductions.repeat() for _ in range(steps))
        number = _num_groups(trainer.runtime.groups, rank)
    _, micro_batches, reduction, rest = map(min, zip(*turns[min(WARM_UP, steps - 1) :], strict=True))
    row: Row = {"ranks": shape.num_ranks, "plan": f"{shape.pipelines} x {shape.stages} x {shape.width}"}
    row |= {"rank": rank, "operations of": library, "set-up s": setup_seconds}
    row |= {"of that, plan file s": plan_seconds, "private MiB": setup_bytes / 2**20, "groups": number}
    row |= {"micro-batches ms": micro_batches * 1e3, "reductions ms": reduction * 1e3, "rest ms": rest * 1e3}
    row |= {"operations": len(reductions.calls), "fake group's ms": torch_seconds * 1e3}
    return row | {"step ms": (micro_batches + reduction + rest - torch_seconds) * 1e3}


def _without_model(trainer: Trainer) -> Trainer:
    """A trainer whose stages compute nothing."""
    runtime = trainer.runtime
    stages = {
        stage: NullStage(trainer.feed, takes=part.has_embedding or part.has_head, is_last=part.has_head)
        for stage, part in cast(dict[int, Transformer], runtime.parts).items()
    }
    executor = Executor(cast(Any, stages), runtime.bridge, trainer.stopwatch)
    return replace(trainer, runners=cast(Any, stages), executor=executor)


class _Timer:
    """Adds up the seconds of the calls of a method or function, of this thread's processor time."""

    def __init__(self, kind: Any, name: str) -> None:
        self._kind, self._name, self._seconds = kind, name, 0.0

    def running(self) -> AbstractContextManager[object]:
        """While entered, the calls are timed."""
        method: Callable[..., Any] = getattr(self._kind, self._name)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return method(*arguments, **options)
            finally:
                self._seconds += time.thread_time() - start

        return mock.patch.object(self._kind, self._name, timed)

    def read(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _Recorder:
    """The operations that the reductions and the weight sync of a step start, to be started again."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._depth = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """While entered, operations are recorded."""
        with contextlib.ExitStack() as stack:
            for name in REDUCTION:
                stack.enter_context(
                    mock.patch.object(OwnedState, name, self._inside(getattr(OwnedState, name)))
                )
            for name in OPERATIONS:
                method = getattr(dist.ProcessGroup, name)
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, self._recorded(method)))
            yield

    def repeat(self) -> float:
        """Start all operations, and wait for all; the seconds that this takes."""
        start = time.thread_time()
        for work in [method(*arguments) for method, arguments in self.calls]:
            work.wait()
        return time.thread_time() - start

    def _inside(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(state: OwnedState) -> Any:
            self._depth += 1
            try:
                return method(state)
            finally:
                self._depth -= 1

        return run

    def _recorded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if self._depth:
                self.calls.append((method, arguments))
            return method(*arguments)

        return run


def _num_groups(groups: Groups, rank: int) -> int:
    """The groups of which a rank is a member, the world's own included."""
    edges = sum(rank in (edge.sender, edge.receiver) for edge in groups.edges)
    return 1 + edges + len(groups.owners) + (groups.tensor is not None) + len(groups.tree)


def private_bytes() -> int:
    """Memory of this process alone: not the page cache, which the processes of a node share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


def write_index(prefix: Path, num_documents: int) -> None:
    """A pair of token files of `num_documents` documents of 1 to 19 tokens, which take no room on disk."""
    chunk, num_bytes = 1 << 20, 0

    def lengths(first: int) -> np.ndarray:
        numbers = np.arange(first, min(first + chunk, num_documents), dtype=np.int64)
        return numbers * 2654435761 % 19 + 1

    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, num_documents, num_documents + 1))
        for first in range(0, num_documents, chunk):
            file.write(lengths(first).astype("<i4").tobytes())
        for first in range(0, num_documents, chunk):
            ends = num_bytes + np.cumsum(lengths(first) * 2)
            file.write(np.concatenate(([num_bytes], ends[:-1])).astype("<i8").tobytes())
            num_bytes = int(ends[-1])
        for first in range(0, num_documents + 1, chunk):
            file.write(np.arange(first, min(first + chunk, num_documents + 1), dtype="<i8").tobytes())
    with bin_path(prefix).open("wb") as file:
        file.truncate(num_bytes)


def measure_index(prefix: Path) -> Row:
    """Seconds of processor time to the first batch of a corpus, and the private memory that this takes."""
    held, start = private_bytes(), time.process_time()
    spec = SampleSpec(sequence_length=4096, seed=1, vocab_size=None)
    blend = open_corpora([(str(prefix), 1.0)], spec)
    blend.batch(0, 4)
    seconds = time.process_time() - start
    return {"first batch s": seconds, "private MiB": (private_bytes() - held) / 2**20}
