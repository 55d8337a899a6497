"""Which link joins two cards, and what it is shared with.

Inside a node: the node's `link`. Between nodes: the dedicated link if the cluster gives one for this
direction, else the two nodes' NICs: the smaller bandwidth and the larger latency, because the latency of a
network is stated end to end, the same at both ends. A NIC is shared by the flows of its node's cards; a
dedicated link and a node's own link are not shared. Cards without a common library exchange messages through
their hosts' memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from yuan_train.config.cluster import Card, Cluster, Link, NodeGroup
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan import share_only_gloo
from yuan_train.config.profile import LinkProfile, Profile


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
