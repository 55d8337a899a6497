"""Which links of a cluster are alike, so that a few of each class are measured and stand for the others.

64 cards have 2,016 pairs, and each takes a communicator of its own and seconds in which all others wait.
Within a node, pairs of the same types of cards are one class; between nodes, those of the same types and the
same kind of network. Two of a class are measured, as far apart as the class has them. Where these differ,
the class is divided, by the cards' numbers in their nodes or by the nodes, and one of each part is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from yuan_train.config.cluster import Cluster
from yuan_train.config.devices import Backend

Pair = tuple[int, int]
"""Two ranks, the lower first."""

ALIKE = 1.5
"""Most that the seconds of a class's two representatives may differ by, as a ratio."""


@dataclass(frozen=True, kw_only=True)
class LinkEnd:
    """A rank's card, as far as its links go."""

    name: str
    type: str
    backend: Backend
    kind: str
    """Of its node: nodes of the same kind are taken to have the same links and the same network."""

    @property
    def node(self) -> str:
        """The name of its node."""
        return self.name.rpartition("/")[0]

    @property
    def number(self) -> str:
        """Its own in the node."""
        return self.name.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """What is measured of a pair of ranks."""

    there: tuple[float, ...]
    """Seconds by size of message from the first to the second."""
    back: tuple[float, ...]
    compute_seconds_per_byte: float = 0.0

    def turned(self) -> LinkFigures:
        """The same of the pair the other way round."""
        return LinkFigures(
            there=self.back, back=self.there, compute_seconds_per_byte=self.compute_seconds_per_byte
        )


@dataclass(frozen=True)
class MeasuredLinks:
    """Figures of every pair, and for one that was not measured, the pairs whose mean it takes."""

    figures: dict[Pair, LinkFigures]
    stand_ins: dict[Pair, tuple[Pair, ...]]


def link_ends(
    names: Sequence[str], types: Sequence[str], backends: Sequence[Backend], cluster: Cluster | None
) -> list[LinkEnd]:
    """The ends that ranks are, by the names of their cards (`a100-0/3`).

    A cluster file says which nodes are of one kind: those with the same links; one with a dedicated link is
    like no other. Without a file, nodes with the same cards are.
    """
    nodes = [name.rpartition("/")[0] for name in names]
    dedicated = set[str]() if cluster is None else {end for x in cluster.links for end in (x.from_, x.to)}
    kinds: dict[str, str] = {}
    for node in dict.fromkeys(nodes):
        kinds[node] = " ".join(sorted(own for own, where in zip(types, nodes, strict=True) if where == node))
        group = cluster.groups.get(node) if cluster is not None else None
        if group is not None:
            kinds[node] += f" {group.link} {group.network}"
        if node in dedicated:
            kinds[node] += f" {node}"
    return [
        LinkEnd(name=name, type=type_name, backend=backend, kind=kinds[node])
        for name, type_name, backend, node in zip(names, types, backends, nodes, strict=True)
    ]


def measure_classes(
    ends: Sequence[LinkEnd],
    pairs: Iterable[Pair],
    measure: Callable[[Pair], LinkFigures],
    *,
    all_pairs: bool = False,
) -> MeasuredLinks:
    """Figures of all `pairs`, of which `measure` gives those of one.

    All ranks go through the same pairs, if `measure` gives all of them the same figures.
    """
    classes: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        classes.setdefault(pair if all_pairs else _class_of(ends, pair), []).append(pair)
    found = MeasuredLinks({}, {})
    for alike in classes.values():
        chosen = representatives(alike)
        measured = {pair: measure(pair) for pair in chosen}
        found.figures.update(measured)
        if len(chosen) < 2 or _are_alike(*(_turn(ends, chosen[0], p, measured[p]) for p in chosen)):
            _fill(ends, found, alike, chosen)
            continue
        parts: dict[Hashable, list[Pair]] = {}
        for pair in alike:
            parts.setdefault(_part_of(ends, pair), []).append(pair)
        for part in parts.values():
            own = [pair for pair in part if pair in measured] or part[:1]
            found.figures.update({pair: measure(pair) for pair in own if pair not in measured})
            _fill(ends, found, part, own)
    return found


def representatives(pairs: Sequence[Pair]) -> list[Pair]:
    """One or two pairs of a class: the first, and the one whose ranks are farthest apart."""
    return list(dict.fromkeys((pairs[0], max(pairs, key=lambda pair: (pair[1] - pair[0], pair)))))


def _fill(
    ends: Sequence[LinkEnd], found: MeasuredLinks, pairs: Sequence[Pair], measured: Sequence[Pair]
) -> None:
    """Give the mean of the `measured` ones to the others."""
    for pair in pairs:
        if pair in found.figures:
            continue
        like = [_turn(ends, pair, other, found.figures[other]) for other in measured]
        found.figures[pair] = LinkFigures(
            there=tuple(map(fmean, zip(*(one.there for one in like), strict=True))),
            back=tuple(map(fmean, zip(*(one.back for one in like), strict=True))),
            compute_seconds_per_byte=fmean(one.compute_seconds_per_byte for one in like),
        )
        found.stand_ins[pair] = tuple(measured)


def _class_of(ends: Sequence[LinkEnd], pair: Pair) -> Hashable:
    first, second = (ends[rank] for rank in pair)
    return first.node == second.node, *sorted((end.kind, end.type) for end in (first, second))


def _part_of(ends: Sequence[LinkEnd], pair: Pair) -> Hashable:
    """What divides a class whose pairs are not alike: cards by number in a node, or nodes."""
    first, second = (ends[rank] for rank in pair)
    return (first.number, second.number) if first.node == second.node else (first.node, second.node)


def _turn(ends: Sequence[LinkEnd], wanted: Pair, pair: Pair, figures: LinkFigures) -> LinkFigures:
    """The figures of `pair` in the direction of `wanted`, which is of its class."""
    own, other = ((ends[p[0]].kind, ends[p[0]].type) for p in (wanted, pair))
    return figures if own == other else figures.turned()


def _are_alike(one: LinkFigures, other: LinkFigures) -> bool:
    """Whether large messages take about as long."""
    sums = [figures.there[-1] + figures.back[-1] for figures in (one, other)]
    return max(sums) <= ALIKE * min(sums)
