"""The most that a pipeline may hold in a given time, by prices of its cards.

In a step whose compute may take H seconds, a stage s of n replicas has ceil(m / n) micro-batches on its first
replica, w_s seconds each. Before its first forward come the forwards of the stages before it, after its last
backward their backwards, so that with W_s = w_s + ... + w_last, W = W_0

    ceil(m / n) w_s + (W - W_s) <= H                                        (time)
    ceil(m / n) W_s <= K_s (H - (W - W_s))                                  (memory)

where K_s is how many micro-batches one replica holds at most: each is in flight for W_s seconds or longer
(Little's law). W_s includes what the messages between these stages take at least (`edge_bound`).

Under zero_bubble weight gradients may come later, and only forwards count before a stage; H is on the right
of the second line, and a stage of one replica holds as many micro-batches as there are workers, which is at
least m W / H. Under interleaved_1f1b, the search makes stages of one replica whose layers are divided evenly
among two or three virtual stages: only the first of these counts before a stage, and a worker holds what the
schedule's cap says, at least half of what the second line does.

Pipelines are built from the last stage on, by dynamic programming over W_s in cells of `cell` seconds, each
stage's seconds rounded down to whole cells; W is guessed within buckets. Their layers are not counted but
priced (Lagrange's relaxation): `best` is the largest

    value * layers - sum over cards of their type's price

of any pipeline of a bucket, at least that of every lawful one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from yuan_train.planner.search.edge_bound import Edges
from yuan_train.planner.search.stage_parts import FIRST, LAST, MIDDLE, ONLY, Floats, Integers, Kind
from yuan_train.planner.search.stage_table import StageTable

Targets = NDArray[np.int32]
Schedules = Literal["plain", "split", "any"]
"""1f1b and gpipe; zero_bubble; interleaved_1f1b."""
_FEWEST_OF_LOOP = {MIDDLE: 2, FIRST: 2, LAST: 1, ONLY: math.inf}
"""Layers of a worker with two virtual stages or more, by role."""
FEWEST, PER_STAGE = 24, 4
"""Cells are those of so many micro-batches where there are fewer; but no finer than of so many for each stage
that there may be."""
CELL_WORK = 3000
"""Of a cell of dynamic programming, beside its moves."""
VIRTUAL_STAGES = 3
"""The most of one worker that the search makes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What all pipelines of a family share; all their micro-batches are alike."""

    compute_seconds: float
    """H."""
    num_micro_batches: int
    schedules: Schedules
    most_cards: int
    """Most cards of one pipeline."""
    edges: Edges
    half_layers: bool
    """Whether stages may end in half a layer."""
    reduce_seconds: Floats
    """[N, X]: of the gradients of a stage's layers, which begin with its last backward."""
    cells: int
    """Of a full stage's seconds."""
    growth: float
    """Of buckets of W, once they are wider than a full stage."""


@dataclass(frozen=True)
class Best:
    """Pipelines that are worth most at some prices, one for each bucket of W."""

    worth: Floats
    """[B]; -inf if there is none."""
    layers: Floats
    """[B]"""
    cards: Floats
    """[B, T]: by type."""


@dataclass(frozen=True, eq=False)
class _Moves:
    """Stages that may stand before some others: entries of the table."""

    kind: Integers
    entry: Integers
    layers: Floats
    cards: Integers
    types: Integers
    target: Targets
    """[B, C, M]: cells of W_s with the stage, by bucket of W and cells without it; -1 where it cannot be."""


