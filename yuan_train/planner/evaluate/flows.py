"""Buckets on their way at the same time: rings and messages share the NICs of their nodes.

Every ring that leaves a node, and every message from or to another node, is a flow through the node's NIC;
the flows that are under way at a time have equal parts of it. With F_v flows through node v, a bucket that
would take T(F) seconds with F flows on its busiest NIC all the time goes on at the rate 1 / T(max_v F_v),
over the nodes v that its own rings pass; it is through when the integral of its rate is 1. Between two events
(a bucket starts or ends, a message does) all rates are constant.

Messages keep the times of the pipelines' simulation: what the rings take from them is not counted.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from yuan_train.config.cluster import Card


class MessageFlow(NamedTuple):
    """A message between two nodes, over their NICs; in seconds from the step's start."""

    start: float
    end: float
    nodes: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What is under way of a bucket."""

    cards: Sequence[Card]
    crossing: Mapping[str, int]
    """How many of its rings pass each node's NIC."""
    seconds: Callable[[int], float]
    """Of all of it, with so many flows on the busiest NIC on its way."""
    ready: float
    """Before this it cannot start."""


def run_transfers(
    transfers: Sequence[Transfer],
    messages: Sequence[MessageFlow] = (),
    *,
    later: Callable[[int], float] = lambda i: 0.0,
    ended: Callable[[int, float, float], None] = lambda i, start, end: None,
) -> list[float]:
    """When each transfer is through. On each card those that leave its node run one after the other, in the
    order given, and so do those that do not: they take other links.

    `later(i)` is by how much transfer i is ready later than it says, asked when its cards are free of all
    before it; `ended(i, start, end)` is told of each that is through.
    """
    run = _Run(transfers, messages)
    while run.num_left:
        while run.free:
            i = run.free.pop()
            heapq.heappush(run.waiting, (max(run.now, transfers[i].ready + later(i)), i))
        run.start_ready()
        for i in run.advance():
            ended(i, run.starts[i], run.ends[i])
    return run.ends


@dataclass
class _Run:
    """Transfers at a time of their run."""

    transfers: Sequence[Transfer]
    messages: Sequence[MessageFlow]
    now: float = 0.0
    waiting: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Transfers whose cards are free, by when they are ready."""
    active: dict[int, float] = field(default_factory=dict[int, float])
    """What remains of each transfer under way; 1: all of it."""

    def __post_init__(self) -> None:
        count = len(self.transfers)
        self.starts, self.ends = [0.0] * count, [0.0] * count
        self.num_left = count
        self.followers: list[list[int]] = [[] for _ in range(count)]
        self.num_before = [0] * count
        """Transfers before each, on its cards, that are not through."""
        last: dict[tuple[Card, bool], int] = {}
        for i, transfer in enumerate(self.transfers):
            own = [(card, bool(transfer.crossing)) for card in transfer.cards]
            before = {last[key] for key in own if key in last}
            self.num_before[i] = len(before)
            for j in before:
                self.followers[j].append(i)
            last.update(dict.fromkeys(own, i))
        self.free = [i for i in range(count) if not self.num_before[i]]
        """Whose cards have become free."""
        self.flows: Counter[str] = Counter()
        crossed = {node for transfer in self.transfers for node in transfer.crossing}
        # Of messages, the changes in the flows through the nodes that rings pass, the next one last.
        self.changes = sorted(
            (
                (time, change, node)
                for message in self.messages
                for node in message.nodes
                if node in crossed
                for time, change in ((message.start, 1), (message.end, -1))
            ),
            reverse=True,
        )

    def start_ready(self) -> None:
        """Go on to when something is under way, and start what is ready then."""
        if not self.active:
            self.now = max(self.now, self.waiting[0][0])
        while self.waiting and self.waiting[0][0] <= self.now:
            _, i = heapq.heappop(self.waiting)
            self.active[i], self.starts[i] = 1.0, self.now
            self.flows.update(self.transfers[i].crossing)
        while self.changes and self.changes[-1][0] <= self.now:
            _, change, node = self.changes.pop()
            self.flows[node] += change

    def advance(self) -> list[int]:
        """Go on to the next event; the transfers that are through then."""
        seconds = {
            i: self.transfers[i].seconds(max((self.flows[v] for v in self.transfers[i].crossing), default=1))
            for i in self.active
        }
        done = {i: self.now + left * seconds[i] for i, left in self.active.items()}
        until = min(
            *done.values(),
            self.waiting[0][0] if self.waiting else math.inf,
            self.changes[-1][0] if self.changes else math.inf,
        )
        # Compared by time, not by what remains: a remainder may be too short for the clock to move.
        through = [i for i, end in done.items() if end <= until]
        for i, left in self.active.items():
            if done[i] > until:
                self.active[i] = left - (until - self.now) / seconds[i]
        self.now = until
        for i in through:
            self._end(i)
        return through

    def _end(self, i: int) -> None:
        del self.active[i]
        self.ends[i] = self.now
        self.num_left -= 1
        self.flows.subtract(self.transfers[i].crossing)
        for j in self.followers[i]:
            self.num_before[j] -= 1
            if not self.num_before[j]:
                self.free.append(j)
