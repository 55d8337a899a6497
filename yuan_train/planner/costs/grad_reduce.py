"""Who holds which part of a model, and how long the owners of a bucket take to reduce its gradients.

A plan on the cards of a cluster says who holds what, and what share of its state (`PlacedPlan`). The owners'
cards that hold the same slice of a bucket make a ring, which reduces that slice: owners of k cards each make
k rings, all at once, and every ring that leaves a node takes its share of the node's NIC. With a sharded
optimizer a ring reduces in a reduce-scatter, and after the optimizer step it gathers the weights.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from yuan_train.config import plan as plans
from yuan_train.config.cluster import Card
from yuan_train.config.errors import PlanError
from yuan_train.config.model import ModelConfig
from yuan_train.planner.costs.links import (
    all_gather_seconds,
    allreduce_compute_seconds,
    allreduce_seconds,
    reduce_scatter_seconds,
    uses_gloo,
)
from yuan_train.planner.costs.unit_costs import CUDA_LOGIT_ROWS, Costs
from yuan_train.planner.costs.workload import (
    STATE_BYTES,
    HalfShare,
    Replica,
    TokenRows,
    half_shares,
    model_work,
)
from yuan_train.schedule.flow import group_units, is_halved

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

    optimizer: float = 1.0
    packed: float = 0.0
    expert_optimizer: float = 1.0
    expert_packed: float = 0.0
    critic_packed: float = 0.0
    """Of a critic's gradients: it is reduced when the model is not, so that what both pack is not there at
    the same time."""

    def blended(self, experts: float, *, offload: float) -> StateShares:
        """Those of all parameters together, of which such a part are experts'; some state leaves the card."""
        optimizer = self.optimizer + experts * (self.expert_optimizer - self.optimizer)
        packed = self.packed + experts * (self.expert_packed - self.packed)
        return StateShares(
            optimizer=optimizer * (1.0 - offload), packed=packed, critic_packed=self.critic_packed
        )


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


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """Adjacent units that several owners hold, and what their rings take for them."""

    units: range
    owners: tuple[Replica, ...]
    cards: tuple[Card, ...]
    """Of all owners."""
    crossing: Mapping[str, int]
    """How many of its rings pass each node's NIC, by node; empty inside a node."""
    reduce_seconds: Callable[[int], float]
    """Of the gradients, if so many rings and messages share the busiest NIC on the way."""
    sync_seconds: Callable[[int], float]
    """Of the weights' way back after the optimizer step, likewise; 0 unless the optimizer is sharded."""
    compute_seconds: float = 0.0
    """Of its owners' compute, which the reduction takes while it is hidden behind it."""
    early: float = 0.0
    """Of a feed-forward: the share of its layer's backward that follows when it is complete."""

    @property
    def own_sharers(self) -> int:
        """How many of its own rings share the busiest NIC; 1 inside a node."""
        return max(self.crossing.values(), default=1)

    @property
    def grad_reduce_seconds(self) -> float:
        """Seconds of the reduction with no other flow on its way."""
        return self.reduce_seconds(self.own_sharers)

    @property
    def weight_sync_seconds(self) -> float:
        """Seconds of the weights' way back with no other flow on it."""
        return self.sync_seconds(self.own_sharers)


def bucket_costs(costs: Costs, placed: PlacedPlan) -> tuple[BucketCost, ...]:
    """The buckets that several owners hold, in the model's order; the tied embedding is not among them."""
    sharded = placed.plan.optimizer_sharding
    known: dict[tuple[tuple[Replica, ...], float], BucketCost] = {}
    found: list[BucketCost] = []
    for bucket in _held_buckets(costs, placed):
        key = (bucket.owners, bucket.parameters)
        if len(bucket.owners) > 1 and bucket.parameters:
            if key not in known:
                known[key] = _bucket_cost(costs, bucket.units, *key, sharded=sharded)
            found.append(replace(known[key], units=bucket.units, early=bucket.early))
    return tuple(found)


@dataclass(frozen=True)
class _Bucket:
    units: range
    owners: tuple[Replica, ...]
    parameters: float
    """Of all cards of an owner."""
    early: float = 0.0
    """As in `BucketCost`."""


