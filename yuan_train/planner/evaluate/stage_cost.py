"""What one stage of a plan costs: seconds of a micro-batch, and bytes on each of its cards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.errors import PlanError
from yuan_train.config.plan import MemoryForecast, PipelinePlan, Plan, StagePlan, divides_experts
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.away import AwayCost, away_cost
from yuan_train.planner.costs.expert_costs import held_expert_parameters, stage_experts
from yuan_train.planner.costs.memory import stage_memory
from yuan_train.planner.costs.owners import StateShares
from yuan_train.planner.costs.plan_problem import Costs, Replica, StageUnits
from yuan_train.planner.costs.unit_costs import Source, UnitCost
from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.evaluate.tiers import (
    LeavingActivations,
    LeavingParameters,
    group_bytes,
    leaving_activations,
    leaving_parameters,
)
from yuan_train.planner.native.pipelines import native_schedule
from yuan_train.schedule.check import peak_in_flight
from yuan_train.schedule.schedules import in_flight, make_schedule
from yuan_train.schedule.step import RankProgram, num_workers


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage of one pipeline."""

    pipeline: int
    stage: int
    replicas: tuple[Replica, ...]
    layers: tuple[float, float]
    embedding: bool
    head: bool
    recompute: Recompute
    num_recomputed: int
    """How many of its layers are recomputed: the first ones."""
    in_flight: int
    """Most micro-batches that one of the replicas holds at once."""
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float
    """The weight-gradient part of the backward, for schedules that split it."""
    units: tuple[UnitCost, ...]
    """What these are sums of, with what the stage takes besides (`StageUnits.start`)."""
    shares: StateShares
    """What each card holds of the stage's optimizer state, and what it holds twice of its gradients."""
    experts: tuple[int, ...]
    """Experts of each layer on each card of a replica, where cards share them."""
    update_seconds: float
    """The optimizer step of its slowest replica; with several stages on a card, of all of them together."""
    memory: MemoryForecast
    """Of each card, or of the tightest one where they share experts; with several stages on a card, all of
    them together."""
    capacity_bytes: float
    """What a plan may fill of its tightest card."""
    card_bytes: float
    """The memory of that card."""
    positions: tuple[tuple[MemoryForecast, float], ...]
    """Where cards share experts: memory and capacity of each card of a replica, the tightest one of the
    replicas'. Else those above."""
    host_bytes: float
    """What each card holds on its host."""
    host_capacity_bytes: float
    """The smallest share of a host's memory that one of its cards has; inf if not needed."""
    disk_bytes: float
    """What each card holds on its node's disk, and reads and writes in each step."""
    disk_capacity_bytes: float
    """The smallest share of a disk that one of its cards has; inf if not known, or not needed."""
    leaving: LeavingActivations | None
    """Its activations that leave the card; None if all stay."""
    pages: LeavingParameters | None
    """Its parameters that are pages of the host; None if all stay."""
    one_more_layer_bytes: float
    """What another layer would add."""
    source: Source
    note: str

    @property
    def card(self) -> Card:
        """The first card, named for all of them in reports."""
        return self.replicas[0][0]

    @property
    def cards(self) -> tuple[Card, ...]:
        return tuple(card for replica in self.replicas for card in replica)

    @property
    def fits(self) -> bool:
        """Whether each card's memory suffices, and its shares of the host's and the disk."""
        on_host = self.host_bytes <= self.host_capacity_bytes
        on_host = on_host and self.disk_bytes <= self.disk_capacity_bytes
        return on_host and self.memory.total <= self.capacity_bytes


def cards_of(costs: Costs, plan: Plan, stage: StagePlan) -> tuple[Replica, ...]:
    """The cards of a stage's replicas. Raises PlanError if a card is not in the cluster, has another type
    there, or lacks the precision."""
    return tuple(tuple(_card_of(costs, plan, rank) for rank in replica) for replica in stage.replicas)


