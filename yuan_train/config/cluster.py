"""Cluster files: cards, nodes and links. `planner/costs/links.py` finds the link between two cards."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen

from yuan_train.config.devices import CATALOGUE, Bytes, BytesPerSecond, DeviceType, find_card, suggest_cards
from yuan_train.config.errors import Violation
from yuan_train.config.load import Keys, build, locate_cluster, override, read_document
from yuan_train.config.units import Unit

Seconds = Annotated[float, Ge(0), Unit("seconds")]
MAX_CARDS = 1_000_000
"""Most cards of one node group; a mistyped `count` must not fill the memory with card names."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a link: a message of n bytes takes latency + n / bandwidth."""

    bandwidth: BytesPerSecond
    """What the link carries in one direction when it is full."""
    latency: Seconds = 0.0
    """What a message of no bytes takes."""
    stream: BytesPerSecond | None = None
    """What one message gets at most, where it takes several to fill the link; None: all of it."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a node has beside its cards, which share it equally."""

    memory: Bytes
    """Of the host, for all programs."""
    bandwidth: BytesPerSecond | None = None
    """Of host memory; None: `host_memory_bandwidth` of the card's type, for each card."""
    link_bandwidth: BytesPerSecond | None = None
    """Between host memory and all cards together, per direction; None: as the card's `host_link` says."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A node's local disk, which its cards share equally."""

    read: BytesPerSecond
    """What one reader gets of large files."""
    write: BytesPerSecond
    """What one writer gets of large files."""
    capacity: Bytes | None = None
    """What optimizer state may take of it; None: not checked."""


