"""Seconds of a message between two cards, and of a sum over several."""

from __future__ import annotations

from collections.abc import Sequence

from yuan_train.config.cluster import Card
from yuan_train.config.profile import LinkProfile
from yuan_train.planner.topology import Route, Topology, find_route


def message_seconds(route: Route, message_bytes: float, *, sharers: int = 1) -> float:
    """latency + bytes / bandwidth, the bandwidth divided among the flows that share a network card.

    A measured link is interpolated between its message sizes; the measurement had the link for itself, so
    what it takes beyond its smallest message is multiplied by the sharers.
    """
    crowd = max(sharers, 1) if route.shared else 1
    if route.measured is not None:
        alone = _interpolate(route.measured, message_bytes)
        start = min(alone, route.measured.seconds[0])
        return start + (alone - start) * crowd
    return route.latency_seconds + message_bytes * crowd / route.bytes_per_second


def ring_seconds(
    topology: Topology, cards: Sequence[Card], summed_bytes: float, *, sharers: int = 1
) -> float:
    """All-reduce of `summed_bytes` over a ring of k cards: 2(k - 1) rounds of 1/k each over the slowest link.

    Volume 2(k-1)/k * n and the slowest-link rule: Patarasuk and Yuan 2009; 0 for one card. The ring goes node
    by node, as the libraries lay it, so that it enters and leaves each node once.
    """
    k = len(cards)
    if k < 2 or summed_bytes <= 0:
        return 0.0
    nodes = {node: i for i, node in enumerate(dict.fromkeys(card.node for card in cards))}
    cards = sorted(cards, key=lambda card: nodes[card.node])
    slowest = max(
        message_seconds(find_route(topology, a, b), summed_bytes / k, sharers=sharers)
        for a, b in zip(cards, [*cards[1:], cards[0]], strict=True)
    )
    return 2 * (k - 1) * slowest


def broadcast_seconds(topology: Topology, cards: Sequence[Card], bytes_: float) -> float:
    """The first card's message to the others, in a pipelined chain: once over the slowest link."""
    return max(
        (message_seconds(find_route(topology, cards[0], card), bytes_) for card in cards[1:]), default=0.0
    )


def _interpolate(link: LinkProfile, message_bytes: float) -> float:
    """Linear between measured sizes; the smallest one's time below; the last slope beyond."""
    sizes, seconds = link.message_bytes, link.seconds
    if message_bytes <= sizes[0]:
        return seconds[0]
    if len(sizes) == 1:
        return seconds[0] * message_bytes / sizes[0] if sizes[0] > 0 else seconds[0]
    after = next((i for i, size in enumerate(sizes) if size >= message_bytes), len(sizes) - 1)
    slope = (seconds[after] - seconds[after - 1]) / (sizes[after] - sizes[after - 1])
    if message_bytes > sizes[-1]:
        slope = max(slope, 0.0)
        return seconds[-1] + slope * (message_bytes - sizes[-1])
    return seconds[after - 1] + slope * (message_bytes - sizes[after - 1])
