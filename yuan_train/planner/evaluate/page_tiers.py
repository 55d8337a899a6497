"""Parameters in pages of the host: what the card and the host keep of them, and what their copies take.

A group of micro-batches passes layer by layer: with h bytes a second of the link, a layer of P parameters and
n bytes each takes n P / h to come up, once for the forward and once for the backward of the group, and its
gradient as long to go down. That is hidden where the group's compute of a layer takes longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.run import ScheduleName
from yuan_train.planner.costs.unit_costs import UnitCost
from yuan_train.planner.evaluate.page_clock import PageTimes
from yuan_train.schedule.in_flight import MESSAGES_PER_EDGE
from yuan_train.schedule.pages import PagedGroups, Paging, by_group, paging_of, with_pages
from yuan_train.schedule.schedules import make_schedule
from yuan_train.schedule.step import Workers


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
    stage: StagePlan,
    units: Sequence[UnitCost],
    *,
    link_bytes_per_second: float,
    update_bytes_per_second: float,
    update_traffic: float,
) -> LeavingParameters:
    """What leaves a stage of `units`, in the model's order, embedding and head where it has them.

    `update_traffic` is what an optimizer step moves by parameter, in the host's memory.
    """
    first, count = int(stage.embedding), stage.parameter_offload
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
            weight_seconds=tuple(unit.parameter_bytes / link_bytes_per_second for unit in pages),
            gradient_seconds=tuple(unit.gradient_bytes / link_bytes_per_second for unit in pages),
        ),
        parameters=parameters,
        parameter_bytes=away("parameter_bytes"),
        gradient_bytes=away("gradient_bytes"),
        optimizer_bytes=math.fsum(unit.optimizer_bytes for unit in pages),
        host_bytes=math.fsum(unit.state_bytes for unit in pages),
        update_seconds=parameters * update_traffic / update_bytes_per_second,
    )


def group_bytes(pipeline: PipelinePlan, stage: StagePlan, boundary_bytes: float) -> float:
    """What a stage holds more because a group passes it together: messages on both edges, and one gradient
    of a hidden state for each member."""
    num_edges = (not stage.embedding) + (not stage.head)
    return (pipeline.page_group - 1) * boundary_bytes * (1 + num_edges * MESSAGES_PER_EDGE)


def pipeline_pages(plan: Plan, p: int) -> Mapping[int, PagedGroups]:
    """By worker of a pipeline, its groups with the copies of pages, where its stage has any."""
    pipeline = plan.pipelines[p]
    pagings = tuple(paging_of(stage, group=pipeline.page_group) for stage in pipeline.stages)
    if not any(pagings):
        return {}
    return _with_pages(
        plan.schedule,
        pipeline.workers,
        pipeline.num_micro_batches,
        pipeline.depths(plan.schedule),
        pipeline.page_group,
        pagings,
    )


@functools.lru_cache(maxsize=64)
def _with_pages(
    schedule: ScheduleName,
    workers: Workers,
    num_micro_batches: int,
    in_flight: tuple[int, ...] | None,
    group: int,
    pagings: tuple[Paging | None, ...],
) -> dict[int, PagedGroups]:
    programs = make_schedule(
        schedule, workers=workers, num_micro_batches=num_micro_batches, in_flight=in_flight, group=group
    )
    return {
        workers[stage][0]: by_group(with_pages(programs[workers[stage][0]], paging))
        for stage, paging in enumerate(pagings)
        if paging is not None
    }
