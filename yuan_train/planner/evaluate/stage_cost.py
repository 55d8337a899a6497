"""What one stage of a plan costs: seconds of a micro-batch, and peak bytes on each of its cards.

    M = parameters + gradients + optimizer + in_flight * activations + logits + buffers + reserved

Bytes are never pooled over cards. The first four are sums over the stage's units. A critic adds its
parameters, gradients and optimizer state. State, activations and parameters may leave a card for host and
disk, at the cost of copies.

A group of micro-batches with pages passes layer by layer: with h bytes a second of the link, a layer of P
parameters and n bytes each takes n P / h to come up, once for the forward and once for the backward of the
group, and its gradient as long to go down. That is hidden where the group's compute of a layer takes longer.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from yuan_train.config.cluster import Card
from yuan_train.config.devices import Precision
from yuan_train.config.errors import PlanError
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import MemoryForecast, PipelinePlan, Plan, StagePlan
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.grad_reduce import StateShares
from yuan_train.planner.costs.unit_costs import (
    CardCosts,
    Costs,
    Source,
    StageUnits,
    UnitCost,
    share_of_layer,
    without_critic,
)
from yuan_train.planner.costs.workload import (
    ELEMENT_BYTES,
    STATE_BYTES,
    HostShare,
    Replica,
    disk_bytes,
    disk_step_seconds,
    host_bytes,
    host_step_seconds,
    slot_bytes,
)
from yuan_train.planner.evaluate.simulator import Groups, PageTimes, PartTimes, program_shape
from yuan_train.planner.native.core import native_schedule
from yuan_train.schedule import copies
from yuan_train.schedule.copies import PagedGroups, Paging, by_group, paging_of, with_pages
from yuan_train.schedule.schedules import (
    MESSAGES_PER_EDGE,
    ProgramShape,
    in_flight,
    make_schedule,
    peak_in_flight,
)
from yuan_train.schedule.step import RankProgram, num_workers

# --- the card ---------------------------------------------------------------------------------------------


class Ends(NamedTuple):
    """What a stage has of the model's ends."""

    embedding: bool
    head: bool
    head_holds_embedding: bool
    """Whether the embedding matrix is the head's: in this stage, or in another one of the card."""


def stage_memory(
    units: Sequence[UnitCost],
    ends: Ends,
    *,
    in_flight: int,
    boundary_bytes: float,
    reserved_bytes: float,
    shares: StateShares,
) -> MemoryForecast:
    """Peak bytes of a stage that holds `units` in the model's order, embedding and head where it has them.

    `boundary_bytes` is one hidden state at the end of a stage; it is kept for each micro-batch in flight,
    and each edge has MESSAGES_PER_EDGE messages on the way (what a stage received is among its first unit's
    activations). The head's transient (blocks of logits) counts as logits, the largest of the other units' as
    buffers. Of `shares` those of all parameters together count.
    """
    stored = units[1:] if ends.embedding and ends.head_holds_embedding else units
    body = units[:-1] if ends.head else units
    tail = units[-1:] if ends.head else ()
    num_edges = (not ends.embedding) + (not ends.head)
    critics = [unit.critic for unit in units if unit.critic is not None]
    own = [without_critic(unit) for unit in stored] if critics else stored
    return MemoryForecast(
        parameters=math.fsum(unit.parameter_bytes for unit in own),
        gradients=(1.0 + shares.packed) * math.fsum(unit.gradient_bytes for unit in own),
        optimizer=shares.optimizer * math.fsum(unit.optimizer_bytes for unit in own),
        activations=in_flight * math.fsum(unit.activation_bytes for unit in units),
        logits=math.fsum(unit.transient_bytes for unit in tail),
        buffers=max((unit.transient_bytes for unit in body), default=0.0)
        + boundary_bytes * ((not ends.head) * in_flight + num_edges * MESSAGES_PER_EDGE),
        reserved=reserved_bytes,
        critic=math.fsum(
            unit.parameter_bytes
            + (1.0 + shares.critic_packed) * unit.gradient_bytes
            + shares.optimizer * unit.optimizer_bytes
            for unit in critics
        )
        if critics
        else None,
    )


