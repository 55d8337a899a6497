"""Messages between the stages of a plan: their seconds on links that others share, and when they are sent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.planner.costs.links import broadcast_seconds, message_seconds
from yuan_train.planner.costs.owners import PlanCards
from yuan_train.planner.costs.plan_problem import Costs, Replica
from yuan_train.planner.costs.topology import find_route
from yuan_train.planner.evaluate.flows import MessageFlow
from yuan_train.planner.evaluate.simulator import Simulation
from yuan_train.planner.native.pipelines import Sent


@dataclass(frozen=True)
class EdgeFlows:
    """How many messages of an edge cross the NICs at a time, by node. Equal pipelines run in step, so the
    same edge of all of them is busy at once; different edges of a pipeline take turns."""

    leaving: Mapping[str, int]
    entering: Mapping[str, int]

    def sharers(self, source: Card, target: Card) -> int:
        """How many messages share the busier NIC of a message's two nodes; 1 inside a node."""
        return max(self.leaving[source.node], self.entering[target.node]) if source.node != target.node else 1


def edge_flows(edges: Iterable[tuple[Card, Card]]) -> EdgeFlows:
    """The flows of these messages (source, target)."""
    crossing = [(a.node, b.node) for a, b in edges if a.node != b.node]
    return EdgeFlows(Counter(a for a, _ in crossing), Counter(b for _, b in crossing))


def plan_edge_flows(cards: PlanCards, s: int, *, is_activation: bool) -> EdgeFlows:
    """The messages of all pipelines from stage s to s + 1, or back."""
    a, b = (s, s + 1) if is_activation else (s + 1, s)
    rows = (row for row in cards if len(row) > s + 1)
    return edge_flows((x[0], y[0]) for row in rows for x, y in _pairs(row[a], row[b]))


def edge_seconds(
    costs: Costs, plan: Plan, cards: PlanCards, p: int, s: int, flows: EdgeFlows, *, is_activation: bool
) -> float:
    """Seconds of a hidden state from stage s to s + 1 of pipeline p, or of its gradient back: from first card
    to first card, then broadcast inside the tensor-parallel group that receives it; the slowest of the
    replicas' pairs. 0 if sender and receiver are the same cards. `flows` are those of this edge."""
    a, b = (s, s + 1) if is_activation else (s + 1, s)
    pairs = [(x, y) for x, y in _pairs(cards[p][a], cards[p][b]) if x != y]
    if not pairs:
        return 0.0
    pipeline = plan.pipelines[p]
    sender = costs.of_stage(plan, cards[p][s][0], pipeline.micro_batch_size, pipeline.stages[s])
    # A stage without units passes on what it receives.
    size = costs.hidden_bytes(pipeline.micro_batch_size)
    size = sender.units[-1].output_bytes if sender.units else size

    def seconds(source: Card, target: Replica) -> float:
        route, sharers = find_route(costs.topology, source, target[0]), flows.sharers(source, target[0])
        inside = broadcast_seconds(costs.topology, target, size)
        return message_seconds(route, size, sharers=sharers) + inside

    return max(seconds(source[0], target) for source, target in pairs)


def _pairs(sources: Sequence[Replica], targets: Sequence[Replica]) -> list[tuple[Replica, Replica]]:
    """Which replica sends to which: micro-batch m goes from replica m mod n to replica m mod n'."""
    count = math.lcm(len(sources), len(targets))
    return [(sources[i % len(sources)], targets[i % len(targets)]) for i in range(count)]


def message_flows(
    costs: Costs, plan: Plan, cards: PlanCards, simulations: Sequence[Simulation], *, after: float
) -> list[MessageFlow]:
    """The messages over NICs that arrive after a time, of all pipelines; by their simulations."""
    late: dict[int, list[Sent]] = {}
    flows: list[MessageFlow] = []
    for pipeline, row, simulation in zip(plan.pipelines, cards, simulations, strict=True):
        card_of = {
            worker: replica[0]
            for workers, replicas in zip(pipeline.workers, row, strict=True)
            for worker, replica in zip(workers, replicas, strict=True)
        }
        if id(simulation) not in late:
            late[id(simulation)] = simulation.sent_after(after)
        shared: dict[tuple[int, int], tuple[str, str] | None] = {}
        for start, end, worker, peer in late[id(simulation)]:
            if (worker, peer) not in shared:
                source, target = card_of[worker], card_of[peer]
                route = find_route(costs.topology, source, target)
                shared[worker, peer] = (source.node, target.node) if route.shared else None
            nodes = shared[worker, peer]
            if nodes is not None:
                flows.append(MessageFlow(start, end, nodes))
    return flows
