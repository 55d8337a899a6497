"""Gradient sums: who holds the same part of the model, how long a sum takes, and when the last ends.

Adjacent units with the same owners are one bucket. All owners begin a bucket's sum as soon as the last of
them has run its last backward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from yuan_train.config.cluster import Card
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan
from yuan_train.planner.communication import ring_seconds
from yuan_train.planner.setting import Costs, Replica, stage_units
from yuan_train.planner.simulator import Simulation
from yuan_train.planner.workload import STATE_BYTES


def ring_sharers(rings: Sequence[Sequence[Card]]) -> list[int]:
    """How many of these rings leave through the busiest network card of each; all are busy together."""
    nodes = [{card.node for card in ring} for ring in rings]
    crossing = Counter(node for places in nodes if len(places) > 1 for node in places)
    return [max((crossing[node] for node in places), default=1) if len(places) > 1 else 1 for places in nodes]


def tied_seconds(
    costs: Costs, firsts: Sequence[Card], lasts: Sequence[Card], *, width: int = 1, sharded: bool = False
) -> float:
    """Sum of the tied table's gradient over all that hold it; 0 without `lasts` or for a single card."""
    if not lasts:
        return 0.0
    owners = list(dict.fromkeys([*firsts, *lasts]))
    size = costs.setting.model.embedding_parameters / width
    return sum_seconds(costs, owners, size, sharded=sharded)


def sum_seconds(
    costs: Costs, owners: Sequence[Card], parameters: float, *, sharded: bool, sharers: int = 1
) -> float:
    """Gradients of so many parameters summed over a ring of owners: an all-reduce; or, sharded, a
    reduce-scatter, and an all-gather of the weights."""
    state = STATE_BYTES[costs.setting.precision]
    ring = ring_seconds(costs.topology, owners, parameters * state.gradients, sharers=sharers)
    if not sharded:
        return ring
    weights = ring_seconds(costs.topology, owners, parameters * state.parameters, sharers=sharers)
    return (ring + weights) / 2


PlanCards = Sequence[Sequence[tuple[Replica, ...]]]
"""By pipeline and stage."""


def owner_sets(plan: Plan, cards: PlanCards) -> dict[tuple[int, int], int]:
    """How many replicas own a stage's units: the fewest over its units, by pipeline and stage."""
    holders = _holders(plan, cards)
    return {
        key: min((len(holders[u]) for u in units), default=1) for key, units in _units_by_stage(plan).items()
    }


def optimizer_shares(plan: Plan, cards: PlanCards) -> dict[tuple[int, int], float]:
    """What each owner of a stage's units holds of their optimizer state: the most over the units, by pipeline
    and stage."""
    where = _units_by_stage(plan)
    if not plan.optimizer_sharding:
        return dict.fromkeys(where, 1.0)
    holders, weights = _holders(plan, cards), plan.optimizer_shares
    weight = {
        replica: weights[ranks[0]]
        for pipeline, row in zip(plan.pipelines, cards, strict=True)
        for stage, replicas in zip(pipeline.stages, row, strict=True)
        for ranks, replica in zip(stage.replicas, replicas, strict=True)
    }
    totals = [math.fsum(weight[replica] for replica in replicas) for replicas in holders]
    return {
        (p, s): max((weight[cards[p][s][0]] / totals[u] for u in units), default=1.0)
        for (p, s), units in where.items()
    }


def holds_slices(plan: Plan, cards: PlanCards) -> dict[tuple[int, int], bool]:
    """Whether a stage's optimizer is sharded over wider owners too, so that each of its cards holds several
    of the slices in which they meet; by pipeline and stage."""
    if not plan.optimizer_sharding:
        return dict.fromkeys(_units_by_stage(plan), False)
    slices = [math.lcm(*(len(replica) for replica in replicas)) for replicas in _holders(plan, cards)]
    return {
        (p, s): any(slices[u] > len(cards[p][s][0]) for u in units)
        for (p, s), units in _units_by_stage(plan).items()
    }


def _units_by_stage(plan: Plan) -> dict[tuple[int, int], range]:
    """The units of each stage, by pipeline and stage."""
    return {
        (p, s): range(*stage_units(stage, plan.model.num_layers).indices(plan.model.num_layers + 2))
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
    }


def _holders(plan: Plan, cards: PlanCards) -> list[tuple[Replica, ...]]:
    """The replicas that hold each unit, over all pipelines."""
    held: list[list[Replica]] = [[] for _ in range(plan.model.num_layers + 2)]
    for (p, s), units in _units_by_stage(plan).items():
        for u in units:
            held[u] += cards[p][s]
    return [tuple(replicas) for replicas in held]


def stage_sums(
    costs: Costs, plan: Plan, cards: PlanCards, owners: dict[tuple[int, int], int]
) -> dict[tuple[int, int], float]:
    """Gradient sums of each stage: adjacent units with the same owners are one bucket, one ring."""
    if max(owners.values()) == 1:
        return dict.fromkeys(owners, 0.0)
    holders = _holders(plan, cards)
    sizes = unit_parameters(costs.setting.model)
    buckets: dict[tuple[Replica, ...], float] = {}
    for replicas, size in zip(holders, sizes, strict=True):
        buckets[replicas] = buckets.get(replicas, 0.0) + size
    rings = {replicas: [replica[0] for replica in replicas] for replicas in buckets}
    sharers = ring_sharers(list(rings.values()))
    alone, crowded = (
        {
            replicas: sum_seconds(
                costs,
                rings[replicas],
                size / min(map(len, replicas)),
                sharded=plan.optimizer_sharding,
                sharers=crowd,
            )
            for (replicas, size), crowd in zip(buckets.items(), crowds, strict=True)
        }
        for crowds in ([1] * len(sharers), sharers)
    )
    result: dict[tuple[int, int], float] = {}
    for (p, s), units in _units_by_stage(plan).items():
        own = dict.fromkeys(holders[u] for u in units)
        # All are under way at once: as long as the most crowded takes, and as their card's own link needs.
        together = sum(alone[replicas] for replicas in own)
        result[p, s] = max(together, max((crowded[replicas] for replicas in own), default=0.0))
    return result


def unit_parameters(model: ModelConfig) -> list[float]:
    """Parameters that owners sum, by unit; a tied table is summed apart, over all that hold it."""
    tied = model.tie_embeddings
    ends = (0, model.hidden_size) if tied else (model.embedding_parameters, model.head_parameters)
    return [float(n) for n in (ends[0], *[model.layer_parameters] * model.num_layers, ends[1])]


def sums_end(plan: Plan, sums: dict[tuple[int, int], float], simulations: Sequence[Simulation]) -> float:
    """End of the last gradient sum. A stage's begins when all owners of its units are done."""
    ends = {
        (p, s): end
        for p, simulation in enumerate(simulations)
        for s, end in enumerate(simulation.stage_end_seconds)
    }
    latest = max(ends.values())
    if not any(sums.values()):
        return latest
    units = _units_by_stage(plan)
    done = [0.0] * (plan.model.num_layers + 2)
    for key, end in ends.items():
        for u in units[key]:
            done[u] = max(done[u], end)
    for key, seconds in sums.items():
        ready = max((done[u] for u in units[key]), default=ends[key])
        latest = max(latest, ready + seconds)
    return latest