def scoring_bytes(
    model: ModelConfig, costs: CardCosts, precision: Precision, *, width: int = 1
) -> dict[str, float]:
    """Bytes of a reward model on each of `width` cards while it scores: all of it, and of one layer at a time
    at most what it would keep of a micro-batch for a backward. `costs` are the model's on such a card."""
    weights = model.parameters * ELEMENT_BYTES[precision] / width
    return {"weights": weights, "activations": costs.layer.activation_bytes}


# --- optimizer state ----------------------------------------------------------------------------------------


class AwayCost(NamedTuple):
    """What the optimizer state of each card of a stage takes away from it, and the seconds of its step."""

    update_seconds: float
    """Of the optimizer step that the next step waits for."""
    host_bytes: float
    disk_bytes: float


def away_cost(
    stage: StagePlan,
    parts: Sequence[StageUnits],
    hosts: Sequence[HostShare],
    shares: StateShares,
    *,
    precision: Precision,
    twice: bool,
    pages: LeavingParameters | None,
) -> AwayCost:
    """The most that one of the parts of a stage owns and steps, by its cards' shares of hosts; if two of the
    units are one tied matrix (`twice`), it counts once.

    Chunks come down, are stepped and go up side by side with reads and writes of the disk, so that the
    slowest of them counts; the card steps its own part meanwhile. Pages are stepped beside that, and after
    what else their host steps.
    """
    x, on_disk = stage.optimizer_offload, stage.optimizer_disk
    seconds = max(host_step_seconds(host, precision) for host in hosts) if x else 0.0
    if x and on_disk:
        seconds = max(seconds, on_disk * max(disk_step_seconds(host, precision) for host in hosts))
    most = update = -math.inf
    for units in parts:
        experts = units.expert_parameters
        whole = sum(unit.parameters for unit in units.units[twice:]) - experts
        owned = whole * shares.optimizer + experts * shares.expert_optimizer
        owned -= 0 if pages is None else pages.parameters
        card_seconds = STATE_BYTES[precision].update_traffic / units.update_bytes_per_second
        update = max(update, owned * max((1.0 - x) * card_seconds, x * seconds))
        most = max(most, owned)
    if pages is not None:
        update = update + pages.update_seconds if x else max(update, pages.update_seconds)
    if not x:
        return AwayCost(update, 0.0, 0.0)
    on_host = most * x * host_bytes(precision) * (1.0 - on_disk)
    if on_disk:
        on_host += slot_bytes(precision, most * x * on_disk)
    return AwayCost(update, on_host, most * x * on_disk * disk_bytes(precision))


# --- activations --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LeavingActivations:
    """Of a stage whose first layers' activations leave."""

    times: PartTimes
    bytes_per_micro_batch: float
    """What its leaving parts keep."""
    card_bytes: float
    """The most of that, of all micro-batches, on each card at once."""
    host_bytes: float
    """The most on its host."""


def leaving_activations(
    plan: Plan, p: int, s: int, shape: ProgramShape, units: StageUnits, hosts: Sequence[HostShare]
) -> LeavingActivations | None:
    """What leaves stage s of pipeline p, by the costs of one replica and its cards' shares of hosts; None if
    all stay. Raises PlanError if the plan lets too few parts stay for its schedule."""
    stage = plan.pipelines[p].stages[s]
    if not stage.activation_offload:
        return None
    parts = _halves_of(plan, stage, units)
    held = [part.activation_bytes for part in parts[: stage.num_leaving_parts]]
    if not stage.embedding:
        # What the stage received stays: its gradient is sent back.
        held[0] = max(0.0, held[0] - units.boundary_bytes)
    link = min(host.link_bytes_per_second for host in hosts)
    programs = _programs(plan, p, shape)
    peaks = [copies.kept_bytes(programs[worker], {s: held}) for worker in shape.workers[s]]

    def seconds(name: str) -> tuple[float, ...]:
        # Embedding and head belong to the parts at the ends.
        found = [getattr(part, name) for part in parts]
        found[0] += getattr(units.started[0], name) if stage.embedding else 0.0
        found[-1] += getattr(units.started[-1], name) if stage.head else 0.0
        return tuple(found)

    return LeavingActivations(
        times=PartTimes(
            forward_seconds=seconds("forward_seconds"),
            backward_seconds=seconds("backward_seconds"),
            copy_seconds=tuple(size / link for size in held),
        ),
        bytes_per_micro_batch=sum(held),
        card_bytes=max(card for card, _ in peaks),
        host_bytes=max(host for _, host in peaks),
    )


