"""What a plan costs: seconds and bytes of each stage, and of the step, from the simulation of its schedule.

A step is the forwards and backwards of every pipeline. The owners of the same part of the model reduce its
gradients bucket by bucket while the last backward still runs and other stages drain, so that only what
outlasts all compute counts. Then the tied embedding is reduced over all that hold it, and every card runs its
optimizer step. With a sharded optimizer each owner updates its share, and the weights come back bucket by
bucket while the next step's forward begins, which waits where they come too late:

    step = compute + gradient reductions that outlast it
           + tied embedding + slowest optimizer step + longest wait for weights

Which parts are hidden follows from what is on its way between nodes: messages, gradient reductions, weights.
Every ring that leaves a node, and every message from or to another node, is a flow through the node's NIC;
the flows that are under way at a time have equal parts of it. With F_v flows through node v, a bucket that
would take T(F) seconds with F flows on its busiest NIC all the time goes on at the rate 1 / T(max_v F_v),
over the nodes v that its own rings pass; it is through when the integral of its rate is 1. Between two events
(a bucket starts or ends, a message does) all rates are constant.

Messages keep the times of the pipelines' simulation: what the rings take from them is not counted.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Forecast, Plan, StageForecast
from yuan_train.planner.costs.grad_reduce import (
    BucketCost,
    PlacedPlan,
    PlanCards,
    bucket_costs,
    check_alike,
    place_plan,
    state_shares,
    tied_embedding_seconds,
)
from yuan_train.planner.costs.links import Topology, broadcast_seconds, find_route, message_seconds
from yuan_train.planner.costs.unit_costs import Costs, Source, UnitCost
from yuan_train.planner.costs.workload import Replica
from yuan_train.planner.evaluate.simulator import Simulation, StageTimes, program_shape, simulate_schedule
from yuan_train.planner.evaluate.stage_cost import (
    StageCost,
    pipeline_copies,
    pipeline_pages,
    stage_cost,
    sum_over_cards,
)
from yuan_train.planner.native.core import Sent
from yuan_train.schedule.schedules import ProgramShape
from yuan_train.schedule.step import Workers


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a plan costs, part by part."""

    stages: tuple[StageCost, ...]
    simulations: tuple[Simulation, ...]
    """One per pipeline."""
    times: tuple[StageTimes, ...]
    workers: tuple[Workers, ...]
    compute_seconds: float
    """Until the last backward of any pipeline ends."""
    grad_reduce_seconds: float
    """What the gradient reductions add to that."""
    tied_embedding_seconds: float
    """Gradient reduction of the tied embedding; with a sharded optimizer its weights' way back too."""
    update_seconds: float
    """The slowest card's optimizer step."""
    weight_sync_seconds: float
    """How long forwards wait for the weights of a sharded optimizer."""

    @property
    def step_seconds(self) -> float:
        return (
            self.compute_seconds
            + self.grad_reduce_seconds
            + self.tied_embedding_seconds
            + self.update_seconds
            + self.weight_sync_seconds
        )

    @property
    def stall_seconds(self) -> float:
        """The longest that a worker waits for copies, as part of `compute_seconds`."""
        return max(max(simulation.stall_seconds) for simulation in self.simulations)

    @property
    def disk_bytes(self) -> float:
        """What all cards write to disks in a step, and read."""
        cards: dict[str, float] = {}
        for stage in self.stages:
            cards |= {card.name: stage.disk_bytes for card in stage.cards}
        return sum(cards.values())

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def source(self) -> Source:
        """`measured` if the costs of all stages are."""
        return "measured" if all(stage.source == "measured" for stage in self.stages) else "estimated"

    @property
    def bubble_fraction(self) -> float:
        """Share of the workers' step time in which they run no forward or backward."""
        busy = sum(sum(simulation.busy_seconds) for simulation in self.simulations)
        count = sum(len(simulation.busy_seconds) for simulation in self.simulations)
        return 1.0 - busy / (self.step_seconds * count) if self.step_seconds else 0.0


