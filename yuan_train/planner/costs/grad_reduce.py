"""Buckets of a plan: how long their owners take to reduce the gradients, and to send the weights back.

A ring of one card per owner reduces a bucket's gradients. With a sharded optimizer the ring does so in a
reduce-scatter, and after the optimizer step it gathers the weights: each is half of an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan
from yuan_train.config.plan_units import (
    divides_experts,
    expert_parameters,
    layer_units,
    plan_unit_parameters,
    stage_unit_range,
)
from yuan_train.planner.costs.expert_costs import stage_experts
from yuan_train.planner.costs.links import allreduce_compute_seconds, allreduce_seconds
from yuan_train.planner.costs.owners import PlanCards, unit_holders
from yuan_train.planner.costs.plan_problem import Costs, Replica
from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.schedule.buckets import group_units


@dataclass(frozen=True, kw_only=True)
class BucketCost:
    """Adjacent units that several owners hold, and what their ring takes for them."""

    units: range
    owners: tuple[Replica, ...]
    grad_reduce_seconds: float
    weight_sync_seconds: float
    """Of the weights' way back after the optimizer step; 0 unless the optimizer is sharded."""
    compute_seconds: float = 0.0
    """Of its owners' compute, which the reduction takes while it is hidden behind it."""

    @property
    def cards(self) -> list[Card]:
        return [card for replica in self.owners for card in replica]


