"""What a plan costs: seconds and bytes of each stage, and of the step, from the simulation of its schedule.

A step is the forwards and backwards of every pipeline; the owners of the same part of the model sum its
gradients as soon as all of them have run its last backward, while other stages drain, so that only what
outlasts the drain counts; then the tied table is summed over all that hold it; then every card updates its
parameters:

    step = max over pipelines and stages (last backward + gradient sum) + tied sum + slowest update

With a sharded optimizer the sum is a reduce-scatter of gradients and, after the update, an all-gather of
weights; each owner updates its share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.devices import DeviceType
from yuan_train.config.errors import PlanError
from yuan_train.config.plan import Forecast, MemoryForecast, PipelinePlan, Plan, StageForecast, StagePlan
from yuan_train.config.run import Recompute
from yuan_train.planner.communication import broadcast_seconds, message_seconds
from yuan_train.planner.memory import in_flight, stage_memory
from yuan_train.planner.setting import Costs, Replica, stage_units
from yuan_train.planner.simulator import Simulation, StageTimes, simulate_schedule
from yuan_train.planner.sums import (
    PlanCards,
    holds_slices,
    optimizer_shares,
    owner_sets,
    stage_sums,
    sums_end,
    tied_seconds,
)
from yuan_train.planner.timing import CardCosts, Source
from yuan_train.planner.topology import find_route
from yuan_train.planner.workload import STATE_BYTES
from yuan_train.schedule.check import peak_in_flight
from yuan_train.schedule.step import Lane, Workers, num_workers
from yuan_train.schedule.tables import make_table


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage of one pipeline."""

    pipeline: int
    stage: int
    replicas: tuple[Replica, ...]
    layers: tuple[int, int]
    embedding: bool
    head: bool
    recompute: Recompute
    num_recomputed: int
    """Layers that are recomputed: the stage's first ones."""
    in_flight: int
    """Most micro-batches that one of the replicas holds at once."""
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float
    """What of the backward is the weights' part, where the schedule splits it."""
    sync_seconds: float
    packed: bool
    """Whether its optimizer is sharded over wider owners too, with whom its cards meet slice by slice."""
    optimizer_share: float
    """What each of the stage's replicas holds of its optimizer state."""
    update_seconds: float
    memory: MemoryForecast
    """Of each card; a card with several stages has the whole of it at each."""
    capacity_bytes: float
    one_more_layer_bytes: float
    """What another layer would add."""
    source: Source
    note: str

    @property
    def card(self) -> Card:
        """The first card, which the others are like."""
        return self.replicas[0][0]

    @property
    def cards(self) -> tuple[Card, ...]:
        return tuple(card for replica in self.replicas for card in replica)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity_bytes


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a plan costs, by its parts."""

    stages: tuple[StageCost, ...]
    simulations: tuple[Simulation, ...]
    """One per pipeline."""
    times: tuple[StageTimes, ...]
    workers: tuple[Workers, ...]
    compute_seconds: float
    """Until the last backward of any pipeline."""
    sync_seconds: float
    """What the gradient sums add to that."""
    tied_seconds: float
    update_seconds: float

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.sync_seconds + self.tied_seconds + self.update_seconds

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def source(self) -> Source:
        return "measured" if all(stage.source == "measured" for stage in self.stages) else "estimated"

    @property
    def bubble_fraction(self) -> float:
        """Share of the workers' step in which they do no forward or backward."""
        busy = sum(sum(simulation.busy_seconds) for simulation in self.simulations)
        count = sum(len(simulation.busy_seconds) for simulation in self.simulations)
        return 1.0 - busy / (self.step_seconds * count) if self.step_seconds else 0.0


