"""The link that joins two cards, and seconds of messages and collective operations over links.

Inside a node: the node's `link`. Between nodes: the dedicated link if the cluster gives one for this
direction, else the two nodes' NICs: the smaller bandwidth and the larger latency, because the latency of a
network is stated end to end, the same at both ends. A NIC is shared by the flows of its node's cards; a
dedicated link and a node's own link are not shared. Cards without a common library exchange messages through
their hosts' memory.

A group's library decides how its operations move n bytes over k cards; rounds count the latency:

    ring (nccl, gloo)   all-reduce: 2(k - 1) rounds of n/k; reduce-scatter, all-gather: half of it
    tree (nccl)         all-reduce over N nodes of up to g cards: 2 ways of ceil(log2 N) + g - 1 hops, n bytes
    gloo                reduce-scatter: k reductions of n/k, each to one card: (k^2 - 1)/k^2 n from each card,
                        and what of n/k exceeds 1.8 MB x k once more, in k rounds

nccl takes the ring or the tree, whichever is faster; trees are for small messages and many nodes. On cards,
gloo also copies all n bytes to the host and back. The slowest link on the way decides (Patarasuk and Yuan
2009).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from yuan_train.config.cluster import Card, Cluster, Link, NodeGroup
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan import share_only_gloo
from yuan_train.config.profile import LinkProfile, Profile

GLOO_REDUCED_ONCE = 1.8e6
"""Bytes per card of the group that a gloo reduction to one card sends only once. Measured with torch 2.13 on
2, 3 and 4 processes: each sends 0.75, 0.89 and 0.95 n if n/k is smaller, 1.21, 1.18 and 1.11 n of 96 MB."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """One direction between two cards."""

    latency_seconds: float
    bytes_per_second: float
    """Of all flows together."""
    stream_bytes_per_second: float
    """Of one message at most."""
    shared: bool
    """Whether the flows of the two nodes' other cards share it."""
    measured: LinkProfile | None = None
    shared_bytes_per_second: float | None = None
    """What all flows between the two nodes together were measured to get."""
    copy_seconds_per_byte: float = 0.0
    """Of a message between cards without a common library: from the card to its host, and up to the other."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The links of a cluster, indexed for `find_route`: by node, by pair of nodes, by pair of cards."""

    types: Mapping[str, DeviceType]
    groups: Mapping[str, NodeGroup]
    dedicated: Mapping[tuple[str, str], Link]
    measured: Mapping[tuple[str, str], LinkProfile]
    """By two cards."""
    alike: Mapping[tuple[str, str, str, str], LinkProfile]
    """By nodes and types of two cards: the first pair's of those that were measured, for the others."""
    shared_rates: Mapping[tuple[str, str], float]
    """By two nodes, bytes per second of all flows from one to the other."""
    known: dict[tuple[object, ...], Route] = field(default_factory=dict[tuple[object, ...], Route])
    """What `find_route` found, by `route_kind`."""


def make_topology(cluster: Cluster, profile: Profile | None = None) -> Topology:
    """Index the cluster's links, and the profile's measured ones, which take precedence."""
    dedicated: dict[tuple[str, str], Link] = {}
    for link in cluster.links:
        both = [(link.from_, link.to), (link.to, link.from_)] if link.both_ways else [(link.from_, link.to)]
        for ends in both:
            dedicated[ends] = Link(bandwidth=link.bandwidth, latency=link.latency)
    measured = {(link.from_, link.to): link for link in profile.links} if profile else {}
    rates = {(link.from_, link.to): link.bytes_per_second for link in profile.node_links} if profile else {}
    cards = {card.name: card for card in cluster.cards}
    alike: dict[tuple[str, str, str, str], LinkProfile] = {}
    for (source, target), link in measured.items():
        if source in cards and target in cards:
            alike.setdefault(_kind(cards[source], cards[target]), link)
    return Topology(
        types={name: cluster.device_type(name) for group in cluster.nodes for name in group.types},
        groups=cluster.groups,
        dedicated=dedicated,
        measured=measured,
        alike=alike,
        shared_rates=rates,
    )


def _kind(source: Card, target: Card) -> tuple[str, str, str, str]:
    return source.node, target.node, source.type, target.type


def unmeasured(topology: Topology, cards: Collection[Card]) -> tuple[int, int]:
    """(ordered pairs of these cards with a link of another pair, those without), where some were measured."""
    if not topology.measured:
        return 0, 0
    kinds = [
        _kind(a, b) for a, b in itertools.permutations(cards, 2) if (a.name, b.name) not in topology.measured
    ]
    return sum(kind in topology.alike for kind in kinds), sum(kind not in topology.alike for kind in kinds)