@dataclass(frozen=True, kw_only=True)
class CardCount:
    """Some cards of one type in a node of several types."""

    type: str
    """A name in the catalogue or in `device_types`."""
    count: Annotated[int, Gt(0)] = 1
    """How many cards of this type follow each other."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """`count` identical nodes."""

    name: Annotated[str, MinLen(1)]
    """Its host's name; of several nodes the first part of their names: `name-0`, `name-1`, ..."""
    count: Annotated[int, Gt(0)] = 1
    """How many nodes there are of this kind."""
    device: str | None = None
    """Type of the cards: a name in the catalogue or in `device_types`; None where `devices` lists types."""
    devices: Annotated[int, Gt(0)] | Annotated[tuple[CardCount, ...], MinLen(1)] = 1
    """Cards of each node: how many there are of `device`, or those of each of several types, in the order in
    which they are numbered."""
    link: Link | None = None
    """Between two cards of a node, per direction; required if a node has several cards."""
    network: Link | None = None
    """The node's NIC, per direction, shared by its cards; required if the cluster has several nodes."""
    host: Host | None = None
    """None: taken to have as much memory as the node's cards have together, and the rates of the card's type
    for each card."""
    disk: Disk | None = None
    """For plans that put optimizer state there; None: its rates are taken to be those of `ASSUMED_DISK`."""
    price: Annotated[float, Gt(0), Le(10**9)] | None = None
    """Rent of a card for an hour, in any currency; None: that of the card's type."""

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The type of each card of a node."""
        if isinstance(self.devices, int):
            return (self.device or "",) * self.devices
        return tuple(cards.type for cards in self.devices for _ in range(cards.count))

    @property
    def num_cards(self) -> int:
        """Cards of each node."""
        return len(self.types)

    def with_cards(self, types: Sequence[str], *, name: str | None = None) -> NodeGroup:
        """This group with other cards in each node; a single node of its own, if it has a `name`."""
        if len(set(types)) == 1:
            device, devices = types[0], len(types)
        else:
            runs = [(kind, len(list(own))) for kind, own in itertools.groupby(types)]
            device, devices = None, tuple(CardCount(type=kind, count=count) for kind, count in runs)
        group = self if name is None else replace(self, name=name, count=1)
        return replace(group, device=device, devices=devices)

    @property
    def node_names(self) -> tuple[str, ...]:
        """`name` for a single node, else `name-0`, `name-1`, ..."""
        if self.count == 1:
            return (self.name,)
        return tuple(f"{self.name}-{i}" for i in range(self.count))


@dataclass(frozen=True, kw_only=True)
class DedicatedLink:
    """A link between two nodes that carries no other traffic; one direction unless `both_ways`."""

    from_: str
    """The name of a node."""
    to: str
    """The name of another node."""
    bandwidth: BytesPerSecond
    """What the link carries in one direction."""
    latency: Seconds = 0.0
    """What a message of no bytes takes."""
    both_ways: bool = False
    """There is such a link in the other direction too."""


@dataclass(frozen=True, kw_only=True)
class Library:
    """How the processes of a cluster exchange messages."""

    sends: Sends = "overlapped"
    """Who waits for a message between stages: `overlapped`, nobody, as with this trainer; `blocking`, its
    sender."""


@dataclass(frozen=True)
class Card:
    """One card of the cluster: `a100-0/3` is card 3 of node a100-0."""

    name: str
    node: str
    type: str

    def __hash__(self) -> int:
        # The planner looks up cards a million times, and a name says which card it is.
        return hash(self.name)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All nodes of a cluster, in the order in which ranks are numbered."""

    name: str
    """What reports call the cluster."""
    nodes: Annotated[tuple[NodeGroup, ...], MinLen(1)]
    """The machines, alike ones as one group; ranks are numbered in this order."""
    links: tuple[DedicatedLink, ...] = ()
    """Links between two nodes that carry no other traffic; other messages go over the nodes' `network`."""
    library: Library = field(default_factory=Library)
    device_types: dict[str, DeviceType] = field(default_factory=dict[str, DeviceType])
    """Cards that the catalogue does not have, by name, or other figures for one that it has."""

    def device_type(self, name: str) -> DeviceType:
        """The card type `name`, from `device_types` or the catalogue. Raises KeyError if neither has it."""
        return self.device_types.get(name) or CATALOGUE[name]

    def price(self, group: NodeGroup, type_name: str) -> float | None:
        """Rent of a card of a node for an hour; None if neither the node nor the card's type has one."""
        return self.device_type(type_name).price if group.price is None else group.price

    def node_price(self, group: NodeGroup) -> float | None:
        """Rent of a whole node for an hour; None if a card of it has no price."""
        prices = [self.price(group, name) for name in group.types]
        return None if None in prices else sum(price or 0.0 for price in prices)

    def nodes_price(self, nodes: Iterable[str]) -> float | None:
        """Rent of some whole nodes for an hour; None if one has no price, or the cluster has it not."""
        prices = [self.node_price(self.groups[node]) if node in self.groups else None for node in nodes]
        return None if None in prices else sum(price or 0.0 for price in prices)

    def host_key(self, node: str) -> str:
        """Where the cluster file states a node's host memory: `nodes[0].host.memory`."""
        return f"nodes[{self.nodes.index(self.groups[node])}].host.memory"

    @cached_property
    def cards(self) -> tuple[Card, ...]:
        """Every card, node by node."""
        return tuple(
            Card(name=f"{node}/{i}", node=node, type=name)
            for group in self.nodes
            for node in group.node_names
            for i, name in enumerate(group.types)
        )

    @cached_property
    def groups(self) -> Mapping[str, NodeGroup]:
        """The group of each node, by node name."""
        return {node: group for group in self.nodes for node in group.node_names}


def catalogue_name(cluster: Cluster, name: str) -> str | None:
    """The name of a type in `device_types`, or else the catalogue's for what people call a card; or None."""
    return name if name in cluster.device_types else find_card(name)


def unknown_card(name: str, own: Mapping[str, DeviceType]) -> str:
    """What is wrong with a card's name that neither `device_types` nor the catalogue has, and what to do."""
    meant = suggest_cards(name, own)
    hint = f"did you mean {meant}? " if meant else ""
    return (
        f"unknown card {name!r}; {hint}known are {', '.join([*own, *CATALOGUE])}; or describe it under "
        "device_types: {" + name + ": {memory: 24 GiB, bf16: 71 TFLOP/s, fp16: 71 TFLOP/s, "
        "fp32: 36 TFLOP/s, memory_bandwidth: 936 GB/s, host_link: 25 GB/s}}, with its own figures"
    )


