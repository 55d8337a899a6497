"""Lower bounds of the step that a reader may trust: over plans of equal pipelines, and over all plans.

Both begin at a bound of the work alone and go up towards the plan that was found, by bisection: a time that
no plan reaches is excluded. The work of this is limited by a count, not by a clock, so that the same input
gives the same bound; what is excluded by then is the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.config.run import ScheduleName
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.search.equal_bound import (
    CLASSES,
    Family,
    Scope,
    equal_families,
    excludes_equal,
    make_setting,
)
from yuan_train.planner.search.mixed_bound import excludes_mixed
from yuan_train.planner.search.mixtures import Memory, Work
from yuan_train.planner.search.shapes import Options
from yuan_train.planner.search.stage_moves import Schedules
from yuan_train.planner.search.stage_parts import Floats

PRECISION, MIXED_PRECISION = 0.003, 0.01
"""Bisection ends at these ratios less one."""


@dataclass(frozen=True)
class ScheduleBound:
    """Seconds that no plan of the scope under these schedules can beat."""

    schedules: tuple[ScheduleName, ...]
    equal_seconds: float
    any_seconds: float


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Seconds that no plan of the scope can beat."""

    equal_seconds: float
    """Among plans of equal pipelines: as many cards of each type in each, in groups as wide, and as large a
    share of the batch."""
    any_seconds: float
    """Among all plans; at most the above."""
    scope: Scope
    under: tuple[ScheduleBound, ...] = ()
    """The same of each kind of schedule alone."""
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
    mixed_work: float,
    stopped: Callable[[], bool],
) -> Bounds:
    """The bounds, between one that is known and a plan's seconds. Of each kind of schedule, equal pipelines
    get up to `work` (see `equal_bound.Work`), others `mixed_work`; less once `stopped()`."""
    setting = make_setting(costs, cards, options, scope, best_seconds)
    memory: Memory = {}
    prices: dict[object, Floats] = {}

    def equal(family: Family) -> Excludes:
        return lambda seconds, budget: (
            excludes_equal(setting, family, seconds, memory, budget) and not budget.is_over
        )

    def mixed(schedules: Schedules, *, in_parts: bool) -> Excludes:
        return lambda seconds, budget: (
            excludes_mixed(setting, schedules, seconds, prices, budget, in_parts=in_parts)
            and not budget.is_over
        )

    under: list[ScheduleBound] = []
    for schedules in scope.classes:
        families = {
            family: least_seconds for family in equal_families(setting) if family.schedules == schedules
        }
        tests = {family: equal(family) for family in families}
        _raise(families, tests, best_seconds, PRECISION, Work(work), stopped)
        equal_seconds = min([best_seconds, *families.values()])
        # A plan has one pipeline, or several that may differ.
        alone = [seconds for family, seconds in families.items() if family.count == 1]
        high = min([equal_seconds, *alone])
        any_seconds, budget = least_seconds, Work(mixed_work)
        # What fails at once takes the most work in parts: that comes last.
        for in_parts in (False, True):
            excludes = mixed(schedules, in_parts=in_parts)
            any_seconds = _climb(any_seconds, high, excludes, 1 / 3, MIXED_PRECISION, budget, stopped)
        names: tuple[ScheduleName, ...] = tuple(
            name for name in scope.schedules if CLASSES[name] == schedules
        )
        under.append(ScheduleBound(names, equal_seconds, any_seconds))
    return Bounds(
        equal_seconds=min(bound.equal_seconds for bound in under),
        any_seconds=min(bound.any_seconds for bound in under),
        scope=scope,
        under=tuple(under),
    )


Excludes = Callable[[float, Work], bool]


def _raise(
    known: dict[Family, float],
    excludes: Mapping[Family, Excludes],
    high: float,
    precision: float,
    work: Work,
    stopped: Callable[[], bool],
) -> None:
    """Raises the least of the `known` bounds of families towards `high`, by bisection. Of families that are
    above a time already, no more is asked."""
    order = list(known)

    def all_excluded(seconds: float, budget: Work) -> bool:
        for family in list(order):
            if known[family] >= seconds:
                continue
            if budget.is_over or stopped() or not excludes[family](seconds, budget):
                # What is hardest to exclude comes first next time.
                order.remove(family)
                order.insert(0, family)
                return False
            known[family] = seconds
        return True

    least = min(known.values(), default=high)
    _climb(least, high, all_excluded, 1 / 2, precision, work, stopped)


def _climb(
    low: float,
    high: float,
    excludes: Excludes,
    share: float,
    precision: float,
    work: Work,
    stopped: Callable[[], bool],
) -> float:
    """The largest time up to `high` that is found to be excluded; `low` is. Each is tried at a `share` of
    what is left, by ratio: the longer a time, the more work it takes."""
    while high > low * (1 + precision) and not work.is_over and not stopped():
        middle = low ** (1 - share) * high**share
        if excludes(middle, work):
            low = middle
        else:
            high = middle
    return low
