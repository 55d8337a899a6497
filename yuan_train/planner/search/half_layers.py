"""Cuts between attention and feed-forward: borders of a plan's stages are shifted by half a layer.

Stages of a whole-layer plan are up to a layer away from the best cut; a border in the middle of a layer
halves that. With experts the halves are unlike: attention needs compute, experts memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from yuan_train.config.plan import Plan, StagePlan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.planner.costs.expert_costs import divides_alike
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan

LEAST_GAIN = 1e-4
"""Part of the step; a shift that gains less is not kept."""
MAX_ROUNDS = 20


def shift_by_halves(
    costs: Costs, plan: Plan, cost: PlanCost, stopped: Callable[[], bool]
) -> tuple[Plan, PlanCost]:
    """(plan, cost): the plan itself, or a faster one that fits, found by shifting borders by half a layer.

    Steepest descent: of all single shifts and of all shifts of two borders of a pipeline, the one that gains
    most, until none gains.
    """
    best = plan, cost
    for _ in range(MAX_ROUNDS):
        found = best
        for shifted in _shifted(best[0]):
            if stopped():
                return best
            if list(validate_plan(shifted)) or not divides_alike(shifted):
                continue
            other = cost_plan(costs, shifted)
            if other.fits and other.step_seconds < found[1].step_seconds:
                found = shifted, other
        if found[1].step_seconds > best[1].step_seconds * (1.0 - LEAST_GAIN):
            return best
        best = found
    return best


def _shifted(plan: Plan) -> Iterator[Plan]:
    """The plan with one border, or two of the same pipeline, half a layer further down or up."""
    for p, pipeline in enumerate(plan.pipelines):
        borders = range(1, len(pipeline.stages))
        for a in borders:
            for by in (-0.5, 0.5):
                yield _with_borders(plan, p, {a: by})
        for a in borders:
            for b in range(a + 1, len(pipeline.stages)):
                for first in (-0.5, 0.5):
                    for second in (-0.5, 0.5):
                        yield _with_borders(plan, p, {a: first, b: second})


def _with_borders(plan: Plan, p: int, shifts: dict[int, float]) -> Plan:
    """The plan with the first border of some stages of pipeline p shifted by so many layers."""
    pipeline = plan.pipelines[p]
    borders = [stage.layers[0] + shifts.get(s, 0.0) for s, stage in enumerate(pipeline.stages)]
    borders.append(pipeline.stages[-1].layers[1])
    # Which layers are recomputed is told by number: a stage that shrinks may hold fewer.
    stages: list[StagePlan] = []
    for s, stage in enumerate(pipeline.stages):
        moved = replace(stage, layers=(borders[s], borders[s + 1]), recompute_layers=None)
        if stage.recompute_layers is not None and stage.recompute_layers < moved.num_blocks:
            moved = replace(moved, recompute_layers=stage.recompute_layers)
        stages.append(moved)
    pipelines = list(plan.pipelines)
    pipelines[p] = replace(pipeline, stages=tuple(stages))
    return replace(plan, pipelines=tuple(pipelines))
