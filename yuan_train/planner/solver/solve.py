"""The order of the slots and the cut: search and proof over an `Instance`.

`solve` cuts a few good orders by dynamic programming, simulates the cuts, and improves the best by local
moves. Then it tries to prove the result: every order (and subset, where slots may stay idle) is excluded by a
lower bound, or its promising cuts are all simulated. `Solution.exact` says whether the proof was completed;
otherwise the result is the best of a heuristic search, and only the lower bound is certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from yuan_train.planner.solver.area_bound import area_bound_seconds
from yuan_train.planner.solver.cost_tables import CostTables, make_cut
from yuan_train.planner.solver.dynamic_program import threshold_bounds
from yuan_train.planner.solver.estimate import SIMULATION_ROWS, simulate_cuts
from yuan_train.planner.solver.instance import SPLIT_SCHEDULES, Cut, Instance, Integers
from yuan_train.planner.solver.moves import neighbours
from yuan_train.planner.solver.proof import Orders, promising_cuts, promising_orders
from yuan_train.planner.solver.seeds import lengths, seed_orders, slot_classes

MAX_PARTIAL_ORDERS = 120_000
"""Partial orders of one length that a proof keeps: enough for all those of any eight different slots."""

MAX_BLOCK = 256
"""Orders whose cuts are enumerated together."""

MAX_ROWS, MAX_ENDS = 200_000, 6_000_000
"""Partial cuts that are enumerated together, and the units where their next stages may end, over all of them:
one number each in about ten arrays at a time (half a gigabyte)."""

MAX_WORK = 6_000_000_000
"""Limit of `Solution.work`: about half a minute."""

WORK_PER_STEP = 8
"""Work of simulating one micro-batch on one stage, where a cell of a cost table counts 1."""

MAX_MOVE_ROUNDS = 40
"""Rounds of local moves."""

MAX_SMALL_SLOTS = 8
"""Slots up to which a proof over all orders is within reach."""

KEPT = 12
"""Cuts that a solution keeps, best first."""

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""A cut: its order and its bounds."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The best cuts found for an instance; none if nothing fits."""

    cuts: tuple[Cut, ...]
    """Best first."""
    exact: bool
    """Whether the first cut is proven to be the fastest in the simulation (or that nothing fits)."""
    lower_bound_seconds: float
    num_simulated: int
    work: int
    """Approximate number of array elements that the search computed: the unit of its budget."""


