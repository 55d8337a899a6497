"""Activations on the hosts instead of recompute, tried on finished plans (`search.offload`).

A plan that recomputes does so for want of memory. On each of its recomputing stages activations leave
instead: of as few layers as let the stage fit, for several numbers of parts that stay and of parts that a
fetch is ahead. First on all of these stages at once, because the slowest of them decides, then without those
that are faster as they were. The cut stays as it is, so this is no proof of anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from yuan_train.config.errors import PlanError
from yuan_train.config.plan import Plan, StagePlan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.plan_units import divides_experts
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.evaluate.stage_cost import StageCost, change_stage
from yuan_train.planner.search.explore import Candidate
from yuan_train.planner.search.shapes import Options

MOST_CARDS = 56
"""Cards up to which this is tried: beyond, the search takes its time for cuts."""
NUM_PLANS = 1
"""How many of the fastest plans that recompute are changed."""
RESIDENT = (4, 16)
AHEAD = (2, 6)
SHARES = (1 / 4, 1 / 2, 3 / 4, 1)
"""Of a stage's layers, those that leave."""

LEAVING_SHARE = 1.1
"""Of a stage's activations by layer: no more than that leaves with one. Messages are none of a layer's."""

Place = tuple[int, int]
"""Pipeline and stage."""


def may_send_activations(costs: Costs, ranked: Sequence[Candidate], options: Options) -> bool:
    """Whether there are plans to try this on."""
    problem = costs.problem
    if not options.offload_activations or problem.compile:
        return False
    return len(problem.cluster.cards) <= MOST_CARDS and any(map(_recomputing, ranked))


def with_activations_away(
    costs: Costs, ranked: Sequence[Candidate], options: Options, stopped: Callable[[], bool]
) -> list[Candidate]:
    """Plans that are faster than the one of `ranked` that they are made of."""
    found: list[Candidate] = []
    for candidate in [c for c in ranked if _recomputing(c)][:NUM_PLANS]:
        plan, cost = candidate.plan, candidate.cost
        best: dict[Place, StagePlan] = {}
        for change in _changes(costs, candidate, options):
            if stopped():
                break
            changed = _changed(costs, candidate.plan, change)
            if changed is not None and changed[1].step_seconds < cost.step_seconds:
                (plan, cost), best = changed, change
        # Without stages that are faster as they were.
        for place in list(best) if len(best) > 1 else []:
            fewer = {other: stage for other, stage in best.items() if other != place}
            changed = None if stopped() else _changed(costs, candidate.plan, fewer)
            if changed is not None and changed[1].step_seconds < cost.step_seconds:
                (plan, cost), best = changed, fewer
        if plan is not candidate.plan:
            found.append(replace(candidate, plan=plan, cost=cost))
    return found


def _recomputing(candidate: Candidate) -> list[StageCost]:
    """The stages of a plan that recompute, and whose cards have no other stage."""
    if divides_experts(candidate.plan):
        return []
    pipelines = [pipeline.workers for pipeline in candidate.plan.pipelines]
    if any(len(set(w := [*itertools.chain(*workers)])) < len(w) for workers in pipelines):
        return []
    return [stage for stage in candidate.cost.stages if stage.num_recomputed]


def _changes(costs: Costs, candidate: Candidate, options: Options) -> Iterator[dict[Place, StagePlan]]:
    """Stages to replace: all that recompute."""
    stages = _recomputing(candidate)
    kinds: list[Recompute] = [kind for kind in options.recompute if kind != "full"]
    for kind, resident, ahead in itertools.product(kinds, RESIDENT, AHEAD):
        change: dict[Place, StagePlan] = {}
        for old in stages:
            stage = _away(costs, candidate.plan, old, kind, resident, ahead)
            if stage is not None:
                change[old.pipeline, old.stage] = stage
        if change:
            yield change


def _away(
    costs: Costs, plan: Plan, old: StageCost, kind: Recompute, resident: int, ahead: int
) -> StagePlan | None:
    """The stage with activations of as few layers away as let it fit; None if it does not, so or so."""
    stage = replace(plan.pipelines[old.pipeline].stages[old.stage], recompute=kind, recompute_layers=None)
    kept = change_stage(costs, plan, old, stage)
    over = kept.memory.total - kept.capacity_bytes
    for count in sorted({max(1, round(share * stage.num_blocks)) for share in SHARES}):
        # At the very least what these layers keep must leave; to tell how much stays takes the schedule.
        if over > LEAVING_SHARE * kept.memory.activations * count / stage.num_blocks:
            continue
        changed = replace(stage, activation_offload=count, resident_parts=resident, fetch_ahead=ahead)
        try:
            if change_stage(costs, plan, old, changed).fits:
                return changed
        except PlanError:
            # Too few parts may stay for this schedule.
            continue
    return None


def _changed(costs: Costs, plan: Plan, change: dict[Place, StagePlan]) -> tuple[Plan, PlanCost] | None:
    """The plan with stages replaced, and its cost; None if it does not fit."""
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(change.get((p, s), stage) for s, stage in enumerate(pipeline.stages)),
        )
        for p, pipeline in enumerate(plan.pipelines)
    )
    plan = replace(plan, pipelines=pipelines)
    if any(True for _ in validate_plan(plan)):
        return None
    cost = cost_plan(costs, plan)
    return (plan, cost) if cost.fits else None