def pipeline_copies(plan: Plan, p: int, shape: ProgramShape) -> Mapping[int, Groups]:
    """By worker of a pipeline, its steps in parts with copies, where a stage of it offloads activations."""
    programs = _programs(plan, p, shape)
    return {worker: copies.group_copies(program) for worker, program in programs.items()}


def _halves_of(plan: Plan, stage: StagePlan, own: StageUnits) -> list[UnitCost]:
    """The costs of a stage's halves of layers, in order."""
    units = iter(own.started[stage.embedding :])
    found: list[UnitCost] = []
    for layer, half in stage.parts:
        if int(stage.layers[0]) + layer in plan.divided_layers:
            found.append(next(units))
            continue
        if half == 0:
            whole = next(units)
            found += [share_of_layer(whole, share) for share in own.halves[layer >= stage.num_recomputed]]
    return found


def _programs(plan: Plan, p: int, shape: ProgramShape) -> dict[int, RankProgram]:
    """By worker of a pipeline, its program with the copies of activations, if a stage of it offloads any."""
    try:
        return copies.copied_programs(shape, plan.pipelines[p].stages)
    except copies.TooFewResident as error:
        raise TooFewResidentInPlan(p, error) from error


class TooFewResidentInPlan(PlanError):
    """Of a pipeline; its text is made when it is read, as that of its cause."""

    def __init__(self, pipeline: int, cause: copies.TooFewResident) -> None:
        super().__init__(pipeline, cause)
        self._pipeline, self._cause = pipeline, cause

    def __str__(self) -> str:
        return f"pipelines[{self._pipeline}]: {self._cause}"


# --- pages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LeavingParameters:
    """Of a stage whose first layers are pages of the host."""

    times: PageTimes
    parameters: int
    """That leave."""
    parameter_bytes: float
    """How many less than all of them the card holds; so the next two."""
    gradient_bytes: float
    optimizer_bytes: float
    host_bytes: float
    update_seconds: float
    """The optimizer step of the pages, on the host, where they lie."""


def leaving_parameters(
    stage: StagePlan, own: StageUnits, hosts: Sequence[HostShare], *, precision: Precision
) -> LeavingParameters | None:
    """What leaves a stage of these units, whose cards have these shares of hosts; None if all stay."""
    if not stage.parameter_offload:
        return None
    link = min(host.link_bytes_per_second for host in hosts)
    traffic = STATE_BYTES[precision].update_traffic
    units, first, count = own.started, int(stage.embedding), stage.parameter_offload
    pages, rest = units[first : first + count], units[first + count :]
    slots = min(stage.page_slots or 1, count)

    def away(name: str) -> float:
        sizes = [float(getattr(unit, name)) for unit in pages]
        return math.fsum(sizes) - slots * max(sizes)

    def seconds(name: str) -> tuple[float, ...]:
        parts = [getattr(unit, name) for unit in pages]
        parts[0] += math.fsum(getattr(unit, name) for unit in units[:first])
        return (*parts, math.fsum(getattr(unit, name) for unit in rest))

    parameters = sum(unit.parameters for unit in pages)
    return LeavingParameters(
        times=PageTimes(
            forward_seconds=seconds("forward_seconds"),
            backward_seconds=seconds("backward_seconds"),
            weight_seconds=tuple(unit.parameter_bytes / link for unit in pages),
            gradient_seconds=tuple(unit.gradient_bytes / link for unit in pages),
        ),
        parameters=parameters,
        parameter_bytes=away("parameter_bytes"),
        gradient_bytes=away("gradient_bytes"),
        optimizer_bytes=math.fsum(unit.optimizer_bytes for unit in pages),
        host_bytes=math.fsum(unit.state_bytes for unit in pages),
        update_seconds=parameters * traffic / min(host.memory_bytes_per_second for host in hosts),
    )