def _simulate(costs: Costs, plan: Plan, p: int, shape: ProgramShape, times: StageTimes) -> Simulation:
    """A step of pipeline p, its copies among it."""
    pipeline = plan.pipelines[p]
    leaves = any(stage.activation_offload for stage in pipeline.stages)
    return simulate_schedule(
        shape,
        times,
        sends=costs.problem.send_mode,
        copies=pipeline_copies(plan, p, shape) if leaves else None,
        pages=pipeline_pages(pipeline, shape),
    )


def cost_plan(costs: Costs, plan: Plan) -> PlanCost:
    """The cost of any valid plan. Raises PlanError if a card is not in the cluster, has another type there,
    or lacks the precision; and for pipelines that divide the experts of a layer differently, which are not
    priced."""
    costs = costs.for_plan(plan)
    placed = place_plan(costs, plan)
    check_alike(plan)
    shapes = [program_shape(plan, p) for p in range(len(plan.pipelines))]
    rows = _stage_rows(costs, placed, shapes)
    sends = send_seconds(costs.topology, rows)
    times = [_stage_times(row, *own) for row, own in zip(rows, sends, strict=True)]
    simulations: list[Simulation] = []
    simulated: dict[tuple[object, ...], Simulation] = {}
    for p, pipeline in enumerate(plan.pipelines):
        leaves = any(stage.activation_offload or stage.parameter_offload for stage in pipeline.stages)
        key = (times[p], shapes[p], p if leaves else -1)
        if key not in simulated:
            simulated[key] = _simulate(costs, plan, p, shapes[p], times[p])
        simulations.append(simulated[key])
    stages = [stage for row in rows for stage in row]
    compute = max(simulation.step_seconds for simulation in simulations)
    buckets = bucket_costs(costs, placed)

    def messages(after: float) -> list[MessageFlow]:
        if not any(bucket.crossing for bucket in buckets):
            return []
        return message_flows(costs.topology, plan, placed.cards, simulations, after=after)

    reduce_end = grad_reduce_end(plan, buckets, stages, simulations, messages)
    return PlanCost(
        stages=tuple(stages),
        simulations=tuple(simulations),
        times=tuple(times),
        workers=tuple(pipeline.workers for pipeline in plan.pipelines),
        compute_seconds=compute,
        grad_reduce_seconds=reduce_end - compute,
        tied_embedding_seconds=tied_embedding_seconds(
            costs,
            _owners_of_ends(placed, 0),
            _owners_of_ends(placed, -1) if costs.ties else [],
            sharded=plan.optimizer_sharding,
        ),
        update_seconds=max(stage.update_seconds for stage in stages),
        weight_sync_seconds=exposed_weight_sync_seconds(buckets, stages, simulations),
    )


def cost_stages(costs: Costs, plan: Plan) -> list[StageCost]:
    """The costs of a plan's stages, memory included, without a simulation of its step."""
    costs = costs.for_plan(plan)
    shapes = [program_shape(plan, p) for p in range(len(plan.pipelines))]
    return [stage for row in _stage_rows(costs, place_plan(costs, plan), shapes) for stage in row]


def _stage_rows(costs: Costs, placed: PlacedPlan, shapes: Sequence[ProgramShape]) -> list[list[StageCost]]:
    plan, shares = placed.plan, state_shares(costs, placed)
    rows: list[list[StageCost]] = []
    for p, pipeline in enumerate(plan.pipelines):
        row = [
            stage_cost(costs, plan, own, p, s, shares=shares[p, s], shape=shapes[p])
            for s, own in enumerate(placed.cards[p])
        ]
        rows.append(sum_over_cards(plan, pipeline, row))
    return rows


