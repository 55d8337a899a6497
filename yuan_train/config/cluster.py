"""The cluster as the user wrote it: cards, nodes, links. Questions about it: `planner/topology.py`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, MinLen

from yuan_train.config.devices import CATALOGUE, BytesPerSecond, DeviceType
from yuan_train.config.errors import Problem
from yuan_train.config.load import build, override, read_document
from yuan_train.config.units import Unit

Seconds = Annotated[float, Ge(0), Unit("seconds")]
MOST_CARDS = 1_000_000
"""Of one group: a count with a slipped finger must not fill the memory with names."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two places: a message of n bytes takes latency + n / bandwidth."""

    bandwidth: BytesPerSecond
    latency: Seconds = 0.0


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """`count` equal nodes of `devices` equal cards each."""

    name: Annotated[str, MinLen(1)]
    count: Annotated[int, Gt(0)] = 1
    device: str
    """Name of a card in the catalogue, or in `device_types`."""
    devices: Annotated[int, Gt(0)] = 1
    link: Link | None = None
    """Between two cards of a node, per direction; needed where a node has several cards."""
    network: Link | None = None
    """The node's network card, per direction, shared by its cards; needed where there are several nodes."""

    @property
    def node_names(self) -> tuple[str, ...]:
        """`name` for a single node, else `name-0`, `name-1`, ..."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{i}" for i in range(self.count))


@dataclass(frozen=True, kw_only=True)
class DedicatedLink:
    """A link between two nodes that is shared with nothing else; one direction unless `both_ways`."""

    from_: str
    to: str
    bandwidth: BytesPerSecond
    latency: Seconds = 0.0
    both_ways: bool = False


@dataclass(frozen=True)
class Card:
    """One card of the cluster: `a100-0/3` is card 3 of node a100-0."""

    name: str
    node: str
    type: str


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All nodes of a cluster, in the order in which ranks are numbered."""

    name: str
    nodes: Annotated[tuple[NodeGroup, ...], MinLen(1)]
    links: tuple[DedicatedLink, ...] = ()
    device_types: dict[str, DeviceType] = field(default_factory=dict[str, DeviceType])

    def device_type(self, name: str) -> DeviceType:
        """The card called `name`: the file's own, else the catalogue's."""
        return self.device_types.get(name) or CATALOGUE[name]

    @property
    def cards(self) -> tuple[Card, ...]:
        """Every card, node by node."""
        return tuple(
            Card(name=f"{node}/{i}", node=node, type=group.device)
            for group in self.nodes
            for node in group.node_names
            for i in range(group.devices)
        )

    @property
    def groups(self) -> Mapping[str, NodeGroup]:
        """The group of each node, by the node's name."""
        return {node: group for group in self.nodes for node in group.node_names}


def cluster_laws(cluster: Cluster) -> Iterator[Problem]:
    """Yield what is wrong between the parts of a cluster."""
    known = [*cluster.device_types, *CATALOGUE]
    several_nodes = sum(group.count for group in cluster.nodes) > 1
    seen: set[str] = set()
    for i, group in enumerate(cluster.nodes):
        if group.device not in known:
            close = difflib.get_close_matches(group.device, known, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]!r}?" if close else ";"
            names = ", ".join(known)
            yield Problem(("nodes", i, "device"), f"unknown card {group.device!r}{hint} (known: {names})")
        if group.devices > 1 and group.link is None:
            yield Problem(("nodes", i), f"{group.devices} cards in a node need 'link' between them")
        if several_nodes and group.network is None:
            yield Problem(("nodes", i), "several nodes need 'network' on each")
        if group.count * group.devices > MOST_CARDS:
            yield Problem(
                ("nodes", i), f"{group.count} nodes of {group.devices} cards; at most {MOST_CARDS} cards"
            )
            continue
        twice = sorted(seen.intersection(group.node_names))
        if twice:
            yield Problem(
                ("nodes", i, "name"), f"a node called {twice[0]!r} is there already; use another name"
            )
        seen.update(group.node_names)
    yield from _link_laws(cluster, seen)
    for name, device in cluster.device_types.items():
        if device.reserved >= device.memory:
            yield Problem(("device_types", name, "reserved"), "the whole memory is reserved; nothing is left")


def _link_laws(cluster: Cluster, nodes: set[str]) -> Iterator[Problem]:
    described: set[tuple[str, str]] = set()
    for i, link in enumerate(cluster.links):
        for end, node in (("from", link.from_), ("to", link.to)):
            if node not in nodes:
                names = ", ".join(sorted(nodes)[:20])
                yield Problem(("links", i, end), f"there is no node {node!r} (has: {names})")
        if link.from_ == link.to:
            yield Problem(("links", i), "a link needs two nodes; cards of one node are joined by its 'link'")
        directions = (
            {(link.from_, link.to), (link.to, link.from_)} if link.both_ways else {(link.from_, link.to)}
        )
        for from_, to in sorted(directions & described):
            yield Problem(("links", i), f"a link from {from_!r} to {to!r} is there already; keep one")
        described |= directions


def load_cluster(path: str | Path, overrides: tuple[str, ...] = ()) -> Cluster:
    """Read a cluster file. Raises ConfigError with all its faults."""
    document = read_document(path)
    for assignment in overrides:
        document = override(document, assignment)
    return build(document, Cluster, laws=cluster_laws)
