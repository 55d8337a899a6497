"""Gradient reduction: how long the owners of the same part of the model take to reduce its gradients.

Adjacent units with the same owners are one bucket. All owners start a bucket's reduction as soon as the last
of them has run its last backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from yuan_train.config.cluster import Card
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan
from yuan_train.planner.costs.links import allreduce_seconds
from yuan_train.planner.costs.owners import PlanCards, unit_holders, units_by_stage
from yuan_train.planner.costs.plan_problem import Costs, Replica
from yuan_train.planner.costs.workload import STATE_BYTES


def ring_sharers(rings: Sequence[Sequence[Card]]) -> list[int]:
    """For each ring, how many rings share the busiest NIC on its way; 1 inside a node. All run at once."""
    ring_nodes = [{card.node for card in ring} for ring in rings]
    crossing = Counter(node for nodes in ring_nodes if len(nodes) > 1 for node in nodes)
    return [
        max((crossing[node] for node in nodes), default=1) if len(nodes) > 1 else 1 for nodes in ring_nodes
    ]


def tied_embedding_seconds(
    costs: Costs, firsts: Sequence[Card], lasts: Sequence[Card], *, width: int = 1, sharded: bool = False
) -> float:
    """Seconds to reduce the tied embedding's gradient over all that hold it; 0 without `lasts` or for a
    single card.

    `firsts` and `lasts` are the first card of each replica of all first and last stages; `width` is the
    tensor-parallel size that divides the embedding matrix; `sharded`: the optimizer is.
    """
    if not lasts:
        return 0.0
    owners = list(dict.fromkeys([*firsts, *lasts]))
    size = costs.problem.model.embedding_parameters / width
    return grad_reduce_seconds(costs, owners, size, sharded=sharded)


def grad_reduce_seconds(
    costs: Costs, owners: Sequence[Card], parameters: float, *, sharded: bool, sharers: int = 1
) -> float:
    """Seconds to reduce the gradients of `parameters` parameters over a ring of owners: an all-reduce; with a
    sharded optimizer a reduce-scatter, and an all-gather of the weights, each half an all-reduce.

    `sharers` is how many rings share a NIC.
    """
    state = STATE_BYTES[costs.problem.precision]
    ring = allreduce_seconds(costs.topology, owners, parameters * state.gradients, sharers=sharers)
    if not sharded:
        return ring
    weights = allreduce_seconds(costs.topology, owners, parameters * state.parameters, sharers=sharers)
    return (ring + weights) / 2


def stage_grad_reduce_seconds(
    costs: Costs, plan: Plan, cards: PlanCards, owners: dict[tuple[int, int], int]
) -> dict[tuple[int, int], float]:
    """Seconds of each stage's gradient reduction, by pipeline and stage; a bucket is reduced over one ring.

    `owners` is what `owner_sets` returns.
    """
    if max(owners.values()) == 1:
        return dict.fromkeys(owners, 0.0)
    holders = unit_holders(plan, cards)
    sizes = unit_parameters(costs.problem.model)
    buckets: dict[tuple[Replica, ...], float] = {}
    for replicas, size in zip(holders, sizes, strict=True):
        buckets[replicas] = buckets.get(replicas, 0.0) + size
    rings = {replicas: [replica[0] for replica in replicas] for replicas in buckets}
    sharers = ring_sharers(list(rings.values()))
    alone, shared = (
        {
            replicas: grad_reduce_seconds(
                costs,
                rings[replicas],
                size / min(map(len, replicas)),
                sharded=plan.optimizer_sharding,
                sharers=count,
            )
            for (replicas, size), count in zip(buckets.items(), counts, strict=True)
        }
        for counts in ([1] * len(sharers), sharers)
    )
    result: dict[tuple[int, int], float] = {}
    for (p, s), units in units_by_stage(plan).items():
        stage_buckets = dict.fromkeys(holders[u] for u in units)
        # A stage's buckets run at once: they take as long as the slowest one takes on its shared NIC, and at
        # least as long as all of them one after the other on the card's stage_buckets link.
        total = sum(alone[replicas] for replicas in stage_buckets)
        result[p, s] = max(total, max((shared[replicas] for replicas in stage_buckets), default=0.0))
    return result


def unit_parameters(model: ModelConfig) -> list[float]:
    """Parameters whose gradients the owners reduce, by unit; a tied embedding is reduced separately, over all
    that hold it."""
    tied = model.tie_embeddings
    ends = (0, model.hidden_size) if tied else (model.embedding_parameters, model.head_parameters)
    return [float(n) for n in (ends[0], *[model.layer_parameters] * model.num_layers, ends[1])]