def bucket_costs(costs: Costs, plan: Plan, cards: PlanCards) -> tuple[BucketCost, ...]:
    """The buckets that several owners hold, in the model's order; the tied embedding is not among them."""
    held = _held_buckets(costs, plan, unit_holders(plan, cards))
    buckets = [bucket for bucket in held if len(bucket.owners) > 1 and bucket.parameters]
    owners = list(dict.fromkeys(bucket.owners for bucket in buckets))
    sharers = dict(zip(owners, owner_sharers(owners), strict=True))
    known: dict[tuple[tuple[Replica, ...], float], tuple[float, float, float]] = {}
    found: list[BucketCost] = []
    for bucket in buckets:
        key = (bucket.owners, bucket.parameters)
        if key not in known:
            ring, flows = [replica[0] for replica in bucket.owners], sharers[bucket.owners]
            sharded = plan.optimizer_sharding
            known[key] = (
                grad_reduce_seconds(costs, ring, key[1], sharded=sharded, sharers=flows),
                weight_sync_seconds(costs, ring, key[1], sharers=flows) if sharded else 0.0,
                grad_reduce_compute_seconds(costs, ring, key[1], sharded=sharded),
            )
        reduce_seconds, sync_seconds, compute_seconds = known[key]
        found.append(
            BucketCost(
                units=bucket.units,
                owners=bucket.owners,
                grad_reduce_seconds=reduce_seconds,
                weight_sync_seconds=sync_seconds,
                compute_seconds=compute_seconds,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class _Bucket:
    units: range
    owners: tuple[Replica, ...]
    parameters: float
    """On each card of an owner; of owners of unlike widths, on that of the narrowest."""


def _held_buckets(costs: Costs, plan: Plan, holders: Sequence[tuple[Replica, ...]]) -> list[_Bucket]:
    """All buckets of a plan, in the model's order."""
    sizes = unit_parameters(costs.problem.model, plan_unit_parameters(plan))
    if divides_experts(plan):
        return _with_experts(costs, plan, holders, sizes)
    if max(map(len, holders)) == 1:
        return []
    return [
        _Bucket(units, owners, sum(sizes[u] for u in units) / min(map(len, owners)))
        for units in bucket_units(costs, holders, sizes)
        for owners in [holders[units.start]]
    ]


def _with_experts(
    costs: Costs, plan: Plan, holders: Sequence[tuple[Replica, ...]], sizes: Sequence[float]
) -> list[_Bucket]:
    """What is whole on every card of a replica has each of them as an owner; then follow the experts of its
    layers, one bucket for each card of a replica, as `Grid.buckets` has them."""
    experts = expert_parameters(plan.model)
    counts = {
        u: stage_experts(plan, stage)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for u in stage_unit_range(plan, stage)
    }
    # A layer, or its feed-forward: the half that ends where a layer does.
    has_experts = [False, *(end % 1 == 0 for _, _, end in layer_units(plan)), False]
    whole = [size - experts * held for size, held in zip(sizes, has_experts, strict=True)]
    found: list[_Bucket] = []
    for units in bucket_units(costs, holders, whole):
        owners = holders[units.start]
        each = tuple((card,) for replica in owners for card in replica)
        found.append(_Bucket(units, each, sum(whole[u] for u in units)))
        for u in (u for u in units if has_experts[u]):
            for part, count in enumerate(counts[u]):
                own = tuple((replica[part],) for replica in owners)
                found.append(_Bucket(range(u, u + 1), own, experts * count / plan.model.num_experts))
    return found


def bucket_units(
    costs: Costs, owners: Sequence[Hashable], parameters: Sequence[float] | None = None
) -> tuple[range, ...]:
    """The buckets of units with these owners; `parameters` are those of the model's units if None.

    A tied embedding is a bucket of its own: the first and the last stages hold it.
    """
    problem = costs.problem
    if problem.model.tie_embeddings:
        owners = [None, *owners[1:]]
    sizes = unit_parameters(problem.model) if parameters is None else parameters
    return group_units(owners, sizes, bucket_size=problem.bucket_size)


def owner_sharers(owners: Sequence[tuple[Replica, ...]]) -> list[int]:
    """For the ring of each set of owners, how many rings at a time share the busiest NIC on its way.

    Rings that have a card in common take turns; of the others, those count that can all run at once.
    """
    members = [frozenset(card for replica in replicas for card in replica) for replicas in owners]
    rings = [[replica[0] for replica in replicas] for replicas in owners]
    if sum(map(len, members)) == len({card for own in members for card in own}):
        return ring_sharers(rings)
    result: list[int] = []
    for i, ring in enumerate(rings):
        others = [j for j, other in enumerate(rings) if j != i and _crosses(other)]
        flows = [1]
        for node in {card.node for card in ring} if _crosses(ring) else ():
            busy = members[i]
            at_once = 1
            for j in others:
                if busy.isdisjoint(members[j]) and any(card.node == node for card in rings[j]):
                    busy, at_once = busy | members[j], at_once + 1
            flows.append(at_once)
        result.append(max(flows))
    return result


def _crosses(ring: Sequence[Card]) -> bool:
    """Whether a ring leaves its node."""
    return len({card.node for card in ring}) > 1


def ring_sharers(rings: Sequence[Sequence[Card]]) -> list[int]:
    """For each of these rings without a common card, how many share the busiest NIC on its way; 1 inside a
    node. All run at once."""
    ring_nodes = [{card.node for card in ring} for ring in rings]
    crossing = Counter(node for nodes in ring_nodes if len(nodes) > 1 for node in nodes)
    return [
        max((crossing[node] for node in nodes), default=1) if len(nodes) > 1 else 1 for nodes in ring_nodes
    ]


def tied_embedding_seconds(
    costs: Costs, firsts: Sequence[Card], lasts: Sequence[Card], *, width: int = 1, sharded: bool = False
) -> float:
    """Seconds to reduce the tied embedding's gradient over all that hold it, and with a `sharded` optimizer
    to gather it again; 0 without `lasts` or for a single card.

    `firsts` and `lasts` are the first card of each replica of all first and last stages; `width` is the
    tensor-parallel size that divides the embedding matrix.
    """
    if not lasts:
        return 0.0
    owners = list(dict.fromkeys([*firsts, *lasts]))
    size = costs.problem.model.embedding_parameters / width
    seconds = grad_reduce_seconds(costs, owners, size, sharded=sharded)
    return seconds + (weight_sync_seconds(costs, owners, size) if sharded else 0.0)


def grad_reduce_seconds(
    costs: Costs, owners: Sequence[Card], parameters: float, *, sharded: bool, sharers: int = 1
) -> float:
    """Seconds to reduce the gradients of `parameters` parameters over a ring of owners: an all-reduce; with a
    sharded optimizer a reduce-scatter, its first half.

    `sharers` is how many rings share a NIC.
    """
    size = parameters * costs.problem.reduce_bytes
    ring = allreduce_seconds(costs.topology, owners, size, sharers=sharers)
    return ring / 2 if sharded else ring


def grad_reduce_compute_seconds(
    costs: Costs, owners: Sequence[Card], parameters: float, *, sharded: bool
) -> float:
    """Seconds of its owners' compute that the reduction of `grad_reduce_seconds` takes if it is hidden."""
    ring = allreduce_compute_seconds(costs.topology, owners, parameters * costs.problem.reduce_bytes)
    return ring / 2 if sharded else ring


def weight_sync_seconds(
    costs: Costs, owners: Sequence[Card], parameters: float, *, sharers: int = 1
) -> float:
    """Seconds to gather the stepped weights of a sharded optimizer over a ring of owners: half of an
    all-reduce of that size."""
    size = parameters * STATE_BYTES[costs.problem.precision].parameters
    return allreduce_seconds(costs.topology, owners, size, sharers=sharers) / 2


def unit_parameters(model: ModelConfig, units: Sequence[int] | None = None) -> list[float]:
    """Parameters whose gradients the owners reduce, by unit (`units`, or the model's); a tied embedding is
    reduced separately, over all that hold it."""
    embedding, *others = map(float, model.unit_parameters if units is None else units)
    return [0.0 if model.tie_embeddings else embedding, *others]
