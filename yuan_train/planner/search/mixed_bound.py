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
from dataclasses import dataclass, field, replace

import numpy as np

from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.search.equal_bound import (
    COARSE,
    Memory,
    Setting,
    Work,
    densities,
    excludes,
    excludes_hosts,
    reduce_seconds,
)
from yuan_train.planner.search.pipeline_bound import Limits, PipelineBound
from yuan_train.planner.search.stage_table import Floats, StageTable

MAX_PRICES = 12
"""Changes of prices for a number of pipelines."""
MAX_VALUES = 10
"""Values of a layer that are tried for a range of sequences."""
PIPELINES = (1, 2, 6, 1_000_000)
"""Numbers of pipelines are taken together up to each of these."""
WIDEST, NARROWEST = 1.6, 1.03
"""Ratio of the sequences of a range."""


def excludes_mixed(setting: Setting, seconds: float, memory: Memory, work: Work) -> bool:
    """Whether no plan takes `seconds` or less, however its pipelines differ."""
    allowed, most = setting.options.pipelines, _most_pipelines(setting)

    def excluded(first: int, last: int) -> bool:
        last = min(last, most)
        if first > last or (allowed is not None and not any(first <= n <= last for n in allowed)):
            return True
        return excludes_hosts(
            setting,
            lambda low, high: _excludes_counts(setting, seconds, (first, last), (low, high), memory, work),
        )

    if not excluded(1, 1):
        return False
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
    uneven = setting.scope.uneven_shares and counts[1] > 1
    table = setting.table(0.0 if uneven else 1.0 / counts[1], host[1])
    limits = Limits(
        compute_seconds=compute,
        num_micro_batches=setting.batch,
        schedules=setting.scope.together,
        largest_batch=setting.scope.largest_batch,
        most_cards=len(setting.cards),
        reduce_seconds=reduce_seconds(setting, table, min(counts[0], 2)),
        cells=COARSE[0],
        growth=COARSE[1],
    )
    key = (counts, host)
    if counts == (1, 1):
        return excludes(setting, table, limits, setting.numbers, memory, key, work)
    columns = _Columns(setting, table, limits, work)
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
            if self.work.is_over:
                return float(self.setting.batch), None
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
        """The cards of a pipeline of so many micro-batches that may cost `price` or less, if any does."""
        if begin not in self.known:
            limits = replace(self.limits, num_micro_batches=begin)
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
