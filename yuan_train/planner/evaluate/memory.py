"""Peak bytes of a stage on each of its cards, never pooled over them, and what leaves for host and disk.

    M = parameters + gradients + optimizer + in_flight * activations + logits + buffers + reserved

The first four are sums over the stage's units. A critic adds its parameters, gradients and optimizer state.
State, activations and parameters may leave the card, at the cost of copies.

A group of micro-batches with pages passes layer by layer: with h bytes a second of the link, a layer of P
parameters and n bytes each takes n P / h to come up, once for the forward and once for the backward of the
group, and its gradient as long to go down. That is hidden where the group's compute of a layer takes longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from yuan_train.config.cluster import Card
from yuan_train.config.devices import Precision
from yuan_train.config.errors import PlanError
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import MemoryForecast, PipelinePlan, Plan, StagePlan
from yuan_train.planner.costs.grad_reduce import StateShares
from yuan_train.planner.costs.plan_problem import (
    HostShare,
    disk_bytes,
    disk_step_seconds,
    host_bytes,
    host_step_seconds,
    slot_bytes,
)
from yuan_train.planner.costs.unit_costs import (
    CardCosts,
    Costs,
    StageUnits,
    UnitCost,
    share_of_layer,
    without_critic,
)
from yuan_train.planner.costs.workload import ELEMENT_BYTES, STATE_BYTES
from yuan_train.planner.evaluate.simulator import Groups, PageTimes, PartTimes
from yuan_train.schedule import copies
from yuan_train.schedule.copies import PagedGroups, Paging, by_group, paging_of, with_pages
from yuan_train.schedule.schedules import MESSAGES_PER_EDGE, ProgramShape, make_schedule
from yuan_train.schedule.step import RankProgram

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
    parts = _parts(plan, stage, units)
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


def _parts(plan: Plan, stage: StagePlan, own: StageUnits) -> list[UnitCost]:
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
