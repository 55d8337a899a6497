"""Which replicas hold the same part of the model, and the share of its optimizer state that each holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from yuan_train.config.plan import Plan
from yuan_train.planner.costs.plan_problem import Replica, stage_units

PlanCards = Sequence[Sequence[tuple[Replica, ...]]]
"""The replicas of each stage, by pipeline and stage."""


def owner_sets(plan: Plan, cards: PlanCards) -> dict[tuple[int, int], int]:
    """How many replicas own a stage's units: the fewest over its units, by pipeline and stage."""
    holders = unit_holders(plan, cards)
    return {
        key: min((len(holders[u]) for u in units), default=1) for key, units in units_by_stage(plan).items()
    }


def optimizer_shares(plan: Plan, cards: PlanCards) -> dict[tuple[int, int], float]:
    """The share of its units' optimizer state that a replica of a stage holds: the largest over the units, by
    pipeline and stage."""
    stages = units_by_stage(plan)
    if not plan.optimizer_sharding:
        return dict.fromkeys(stages, 1.0)
    holders, weights = unit_holders(plan, cards), plan.optimizer_shares
    weight = {
        replica: weights[ranks[0]]
        for pipeline, row in zip(plan.pipelines, cards, strict=True)
        for stage, replicas in zip(pipeline.stages, row, strict=True)
        for ranks, replica in zip(stage.replicas, replicas, strict=True)
    }
    totals = [math.fsum(weight[replica] for replica in replicas) for replicas in holders]
    return {
        (p, s): max((weight[cards[p][s][0]] / totals[u] for u in units), default=1.0)
        for (p, s), units in stages.items()
    }


def holds_slices(plan: Plan, cards: PlanCards) -> dict[tuple[int, int], bool]:
    """Whether each card of a stage holds several slices of its sharded optimizer, because other owners have
    another tensor-parallel size; by pipeline and stage.

    The slices of a unit are as many as the least common multiple of its owners' sizes.
    """
    if not plan.optimizer_sharding:
        return dict.fromkeys(units_by_stage(plan), False)
    slices = [math.lcm(*(len(replica) for replica in replicas)) for replicas in unit_holders(plan, cards)]
    return {
        (p, s): any(slices[u] > len(cards[p][s][0]) for u in units)
        for (p, s), units in units_by_stage(plan).items()
    }


def units_by_stage(plan: Plan) -> dict[tuple[int, int], range]:
    """The units of each stage, by pipeline and stage."""
    return {
        (p, s): range(*stage_units(stage, plan.model.num_layers).indices(plan.model.num_layers + 2))
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
    }


def unit_holders(plan: Plan, cards: PlanCards) -> list[tuple[Replica, ...]]:
    """The replicas that hold each unit, over all pipelines: num_layers + 2 tuples."""
    held: list[list[Replica]] = [[] for _ in range(plan.model.num_layers + 2)]
    for (p, s), units in units_by_stage(plan).items():
        for u in units:
            held[u] += cards[p][s]
    return [tuple(replicas) for replicas in held]