def uses_gloo(topology: Topology, cards: Iterable[Card]) -> bool:
    """Whether the library of a group of these cards is gloo, from host memory to host memory, instead of
    their own. Simulated cards are processes without a card, which have gloo alone."""
    types = [topology.types[name] for name in {card.type for card in cards}]
    simulated = all(device.slowdown is not None for device in types)
    return simulated or share_only_gloo(device.backend for device in types)


def copy_seconds_per_byte(topology: Topology, cards: Iterable[Card]) -> float:
    """Seconds per byte of copies between each card and its host, unless it is one (gloo's, or simulated)."""
    types = [topology.types[card.type] for card in cards]
    return sum(1.0 / card.host_link for card in types if card.backend != "gloo" and card.slowdown is None)


def find_route(topology: Topology, source: Card, target: Card) -> Route:
    """The route from one card to another."""
    if topology.measured:
        return _find_route(topology, source, target)
    key = route_kind(topology, source, target)
    if key not in topology.known:
        topology.known[key] = _find_route(topology, source, target)
    return topology.known[key]


def _find_route(topology: Topology, source: Card, target: Card) -> Route:
    copies, ends = 0.0, (source.node, target.node)
    if source.type != target.type and uses_gloo(topology, (source, target)):
        copies = copy_seconds_per_byte(topology, (source, target))
    if source.node == target.node:
        own = topology.groups[source.node].link
        assert own is not None, "a node with several cards has a link; validate_cluster checks it"
    else:
        own = topology.dedicated.get(ends)
    link = own or _network(topology, ends)
    return Route(
        latency_seconds=link.latency,
        bytes_per_second=link.bandwidth,
        stream_bytes_per_second=min(link.bandwidth, link.stream or link.bandwidth),
        shared=own is None,
        measured=topology.measured.get((source.name, target.name))
        or topology.alike.get(_kind(source, target)),
        shared_bytes_per_second=topology.shared_rates.get(ends) if own is None else None,
        copy_seconds_per_byte=copies,
    )


def _network(topology: Topology, nodes: tuple[str, str]) -> Link:
    """Two nodes' NICs as one link."""
    links = [link for node in nodes if (link := topology.groups[node].network) is not None]
    assert len(links) == 2, "several nodes have networks; validate_cluster checks it"
    return Link(
        bandwidth=min(link.bandwidth for link in links),
        latency=max(link.latency for link in links),
        stream=min(link.stream or link.bandwidth for link in links),
    )


def route_kind(topology: Topology, source: Card, target: Card) -> tuple[object, ...]:
    """What tells an unmeasured route from others: nodes, or groups of nodes without links of their own."""
    ends = source.node, target.node
    if ends in topology.dedicated or ends in topology.shared_rates:
        return ends
    groups = topology.groups
    return groups[ends[0]].name, groups[ends[1]].name, ends[0] == ends[1], source.type, target.type


# --- seconds ------------------------------------------------------------------------------------------------


def message_seconds(route: Route, message_bytes: float, *, sharers: int = 1) -> float:
    """latency + bytes / bandwidth, the bandwidth divided among the flows (`sharers`) that share a NIC, and
    copies to and from the host where the cards have no common library.

    A measured link is interpolated between its message sizes; it was measured with no other flow on it. Of
    what a message takes beyond the smallest one, x, F flows take max(x, F bytes / R) each, where R is what
    all flows between the two nodes were measured to get. Without that they take F x, or F bytes / bandwidth
    of the cluster file if that is less: one flow does not fill the NIC.
    """
    seconds = _wire_seconds(route, message_bytes, sharers=sharers)
    return seconds if route.measured else seconds + message_bytes * route.copy_seconds_per_byte


def _wire_seconds(route: Route, message_bytes: float, *, sharers: int) -> float:
    flows = max(sharers, 1) if route.shared else 1
    if route.measured is not None:
        alone = _interpolate(route.measured, message_bytes)
        start = min(alone, route.measured.seconds[0])
    else:
        start = route.latency_seconds
        alone = start + message_bytes / route.stream_bytes_per_second
    if flows == 1:
        return alone
    if route.shared_bytes_per_second is not None:
        together = message_bytes * flows / route.shared_bytes_per_second
    else:
        together = min((alone - start) * flows, message_bytes * flows / route.bytes_per_second)
    return start + max(alone - start, together)


