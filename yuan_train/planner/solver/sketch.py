"""Large instances: a few orders cut and estimated, the best cuts refined, nothing proven."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from yuan_train.planner.solver.cost_tables import CostTables, make_cut
from yuan_train.planner.solver.dynamic_program import threshold_bounds
from yuan_train.planner.solver.estimate import estimate_cuts, may_hide
from yuan_train.planner.solver.instance import Instance
from yuan_train.planner.solver.moves import neighbours
from yuan_train.planner.solver.seeds import large_orders
from yuan_train.planner.solver.solve import KEPT, Key, Solution

NUM_SKETCH_LIMITS = 6
"""Limits of the slowest stage that are tried for each order."""

MAX_SCREENED_ROUNDS = 8
"""Rounds of local moves, ranked by estimate."""

MAX_SCREENED_STAGES = 6
"""Slowest stages that these moves are tried on."""

NUM_REFINED_CUTS = 2
"""Cuts that a refined sketch keeps."""


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """The best cuts of a large instance by estimate, not simulated."""

    tables: CostTables
    plain: dict[Key, float]
    """Estimated step seconds, ascending."""
    hidden: dict[Key, float]
    """The same if deeper warm-ups hide the transfers; empty where they cannot."""


def sketch(instance: Instance) -> Sketch:
    """A few orders, cut by dynamic programming and estimated. Empty if none of them fits."""
    tables = CostTables(instance)
    plain: dict[Key, float] = {}
    hidden: dict[Key, float] = {}
    for order in large_orders(tables):
        found = threshold_bounds(tables, order, limit=NUM_SKETCH_LIMITS)
        if found:
            cuts = [(order, bounds) for bounds in found]
            plain |= _estimates(tables, cuts, hidden=False)
            hidden |= _estimates(tables, cuts, hidden=True) if may_hide(instance) else {}
    return Sketch(tables=tables, plain=_best(plain), hidden=_best(hidden))


def _estimates(tables: CostTables, cuts: Sequence[Key], *, hidden: bool) -> dict[Key, float]:
    """Estimated step seconds of the cuts that fit; all cuts have the same number of stages."""
    orders, bounds = (np.array([cut[i] for cut in cuts]) for i in (0, 1))
    seconds = estimate_cuts(tables, orders, bounds, hidden=hidden).tolist()
    return {cut: t for cut, t in zip(cuts, seconds, strict=True) if math.isfinite(t)}


def _best(estimates: dict[Key, float]) -> dict[Key, float]:
    """The best KEPT estimates, ascending."""
    return dict(sorted(estimates.items(), key=lambda item: (float(f"{item[1]:.11e}"), *item[0]))[:KEPT])


def refine(found: Sketch, *, hidden: bool = False, stopped: Callable[[], bool] = lambda: False) -> Solution:
    """The best cuts of a sketch after local moves, ranked by estimate; their seconds are not simulated yet.

    With `hidden`, as if deeper warm-ups hid the transfers. Ends early once `stopped()` is true.
    """
    tables = found.tables
    best = dict(found.hidden if hidden else found.plain)
    tried: set[Key] = set()
    for _ in range(MAX_SCREENED_ROUNDS):
        fresh = [key for key in list(best)[:2] if key not in tried]
        if not fresh or stopped():
            break
        tried.update(fresh)
        by_length: dict[int, list[Key]] = {}
        for order, bounds in fresh:
            for cut in neighbours(tables, tables.kind_of, order, bounds, moved=MAX_SCREENED_STAGES):
                by_length.setdefault(len(cut[0]), []).append(cut)
        for neighbour_cuts in by_length.values():
            best |= _best(_estimates(tables, neighbour_cuts, hidden=hidden))
        best = _best(best)
    finalists = list(best.items())[:NUM_REFINED_CUTS]
    return Solution(
        cuts=tuple(make_cut(tables, order, bounds, seconds) for (order, bounds), seconds in finalists),
        num_simulated=len(finalists),
    )
