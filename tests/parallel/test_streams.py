"""No plan deadlocks on cards: bridge and executor on virtual streams that share hardware queues."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tests.parallel.test_grid import run_of
from tests.schedule.test_messages import early
from tests.support.project import parse_plan
from tests.support.streamed_fake import FakeReceive, World, find_deadlock, run_hosts
from yuan_train.config.plan import Plan
from yuan_train.config.run import ScheduleName
from yuan_train.parallel.apply import make_bridge, pipeline_schedule
from yuan_train.parallel.device import CPU
from yuan_train.parallel.executor import Boundary, Executor, Stopwatch
from yuan_train.parallel.grid import Grid
from yuan_train.parallel.groups import Groups
from yuan_train.schedule.schedules import forward_only, peak_in_flight, receive_for
from yuan_train.schedule.step import Schedule, Step, Workers

LAYERS = 6
SHAPE = (1, 1, 2)


def make_plan(schedule: ScheduleName, text: str, in_flight: Sequence[int | None] = ()) -> Plan:
    """A plan of LAYERS layers in the short form of `parse_plan`, with depths or without."""
    return parse_plan(
        run_of(LAYERS, 1), text, schedule=schedule, in_flight=in_flight or [None] * text.count("@")
    )


def weight_of(layer: int) -> float:
    return 1.0 + layer / 8


def sample(pipeline: int, micro_batch: int) -> torch.Tensor:
    return torch.full(SHAPE, 1.0 + pipeline / 16 + micro_batch / 32, dtype=torch.float64)


class Stage:
    """The compute of one stage: each layer multiplies by a weight, and the last stage sums to a loss."""

    def __init__(self, rank: Rank, number: int) -> None:
        self.rank, self.number = rank, number
        self.plan = rank.grid.pipeline(rank.coord).stages[number]
        self.split: list[Callable[[], None]] | None = None
        self.deferred: dict[int, list[Callable[[], None]]] = {}

    def load(self, micro_batch: int) -> None:
        pass

    def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
        x = sample(self.rank.coord.pipeline, micro_batch) if hidden_BSH is None else hidden_BSH
        x = x.clone().requires_grad_() if hidden_BSH is None else x
        self.rank.compute(f"the forward of {micro_batch} on stage {self.number}")
        for layer in range(*map(int, self.plan.layers)):
            x = Layer.apply(x, self, layer)
        # Without layers the output must still be a tensor of its own.
        return x.sum() if self.plan.head else x * 1.0

    @contextmanager
    def splitting(self, micro_batch: int, split: bool) -> Iterator[None]:
        self.split = self.deferred.setdefault(micro_batch, []) if split else None
        self.rank.compute(f"the backward of {micro_batch} on stage {self.number}")
        yield
        self.split = None

    def backward_weight(self, micro_batch: int) -> None:
        self.rank.compute(f"the weights' backward of {micro_batch} on stage {self.number}")
        for weight_grad in self.deferred.pop(micro_batch):
            weight_grad()


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: Stage, layer: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.stage, ctx.layer = stage, layer
        return x * weight_of(layer)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,), stage, layer = ctx.saved_tensors, ctx.stage, ctx.layer

        def weight_grad() -> None:
            stage.rank.add_gradient(layer, (gradients[0] * x).sum())

        if stage.split is None:
            weight_grad()
        else:
            stage.split.append(weight_grad)
        return gradients[0] * weight_of(layer), None, None


@dataclass
class Rank:
    """One rank: its bridge and executor, and the gradients of its layers, which owners sum."""

    world: World
    grid: Grid
    number: int
    schedule: Schedule
    gradients: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    most_kept: int = 0
    """The most micro-batches in flight."""
    most_sent: int = 0
    """The most gradients kept after they were sent."""
    most_held: int = 0
    """The most micro-batches in flight and gradients sent, together."""

    def __post_init__(self) -> None:
        self.coord = self.grid.coords[self.number]
        via_host = self.grid.plan.via_host
        edges: dict[Any, Any] = {
            edge: self.world.transport(edge, self.number, ends, via_host=via_host(ends))
            for edge in self.grid.edges
            if self.number in (ends := (edge.sender, edge.receiver))
        }
        boundary = Boundary(SHAPE, torch.float64, CPU.torch)
        self.bridge = make_bridge(self.grid, self.coord, Groups(edges, {}), boundary, self.schedule)
        works = {stage: Stage(self, stage) for stage in self.coord.stages}
        self.executor = Executor(works, self.bridge, Stopwatch(CPU))
        stages = self.grid.pipeline(self.coord).stages
        held = [layer for s in self.coord.stages for layer in range(*map(int, stages[s].layers))]
        self.gradients = {layer: torch.zeros((), dtype=torch.float64) for layer in held}
        counts = [step for step in self.program if step.kind == "forward"]
        self._missing = {
            layer: sum(step.stage == s for step in counts)
            for s in self.coord.stages
            for layer in range(*map(int, stages[s].layers))
        }
        self._turns = sorted(held, reverse=True)
        self._pending: list[Any] = []

    @property
    def program(self) -> tuple[Step, ...]:
        return self.schedule[self.coord.worker]

    def compute(self, label: str) -> None:
        self.world.compute(self.number, label)

    def add_gradient(self, layer: int, gradient: torch.Tensor) -> None:
        """Accumulate; a layer's last gradient starts its reduction, in descending order, in the backward."""
        self.gradients[layer] += gradient.detach()
        self._missing[layer] -= 1
        while self._turns and not self._missing[self._turns[0]]:
            ready = self._turns.pop(0)
            owners = self.owners(ready)
            if len(owners) > 1:
                transport = self.world.transport(owners, self.number, owners)
                what = f"the reduction of layer {ready}"
                self._pending.append(transport.all_reduce(self.gradients[ready], what))

    def owners(self, layer: int) -> tuple[int, ...]:
        stages = [stage for pipeline in self.grid.plan.pipelines for stage in pipeline.stages]
        return tuple(r for stage in stages if layer in range(*map(int, stage.layers)) for r in stage.ranks)

    def is_ready(self, step: Step) -> bool:
        """Whether the values that a step needs exist."""
        receive = receive_for(step, self.grid.workers(self.coord.pipeline))
        if receive is None:
            return True
        posted = self.bridge._received[receive]
        assert isinstance(posted, FakeReceive)
        return posted.is_sent

    def steps(self) -> Iterator[Step]:
        for step in self.executor.steps(self.program):
            yield step
            sent = [s for queue in self.bridge._sent.values() for s, _ in queue if "gradient" in s.kind]
            kept = len(self.executor._kept)
            self.most_kept, self.most_sent = max(self.most_kept, kept), max(self.most_sent, len(sent))
            self.most_held = max(self.most_held, len(sent) + kept)
        while self._pending:
            self._pending.pop().wait()