def cost_plan(costs: Costs, plan: Plan) -> PlanCost:
    """The cost of any lawful plan.

    Raises PlanError if a card is not in the cluster, or lacks the precision.
    """
    cards = [[_cards_of(costs, plan, stage) for stage in pipeline.stages] for pipeline in plan.pipelines]
    owners = owner_sets(plan, cards)
    shares = optimizer_shares(plan, cards)
    packed = holds_slices(plan, cards)
    sums = stage_sums(costs, plan, cards, owners)
    stages: list[StageCost] = []
    times: list[StageTimes] = []
    simulations: list[Simulation] = []
    workers = [stage_workers(pipeline) for pipeline in plan.pipelines]
    seen: dict[tuple[object, ...], Simulation] = {}
    for p, pipeline in enumerate(plan.pipelines):
        own = [
            _stage_cost(
                costs,
                plan,
                cards[p][s],
                p,
                s,
                sync_seconds=sums[p, s],
                optimizer_share=shares[p, s],
                packed=packed[p, s],
            )
            for s in range(len(pipeline.stages))
        ]
        own = _card_memory(plan, pipeline, workers[p], own)
        times.append(_stage_times(costs, plan, cards, p, own))
        depths = pipeline.depths(plan.schedule)
        key = (times[-1], workers[p], pipeline.num_micro_batches, depths)
        if key not in seen:
            seen[key] = simulate_schedule(
                plan.schedule,
                times[-1],
                num_micro_batches=pipeline.num_micro_batches,
                workers=workers[p],
                in_flight=depths,
                overlap=costs.setting.overlap,
            )
        simulations.append(seen[key])
        stages += own
    compute = max(simulation.step_seconds for simulation in simulations)
    return PlanCost(
        stages=tuple(stages),
        simulations=tuple(simulations),
        times=tuple(times),
        workers=tuple(workers),
        compute_seconds=compute,
        sync_seconds=sums_end(plan, sums, simulations) - compute,
        tied_seconds=tied_seconds(
            costs,
            [replica[0] for row in cards for replica in row[0]],
            [replica[0] for row in cards for replica in row[-1]] if plan.model.tie_embeddings else [],
            width=min(len(replica) for row in cards for replica in (*row[0], *row[-1])),
            sharded=plan.optimizer_sharding,
        ),
        update_seconds=max(stage.update_seconds for stage in stages),
    )


def _stage_times(costs: Costs, plan: Plan, cards: PlanCards, p: int, own: Sequence[StageCost]) -> StageTimes:
    """What the simulator needs of a pipeline: its stages' work, and the messages between them."""
    onward, back = (
        tuple(_edge_seconds(costs, plan, cards, p, s, onward=there) for s in range(len(own) - 1))
        for there in (True, False)
    )
    return StageTimes(
        forward_seconds=tuple(stage.forward_seconds for stage in own),
        backward_seconds=tuple(stage.backward_seconds for stage in own),
        weight_seconds=tuple(stage.weight_seconds for stage in own),
        send_activation_seconds=onward,
        send_gradient_seconds=back,
    )


def stage_workers(pipeline: PipelinePlan) -> Workers:
    """For each stage of a pipeline the numbers of its replicas, each replica numbered where it first
    appears."""
    numbers: dict[tuple[int, ...], int] = {}
    return tuple(
        tuple(numbers.setdefault(replica, len(numbers)) for replica in stage.replicas)
        for stage in pipeline.stages
    )


def make_forecast(costs: Costs, cost: PlanCost, *, lower_bound_seconds: float) -> Forecast:
    """The forecast that a plan carries."""
    setting = costs.setting
    return Forecast(
        step_seconds=cost.step_seconds,
        tokens_per_second=setting.global_batch_size * setting.sequence_length / cost.step_seconds,
        bubble_fraction=cost.bubble_fraction,
        lower_bound_seconds=min(lower_bound_seconds, cost.step_seconds),
        source=cost.source,
        stages=tuple(
            StageForecast(
                pipeline=stage.pipeline,
                stage=stage.stage,
                forward_seconds=stage.forward_seconds,
                backward_seconds=stage.backward_seconds,
                peak_memory_bytes=stage.memory.total,
                memory=stage.memory,
            )
            for stage in cost.stages
        ),
    )


# --- stages ----------------------------------------------------------------------------------------------


def _cards_of(costs: Costs, plan: Plan, stage: StagePlan) -> tuple[Replica, ...]:
    return tuple(tuple(_card_of(costs, plan, rank) for rank in replica) for replica in stage.replicas)


def _card_of(costs: Costs, plan: Plan, rank: int) -> Card:
    entry = plan.ranks[rank]
    card = costs.cards.get(entry.device)
    if card is None:
        raise PlanError(
            f"card {entry.device!r} of the plan is not in cluster {costs.setting.cluster.name!r}; "
            f"give the cluster that the plan was made for ({plan.cluster or 'unnamed'})"
        )
    if card.type != entry.type:
        raise PlanError(
            f"card {entry.device!r} is a {entry.type} in the plan and a {card.type} in the cluster; "
            "plan again"
        )
    precision = costs.setting.precision
    if costs.setting.cluster.device_type(card.type).peak(precision) is None:
        raise PlanError(f"card {card.name!r} ({card.type}) has no {precision}; use another precision or card")
    return card


