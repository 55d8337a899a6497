"""Where in a pipeline a stage may stand: intervals of cells, by bucket of the pipeline's seconds.

See `pipeline_bound`, whose conditions these are. A stage that recomputes more the more micro-batches it holds
is several moves, one for each of its seconds; a move takes the same cells wherever it stands, and may stand
where time lets it, and where it need not hold more micro-batches than its seconds are for. The nearer to the
start of the pipeline, the more of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from yuan_train.planner.search.edge_bound import Edges
from yuan_train.planner.search.stage_parts import FIRST, LAST, MIDDLE, ONLY, Floats, Integers
from yuan_train.planner.search.stage_table import StageTable

Schedules = Literal["plain", "split", "any"]
"""1f1b and gpipe; zero_bubble; interleaved_1f1b."""
_FEWEST_OF_LOOP = {MIDDLE: 2, FIRST: 2, LAST: 1, ONLY: np.inf}
"""Layers of a worker with two virtual stages or more, by role."""
VIRTUAL_STAGES = 3
"""The most of one worker that the search makes."""
ROUNDING = 1e-6


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

    @property
    def is_looped(self) -> bool:
        """Whether workers have virtual stages. Half layers come with some of their own, see `alternating`."""
        return self.schedules == "any" and not self.half_layers

    @property
    def longest_seconds(self) -> float:
        """No stage, with its part of the messages, takes longer for each of its workers."""
        return self.compute_seconds / self.num_micro_batches + float(self.edges.seconds.max(initial=0.0))


@dataclass(frozen=True, kw_only=True, eq=False)
class StageWays:
    """N' kinds of stages, by the micro-batches of a replica."""

    kinds: Integers
    """[N']: entries of the table."""
    batches: Floats
    """[N']: micro-batches of the first replica."""
    is_one: Integers
    """[N']: 1 where there is one replica."""
    uses: Floats
    """[N', R]: of `CardLimits`."""


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells that W_s is counted in, and buckets of W."""

    seconds: float
    """Of a cell."""
    low: Integers
    """[B]"""
    high: Integers
    """[B]: the end."""
    slack: int
    """Cells that messages may be charged too much."""
    fill: float
    """The part of the stages before one that fills."""


@dataclass(frozen=True, eq=False)
class Moves:
    """V stages that may stand before some others."""

    way: Integers
    """[V]"""
    layers: Floats
    """[V]"""
    uses: Floats
    """[V, R]"""
    cells: Integers
    """[V]: that a stage adds."""
    begin: Integers
    """[B, V]: fewest cells of the stages after it."""
    end: Integers
    """[B, V]: most of them; less than `begin` where there are none."""

    def chosen(self, keep: Integers) -> Moves:
        """Those of some indices."""
        return Moves(
            self.way[keep],
            self.layers[keep],
            self.uses[keep],
            self.cells[keep],
            self.begin[:, keep],
            self.end[:, keep],
        )


@dataclass(frozen=True, eq=False)
class _Steps:
    """Stages with one of their seconds, before it is known where they may stand."""

    way: Integers
    """[V]"""
    entry: Integers
    """[V]: of the table's layers."""
    seconds: Floats
    """[V]"""
    held: Floats
    """[V]: the most micro-batches in flight that these are for."""


def find_moves(table: StageTable, ways: StageWays, limits: Limits, cells: Cells, role: int) -> Moves:
    """The moves of a role; a first stage ends in the bucket, a last one begins at no cells."""
    steps = _steps(table, ways, limits, role)
    h, batches = limits.compute_seconds * (1 + 1e-9), ways.batches[steps.way]
    added = steps.seconds + limits.edges.seconds[ways.kinds[steps.way]]
    own = np.floor(added / cells.seconds + 1e-9).astype(np.int64)
    low, high = cells.low[:, None], cells.high[:, None]
    # Time: what is before the stage, at least low - end - slack, leaves enough for its micro-batches.
    room = (h - batches * steps.seconds) / (cells.seconds * max(cells.fill, 1e-12))
    first = np.ceil(np.maximum(low - cells.slack - room - 1e-9, 0.0)).astype(np.int64)
    last = np.minimum(high - 1, _last_held(steps, ways, limits, cells, role))
    if role in (FIRST, ONLY):
        first = np.maximum(first, low)
    begin, end = np.maximum(first - own, 0), last - own
    if role in (LAST, ONLY):
        end = np.minimum(end, 0)
    moves = Moves(steps.way, table.layers[steps.entry], ways.uses[steps.way], own, begin, end)
    return moves.chosen(np.flatnonzero((begin <= end).any(axis=0)))


