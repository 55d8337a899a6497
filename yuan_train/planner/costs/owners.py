"""A plan on the cards of a cluster: who holds which part of the model, and what share of its state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from yuan_train.config import plan as plans
from yuan_train.config.cluster import Card
from yuan_train.config.errors import PlanError
from yuan_train.planner.costs.plan_problem import Replica
from yuan_train.planner.costs.unit_costs import Costs

PlanCards = Sequence[Sequence[tuple[Replica, ...]]]
"""The replicas of each stage, by pipeline and stage."""


@dataclass(frozen=True)
class PlacedPlan:
    """A plan on cards, and what is asked of all of it more than once."""

    plan: plans.Plan
    cards: PlanCards

    @cached_property
    def units(self) -> dict[tuple[int, int], range]:
        """The numbers of each stage's units among all of the plan, by pipeline and stage."""
        plan = self.plan
        return {(p, s): plans.stage_unit_range(plan, stage) for p, s, stage in plan.numbered_stages}

    @cached_property
    def holders(self) -> tuple[tuple[Replica, ...], ...]:
        """The replicas that hold each unit, over all pipelines."""
        held: list[list[Replica]] = [[] for _ in range(plans.num_units(self.plan))]
        for (p, s), units in self.units.items():
            for u in units:
                held[u] += self.cards[p][s]
        return tuple(map(tuple, held))

    @cached_property
    def unit_parameters(self) -> tuple[int, ...]:
        """Trained parameters of each unit; of the head its norm alone if the embedding is tied."""
        return plans.plan_unit_parameters(self.plan)


def place_plan(costs: Costs, plan: plans.Plan) -> PlacedPlan:
    """The plan on its cards. Raises PlanError as `cards_of` does."""
    rows = ([cards_of(costs, plan, stage) for stage in pipeline.stages] for pipeline in plan.pipelines)
    return PlacedPlan(plan, list(rows))


def cards_of(costs: Costs, plan: plans.Plan, stage: plans.StagePlan) -> tuple[Replica, ...]:
    """The cards of a stage's replicas. Raises PlanError if a card is not in the cluster, has another type
    there, or lacks the precision."""
    return tuple(tuple(_card_of(costs, plan, rank) for rank in replica) for replica in stage.replicas)


def _card_of(costs: Costs, plan: plans.Plan, rank: int) -> Card:
    entry = plan.ranks[rank]
    card = costs.cards.get(entry.device)
    if card is None:
        raise PlanError(
            f"card {entry.device!r} of the plan is not in cluster {costs.problem.cluster.name!r}; "
            f"give the cluster that the plan was made for ({plan.cluster or 'unnamed'})"
        )
    if card.type != entry.type:
        raise PlanError(
            f"card {entry.device!r} is a {entry.type} in the plan and a {card.type} in the cluster; "
            "plan again"
        )
    precision = costs.problem.precision
    if costs.problem.cluster.device_type(card.type).peak(precision) is None:
        raise PlanError(f"card {card.name!r} ({card.type}) has no {precision}; use another precision or card")
    return card


def divides_alike(plan: plans.Plan) -> bool:
    """Whether all pipelines divide the experts of each layer alike."""
    ranges: dict[int, tuple[tuple[int, int], ...] | None] = {}
    for stage in plan.stages:
        own = plans.expert_ranges(plan.model, stage)
        if any(ranges.setdefault(unit, own) != own for unit in plans.stage_unit_range(plan, stage)):
            return False
    return True


def check_alike(plan: plans.Plan) -> None:
    """Raise PlanError if pipelines divide the experts of a layer differently, which is not priced."""
    if plan.divides_experts and not divides_alike(plan):
        raise PlanError(
            "the pipelines divide the experts of a layer differently: such plans run, but are not simulated "
            "yet; train with the plan as it is, or divide them alike"
        )


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