def _owners_of_ends(placed: PlacedPlan, s: int) -> list[Replica]:
    """The replicas of stage s of all pipelines; each card by itself where each has all but experts whole."""
    replicas = [replica for row in placed.cards for replica in row[s]]
    whole = placed.plan.divides_experts
    return [(card,) for replica in replicas for card in replica] if whole else replicas


def _stage_times(
    stages: Sequence[StageCost], activation_seconds: tuple[float, ...], gradient_seconds: tuple[float, ...]
) -> StageTimes:
    """What the simulator needs of a pipeline: its stages' compute, and the messages between them."""
    parts = tuple(stage.leaving and stage.leaving.times for stage in stages)
    pages = tuple(stage.pages and stage.pages.times for stage in stages)
    return StageTimes(
        forward_seconds=tuple(stage.forward_seconds for stage in stages),
        backward_seconds=tuple(stage.backward_seconds for stage in stages),
        weight_seconds=tuple(stage.weight_seconds for stage in stages),
        parts=parts if any(parts) else (),
        pages=pages if any(pages) else (),
        send_activation_seconds=activation_seconds,
        send_gradient_seconds=gradient_seconds,
    )


def make_forecast(costs: Costs, plan: Plan, cost: PlanCost, *, lower_bound_seconds: float) -> Forecast:
    """The forecast to store in a plan; the bound is at most the plan's own step."""
    problem, splits = costs.problem, plan.schedule == "zero_bubble"
    return Forecast(
        step_seconds=cost.step_seconds,
        tokens_per_second=problem.global_batch_size * problem.sequence_length / cost.step_seconds,
        bubble_fraction=cost.bubble_fraction,
        lower_bound_seconds=min(lower_bound_seconds, cost.step_seconds),
        source=cost.source,
        stages=tuple(
            StageForecast(
                pipeline=stage.pipeline,
                stage=stage.stage,
                forward_seconds=stage.forward_seconds,
                backward_seconds=stage.backward_seconds,
                weight_seconds=stage.weight_seconds if splits else None,
                peak_memory_bytes=stage.memory.total,
                memory=stage.memory,
                host_memory_bytes=stage.host_bytes,
                disk_bytes=stage.disk_bytes,
                # The longest that one of its workers waits for copies.
                stall_seconds=max(
                    cost.simulations[stage.pipeline].stall_seconds[worker]
                    for worker in cost.workers[stage.pipeline][stage.stage]
                ),
            )
            for stage in cost.stages
        ),
    )


class MessageFlow(NamedTuple):
    """A message between two nodes, over their NICs; in seconds from the step's start."""

    start: float
    end: float
    nodes: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class BucketFlow:
    """What is under way of a bucket."""

    cards: Sequence[Card]
    crossing: Mapping[str, int]
    """How many of its rings pass each node's NIC."""
    seconds: Callable[[int], float]
    """Of all of it, with so many flows on the busiest NIC on its way."""
    ready: float
    """Before this it cannot start."""


def run_transfers(
    transfers: Sequence[BucketFlow],
    messages: Sequence[MessageFlow] = (),
    *,
    later: Callable[[int], float] = lambda i: 0.0,
    ended: Callable[[int, float, float], None] = lambda i, start, end: None,
) -> list[float]:
    """When each transfer is through. On each card those that leave its node run one after the other, in the
    order given, and so do those that do not: they take other links.

    `later(i)` is by how much transfer i is ready later than it says, asked when its cards are free of all
    before it; `ended(i, start, end)` is told of each that is through.
    """
    run = _Run(transfers, messages)
    while run.num_left:
        while run.free:
            i = run.free.pop()
            heapq.heappush(run.waiting, (max(run.now, transfers[i].ready + later(i)), i))
        run.start_ready()
        for i in run.advance():
            ended(i, run.starts[i], run.ends[i])
    return run.ends


