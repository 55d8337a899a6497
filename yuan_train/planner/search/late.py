"""A found plan, priced with host updates that come a step late (`optimizer.update: delayed`).

Late updates change the loss, so that they are the run's choice and no search chooses them: plans are found as
if every update came in time.
"""

from __future__ import annotations

from dataclasses import replace

from yuan_train.config.units import show_seconds
from yuan_train.planner.costs.plan_problem import PlanProblem, make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan, make_forecast
from yuan_train.planner.search.search_result import SearchResult


def with_late_updates(problem: PlanProblem, result: SearchResult) -> SearchResult:
    """The result with its best plan's forecast as it runs with late updates, and a note on it."""
    best = result.best
    if not any(stage.host_bytes for stage in best.cost.stages):
        return replace(result, notes=(*result.notes, NOTHING_LATE))
    costs = make_costs(replace(problem, late_updates=True))
    cost = cost_plan(costs, best.plan)
    bound = min(result.lower_bound_seconds, cost.step_seconds)
    plan = replace(best.plan, forecast=make_forecast(costs, best.plan, cost, lower_bound_seconds=bound))
    note = f"host updates come a step late; in time, a step takes {show_seconds(best.step_seconds)}"
    if not cost.fits:
        note += ", and fits: the gradients of the late updates do not fit the hosts"
    return replace(
        result,
        best=replace(best, plan=plan, cost=cost),
        lower_bound_seconds=bound,
        notes=(*result.notes, note),
    )


NOTHING_LATE = "no stage offloads optimizer state: train with optimizer.update: exact"