def validate_cluster(cluster: Cluster) -> Iterator[Violation]:
    """Yield the violated constraints between the parts of a cluster."""
    several_nodes = sum(group.count for group in cluster.nodes) > 1
    seen: set[str] = set()
    for i, group in enumerate(cluster.nodes):
        yield from _type_constraints(cluster, i, group)
        if _count_cards(group) > 1 and group.link is None:
            yield Violation(("nodes", i), f"{_count_cards(group)} cards in a node need 'link' between them")
        if several_nodes and group.network is None:
            yield Violation(("nodes", i), "several nodes need 'network' on each")
        if group.count * _count_cards(group) > MAX_CARDS:
            yield Violation(
                ("nodes", i), f"{group.count} nodes of {_count_cards(group)} cards; at most {MAX_CARDS} cards"
            )
            continue
        taken = sorted(seen.intersection(group.node_names))
        if taken:
            yield Violation(
                ("nodes", i, "name"), f"there is already a node called {taken[0]!r}; use another name"
            )
        seen.update(group.node_names)
    yield from _link_constraints(cluster, seen)
    for name, device in cluster.device_types.items():
        if device.reserved >= device.memory:
            yield Violation(
                ("device_types", name, "reserved"), "the whole memory is reserved; nothing is left"
            )


def _type_constraints(cluster: Cluster, i: int, group: NodeGroup) -> Iterator[Violation]:
    """Yield what is wrong with the types of a node's cards."""
    if isinstance(group.devices, int):
        if group.device is None:
            yield Violation(
                ("nodes", i),
                "no type of cards; wanted device: TYPE beside a number of devices, or "
                "devices: [{type: TYPE, count: N}, ...]",
            )
            return
        places: list[tuple[Keys, str]] = [(("nodes", i, "device"), group.device)]
    else:
        if group.device is not None:
            yield Violation(
                ("nodes", i, "device"),
                f"{group.device!r}, but devices lists the types of the cards; leave one of them out",
            )
        places = [(("nodes", i, "devices", j, "type"), own.type) for j, own in enumerate(group.devices)]
    for path, name in places:
        if catalogue_name(cluster, name) is None:
            yield Violation(path, unknown_card(name, cluster.device_types))


def _count_cards(group: NodeGroup) -> int:
    """Cards of each node, without a list of them: there may be too many."""
    return group.devices if isinstance(group.devices, int) else sum(own.count for own in group.devices)


def _link_constraints(cluster: Cluster, nodes: set[str]) -> Iterator[Violation]:
    described: set[tuple[str, str]] = set()
    for i, link in enumerate(cluster.links):
        for end, node in (("from", link.from_), ("to", link.to)):
            if node not in nodes:
                names = ", ".join(sorted(nodes)[:20])
                yield Violation(("links", i, end), f"there is no node {node!r} (has: {names})")
        if link.from_ == link.to:
            yield Violation(
                ("links", i), "a link needs two nodes; cards of one node are joined by its 'link'"
            )
        directions = (
            {(link.from_, link.to), (link.to, link.from_)} if link.both_ways else {(link.from_, link.to)}
        )
        for from_, to in sorted(directions & described):
            yield Violation(("links", i), f"there is already a link from {from_!r} to {to!r}; keep one")
        described |= directions


def load_cluster(path: str | Path, overrides: tuple[str, ...] = ()) -> Cluster:
    """Read a cluster file, also by a name of `configs/cluster`; each card's type is called as `device_types`
    or the catalogue call it. Raises ConfigError with every violation."""
    document = read_document(locate_cluster(path))
    for assignment in overrides:
        document = override(document, assignment)
    cluster = build(document, Cluster, validate=validate_cluster)
    nodes = (
        group.with_cards([catalogue_name(cluster, name) or name for name in group.types])
        for group in cluster.nodes
    )
    return replace(cluster, nodes=tuple(nodes))


Sends = Literal["overlapped", "blocking"]
"""`overlapped`: only the compute step that needs the message. `blocking`: its sender too."""
