"""What the messages between a pipeline's stages take at least, without knowing which cards of a type it has.

Stages on one node and the messages between them form a run. In a run without a message to another node, each
stage has a replica on the same node as one of each other stage, so that its widths add up to the node's cards
at most. Runs are joined by messages between nodes. So each stage is charged its width's part of such a
message; what the last, unfinished run is charged too much is at most one message: the slack.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.planner.costs.links import message_seconds
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.costs.topology import find_route
from yuan_train.planner.search.stage_parts import Floats, Kind, type_names


@dataclass(frozen=True, kw_only=True, eq=False)
class Edges:
    """Seconds of messages there and back, by stage."""

    seconds: Floats
    """[N]: that a stage of a kind is charged."""
    slack: float
    """What all stages before one, or all from one on, may be charged too much."""


def no_edges(kinds: Sequence[Kind]) -> Edges:
    """Messages that take no time."""
    return Edges(seconds=np.zeros(len(kinds)), slack=0.0)


def least_edges(costs: Costs, cards: Sequence[Card], kinds: Sequence[Kind], size: int) -> Edges:
    """The edges of micro-batches of so many sequences."""
    names = type_names(cards)
    if costs.topology.measured:
        return no_edges(kinds)
    num_bytes = min(
        [costs.hidden_bytes(size)]
        + [unit.output_bytes for name in names for unit in costs.of(name, size, "none").units[:-1]]
    )
    on_node = Counter(card.node for card in cards)
    between = np.array([_between_nodes(costs, cards, name, num_bytes) for name in names])
    if len({(card.node, card.type) for card in cards}) > len(on_node):
        # A run's last stage may be of any type on its node.
        between[:] = between.min()
    most = [max(on_node[card.node] for card in cards if card.type == name) for name in names]
    each = [between[kind.type_index] * kind.width / most[kind.type_index] for kind in kinds]
    return Edges(seconds=np.array(each), slack=float(between.max()))


def _between_nodes(costs: Costs, cards: Sequence[Card], name: str, num_bytes: float) -> float:
    """The least seconds of a message there and back between a card of a type and one on another node; 0 if
    there is none."""
    links = costs.problem.cluster.links
    found = [2 * (link.latency + num_bytes / link.bandwidth) for link in links]
    for a, b in itertools.product(_examples(costs, cards), repeat=2):
        if a.type == name and a.node != b.node:
            found.append(
                sum(
                    message_seconds(find_route(costs.topology, source, target), num_bytes)
                    for source, target in ((a, b), (b, a))
                )
            )
    return min(found, default=0.0)


def _examples(costs: Costs, cards: Sequence[Card]) -> Iterator[Card]:
    """A card of each type on the first two nodes of each group."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for card in cards:
        own = nodes.setdefault((costs.topology.groups[card.node].name, card.type), [])
        if card.node not in own and len(own) < 2:
            own.append(card.node)
            yield card