def _card_of(costs: Costs, plan: Plan, rank: int) -> Card:
    entry = plan.ranks[rank]
    card = costs.cards.get(entry.device)
    if card is None:
        raise PlanError(
            f"card {entry.device!r} of the plan is not in cluster {costs.problem.cluster.name!r}; "
            f"give the cluster that the plan was made for ({plan.cluster or 'unnamed'})"
        )
    if card.type != entry.type:
        raise PlanError(
            f"card {entry.device!r} is a {entry.type} in the plan and a {card.type} in the cluster; "
            "plan again"
        )
    precision = costs.problem.precision
    if costs.problem.cluster.device_type(card.type).peak(precision) is None:
        raise PlanError(f"card {card.name!r} ({card.type}) has no {precision}; use another precision or card")
    return card


def change_stage(costs: Costs, plan: Plan, old: StageCost, stage: StagePlan) -> StageCost:
    """The cost of stage `old` of a plan if `stage`, with another recompute or depth, replaces it."""
    p, s = old.pipeline, old.stage
    pipeline = plan.pipelines[p]
    pipelines = list(plan.pipelines)
    pipelines[p] = replace(pipeline, stages=(*pipeline.stages[:s], stage, *pipeline.stages[s + 1 :]))
    changed = replace(plan, pipelines=tuple(pipelines))
    return stage_cost(costs, changed, old.replicas, p, s, shares=old.shares)


@dataclass(frozen=True)
class _Part:
    """What each card of a replica runs, or one card of it where they share experts."""

    units: StageUnits
    cards: tuple[Card, ...]
    position: int = 0
    """Of the card in its replica."""
    expert_parameters: int = 0


def stage_cost(
    costs: Costs, plan: Plan, replicas: tuple[Replica, ...], p: int, s: int, *, shares: StateShares
) -> StageCost:
    """The cost of stage s of pipeline p, by its slowest replica (or card with experts) and tightest card."""
    pipeline, stage = plan.pipelines[p], plan.pipelines[p].stages[s]
    parts = _parts(costs, plan, replicas, pipeline.micro_batch_size, stage)
    slowest = max(parts, key=lambda part: part.units.seconds)
    units = slowest.units.units
    # Whether the cards have the head too, in this stage or in another one, with a tied matrix.
    heads = (set(stage.replicas) <= set(other.replicas) for other in pipeline.stages if other.head)
    twice = stage.embedding and costs.ties and any(heads)
    cards = tuple(card for replica in replicas for card in replica)
    count = _stage_in_flight(plan, pipeline, s)
    divides = divides_experts(plan)
    leaving = leaving_activations(costs, plan, p, s, slowest.cards) if stage.activation_offload else None
    pages = leaving_parameters(costs, stage, slowest.units, cards)
    by_position: dict[int, tuple[MemoryForecast, float]] = {}
    for part in parts if divides else [replace(slowest, cards=cards)]:
        memory, capacity = _memory(costs, part, stage, shares, twice=twice, in_flight=count)
        if leaving is not None:
            # Not where cards share experts: what they keep varies.
            away = count * leaving.bytes_per_micro_batch - leaving.card_bytes
            memory = replace(memory, activations=max(0.0, memory.activations - away))
        memory = _with_pages(memory, pipeline, stage, pages, part.units.boundary_bytes)
        found = memory, capacity
        by_position[part.position] = min(found, by_position.get(part.position, found), key=_slack)
    tightest = min(by_position.values(), key=_slack)
    aways = [
        _away_of(costs, stage, part, part.cards if divides else cards, shares, twice=twice, pages=pages)
        for part in parts
    ]
    layer = slowest.units.layer
    hosts = cards if stage.optimizer_offload or leaving or pages else ()
    disks = cards if stage.optimizer_disk else ()
    return StageCost(
        pipeline=p,
        stage=s,
        replicas=replicas,
        **{name: getattr(stage, name) for name in OF_PLAN},
        **{name: getattr(slowest.units, name) for name in OF_UNITS},
        in_flight=count,
        weight_seconds=math.fsum(unit.weight_seconds for unit in units),
        units=units,
        shares=shares,
        experts=stage_experts(plan, stage) if divides else (),
        update_seconds=_update_seconds(max(away.update_seconds for away in aways), stage, pages),
        memory=tightest[0],
        capacity_bytes=tightest[1],
        card_bytes=tightest[1] / costs.problem.memory_fraction,
        positions=tuple(by_position.values()),
        host_bytes=max(away.host_bytes for away in aways)
        + sum(tier.host_bytes for tier in (leaving, pages) if tier is not None),
        host_capacity_bytes=min((costs.host_of(card).memory_bytes for card in hosts), default=math.inf),
        disk_bytes=max(away.disk_bytes for away in aways),
        disk_capacity_bytes=min((costs.disk_of(card).capacity_bytes for card in disks), default=math.inf),
        leaving=leaving,
        pages=pages,
        one_more_layer_bytes=layer.state_bytes + count * layer.activation_bytes,
    )


