"""The most that a pipeline may hold in a given time, by prices of its cards.

In a step whose compute may take H seconds, a stage s of n replicas has ceil(m / n) micro-batches on its first
replica, w_s seconds each. Before its first forward come the forwards of the stages before it, after its last
backward their backwards, so that with W_s = w_s + ... + w_last, W = W_0

    ceil(m / n) w_s + (W - W_s) <= H                                        (time)
    ceil(m / n) W_s <= K_s (H - (W - W_s))                                  (memory)

where K_s is how many micro-batches one replica holds at most: each is in flight for W_s seconds or longer
(Little's law). Under zero_bubble weight gradients may come later, and only forwards count before a stage; a
stage then holds as many micro-batches as there are stages, so that the second line still holds, with H on the
right. Under interleaved_1f1b only the first of up to three virtual stages counts before a stage, and half of
the micro-batches are in flight on one.

Pipelines are built from the last stage on, by dynamic programming over W_s in cells of `cell` seconds, each
stage's seconds rounded down to whole cells; W is guessed within buckets. Their layers are not counted but
priced (Lagrange's relaxation): `best` is the largest

    value * layers - sum over cards of their type's price

of any pipeline of a bucket, at least that of every lawful one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from yuan_train.planner.search.stage_table import FIRST, LAST, MIDDLE, ONLY, Floats, Kind, StageTable

Integers = NDArray[np.int64]
Schedules = Literal["plain", "split", "any"]
"""1f1b and gpipe; these and zero_bubble; these and interleaved_1f1b."""
FEWEST = 48
"""Cells are those of so many micro-batches where there are fewer."""
VIRTUAL_STAGES = 3
"""The most of one worker that the search makes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What all pipelines of a family share."""

    compute_seconds: float
    """H."""
    num_micro_batches: int
    schedules: Schedules
    most_cards: int
    """Most cards of one pipeline."""
    largest_batch: float
    """The largest micro-batch, in those of `num_micro_batches`; 1 if all are alike."""
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
    target: Integers
    """[B, C, M]: cells of W_s with the stage, by bucket of W and cells without it; -1 where it cannot be."""


class PipelineBound:
    """The pipelines that time and memory allow; see the module."""

    def __init__(self, table: StageTable, kinds: Sequence[Kind], limits: Limits, num_types: int) -> None:
        self.table, self.kinds, self.limits, self.num_types = table, kinds, limits, num_types
        m, seconds = limits.num_micro_batches, limits.compute_seconds
        # With few micro-batches stages are longer than need be, and cells of them too coarse.
        scale = max(m, FEWEST)
        self.cell = seconds / (scale * limits.cells)
        each = np.array([m / kind.most for kind in kinds])
        # Micro-batches that are no multiples of the smallest one need not be whole ones of it.
        self.batches = np.ceil(each - 1e-9) if limits.largest_batch == int(limits.largest_batch) else each
        depth = min(limits.most_cards, (len(table.layers) + 2) * max(kind.most for kind in kinds))
        # One micro-batch passes all stages within H, perhaps without weight gradients: at least half of W.
        whole = scale if limits.schedules == "plain" else 2 * scale
        most = min(-(-depth * scale // m), whole) * limits.cells + 1
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
        table = self.table.seconds[role]
        least = self.batches[:, None] * table[:, :, 0]
        allowed = least <= self.limits.compute_seconds * (1 + 1e-9)
        if role == MIDDLE:
            allowed[:, self.table.layers == 0] = False
        kind, entry = np.nonzero(allowed)
        before = np.zeros(1, dtype=np.int64) if starts else np.arange(self.num_cells, dtype=np.int64)
        target = self._targets(table[kind, entry], kind, entry, before)
        if finishes:
            target[(target < self.low[:, None, None])] = -1
        self.work += target.size
        return _Moves(
            kind=kind,
            entry=entry,
            layers=self.table.layers[entry],
            cards=np.array([self.kinds[k].cards for k in kind], dtype=np.int64),
            types=np.array([self.kinds[k].type_index for k in kind], dtype=np.int64),
            target=target,
        )

    def _targets(self, seconds: Floats, kind: Integers, entry: Integers, before: Integers) -> Integers:
        """[B, C, M]: cells with the stage; `seconds` [M, K]."""
        h, schedules, rounding = self.limits.compute_seconds, self.limits.schedules, 1 + 1e-9
        batches = self.batches[kind]
        most_in_flight = seconds.shape[1]
        forward = self.table.forward_share
        fill = {"plain": 1.0, "split": forward, "any": min(forward, 1 / VIRTUAL_STAGES)}[schedules]
        low = self.low[:, None, None]
        rows = np.arange(len(kind))
        least = seconds[:, 0]
        cells = np.broadcast_to(
            before[None, :, None] + np.floor(least / self.cell + 1e-9).astype(np.int64),
            (len(self.low), len(before), len(kind)),
        )
        own = finite = np.broadcast_to(least, cells.shape)
        for _ in range(2):
            filled = np.maximum(low - cells, 0) * (self.cell * fill)
            room = np.maximum(h - filled, 1e-300)
            if schedules == "plain":
                held = np.ceil(batches * cells * self.cell / room - 1e-6)
            elif schedules == "split":
                held = np.ceil(batches * cells * self.cell / h - 1e-6)
            else:
                held = np.floor(0.5 * batches * cells * self.cell / h)
            held = np.minimum(held, batches)
            index = np.clip(held, 1, most_in_flight).astype(np.int64) - 1
            own = seconds[rows, index]
            finite = np.where(np.isfinite(own), own, 0.0)
            cells = before[None, :, None] + np.floor(finite / self.cell + 1e-9).astype(np.int64)
        filled = np.maximum(low - cells, 0) * (self.cell * fill)
        reduce = self.limits.reduce_seconds[kind, entry]
        fits = (
            np.isfinite(own)
            & (batches * finite + filled <= h * rounding)
            & (np.maximum(batches - self.limits.largest_batch, 0.0) * finite + reduce <= h * rounding)
            & (cells < self.high[:, None, None])
        )
        return np.where(fits, cells, -1)

    def best(self, prices: Floats, values: Floats, buckets: Integers) -> Best:
        """The pipelines of each of these buckets of W that are worth most, at its own prices [B, T] and value
        [B] of a layer."""
        gains = {id(moves): self._gains(moves, prices, values) for moves in self._all}
        rest = self._rest(gains, buckets)
        found = [self._start(gains, rest, buckets, i) for i in range(len(buckets))]
        layers = np.zeros(len(buckets))
        cards = np.zeros(prices.shape)
        for i, (worth, move, moves) in enumerate(found):
            if worth > -np.inf:
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
        self.work += middle.size
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
