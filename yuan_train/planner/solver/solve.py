"""The order of the slots and the cut: a search over an `Instance`.

`solve` cuts a few good orders by dynamic programming, simulates the cuts, and improves the best by local
moves. It proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from yuan_train.planner.solver.cost_tables import CostTables, make_cut
from yuan_train.planner.solver.dynamic_program import threshold_bounds
from yuan_train.planner.solver.estimate import simulate_cuts
from yuan_train.planner.solver.instance import SPLIT_SCHEDULES, Cut, Instance, Integers
from yuan_train.planner.solver.moves import neighbours
from yuan_train.planner.solver.seeds import seed_orders, slot_classes

MAX_MOVE_ROUNDS = 40
"""Rounds of local moves."""

MAX_SMALL_SLOTS = 8
"""Slots of an instance that is solved, at most."""

KEPT = 12
"""Cuts that a solution keeps, best first."""

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""A cut: its order and its bounds."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The best cuts found for an instance; none if nothing fits."""

    cuts: tuple[Cut, ...]
    """Best first."""
    num_simulated: int


class _Pool:
    """The best cuts simulated so far. One pool per search; it counts the simulated cuts."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self.best: dict[Key, float] = {}
        self.num_simulated = 0

    @property
    def limit(self) -> float:
        """Step seconds of the best cut; inf without one."""
        return min(self.best.values(), default=math.inf)

    def add(self, orders: Integers, bounds: Integers) -> None:
        """Simulate cuts of equal length, orders [N, P] and bounds [N, P + 1], and keep the best."""
        seconds = simulate_cuts(self.tables, orders, bounds)
        self.num_simulated += len(seconds)
        best = np.arange(len(seconds))
        if len(seconds) > KEPT:
            best = np.flatnonzero(seconds <= np.partition(seconds, KEPT)[KEPT])
        for i in best[np.argsort(seconds[best], kind="stable")][:KEPT]:
            if math.isfinite(seconds[i]):
                key = (tuple(orders[i].tolist()), tuple(bounds[i].tolist()))
                self.best[key] = float(seconds[i])
        if len(self.best) > KEPT:
            self.best = {(cut.order, cut.bounds): cut.step_seconds for cut in self.cuts()}

    def cuts(self) -> tuple[Cut, ...]:
        """The kept cuts, best first."""
        keys = sorted(self.best, key=lambda key: (float(f"{self.best[key]:.11e}"), *key))[:KEPT]
        return tuple(make_cut(self.tables, order, bounds, self.best[order, bounds]) for order, bounds in keys)


def solve(instance: Instance, *, stopped: Callable[[], bool] = lambda: False) -> Solution:
    """Good cuts of an instance, by their steps in the simulation; the search ends early once `stopped()` is
    true. The same instance gives the same solution unless `stopped` intervenes."""
    tables = CostTables(instance)
    pool = _Pool(tables)
    classes = slot_classes(instance)
    for order in seed_orders(tables, classes):
        if stopped() and pool.best:
            break
        bounds = threshold_bounds(tables, order)
        if bounds:
            pool.add(np.tile(np.array(order), (len(bounds), 1)), np.array(bounds))
    _improve(pool, classes, stopped)
    return Solution(
        cuts=pool.cuts(),
        num_simulated=pool.num_simulated,
    )


def is_small(instance: Instance) -> bool:
    """Whether an instance is solved: it has few slots, and a schedule that `estimate` simulates whole."""
    return instance.num_slots <= MAX_SMALL_SLOTS and instance.schedule not in SPLIT_SCHEDULES


def _improve(pool: _Pool, classes: Integers, stopped: Callable[[], bool]) -> None:
    """Simulate the neighbours of the best cuts until none is better."""
    tried: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for _ in range(MAX_MOVE_ROUNDS):
        if stopped():
            return
        fresh = [key for key in sorted(pool.best, key=lambda k: (pool.best[k], *k))[:3] if key not in tried]
        if not fresh:
            return
        tried.update(fresh)
        by_length: dict[int, dict[tuple[tuple[int, ...], tuple[int, ...]], None]] = {}
        for order, bounds in fresh:
            for neighbour in neighbours(pool.tables, classes, order, bounds):
                by_length.setdefault(len(neighbour[0]), {})[neighbour] = None
        for found in by_length.values():
            pool.add(np.array([order for order, _ in found]), np.array([bounds for _, bounds in found]))
