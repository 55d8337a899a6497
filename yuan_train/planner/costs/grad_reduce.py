"""Buckets of a plan: how long their owners take to reduce the gradients, and to send the weights back.

The owners' cards that hold the same slice of a bucket make a ring, which reduces that slice: owners of k
cards each make k rings, all at once, and every ring that leaves a node takes its share of the node's NIC.
With a sharded optimizer a ring reduces in a reduce-scatter, and after the optimizer step it gathers the
weights: each is half of an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan
from yuan_train.config.plan_units import plan_unit_parameters
from yuan_train.planner.costs.links import allreduce_seconds
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

    @property
    def cards(self) -> list[Card]:
        return [card for replica in self.owners for card in replica]


def bucket_costs(costs: Costs, plan: Plan, cards: PlanCards) -> tuple[BucketCost, ...]:
    """The buckets that several owners hold, in the model's order; the tied embedding is not among them."""
    holders = unit_holders(plan, cards)
    if max(map(len, holders)) == 1:
        return ()
    sizes = unit_parameters(costs.problem.model, plan_unit_parameters(plan))
    groups = [
        units
        for units in bucket_units(costs, holders, sizes)
        if len(holders[units.start]) > 1 and sum(sizes[u] for u in units)
    ]
    owners = list(dict.fromkeys(holders[units.start] for units in groups))
    sharers = dict(zip(owners, owner_sharers(owners), strict=True))
    known: dict[tuple[tuple[Replica, ...], float], tuple[float, float]] = {}
    found: list[BucketCost] = []
    for units in groups:
        replicas = holders[units.start]
        key = (replicas, sum(sizes[u] for u in units))
        if key not in known:
            flows, sharded = sharers[replicas], plan.optimizer_sharding
            known[key] = (
                grad_reduce_seconds(costs, replicas, key[1], sharded=sharded, sharers=flows),
                weight_sync_seconds(costs, replicas, key[1], sharers=flows) if sharded else 0.0,
            )
        reduce_seconds, sync_seconds = known[key]
        found.append(
            BucketCost(
                units=units,
                owners=replicas,
                grad_reduce_seconds=reduce_seconds,
                weight_sync_seconds=sync_seconds,
            )
        )
    return tuple(found)


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


def owner_sharers(owners: Sequence[tuple[Replica, ...]]) -> list[int]:
    """For each set of owners, how many rings at a time share the busiest NIC on the way of its own, these
    included; 1 inside a node.

    Sets that have a card in common take turns; of the others, those count that can all run at once.
    """
    members = [frozenset(card for replica in replicas for card in replica) for replicas in owners]
    if sum(map(len, members)) == len({card for own in members for card in own}):
        return ring_sharers(owners)
    crossing = [crossing_rings(replicas) for replicas in owners]
    result: list[int] = []
    for i, own in enumerate(crossing):
        flows = [1]
        for node, count in own.items():
            busy = members[i]
            at_once = count
            for j, other in enumerate(crossing):
                if other[node] and busy.isdisjoint(members[j]):
                    busy, at_once = busy | members[j], at_once + other[node]
            flows.append(at_once)
        result.append(max(flows))
    return result


def ring_sharers(owners: Sequence[Sequence[Replica]]) -> list[int]:
    """The same for sets of owners without a common card, which all run at once."""
    crossing = [crossing_rings(replicas) for replicas in owners]
    total: Counter[str] = Counter()
    for rings in crossing:
        total.update(rings)
    return [max((total[node] for node in rings), default=1) for rings in crossing]


def tied_embedding_seconds(
    costs: Costs, firsts: Sequence[Replica], lasts: Sequence[Replica], *, sharded: bool = False
) -> float:
    """Seconds to reduce the tied embedding's gradient over all that hold it, and with a `sharded` optimizer
    to gather it again; 0 without `lasts` or for a single owner.

    `firsts` and `lasts` are the replicas of all first and last stages.
    """
    if not lasts:
        return 0.0
    owners = list(dict.fromkeys([*firsts, *lasts]))
    size, sharers = costs.problem.model.embedding_parameters, ring_sharers([owners])[0]
    seconds = grad_reduce_seconds(costs, owners, size, sharded=sharded, sharers=sharers)
    return seconds + (weight_sync_seconds(costs, owners, size, sharers=sharers) if sharded else 0.0)


def grad_reduce_seconds(
    costs: Costs, owners: Sequence[Replica], parameters: float, *, sharded: bool, sharers: int
) -> float:
    """Seconds to reduce the gradients of `parameters` parameters over their owners: an all-reduce on each of
    their rings; with a sharded optimizer a reduce-scatter, its first half.

    `sharers` is how many rings share a NIC, these owners' own included.
    """
    ring = _slowest_ring_seconds(costs, owners, parameters * costs.problem.reduce_bytes, sharers=sharers)
    return ring / 2 if sharded else ring


def weight_sync_seconds(costs: Costs, owners: Sequence[Replica], parameters: float, *, sharers: int) -> float:
    """Seconds to gather the stepped weights of a sharded optimizer over their owners: half of an all-reduce
    of that size on each of their rings."""
    size = parameters * STATE_BYTES[costs.problem.precision].parameters
    return _slowest_ring_seconds(costs, owners, size, sharers=sharers) / 2


def _slowest_ring_seconds(
    costs: Costs, owners: Sequence[Replica], num_bytes: float, *, sharers: int
) -> float:
    """Seconds of an all-reduce of `num_bytes` that the owners' rings have in equal parts."""
    rings = slice_rings(owners)
    if not costs.topology.measured:
        # Rings through the same nodes take the same time.
        rings = list({tuple(card.node for card in ring): ring for ring in rings}.values())
    size = num_bytes / min(map(len, owners))
    return max(allreduce_seconds(costs.topology, ring, size, sharers=sharers) for ring in rings)


def unit_parameters(model: ModelConfig, units: Sequence[int] | None = None) -> list[float]:
    """Parameters whose gradients the owners reduce, by unit (`units`, or the model's); a tied embedding is
    reduced separately, over all that hold it."""
    embedding, *others = map(float, model.unit_parameters if units is None else units)
    return [0.0 if model.tie_embeddings else embedding, *others]
