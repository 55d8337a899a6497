"""Seconds that no plan of any pipelines can beat, equal or not.

Pipelines are columns of a linear program: a pipeline of y sequences takes n_t cards of type t; together they
take at most N_t, and must reach the batch G. With prices p of the cards, no plan ends within T if every
pipeline that does is too dear:

    sum_t p_t n_t > y / G * sum_t p_t N_t

The cheapest pipeline of y sequences is bounded from below for a range of y at once, by its fewest; ranges
that are not excluded are halved. What remains at last raises the prices of its cards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from yuan_train.planner.bounds.equal_bound import (
    Memory,
    Setting,
    Work,
    densities,
    excludes,
    host_ranges,
    reduce_seconds,
)
from yuan_train.planner.bounds.pipeline_bound import Limits, PipelineBound
from yuan_train.planner.bounds.stage_table import Floats, StageTable

MAX_PRICES = 12
"""Changes of prices for a number of pipelines."""
MAX_VALUES = 10
"""Values of a layer that are tried for a range of sequences."""
WIDEST, NARROWEST = 1.25, 1.02
"""Ratio of the sequences of a range."""


def excludes_mixed(setting: Setting, seconds: float, memory: Memory, work: Work) -> bool:
    """Whether no plan takes `seconds` or less, however its pipelines differ."""
    most_pipelines = min(len(setting.cards), setting.costs.problem.global_batch_size)
    counts = setting.options.pipelines or (most_pipelines,)
    first, least = 1, 1
    while first <= min(max(counts), most_pipelines):
        last = min(max(2 * least - 1, 1), most_pipelines)
        for low, high in host_ranges(setting):
            compute = seconds - max(setting.update_seconds, low)
            if compute > 0 and not _excludes_counts(setting, compute, first, last, high, memory, work):
                return False
        least *= 2
        first = last + 1
    return True


def _excludes_counts(
    setting: Setting, compute: float, first: int, last: int, host: float, memory: Memory, work: Work
) -> bool:
    """The same for `first` to `last` pipelines, and a range of what the hosts step."""
    table = setting.table(1.0 / last, host)
    limits = Limits(
        compute_seconds=compute,
        num_micro_batches=setting.batch,
        schedules=setting.scope.together,
        most_cards=len(setting.cards),
        reduce_seconds=reduce_seconds(setting, table, min(first, 2)),
    )
    if first == last == 1:
        return excludes(setting, table, limits, setting.numbers, memory, ("one", host), work)
    columns = _Columns(setting, table, limits, work)
    key = (first, last, host)
    scale = 1.0 / np.maximum(setting.numbers, 1.0)
    prices = memory.get(key)
    if prices is None:
        prices = densities(setting, table, limits)
        prices = np.maximum(prices, 1e-9 * max(prices.max(), 1e-9))
    for _ in range(MAX_PRICES):
        prices = prices / float(prices @ setting.numbers)
        found = columns.violation(prices)
        if found is None:
            memory[key] = prices
            return True
        sequences, cards = found
        if cards is None or work.is_over:
            return False
        lack = sequences / setting.batch * setting.numbers - cards
        violated = float(prices @ lack)
        step = lack * scale * scale
        length = float(lack @ step)
        if violated <= 0 or length <= 0:
            return False
        prices = np.maximum(prices - 1.5 * violated / length * step, 0.0)
    return False


@dataclass(eq=False)
class _Columns:
    """Pipelines of a time, by the micro-batches that they have at least."""

    setting: Setting
    table: StageTable
    limits: Limits
    work: Work
    known: dict[int, PipelineBound] = field(default_factory=dict[int, PipelineBound])

    def violation(self, prices: Floats) -> tuple[float, Floats | None] | None:
        """(sequences, cards) of a pipeline that may be cheaper than its share of the batch, in micro-batches
        of the smallest size; None if there is none."""
        ranges: list[tuple[int, int]] = []
        end = self.setting.batch
        while end >= 1:
            begin = max(int(end / WIDEST), 0) + 1
            begin = min(begin, end)
            ranges.append((begin, end))
            end = begin - 1
        while ranges:
            begin, end = ranges.pop()
            found = self._cheaper(begin, end / self.setting.batch, prices)
            if found is None:
                continue
            if end > begin * NARROWEST and end > begin:
                middle = (begin + end) // 2
                ranges += [(begin, middle), (middle + 1, end)]
                continue
            return float(end), found
        return None

    def _cheaper(self, begin: int, price: float, prices: Floats) -> Floats | None:
        """The cards of a pipeline of so many micro-batches that may cost `price` or less; None if none does."""
        if begin not in self.known:
            limits = Limits(
                compute_seconds=self.limits.compute_seconds,
                num_micro_batches=begin,
                schedules=self.limits.schedules,
                most_cards=self.limits.most_cards,
                reduce_seconds=self.limits.reduce_seconds,
            )
            self.known[begin] = PipelineBound(
                self.table, self.setting.kinds, limits, len(self.setting.numbers)
            )
            self.work.left -= 4 * self.known[begin].work
        bound, needed = self.known[begin], self.setting.num_layers * (1 - 1e-9)
        buckets = np.arange(len(bound.low))
        value = np.full(len(buckets), 1.02 * price / needed)
        low, high = np.zeros(len(buckets)), np.full(len(buckets), np.inf)
        for _ in range(MAX_VALUES):
            done = bound.work
            best = bound.best(np.tile(prices, (len(buckets), 1)), value, buckets)
            self.work.left -= bound.work - done
            over = best.worth - value * needed + price
            left = over >= -1e-12
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