class _Pool:
    """The best cuts simulated so far. One pool per search; it counts the simulated cuts and the work."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        self.best: dict[Key, float] = {}
        self.num_simulated = 0
        self.work = 0

    @property
    def limit(self) -> float:
        """Step seconds of the best cut; inf without one."""
        return min(self.best.values(), default=math.inf)

    def add(self, orders: Integers, bounds: Integers) -> None:
        """Simulate cuts of equal length, orders [N, P] and bounds [N, P + 1], and keep the best."""
        seconds = simulate_cuts(self.tables, orders, bounds)
        self.num_simulated += len(seconds)
        self.work += WORK_PER_STEP * orders.size * self.tables.instance.num_micro_batches
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


def solve(
    instance: Instance, *, max_work: int = MAX_WORK, stopped: Callable[[], bool] = lambda: False
) -> Solution:
    """The fastest cuts of an instance in the simulation.

    The search ends early once `stopped()` is true; a proof that takes more than `max_work` is abandoned. Then
    the best cuts found so far are returned. The same instance gives the same solution unless `stopped`
    intervenes.
    """
    tables = CostTables(instance)
    pool = _Pool(tables)
    classes = slot_classes(instance)
    for order in seed_orders(tables, classes):
        if stopped() and pool.best:
            break
        bounds = threshold_bounds(tables, order)
        if bounds:
            pool.add(np.tile(np.array(order), (len(bounds), 1)), np.array(bounds))
    improved = _improve(pool, classes, stopped)
    exact = max_work > 0 and _prove(pool, classes, max_work, stopped) and improved
    bound = area_bound_seconds(instance)
    cuts = pool.cuts()
    if exact and cuts:
        bound = max(bound, cuts[0].step_seconds)
    return Solution(
        cuts=cuts, exact=exact, lower_bound_seconds=bound, num_simulated=pool.num_simulated, work=pool.work
    )


def is_small(instance: Instance) -> bool:
    """Whether a proof over all orders of an instance is within reach and has bounds for its schedule."""
    return instance.num_slots <= MAX_SMALL_SLOTS and instance.schedule not in SPLIT_SCHEDULES


def _improve(pool: _Pool, classes: Integers, stopped: Callable[[], bool]) -> bool:
    """Simulate the neighbours of the best cuts until none is better. False if stopped before that."""
    tried: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for _ in range(MAX_MOVE_ROUNDS):
        if stopped():
            return False
        fresh = [key for key in sorted(pool.best, key=lambda k: (pool.best[k], *k))[:3] if key not in tried]
        if not fresh:
            return True
        tried.update(fresh)
        by_length: dict[int, dict[tuple[tuple[int, ...], tuple[int, ...]], None]] = {}
        for order, bounds in fresh:
            for neighbour in neighbours(pool.tables, classes, order, bounds):
                by_length.setdefault(len(neighbour[0]), {})[neighbour] = None
        for found in by_length.values():
            pool.add(np.array([order for order, _ in found]), np.array([bounds for _, bounds in found]))
    return True


def _prove(pool: _Pool, classes: Integers, max_work: int, stopped: Callable[[], bool]) -> bool:
    """Simulate all promising cuts of every order that no bound excludes; True if the proof is complete."""
    tables, limit = pool.tables, pool.limit
    cells = (tables.instance.num_units + 1) ** 2
    most = min(MAX_PARTIAL_ORDERS, max_work // cells)
    max_rows = min(MAX_ROWS, MAX_ENDS // (tables.instance.num_units + 1))
    found = promising_orders(tables, classes, lengths(tables.instance), limit, max_rows=most)
    pool.work += found.num_partial * cells
    if not pool.best and found.orders:
        # Each of these orders has a cut that fits; the cuts of the first give a limit.
        first = found.orders[0]
        bounds = threshold_bounds(tables, first)
        pool.add(np.tile(np.array(first), (len(bounds), 1)), np.array(bounds))
        return _prove(pool, classes, max_work, stopped)
    todo = [(np.array(orders), slack) for orders, slack in _blocks(tables, found)][::-1]
    while todo:
        orders, slack = todo.pop()
        if math.isfinite(limit) and slack < (limit - pool.limit) * (1 - 1e-9):
            continue
        cuts = promising_cuts(tables, orders, pool.limit, max_rows=max_rows)
        pool.work += orders.size * cells
        if not cuts.complete and len(orders) > 1:
            half = len(orders) // 2
            todo += [(orders[half:], slack), (orders[:half], slack)]
            continue
        if not cuts.complete or pool.work > max_work or stopped():
            return False
        for first in range(0, len(cuts.bounds), SIMULATION_ROWS):
            rows = slice(first, first + SIMULATION_ROWS)
            pool.add(orders[cuts.order_of[rows]], cuts.bounds[rows])
    return found.complete


def _blocks(tables: CostTables, found: Orders) -> Iterator[tuple[list[tuple[int, ...]], float]]:
    """(orders, largest slack in seconds) of blocks of orders that are cut together.

    Blocks start small, because their cuts lower the limit for the later ones. The orders of a block have the
    same numbers of replicas, stage by stage.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, order in enumerate(found.orders):
        groups.setdefault(tuple(tables.instance.replicas[list(order)].tolist()), []).append(number)
    blocks: list[list[int]] = []
    for numbers in groups.values():
        first, size = 0, 1
        while first < len(numbers):
            blocks.append(numbers[first : first + size])
            first, size = first + size, min(2 * size, MAX_BLOCK)
    for block in sorted(blocks, key=lambda block: block[0]):
        yield [found.orders[i] for i in block], found.slack_seconds[block[0]]
