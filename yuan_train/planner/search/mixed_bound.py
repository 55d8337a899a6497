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
from yuan_train.planner.search.equal_bound import Setting, excludes_hosts
from yuan_train.planner.search.mixtures import GRIDS, Stages, Work
from yuan_train.planner.search.pipeline_bound import PipelineBound
from yuan_train.planner.search.small_program import best_mixture
from yuan_train.planner.search.stage_moves import Schedules
from yuan_train.planner.search.stage_parts import Floats, Integers

MAX_PRICES = 12
"""Changes of prices for a number of pipelines."""
MAX_VALUES = 10
"""Values of a layer that are tried for a range of sequences."""
PIPELINES = (1, 2, 6, 1_000_000)
"""Numbers of pipelines are taken together up to each of these."""
WIDEST, NARROWEST = 1.6, 1.03
"""Ratio of the sequences of a range."""
LEVELS = 2
"""Grids of cells that the narrowest ranges are tried with."""
DUAL_PART = 0.12
"""Of the next prices, what the pipelines found so far say: the first ones say little."""


def excludes_mixed(
    setting: Setting,
    schedules: Schedules,
    seconds: float,
    memory: dict[object, Floats],
    work: Work,
    *,
    in_parts: bool,
) -> bool:
    """Whether no plan of two or more pipelines, under a class of schedules, takes `seconds` or less, however
    its pipelines differ; `in_parts`: by their number and by what hosts step, if not at once."""
    allowed, most = setting.options.pipelines, _most_pipelines(setting)

    def excluded(first: int, last: int) -> bool:
        last = min(last, most)
        if first > last or (allowed is not None and not any(first <= n <= last for n in allowed)):
            return True

        def excludes(low: float, high: float) -> bool:
            return _excludes_counts(setting, schedules, seconds, (first, last), (low, high), memory, work)

        return excludes_hosts(setting, excludes, in_parts=in_parts)

    return excluded(2, most) or (
        in_parts and all(excluded(a + 1, b) for a, b in itertools.pairwise(PIPELINES))
    )


def _most_pipelines(setting: Setting) -> int:
    """Each pipeline holds all weights and gradients."""
    problem = setting.costs.problem
    state = STATE_BYTES[problem.precision]
    layers, trained = problem.model.unit_parameters[1:-1], problem.model.trained_unit_parameters[1:-1]
    num_bytes = sum(layers) * state.parameters + sum(trained) * state.gradients
    if problem.profile is not None:
        return min(len(setting.cards), problem.global_batch_size)
    memory = sum(problem.usable_bytes(card.type) for card in setting.cards)
    return max(1, min(len(setting.cards), problem.global_batch_size, int(memory / num_bytes)))


