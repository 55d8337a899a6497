"""Activations and parameters that leave the card: what card and host keep, and what copies take.

A group of micro-batches with pages passes layer by layer: with h bytes a second of the link, a layer of P
parameters and n bytes each takes n P / h to come up, once for the forward and once for the backward of the
group, and its gradient as long to go down. That is hidden where the group's compute of a layer takes longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from yuan_train.config.errors import PlanError
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.run import ScheduleName
from yuan_train.planner.costs.plan_problem import Costs, Replica, StageUnits
from yuan_train.planner.costs.unit_costs import UnitCost, share_of_layer
from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.evaluate.clocks import Groups, PageTimes, PartTimes
from yuan_train.schedule import copies
from yuan_train.schedule.pages import PagedGroups, Paging, by_group, paging_of, with_pages
from yuan_train.schedule.schedules import MESSAGES_PER_EDGE, make_schedule
from yuan_train.schedule.step import RankProgram, Workers


class _Shape(NamedTuple):
    """What makes the programs of a pipeline: as `make_schedule` takes it."""

    schedule: ScheduleName
    workers: Workers
    num_micro_batches: int
    in_flight: tuple[int, ...] | None
    group: int


def _shape_of(plan: Plan, pipeline: PipelinePlan) -> _Shape:
    depths = pipeline.depths(plan.schedule)
    return _Shape(plan.schedule, pipeline.workers, pipeline.num_micro_batches, depths, pipeline.page_group)


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


def leaving_activations(costs: Costs, plan: Plan, p: int, s: int, replica: Replica) -> LeavingActivations:
    """What leaves stage s of pipeline p, by the costs of one replica. Raises PlanError if the plan lets too
    few parts stay for its schedule."""
    pipeline = plan.pipelines[p]
    stage = pipeline.stages[s]
    units = costs.of_stage(plan, replica, pipeline.micro_batch_size, stage)
    parts = _parts(costs, plan, replica, pipeline.micro_batch_size, stage)
    held = [part.activation_bytes for part in parts[: stage.num_leaving_parts]]
    if not stage.embedding:
        # What the stage received stays: its gradient is sent back.
        held[0] = max(0.0, held[0] - units.boundary_bytes)
    link = min(costs.host_of(card).link_bytes_per_second for card in replica)
    programs = _programs(plan, p)
    peaks = [copies.kept_bytes(programs[worker], {s: held}) for worker in pipeline.workers[s]]

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


def pipeline_copies(plan: Plan, p: int) -> Mapping[int, Groups]:
    """By worker of a pipeline, its steps in parts with copies, where a stage of it offloads activations."""
    programs = _programs(plan, p)
    return {worker: copies.group_copies(program) for worker, program in programs.items()}


def _parts(
    costs: Costs, plan: Plan, replica: Replica, micro_batch_size: int, stage: StagePlan
) -> list[UnitCost]:
    """The costs of a stage's halves of layers, in order."""
    units = iter(costs.of_stage(plan, replica, micro_batch_size, stage).started[stage.embedding :])
    found: list[UnitCost] = []
    for layer, half in stage.parts:
        if int(stage.layers[0]) + layer in plan.divided_layers:
            found.append(next(units))
            continue
        if half == 0:
            whole = next(units)
            kind = stage.recompute if layer < stage.num_recomputed else "none"
            halves = costs.of_replica(replica, micro_batch_size, kind).halves
            found += [share_of_layer(whole, share) for share in halves]
    return found


def _programs(plan: Plan, p: int) -> dict[int, RankProgram]:
    """By worker of a pipeline, its program with the copies of activations, if a stage of it offloads any."""
    pipeline = plan.pipelines[p]
    offloads = copies.offloads_of(dict(enumerate(pipeline.stages)))
    try:
        return _with_copies(_shape_of(plan, pipeline), tuple(offloads.items()))
    except copies.TooFewResident as error:
        raise TooFewResidentInPlan(p, error) from error


class TooFewResidentInPlan(PlanError):
    """Of a pipeline; its text is made when it is read, as that of its cause."""

    def __init__(self, pipeline: int, cause: copies.TooFewResident) -> None:
        super().__init__(pipeline, cause)
        self._pipeline, self._cause = pipeline, cause

    def __str__(self) -> str:
        return f"pipelines[{self._pipeline}]: {self._cause}"


@functools.lru_cache(maxsize=64)
def _with_copies(shape: _Shape, offloads: tuple[tuple[int, copies.Offload], ...]) -> dict[int, RankProgram]:
    found: dict[int, RankProgram] = {}
    for worker, program in enumerate(make_schedule(**shape._asdict())):
        own = {stage: offload for stage, offload in offloads if worker in shape.workers[stage]}
        if own:
            found[worker] = copies.with_copies(program, own)
    return found


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
    costs: Costs, stage: StagePlan, own: StageUnits, cards: Replica
) -> LeavingParameters | None:
    """What leaves a stage of these units; None if all stay."""
    if not stage.parameter_offload:
        return None
    hosts = [costs.host_of(card) for card in cards]
    link = min(host.link_bytes_per_second for host in hosts)
    traffic = STATE_BYTES[costs.problem.precision].update_traffic
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


def group_bytes(pipeline: PipelinePlan, stage: StagePlan, boundary_bytes: float) -> float:
    """What a stage holds more for a group: messages on both edges, and a gradient of each hidden state."""
    num_edges = (not stage.embedding) + (not stage.head)
    return (pipeline.page_group - 1) * boundary_bytes * (1 + num_edges * MESSAGES_PER_EDGE)


def pipeline_pages(plan: Plan, p: int) -> Mapping[int, PagedGroups]:
    """By worker of a pipeline, its groups with the copies of pages, where its stage has any."""
    pipeline = plan.pipelines[p]
    pagings = tuple(paging_of(stage, group=pipeline.page_group) for stage in pipeline.stages)
    return _with_pages(_shape_of(plan, pipeline), pagings) if any(pagings) else {}


@functools.lru_cache(maxsize=64)
def _with_pages(shape: _Shape, pagings: tuple[Paging | None, ...]) -> dict[int, PagedGroups]:
    programs = make_schedule(**shape._asdict())
    return {
        shape.workers[stage][0]: by_group(with_pages(programs[shape.workers[stage][0]], paging))
        for stage, paging in enumerate(pagings)
        if paging is not None
    }