def run(
    plan: Plan, *, polls: bool = False, change: Callable[[Schedule, Workers], Schedule] | None = None
) -> tuple[World, list[Rank]]:
    """Run all hosts of a plan; `change` is made to the schedules."""
    # What was there before is left out of the collection below, as in tests/conftest.py.
    gc.freeze()
    world, grid = World(plan.world_size, polls=polls), Grid(plan)
    schedules = [pipeline_schedule(plan, p) for p in range(len(plan.pipelines))]
    if change is not None:
        schedules = [change(schedule, grid.workers(p)) for p, schedule in enumerate(schedules)]
    ranks = [Rank(world, grid, r, schedules[grid.coords[r].pipeline]) for r in range(plan.world_size)]
    run_hosts({rank.number: rank.steps() for rank in ranks}, {rank.number: rank.is_ready for rank in ranks})
    world.sum_reductions()
    gc.collect()
    assert not world.faults
    return world, ranks


def gradients_of_one_process(plan: Plan) -> list[float]:
    weights = [torch.tensor(weight_of(i), dtype=torch.float64, requires_grad=True) for i in range(LAYERS)]
    for p, pipeline in enumerate(plan.pipelines):
        for m in range(pipeline.num_micro_batches):
            x = sample(p, m)
            for weight in weights:
                x = x * weight
            x.sum().backward()
    return [float(weight.grad) for weight in weights if weight.grad is not None]


MACHINES = [(queues, synchronise) for queues in (1, 2, 8) for synchronise in (False, True)]

ROW, THREE, PAIR = "1@0 | 2@1 | 1@2 | 2@3", "2@0 | 2@1 | 2@2", "3@3 | 3@4"
V, LOOP = "1@0 | 1@1 | 1@2 | 1@2 | 1@1 | 1@0", "1@0 | 1@1 | 1@2 | 1@0 | 1@1 | 1@2"

