"""Which link joins two cards, and what it is shared with.

Inside a node: the node's `link`. Between nodes: the dedicated link if the cluster gives one for this
direction, else the two nodes' NICs: the smaller bandwidth and the larger latency, because the latency of a
network is stated end to end, the same at both ends. A NIC is shared by the flows of its node's cards; a
dedicated link and a node's own link are not shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from yuan_train.config.cluster import Card, Cluster, Link, NodeGroup
from yuan_train.config.profile import LinkProfile, Profile


@dataclass(frozen=True, kw_only=True)
class Route:
    """One direction between two cards."""

    latency_seconds: float
    bytes_per_second: float
    shared: bool
    """Whether the flows of the two nodes' other cards share it."""
    measured: LinkProfile | None = None


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The links of a cluster, indexed for `find_route`: by node, by pair of nodes, by pair of cards."""

    groups: Mapping[str, NodeGroup]
    dedicated: Mapping[tuple[str, str], Link]
    measured: Mapping[tuple[str, str], LinkProfile]


def make_topology(cluster: Cluster, profile: Profile | None = None) -> Topology:
    """Index the cluster's links, and the profile's measured ones, which take precedence."""
    dedicated: dict[tuple[str, str], Link] = {}
    for link in cluster.links:
        both = [(link.from_, link.to), (link.to, link.from_)] if link.both_ways else [(link.from_, link.to)]
        for ends in both:
            dedicated[ends] = Link(bandwidth=link.bandwidth, latency=link.latency)
    measured = {(link.from_, link.to): link for link in profile.links} if profile else {}
    return Topology(groups=cluster.groups, dedicated=dedicated, measured=measured)


def find_route(topology: Topology, source: Card, target: Card) -> Route:
    """The route from one card to another."""
    measured = topology.measured.get((source.name, target.name))
    if source.node == target.node:
        link = topology.groups[source.node].link
        assert link is not None, "a node with several cards has a link; validate_cluster checks it"
        return _route(link, shared=False, measured=measured)
    dedicated = topology.dedicated.get((source.node, target.node))
    if dedicated is not None:
        return _route(dedicated, shared=False, measured=measured)
    ends = [topology.groups[node].network for node in (source.node, target.node)]
    links = [link for link in ends if link is not None]
    assert len(links) == 2, "several nodes have networks; validate_cluster checks it"
    slower = Link(
        bandwidth=min(link.bandwidth for link in links), latency=max(link.latency for link in links)
    )
    return _route(slower, shared=True, measured=measured)


def _route(link: Link, *, shared: bool, measured: LinkProfile | None) -> Route:
    return Route(
        latency_seconds=link.latency, bytes_per_second=link.bandwidth, shared=shared, measured=measured
    )
