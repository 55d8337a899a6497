"""The polish of a plan: every kind of change, singly and in pairs, judged by the simulator.

Two loops. The inner one (`descent`) changes layers, warm-up depths and, with them, recompute of one kind of
pipeline at a time, singly and in pairs. The outer one (`restructure`, `regroup`) changes what these depend
on: micro-batch size, shares of the batch, schedule, widths, replicas, order, stages, cards, pipelines. Each
of its neighbours is cut anew and goes through the inner loop before it is compared, so that a structure is
judged by what it can be, not by the cut that it happens to begin with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan, divides_experts
from yuan_train.config.run import ScheduleName
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.search.descent import (
    LEAST_GAIN,
    Budget,
    Cut,
    PipelineScreen,
    balanced_cut,
    descend,
)
from yuan_train.planner.search.expressible import is_wanted
from yuan_train.planner.search.regroup import regrouped
from yuan_train.planner.search.restructure import Draft, draft_of, neighbours, plan_of
from yuan_train.planner.search.shapes import Options

Priced = tuple[Plan, PlanCost]
"""A plan and its cost."""
Realised = dict[Draft, tuple[Priced | None, float]]
"""What became of drafts, and the step that each had to come near."""
WORTH_DESCENDING = 1.15
"""A neighbour is cut further only if its first cuts take at most this multiple of the best step."""
WORTH_PAIRING = 1.03
"""A change that leads to at most this multiple of the best step may be the first of two."""
FEW_CARDS = 8
"""Cards up to which every part of a change of structure has the whole budget."""


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


def restructure_plan(
    costs: Costs,
    plan: Plan,
    cost: PlanCost,
    cards: Sequence[Card],
    options: Options,
    budget: Budget,
    known: Realised,
) -> Priced:
    """(plan, cost): the plan itself, or a faster one that fits, of any structure that single changes lead to,
    each polished. A change that gains is kept, and the search goes on from there. What is `known` is not done
    again; it belongs to these costs, and to options that differ in `polished_schedules` and `polished_sizes`
    alone."""
    best = plan, cost
    if plan.schedule == "interleaved_1f1b" or plan.divided_layers or divides_experts(plan):
        return best
    own_sizes = tuple(dict.fromkeys(pipeline.micro_batch_size for pipeline in plan.pipelines))
    own = replace(options, polished_schedules=(plan.schedule,), polished_sizes=own_sizes)
    # Two ways lead to unlike plans: all choices at once, and the plan's own schedule and sizes first. On few
    # cards the parts below have the time for both.
    wide = best
    if len(cards) > FEW_CARDS:
        at_once = budget.part(budget.work / 2)
        wide = _restructured(costs, best, cards, options, at_once, set(), known)
        budget.work += at_once.work - budget.work / 2
    half = budget.part(budget.work / 2)
    # What did not gain under less choice does not gain from the same plan under more.
    tried: set[Draft] = set()
    best = _restructured(costs, best, cards, own, half, tried, known)
    budget.work += half.work - budget.work / 2
    # Under more choice from where less choice ends: what it finds is never slower.
    several = len(options.polished_schedules) > 1, len(options.polished_sizes) > len(own_sizes)
    parts = [
        replace(options, polished_schedules=(plan.schedule,)),
        replace(options, polished_sizes=own_sizes),
    ]
    start, share = best, budget.work if len(cards) <= FEW_CARDS else budget.work / 4
    for part in parts if all(several) else ():
        apart = budget.part(share)
        found = _restructured(costs, start, cards, part, apart, tried, known)
        best = min(best, found, key=lambda priced: priced[1].step_seconds)
        if len(cards) > FEW_CARDS:
            budget.work -= share - apart.work
    last = _restructured(costs, best, cards, options, budget, tried, known)
    return min(last, wide, key=lambda priced: priced[1].step_seconds)


def under_schedule(
    costs: Costs,
    plan: Plan,
    cost: PlanCost,
    schedule: ScheduleName,
    options: Options,
    budget: Budget,
    known: Realised,
) -> Priced | None:
    """The plan under another schedule, cut anew for it, however slow; None if it does not fit."""
    if plan.schedule in (schedule, "interleaved_1f1b") or plan.divided_layers or divides_experts(plan):
        return None
    draft = replace(draft_of(plan, cost), schedule=schedule)
    return _realised(costs, draft, math.inf, options, budget, known)


def _restructured(
    costs: Costs,
    best: Priced,
    cards: Sequence[Card],
    options: Options,
    budget: Budget,
    tried: set[Draft],
    known: Realised,
) -> Priced:
    """The best plan that changes lead to under these options; see `restructure_plan`. Where no change gains
    by itself, the search goes on from the changes that cost least: so are two changes found that gain
    together. `tried` are the changes that were tried so far."""
    near: list[Priced] = []
    centre: Priced = best
    while not budget.is_over:
        found: Priced = _around(costs, centre, best, cards, options, budget, tried, known, near)
        if found is not best:
            best = polish_plan(costs, found[0], found[1], options, budget)
            centre = best
            continue
        nearest = _take_nearest(near, best)
        if nearest is None:
            break
        centre = polish_plan(costs, nearest[0], nearest[1], options, budget)
        if centre[1].step_seconds < best[1].step_seconds:
            best = centre
    return best


def _take_nearest(near: list[Priced], best: Priced) -> Priced | None:
    """Take the fastest plan from the list; those that are no longer near the best one are dropped."""
    near.sort(key=lambda priced: priced[1].step_seconds)
    return near.pop(0) if near and _is_near(near[0], best) else None


def _around(
    costs: Costs,
    centre: Priced,
    best: Priced,
    cards: Sequence[Card],
    options: Options,
    budget: Budget,
    tried: set[Draft],
    known: Realised,
    near: list[Priced],
) -> Priced:
    """The best plan that single changes lead to from `centre` on, each change faster than all before; `best`
    if none is. Adds those that were nearly as fast to `near`, and all to `tried`."""

    def around(plan: Plan, cost: PlanCost) -> list[Draft]:
        draft = draft_of(plan, cost)
        return [*neighbours(costs, draft, cards, options), *regrouped(draft, options)]

    drafts = around(*centre)
    i = since = 0
    while since < len(drafts) and not budget.is_over:
        draft = drafts[i % len(drafts)]
        i, since = i + 1, since + 1
        if draft in tried:
            continue
        tried.add(draft)
        found = _realised(costs, draft, best[1].step_seconds, options, budget, known)
        if found is None:
            continue
        if found[1].step_seconds < best[1].step_seconds * (1.0 - LEAST_GAIN):
            best, since = found, 0
            drafts = around(*best)
        elif _is_near(found, best):
            near.append(found)
    return best


def _is_near(other: Priced, best: Priced) -> bool:
    return other[1].step_seconds < WORTH_PAIRING * best[1].step_seconds


def _realised(
    costs: Costs, draft: Draft, limit: float, options: Options, budget: Budget, known: Realised
) -> Priced | None:
    """As `_realise`, of drafts that are not known."""
    if draft in known:
        found, nearest = known[draft]
        if found is not None or limit <= nearest:
            return found
    found = _realise(costs, draft, limit, options, budget)
    # Where the budget ended, the cut may be half done.
    if not budget.is_over:
        known[draft] = found, limit
    return found


def _realise(costs: Costs, draft: Draft, limit: float, options: Options, budget: Budget) -> Priced | None:
    """The plan of a draft, with recompute where memory requires it, cut anew if that is better; None if it
    does not fit or does not come near `limit` seconds."""
    plan = plan_of(costs, draft)
    if not is_wanted(plan, options):
        return None
    cost = _priced(costs, plan, budget)
    done: set[int] = set()
    for p in range(len(plan.pipelines)):
        if p in done:
            continue
        screen = PipelineScreen(
            costs, plan, cost, p, options.recompute, budget, may_deepen=not options.expressible
        )
        done.update(screen.alike)
        starts = [cut for cut in (screen.cut, balanced_cut(screen)) if cut is not None]
        timed = [(screen.seconds(cut), i) for i, cut in enumerate(starts)]
        seconds, i = min(timed)
        if seconds > limit * WORTH_DESCENDING:
            return None
        path = descend(screen, starts[i], pairs=False)
        plan = _with_cut(plan, screen, path[-1])
    cost = _priced(costs, plan, budget)
    return (plan, cost) if cost.fits else None


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
