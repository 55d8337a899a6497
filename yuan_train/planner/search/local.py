"""Local search by `cost_plan`, for plans that the compiled core does not price.

A move makes a plan's neighbours; pipelines that are alike change together. Each neighbour recomputes as
little as its memory allows, and the first that gains is kept, until none does or enough were priced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from yuan_train.config.errors import PlanError
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.grad_reduce import divides_alike
from yuan_train.planner.costs.unit_costs import Costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan, cost_stages
from yuan_train.planner.evaluate.stage_cost import StageCost, change_stage
from yuan_train.planner.search.candidate import Candidate, Space, is_wanted
from yuan_train.planner.search.shapes import Options

LEAST_GAIN = 1e-4
"""Part of the step; what gains less is not kept."""
MOST_WORK = 200_000
"""Of a search, at normal effort: for each plan that is priced its stages times `STAGE_WORK` and the
micro-batches of these, which is about what it takes."""
STAGE_WORK = 40
NUM_SHIFTED = 4
"""Of the fastest plans, whose borders are shifted by half a layer."""

Moves = Callable[[Plan], Iterator[Plan]]


def descend(space: Space, known: Candidate, moves: Moves) -> Candidate:
    """The candidate itself, or a faster one that fits and that moves which gain lead to."""
    plan, cost = known.plan, known.cost
    work = MOST_WORK * space.options.effort
    tried = {(plan.schedule, plan.pipelines)}
    around, i, since = list(moves(plan)), 0, 0
    while since < len(around) and work > 0 and not space.is_over():
        moved = around[i % len(around)]
        i, since = i + 1, since + 1
        key = moved.schedule, moved.pipelines
        if key in tried or not divides_alike(moved):
            continue
        tried.add(key)
        priced = _priced(space.costs, moved, space.options)
        if priced is None:
            continue
        moved, other = priced
        work -= sum(len(p.stages) * (STAGE_WORK + p.num_micro_batches) for p in moved.pipelines)
        if other.fits and other.step_seconds < cost.step_seconds * (1.0 - LEAST_GAIN):
            plan, cost = moved, other
            around, since = list(moves(plan)), 0
    return Candidate(plan=plan, cost=cost, shape=replace(known.shape, schedule=plan.schedule))


def _priced(costs: Costs, plan: Plan, options: Options) -> tuple[Plan, PlanCost] | None:
    """The plan with the recompute that it needs, and its cost; None if there is no such plan."""
    try:
        fitted = _fitted(costs, plan, options.recompute)
        if fitted is not None and is_wanted(fitted, options):
            return fitted, cost_plan(costs, fitted)
    except PlanError:  # such as too few resident parts at other depths
        pass
    return None


def half_layer_plans(space: Space, known: Sequence[Candidate]) -> list[Candidate]:
    """The fastest known plans with borders between attention and feed-forward; none unless those are asked
    for. Stages of a whole-layer plan are up to a layer away from the best cut; a border in the middle of a
    layer halves that. With experts the halves are unlike: attention needs compute, experts memory."""
    if not space.options.half_layers:
        return []
    return [descend(space, one, move_halves) for one in known[:NUM_SHIFTED]]


# --- moves -----------------------------------------------------------------------------------------------


def move_layers(plan: Plan) -> Iterator[Plan]:
    """A layer from one stage to another, those between moved along; neighbours first."""
    for group in alike_pipelines(plan):
        stages = range(len(plan.pipelines[group[0]].stages))
        pairs = sorted(itertools.permutations(stages, 2), key=lambda pair: abs(pair[0] - pair[1]))
        for giver, taker in pairs:
            by = -1.0 if giver < taker else 1.0
            borders = range(min(giver, taker) + 1, max(giver, taker) + 1)
            yield from shift_borders(plan, group, dict.fromkeys(borders, by))


def move_experts(plan: Plan) -> Iterator[Plan]:
    """Experts of a stage from one of its cards to another: one, or an eighth of all."""
    for group in alike_pipelines(plan):
        for s, stage in enumerate(plan.pipelines[group[0]].stages):
            counts = stage.experts or ()
            for giver, taker in itertools.permutations(range(len(counts)), 2):
                for number in dict.fromkeys((max(1, sum(counts) // 8), 1)):
                    if counts[giver] >= number:
                        moved = list(counts)
                        moved[giver] -= number
                        moved[taker] += number
                        yield _with_stages(plan, group, {s: {"experts": tuple(moved)}})


def move_depths(plan: Plan) -> Iterator[Plan]:
    """More micro-batches in flight up to a stage, or fewer from one on, or as they come."""
    for group in alike_pipelines(plan) if plan.schedule == "1f1b" else ():
        pipeline = plan.pipelines[group[0]]
        depths = pipeline.depths("1f1b") or ()
        yield _with_stages(plan, group, dict.fromkeys(range(len(depths)), {"in_flight": None}))
        for s in range(len(depths)):
            for changed, by in ((range(s + 1), 1), (range(s, len(depths)), -1)):
                made = {t: {"in_flight": depths[t] + by * len(pipeline.stages[t].replicas)} for t in changed}
                if all(own["in_flight"] > 0 for own in made.values()):
                    yield _with_stages(plan, group, made)


def move_batches(plan: Plan, options: Options) -> Iterator[Plan]:
    """Other micro-batches, of as many sequences in each pipeline."""
    for size in options.all_sizes:
        changed = [
            replace(p, micro_batch_size=size, num_micro_batches=p.num_sequences // size)
            for p in map(_without_depths, plan.pipelines)
            if p.num_sequences % size == 0
        ]
        allowed = options.num_micro_batches
        counts = [pipeline.num_micro_batches for pipeline in changed]
        if len(counts) == len(plan.pipelines) and (allowed is None or set(counts) <= set(allowed)):
            yield replace(plan, pipelines=tuple(changed))


def move_schedule(plan: Plan, options: Options) -> Iterator[Plan]:
    """Another schedule, unless the plan has virtual stages."""
    if plan.schedule == "interleaved_1f1b":
        return
    for schedule in options.all_schedules:
        if schedule not in (plan.schedule, "interleaved_1f1b"):
            yield replace(plan, schedule=schedule, pipelines=tuple(map(_without_depths, plan.pipelines)))


def shift_borders(plan: Plan, group: Sequence[int], shifts: dict[int, float]) -> Iterator[Plan]:
    """The plan with the first borders of some stages of a group shifted, if all with layers keep some."""
    stages = plan.pipelines[group[0]].stages
    borders = [stage.layers[0] + shifts.get(s, 0.0) for s, stage in enumerate(stages)]
    layers = list(itertools.pairwise([*borders, stages[-1].layers[1]]))
    if all(end - first >= min(0.5, s.num_layers) for s, (first, end) in zip(stages, layers, strict=True)):
        yield _with_stages(plan, group, {s: {"layers": own} for s, own in enumerate(layers)})


def move_halves(plan: Plan) -> Iterator[Plan]:
    """The plan with one or two borders of alike pipelines half a layer further, or with other depths."""
    for group in alike_pipelines(plan):
        borders = range(1, len(plan.pipelines[group[0]].stages))
        for shifted in (own for count in (1, 2) for own in itertools.combinations(borders, count)):
            for by in itertools.product((-0.5, 0.5), repeat=len(shifted)):
                yield from shift_borders(plan, group, dict(zip(shifted, by, strict=True)))
    yield from move_depths(plan)


def alike_pipelines(plan: Plan) -> list[list[int]]:
    """The pipelines that differ in their cards alone, and not in the types of these."""
    groups: dict[object, list[int]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        stages = tuple(replace(stage, replicas=((0,),)) for stage in pipeline.stages)
        replicas = (replica for stage in pipeline.stages for replica in stage.replicas)
        types = [[plan.ranks[rank].type for rank in replica] for replica in replicas]
        groups.setdefault(repr((replace(pipeline, stages=stages), types)), []).append(p)
    return list(groups.values())


def _with_stages(plan: Plan, group: Sequence[int], changes: Mapping[int, Mapping[str, Any]]) -> Plan:
    """The plan with some keys of some stages of the pipelines of a group changed."""
    pipelines = list(plan.pipelines)
    for p in group:
        stages = (replace(stage, **changes.get(s, {})) for s, stage in enumerate(pipelines[p].stages))
        pipelines[p] = replace(pipelines[p], stages=tuple(stages))
    return replace(plan, pipelines=tuple(pipelines), forecast=None)


def _without_depths(pipeline: PipelinePlan) -> PipelinePlan:
    """The pipeline with the depths of its schedule."""
    return replace(pipeline, stages=tuple(replace(stage, in_flight=None) for stage in pipeline.stages))


# --- memory ----------------------------------------------------------------------------------------------


def _fitted(costs: Costs, plan: Plan, kinds: Sequence[Recompute]) -> Plan | None:
    """The plan with as little recompute as lets each stage fit its cards; None if one does not. With virtual
    stages, whose cards have several, recompute stays as it is."""
    groups, virtual = alike_pipelines(plan), plan.schedule == "interleaved_1f1b"
    bare = {"recompute_layers": None} if virtual else {"recompute": "none", "recompute_layers": None}
    for group in groups:
        stages = enumerate(plan.pipelines[group[0]].stages)
        whole = [s for s, own in stages if not virtual or own.num_recomputed >= own.num_blocks]
        plan = _with_stages(plan, group, dict.fromkeys(whole, bare))
    if virtual:
        return plan
    rows = {(cost.pipeline, cost.stage): cost for cost in cost_stages(costs, plan)}
    for group in groups:
        changes: dict[int, dict[str, Any]] = {}
        for s in range(len(plan.pipelines[group[0]].stages)):
            stage = _least_recompute(costs, plan, rows[group[0], s], kinds)
            if stage is None:
                return None
            changes[s] = {"recompute": stage.recompute, "recompute_layers": stage.recompute_layers}
        plan = _with_stages(plan, group, changes)
    return plan


def _least_recompute(
    costs: Costs, plan: Plan, old: StageCost, kinds: Sequence[Recompute]
) -> StagePlan | None:
    """Stage `old`, which recomputes nothing, as the fastest one that fits."""
    bare = plan.pipelines[old.pipeline].stages[old.stage]
    if (old.fits and "none" in kinds) or not bare.num_blocks:
        return bare if old.fits else None
    best: StagePlan | None = None
    least = math.inf
    for kind in kinds:
        if kind == "none":
            continue
        low, high = (1 if "none" in kinds else bare.num_blocks), bare.num_blocks
        while low <= high:
            count = (low + high) // 2
            partly = count if count < bare.num_blocks else None
            stage = replace(bare, recompute=kind, recompute_layers=partly)
            cost = change_stage(costs, plan, old, stage)
            if not cost.fits:
                low = count + 1
                continue
            high = count - 1
            if cost.forward_seconds + cost.backward_seconds < least:
                best, least = stage, cost.forward_seconds + cost.backward_seconds
    return best
