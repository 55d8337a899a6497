"""Seconds that no plan of any pipelines can beat, equal or not.

Pipelines are columns of a linear program: a pipeline of y sequences takes n_t cards of type t; together they
take at most N_t, and must reach the batch G. With prices p of the cards, no plan ends within T if every
pipeline that does is too dear:

    sum_t p_t n_t > y / G * sum_t p_t N_t

The cheapest pipeline of y sequences is bounded from below for a range of y at once, by its fewest; ranges
that are not excluded are halved. What remains at last raises the prices of its cards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.search.equal_bound import (
    COARSE,
    Memory,
    Setting,
    Work,
    densities,
    excludes_hosts,
)
from yuan_train.planner.search.pipeline_bound import Limits, PipelineBound, Schedules
from yuan_train.planner.search.small_program import best_mixture
from yuan_train.planner.search.stage_parts import Floats
from yuan_train.planner.search.stage_table import StageTable

MAX_PRICES = 12
"""Changes of prices for a number of pipelines."""
MAX_VALUES = 10
"""Values of a layer that are tried for a range of sequences."""
PIPELINES = (1, 2, 6, 1_000_000)
"""Numbers of pipelines are taken together up to each of these."""
WIDEST, NARROWEST = 1.6, 1.03
"""Ratio of the sequences of a range."""


def excludes_mixed(
    setting: Setting, schedules: Schedules, seconds: float, memory: Memory, work: Work
) -> bool:
    """Whether no plan of two or more pipelines, under a class of schedules, takes `seconds` or less, however
    its pipelines differ."""
    allowed, most = setting.options.pipelines, _most_pipelines(setting)

    def excluded(first: int, last: int) -> bool:
        last = min(last, most)
        if first > last or (allowed is not None and not any(first <= n <= last for n in allowed)):
            return True
        return excludes_hosts(
            setting,
            lambda low, high: _excludes_counts(
                setting, schedules, seconds, (first, last), (low, high), memory, work
            ),
        )

    return excluded(2, most) or all(excluded(a + 1, b) for a, b in itertools.pairwise(PIPELINES))


def _most_pipelines(setting: Setting) -> int:
    """Each pipeline holds all weights and gradients."""
    problem = setting.costs.problem
    state = STATE_BYTES[problem.precision]
    num_bytes = sum(problem.model.unit_parameters[1:-1]) * (state.parameters + state.gradients)
    if problem.profile is not None:
        return min(len(setting.cards), problem.global_batch_size)
    memory = sum(problem.cluster.device_type(card.type).memory for card in setting.cards)
    return max(1, min(len(setting.cards), problem.global_batch_size, int(memory / num_bytes)))


def _excludes_counts(
    setting: Setting,
    schedules: Schedules,
    seconds: float,
    counts: tuple[int, int],
    host: tuple[float, float],
    memory: Memory,
    work: Work,
) -> bool:
    """The same for these numbers of pipelines, and a range of what the hosts step."""
    compute = seconds - max(setting.update_seconds, host[0])
    if compute <= 0:
        return True
    share = 0.0 if setting.scope.uneven_shares else 1.0 / counts[1]
    columns = _Columns(setting, schedules, compute, share, host[1], work)
    key = (schedules, counts, host)
    numbers = np.maximum(setting.numbers, 1e-9)
    prices = memory.get(key)
    if prices is None:
        prices = columns.densities()
        prices = np.maximum(prices, 1e-9 * max(prices.max(), 1e-9))
    best, most = prices, -math.inf
    found: list[tuple[float, Floats]] = []
    for _ in range(MAX_PRICES):
        prices = prices / float(prices @ numbers)
        column = columns.cheapest(prices)
        if column is None:
            memory[key] = prices
            return True
        sequences, cards = column
        if cards is None or work.is_over:
            return False
        spare = float(prices @ cards) - sequences / setting.batch
        if spare > most:
            most, best = spare, prices
        found.append((sequences / setting.batch, cards))
        done, dual = best_mixture(
            np.array([part for part, _ in found]),
            np.array([cards for _, cards in found]),
            numbers,
            limited=False,
        )
        if done >= 1.0:
            # These pipelines, mixed, do the whole batch on the cards that there are.
            return False
        prices = (dual / max(float(dual @ numbers), 1e-300) + best) / 2
    return False


@dataclass(eq=False)
class _Columns:
    """Pipelines of a time, by the sequences that they have at least."""

    setting: Setting
    schedules: Schedules
    compute_seconds: float
    owner_share: float
    host_seconds: float
    work: Work
    known: dict[tuple[int, int], PipelineBound] = field(default_factory=dict[tuple[int, int], PipelineBound])
    most_layers: dict[tuple[int, int], Floats] = field(default_factory=dict[tuple[int, int], Floats])
    pending: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Ranges that gave a column, which are tried first."""

    def limits(self, size: int, begin: int) -> tuple[StageTable, Limits]:
        table = self.setting.table(size, self.owner_share, self.host_seconds, self.work)
        limits = self.setting.limits(
            table,
            size,
            self.schedules,
            compute_seconds=self.compute_seconds,
            num_micro_batches=-(-begin // size),
            most_cards=len(self.setting.cards),
            owners=2,
            grid=COARSE,
        )
        return table, limits

    def densities(self) -> Floats:
        """[T]: the most layers that a card of each type holds with half of the batch."""
        begin = max(1, self.setting.batch // 2)
        return np.max([self.dense(size, begin) for size in self.setting.scope.sizes], axis=0)

    def dense(self, size: int, begin: int) -> Floats:
        """[T]: the most layers that a card of each type may hold with so many sequences."""
        if (size, begin) not in self.most_layers:
            self.most_layers[size, begin] = densities(self.setting, *self.limits(size, begin))
        return self.most_layers[size, begin]

    def cheapest(self, prices: Floats) -> tuple[float, Floats | None] | None:
        """(sequences, cards) of a pipeline that may be cheaper than its share of the batch; None if there is
        none."""
        ranges = [(size, *ends) for size in self.setting.scope.sizes for ends in self._ranges()]
        ranges += self.pending
        while ranges:
            if self.work.is_over:
                return float(self.setting.batch), None
            size, begin, end = ranges.pop()
            if end < size:
                continue
            begin = max(begin, size)
            found = self._cheaper(size, begin, end / self.setting.batch, prices)
            if found is None:
                continue
            if end > begin * NARROWEST and end > begin:
                middle = (begin + end) // 2
                ranges += [(size, begin, middle), (size, middle + 1, end)]
                continue
            if (size, begin, end) not in self.pending:
                self.pending.append((size, begin, end))
            return float(end), found
        return None

    def _ranges(self) -> Iterator[tuple[int, int]]:
        end = self.setting.batch
        while end >= 1:
            begin = min(max(int(end / WIDEST), 0) + 1, end)
            yield begin, end
            end = begin - 1

    def _cheaper(self, size: int, begin: int, price: float, prices: Floats) -> Floats | None:
        """The cards of a pipeline of so many sequences that may cost `price` or less, if any does."""
        needed = self.setting.num_layers * (1 - 1e-9)
        most = self.dense(size, begin)
        if float((prices / np.maximum(most, 1e-300)).min()) * needed > price or not most.any():
            return None
        if (size, begin) not in self.known:
            table, limits = self.limits(size, begin)
            bound = PipelineBound(table, self.setting.kinds, limits, len(self.setting.numbers))
            self.known[size, begin] = bound
            self.work.left -= bound.work
        bound = self.known[size, begin]
        buckets = np.arange(len(bound.low))
        value = np.full(len(buckets), 1.02 * price / needed)
        low, high = np.zeros(len(buckets)), np.full(len(buckets), np.inf)
        last = None
        for _ in range(MAX_VALUES):
            done = bound.work
            least = value * needed - price - 1e-12
            best = bound.best(np.tile(prices, (len(buckets), 1)), value, buckets, least)
            self.work.left -= bound.work - done
            over = best.worth - value * needed + price
            left = best.worth >= least
            if not left.any():
                return None
            buckets, value, low, high = buckets[left], value[left], low[left], high[left]
            over, slope, cards = over[left], best.layers[left] - needed, best.cards[left]
            low, high = np.where(slope < 0, value, low), np.where(slope < 0, high, value)
            value = value - (over + 1e-3 * price) / np.where(np.abs(slope) < 1e-6, 1e-300, slope)
            hopeless = (value <= low) | (value >= high) | (np.abs(slope) < 1e-6)
            if hopeless.any():
                return cards[int(hopeless.argmax())]
            last = cards[0]
        return last
