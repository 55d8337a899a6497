"""Which replicas hold the same part of the model, and the share of its optimizer state that each holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from yuan_train.config import plan as plans
from yuan_train.planner.costs.plan_problem import Replica

PlanCards = Sequence[Sequence[tuple[Replica, ...]]]
"""The replicas of each stage, by pipeline and stage."""


@dataclass(frozen=True, kw_only=True)
class StateShares:
    """Shares of a stage's states: of the optimizer's what a card holds, of its gradients what it holds twice,
    because the reduced ones lie in a buffer of their own. They differ for experts that cards share."""

    optimizer: float
    packed: float
    expert_optimizer: float
    expert_packed: float
    critic_packed: float = 0.0
    """Of a critic's gradients: it is reduced when the model is not, so that what both pack is not there at
    the same time."""


def state_shares(
    plan: plans.Plan, cards: PlanCards, *, reduce_copy_share: float, ties: bool
) -> dict[tuple[int, int], StateShares]:
    """The shares of the cards of each stage, by pipeline and stage.

    If other owners have another tensor-parallel size, a card holds several slices of its sharded optimizer,
    whose reduced gradients lie apart. A reduction in another dtype packs the gradients that have several
    owners, which adds `reduce_copy_share` of these.
    """
    if plans.divides_experts(plan):
        return _shares_of_ranks(plan, reduce_copy_share)
    holders, stages = unit_holders(plan, cards), units_by_stage(plan)
    optimizer = _optimizer_shares(plan, cards, holders)
    reduced = _reduced_shares(plan, holders, ties=ties) if reduce_copy_share else dict.fromkeys(stages, 0.0)
    # The slices of a unit are as many as the least common multiple of its owners' sizes.
    slices = [math.lcm(*(len(replica) for replica in replicas)) for replicas in holders]
    found: dict[tuple[int, int], StateShares] = {}
    for key, units in stages.items():
        width = len(cards[key[0]][key[1]][0])
        apart = plan.optimizer_sharding and any(slices[u] > width for u in units)
        lasting = optimizer[key] if apart else 0.0
        packed = reduce_copy_share * reduced[key] + lasting
        found[key] = StateShares(
            optimizer=optimizer[key],
            packed=packed,
            expert_optimizer=optimizer[key],
            expert_packed=packed,
            critic_packed=lasting,
        )
    return found


def _shares_of_ranks(plan: plans.Plan, reduce_copy_share: float) -> dict[tuple[int, int], StateShares]:
    """The same where cards share experts: what is whole on each of them is owned by all of them, in all
    pipelines, a range of experts by one card of each replica. The largest over a stage's units."""
    stages = {(p, s): stage for p, row in enumerate(plan.pipelines) for s, stage in enumerate(row.stages)}
    owners: list[list[int]] = [[] for _ in range(plans.num_units(plan))]
    of_experts: list[list[int]] = [[] for _ in range(plans.num_units(plan))]
    for stage in stages.values():
        for u in plans.stage_unit_range(plan, stage):
            owners[u] += stage.ranks
            of_experts[u] += [replica[0] for replica in stage.replicas]

    def optimizer(stage: plans.StagePlan, holders: Sequence[Sequence[int]]) -> float:
        if not plan.optimizer_sharding:
            return 1.0
        weights = plan.optimizer_shares
        totals = [
            math.fsum(weights[rank] for rank in holders[u]) for u in plans.stage_unit_range(plan, stage)
        ]
        return max((stage.optimizer_share / total for total in totals), default=1.0)

    def packed(stage: plans.StagePlan, holders: Sequence[Sequence[int]]) -> float:
        several = any(len(holders[u]) > 1 for u in plans.stage_unit_range(plan, stage))
        return reduce_copy_share if several else 0.0

    return {
        key: StateShares(
            optimizer=optimizer(stage, owners),
            packed=packed(stage, owners),
            expert_optimizer=optimizer(stage, of_experts),
            expert_packed=packed(stage, of_experts),
        )
        for key, stage in stages.items()
    }


def _optimizer_shares(
    plan: plans.Plan, cards: PlanCards, holders: Sequence[tuple[Replica, ...]]
) -> dict[tuple[int, int], float]:
    """The share of its units' optimizer state that a replica of a stage holds, the largest over them."""
    stages = units_by_stage(plan)
    if not plan.optimizer_sharding:
        return dict.fromkeys(stages, 1.0)
    weights = plan.optimizer_shares
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


def _reduced_shares(
    plan: plans.Plan, holders: Sequence[tuple[Replica, ...]], *, ties: bool
) -> dict[tuple[int, int], float]:
    """The share of its gradients that a stage has in common with others; both ends hold a tied matrix."""
    model, last = plan.model, plans.num_units(plan) - 1
    *sizes, head = plans.plan_unit_parameters(plan)
    sizes.append(head if model.lora is not None else model.head_parameters)
    tied = len({*holders[0], *holders[last]}) if ties else 0
    several = [len(replicas) > 1 or (tied > 1 and u in (0, last)) for u, replicas in enumerate(holders)]
    return {
        key: sum(sizes[u] for u in units if several[u]) / max(sum(sizes[u] for u in units), 1)
        for key, units in units_by_stage(plan).items()
    }


def units_by_stage(plan: plans.Plan) -> dict[tuple[int, int], range]:
    """The units of each stage, by pipeline and stage."""
    return {
        (p, s): plans.stage_unit_range(plan, stage)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
    }


def unit_holders(plan: plans.Plan, cards: PlanCards) -> list[tuple[Replica, ...]]:
    """The replicas that hold each unit of the plan, over all pipelines."""
    held: list[list[Replica]] = [[] for _ in range(plans.num_units(plan))]
    for (p, s), units in units_by_stage(plan).items():
        for u in units:
            held[u] += cards[p][s]
    return [tuple(replicas) for replicas in held]