def _steps(table: StageTable, ways: StageWays, limits: Limits, role: int) -> _Steps:
    h = limits.compute_seconds * (1 + 1e-9)
    allowed = ways.batches[:, None] * table.least_seconds[role][ways.kinds] <= h
    if role == MIDDLE:
        allowed[:, table.layers == 0] = False
    if limits.is_looped:
        # A virtual stage without layers is the first or the last one.
        allowed[:, table.layers < _FEWEST_OF_LOOP[role]] = False
    way, entry = np.nonzero(allowed)
    seconds = table.seconds(role, ways.kinds[way], entry)
    new = np.ones(seconds.shape, dtype=bool)
    new[:, 1:] = seconds[:, 1:] != seconds[:, :-1]
    row, column = np.nonzero(new)
    held = np.full(len(row), np.inf)
    same = row[1:] == row[:-1]
    held[:-1][same] = column[1:][same]
    way, entry, own = way[row], entry[row], seconds[row, column]
    batches, finite = ways.batches[way], np.where(np.isfinite(own), own, h)
    fits = (batches * finite <= h) & np.isfinite(own)
    fits &= np.maximum(batches - 1.0, 0.0) * finite + limits.reduce_seconds[ways.kinds[way], entry] <= h
    return _Steps(way[fits], entry[fits], own[fits], held[fits])


def _last_held(steps: _Steps, ways: StageWays, limits: Limits, cells: Cells, role: int) -> Integers:
    """[B, V]: the most cells with a stage at which it need not hold more micro-batches than it may."""
    h, low = limits.compute_seconds, cells.low[:, None]
    batches = ways.batches[steps.way]
    held = np.where(steps.held < batches, steps.held, np.inf)
    full = batches * cells.seconds
    if limits.schedules == "plain":
        # batches (c - slack) <= held (H - filled(c)), where filled falls to 0 at c = low - slack.
        some = np.where(np.isfinite(held), held + ROUNDING, 0.0)
        before = low - cells.slack
        short = (some * (h / cells.seconds - before) + batches * cells.slack) / (batches - some)
        last = np.where(short <= before, short, np.maximum(before, cells.slack + some * h / full))
        return _whole(np.where(np.isfinite(held), last, np.inf))
    workers = np.ceil(low * cells.seconds / limits.longest_seconds - ROUNDING)
    if limits.schedules == "split":
        last = np.broadcast_to(cells.slack + (held + ROUNDING) * h / full, (len(low), len(held)))
        is_few = (workers <= held) | (ways.is_one[steps.way] == 0)
        return _whole(np.where(is_few, last, -1.0))
    last = np.broadcast_to(cells.slack + (held + 1.0) * h / (0.5 * full), (len(low), len(held)))
    if limits.is_looped and role == MIDDLE:
        last = np.minimum(last, _last_looped(steps, held, workers[:, 0], limits, cells))
    return _whole(last)


def _last_looped(steps: _Steps, held: Floats, workers: Floats, limits: Limits, cells: Cells) -> Floats:
    """[B, V]: the same where workers have virtual stages; `held` [V], `workers` [B]. The layers of a stage
    are its table's entry."""
    rests = np.arange(1, int(workers.max(initial=1.0)) + 2)
    counts = np.zeros((len(workers), len(held)))
    shares = _loop_shares(steps.entry.astype(np.float64))
    for b, count in enumerate(workers.astype(int).tolist()):
        needed = np.full((len(rests), len(held)), np.inf)
        for v, share in shares.items():
            alive = loop_alive(v, count, rests.astype(np.float64), limits.num_micro_batches)
            needed = np.minimum(needed, np.floor(alive[:, None] * share))
        counts[b] = (needed <= held).sum(axis=0)
    last = np.floor((counts + ROUNDING) * limits.longest_seconds / cells.seconds)
    return np.where(counts == len(rests), np.inf, np.where(counts == 0, -1.0, last))


def _loop_shares(layers: Floats) -> dict[int, Floats]:
    """By virtual stages of a worker: the least part of its layers that one of them has; infinite where there
    are more virtual stages than layers: there are no such stages."""
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


def _whole(cells: Floats) -> Integers:
    """Whole cells; as good as all for infinity."""
    return np.floor(np.minimum(cells, 2.0**40) + 1e-9).astype(np.int64)
