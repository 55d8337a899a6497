"""The best cuts of one order of slots: exact dynamic programming over the units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from yuan_train.planner.solver.cost_tables import CostTables
from yuan_train.planner.solver.instance import Floats, Integers


def threshold_bounds(tables: CostTables, order: Sequence[int], *, limit: int = 24) -> list[tuple[int, ...]]:
    """Cuts of an order that minimise sum(stages + messages) under rising limits on the slowest stage.

    The step takes about sum + (m - 1) * slowest stage: the pipeline latency of Alpa (Zheng et al., 2022),
    which also enumerates limits of the slowest stage. For each limit t, dynamic programming finds the
    smallest sum; t rises from the smallest feasible value and stops where (m - 1) * t alone exceeds the best.
    At most `limit` values of t are tried. Exact for this objective if all values were tried; but the
    objective only selects cuts, which are then simulated. Empty if nothing fits.
    """
    m = tables.instance.num_micro_batches
    stages, edges = tables.stage_seconds(order), _round_trips(tables, order)
    rates = [1.0 / int(tables.instance.replicas[slot]) for slot in order]
    values = tables.periods(order)
    filled = _first_ends(tables, len(order))
    least = _smallest(values, lambda t: _can_fill(stages, rates, t, filled))
    if least is None or _minimal_sum(stages, edges, rates, float(values[least])) is None:
        least = _smallest(values, lambda t: _minimal_sum(stages, edges, rates, t) is not None)
    if least is None:
        return []
    found: dict[tuple[int, ...], None] = {}
    best = math.inf
    for t in _spread(values[least:], limit):
        if (m - 1) * t > best:
            break
        answer = _minimal_sum(stages, edges, rates, float(t))
        if answer is None:
            continue
        total, bounds = answer
        found[bounds] = None
        spans = zip(stages, rates, bounds, bounds[1:], strict=False)
        slowest = max(seconds[a, b] * rate for seconds, rate, a, b in spans)
        best = min(best, total + (m - 1) * slowest)
    return list(found)


def _spread(values: Floats, limit: int) -> Floats:
    """At most `limit` of the ascending values, denser at the start, where the best period usually is."""
    if len(values) <= limit:
        return values
    picks = np.unique((np.linspace(0, 1, limit) ** 2 * (len(values) - 1)).astype(int))
    return values[picks]


def _round_trips(tables: CostTables, order: Sequence[int]) -> list[Floats]:
    """Seconds of activation plus gradient over each edge, [U+1] by the unit after the cut."""
    forward_sends, backward_sends = tables.edge_seconds(order)
    return [a + b for a, b in zip(forward_sends, backward_sends, strict=True)]


def _smallest(values: Floats, feasible: Callable[[float], bool]) -> int | None:
    """Index of the smallest value for which a monotone test holds; None if none does."""
    if not len(values) or not feasible(float(values[-1])):
        return None
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if feasible(float(values[middle])):
            high = middle
        else:
            low = middle + 1
    return low


def _first_ends(tables: CostTables, depth: int) -> list[int]:
    """For each stage the first unit at which it may end: so many units with work are in it and before it."""
    working = np.concatenate(([0], tables.instance.has_work.cumsum()))
    return np.searchsorted(working, np.arange(1, depth + 1)).tolist()


def _can_fill(
    stages: Sequence[Floats], rates: Sequence[float], threshold: float, first_ends: Sequence[int]
) -> bool:
    """Whether the stages, each as long as the threshold allows, from the last one backwards, hold all units.

    Exact where a part of a stage takes no more time and memory than the stage; nearly always so.
    """
    end = stages[0].shape[0] - 1
    for s in range(len(stages) - 1, -1, -1):
        fits = stages[s][:, end] * rates[s] <= threshold
        first = int(fits.argmax())
        if not fits[first]:
            return False
        # Every stage before it needs a unit with work.
        end = max(first, first_ends[s - 1] if s else 0)
        if not fits[end]:
            return False
    return end == 0


def _minimal_sum(
    stages: Sequence[Floats], edges: Sequence[Floats], rates: Sequence[float], threshold: float
) -> tuple[float, tuple[int, ...]] | None:
    """(smallest sum of stages and messages with every stage within the threshold, its bounds), or None."""
    num_units = stages[0].shape[0] - 1
    best = np.full(num_units + 1, np.inf)
    best[num_units] = 0.0
    ends: list[Integers] = []
    for s in range(len(stages) - 1, -1, -1):
        downstream = best if s == len(stages) - 1 else best + edges[s]
        total = np.where(stages[s] * rates[s] <= threshold, stages[s], np.inf) + downstream
        ends.append(total.argmin(axis=1))
        best = total.min(axis=1)
    if not np.isfinite(best[0]):
        return None
    bounds = [0]
    for end in reversed(ends):
        bounds.append(int(end[bounds[-1]]))
    return float(best[0]), tuple(bounds)
