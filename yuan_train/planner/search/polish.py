"""Post-optimisation of a plan: no more recompute than memory requires, deeper warm-ups before slow links.

The search only tries stages that recompute all their layers or none, and 1F1B's own depths. Here a stage
recomputes only its first layers, as few as make it fit, and the stages before a slow link hold more
micro-batches in flight, as far as their cards' memory allows. A change is kept if the simulated step gains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from yuan_train.config.plan import Plan, StagePlan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.evaluate.simulator import StageTimes
from yuan_train.planner.evaluate.stage_cost import StageCost, change_stage

LEAST_GAIN = 0.01
"""Part of the period; a deeper warm-up that gains less is not worth its memory."""


def polish_plan(
    costs: Costs, plan: Plan, cost: PlanCost, recompute: Sequence[Recompute]
) -> tuple[Plan, PlanCost]:
    """(plan, cost): the plan itself, or one that is not slower, with fewer layers recomputed (in the kinds of
    `recompute`) or with deeper warm-ups. Always the plan itself unless its schedule is 1f1b or gpipe."""
    if plan.schedule not in ("1f1b", "gpipe"):
        return plan, cost
    best = plan, cost
    lighter = _recompute_less(costs, plan, cost, recompute)
    if lighter != plan:
        best = _better(costs, best, lighter, at_most=1.0)
    deeper = _deepen(costs, plan, cost)
    if deeper != plan:
        lighter = _recompute_less(costs, deeper, cost_plan(costs, deeper), recompute)
        best = _better(costs, best, lighter, at_most=1.0 - 1e-6)
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


def _better(
    costs: Costs, best: tuple[Plan, PlanCost], other: Plan, *, at_most: float
) -> tuple[Plan, PlanCost]:
    """The other plan if it is valid, fits, and its step takes at most `at_most` times the best one's; else
    the best one."""
    if list(validate_plan(other)):
        return best
    cost = cost_plan(costs, other)
    return (other, cost) if cost.fits and cost.step_seconds <= at_most * best[1].step_seconds else best


def _with_stages(plan: Plan, stages: dict[tuple[int, int], StagePlan]) -> Plan:
    """The plan with some stages, by (pipeline, stage), replaced."""
    pipelines = tuple(
        replace(pipeline, stages=tuple(stages.get((p, s), own) for s, own in enumerate(pipeline.stages)))
        for p, pipeline in enumerate(plan.pipelines)
    )
    return replace(plan, pipelines=pipelines)


# --- less recompute --------------------------------------------------------------------------------------


def _recompute_less(costs: Costs, plan: Plan, cost: PlanCost, recompute: Sequence[Recompute]) -> Plan:
    """The plan with each stage's recompute reduced to its first layers, as few as fit, in the fastest
    kind."""
    if "none" not in recompute:
        return plan
    changed: dict[tuple[int, int], StagePlan] = {}
    known: dict[tuple[object, ...], StagePlan] = {}
    for old in cost.stages:
        stage = plan.pipelines[old.pipeline].stages[old.stage]
        if not stage.num_recomputed:
            continue
        types = tuple(tuple(card.type for card in replica) for replica in old.replicas)
        key = (types, stage.layers, stage.recompute, old.memory, old.forward_seconds, old.backward_seconds)
        if key not in known:
            known[key] = _lightest(costs, plan, old, stage, recompute)
        found = known[key]
        changed[old.pipeline, old.stage] = replace(
            stage, recompute=found.recompute, recompute_layers=found.recompute_layers
        )
    return _with_stages(plan, changed)


def _lightest(
    costs: Costs, plan: Plan, old: StageCost, stage: StagePlan, recompute: Sequence[Recompute]
) -> StagePlan:
    """The stage with the fastest kind of recompute on as few first layers as fit; the stage itself if none is
    faster."""
    best, least = stage, old.forward_seconds + old.backward_seconds
    for kind in recompute:
        for count in range(stage.num_blocks + 1) if kind != "none" else ():
            lighter = _recomputing(stage, kind, count)
            new = change_stage(costs, plan, old, lighter)
            if not new.fits:
                continue
            seconds = new.forward_seconds + new.backward_seconds
            if seconds < least:
                best, least = lighter, seconds
            break
    return best


def _recomputing(stage: StagePlan, kind: Recompute, count: int) -> StagePlan:
    if not count:
        return replace(stage, recompute="none", recompute_layers=None)
    return replace(stage, recompute=kind, recompute_layers=count if count < stage.num_blocks else None)


# --- deeper warm-ups -------------------------------------------------------------------------------------


def _deepen(costs: Costs, plan: Plan, cost: PlanCost) -> Plan:
    """The plan in which the stages before slow links hold more micro-batches in flight; the plan itself if
    sends block the compute. A pipeline in which a stage has several replicas stays as it is."""
    if plan.schedule != "1f1b" or costs.problem.send_mode != "overlapped":
        return plan
    changed: dict[tuple[int, int], StagePlan] = {}
    for p, pipeline in enumerate(plan.pipelines):
        own = [stage for stage in cost.stages if stage.pipeline == p]
        depths = pipeline.depths(plan.schedule)
        if depths is None or any(len(stage.replicas) > 1 for stage in pipeline.stages):
            continue

        def fits(s: int, depth: int, own: Sequence[StageCost] = own) -> bool:
            stage = plan.pipelines[own[s].pipeline].stages[s]
            return change_stage(costs, plan, own[s], replace(stage, in_flight=depth)).fits

        deeper = deeper_warm_up(cost.times[p], depths, pipeline.num_micro_batches, fits)
        for s, (stage, before, after) in enumerate(zip(pipeline.stages, depths, deeper, strict=True)):
            if after > before:
                changed[p, s] = replace(stage, in_flight=after)
    return _with_stages(plan, changed)


def deeper_warm_up(
    times: StageTimes, depths: Sequence[int], num_micro_batches: int, fits: Callable[[int, int], bool]
) -> tuple[int, ...]:
    """Warm-up depths that hide the transfers of a pipeline under 1F1B, as far as `fits(stage, depth)` allows.

    Stage s has K_s micro-batches in flight (1F1B: K_s = P - s). Forward k + K_s - K_t + 1 on stage s waits
    for a round trip of forward k through stages s to t, so the period is at least sum(stages and transfers
    both ways of s..t) / (K_s - K_t + 1) for any s < t. While the slowest range s..t takes longer than the
    slowest stage and the slowest transfer, by more than LEAST_GAIN, all stages before its slowest transfer
    hold one more.
    """
    work = [f + b for f, b in zip(times.forward_seconds, times.backward_seconds, strict=True)]
    forward_sends, backward_sends = times.send_activation_seconds, times.send_gradient_seconds
    edges = [a + b for a, b in zip(forward_sends, backward_sends, strict=True)]
    enough = (1.0 + LEAST_GAIN) * max([*work, *forward_sends, *backward_sends])
    held = tuple(depths)
    while held[0] < num_micro_batches:
        seconds, first, last = _slowest_range(work, edges, held)
        if seconds <= enough:
            break
        before = max(range(first, last), key=lambda s: (edges[s], -s))
        deeper = tuple(depth + (s <= before) for s, depth in enumerate(held))
        if not all(fits(s, deeper[s]) for s in range(before + 1)):
            break
        held = deeper
    return held


def _slowest_range(
    work: Sequence[float], edges: Sequence[float], depths: Sequence[int]
) -> tuple[float, int, int]:
    """(seconds per micro-batch, first stage, last stage) of the range that limits the period most."""
    found = (0.0, 0, 0)
    for first in range(len(work)):
        total = work[first]
        for last in range(first + 1, len(work)):
            total += edges[last - 1] + work[last]
            seconds = total / (depths[first] - depths[last] + 1)
            if seconds > found[0] * (1 + 1e-9):
                found = (seconds, first, last)
    return found
