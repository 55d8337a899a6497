"""Activations that leave the card: what the card and the host keep of them, and what their copies take."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from yuan_train.config.errors import PlanError
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.run import ScheduleName
from yuan_train.planner.costs.plan_problem import Costs, Replica
from yuan_train.planner.costs.unit_costs import UnitCost, share_of_layer
from yuan_train.planner.evaluate.copies import Groups, PartTimes
from yuan_train.schedule.copies import (
    Offload,
    TooFewResident,
    group_copies,
    kept_bytes,
    offloads_of,
    with_copies,
)
from yuan_train.schedule.schedules import make_schedule
from yuan_train.schedule.step import RankProgram, Workers


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
    """What leaves stage s of pipeline p, by the costs of one replica.

    Raises PlanError if the plan lets too few parts stay for its schedule.
    """
    pipeline = plan.pipelines[p]
    stage = pipeline.stages[s]
    units = costs.of_stage(plan, replica, pipeline.micro_batch_size, stage)
    parts = _parts(costs, plan, replica, pipeline.micro_batch_size, stage)
    held = [part.activation_bytes for part in parts[: stage.num_leaving_parts]]
    if not stage.embedding:
        # What the stage received stays: its gradient is sent back.
        held[0] = max(0.0, held[0] - units.boundary_bytes)
    link = min(costs.host_of(card).link_bytes_per_second for card in replica)
    programs = _programs(plan, pipeline, p)
    peaks = [kept_bytes(programs[worker], {s: held}) for worker in pipeline.workers[s]]
    forward, backward = ([getattr(part, name) for part in parts] for name in _SECONDS)
    # Embedding and head belong to the parts at the ends.
    for seconds, name in ((forward, _SECONDS[0]), (backward, _SECONDS[1])):
        seconds[0] += getattr(units.started[0], name) if stage.embedding else 0.0
        seconds[-1] += getattr(units.started[-1], name) if stage.head else 0.0
    return LeavingActivations(
        times=PartTimes(
            forward_seconds=tuple(forward),
            backward_seconds=tuple(backward),
            copy_seconds=tuple(size / link for size in held),
        ),
        bytes_per_micro_batch=sum(held),
        card_bytes=max(card for card, _ in peaks),
        host_bytes=max(host for _, host in peaks),
    )


_SECONDS = ("forward_seconds", "backward_seconds")


def pipeline_copies(plan: Plan, p: int) -> Mapping[int, Groups]:
    """By worker of a pipeline, its steps in parts with copies, where a stage of it offloads activations."""
    programs = _programs(plan, plan.pipelines[p], p)
    return {worker: group_copies(program) for worker, program in programs.items()}


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


def _programs(plan: Plan, pipeline: PipelinePlan, p: int) -> dict[int, RankProgram]:
    offloads = offloads_of(dict(enumerate(pipeline.stages)))
    try:
        return _with_copies(
            plan.schedule,
            pipeline.workers,
            pipeline.num_micro_batches,
            pipeline.depths(plan.schedule),
            tuple(offloads.items()),
        )
    except TooFewResident as error:
        raise TooFewResidentInPlan(p, error) from error


class TooFewResidentInPlan(PlanError):
    """Of a pipeline; its text is made when it is read, as that of its cause."""

    def __init__(self, pipeline: int, cause: TooFewResident) -> None:
        super().__init__(pipeline, cause)
        self._pipeline, self._cause = pipeline, cause

    def __str__(self) -> str:
        return f"pipelines[{self._pipeline}]: {self._cause}"


@functools.lru_cache(maxsize=64)
def _with_copies(
    schedule: ScheduleName,
    workers: Workers,
    num_micro_batches: int,
    in_flight: tuple[int, ...] | None,
    offloads: tuple[tuple[int, Offload], ...],
) -> dict[int, RankProgram]:
    programs = make_schedule(
        schedule, workers=workers, num_micro_batches=num_micro_batches, in_flight=in_flight
    )
    found: dict[int, RankProgram] = {}
    for worker, program in enumerate(programs):
        own = {stage: offload for stage, offload in offloads if worker in workers[stage]}
        if own:
            found[worker] = with_copies(program, own)
    return found