def _excludes_counts(
    setting: Setting,
    schedules: Schedules,
    seconds: float,
    counts: tuple[int, int],
    host: tuple[float, float],
    memory: dict[object, Floats],
    work: Work,
) -> bool:
    """The same for these numbers of pipelines, and a range of what the hosts step."""
    compute = seconds - max(setting.update_seconds, host[0])
    if compute <= 0:
        return True
    share = 0.0 if setting.scope.uneven_shares else 1.0 / counts[1]
    columns = _Columns(setting, schedules, compute, share, host[1], work)
    key = (schedules, counts, host)
    numbers = setting.card_limits.most
    prices = memory.get(key)
    if prices is None:
        prices = columns.densities()
        prices = np.maximum(prices, 1e-9 * max(prices.max(), 1e-9))
    best, most = prices, -math.inf
    found: list[tuple[float, Floats]] = []
    is_dual = False
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
        part = sequences / setting.batch
        is_new = not any(part == other and (cards == own).all() for other, own in found)
        if is_dual and not is_new:
            return False
        found.append((part, cards))
        done, dual = best_mixture(
            np.array([part for part, _ in found]),
            np.array([cards for _, cards in found]),
            numbers,
            limited=False,
        )
        if done >= 1.0:
            # These pipelines, mixed, do the whole batch on the cards that there are.
            return False
        dual, is_dual = dual / max(float(dual @ numbers), 1e-300), not is_new
        prices = dual if is_dual else DUAL_PART * dual + (1 - DUAL_PART) * best
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
    finer: dict[tuple[int, int], PipelineBound] = field(default_factory=dict[tuple[int, int], PipelineBound])
    """Of one bucket of another bound, by its id."""
    known_stages: dict[tuple[int, int], tuple[Stages, Floats]] = field(
        default_factory=dict[tuple[int, int], tuple[Stages, Floats]]
    )
    pending: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Ranges that gave a column, which are tried first."""

    def stages(self, size: int, begin: int) -> tuple[Stages, Floats]:
        """The stages of pipelines with so many sequences or more; the limits of cards [N', R] that each kind
        of stage takes for a layer, at least."""
        if (size, begin) not in self.known_stages:
            table = self.setting.table(size, self.owner_share, self.host_seconds, self.work)
            limits = self.setting.limits(
                table,
                size,
                self.schedules,
                compute_seconds=self.compute_seconds,
                num_micro_batches=-(-begin // size),
                most_cards=len(self.setting.cards),
                owners=2,
            )
            setting = self.setting
            stages = Stages(table, setting.kinds, setting.ways(limits), limits, setting.card_limits)
            layers = stages.most_layers()
            self.known_stages[size, begin] = stages, stages.ways.uses[layers > 0] / layers[layers > 0, None]
        return self.known_stages[size, begin]

    def densities(self) -> Floats:
        """[R]: the most of all layers of the whole batch that a card of each type has, with half of the batch
        or less."""
        batch, own = self.setting.batch, list[Floats]()
        for size in self.setting.scope.sizes:
            begin = max(batch // 2, 1)
            while begin >= size:
                own.append(self.stages(size, begin)[0].densities() * (begin / batch))
                begin //= 4
        return np.max(own, axis=0)

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
            is_wide = end > begin * NARROWEST
            found = self._cheaper(size, begin, end / self.setting.batch, prices, at_once=is_wide)
            if found is None:
                continue
            if is_wide:
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

    def _cheaper(
        self, size: int, begin: int, price: float, prices: Floats, *, at_once: bool
    ) -> Floats | None:
        """The cards of a pipeline of so many sequences that may cost `price` or less, if any does; with
        `at_once`, as far as one value of a layer tells."""
        needed = self.setting.num_layers * (1 - 1e-9)
        stages, each = self.stages(size, begin)
        if not len(each) or float((each @ prices).min()) * needed > price:
            return None
        if (size, begin) not in self.known:
            self.known[size, begin] = self._bound(stages, 0)
        bound = self.known[size, begin]
        buckets = np.arange(len(bound.low))
        if at_once:
            return self._cheaper_bucket(bound, buckets, 1.02 * price / needed, price, prices)[0]
        return self._cheaper_of(stages, bound, 0, buckets, price, prices)

    def _bound(
        self, stages: Stages, level: int, span: tuple[float, float] = (0.0, math.inf)
    ) -> PipelineBound:
        found = stages.bound(GRIDS[level], span)
        self.work.left -= found.work
        return found

    def _cheaper_of(
        self,
        stages: Stages,
        bound: PipelineBound,
        level: int,
        buckets: Integers,
        price: float,
        prices: Floats,
    ) -> Floats | None:
        """The same of buckets of a grid."""
        needed = self.setting.num_layers * (1 - 1e-9)
        parts, value = [buckets], 1.02 * price / needed
        while parts:
            buckets = parts.pop()
            if not len(buckets):
                continue
            uses, hardest, left, value = self._cheaper_bucket(bound, buckets, value, price, prices)
            if uses is None:
                continue
            if len(left) > 1:
                # No value of a layer excludes them all: each has its own.
                parts += [left[left != hardest], np.array([hardest])]
                continue
            if level + 1 == LEVELS or self.work.is_over:
                return uses
            # In finer cells it may be none.
            key = (id(bound), int(left[0]))
            if key not in self.finer:
                self.finer[key] = self._bound(stages, level + 1, bound.span(left))
            finer = self.finer[key]
            uses = self._cheaper_of(stages, finer, level + 1, np.arange(len(finer.low)), price, prices)
            if uses is not None:
                return uses
        return None

    def _cheaper_bucket(
        self, bound: PipelineBound, buckets: Integers, value: float, price: float, prices: Floats
    ) -> tuple[Floats | None, int, Integers, float]:
        """(cards of such a pipeline in some of these buckets of W, or None; the bucket; those not excluded;
        the value of a layer that was tried last)"""
        needed, low, high = self.setting.num_layers * (1 - 1e-9), 0.0, math.inf
        uses, hardest = None, 0
        for _ in range(MAX_VALUES):
            done = bound.work
            found = bound.priced(prices, value, buckets)
            self.work.left -= bound.work - done
            over = found.worth - value * needed + price
            left = over >= -1e-12
            if not left.any():
                return None, hardest, buckets[left], value
            i = int(over.argmax())
            layers, uses = found.pipeline(i)
            hardest, buckets, slope = int(buckets[i]), buckets[left], layers - needed
            if abs(slope) < 1e-6:
                break
            # What is over is convex: beyond the zeros of its tangents no value excludes these at once.
            zero, next_value = (value - (float(over[i]) + more) / slope for more in (0.0, 1e-3 * price))
            low, high = (max(low, zero), high) if slope < 0 else (low, min(high, zero))
            if low >= high:
                break
            value = next_value if low < next_value < high else (low + high) / 2
        return uses, hardest, buckets, value