def change_stage(costs: Costs, plan: Plan, old: StageCost, stage: StagePlan) -> StageCost:
    """What a stage of a plan costs with another recompute or depth, beside the others as they are."""
    p, s = old.pipeline, old.stage
    own = plan.pipelines[p]
    pipelines = list(plan.pipelines)
    pipelines[p] = replace(own, stages=(*own.stages[:s], stage, *own.stages[s + 1 :]))
    return _stage_cost(
        costs,
        replace(plan, pipelines=tuple(pipelines)),
        old.replicas,
        p,
        s,
        sync_seconds=old.sync_seconds,
        optimizer_share=old.optimizer_share,
        packed=old.packed,
    )


def _stage_cost(
    costs: Costs,
    plan: Plan,
    replicas: tuple[Replica, ...],
    p: int,
    s: int,
    *,
    sync_seconds: float,
    optimizer_share: float,
    packed: bool,
) -> StageCost:
    """A stage by its slowest replica and its tightest card."""
    pipeline, model = plan.pipelines[p], plan.model
    stage = pipeline.stages[s]
    size = pipeline.micro_batch_size
    parts = [costs.of_stage(replica, size, stage) for replica in replicas]
    where = stage_units(stage, model.num_layers)
    slowest = max(
        parts, key=lambda part: sum(u.forward_seconds + u.backward_seconds for u in part.units[where])
    )
    units = slowest.units[where]
    tied = model.tie_embeddings and not costs.setting.is_schema_profile
    stepped = slice(1, None) if tied and stage.embedding and stage.head else where
    types = [costs.setting.cluster.device_type(card.type) for replica in replicas for card in replica]
    tightest = min(types, key=lambda device: device.memory - device.reserved)
    count = _stage_in_flight(plan, pipeline, s)
    layer = slowest.units[1]
    return StageCost(
        pipeline=p,
        stage=s,
        replicas=replicas,
        layers=stage.layers,
        embedding=stage.embedding,
        head=stage.head,
        recompute=stage.recompute,
        num_recomputed=stage.num_recomputed,
        in_flight=count,
        forward_seconds=math.fsum(unit.forward_seconds for unit in units),
        backward_seconds=math.fsum(unit.backward_seconds for unit in units),
        weight_seconds=math.fsum(unit.weight_seconds for unit in units),
        sync_seconds=sync_seconds,
        packed=packed,
        optimizer_share=optimizer_share,
        update_seconds=max(
            sum(unit.parameters for unit in part.units[stepped])
            * optimizer_share
            * _update_seconds(costs, part, types, stage.optimizer_offload)
            for part in parts
        ),
        memory=stage_memory(
            units,
            has_embedding=stage.embedding,
            has_head=stage.head,
            tied=tied,
            in_flight=count,
            boundary_bytes=slowest.boundary_bytes,
            reserved_bytes=float(tightest.reserved),
            optimizer_share=optimizer_share * (1.0 - stage.optimizer_offload),
            packed_share=optimizer_share if packed else 0.0,
        ),
        capacity_bytes=float(tightest.memory),
        one_more_layer_bytes=layer.state_bytes + count * layer.activation_bytes,
        source=slowest.source,
        note=slowest.note,
    )


def _update_seconds(costs: Costs, part: CardCosts, cards: Sequence[DeviceType], offload: float) -> float:
    """The optimizer's step per parameter: on the card, then the fraction on the host, for which gradients go
    down and weights come back."""
    state = STATE_BYTES[costs.setting.precision]
    on_card = state.update_traffic / part.update_bytes_per_second
    if not offload:
        return on_card
    copies = (state.gradients + state.parameters) / min(card.host_link for card in cards)
    on_host = state.update_traffic / min(card.host_memory_bandwidth for card in cards)
    return (1.0 - offload) * on_card + offload * (copies + on_host)


def _stage_in_flight(plan: Plan, pipeline: PipelinePlan, s: int) -> int:
    """Most micro-batches alive on a stage: by formula where there is one, else counted in the table."""
    replicas = [len(stage.replicas) for stage in pipeline.stages]
    m = pipeline.num_micro_batches
    if plan.schedule in ("1f1b", "gpipe"):
        return in_flight(
            plan.schedule,
            stage=s,
            num_stages=len(replicas),
            num_micro_batches=m,
            replicas=replicas,
            depths=pipeline.depths(plan.schedule),
        )
    workers = stage_workers(pipeline)
    table = make_table(plan.schedule, num_micro_batches=m, workers=workers)
    return max(peak_in_flight(table[worker], s) for worker in workers[s])


