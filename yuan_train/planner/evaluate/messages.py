"""Messages between the stages of a plan: their seconds on links that others share, and when they are sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.planner.costs.links import broadcast_seconds, message_seconds
from yuan_train.planner.costs.owners import PlanCards
from yuan_train.planner.costs.plan_problem import Costs, Replica
from yuan_train.planner.costs.topology import find_route
from yuan_train.planner.evaluate.flows import MessageFlow
from yuan_train.planner.evaluate.simulator import Simulation


def flow_sharers(edges: Sequence[tuple[Card, Card]]) -> list[int]:
    """For each message (source, target), how many of these messages share the busier NIC of its two nodes at
    a time; 1 inside a node.

    Equal pipelines run in step, so the same edge of all of them is busy at once; different edges of a
    pipeline take turns. Both ends count: what leaves a node and what enters one.
    """
    crossing = [(a, b) for a, b in edges if a.node != b.node]
    leaving, entering = Counter(a.node for a, _ in crossing), Counter(b.node for _, b in crossing)
    return [max(leaving[a.node], entering[b.node]) if a.node != b.node else 1 for a, b in edges]


def edge_seconds(costs: Costs, plan: Plan, cards: PlanCards, p: int, s: int, *, is_activation: bool) -> float:
    """Seconds of a hidden state from stage s to s + 1 of pipeline p, or of its gradient back: from first card
    to first card, then broadcast inside the tensor-parallel group that receives it; the slowest of the
    replicas' pairs. 0 if sender and receiver are the same cards."""
    a, b = (s, s + 1) if is_activation else (s + 1, s)
    flows = [
        pair for q, row in enumerate(cards) if len(row) > s + 1 for pair in _pairs(row[a], row[b], q == p)
    ]
    edges = [(source[0], target[0]) for source, target, _ in flows]
    pipeline = plan.pipelines[p]
    sender = costs.of_stage(plan, cards[p][s][0], pipeline.micro_batch_size, pipeline.stages[s])
    # A stage without units passes on what it receives.
    hidden_bytes = costs.hidden_bytes(pipeline.micro_batch_size)
    size = sender.units[-1].output_bytes if sender.units else hidden_bytes
    return (
        max(
            message_seconds(find_route(costs.topology, source[0], target[0]), size, sharers=sharers)
            + broadcast_seconds(costs.topology, target, size)
            for (source, target, is_own), sharers in zip(flows, flow_sharers(edges), strict=True)
            if is_own and source != target
        )
        if any(is_own and source != target for source, target, is_own in flows)
        else 0.0
    )


def _pairs(
    sources: Sequence[Replica], targets: Sequence[Replica], is_own: bool
) -> list[tuple[Replica, Replica, bool]]:
    """Which replica sends to which: micro-batch m goes from replica m mod n to replica m mod n'."""
    count = math.lcm(len(sources), len(targets))
    return [(sources[i % len(sources)], targets[i % len(targets)], is_own) for i in range(count)]


def message_flows(
    costs: Costs, plan: Plan, cards: PlanCards, simulations: Sequence[Simulation], *, after: float
) -> list[MessageFlow]:
    """The messages over NICs that arrive after a time, of all pipelines; by their simulations."""
    late: dict[int, list[tuple[float, float, int, int]]] = {}
    flows: list[MessageFlow] = []
    for pipeline, row, simulation in zip(plan.pipelines, cards, simulations, strict=True):
        card_of = {
            worker: replica[0]
            for workers, replicas in zip(pipeline.workers, row, strict=True)
            for worker, replica in zip(workers, replicas, strict=True)
        }
        if id(simulation) not in late:
            late[id(simulation)] = [
                (start, end, operation.worker, operation.peer)
                for operation, (start, end) in zip(simulation.operations, simulation.spans, strict=True)
                if end > after and operation.peer >= 0 and end > start
            ]
        for start, end, worker, peer in late[id(simulation)]:
            source, target = card_of[worker], card_of[peer]
            if find_route(costs.topology, source, target).shared:
                flows.append(MessageFlow(start, end, (source.node, target.node)))
    return flows