def _held_buckets(costs: Costs, placed: PlacedPlan) -> list[_Bucket]:
    """All buckets of a plan, in the model's order."""
    plan, holders = placed.plan, placed.holders
    sizes = unit_parameters(costs, placed.unit_parameters)
    if plan.divides_experts:
        return _with_experts(costs, placed, sizes)
    if max(map(len, holders)) == 1:
        return []
    halvable = plans.whole_layers(plan) if max(sizes) > costs.problem.bucket_size else frozenset[int]()
    found: list[_Bucket] = []
    for units in _bucket_units(costs, holders, sizes):
        owners, size = holders[units.start], sum(sizes[u] for u in units)
        is_large = is_halved(size, num_owners=len(owners), bucket_size=costs.problem.bucket_size)
        if is_large and units.start in halvable:
            halves = half_parts(costs)
            attention = round(size * halves.parameters)
            found.append(_Bucket(units, owners, attention))
            found.append(_Bucket(units, owners, size - attention, early=halves.seconds))
        else:
            found.append(_Bucket(units, owners, size))
    return found


def _with_experts(costs: Costs, placed: PlacedPlan, sizes: Sequence[float]) -> list[_Bucket]:
    """What is whole on every card of a replica has each of them as an owner; then follow the experts of its
    layers, one bucket for each card of a replica, as `Grid.buckets` has them."""
    plan, holders = placed.plan, placed.holders
    experts = plans.expert_parameters(plan.model)
    counts = {
        u: [count for count, _ in plans.held_experts(plan, stage)]
        for p, s, stage in plan.numbered_stages
        for u in placed.units[p, s]
    }
    # A layer, or its feed-forward: the half that ends where a layer does.
    has_experts = [False, *(end % 1 == 0 for _, _, end in plan.layer_units), False]
    whole = [size - experts * held for size, held in zip(sizes, has_experts, strict=True)]
    found: list[_Bucket] = []
    for units in _bucket_units(costs, holders, whole):
        owners = holders[units.start]
        each = tuple((card,) for replica in owners for card in replica)
        found.append(_Bucket(units, each, sum(whole[u] for u in units)))
        for u in (u for u in units if has_experts[u]):
            for part, count in enumerate(counts[u]):
                own = tuple((replica[part],) for replica in owners)
                found.append(_Bucket(range(u, u + 1), own, experts * count / plan.model.num_experts))
    return found


def _bucket_cost(
    costs: Costs, units: range, owners: tuple[Replica, ...], parameters: float, *, sharded: bool
) -> BucketCost:
    @functools.cache
    def reduce(sharers: int) -> float:
        return grad_reduce_seconds(costs, owners, parameters, sharded=sharded, sharers=sharers)

    @functools.cache
    def sync(sharers: int) -> float:
        return weight_sync_seconds(costs, owners, parameters, sharers=sharers) if sharded else 0.0

    return BucketCost(
        units=units,
        owners=owners,
        cards=tuple(card for owner in owners for card in owner),
        crossing=crossing_rings(owners),
        reduce_seconds=reduce,
        sync_seconds=sync,
        compute_seconds=grad_reduce_compute_seconds(costs, owners, parameters, sharded=sharded),
    )


def _bucket_units(costs: Costs, owners: Sequence[Hashable], sizes: Sequence[float]) -> tuple[range, ...]:
    """The buckets of units with these owners; a tied embedding is one of its own, for last stages hold it."""
    own = [None, *owners[1:]] if costs.ties else owners
    return group_units(own, sizes, bucket_size=costs.problem.bucket_size)


def half_parts(costs: Costs) -> HalfShare:
    """What the attention takes of a layer, whose halves are buckets of their own."""
    return _half_parts(costs.problem.model, costs.problem.rows(1))


@functools.lru_cache(maxsize=16)
def _half_parts(model: ModelConfig, rows: TokenRows) -> HalfShare:
    return half_shares(model_work(model, rows, logit_rows=CUDA_LOGIT_ROWS), "none")[0]