def _card_memory(
    plan: Plan, pipeline: PipelinePlan, workers: Workers, own: Sequence[StageCost]
) -> list[StageCost]:
    """The stages, each with the memory of the whole card where a card has several of them."""
    held = Counter(worker for row in workers for worker in row)
    if max(held.values()) == 1:
        return list(own)
    table = make_table(plan.schedule, num_micro_batches=pipeline.num_micro_batches, workers=workers)
    whole: dict[int, MemoryForecast] = {}
    for worker in range(num_workers(workers)):
        mine = [stage for stage in own if worker in workers[stage.stage]]
        whole[worker] = _together(mine, table[worker], tied=plan.model.tie_embeddings)
    return [replace(stage, memory=whole[workers[stage.stage][0]]) for stage in own]


def _together(mine: Sequence[StageCost], lane: Lane, *, tied: bool) -> MemoryForecast:
    """Several stages on a card: states add up, activations as the lane has them alive together."""
    last = "backward_weight" if any(step.kind == "backward_weight" for step in lane) else "backward"
    counts = {stage.stage: max(peak_in_flight(lane, stage.stage), 1) for stage in mine}
    each = {stage.stage: stage.memory.activations / counts[stage.stage] for stage in mine}
    alive = peak = 0.0
    for step in lane:
        if step.kind == "forward":
            alive += each[step.stage]
            peak = max(peak, alive)
        elif step.kind == last:
            alive -= each[step.stage]
    parts = [stage.memory for stage in mine]
    return MemoryForecast(
        parameters=math.fsum(part.parameters for part in parts),
        gradients=math.fsum(part.gradients for part in parts),
        optimizer=math.fsum(part.optimizer for part in parts),
        activations=peak,
        logits=math.fsum(part.logits for part in parts),
        buffers=math.fsum(part.buffers for part in parts),
        reserved=parts[0].reserved,
    )


# --- messages --------------------------------------------------------------------------------------------


def flow_sharers(edges: Sequence[tuple[Card, Card]]) -> list[int]:
    """How many of these messages go through the same network card at a time, for each.

    Equal pipelines run in step, so the same edge of all of them is busy together; unlike edges of a pipeline
    take turns. Both ends count: what leaves a node and what enters one.
    """
    away = [(a, b) for a, b in edges if a.node != b.node]
    leaving, entering = Counter(a.node for a, _ in away), Counter(b.node for _, b in away)
    return [max(leaving[a.node], entering[b.node]) if a.node != b.node else 1 for a, b in edges]


def _edge_seconds(costs: Costs, plan: Plan, cards: PlanCards, p: int, s: int, *, onward: bool) -> float:
    """A hidden state from stage s to s + 1, or its gradient back: first card to first card, then inside the
    group that gets it; the slowest of the replicas' pairs."""
    a, b = (s, s + 1) if onward else (s + 1, s)
    flows = [
        pair for q, row in enumerate(cards) if len(row) > s + 1 for pair in _pairs(row[a], row[b], q == p)
    ]
    edges = [(source[0], target[0]) for source, target, _ in flows]
    pipeline = plan.pipelines[p]
    sender = costs.of_stage(cards[p][s][0], pipeline.micro_batch_size, pipeline.stages[s])
    where = stage_units(pipeline.stages[s], plan.model.num_layers)
    size = sender.units[where][-1].output_bytes if sender.units[where] else costs.hidden_bytes(1)
    return (
        max(
            message_seconds(find_route(costs.topology, source[0], target[0]), size, sharers=sharers)
            + broadcast_seconds(costs.topology, target, size)
            for (source, target, mine), sharers in zip(flows, flow_sharers(edges), strict=True)
            if mine and source != target
        )
        if any(mine and source != target for source, target, mine in flows)
        else 0.0
    )


def _pairs(
    sources: Sequence[Replica], targets: Sequence[Replica], mine: bool
) -> list[tuple[Replica, Replica, bool]]:
    """Who sends to whom: micro-batch m goes from replica m mod n to replica m mod n'."""
    count = math.lcm(len(sources), len(targets))
    return [(sources[i % len(sources)], targets[i % len(targets)], mine) for i in range(count)]