def allreduce_seconds(
    topology: Topology, cards: Sequence[Card], message_bytes: float, *, sharers: int = 1
) -> float:
    """All-reduce of `message_bytes` over k cards, 0 for one card; the ring or the tree of the module's table.
    The ring goes node by node, as communication libraries build it, so that it enters and leaves each node
    once."""
    k = len(cards)

    def seconds(slowest: Callable[[float], float], start: float) -> float:
        ring = 2 * (k - 1) * slowest(message_bytes / k)
        per_node = Counter(card.node for card in cards)
        if len(per_node) == 1 or uses_gloo(topology, cards):
            return ring
        hops = math.ceil(math.log2(len(per_node))) + max(per_node.values()) - 1
        return min(ring, 2 * (slowest(message_bytes) + (hops - 1) * start))

    return _collective_seconds(topology, cards, message_bytes, seconds, sharers=sharers)


def reduce_scatter_seconds(
    topology: Topology, cards: Sequence[Card], message_bytes: float, *, sharers: int = 1
) -> float:
    """Reduce-scatter over k cards, 0 for one: as a ring; on gloo k reductions, or of two an all-reduce."""
    k = len(cards)
    if k == 2 and uses_gloo(topology, cards):
        return allreduce_seconds(topology, cards, message_bytes, sharers=sharers)

    def seconds(slowest: Callable[[float], float], _: float) -> float:
        if not uses_gloo(topology, cards):
            return (k - 1) * slowest(message_bytes / k)
        again = max(0.0, message_bytes / k - GLOO_REDUCED_ONCE * k)
        return k * slowest(((k * k - 1) / k**2 * message_bytes + again) / k)

    return _collective_seconds(topology, cards, message_bytes, seconds, sharers=sharers)


def all_gather_seconds(
    topology: Topology, cards: Sequence[Card], message_bytes: float, *, sharers: int = 1
) -> float:
    """All-gather of `message_bytes` over k cards, 0 for one card: half of a ring's all-reduce."""
    k = len(cards)
    return _collective_seconds(
        topology,
        cards,
        message_bytes,
        lambda slowest, _: (k - 1) * slowest(message_bytes / k),
        sharers=sharers,
    )


def _collective_seconds(
    topology: Topology,
    cards: Sequence[Card],
    message_bytes: float,
    seconds: Callable[[Callable[[float], float], float], float],
    *,
    sharers: int,
) -> float:
    """`seconds` of (seconds of a message by its bytes, of the smallest one) on the slowest link of a ring of
    the cards, and of gloo's copies to the hosts and back; 0 for one card or nothing."""
    if len(cards) < 2 or message_bytes <= 0:
        return 0.0
    nodes = {node: i for i, node in enumerate(dict.fromkeys(card.node for card in cards))}
    cards = sorted(cards, key=lambda card: nodes[card.node])
    links = list(zip(cards, [*cards[1:], cards[0]], strict=True))
    if not topology.measured:
        # Links between the same nodes take the same time, and so do those between nodes of the same groups.
        links = {route_kind(topology, a, b): (a, b) for a, b in links}.values()
    routes = [find_route(topology, a, b) for a, b in links]

    def slowest(part: float) -> float:
        return max(_wire_seconds(route, part, sharers=sharers) for route in routes)

    copies = 0.0
    if uses_gloo(topology, cards) and not any(route.measured for route in routes):
        copies = 2 * message_bytes * max(copy_seconds_per_byte(topology, [card]) for card in cards)
    return seconds(slowest, slowest(0.0)) + copies


def allreduce_compute_seconds(topology: Topology, cards: Sequence[Card], message_bytes: float) -> float:
    """Seconds of its cards' compute that an all-reduce of `message_bytes` takes while it is hidden behind it.
    Each card sends 2(k - 1)/k of the message; a byte takes what the profile measured, on the worst link. 0
    for links that were not measured."""
    k = len(cards)
    if k < 2:
        return 0.0
    routes = (find_route(topology, a, b) for a, b in zip(cards, [*cards[1:], cards[0]], strict=True))
    worst = max(route.measured.compute_seconds_per_byte if route.measured else 0.0 for route in routes)
    return 2 * (k - 1) / k * message_bytes * worst


def broadcast_seconds(topology: Topology, cards: Sequence[Card], bytes_: float) -> float:
    """The first card's message to all others, in a pipelined chain over the slowest link; 0 for one card."""
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
