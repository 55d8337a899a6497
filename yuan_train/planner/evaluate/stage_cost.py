"""What one stage of a plan costs: seconds of a micro-batch, and bytes on each of its cards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.plan import MemoryForecast, PipelinePlan, Plan, StagePlan
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.grad_reduce import StateShares
from yuan_train.planner.costs.plan_problem import Replica
from yuan_train.planner.costs.unit_costs import Costs, Source, UnitCost
from yuan_train.planner.evaluate.memory import (
    LeavingActivations,
    LeavingParameters,
    StageHoldings,
    StagePart,
    away_cost,
    free_bytes,
    leaving_activations,
    leaving_parameters,
    memory_by_position,
)
from yuan_train.planner.evaluate.simulator import program_shape
from yuan_train.planner.native.core import native_schedule
from yuan_train.schedule.schedules import ProgramShape, in_flight, make_schedule, peak_in_flight
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
    span: range
    """The numbers of its units among all of the plan."""
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float
    """The weight-gradient part of the backward, for schedules that split it."""
    units: tuple[UnitCost, ...]
    """What these are sums of, with what the stage takes besides (`StageUnits.start`)."""
    sent_bytes: float
    """Of a hidden state, as its first replica passes it on."""
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


def change_stage(costs: Costs, plan: Plan, old: StageCost, stage: StagePlan) -> StageCost:
    """The cost of stage `old` of a plan if `stage`, with another recompute or depth, replaces it."""
    p, s = old.pipeline, old.stage
    pipeline = plan.pipelines[p]
    pipelines = list(plan.pipelines)
    pipelines[p] = replace(pipeline, stages=(*pipeline.stages[:s], stage, *pipeline.stages[s + 1 :]))
    changed = replace(plan, pipelines=tuple(pipelines))
    return stage_cost(costs, changed, old.replicas, p, s, shares=old.shares, shape=program_shape(changed, p))


def stage_cost(
    costs: Costs,
    plan: Plan,
    replicas: tuple[Replica, ...],
    p: int,
    s: int,
    *,
    shares: StateShares,
    shape: ProgramShape,
) -> StageCost:
    """The cost of stage s of pipeline p, by its slowest replica (or card with experts) and tightest card;
    `shape` is the pipeline's."""
    pipeline, stage = plan.pipelines[p], plan.pipelines[p].stages[s]
    count = _stage_in_flight(shape, pipeline, s)
    parts = _parts(costs, plan, replicas, pipeline.micro_batch_size, stage)
    first = parts[: len(replicas[0]) if plan.divides_experts else 1]
    sender = (max(first, key=_seconds) if len(first) > 1 else first[0]).units.units
    # A stage without units passes on what it receives.
    sent = sender[-1].output_bytes if sender else costs.hidden_bytes(pipeline.micro_batch_size)
    slowest = max(parts, key=_seconds) if len(parts) > 1 else parts[0]
    units, cards = slowest.units, tuple(card for replica in replicas for card in replica)
    tiers = stage.optimizer_offload, stage.activation_offload, stage.parameter_offload
    of_card = {card: costs.host_of(card) for card in cards} if any(tiers) else {}
    hosts, own = list(of_card.values()), [of_card[card] for card in slowest.cards if card in of_card]
    heads = (set(stage.replicas) <= set(other.replicas) for other in pipeline.stages if other.head)
    twice, precision = stage.embedding and costs.ties and any(heads), costs.problem.precision
    leaving = leaving_activations(plan, p, s, shape, units, own)
    pages = leaving_parameters(stage, units, hosts, precision=precision)
    every = [part.units for part in parts]
    away = away_cost(stage, every, hosts, shares, precision=precision, twice=twice, pages=pages)
    held = StageHoldings(pipeline, stage, shares, twice, count, leaving, pages)
    if not plan.divides_experts:
        parts = [replace(slowest, cards=cards)]
    positions = memory_by_position(costs, held, parts)
    tightest = min(positions, key=free_bytes)
    disks = [host.disk_bytes for host in hosts] if stage.optimizer_disk else []
    return StageCost(
        pipeline=p,
        stage=s,
        replicas=replicas,
        **{name: getattr(stage, name) for name in OF_PLAN},
        **{name: getattr(units, name) for name in OF_UNITS},
        in_flight=count,
        weight_seconds=math.fsum(unit.weight_seconds for unit in units.units),
        sent_bytes=sent,
        shares=shares,
        experts=tuple(part.units.experts for part in first) if plan.divides_experts else (),
        update_seconds=away.update_seconds,
        memory=tightest[0],
        capacity_bytes=tightest[1],
        card_bytes=tightest[1] / costs.problem.memory_fraction,
        positions=positions,
        host_bytes=away.host_bytes + sum(tier.host_bytes for tier in (leaving, pages) if tier is not None),
        host_capacity_bytes=min((host.memory_bytes for host in hosts), default=math.inf),
        disk_bytes=away.disk_bytes,
        disk_capacity_bytes=min(disks, default=math.inf),
        leaving=leaving,
        pages=pages,
        one_more_layer_bytes=units.layer.state_bytes + count * units.layer.activation_bytes,
    )


def _parts(
    costs: Costs, plan: Plan, replicas: Sequence[Replica], micro_batch_size: int, stage: StagePlan
) -> list[StagePart]:
    """One for each replica; where cards share experts, one for each card."""
    if not plan.divides_experts:
        return [
            StagePart(costs.of_stage(plan, replica, micro_batch_size, stage), replica) for replica in replicas
        ]
    return [
        StagePart(units, (card,), i)
        for replica in replicas
        for i, (card, units) in enumerate(
            zip(replica, costs.of_ranks(plan, replica, micro_batch_size, stage), strict=True)
        )
    ]


def _seconds(part: StagePart) -> float:
    return part.units.seconds


def _stage_in_flight(shape: ProgramShape, pipeline: PipelinePlan, s: int) -> int:
    """Most micro-batches in flight on a stage: by formula where there is one, else counted in a schedule."""
    replicas = [len(stage.replicas) for stage in pipeline.stages]
    schedule, workers, m, depths, _ = shape
    if schedule in ("1f1b", "gpipe"):
        return in_flight(
            schedule, stage=s, num_stages=len(replicas), num_micro_batches=m, replicas=replicas, depths=depths
        )
    return native_schedule(schedule, workers, m, None).held[s]


OF_PLAN = ("layers", "embedding", "head", "recompute", "num_recomputed")
OF_UNITS = ("span", "units", "forward_seconds", "backward_seconds", "source", "note")
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
        memory[worker] = min(own, key=free_bytes)
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