@dataclass
class _Run:
    """Transfers at a time of their run."""

    transfers: Sequence[BucketFlow]
    messages: Sequence[MessageFlow]
    now: float = 0.0
    waiting: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Transfers whose cards are free, by when they are ready."""
    active: dict[int, float] = field(default_factory=dict[int, float])
    """What remains of each transfer under way; 1: all of it."""

    def __post_init__(self) -> None:
        count = len(self.transfers)
        self.starts, self.ends = [0.0] * count, [0.0] * count
        self.num_left = count
        self.followers: list[list[int]] = [[] for _ in range(count)]
        self.num_before = [0] * count
        """Transfers before each, on its cards, that are not through."""
        last: dict[tuple[Card, bool], int] = {}
        for i, transfer in enumerate(self.transfers):
            own = [(card, bool(transfer.crossing)) for card in transfer.cards]
            before = {last[key] for key in own if key in last}
            self.num_before[i] = len(before)
            for j in before:
                self.followers[j].append(i)
            last.update(dict.fromkeys(own, i))
        self.free = [i for i in range(count) if not self.num_before[i]]
        """Whose cards have become free."""
        self.flows: Counter[str] = Counter()
        crossed = {node for transfer in self.transfers for node in transfer.crossing}
        # Of messages, the changes in the flows through the nodes that rings pass, the next one last.
        self.changes = sorted(
            (
                (time, change, node)
                for message in self.messages
                for node in message.nodes
                if node in crossed
                for time, change in ((message.start, 1), (message.end, -1))
            ),
            reverse=True,
        )

    def start_ready(self) -> None:
        """Go on to when something is under way, and start what is ready then."""
        if not self.active:
            self.now = max(self.now, self.waiting[0][0])
        while self.waiting and self.waiting[0][0] <= self.now:
            _, i = heapq.heappop(self.waiting)
            self.active[i], self.starts[i] = 1.0, self.now
            self.flows.update(self.transfers[i].crossing)
        while self.changes and self.changes[-1][0] <= self.now:
            _, change, node = self.changes.pop()
            self.flows[node] += change

    def advance(self) -> list[int]:
        """Go on to the next event; the transfers that are through then."""
        seconds = {
            i: self.transfers[i].seconds(max((self.flows[v] for v in self.transfers[i].crossing), default=1))
            for i in self.active
        }
        done = {i: self.now + left * seconds[i] for i, left in self.active.items()}
        until = min(
            *done.values(),
            self.waiting[0][0] if self.waiting else math.inf,
            self.changes[-1][0] if self.changes else math.inf,
        )
        # Compared by time, not by what remains: a remainder may be too short for the clock to move.
        through = [i for i, end in done.items() if end <= until]
        for i, left in self.active.items():
            if done[i] > until:
                self.active[i] = left - (until - self.now) / seconds[i]
        self.now = until
        for i in through:
            self._end(i)
        return through

    def _end(self, i: int) -> None:
        del self.active[i]
        self.ends[i] = self.now
        self.num_left -= 1
        self.flows.subtract(self.transfers[i].crossing)
        for j in self.followers[i]:
            self.num_before[j] -= 1
            if not self.num_before[j]:
                self.free.append(j)


# --- messages between stages --------------------------------------------------------------------------------


@dataclass(frozen=True)
class EdgeFlows:
    """How many messages of an edge cross the NICs at a time, by node. Equal pipelines run in step, so the
    same edge of all of them is busy at once; different edges of a pipeline take turns."""

    leaving: Mapping[str, int]
    entering: Mapping[str, int]

    def sharers(self, source: Card, target: Card) -> int:
        """How many messages share the busier NIC of a message's two nodes; 1 inside a node."""
        return max(self.leaving[source.node], self.entering[target.node]) if source.node != target.node else 1


def edge_flows(edges: Iterable[tuple[Card, Card]]) -> EdgeFlows:
    """The flows of these messages (source, target)."""
    crossing = [(a.node, b.node) for a, b in edges if a.node != b.node]
    return EdgeFlows(Counter(a for a, _ in crossing), Counter(b for _, b in crossing))


