"""No plan deadlocks on cards: bridge and executor on virtual streams that share hardware queues."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.schedule.test_messages import early, loop, v_shape
from tests.support.streamed_fake import FakeReceive, World, find_deadlock, run_hosts
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import PipelinePlan, Plan, RankPlan, StagePlan
from yuan_train.config.run import ScheduleName
from yuan_train.parallel.apply import make_bridge, pipeline_schedule
from yuan_train.parallel.bridge import Boundary
from yuan_train.parallel.device import CPU
from yuan_train.parallel.executor import Executor, Stopwatch
from yuan_train.parallel.grid import Grid
from yuan_train.parallel.groups import Groups
from yuan_train.schedule.check import peak_in_flight
from yuan_train.schedule.messages import receive_for
from yuan_train.schedule.step import Schedule, Step, Workers, num_workers, one_worker_each

LAYERS = 6
SHAPE = (1, 1, 2)


@dataclass(frozen=True)
class Pipe:
    """One pipeline: the workers of its stages, micro-batches, depths; layers are shared evenly."""

    workers: Workers
    num_micro_batches: int = 8
    in_flight: tuple[int, ...] | None = None


def make_plan(schedule: ScheduleName, pipes: list[Pipe], cards: tuple[str, ...] = ("A100-80G",)) -> Plan:
    """A plan with one rank per worker; card types are dealt to ranks in turn."""
    pipelines: list[PipelinePlan] = []
    first = 0
    for pipe in pipes:
        count = len(pipe.workers)
        borders = [LAYERS * s // count for s in range(count + 1)]
        pipelines.append(
            PipelinePlan(
                micro_batch_size=1,
                num_micro_batches=pipe.num_micro_batches,
                stages=tuple(
                    StagePlan(
                        replicas=tuple((first + worker,) for worker in replicas),
                        layers=(borders[s], borders[s + 1]),
                        embedding=s == 0,
                        head=s == count - 1,
                        in_flight=pipe.in_flight[s] if pipe.in_flight else None,
                    )
                    for s, replicas in enumerate(pipe.workers)
                ),
            )
        )
        first += num_workers(pipe.workers)
    model = ModelConfig(
        name="toy",
        num_layers=LAYERS,
        hidden_size=2,
        num_attention_heads=1,
        ffn_hidden_size=2,
        vocab_size=4,
        max_sequence_length=1,
    )
    return Plan(
        model=model,
        sequence_length=1,
        global_batch_size=sum(pipe.num_micro_batches for pipe in pipes),
        schedule=schedule,
        ranks=tuple(RankPlan(rank=r, device=f"n/{r}", type=cards[r % len(cards)]) for r in range(first)),
        pipelines=tuple(pipelines),
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
            self.most_sent = max(self.most_sent, len(sent))
            self.most_held = max(self.most_held, len(sent) + len(self.executor._kept))
        while self._pending:
            self._pending.pop().wait()


def run(
    plan: Plan, *, polls: bool = False, change: Callable[[Schedule, Workers], Schedule] | None = None
) -> tuple[World, list[Rank]]:
    """Run all hosts of a plan; `change` is made to the schedules."""
    # What was there before is left out of the collection below.
    gc.freeze()
    world, grid = World(plan.world_size, polls=polls), Grid(plan)
    schedules = [pipeline_schedule(plan, p) for p in range(len(plan.pipelines))]
    if change is not None:
        schedules = [change(schedule, grid.workers(p)) for p, schedule in enumerate(schedules)]
    ranks = [Rank(world, grid, r, schedules[grid.coords[r].pipeline]) for r in range(plan.world_size)]
    run_hosts({rank.number: rank.steps() for rank in ranks}, {rank.number: rank.is_ready for rank in ranks})
    world.sum_reductions()
    gc.collect()
    gc.unfreeze()
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

PLANS = {
    "1f1b": make_plan("1f1b", [Pipe(one_worker_each(4))]),
    "1f1b on two": make_plan("1f1b", [Pipe(one_worker_each(2))]),
    "gpipe": make_plan("gpipe", [Pipe(one_worker_each(3))]),
    "zero bubble": make_plan("zero_bubble", [Pipe(one_worker_each(3))]),
    "V": make_plan("zero_bubble", [Pipe(v_shape(3))]),
    "interleaved": make_plan("interleaved_1f1b", [Pipe(loop(3, 2))]),
    "interleaved 0 1 0": make_plan("interleaved_1f1b", [Pipe(((0,), (1,), (0,)), 6)]),
    "zero bubble 0 1 0": make_plan("zero_bubble", [Pipe(((0,), (1,), (0,)), 6)]),
    "deep": make_plan("1f1b", [Pipe(one_worker_each(4), 12, (5, 4, 2, 1))]),
    "deeper": make_plan("1f1b", [Pipe(one_worker_each(3), 12, (7, 2, 1))]),
    "even": make_plan("1f1b", [Pipe(one_worker_each(3), 8, (3, 3, 3))]),
    "replicas 1 2": make_plan("1f1b", [Pipe(((0,), (1, 2)))]),
    "replicas 2 1": make_plan("1f1b", [Pipe(((0, 1), (2,)))]),
    "replicas 1 2 1": make_plan("1f1b", [Pipe(((0,), (1, 2), (3,)))]),
    "two pipelines": make_plan("1f1b", [Pipe(one_worker_each(3)), Pipe(one_worker_each(2), 5)]),
    "three pipelines": make_plan(
        "1f1b", [Pipe(one_worker_each(1), 3), Pipe(((0,), (1, 2))), Pipe(one_worker_each(3), 4, (4, 3, 1))]
    ),
    "two interleaved": make_plan("interleaved_1f1b", [Pipe(loop(3, 2), 6), Pipe(loop(2, 3), 4)]),
    "two of zero bubble": make_plan("zero_bubble", [Pipe(v_shape(3)), Pipe(one_worker_each(2), 5)]),
    "two libraries": make_plan("1f1b", [Pipe(one_worker_each(4))], ("A100-80G", "A100-80G", "MI300X")),
}


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
        for layer, gradient in rank.gradients.items():
            assert float(gradient) == pytest.approx(expected[layer], rel=1e-12)


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
    plan = make_plan("1f1b", [Pipe(one_worker_each(num_stages), num_stages + 3)])
    _, ranks = run(plan, polls=polls)
    for rank in ranks:
        assert rank.most_held <= peak_in_flight(rank.program) + 1
        if polls:
            assert rank.most_sent <= 2
