"""The polish of a plan: every kind of change, singly and in pairs, judged by the simulator.

`descent` changes layers, warm-up depths and, with them, recompute of one kind of pipeline at a time. The
structure of plans is the business of `drafts`.
"""

from __future__ import annotations

from dataclasses import replace

from yuan_train.config.plan import Plan
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.search.descent import (
    LEAST_GAIN,
    Budget,
    Cut,
    PipelineScreen,
    descend,
)
from yuan_train.planner.search.expressible import is_wanted
from yuan_train.planner.search.shapes import Options

Priced = tuple[Plan, PlanCost]
"""A plan and its cost."""


def polish_plan(costs: Costs, plan: Plan, cost: PlanCost, options: Options, budget: Budget) -> Priced:
    """(plan, cost): the plan itself, or a faster one of the same structure that fits, with other layers,
    warm-up depths and recompute. The plan itself if it has virtual stages or parts of layers."""
    best = plan, cost
    if plan.schedule == "interleaved_1f1b" or plan.divided_layers:
        return best
    while not budget.is_over:
        found = _descended(costs, best, options, budget, pairs=True)
        if found[1].step_seconds >= best[1].step_seconds * (1.0 - LEAST_GAIN):
            return found if found[1].step_seconds < best[1].step_seconds else best
        best = found
    return best


def polished_estimate(plan: Plan, cost: PlanCost) -> float:
    """Estimated step seconds if deeper warm-ups hid all transfers, at most the plan's own; selects the plans
    to polish."""
    compute = 0.0
    for pipeline, times in zip(plan.pipelines, cost.times, strict=True):
        work = [f + b for f, b in zip(times.forward_seconds, times.backward_seconds, strict=True)]
        if plan.schedule != "1f1b" or any(len(stage.replicas) > 1 for stage in pipeline.stages):
            return cost.step_seconds
        forward_sends, backward_sends = times.send_activation_seconds, times.send_gradient_seconds
        fill = sum(work) + sum(forward_sends) + sum(backward_sends)
        period = max([*work, *forward_sends, *backward_sends])
        compute = max(compute, fill + (pipeline.num_micro_batches - 1) * period)
    return cost.step_seconds - cost.compute_seconds + min(compute, cost.compute_seconds)


def _descended(costs: Costs, best: Priced, options: Options, budget: Budget, *, pairs: bool) -> Priced:
    """The plan with its slowest pipelines cut better, if the whole step gains by that."""
    plan, cost = best
    seconds = [simulation.step_seconds for simulation in cost.simulations]
    p = seconds.index(max(seconds))
    screen = PipelineScreen(
        costs, plan, cost, p, options.recompute, budget, may_deepen=not options.expressible
    )
    path = descend(screen, screen.cut, pairs=pairs)
    # What the screen does not see (reductions, shares of the state) can cost more than the cut gains; then
    # part of the way may still gain.
    for i in sorted({len(path) - 1, len(path) // 2, 0}, reverse=True):
        other = _with_cut(plan, screen, path[i])
        if other == plan or not is_wanted(other, options):
            continue
        other_cost = _priced(costs, other, budget)
        if other_cost.fits and other_cost.step_seconds < cost.step_seconds:
            return other, other_cost
    return best


def _priced(costs: Costs, plan: Plan, budget: Budget) -> PlanCost:
    """What `cost_plan` says; the budget counts its work in steps of a schedule, by the time it takes."""
    budget.work -= sum(
        600 * len(pipeline.stages) + 2 * pipeline.num_micro_batches * len(pipeline.stages)
        for pipeline in plan.pipelines
    )
    return cost_plan(costs, plan)


def _with_cut(plan: Plan, screen: PipelineScreen, cut: Cut) -> Plan:
    """The plan with a cut of the screen's pipeline, and of those that are cut alike."""
    if screen.fitted(cut) is None:
        return plan
    stages = screen.stages(cut)
    pipelines = list(plan.pipelines)
    for q in screen.alike:
        own = (
            replace(stage, replicas=old.replicas)
            for stage, old in zip(stages, plan.pipelines[q].stages, strict=True)
        )
        pipelines[q] = replace(pipelines[q], stages=tuple(own))
    return replace(plan, pipelines=tuple(pipelines), forecast=None)
