"""Whether any mixture of pipelines of some cards holds the model within a time.

With prices p of the limits of cards, L layers and N_r cards of each limit for a pipeline, there is none if

    max over pipelines (layers - sum_r p_r cards_r) + sum_r p_r N_r < L

for any p >= 0. The prices are those of the best mixture of the pipelines found so far (column generation);
once a mixture holds all layers no prices can exclude the time. Pipelines are told apart by their W
(`pipeline_bound`), coarsely at first: where that does not exclude them, in finer and finer cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from yuan_train.planner.search.card_limits import CardLimits
from yuan_train.planner.search.pipeline_bound import Grid, PipelineBound
from yuan_train.planner.search.small_program import best_mixture
from yuan_train.planner.search.stage_moves import Limits, StageWays
from yuan_train.planner.search.stage_parts import Floats, Integers, Kind
from yuan_train.planner.search.stage_table import StageTable

GRIDS = (Grid(4, 1.25), Grid(8, 1.1), Grid(16, 1.05))
MAX_STEPS = 30
"""Changes of prices for some neighbouring buckets."""


@dataclass
class Work:
    """What is left of a budget, in units of about 10 ns: a count, not a clock."""

    left: float

    @property
    def is_over(self) -> bool:
        return self.left <= 0


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of a family of pipelines."""

    table: StageTable
    kinds: Sequence[Kind]
    ways: StageWays
    limits: Limits
    cards: CardLimits

    @property
    def num_layers(self) -> float:
        """That a pipeline needs, at least."""
        return float(self.table.layers.max()) * (1 - 1e-9)

    def bound(self, grid: Grid, span: tuple[float, float] = (0.0, math.inf)) -> PipelineBound:
        """Of pipelines whose W is in a span of seconds."""
        return PipelineBound(self.table, self.kinds, self.ways, self.limits, grid, span=span)

    def most_layers(self) -> Floats:
        """[N']: the most layers that a stage may hold."""
        least = self.ways.batches[:, None] * self.table.least_seconds.min(axis=0)[self.ways.kinds]
        fits = least <= self.limits.compute_seconds * (1 + 1e-9)
        return np.where(fits, self.table.layers, 0.0).max(axis=1)

    def densities(self) -> Floats:
        """[R]: the most layers that a card of each type may hold, at the limit of all its cards."""
        used = np.where(self.ways.uses > 0, self.ways.uses, np.inf)
        most = (self.most_layers()[:, None] / used).max(axis=0)
        return self.cards.of_types(self.cards.at_types(most))


Memory = dict[object, Floats]
"""Prices of earlier times, by what they were for: starts for the next ones."""


def excludes_mixtures(stages: Stages, numbers: Floats, memory: Memory, key: object, work: Work) -> bool:
    """Whether no pipeline of these cards holds the model."""
    density = stages.densities()
    if density @ numbers < stages.num_layers:
        return True
    # At these, cards are worth as much as the model.
    start = np.maximum(density, 1e-12) * (stages.num_layers / float(density @ numbers))
    search = _Search(stages, numbers, work, memory.get(key, start))
    result = search.excludes(0, (0.0, math.inf))
    memory[key] = search.prices
    return result


@dataclass(eq=False)
class _Search:
    """Goes through spans of W, with finer and finer grids."""

    stages: Stages
    numbers: Floats
    work: Work
    prices: Floats
    """[R]: to begin with."""

    def excludes(self, level: int, span: tuple[float, float]) -> bool:
        """Whether there is no mixture of pipelines with W in the span."""
        bound = self.stages.bound(GRIDS[level], span)
        self.work.left -= bound.work
        if not len(bound.low):
            return True
        return self._excludes_buckets(
            level, bound, np.arange(len(bound.low)), _Master(self.numbers, self.prices)
        )

    def _excludes_buckets(self, level: int, bound: PipelineBound, buckets: Integers, master: _Master) -> bool:
        """Whether there is none in these buckets: at the same prices, or in parts."""
        needed = self.stages.num_layers
        hardest = 0
        for _ in range(MAX_STEPS):
            least = needed - float(master.prices @ self.numbers)
            done = bound.work
            found = bound.priced(master.prices, 1.0, buckets)
            self.work.left -= bound.work - done
            left = found.worth >= least
            if not left.any():
                self.prices = master.prices
                return True
            if self.work.is_over:
                return False
            i = int(found.worth.argmax())
            hardest, buckets = int(buckets[i]), buckets[left]
            if master.add(hardest, float(found.worth[i]), *found.pipeline(i), buckets) >= needed:
                break
        self.prices = master.prices
        # What is hardest to exclude comes first: it ends the search soonest.
        if len(buckets) > 1:
            at = int(buckets.searchsorted(hardest))
            parts = (buckets[at : at + 1], buckets[:at], buckets[at + 1 :])
            return all(
                self._excludes_buckets(level, bound, part, master.of(part)) for part in parts if len(part)
            )
        return level + 1 < len(GRIDS) and self.excludes(level + 1, bound.span(buckets))


@dataclass(eq=False)
class _Master:
    """The pipelines that were found so far, and the prices to try next."""

    numbers: Floats
    prices: Floats
    columns: list[tuple[int, float, Floats]] = field(default_factory=list[tuple[int, float, Floats]])
    """(bucket, layers, uses)"""
    lowest: float = math.inf
    best: Floats | None = None
    """The prices that bound the layers lowest."""

    def of(self, buckets: Integers) -> _Master:
        """Of some of the buckets."""
        own = [column for column in self.columns if column[0] in buckets]
        return replace(self, columns=own, prices=self.prices if self.best is None else self.best)

    def add(self, bucket: int, worth: float, layers: float, uses: Floats, left: Integers) -> float:
        """With one more pipeline, worth so much at these prices; the most layers of any mixture of those in
        the buckets that are left."""
        total = worth + float(self.prices @ self.numbers)
        if total < self.lowest:
            self.lowest, self.best = total, self.prices
        self.columns = [column for column in self.columns if column[0] in left]
        self.columns.append((bucket, layers, uses))
        values = np.array([column[1] for column in self.columns])
        all_uses = np.array([column[2] for column in self.columns])
        most, prices = best_mixture(values, all_uses, self.numbers)
        # Between the two, or the prices swing from one end to the other.
        near = prices if self.best is None else (prices + self.best) / 2
        self.prices = near if total <= self.lowest else (prices + 3 * near) / 4
        return most