PLANS = {
    "1f1b": make_plan("1f1b", f"1x8: {ROW}"),
    "1f1b on two": make_plan("1f1b", "1x8: 3@0 | 3@1"),
    "gpipe": make_plan("gpipe", f"1x8: {THREE}"),
    "zero bubble": make_plan("zero_bubble", f"1x8: {THREE}"),
    "V": make_plan("zero_bubble", f"1x8: {V}"),
    "interleaved": make_plan("interleaved_1f1b", f"1x8: {LOOP}"),
    "interleaved 0 1 0": make_plan("interleaved_1f1b", "1x6: 2@0 | 2@1 | 2@0"),
    "zero bubble 0 1 0": make_plan("zero_bubble", "1x6: 2@0 | 2@1 | 2@0"),
    "deep": make_plan("1f1b", f"1x12: {ROW}", (5, 4, 2, 1)),
    "deeper": make_plan("1f1b", f"1x12: {THREE}", (7, 2, 1)),
    "even": make_plan("1f1b", f"1x8: {THREE}", (3, 3, 3)),
    "replicas 1 2": make_plan("1f1b", "1x8: 3@0 | 3@1;2"),
    "replicas 2 1": make_plan("1f1b", "1x8: 3@0;1 | 3@2"),
    "replicas 1 2 1": make_plan("1f1b", "1x8: 2@0 | 2@1;2 | 2@3"),
    "two pipelines": make_plan("1f1b", f"1x8: {THREE} / 1x5: {PAIR}"),
    "three pipelines": make_plan(
        "1f1b", "1x3: 6@0 / 1x8: 3@1 | 3@2;3 / 1x4: 2@4 | 2@5 | 2@6", (None, None, None, 4, 3, 1)
    ),
    "two interleaved": make_plan("interleaved_1f1b", f"1x6: {LOOP} / 1x4: 1@3 | 1@4 | 1@3 | 1@4 | 1@3 | 1@4"),
    "two of zero bubble": make_plan("zero_bubble", f"1x8: {V} / 1x5: {PAIR}"),
}
_kinds = ("A100-80G", "A100-80G", "MI300X", "A100-80G")
PLANS["two libraries"] = replace(
    PLANS["1f1b"],
    ranks=tuple(replace(rank, type=kind) for rank, kind in zip(PLANS["1f1b"].ranks, _kinds, strict=True)),
)


@pytest.mark.parametrize("name", PLANS)
def test_no_plan_deadlocks_on_cards(name: str) -> None:
    plan = PLANS[name]
    assert any(Grid(plan).via_host.values()) == (name == "two libraries")
    world, ranks = run(plan)
    for queues, synchronise in MACHINES:
        deadlock = find_deadlock(world, num_queues=queues, synchronise=synchronise)
        assert deadlock is None, f"{queues} queues, synchronise {synchronise}: {deadlock}"
    expected = gradients_of_one_process(plan)
    for rank in ranks:
        most = peak_in_flight(rank.program)
        assert rank.most_kept <= most and (rank.most_kept == most or plan.schedule == "zero_bubble")
        for layer, gradient in rank.gradients.items():
            assert float(gradient) == pytest.approx(expected[layer], rel=1e-12)


def test_evaluation_keeps_nothing() -> None:
    def evaluate(_: Schedule, workers: Workers) -> Schedule:
        return forward_only(workers=workers, num_micro_batches=16)

    _, ranks = run(PLANS["1f1b"], change=evaluate)
    assert max(rank.most_kept for rank in ranks) <= 1
    assert not any(bool(gradient) for rank in ranks for gradient in rank.gradients.values())


@pytest.mark.parametrize("name", ["1f1b", "1f1b on two", "zero bubble", "V", "interleaved 0 1 0", "deep"])
def test_receives_that_are_all_posted_early_deadlock(name: str) -> None:
    """The machine can tell: with every receive posted at the start, a synchronisation waits for ever."""
    world, _ = run(PLANS[name], change=early)
    found = find_deadlock(world, num_queues=8, synchronise=True)
    assert found is not None and "waits for the receive" in found
    assert find_deadlock(world, num_queues=1) is not None


def test_reductions_in_another_order_deadlock() -> None:
    """Two ranks that reduce the same two layers in opposite orders, on a group for each layer."""
    world = World(2)
    for rank, order in ((0, "ab"), (1, "ba")):
        world.compute(rank, "the last backward")
        ends = [world.transport(key, rank, (0, 1)).all_reduce(torch.ones(1), f"sum {key}") for key in order]
        for end in ends:
            end.wait()
    assert find_deadlock(world, num_queues=8) is None
    found = find_deadlock(world, num_queues=1)
    assert found is not None and "sum a" in found and "sum b" in found


@pytest.mark.parametrize("num_stages", [4, 8, 16])
@pytest.mark.parametrize("polls", [False, True])
def test_sent_gradients_are_let_go(num_stages: int, polls: bool) -> None:
    """What the planner counts: the micro-batches in flight, and one message that is being sent. A host that
    runs ahead sees no message arrive, and learns it from later ones; at the end of a step no more come, but
    each gradient that it then keeps takes the place of a micro-batch that has left."""
    ends = [LAYERS * s // num_stages for s in range(num_stages + 1)]
    stages = (f"{after - before}@{s}" for s, (before, after) in enumerate(itertools.pairwise(ends)))
    plan = make_plan("1f1b", f"1x{num_stages + 3}: {' | '.join(stages)}")
    _, ranks = run(plan, polls=polls)
    for rank in ranks:
        assert rank.most_held <= peak_in_flight(rank.program) + 1
        if polls:
            assert rank.most_sent <= 2