def replica_steps(kind: Kind, num_micro_batches: int) -> Iterator[tuple[int, int]]:
    """(fewest replicas, micro-batches of the first of them): each number of micro-batches once."""
    before = 0
    for count in range(kind.fewest, kind.most + 1):
        batches = -(-num_micro_batches // count)
        if batches != before:
            yield count, batches
            before = batches


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stages:
    """M stages."""

    seconds: Floats
    """[M, K]"""
    batches: Floats
    edge: Floats
    reduce: Floats
    is_one: NDArray[np.bool_]
    """Whether it has one replica."""
    loop_share: dict[int, Floats] | None
    """By virtual stages of a worker: the least part of its layers that one of them has."""


def _loop_shares(layers: Floats) -> dict[int, Floats]:
    """Infinite where there are more virtual stages than layers: there are no such stages."""
    return {
        v: np.where(layers >= v, np.floor(layers / v) / np.maximum(layers, 1.0), np.inf)
        for v in range(2, VIRTUAL_STAGES + 1)
    }


def loop_alive(v: int, workers: int, rest: Floats, num_micro_batches: int) -> Floats:
    """How many activations of virtual stages a worker holds at most under interleaved_1f1b, at least: with
    `rest` workers from it on, of `workers` or more. The cap of `schedule.schedules.interleaved`, or what has
    passed by the first backward; tests compare it with the schedules."""
    most = (v - 1) * workers + 2 * rest - 1
    passed = (v - 1) * min(num_micro_batches, workers) + np.minimum(num_micro_batches, 3 * rest - 2)
    return np.minimum(most, passed)


class PipelineBound:
    """The pipelines that time and memory allow; see the module."""

    def __init__(self, table: StageTable, kinds: Sequence[Kind], limits: Limits, num_types: int) -> None:
        self.table, self.limits, self.num_types = table, limits, num_types
        m, seconds = limits.num_micro_batches, limits.compute_seconds
        depth = min(limits.most_cards, len(table.layers) + 2)
        # What cells round off adds up over the stages; with few micro-batches each takes much of H.
        scale = min(max(m, FEWEST), PER_STAGE * max(depth, 4))
        self.cell = seconds / (scale * limits.cells)
        # Half layers come with virtual stages of their own, see `alternating`.
        self.is_looped = limits.schedules == "any" and not limits.half_layers
        ways = [(k, *way) for k, kind in enumerate(kinds) for way in replica_steps(kind, m)]
        if self.is_looped:
            ways = [way for way in ways if way[1] == 1]
        self.rows = np.array([k for k, _, _ in ways], dtype=np.int64)
        """[N']: entries of the table; kinds of stages are divided by the micro-batches of a replica."""
        self.batches = np.array([float(batches) for _, _, batches in ways])
        self.cards = np.array([kinds[k].width * fewest for k, fewest, _ in ways], dtype=np.int64)
        self.widths = np.array([kinds[k].width for k, _, _ in ways], dtype=np.int64)
        self.types = np.array([kinds[k].type_index for k, _, _ in ways], dtype=np.int64)
        depth = min(limits.most_cards, (len(table.layers) + 2) * max(kind.most for kind in kinds))
        # One micro-batch passes all stages within H, perhaps without weight gradients: at least half of W.
        whole = scale if limits.schedules == "plain" else 2 * scale
        each = max(e / kind.width for e, kind in zip(limits.edges.seconds, kinds, strict=True))
        messages = math.ceil(limits.most_cards * each / self.cell)
        self.slack = slack = math.ceil(limits.edges.slack / self.cell - 1e-9)
        # Of a message there and back, half is on the way there.
        forward = table.parts.forward_share
        shares = {"plain": 1.0, "split": min(forward, 0.5), "any": min(forward, 1 / VIRTUAL_STAGES)}
        self.fill = shares[limits.schedules]
        most = min(-(-depth * scale // m) * limits.cells + messages, whole * limits.cells + slack) + 1
        edges = [0]
        while edges[-1] < most:
            edges.append(edges[-1] + max(limits.cells, int(edges[-1] * (limits.growth - 1))))
        self.low = np.array(edges[:-1], dtype=np.int64)
        self.high = np.array(edges[1:], dtype=np.int64)
        self.num_cells = edges[-1]
        self.work = 0
        self.middle = self._moves(MIDDLE)
        self.first = self._moves(FIRST, finishes=True)
        self.last = self._moves(LAST, starts=True)
        self.only = self._moves(ONLY, starts=True, finishes=True)

    def _moves(self, role: int, *, starts: bool = False, finishes: bool = False) -> _Moves:
        """Moves of a role; from zero cells if it `starts`, to all of W if it `finishes` the pipeline."""
        least = self.batches[:, None] * self.table.least_seconds[role][self.rows]
        allowed = least <= self.limits.compute_seconds * (1 + 1e-9)
        if role == MIDDLE:
            allowed[:, self.table.layers == 0] = False
        if self.is_looped:
            # A virtual stage without layers is the first or the last one.
            allowed[:, self.table.layers < _FEWEST_OF_LOOP[role]] = False
        kind, entry = np.nonzero(allowed)
        before = np.zeros(1, dtype=np.int64) if starts else np.arange(self.num_cells, dtype=np.int64)
        target = self._targets(role, kind, entry, before)
        if finishes:
            target[target < self.low[:, None, None]] = -1
        # In units of 10 ns, about.
        self.work += 3 * target.size
        return _Moves(
            kind=kind,
            entry=entry,
            layers=self.table.layers[entry],
            cards=self.cards[kind],
            types=self.types[kind],
            target=target,
        )

    def _targets(self, role: int, kind: Integers, entry: Integers, before: Integers) -> Targets:
        """[B, C, M]: cells with the stage, by cells without it; -1 where the bucket does not allow it."""
        target = np.full((len(self.low), len(before), len(kind)), -1, dtype=np.int32)
        if not len(kind):
            return target
        stages = _Stages(
            seconds=self.table.seconds(role, self.rows[kind], entry),
            batches=self.batches[kind],
            edge=self.limits.edges.seconds[self.rows[kind]],
            reduce=self.limits.reduce_seconds[self.rows[kind], entry],
            is_one=self.cards[kind] == self.widths[kind],
            loop_share=_loop_shares(self.table.layers[entry]) if role == MIDDLE else None,
        )
        slow = np.flatnonzero(stages.seconds[:, 0] < stages.seconds[:, -1])
        least = np.floor((stages.seconds[:, 0] + stages.edge) / self.cell + 1e-9).astype(np.int32)
        all_cells = np.arange(self.num_cells + int(least.max(initial=0)) + 1)
        for b, (low, high) in enumerate(zip(self.low.tolist(), self.high.tolist(), strict=True)):
            begin = 0
            if role == FIRST and len(before) > 1:
                # Others do not reach the bucket, unless memory makes them slower.
                longest = stages.seconds[:, -1]
                longest = np.where(np.isfinite(longest), longest, self.limits.compute_seconds)
                begin = max(0, low - int(((longest + stages.edge) / self.cell).max()) - 1)
            own_before = before[begin:high].astype(np.int32)
            filled = np.maximum(low - all_cells - self.slack, 0) * (self.cell * self.fill)
            cells = own_before[:, None] + least[None, :]
            own = np.broadcast_to(stages.seconds[:, 0], cells.shape)
            if len(slow):
                own, cells = own.copy(), cells.copy()
                own[:, slow] = self._held_seconds(stages, slow, cells[:, slow], low, filled)
                finite = np.where(np.isfinite(own[:, slow]), own[:, slow], 0.0)
                added = np.floor((finite + stages.edge[slow]) / self.cell + 1e-9).astype(np.int32)
                cells[:, slow] = own_before[:, None] + added
            limit = self.limits.compute_seconds * (1 + 1e-9)
            inside = np.minimum(cells, len(filled) - 1)
            fits = stages.batches * own + filled[inside] <= limit
            fits &= np.maximum(stages.batches - 1.0, 0.0) * own + stages.reduce <= limit
            fits &= cells < high
            target[b, begin : begin + len(own_before)] = np.where(fits, cells, -1)
        return target

    def _held_seconds(
        self, stages: _Stages, chosen: Integers, cells: Targets, low: int, filled: Floats
    ) -> Floats:
        """[C, M]: seconds of the chosen stages with the micro-batches that they hold, of a pipeline of `low`
        cells or more; `cells` [C, M] are of the stages from them on."""
        h, m, schedules = self.limits.compute_seconds, self.limits.num_micro_batches, self.limits.schedules
        seconds, batches = stages.seconds[chosen], stages.batches[chosen]
        tail = np.maximum((cells - self.slack) * self.cell, seconds[:, 0])
        # No stage, with its part of the messages, takes longer for each of its workers.
        longest = h / m + float(self.limits.edges.seconds.max(initial=0.0))
        workers = math.ceil(low * self.cell / longest - 1e-6)
        if schedules == "plain":
            room = np.maximum(h - filled, 1e-300)
            held = np.ceil(batches * tail / room[np.minimum(cells, len(filled) - 1)] - 1e-6)
        elif schedules == "split":
            held = np.ceil(batches * tail / h - 1e-6)
            held = np.maximum(held, np.where(stages.is_one[chosen], float(workers), 1.0))
        else:
            held = np.floor(0.5 * batches * tail / h)
            if self.is_looped and stages.loop_share is not None:
                rest = np.maximum(np.ceil(cells * self.cell / longest - 1e-6), 1.0)
                loops = [
                    np.floor(loop_alive(v, workers, rest, m) * stages.loop_share[v][chosen])
                    for v in range(2, VIRTUAL_STAGES + 1)
                ]
                held = np.maximum(held, np.min(loops, axis=0))
        held = np.minimum(held, batches)
        index = np.clip(held, 1, seconds.shape[1]).astype(np.int64) - 1
        return seconds[np.arange(len(chosen)), index]

    def best(self, prices: Floats, values: Floats, buckets: Integers, least: Floats) -> Best:
        """The pipelines of each of these buckets of W that are worth most, at its own prices [B, T] and value
        [B] of a layer; which they are only where they are worth `least` [B] or more."""
        gains = {id(moves): self._gains(moves, prices, values) for moves in self._all}
        rest = self._rest(gains, buckets)
        found = [self._start(gains, rest, buckets, i) for i in range(len(buckets))]
        layers = np.zeros(len(buckets))
        cards = np.zeros(prices.shape)
        for i, (worth, move, moves) in enumerate(found):
            if worth > -np.inf and worth >= least[i]:
                layers[i], cards[i] = self._trace(gains, rest, buckets, i, move, moves)
        return Best(np.array([worth for worth, _, _ in found]), layers, cards)

    @property
    def _all(self) -> tuple[_Moves, ...]:
        return self.middle, self.first, self.last, self.only

    def _gains(self, moves: _Moves, prices: Floats, values: Floats) -> Floats:
        return values[:, None] * moves.layers - moves.cards * prices[:, moves.types]

    def _rest(self, gains: dict[int, Floats], buckets: Integers) -> Floats:
        """[B, C]: the most that stages before those of so many cells are worth."""
        end = self.first.target[buckets]
        rest = np.where(end >= 0, gains[id(self.first)][:, None, :], -np.inf).max(axis=2, initial=-np.inf)
        middle, own = self.middle.target[buckets], gains[id(self.middle)]
        self.work += CELL_WORK * middle.shape[1] + middle.size
        if not own.shape[1]:
            return rest
        rows = np.arange(len(buckets))[:, None]
        # Of each bucket, only the cells below its end; ends ascend.
        begins = np.searchsorted(self.high[buckets], np.arange(self.num_cells), side="right")
        # A stage of less than a cell can follow itself; as often as there are layers.
        again = (len(self.table.layers) + 2) * np.maximum(own, 0.0)
        for c in range(int(self.high[buckets].max()) - 1, -1, -1):
            begin = int(begins[c])
            target = middle[begin:, c]
            worth = np.where(target > c, own[begin:] + rest[rows[begin:], target], -np.inf).max(axis=1)
            column = np.maximum(rest[begin:, c], worth)
            rest[begin:, c] = column + np.where(target == c, again[begin:], 0.0).max(axis=1)
        return rest

    def _start(
        self, gains: dict[int, Floats], rest: Floats, buckets: Integers, i: int
    ) -> tuple[float, int, _Moves]:
        """The last stage of the best pipeline, or its only one: (worth of the pipeline, move, its moves)."""
        found: list[tuple[float, int, _Moves]] = [(-np.inf, 0, self.only)]
        for moves in (self.only, self.last):
            target = moves.target[buckets[i], 0]
            if len(target):
                after = 0.0 if moves is self.only else rest[i, target]
                worth = np.where(target >= 0, gains[id(moves)][i] + after, -np.inf)
                best = int(worth.argmax())
                found.append((float(worth[best]), best, moves))
        return max(found, key=lambda item: item[0])

    def _trace(
        self,
        gains: dict[int, Floats],
        rest: Floats,
        buckets: Integers,
        i: int,
        move: int,
        moves: _Moves,
    ) -> tuple[float, Floats]:
        """(layers, cards by type) of the pipeline that begins with this move."""
        cards, layers, c = np.zeros(self.num_types), 0.0, 0
        row = moves.target[buckets[i], 0]
        while True:
            cards[moves.types[move]] += moves.cards[move]
            layers += float(moves.layers[move])
            if moves is self.first or moves is self.only:
                return layers, cards
            c = int(row[move])
            target, end = self.middle.target[buckets[i], c], self.first.target[buckets[i], c]
            further = np.where(target > c, gains[id(self.middle)][i] + rest[i, target], -np.inf)
            finish = np.where(end >= 0, gains[id(self.first)][i], -np.inf)
            if finish.max(initial=-np.inf) >= further.max(initial=-np.inf):
                moves, move, row = self.first, int(finish.argmax()), end
            else:
                moves, move, row = self.middle, int(further.argmax()), target