def memory_with_pages(
    memory: MemoryForecast,
    pipeline: PipelinePlan,
    stage: StagePlan,
    pages: LeavingParameters | None,
    boundary_bytes: float,
) -> MemoryForecast:
    """The bytes of a card in a pipeline of groups, if it is one, without what its host holds."""
    if pages is None and pipeline.page_group == 1:
        return memory
    # Messages of a group on both edges, and a gradient of each hidden state.
    num_edges = (not stage.embedding) + (not stage.head)
    more = (pipeline.page_group - 1) * boundary_bytes * (1 + num_edges * MESSAGES_PER_EDGE)
    memory = replace(memory, buffers=memory.buffers + more)
    if pages is None:
        return memory
    return replace(
        memory,
        parameters=memory.parameters - pages.parameter_bytes,
        gradients=memory.gradients - pages.gradient_bytes,
        optimizer=memory.optimizer - pages.optimizer_bytes * (1.0 - stage.optimizer_offload),
    )


def pipeline_pages(pipeline: PipelinePlan, shape: ProgramShape) -> Mapping[int, PagedGroups]:
    """By worker of a pipeline, its groups with the copies of pages, where its stage has any."""
    pagings = tuple(paging_of(stage, group=pipeline.page_group) for stage in pipeline.stages)
    return _with_pages(shape, pagings) if any(pagings) else {}


@functools.lru_cache(maxsize=64)
def _with_pages(shape: ProgramShape, pagings: tuple[Paging | None, ...]) -> dict[int, PagedGroups]:
    programs = make_schedule(**shape._asdict())
    return {
        shape.workers[stage][0]: by_group(with_pages(programs[shape.workers[stage][0]], paging))
        for stage, paging in enumerate(pagings)
        if paging is not None
    }


# --- all of it --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StagePart:
    """What each card of a replica runs, or one card of it where they share experts."""

    units: StageUnits
    cards: tuple[Card, ...]
    position: int = 0
    """Of the card in its replica."""


@dataclass(frozen=True)
class StageHoldings:
    """What decides, beside the units, what the cards of a stage hold."""

    pipeline: PipelinePlan
    stage: StagePlan
    shares: StateShares
    twice: bool
    """Whether two of the units are one tied matrix: its cards have the head too, in this stage or another."""
    in_flight: int
    leaving: LeavingActivations | None
    pages: LeavingParameters | None


def memory_by_position(
    costs: Costs, held: StageHoldings, parts: Sequence[StagePart]
) -> tuple[tuple[MemoryForecast, float], ...]:
    """By position of a card in its replica, the tightest of these parts and what a plan may fill of it."""
    found: dict[int, tuple[MemoryForecast, float]] = {}
    for part in parts:
        own = _memory(costs, held, part)
        found[part.position] = min(own, found.get(part.position, own), key=free_bytes)
    return tuple(found.values())


def _memory(costs: Costs, held: StageHoldings, part: StagePart) -> tuple[MemoryForecast, float]:
    """(bytes on the tightest card of a part, what a plan may fill of it)."""
    problem, stage, leaving = costs.problem, held.stage, held.leaving
    types = {card.type: problem.cluster.device_type(card.type) for card in part.cards}
    name = min(types, key=lambda name: problem.usable_bytes(name) - types[name].reserved)
    parameters = sum(unit.parameters for unit in part.units.units[held.twice :])
    experts = part.units.expert_parameters / parameters if parameters else 0.0
    forecast = stage_memory(
        part.units.units,
        Ends(stage.embedding, stage.head, held.twice),
        in_flight=held.in_flight,
        boundary_bytes=part.units.boundary_bytes,
        reserved_bytes=float(types[name].reserved),
        shares=held.shares.blended(experts, offload=stage.optimizer_offload),
    )
    if leaving is not None:
        # Not where cards share experts: what they keep varies.
        away = held.in_flight * leaving.bytes_per_micro_batch - leaving.card_bytes
        forecast = replace(forecast, activations=max(0.0, forecast.activations - away))
    own = memory_with_pages(forecast, held.pipeline, stage, held.pages, part.units.boundary_bytes)
    return own, problem.usable_bytes(name)


def free_bytes(memory: tuple[MemoryForecast, float]) -> float:
    """Bytes that are left on a card."""
    return memory[1] - memory[0].total


# --- a stage ------------------------------------------------------------------------------------------------


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
