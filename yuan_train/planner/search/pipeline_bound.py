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
priced (Lagrange's relaxation): the worth is the largest

    value * layers - sum over limits of cards of their price * cards

of any pipeline of a bucket, at least that of every lawful one. Cells may be left empty between stages: a
pipeline that fits in a bucket with some fits in a bucket of less W without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from yuan_train.planner.search.card_limits import CardLimits
from yuan_train.planner.search.stage_moves import (
    VIRTUAL_STAGES,
    Cells,
    Limits,
    Moves,
    StageWays,
    find_moves,
)
from yuan_train.planner.search.stage_parts import FIRST, LAST, MIDDLE, ONLY, Floats, Integers, Kind
from yuan_train.planner.search.stage_table import StageTable

FEWEST, PER_STAGE = 24, 4
"""Cells are those of so many micro-batches where there are fewer; but no finer than of so many for each stage
that there may be."""
BLOCK_WORK, MOVE_WORK, FIRST_WORK, CALL_WORK, BOUND_WORK = 600, 1.8, 0.4, 40_000, 220_000
"""In dynamic programming, of a block of cells, of a move from a cell, and of a first stage; of each time; and
of a bound, in units of about 10 ns."""


@dataclass(frozen=True)
class Grid:
    """How finely pipelines are told apart."""

    cells: int
    """Of a full stage's seconds."""
    growth: float
    """Of buckets of W, once they are wider than a full stage."""


def replica_steps(kind: Kind, num_micro_batches: int) -> Iterator[tuple[int, int]]:
    """(fewest replicas, micro-batches of the first of them): each number of micro-batches once."""
    before = 0
    for count in range(kind.fewest, kind.most + 1):
        batches = -(-num_micro_batches // count)
        if batches != before:
            yield count, batches
            before = batches


def stage_ways(kinds: Sequence[Kind], cards: CardLimits, num_micro_batches: int, *, one: bool) -> StageWays:
    """The stages of these kinds that are told apart; with `one`, those of one replica only."""
    ways = [(k, *way) for k, kind in enumerate(kinds) for way in replica_steps(kind, num_micro_batches)]
    rows = [(k, fewest, batches) for k, fewest, batches in ways if fewest == 1 or not one]
    index = np.array([k for k, _, _ in rows], dtype=np.int64)
    counts = np.array([fewest for _, fewest, _ in rows], dtype=np.int64)
    types = np.array([kind.type_index for kind in kinds], dtype=np.int64)[index]
    widths = np.array([kind.width for kind in kinds], dtype=np.int64)[index]
    return StageWays(
        kinds=index,
        batches=np.array([float(batches) for _, _, batches in rows]),
        is_one=(counts == 1).astype(np.int64),
        uses=cards.uses(types, widths, widths * counts),
    )


class PipelineBound:
    """The pipelines that time and memory allow; see the module."""

    def __init__(
        self,
        table: StageTable,
        kinds: Sequence[Kind],
        ways: StageWays,
        limits: Limits,
        grid: Grid,
        *,
        span: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        """Of pipelines whose W, each stage rounded down to cells, is in a `span` of seconds."""
        self.most_stages = len(table.layers) + 2
        cells = make_cells(table, kinds, limits, grid, span)
        self.low, self.cell_seconds = cells.low, cells.seconds
        self.high = cells.high
        self.num_cells = int(cells.high[-1]) if len(cells.high) else 0
        self.work = float(BOUND_WORK)
        roles = (MIDDLE, FIRST, LAST, ONLY)
        middle, self.first, self.last, self.only = (
            find_moves(table, ways, limits, cells, role) for role in roles
        )
        # A stage of less than a cell can follow itself; as often as there are layers.
        self.again = middle.chosen(np.flatnonzero(middle.cells == 0))
        self.middle = middle.chosen(np.flatnonzero(middle.cells > 0))

    def span(self, buckets: Integers) -> tuple[float, float]:
        """What W of some neighbouring buckets may be, in seconds, in cells of half the size: each stage
        rounds off up to half a cell less."""
        moves = self.middle.chosen(
            np.flatnonzero((self.middle.begin <= self.middle.end)[buckets].any(axis=0))
        )
        least = int(moves.cells.min(initial=self.num_cells))
        high = int(self.high[buckets[-1]])
        # A first and a last stage may be of less than a cell.
        stages = self.most_stages if len(self.again.cells) else min(self.most_stages, high // least + 2)
        return float(self.low[buckets[0]]) * self.cell_seconds, (high + stages / 2) * self.cell_seconds

    def priced(self, prices: Floats, value: float, buckets: Integers) -> Priced:
        """The pipelines of B of the buckets, at prices [R] and a value of a layer."""
        gains = [
            value * moves.layers - moves.uses @ prices
            for moves in (self.middle, self.again, self.first, self.last, self.only)
        ]
        # What is worth nothing is no better than empty cells.
        kept = np.flatnonzero(gains[0] > 0)
        middle = self.middle.chosen(kept)
        rest = self._rest(middle, (gains[0][kept], gains[1], gains[2]), buckets)
        worth, starts = self._starts(gains[3], gains[4], rest, buckets)
        return Priced(self, buckets, middle, gains[0][kept], gains[2], rest, worth, starts)

    def _rest(self, middle: Moves, gains: tuple[Floats, Floats, Floats], buckets: Integers) -> Floats:
        """[C + 1, B]: the most that stages before those of so many cells are worth; the last row is of
        nowhere. `gains` are those of middle stages, of those that take no cells, and of first ones."""
        own, again, first = gains
        rest = np.full((self.num_cells + 1, len(buckets)), -np.inf)
        cells = np.arange(self.num_cells)[:, None, None]
        lowest = int(self.first.begin[buckets].min(initial=self.num_cells))
        if len(first) and lowest < self.num_cells:
            some = cells[lowest:]
            inside = (some >= self.first.begin[buckets]) & (some <= self.first.end[buckets])
            rest[lowest:-1] = np.where(inside, first, -np.inf).max(axis=2)
            self.work += FIRST_WORK * inside.size
        added = None
        if len(again):
            inside = (cells >= self.again.begin[buckets]) & (cells <= self.again.end[buckets])
            added = np.where(inside, self.most_stages * np.maximum(again, 0.0), 0.0).max(axis=2)
        # Beyond the last cell of a middle stage, cells are only left empty.
        top = int(middle.end[buckets].max(initial=-1)) + 1 if added is None else self.num_cells
        np.maximum.accumulate(rest[top:-1][::-1], axis=0, out=rest[top:-1][::-1])
        block = int(middle.cells.min(initial=self.num_cells))
        target, flat = self._targets(middle, buckets, top), rest.reshape(-1)
        # Only of the buckets that have such cells; ends ascend.
        begins = self.high[buckets].searchsorted(np.arange(top), side="right").tolist()
        for stop in range(top, 0, -block):
            start = max(stop - block, 0)
            at = (start if block == 1 else slice(start, stop), slice(begins[start], None))
            column, worth = rest[at], flat.take(target[at])
            worth += own
            np.maximum(column, np.maximum.reduce(worth, axis=-1, initial=-np.inf), out=column)
            if added is not None:
                column += added[at]
            last = column if block == 1 else column[-1]
            np.maximum(last, rest[stop, at[1]], out=last)
            if block > 1:
                np.maximum.accumulate(column[::-1], axis=0, out=column[::-1])
        self.work += CALL_WORK + BLOCK_WORK * top / block
        return rest

    def _targets(self, moves: Moves, buckets: Integers, top: int) -> Integers:
        """[top, B, V]: where middle stages lead to from each cell up to a `top`, as an index of `rest`."""
        cells = np.arange(top)[:, None, None]
        inside = (cells >= moves.begin[buckets]) & (cells <= moves.end[buckets])
        rows = np.arange(len(buckets))[:, None]
        target = cells * len(buckets) + (moves.cells * len(buckets) + rows)
        self.work += MOVE_WORK * target.size
        return np.where(inside, target, self.num_cells * len(buckets))

    def _starts(self, last: Floats, only: Floats, rest: Floats, buckets: Integers) -> tuple[Floats, Integers]:
        """[B] each: worth of the best pipelines; their last stage, or if there is but one stage, its index
        after those of last stages."""
        rows, found = np.arange(len(buckets)), list[Floats]()
        for moves, gains in ((self.last, last), (self.only, only)):
            inside = (moves.begin[buckets] <= 0) & (moves.end[buckets] >= 0)
            target = np.where(inside, moves.cells, self.num_cells)
            after = rest[target, rows[:, None]] if moves is self.last else 0.0
            found.append(np.where(inside, gains + after, -np.inf))
        worth = np.concatenate([*found, np.full((len(rows), 1), -np.inf)], axis=1)
        best = worth.argmax(axis=1)
        return worth[rows, best], best


@dataclass(frozen=True, eq=False)
class Priced:
    """The pipelines of B buckets of W that are worth most at some prices."""

    bound: PipelineBound
    buckets: Integers
    """[B]"""
    middle: Moves
    """Those that are worth something."""
    middle_gains: Floats
    first_gains: Floats
    rest: Floats
    worth: Floats
    """[B]; -inf if there is none."""
    starts: Integers

    def pipeline(self, i: int) -> tuple[float, Floats]:
        """(layers, uses of limits of cards [R]) of the i-th one."""
        bound, bucket, start = self.bound, self.buckets[i], int(self.starts[i])
        if start >= len(bound.last.cells):
            start -= len(bound.last.cells)
            return float(bound.only.layers[start]), bound.only.uses[start]
        rest, middle = self.rest[:, i], self.middle
        begin, end = middle.begin[bucket], middle.end[bucket]
        # Cells are left empty as long as that is worth as much.
        falls = np.where(rest[:-1] > rest[1:], np.arange(len(rest) - 1), len(rest))
        stay = np.minimum.accumulate(falls[::-1])[::-1]
        layers, uses = float(bound.last.layers[start]), bound.last.uses[start].copy()
        c = int(stay[bound.last.cells[start]])
        first_end = int(bound.first.begin[bucket].min())
        while True:
            target = np.where((begin <= c) & (end >= c), c + middle.cells, len(rest) - 1)
            further = self.middle_gains + rest[target]
            if c >= first_end:
                inside = (bound.first.begin[bucket] <= c) & (bound.first.end[bucket] >= c)
                finish = np.where(inside, self.first_gains, -np.inf)
                if finish.max() >= further.max(initial=-np.inf):
                    move = int(finish.argmax())
                    return layers + float(bound.first.layers[move]), uses + bound.first.uses[move]
            move = int(further.argmax())
            layers += float(middle.layers[move])
            uses += middle.uses[move]
            c = int(stay[target[move]])


def make_cells(
    table: StageTable, kinds: Sequence[Kind], limits: Limits, grid: Grid, span: tuple[float, float]
) -> Cells:
    """The cells and buckets of a grid."""
    m, h, num_layers = limits.num_micro_batches, limits.compute_seconds, len(table.layers)
    depth = min(limits.most_cards, num_layers + 2)
    # What cells round off adds up over the stages; with few micro-batches each takes much of H.
    scale = min(max(m, FEWEST), PER_STAGE * max(depth, 4))
    cell = h / (scale * grid.cells)
    depth = min(limits.most_cards, (num_layers + 2) * max(kind.most for kind in kinds))
    # One micro-batch passes all stages within H, perhaps without weight gradients: at least half of W.
    whole = scale if limits.schedules == "plain" else 2 * scale
    each = max(e / kind.width for e, kind in zip(limits.edges.seconds, kinds, strict=True))
    messages = math.ceil(limits.most_cards * each / cell)
    slack = math.ceil(limits.edges.slack / cell - 1e-9)
    most = min(-(-depth * scale // m) * grid.cells + messages, whole * grid.cells + slack) + 1
    most = int(min(most, span[1] / cell + 1))
    edges = [int(span[0] / cell)]
    while edges[-1] < most:
        edges.append(edges[-1] + max(grid.cells, int(edges[-1] * (grid.growth - 1))))
    # Of a message there and back, half is on the way there.
    forward = table.parts.forward_share
    shares = {"plain": 1.0, "split": min(forward, 0.5), "any": min(forward, 1 / VIRTUAL_STAGES)}
    return Cells(
        seconds=cell,
        low=np.array(edges[:-1], dtype=np.int64),
        high=np.array(edges[1:], dtype=np.int64),
        slack=slack,
        fill=shares[limits.schedules],
    )
