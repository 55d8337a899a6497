"""The most that a pipeline may hold in a given time, by prices of its cards.

In a step whose compute may take H seconds, a stage s of n replicas has ceil(m / n) micro-batches on its first
replica, w_s seconds each. Before its first forward come the forwards of the stages before it, after its last
backward their backwards, so that with W_s = w_s + ... + w_last, W = W_0

    ceil(m / n) w_s + (W - W_s) <= H                                        (time)
    ceil(m / n) W_s <= K_s (H - (W - W_s))                                  (memory)

where K_s is how many micro-batches one replica holds at most: each is in flight for W_s seconds or longer
(Little's law). Under zero_bubble weight gradients may come later, and only forwards count before a stage;
under interleaved_1f1b only the first of up to three virtual stages does, and half of the micro-batches count.

Pipelines are built from the last stage on, by dynamic programming over W_s in cells of `cell` seconds, each
stage's seconds rounded down to whole cells; W is guessed within buckets. Their layers are not counted but
priced (Lagrange's relaxation): `best` is the largest

    value * layers - sum over cards of their type's price

of any pipeline, at least that of every lawful one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from yuan_train.planner.bounds.stage_table import FIRST, LAST, MIDDLE, ONLY, Floats, Kind, StageTable

Integers = NDArray[np.int64]
Mode = Literal["1f1b", "zero_bubble", "interleaved_1f1b"]
CELLS = 4
"""Cells of a full stage's seconds."""
BUCKET = 1.2
"""Buckets of W grow by this factor, once they are wider than a full stage."""
VIRTUAL_STAGES = 3
"""The most of one worker that the search makes."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What all pipelines of a family share."""

    compute_seconds: float
    """H."""
    num_micro_batches: int
    mode: Mode
    most_cards: int
    """Most cards of one pipeline."""
    reduce_seconds: Floats
    """[N, X]: of the gradients of a stage's layers, which begin with its last backward."""


