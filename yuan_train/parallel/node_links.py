"""What a message between two nodes takes, measured while nothing else is under way.

How long a rank waits for a message says little of the link: mostly the sender still computes. So at some
steps' ends, when no rank computes, a message of a known size goes over each link there and back, and both
times are one rank's: between two clocks nothing is compared. It takes the way of the run's own messages: the
two edges of a cut, or the gradient group where nodes share layers and no pipeline crosses the link.

Of a node at most one link is measured at once: two would share its network card. On cards the times are those
of the stream, which stands while it waits for a message. It stands alone because its messages are no step's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from yuan_train.config.plan import node_of
from yuan_train.parallel.device import Device, Mark
from yuan_train.parallel.grid import Edge, Grid, RankCoord
from yuan_train.parallel.groups import Groups, as_training_error, sum_over_world

ELEMENTS = 128 * 1024
"""Of fp32, of a message that is timed: half a MiB outlasts the latency of a fast network, and is through a
slow one, of 100 Mb/s, in 42 ms."""


@dataclass(frozen=True)
class NodeLink:
    """How two nodes exchange messages; or several, that sum gradients in a ring."""

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Those that measure it; the first one has the clock."""
    edges: tuple[Edge, Edge] | None
    """From the first rank to the second, and back; None: a gradient group of the ranks."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is measured: each direction, or the whole group."""
        if self.edges is None:
            return (" - ".join(self.nodes),)
        first, second = self.nodes
        return f"{first} -> {second}", f"{second} -> {first}"


def find_links(grid: Grid) -> tuple[tuple[NodeLink, ...], ...]:
    """The links of a plan, one for each pair of nodes that exchange messages; those of a round share no node.

    Arithmetic only, the same on every rank.
    """
    node = {entry.rank: node_of(entry) for entry in grid.plan.ranks}
    found: dict[frozenset[str], NodeLink] = {}
    for there, back in _both_ways(grid):
        ranks = there.sender, there.receiver
        nodes = tuple(node[rank] for rank in ranks)
        if nodes[0] != nodes[1]:
            found.setdefault(frozenset(nodes), NodeLink(nodes, ranks, (there, back)))
    for bucket in grid.buckets:
        for index in range(bucket.num_slices if len(bucket.owners) > 1 else 0):
            ranks = bucket.slice_group(index)
            nodes = tuple(dict.fromkeys(node[rank] for rank in ranks))
            if len(nodes) > 1:
                found.setdefault(frozenset(nodes), NodeLink(nodes, ranks, None))
    rounds: list[list[NodeLink]] = []
    for key, link in found.items():
        free = (own for own in rounds if all(key.isdisjoint(other.nodes) for other in own))
        own = next(free, None)
        if own is None:
            rounds.append(own := [])
        own.append(link)
    return tuple(map(tuple, rounds))


def _both_ways(grid: Grid) -> Iterator[tuple[Edge, Edge]]:
    """The two directions of each cut between two workers."""
    known = frozenset(grid.edges)
    for edge in grid.edges:
        back = Edge(edge.pipeline, edge.stage + 1, False, edge.receiver, edge.sender)
        if edge.is_activation and back in known:
            yield edge, back


class LinkClock:
    """Measures the links of a plan, at the moments at which it is asked to."""

    def __init__(self, grid: Grid, coord: RankCoord, groups: Groups, device: Device) -> None:
        # Another engine's ranks have no groups of ours, all of them alike.
        self._rounds = find_links(grid) if groups.edges or groups.owners else ()
        self._coord = coord
        self._groups = groups
        self._device = device
        self._names = [name for own in self._rounds for link in own for name in link.names]
        self._payload: torch.Tensor | None = None

    @property
    def has_links(self) -> bool:
        """Whether there is anything to measure."""
        return bool(self._rounds)

    def measure(self) -> dict[str, float]:
        """By link, seconds that a message of half a MiB takes: `a -> b`, or of a gradient group `a - b`.

        Collective over all ranks, of which none may have anything else under way. Raises LostRank.
        """
        found: list[float] = []
        for own in self._rounds:
            self._sum(torch.zeros(1), "the wait before links are measured")
            for link in own:
                is_mine = self._coord.rank in link.ranks
                with as_training_error(self._coord):
                    times = self._time(link) if is_mine else [0.0] * len(link.names)
                found += times if self._coord.rank == link.ranks[0] else [0.0] * len(times)
        seconds = torch.tensor(found, dtype=torch.float64)
        self._sum(seconds, "the sum of what links take")
        return dict(zip(self._names, seconds.tolist(), strict=True))

    def _sum(self, totals: torch.Tensor, what: str) -> None:
        sum_over_world(self._groups, self._coord, totals, what)

    def _time(self, link: NodeLink) -> list[float]:
        """Seconds of each of its names, on its first rank; that rank's alone mean something."""
        if self._payload is None:
            self._payload = torch.zeros(ELEMENTS, device=self._device.torch)
        # The first exchange, of next to nothing, waits for those who come late.
        if link.edges is None:
            return [self._sum_gradients(link, size) for size in (1, ELEMENTS)][1:]
        turns = ((1, 1), (ELEMENTS, 1), (1, ELEMENTS))
        return [self._exchange(link.edges, sizes) for sizes in turns][1:]

    def _exchange(self, edges: tuple[Edge, Edge], sizes: Sequence[int]) -> float:
        """Seconds in which a message of so many elements went, and the answer came."""
        assert self._payload is not None
        there, back = (self._groups.edges[edge] for edge in edges)
        out, answer = (self._payload[:size] for size in sizes)
        first, second = edges[0].sender, edges[0].receiver
        begun = self._device.mark(timed=True)
        if self._coord.rank == first:
            there.send(out, second).wait()
            back.post(tuple(answer.shape), answer.dtype, second).take()
        else:
            there.post(tuple(out.shape), out.dtype, first).take()
            back.send(answer, first).wait()
        return self._since(begun)

    def _sum_gradients(self, link: NodeLink, size: int) -> float:
        """Seconds of a sum of so many elements over the group."""
        assert self._payload is not None
        begun = self._device.mark(timed=True)
        transport = self._groups.owners[link.ranks]
        transport.all_reduce(self._payload[:size], "the sum that measures a link").wait()
        return self._since(begun)

    def _since(self, begun: Mark) -> float:
        ended = self._device.mark(timed=True)
        ended.finish()
        return ended.seconds_since(begun)
