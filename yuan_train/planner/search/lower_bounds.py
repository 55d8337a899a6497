"""Lower bounds of the step that a reader may trust: over plans of equal pipelines, and over all plans.

Both begin at a bound of the work alone and go up towards the plan that was found, by bisection: a time that
no plan reaches is excluded. The work of this is limited by a count, not by a clock, so that the same input
gives the same bound; what is excluded by then is the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.search.equal_bound import (
    COARSE,
    FINE,
    Grid,
    Memory,
    Scope,
    Work,
    equal_counts,
    excludes_equal,
    make_setting,
)
from yuan_train.planner.search.mixed_bound import excludes_mixed
from yuan_train.planner.search.shapes import Options

COARSE_PRECISION, PRECISION, MIXED_PRECISION = 0.02, 0.003, 0.01
"""Bisection ends at these ratios less one."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Seconds that no plan of the scope can beat."""

    equal_seconds: float
    """Among plans of equal pipelines: as many cards of each type in each, and as large a share of the
    batch."""
    any_seconds: float
    """Among all plans; at most the above."""
    scope: Scope
    knows_memory: bool = True
    """False: it is a bound of the work alone."""


def lower_bounds(
    costs: Costs,
    cards: Sequence[Card],
    options: Options,
    scope: Scope,
    *,
    least_seconds: float,
    best_seconds: float,
    work: float,
    stopped: Callable[[], bool],
) -> Bounds:
    """The bounds, between one that is known and a plan's seconds; `work` cells of dynamic programming for
    the first, twice as many for the second, fewer once `stopped()`."""
    setting = make_setting(costs, cards, options, scope, best_seconds)
    counts = list(equal_counts(setting))
    memory: Memory = {}

    def equal(seconds: float, budget: Work, grid: Grid) -> bool:
        for count in list(counts):
            if budget.is_over or not excludes_equal(setting, count, seconds, memory, budget, grid=grid):
                # What is hardest to exclude comes first next time.
                counts.remove(count)
                counts.insert(0, count)
                return False
        return True

    def mixed(seconds: float, budget: Work) -> bool:
        return excludes_mixed(setting, seconds, memory, budget) and not budget.is_over

    budget, high = Work(work), best_seconds
    equal_seconds = least_seconds
    for grid, precision in ((COARSE, COARSE_PRECISION), (FINE, PRECISION)):
        equal_seconds = _bisect(
            equal_seconds, high, lambda t, w, grid=grid: equal(t, w, grid), precision, 1 / 2, budget, stopped
        )
    any_seconds = _bisect(
        least_seconds, equal_seconds, mixed, MIXED_PRECISION, 1 / 3, Work(2 * work), stopped
    )
    return Bounds(equal_seconds=equal_seconds, any_seconds=any_seconds, scope=scope)


def _bisect(
    low: float,
    high: float,
    excludes: Callable[[float, Work], bool],
    precision: float,
    share: float,
    work: Work,
    stopped: Callable[[], bool],
) -> float:
    """The largest time that is found to be excluded; `low` is. Each is tried at a `share` of what is left."""
    while high > low * (1 + precision) and not work.is_over and not stopped():
        middle = low ** (1 - share) * high**share
        if excludes(middle, work):
            low = middle
        else:
            high = middle
    return low