def state_shares(costs: Costs, placed: PlacedPlan) -> dict[tuple[int, int], StateShares]:
    """The shares of the cards of each stage, by pipeline and stage.

    If other owners have another tensor-parallel size, a card holds several slices of its sharded optimizer,
    whose reduced gradients lie apart. A reduction in another dtype packs the gradients that have several
    owners, which adds the problem's `reduce_copy_share` of these.
    """
    plan, cards, stages = placed.plan, placed.cards, placed.units
    reduce_copy_share = costs.problem.reduce_copy_share
    if plan.divides_experts:
        return _shares_of_ranks(placed, reduce_copy_share)
    optimizer = _optimizer_shares(placed)
    reduced = _reduced_shares(placed, ties=costs.ties) if reduce_copy_share else dict.fromkeys(stages, 0.0)
    # The slices of a unit are as many as the least common multiple of its owners' sizes.
    slices = [math.lcm(*(len(replica) for replica in replicas)) for replicas in placed.holders]
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


def _shares_of_ranks(placed: PlacedPlan, reduce_copy_share: float) -> dict[tuple[int, int], StateShares]:
    """The same where cards share experts: what is whole on each of them is owned by all of them, in all
    pipelines, a range of experts by one card of each replica. The largest over a stage's units."""
    plan = placed.plan
    stages = {(p, s): stage for p, s, stage in plan.numbered_stages}
    owners: list[list[int]] = [[] for _ in range(plans.num_units(plan))]
    of_experts: list[list[int]] = [[] for _ in range(plans.num_units(plan))]
    for key, stage in stages.items():
        for u in placed.units[key]:
            owners[u] += stage.ranks
            of_experts[u] += [replica[0] for replica in stage.replicas]

    def optimizer(key: tuple[int, int], holders: Sequence[Sequence[int]]) -> float:
        if not plan.optimizer_sharding:
            return 1.0
        weights = plan.optimizer_shares
        totals = [math.fsum(weights[rank] for rank in holders[u]) for u in placed.units[key]]
        return max((stages[key].optimizer_share / total for total in totals), default=1.0)

    def packed(key: tuple[int, int], holders: Sequence[Sequence[int]]) -> float:
        several = any(len(holders[u]) > 1 for u in placed.units[key])
        return reduce_copy_share if several else 0.0

    return {
        key: StateShares(
            optimizer=optimizer(key, owners),
            packed=packed(key, owners),
            expert_optimizer=optimizer(key, of_experts),
            expert_packed=packed(key, of_experts),
        )
        for key in stages
    }


def _optimizer_shares(placed: PlacedPlan) -> dict[tuple[int, int], float]:
    """The share of its units' optimizer state that a replica of a stage holds, the largest over them."""
    plan, cards = placed.plan, placed.cards
    if not plan.optimizer_sharding:
        return dict.fromkeys(placed.units, 1.0)
    weights = plan.optimizer_shares
    weight = {
        replica: weights[ranks[0]]
        for pipeline, row in zip(plan.pipelines, cards, strict=True)
        for stage, replicas in zip(pipeline.stages, row, strict=True)
        for ranks, replica in zip(stage.replicas, replicas, strict=True)
    }
    totals = [math.fsum(weight[replica] for replica in replicas) for replicas in placed.holders]
    return {
        (p, s): max((weight[cards[p][s][0]] / totals[u] for u in units), default=1.0)
        for (p, s), units in placed.units.items()
    }


def _reduced_shares(placed: PlacedPlan, *, ties: bool) -> dict[tuple[int, int], float]:
    """The share of its gradients that a stage has in common with others; both ends hold a tied matrix."""
    model, holders, last = placed.plan.model, placed.holders, len(placed.holders) - 1
    *sizes, head = placed.unit_parameters
    sizes.append(head if model.lora is not None else model.head_parameters)
    tied = len({*holders[0], *holders[last]}) if ties else 0
    several = [len(replicas) > 1 or (tied > 1 and u in (0, last)) for u, replicas in enumerate(holders)]
    return {
        key: sum(sizes[u] for u in units if several[u]) / max(sum(sizes[u] for u in units), 1)
        for key, units in placed.units.items()
    }
