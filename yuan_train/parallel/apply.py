"""From a plan and a built stage to something that can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from yuan_train.config.errors import PlanError
from yuan_train.config.plan import Plan
from yuan_train.parallel.bridge import Boundary, Bridge
from yuan_train.parallel.gradients import FlatBucket
from yuan_train.parallel.grid import Grid, Place, unit_of
from yuan_train.parallel.groups import Groups, make_groups
from yuan_train.schedule.check import check_table, peak_in_flight
from yuan_train.schedule.step import Lane, Table
from yuan_train.schedule.tables import SCHEDULES, forward_only, make_table


@dataclass(frozen=True)
class Worker:
    """One rank of a plan, ready to work: its place, its lane, its flat weights and its neighbours."""

    grid: Grid
    place: Place
    lane: Lane
    buckets: list[FlatBucket]
    groups: Groups
    bridge: Bridge | None

    def evaluation_lane(self) -> Lane:
        """The lane that only forwards."""
        pipeline = self.grid.pipeline(self.place)
        table = forward_only(num_stages=len(pipeline.stages), num_micro_batches=pipeline.num_micro_batches)
        return table[self.place.stage]


def parallelize(
    model: torch.nn.Module, plan: Plan, rank: int, *, device: torch.device, dtype: torch.dtype
) -> Worker:
    """Lay the stage's weights flat and join it to its neighbours; collective over all ranks.

    `model` is this rank's part, its parameters under their global names; `dtype` is what crosses the cuts.
    """
    grid = Grid(plan)
    place = grid.places[rank]
    table = pipeline_table(plan, place.pipeline)
    groups = make_groups(grid, device=device)
    parameters = dict(model.named_parameters())
    pipeline = grid.pipeline(place)
    boundary = Boundary(
        (pipeline.micro_batch_size, plan.sequence_length, plan.model.hidden_size), dtype, device
    )
    bridge = None
    if len(pipeline.stages) > 1:
        window = 1 + max(peak_in_flight(lane) for lane in table)
        bridge = Bridge(grid, place, groups, boundary, window=window)
    return Worker(
        grid=grid,
        place=place,
        lane=table[place.stage],
        buckets=_flatten(grid, rank, parameters),
        groups=groups,
        bridge=bridge,
    )


def pipeline_table(plan: Plan, pipeline: int) -> Table:
    """The checked schedule table of one pipeline."""
    shape = plan.pipelines[pipeline]
    table = make_table(plan.schedule, num_stages=len(shape.stages), num_micro_batches=shape.num_micro_batches)
    check_table(table)
    return table


def _flatten(grid: Grid, rank: int, parameters: dict[str, torch.nn.Parameter]) -> list[FlatBucket]:
    flat: list[FlatBucket] = []
    for bucket in grid.buckets:
        if rank in bucket.owners:
            held = {name: p for name, p in parameters.items() if unit_of(name) in bucket.units}
            if held:
                flat.append(FlatBucket(bucket, held))
    assert sum(len(bucket.parameters) for bucket in flat) == len(parameters)
    return flat


def check_supported(plan: Plan) -> None:
    """Raise PlanError, with every reason, if the plan asks for something that the engine cannot run yet."""
    reasons = list(_not_yet(plan))
    if reasons:
        raise PlanError("\n".join(f"this plan cannot be run yet: {reason}" for reason in reasons))


def _not_yet(plan: Plan) -> Iterator[str]:
    if plan.schedule not in SCHEDULES:
        yield f"schedule: {plan.schedule}; use one of {', '.join(SCHEDULES)}"
    if plan.optimizer_sharding:
        yield "optimizer_sharding: true; set it to false"
    first = plan.pipelines[0]
    for p, pipeline in enumerate(plan.pipelines):
        where = f"pipelines[{p}]"
        cut = [stage.layers for stage in pipeline.stages]
        if cut != [stage.layers for stage in first.stages]:
            yield f"{where}: cut unlike pipelines[0]; give all pipelines the same layers per stage"
        if (pipeline.micro_batch_size, pipeline.num_micro_batches) != (
            first.micro_batch_size,
            first.num_micro_batches,
        ):
            yield f"{where}: micro-batches unlike pipelines[0]; give all pipelines the same size and number"
        for s, stage in enumerate(pipeline.stages):
            where = f"pipelines[{p}].stages[{s}]"
            if len(stage.replicas) > 1:
                yield f"{where}.replicas: {len(stage.replicas)} replicas; use one, or more pipelines"
            if len(stage.ranks) > len(stage.replicas):
                yield f"{where}.replicas: tensor-parallel width above 1; use 1"
            if stage.recompute == "selective":
                yield f"{where}.recompute: selective; use none or full"
            if stage.optimizer_offload > 0:
                yield f"{where}.optimizer_offload: {stage.optimizer_offload}; use 0"