def _away_of(
    costs: Costs,
    stage: StagePlan,
    part: _Part,
    cards: tuple[Card, ...],
    shares: StateShares,
    *,
    twice: bool,
    pages: LeavingParameters | None,
) -> AwayCost:
    """What the state of a part costs that is not on its cards; a matrix counts once, pages do not."""
    traffic = STATE_BYTES[costs.problem.precision].update_traffic
    whole = sum(unit.parameters for unit in part.units.units[twice:]) - part.expert_parameters
    owned = whole * shares.optimizer + part.expert_parameters * shares.expert_optimizer
    owned -= 0 if pages is None else pages.parameters
    return away_cost(costs, stage, cards, owned, card_seconds=traffic / part.units.update_bytes_per_second)


def _parts(
    costs: Costs, plan: Plan, replicas: Sequence[Replica], micro_batch_size: int, stage: StagePlan
) -> list[_Part]:
    """One for each replica; where cards share experts, one for each card."""
    if not divides_experts(plan):
        return [
            _Part(costs.of_stage(plan, replica, micro_batch_size, stage), replica) for replica in replicas
        ]
    counts = stage_experts(plan, stage)
    return [
        _Part(units, (card,), i, held_expert_parameters(plan, stage, counts[i]))
        for replica in replicas
        for i, (card, units) in enumerate(
            zip(replica, costs.of_ranks(plan, replica, micro_batch_size, stage), strict=True)
        )
    ]


def _memory(
    costs: Costs, part: _Part, stage: StagePlan, shares: StateShares, *, twice: bool, in_flight: int
) -> tuple[MemoryForecast, float]:
    """(bytes on the tightest card of a part, what a plan may fill of it)."""
    problem = costs.problem
    types = {card.type: problem.cluster.device_type(card.type) for card in part.cards}
    name = min(types, key=lambda name: problem.usable_bytes(name) - types[name].reserved)
    tightest = types[name]
    parameters = sum(unit.parameters for unit in part.units.units[twice:])
    experts = part.expert_parameters / parameters if parameters else 0.0
    forecast = stage_memory(
        part.units.units,
        has_embedding=stage.embedding,
        has_head=stage.head,
        head_holds_embedding=twice,
        in_flight=in_flight,
        boundary_bytes=part.units.boundary_bytes,
        reserved_bytes=float(tightest.reserved),
        optimizer_share=(shares.optimizer + experts * (shares.expert_optimizer - shares.optimizer))
        * (1.0 - stage.optimizer_offload),
        packed_share=shares.packed + experts * (shares.expert_packed - shares.packed),
        critic_packed_share=shares.critic_packed,
    )
    return forecast, problem.usable_bytes(name)


def _slack(memory: tuple[MemoryForecast, float]) -> float:
    """Bytes that are left on a card."""
    return memory[1] - memory[0].total


def _update_seconds(seconds: float, stage: StagePlan, pages: LeavingParameters | None) -> float:
    """With the step of a stage's pages: beside the card's own, and after what else its host steps."""
    if pages is None:
        return seconds
    return seconds + pages.update_seconds if stage.optimizer_offload else max(seconds, pages.update_seconds)