@dataclass(frozen=True)
class Best:
    """A pipeline that is worth most at some prices."""

    value: float
    layers: float
    cards: Integers
    """[T]: by type."""


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
        self.cell = seconds / (m * CELLS)
        self.batches = np.array([-(-m // kind.most) for kind in kinds], dtype=np.float64)
        depth = min(limits.most_cards, (len(table.layers) + 2) * max(kind.most for kind in kinds))
        most = min(depth * CELLS, m * CELLS) + 1
        edges = [0]
        while edges[-1] < most:
            edges.append(edges[-1] + max(CELLS, int(edges[-1] * (BUCKET - 1))))
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
        h, mode, rounding = self.limits.compute_seconds, self.limits.mode, 1 + 1e-9
        batches = self.batches[kind]
        most_in_flight = seconds.shape[1]
        fill = {"1f1b": 1.0, "zero_bubble": self.table.forward_share, "interleaved_1f1b": 1 / VIRTUAL_STAGES}[mode]
        low = self.low[:, None, None]
        rows = np.arange(len(kind))
        least = seconds[:, 0]
        cells = np.broadcast_to(
            before[None, :, None] + np.floor(least / self.cell + 1e-9).astype(np.int64),
            (len(self.low), len(before), len(kind)),
        )
        own = np.broadcast_to(least, cells.shape)
        for _ in range(2):
            filled = np.maximum(low - cells, 0) * (self.cell * fill)
            room = np.maximum(h - filled, 1e-300)
            if mode == "1f1b":
                held = np.ceil(batches * cells * self.cell / room - 1e-6)
            elif mode == "zero_bubble":
                held = np.ceil(np.broadcast_to(low, cells.shape) * self.cell * self.limits.num_micro_batches / h - 1e-6)
                held = np.minimum(held, batches)
            else:
                held = np.floor(0.5 * batches * cells * self.cell / h)
            index = np.clip(held, 1, most_in_flight).astype(np.int64) - 1
            own = seconds[rows, index]
            finite = np.where(np.isfinite(own), own, 0.0)
            cells = before[None, :, None] + np.floor(finite / self.cell + 1e-9).astype(np.int64)
        filled = np.maximum(low - cells, 0) * (self.cell * fill)
        reduce = self.limits.reduce_seconds[kind, entry]
        fits = (
            np.isfinite(own)
            & (batches * own + filled <= h * rounding)
            & ((batches - 1) * own + reduce <= h * rounding)
            & (cells < self.high[:, None, None])
        )
        return np.where(fits, cells, -1)

    def best(self, prices: Floats, value: float = 1.0) -> Best | None:
        """The pipeline that is worth most; None if there is none at all."""
        rest = self._values(prices, value)
        gains = {id(moves): self._gains(moves, prices, value) for moves in (self.only, self.last)}
        found: list[tuple[float, int, int, _Moves]] = []
        for moves in (self.only, self.last):
            if not len(moves.kind):
                continue
            target = moves.target[:, 0, :]
            after = np.zeros(target.shape) if moves is self.only else np.take_along_axis(rest, np.maximum(target, 0), 1)
            worth = np.where(target >= 0, gains[id(moves)] + after, -np.inf)
            i = int(worth.argmax())
            found.append((float(worth.flat[i]), i // worth.shape[1], i % worth.shape[1], moves))
        if not found or max(found)[0] == -np.inf:
            return None
        worth, bucket, move, moves = max(found, key=lambda item: item[0])
        return self._trace(rest, prices, value, worth, bucket, move, moves)

    def _gains(self, moves: _Moves, prices: Floats, value: float) -> Floats:
        return value * moves.layers - moves.cards * prices[moves.types]

    def _values(self, prices: Floats, value: float) -> Floats:
        """[B, C]: the most that stages before those of so many cells are worth."""
        first = self._worth(self.first, prices, value)
        rest = np.where(self.first.target >= 0, first, -np.inf).max(axis=2, initial=-np.inf)
        gains = self._gains(self.middle, prices, value)
        self.work += self.middle.target.size
        if not len(gains):
            return rest
        rows = np.arange(len(self.low))[:, None]
        repeats = max(len(self.table.layers) + 2, 1)
        for c in range(self.num_cells - 1, -1, -1):
            target = self.middle.target[:, c, :]
            after = rest[rows, np.maximum(target, 0)]
            # A stage of less than a cell can follow itself; as often as there are layers.
            same = target == c
            worth = np.where((target > c), gains + after, -np.inf).max(axis=1)
            np.maximum(rest[:, c], worth, out=rest[:, c])
            again = np.where(same, np.maximum(gains, 0.0), 0.0).max(axis=1)
            rest[:, c] += repeats * again
        return rest

    def _worth(self, moves: _Moves, prices: Floats, value: float) -> Floats:
        return self._gains(moves, prices, value)[None, None, :]

    def _trace(
        self, rest: Floats, prices: Floats, value: float, worth: float, bucket: int, move: int, moves: _Moves
    ) -> Best:
        """The pipeline of a value."""
        cards = np.zeros(self.num_types, dtype=np.int64)
        layers = 0.0
        c = 0
        row: Integers = moves.target[bucket, 0]
        gains = self._gains(self.middle, prices, value)
        ends = self._gains(self.first, prices, value)
        while True:
            cards[moves.types[move]] += moves.cards[move]
            layers += float(moves.layers[move])
            if moves in (self.first, self.only):
                return Best(worth, layers, cards)
            c = int(row[move])
            target, end = self.middle.target[bucket, c], self.first.target[bucket, c]
            further = np.where(target > c, gains + rest[bucket, np.maximum(target, 0)], -np.inf)
            finish = np.where(end >= 0, ends, -np.inf)
            if len(further) == 0 or (len(finish) and finish.max() >= further.max()):
                moves, move, row = self.first, int(finish.argmax()), end
            else:
                moves, move, row = self.middle, int(further.argmax()), target