def slice_rings(owners: Sequence[Replica]) -> list[list[Card]]:
    """The rings of owners: one per card of the narrowest, each through the card of every owner that holds the
    same slice. Owners of other widths divide a slice further; their rings cross the same links one card wide.
    """
    count = min(map(len, owners))
    return [[owner[i * len(owner) // count] for owner in owners] for i in range(count)]


def crossing_rings(owners: Sequence[Replica]) -> Counter[str]:
    """How many of the owners' rings pass each node's NIC, by node; none where they stay in a node."""
    rings = slice_rings(owners)
    if all(len({card.node for card in replica}) == 1 for replica in owners):
        # A group inside a node: all its rings take the same way.
        nodes = {card.node for card in rings[0]}
        return Counter(dict.fromkeys(nodes, len(rings)) if len(nodes) > 1 else {})
    ring_nodes = [{card.node for card in ring} for ring in rings]
    return Counter(node for nodes in ring_nodes if len(nodes) > 1 for node in nodes)


def tied_embedding_seconds(
    costs: Costs, firsts: Sequence[Replica], lasts: Sequence[Replica], *, sharded: bool = False
) -> float:
    """Seconds to reduce the tied embedding's gradient over all that hold it, and with a `sharded` optimizer
    to gather it again; 0 without `lasts`, for a single owner, or if it is frozen. `firsts` and `lasts` are
    the replicas of all first and last stages."""
    if not lasts or costs.problem.model.lora is not None:
        return 0.0
    owners = list(dict.fromkeys([*firsts, *lasts]))
    size = costs.problem.model.embedding_parameters
    sharers = max(crossing_rings(owners).values(), default=1)
    seconds = grad_reduce_seconds(costs, owners, size, sharded=sharded, sharers=sharers)
    return seconds + (weight_sync_seconds(costs, owners, size, sharers=sharers) if sharded else 0.0)


def grad_reduce_seconds(
    costs: Costs, owners: Sequence[Replica], parameters: float, *, sharded: bool, sharers: int
) -> float:
    """Seconds to reduce the gradients of `parameters` parameters over their owners: an all-reduce on each of
    their rings; with a sharded optimizer a reduce-scatter. `sharers` is how many rings share a NIC, these
    owners' own included."""
    size = parameters * costs.problem.reduce_bytes
    collective = reduce_scatter_seconds if sharded else allreduce_seconds
    return _slowest_ring_seconds(collective, costs, owners, size, sharers=sharers)


def grad_reduce_compute_seconds(
    costs: Costs, owners: Sequence[Replica], parameters: float, *, sharded: bool
) -> float:
    """Seconds of its owners' compute that the reduction of `grad_reduce_seconds` takes if it is hidden."""
    if not costs.topology.measured:
        return 0.0
    size = parameters * costs.problem.reduce_bytes / min(map(len, owners))
    ring = max(allreduce_compute_seconds(costs.topology, ring, size) for ring in slice_rings(owners))
    all_reduces = not sharded or (len(owners) == 2 and uses_gloo(costs.topology, [o[0] for o in owners]))
    return ring if all_reduces else ring / 2


def weight_sync_seconds(costs: Costs, owners: Sequence[Replica], parameters: float, *, sharers: int) -> float:
    """Seconds of an all-gather of a sharded optimizer's stepped weights on each of their owners' rings."""
    size = parameters * STATE_BYTES[costs.problem.precision].parameters
    return _slowest_ring_seconds(all_gather_seconds, costs, owners, size, sharers=sharers)


def _slowest_ring_seconds(
    collective: Callable[..., float],
    costs: Costs,
    owners: Sequence[Replica],
    num_bytes: float,
    *,
    sharers: int,
) -> float:
    """Seconds of a collective of `num_bytes` that the owners' rings have in equal parts."""
    size = num_bytes / min(map(len, owners))
    measured = bool(costs.topology.measured)

    def seconds(ring: Sequence[Card]) -> float:
        # Rings through the same nodes take the same time, unless their links were measured.
        key = (collective, tuple(card.name if measured else card.node for card in ring), size, sharers)
        if key not in costs.rings:
            costs.rings[key] = collective(costs.topology, ring, size, sharers=sharers)
        return costs.rings[key]

    return max(map(seconds, slice_rings(owners)))


def unit_parameters(costs: Costs, units: Sequence[int] | None = None) -> list[float]:
    """Parameters that owners reduce, by unit (`units`, or the model's); a tied embedding apart."""
    own = costs.problem.model.trained_unit_parameters if units is None else units
    embedding, *others = map(float, own)
    return [0.0 if costs.ties else embedding, *others]