def _with_pages(
    memory: MemoryForecast,
    pipeline: PipelinePlan,
    stage: StagePlan,
    pages: LeavingParameters | None,
    boundary_bytes: float,
) -> MemoryForecast:
    """The bytes of a card in a pipeline of groups, if it is one, without what its host holds."""
    if pages is None and pipeline.page_group == 1:
        return memory
    memory = replace(memory, buffers=memory.buffers + group_bytes(pipeline, stage, boundary_bytes))
    if pages is None:
        return memory
    return replace(
        memory,
        parameters=memory.parameters - pages.parameter_bytes,
        gradients=memory.gradients - pages.gradient_bytes,
        optimizer=memory.optimizer - pages.optimizer_bytes * (1.0 - stage.optimizer_offload),
    )


def _stage_in_flight(plan: Plan, pipeline: PipelinePlan, s: int) -> int:
    """Most micro-batches in flight on a stage: by formula where there is one, else counted in a schedule."""
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
    return native_schedule(plan.schedule, pipeline.workers, m, None).held[s]


OF_PLAN = ("layers", "embedding", "head", "recompute", "num_recomputed")
OF_UNITS = ("forward_seconds", "backward_seconds", "source", "note")
"""What a stage's cost has as its plan, and as the units of its slowest part, have it."""
OF_A_CARD = ("update_seconds", "host_bytes", "disk_bytes")
"""Of a card with several stages, what is the sum of theirs."""


def sum_over_cards(plan: Plan, pipeline: PipelinePlan, stages: Sequence[StageCost]) -> list[StageCost]:
    """The stages of a pipeline; where a card has several, each with what the whole card holds and steps."""
    workers = pipeline.workers
    if max(Counter(worker for row in workers for worker in row).values()) == 1:
        return list(stages)
    schedule = make_schedule(plan.schedule, num_micro_batches=pipeline.num_micro_batches, workers=workers)
    memory: dict[int, tuple[MemoryForecast, float]] = {}
    sums: dict[int, dict[str, float]] = {}
    for worker in range(num_workers(workers)):
        on_card = [stage for stage in stages if worker in workers[stage.stage]]
        positions = zip(*(stage.positions for stage in on_card), strict=True)
        own = (
            (_combined_memory(on_card, [part for part, _ in same], schedule[worker]), same[0][1])
            for same in positions
        )
        memory[worker] = min(own, key=_slack)
        sums[worker] = {name: math.fsum(getattr(stage, name) for stage in on_card) for name in OF_A_CARD}
    found: list[StageCost] = []
    for stage in stages:
        forecast, capacity = memory[workers[stage.stage][0]]
        found.append(
            replace(
                stage,
                memory=forecast,
                capacity_bytes=capacity,
                card_bytes=stage.card_bytes * capacity / stage.capacity_bytes,
                **{name: max(sums[worker][name] for worker in workers[stage.stage]) for name in OF_A_CARD},
            )
        )
    return found


def _combined_memory(
    stages: Sequence[StageCost], parts: Sequence[MemoryForecast], program: RankProgram
) -> MemoryForecast:
    """Several stages on a card: their states add up; activations as the rank program has them in flight, or
    all that may stay of those that leave. `parts` are the bytes of each stage on this card."""
    last = "backward_weight" if any(step.kind == "backward_weight" for step in program) else "backward"
    per_micro_batch: dict[int, float] = {}
    alive = peak = 0.0
    for stage, part in zip(stages, parts, strict=True):
        stays, count = stage.leaving is None, max(peak_in_flight(program, stage.stage), 1)
        per_micro_batch[stage.stage] = part.activations / count if stays else 0.0
        alive += 0.0 if stays else part.activations
    for step in program:
        if step.kind == "forward":
            alive += per_micro_batch[step.stage]
            peak = max(peak, alive)
        elif step.kind == last:
            alive -= per_micro_batch[step.stage]
    names = ("parameters", "gradients", "optimizer", "logits", "buffers")
    sums = {name: math.fsum(getattr(part, name) for part in parts) for name in names}
    # A stage without layers has no critic either.
    critics = [part.critic for part in parts if part.critic is not None]
    critic = math.fsum(critics) if critics else None
    return MemoryForecast(**sums, activations=peak, reserved=parts[0].reserved, critic=critic)
