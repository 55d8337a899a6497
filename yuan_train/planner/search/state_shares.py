"""Mixed pipelines with optimizer state on hosts, and unequal shares of that state among its owners.

Owners of the same layers on unlike cards have unlike memory to spare: what the one with little of it keeps on
its host, because all shares are equal, the other may have room for. Pipelines are cut as if hosts cost
nothing; then the cut stays as it is. First shares in proportion to what the cards have to spare are tried,
then one share at a time up and down, each time with the smallest fractions on the hosts with which the cards
fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.plan_units import divides_experts
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.evaluate.stage_cost import StageCost
from yuan_train.planner.search.explore import Candidate
from yuan_train.planner.search.finalists import MAX_RESTRUCTURED_CARDS
from yuan_train.planner.search.host_budgets import is_short_of_memory
from yuan_train.planner.search.mixed_pipelines import first_shape, mix_pipelines
from yuan_train.planner.search.offload import with_offload
from yuan_train.planner.search.shapes import Options

NUM_PLANS = 2
"""How many of the fastest plans with several owners and hosts are changed."""
FACTORS = (0.5, 2.0, 0.8, 1.25)
MOST_ROUNDS = 8
LEAST_GAIN = 1e-5
"""Part of the step; a change that gains less is not kept."""
LEAST_SHARE = 1e-3

Shares = Mapping[object, float]
"""By kind of owner."""


def mixed_with_hosts(
    costs: Costs,
    cards: Sequence[Card],
    ranked: Sequence[Candidate],
    options: Options,
    stopped: Callable[[], bool],
) -> list[Candidate]:
    """Mixed pipelines that fit with some state on their hosts, with the best shares, where plans are short of
    memory; each faster than those of `ranked`, which have none."""
    if not _may_have_hosts(costs, options) or not is_short_of_memory(costs, ranked):
        return []
    limit = ranked[0].step_seconds if ranked else math.inf
    unlimited = replace(options, host_seconds=math.inf)
    found: list[Candidate] = []
    for plan in mix_pipelines(costs, cards, unlimited, limit_seconds=limit):
        if stopped():
            break
        changed, cost = with_offload(costs, plan, on_disk=options.offload_disk)
        candidate = Candidate(plan=changed, cost=cost, shape=first_shape(changed, cost))
        if any(stage.optimizer_offload for pipeline in changed.pipelines for stage in pipeline.stages):
            if _is_shared(candidate):
                changed, cost = _best_shares(costs, candidate, options, stopped)
            if cost.fits and cost.step_seconds < limit:
                found.append(replace(candidate, plan=changed, cost=cost))
    return found


def _may_have_hosts(costs: Costs, options: Options) -> bool:
    problem = costs.problem
    few = len(problem.cluster.cards) <= MAX_RESTRUCTURED_CARDS
    return few and options.offload and not options.expressible


def with_other_shares(
    costs: Costs, ranked: Sequence[Candidate], options: Options, stopped: Callable[[], bool]
) -> list[Candidate]:
    """Plans that are faster than the one of `ranked` that they are made of."""
    if not _may_have_hosts(costs, options):
        return []
    found: list[Candidate] = []
    for candidate in itertools.islice(filter(_is_shared, ranked), NUM_PLANS):
        plan, cost = _best_shares(costs, candidate, options, stopped)
        if plan is not candidate.plan:
            found.append(replace(candidate, plan=plan, cost=cost))
    return found


def _is_shared(candidate: Candidate) -> bool:
    """Whether unlike owners share the state of a plan that offloads some of it; each rank with one stage."""
    plan = candidate.plan
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    has_hosts = any(stage.optimizer_offload for stage in stages)
    if not (plan.optimizer_sharding and has_hosts and len(plan.pipelines) > 1) or divides_experts(plan):
        return False
    ranks = [rank for stage in stages for rank in stage.ranks]
    return len(set(ranks)) == len(ranks) and len(set(map(_kind, candidate.cost.stages))) > 1


def _kind(stage: StageCost) -> object:
    """Owners with this in common are given equal shares."""
    return tuple(card.type for card in stage.cards), stage.layers


def _best_shares(
    costs: Costs, candidate: Candidate, options: Options, stopped: Callable[[], bool]
) -> tuple[Plan, PlanCost]:
    """The plan with other shares, and its cost; the candidate's own if it fits and none is faster."""
    best = candidate.plan, candidate.cost
    limit = math.inf
    if candidate.cost.fits:
        limit = candidate.cost.step_seconds * (1.0 - LEAST_GAIN)
    shares: Shares = {
        _kind(stage): candidate.plan.pipelines[stage.pipeline].stages[stage.stage].optimizer_share
        for stage in candidate.cost.stages
    }

    def gains(tried: Shares) -> bool:
        nonlocal best, limit, shares
        priced = _priced(costs, candidate, tried, options)
        if priced is None or priced[1].step_seconds >= limit:
            return False
        best, shares, limit = priced, tried, priced[1].step_seconds * (1.0 - LEAST_GAIN)
        return True

    gains(_spare(costs, candidate))
    for _ in range(MOST_ROUNDS):
        steps = itertools.product(list(shares), FACTORS)
        if not any([not stopped() and gains({**shares, kind: shares[kind] * by}) for kind, by in steps]):
            break
    return best


def _priced(
    costs: Costs, candidate: Candidate, shares: Shares, options: Options
) -> tuple[Plan, PlanCost] | None:
    """The plan with these shares and as little as possible on its hosts; None if it does not fit."""
    plan = _with_shares(candidate, shares)
    if any(True for _ in validate_plan(plan)):
        return None
    changed = with_offload(costs, plan, on_disk=options.offload_disk)
    return changed if changed[1].fits else None


def _with_shares(candidate: Candidate, shares: Shares) -> Plan:
    """The plan with these shares, all of them on the cards."""
    plan = candidate.plan
    rows = [list(pipeline.stages) for pipeline in plan.pipelines]
    for stage in candidate.cost.stages:
        rows[stage.pipeline][stage.stage] = replace(
            rows[stage.pipeline][stage.stage],
            optimizer_share=float(f"{max(shares[_kind(stage)], LEAST_SHARE):.3g}"),
            optimizer_offload=0.0,
            optimizer_disk=0.0,
        )
    pipelines = (
        replace(pipeline, stages=tuple(row)) for pipeline, row in zip(plan.pipelines, rows, strict=True)
    )
    return replace(plan, pipelines=tuple(pipelines), forecast=None)


def _spare(costs: Costs, candidate: Candidate) -> Shares:
    """Shares in proportion to what each card has to spare, of all the state of its layers."""
    equal = dict.fromkeys(map(_kind, candidate.cost.stages), 1.0)
    shares: dict[object, float] = {}
    for stage in cost_plan(costs, _with_shares(candidate, equal)).stages:
        room = stage.capacity_bytes - stage.memory.total + stage.memory.optimizer
        whole = stage.memory.optimizer / stage.shares.optimizer
        spare = room / whole if whole else 1.0
        shares[_kind(stage)] = min(shares.get(_kind(stage), spare), spare)
    return shares
