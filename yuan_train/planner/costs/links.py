"""Seconds of a message between two cards, and of an all-reduce or a broadcast over several."""

from __future__ import annotations

from collections.abc import Sequence

from yuan_train.config.cluster import Card
from yuan_train.config.profile import LinkProfile
from yuan_train.planner.costs.topology import Route, Topology, find_route


def message_seconds(route: Route, message_bytes: float, *, sharers: int = 1) -> float:
    """latency + bytes / bandwidth, the bandwidth divided among the flows (`sharers`) that share a NIC.

    A measured link is interpolated between its message sizes; it was measured with no other flow on it, so
    what a message takes beyond the smallest one is multiplied by the sharers.
    """
    flows = max(sharers, 1) if route.shared else 1
    if route.measured is not None:
        alone = _interpolate(route.measured, message_bytes)
        start = min(alone, route.measured.seconds[0])
        return start + (alone - start) * flows
    return route.latency_seconds + message_bytes * flows / route.bytes_per_second


def allreduce_seconds(
    topology: Topology, cards: Sequence[Card], message_bytes: float, *, sharers: int = 1
) -> float:
    """All-reduce of `message_bytes` over a ring of k cards: 2(k - 1) rounds of 1/k over the slowest link.

    Volume 2(k-1)/k * n and the slowest-link rule: Patarasuk and Yuan 2009; 0 for one card. The ring goes node
    by node, as communication libraries build it, so that it enters and leaves each node once.
    """
    k = len(cards)
    if k < 2 or message_bytes <= 0:
        return 0.0
    nodes = {node: i for i, node in enumerate(dict.fromkeys(card.node for card in cards))}
    cards = sorted(cards, key=lambda card: nodes[card.node])
    slowest = max(
        message_seconds(find_route(topology, a, b), message_bytes / k, sharers=sharers)
        for a, b in zip(cards, [*cards[1:], cards[0]], strict=True)
    )
    return 2 * (k - 1) * slowest


def allreduce_compute_seconds(topology: Topology, cards: Sequence[Card], message_bytes: float) -> float:
    """Seconds of its cards' compute that an all-reduce of `message_bytes` takes while it is hidden behind it.

    Each card sends 2(k - 1)/k of the message; a byte takes what the profile measured, on the worst link. 0
    for links that were not measured.
    """
    k = len(cards)
    if k < 2:
        return 0.0
    routes = (find_route(topology, a, b) for a, b in zip(cards, [*cards[1:], cards[0]], strict=True))
    worst = max(route.measured.compute_seconds_per_byte if route.measured else 0.0 for route in routes)
    return 2 * (k - 1) / k * message_bytes * worst


def broadcast_seconds(topology: Topology, cards: Sequence[Card], bytes_: float) -> float:
    """The first card's message to all others, in a pipelined chain: once over the slowest link; 0 for one
    card."""
    return max(
        (message_seconds(find_route(topology, cards[0], card), bytes_) for card in cards[1:]), default=0.0
    )


def _interpolate(link: LinkProfile, message_bytes: float) -> float:
    """Linear between measured sizes; below them the smallest one's time, above them the last slope."""
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