def send_seconds(
    topology: Topology, rows: Sequence[Sequence[StageCost]]
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Of each pipeline of stages, by edge: seconds of a hidden state to the next stage, and of its gradient
    back."""
    flows: dict[tuple[int, bool], EdgeFlows] = {}
    for s, back in itertools.product(range(max(map(len, rows)) - 1), (False, True)):
        both = (row[s : s + 2] for row in rows if len(row) > s + 1)
        flows[s, back] = edge_flows((x[0], y[0]) for a, b in both for x, y in _pairs(a, b, back=back))

    def seconds(row: Sequence[StageCost], *, back: bool) -> tuple[float, ...]:
        edges = enumerate(itertools.pairwise(row))
        return tuple(_edge_seconds(topology, *ends, flows[s, back], back=back) for s, ends in edges)

    return [(seconds(row, back=False), seconds(row, back=True)) for row in rows]


def _edge_seconds(
    topology: Topology, sender: StageCost, receiver: StageCost, flows: EdgeFlows, *, back: bool
) -> float:
    """Seconds of a hidden state from a stage to the next one, or of its gradient back: from first card to
    first card, then broadcast inside the tensor-parallel group that receives it; the slowest of the
    replicas' pairs. 0 if sender and receiver are the same cards. `flows` are those of this edge."""
    size, pairs = sender.sent_bytes, _pairs(sender, receiver, back=back)

    def seconds(source: Card, target: Replica) -> float:
        route, sharers = find_route(topology, source, target[0]), flows.sharers(source, target[0])
        return message_seconds(route, size, sharers=sharers) + broadcast_seconds(topology, target, size)

    return max((seconds(source[0], target) for source, target in pairs if source != target), default=0.0)


def _pairs(stage: StageCost, following: StageCost, *, back: bool) -> list[tuple[Replica, Replica]]:
    """Which replica sends to which: micro-batch m goes from replica m mod n to replica m mod n', or back."""
    ends = (following, stage) if back else (stage, following)
    sources, targets = (end.replicas for end in ends)
    count = math.lcm(len(sources), len(targets))
    return [(sources[i % len(sources)], targets[i % len(targets)]) for i in range(count)]


def message_flows(
    topology: Topology, plan: Plan, cards: PlanCards, simulations: Sequence[Simulation], *, after: float
) -> list[MessageFlow]:
    """The messages over NICs that arrive after a time, of all pipelines; by their simulations."""
    late: dict[int, list[Sent]] = {}
    flows: list[MessageFlow] = []
    for pipeline, row, simulation in zip(plan.pipelines, cards, simulations, strict=True):
        card_of = {
            worker: replica[0]
            for workers, replicas in zip(pipeline.workers, row, strict=True)
            for worker, replica in zip(workers, replicas, strict=True)
        }
        if id(simulation) not in late:
            late[id(simulation)] = simulation.sent_after(after)
        shared: dict[tuple[int, int], tuple[str, str] | None] = {}
        for start, end, worker, peer in late[id(simulation)]:
            if (worker, peer) not in shared:
                source, target = card_of[worker], card_of[peer]
                route = find_route(topology, source, target)
                shared[worker, peer] = (source.node, target.node) if route.shared else None
            nodes = shared[worker, peer]
            if nodes is not None:
                flows.append(MessageFlow(start, end, nodes))
    return flows


# --- what is not hidden -------------------------------------------------------------------------------------


def grad_reduce_end(
    plan: Plan,
    buckets: Sequence[BucketCost],
    stages: Sequence[StageCost],
    simulations: Sequence[Simulation],
    messages: Callable[[float], Sequence[MessageFlow]] = lambda after: (),
) -> float:
    """End of the last gradient reduction or backward, in seconds from the step's start.

    The last backward of a stage completes its gradients unit by unit, the last unit first, and of a layer the
    feed-forward first; under zero_bubble the last weight-gradient part does. A bucket can start when its
    lowest unit, or its half of one, is complete on all owners; and buckets start in the reverse of the
    model's order, on each card one after the other. Those under way at the same time share NICs, also with
    the `messages` that are on their way after a time. What a reduction takes of the compute that hides it
    makes that compute end later.
    """
    latest = max(simulation.step_seconds for simulation in simulations)
    if not buckets:
        return latest
    split = plan.schedule == "zero_bubble"

    def seconds(unit: UnitCost) -> float:
        return unit.weight_seconds if split else unit.backward_seconds

    def completions(early: float) -> dict[int, float]:
        """When each unit, but for a share of its backward, is complete on all its owners."""
        complete: dict[int, float] = {}
        for stage in stages:
            end = simulations[stage.pipeline].stage_end_seconds[stage.stage]
            for u, unit, below in zip(stage.span, stage.units, _before(stage, seconds), strict=False):
                complete[u] = max(complete.get(u, 0.0), end - below - early * seconds(unit))
        return complete

    complete = {early: completions(early) for early in {bucket.early for bucket in buckets}}
    ends = _compute_ends(stages, simulations)
    slowed = dict.fromkeys(ends, 0.0)
    order = buckets[::-1]
    transfers = [
        BucketFlow(
            cards=bucket.cards,
            crossing=bucket.crossing,
            seconds=bucket.reduce_seconds,
            ready=max(complete[bucket.early][u] for u in bucket.units),
        )
        for bucket in order
    ]

    def later(i: int) -> float:
        return max(slowed[card] for card in order[i].cards)

    def ended(i: int, start: float, end: float) -> None:
        bucket, seconds = order[i], end - start
        for card in bucket.cards if bucket.compute_seconds and seconds else ():
            hidden = seconds - max(0.0, end - ends[card] - slowed[card])
            slowed[card] += bucket.compute_seconds * max(0.0, hidden) / seconds

    first = min(transfer.ready for transfer in transfers)
    through = run_transfers(transfers, messages(first), later=later, ended=ended)
    return max(latest, *through, *(end + slowed[card] for card, end in ends.items()))


def _compute_ends(stages: Sequence[StageCost], simulations: Sequence[Simulation]) -> dict[Card, float]:
    """By card, when its last backward ends; in seconds from the step's start."""
    ends: dict[Card, float] = {}
    for stage in stages:
        end = simulations[stage.pipeline].stage_end_seconds[stage.stage]
        ends |= {card: max(ends.get(card, 0.0), end) for card in stage.cards}
    return ends


def exposed_weight_sync_seconds(
    buckets: Sequence[BucketCost], stages: Sequence[StageCost], simulations: Sequence[Simulation]
) -> float:
    """Seconds by which a step starts later because forwards wait for stepped weights. The buckets' weights
    come back in the model's order, on each card one after the other, from the end of the optimizer step on;
    the next step's forwards begin at the same time, and each unit's waits for its weights."""
    if not any(bucket.weight_sync_seconds for bucket in buckets):
        return 0.0
    needed: dict[int, float] = {}
    for stage in stages:
        start = simulations[stage.pipeline].stage_start_seconds[stage.stage]
        before = _before(stage, lambda unit: unit.forward_seconds)
        for u, earlier in zip(stage.span, before, strict=False):
            needed[u] = min(needed.get(u, math.inf), start + earlier)
    ends = run_transfers(
        [
            BucketFlow(cards=bucket.cards, crossing=bucket.crossing, seconds=bucket.sync_seconds, ready=0.0)
            for bucket in buckets
        ]
    )
    waits = (end - needed[u] for bucket, end in zip(buckets, ends, strict=True) for u in bucket.units)
    return max(0.0, *waits)


def _before(stage: StageCost, seconds: Callable[[UnitCost], float]) -> Iterator[float]:
    """Seconds of the stage's units before each of them, and of all."""
    return itertools.accumulate(map(seconds, stage.units), initial=0.0)
