"""Which card comes where: the outer half of the cutting problem.

`solve` takes a few good orders, cuts each by dynamic programming, simulates, and improves the best by local
moves. Then, where there are few enough different orders, it proves the result: every order (and subset, where
cards may stay idle) is excluded by a lower bound or its promising cuts are all simulated. `Solution.exact`
says whether that went through; otherwise the result is the best of a heuristic search, and only the lower
bound is certain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from yuan_train.planner.partition import (
    SIMULATION_ROWS,
    SPLIT_SCHEDULES,
    Cut,
    Floats,
    Instance,
    Integers,
    Shortfall,
    StageTables,
    area_bound_seconds,
    estimate_cuts,
    find_shortfall,
    make_cut,
    may_hide,
    simulate_cuts,
    threshold_bounds,
)
from yuan_train.planner.proof import Orders, promising_cuts, promising_orders

MAX_PARTIAL_ORDERS = 120_000
"""Ends of orders that a proof follows at a time: all those of any eight unlike cards."""
MAX_BLOCK = 256
"""Orders that are cut together."""
MAX_ROWS, MAX_ENDS = 200_000, 6_000_000
"""Cuts that are looked at together, and for all of them the units where their next stage may end: a number
for each, in some ten arrays at a time (half a gigabyte)."""
MAX_WORK = 6_000_000_000
"""About half a minute."""
WORK_PER_STEP = 8
"""Numbers that simulating one step of one plan goes through, beside a table's one per cell."""
MAX_SEED_ORDERS = 64
MAX_MOVE_ROUNDS = 40
MAX_SMALL_SLOTS = 8
NUM_SKETCH_ORDERS = 4
NUM_SKETCH_LIMITS = 6
MAX_SCREENED_ROUNDS = 8
MAX_SCREENED_STAGES = 6
NUM_REFINED_CUTS = 2
"""Large instances: orders, limits of the slowest stage, moves."""
MAX_MOVED_STAGES = 24
MAX_CLASSED_SLOTS = 96
"""Slots up to which swappable ones are looked for; with more, no two count as alike and nothing is proven."""
MAX_COUNT_STATES = 200_000
KEPT = 12
"""Cuts that a solution keeps, best first."""


Key = tuple[tuple[int, ...], tuple[int, ...]]
"""A cut: its order and its bounds."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """What was found for an instance; no cuts if nothing fits."""

    cuts: tuple[Cut, ...]
    exact: bool
    """Whether the first cut is proven to be the fastest in the simulation (or that nothing fits)."""
    lower_bound_seconds: float
    num_simulated: int
    work: int
    """Numbers that the search went through, about: what a budget is counted in."""


class _Pool:
    """The best cuts seen so far. One pool per search; it owns the count of what was simulated."""

    def __init__(self, tables: StageTables) -> None:
        self.tables = tables
        self.best: dict[Key, float] = {}
        self.num_simulated = 0
        self.work = 0

    @property
    def limit(self) -> float:
        """Seconds of the best."""
        return min(self.best.values(), default=math.inf)

    def add(self, orders: Integers, bounds: Integers) -> None:
        """Simulate cuts of equal length and keep the best."""
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
    """The fastest cut of an instance, in the simulation. `stopped` may end the search early; a proof that
    takes more than `max_work` is given up, and the best that was found by then returned.

    The same instance gives the same solution, unless `stopped` intervened.
    """
    tables = StageTables(instance)
    pool = _Pool(tables)
    classes = slot_classes(instance)
    for order in seed_orders(tables, classes):
        if stopped() and pool.best:
            break
        bounds = threshold_bounds(tables, order)
        if bounds:
            pool.add(np.tile(np.array(order), (len(bounds), 1)), np.array(bounds))
    improved = _improve(pool, classes, stopped)
    exact = _prove(pool, classes, max_work, stopped) and improved
    bound = area_bound_seconds(instance)
    cuts = pool.cuts()
    if exact and cuts:
        bound = max(bound, cuts[0].step_seconds)
    return Solution(
        cuts=cuts, exact=exact, lower_bound_seconds=bound, num_simulated=pool.num_simulated, work=pool.work
    )


def is_small(instance: Instance) -> bool:
    """Whether a proof that looks at every order of an instance has bounds to go by, and is within reach."""
    return instance.num_slots <= MAX_SMALL_SLOTS and instance.schedule not in SPLIT_SCHEDULES


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """Good cuts of a large instance, by estimate alone."""

    tables: StageTables
    plain: dict[Key, float]
    """Estimated seconds, rising."""
    hidden: dict[Key, float]
    """The same if deeper warm-ups hide the transfers; empty where there are none."""


def sketch(instance: Instance) -> Sketch:
    """A few orders, cut by dynamic programming and estimated, not simulated. Empty if none of them fits."""
    tables = StageTables(instance)
    plain: dict[Key, float] = {}
    hidden: dict[Key, float] = {}
    for order in large_orders(tables):
        found = threshold_bounds(tables, order, limit=NUM_SKETCH_LIMITS)
        if found:
            cuts = [(order, bounds) for bounds in found]
            plain |= _estimates(tables, cuts, hidden=False)
            hidden |= _estimates(tables, cuts, hidden=True) if may_hide(instance) else {}
    return Sketch(tables=tables, plain=_best(plain), hidden=_best(hidden))


def _estimates(tables: StageTables, cuts: Sequence[Key], *, hidden: bool) -> dict[Key, float]:
    """Seconds of those cuts, all of one length, that fit."""
    orders, bounds = (np.array([cut[i] for cut in cuts]) for i in (0, 1))
    seconds = estimate_cuts(tables, orders, bounds, hidden=hidden).tolist()
    return {cut: t for cut, t in zip(cuts, seconds, strict=True) if math.isfinite(t)}


def _best(estimates: dict[Key, float]) -> dict[Key, float]:
    """The best few, best first."""
    return dict(sorted(estimates.items(), key=lambda item: (float(f"{item[1]:.11e}"), *item[0]))[:KEPT])


def refine(drawn: Sketch, *, hidden: bool = False, stopped: Callable[[], bool] = lambda: False) -> Solution:
    """The cuts of a sketch improved by moves, by estimate; the best of them are to be simulated. `hidden`: as
    if deeper warm-ups hid the transfers."""
    tables = drawn.tables
    best = dict(drawn.hidden if hidden else drawn.plain)
    tried: set[Key] = set()
    for _ in range(MAX_SCREENED_ROUNDS):
        fresh = [key for key in list(best)[:2] if key not in tried]
        if not fresh or stopped():
            break
        tried.update(fresh)
        by_length: dict[int, list[Key]] = {}
        for order, bounds in fresh:
            for near in neighbours(tables, tables.kind_of, order, bounds, moved=MAX_SCREENED_STAGES):
                by_length.setdefault(len(near[0]), []).append(near)
        for near_ones in by_length.values():
            best |= _best(_estimates(tables, near_ones, hidden=hidden))
        best = _best(best)
    finalists = list(best.items())[:NUM_REFINED_CUTS]
    return Solution(
        cuts=tuple(make_cut(tables, order, bounds, seconds) for (order, bounds), seconds in finalists),
        exact=False,
        lower_bound_seconds=area_bound_seconds(tables.instance),
        num_simulated=len(finalists),
        work=0,
    )


def large_orders(tables: StageTables) -> list[tuple[int, ...]]:
    """Few orders for a sketch: by counted states, as the cluster has them, fast and roomy cards first."""
    instance = tables.instance
    allowed = lengths(instance)
    if not allowed:
        return []
    if instance.order is not None:
        return few_orders_of(instance, instance.order)[:NUM_SKETCH_ORDERS]
    speed = 1.0 / np.maximum(instance.forward_seconds.min(axis=0).sum(axis=1), 1e-300)
    memory = instance.capacity_bytes
    best_first = np.lexsort((-memory, -speed)).tolist()
    kept = set(best_first[: allowed[-1]])
    keys: list[Floats] = [np.zeros_like(speed), -memory, -speed]
    found = [tuple(s for s in np.argsort(key, kind="stable").tolist() if s in kept) for key in keys]
    counted = count_order(tables)
    if counted is not None and len(counted) in allowed:
        found.insert(0, counted)
    half = tuple(s for s in found[0] if s in set(best_first[: max(allowed[0], allowed[-1] // 2)]))
    return [order for order in dict.fromkeys([*found, half]) if len(order) in allowed][:NUM_SKETCH_ORDERS]


def nearest_miss(instance: Instance) -> tuple[StageTables, Shortfall]:
    """The shortfall of the order that comes closest to fitting, of the seed orders with the most memory."""
    tables = StageTables(instance)
    orders = seed_orders(tables, slot_classes(instance))
    shortfalls = [find_shortfall(tables, order) for order in orders]
    return tables, min(shortfalls, key=lambda s: (s.needed_bytes / max(s.capacity_bytes, 1.0), s.order))


# --- orders ----------------------------------------------------------------------------------------------


def slot_classes(instance: Instance) -> Integers:
    """[D]: the first slot that each slot may be swapped with, without any cost of the problem changing."""
    kinds = StageTables(instance).kind_of
    classes = list(range(instance.num_slots))
    if instance.num_slots > MAX_CLASSED_SLOTS:
        return np.array(classes, dtype=np.int64)
    for slot in range(instance.num_slots):
        for other in range(slot):
            if classes[other] == other and kinds[slot] == kinds[other] and _swappable(instance, slot, other):
                classes[slot] = other
                break
    return np.array(classes, dtype=np.int64)


def _swappable(instance: Instance, a: int, b: int) -> bool:
    swapped = np.arange(instance.num_slots)
    swapped[[a, b]] = b, a
    links = [*instance.message_seconds, instance.ends_seconds]
    off_diagonal = ~np.eye(instance.num_slots, dtype=bool)
    per_slot = [instance.sync_seconds, instance.update_seconds]
    return all(
        np.array_equal(link[off_diagonal], link[np.ix_(swapped, swapped)][off_diagonal]) for link in links
    ) and all(np.array_equal(values[a], values[b]) for values in per_slot)


def lengths(instance: Instance) -> range:
    """Numbers of stages that an answer may have."""
    most = min(instance.num_slots, instance.num_units)
    if instance.order is not None:
        most = min(most, len(instance.order))
    return range(instance.num_slots if instance.use_all else 1, most + 1)


def all_orders(instance: Instance, classes: Integers) -> Iterator[tuple[int, ...]]:
    """Every order of every allowed length, once for all that differ only in swappable slots."""
    if instance.order is not None:
        for length in lengths(instance):
            yield from itertools.combinations(instance.order, length)
        return
    members: dict[int, list[int]] = {}
    for slot, first in enumerate(classes.tolist()):
        members.setdefault(first, []).append(slot)

    def extend(used: dict[int, int], order: tuple[int, ...], length: int) -> Iterator[tuple[int, ...]]:
        if len(order) == length:
            yield order
            return
        for first, slots in members.items():
            if used[first] < len(slots):
                yield from extend(used | {first: used[first] + 1}, (*order, slots[used[first]]), length)

    for length in lengths(instance):
        yield from extend(dict.fromkeys(members, 0), (), length)


def seed_orders(tables: StageTables, classes: Integers) -> list[tuple[int, ...]]:
    """A few orders that are often good; all of them where there are few.

    Cluster order and its reverse; by speed, by memory, both ways; kinds as blocks in every order (up to four
    kinds); and the order of the smallest bottleneck by counting states, without links. Where cards may stay
    idle, also the prefixes of the best cards.
    """
    instance = tables.instance
    few = list(itertools.islice(all_orders(instance, classes), MAX_SEED_ORDERS + 1))
    if len(few) <= MAX_SEED_ORDERS:
        return few
    if instance.order is not None:
        return _thin(few_orders_of(instance, instance.order))
    speed = 1.0 / np.maximum(tables.instance.forward_seconds.min(axis=0).sum(axis=1), 1e-300)
    memory = instance.capacity_bytes
    keys: list[Floats] = [np.zeros_like(speed), -speed, -memory, speed, memory]
    found = [tuple(np.argsort(key, kind="stable").tolist()) for key in keys]
    found.append(found[0][::-1])
    counted = count_order(tables)
    if counted is not None:
        found.insert(0, counted)
    best_first = np.lexsort((-memory, -speed)).tolist()
    allowed = lengths(instance)
    result: dict[tuple[int, ...], None] = {}
    for length in reversed(_few_lengths(allowed)):
        kept = set(best_first[:length])
        for order in found:
            result[tuple(slot for slot in order if slot in kept) if len(order) > length else order] = None
    result |= dict.fromkeys(order for order in _block_orders(tables) if len(order) in allowed)
    return _thin([order for order in result if len(order) in allowed])


def few_orders_of(instance: Instance, order: Sequence[int]) -> list[tuple[int, ...]]:
    """A fixed order: whole, and where cards may stay idle its contiguous parts."""
    result = {tuple(order): None} if len(order) in lengths(instance) else {}
    for length in reversed(_few_lengths(lengths(instance))):
        for first in range(len(order) - length + 1):
            result[tuple(order[first : first + length])] = None
    return list(result)


def _few_lengths(allowed: range) -> list[int]:
    if len(allowed) <= 6:
        return list(allowed)
    return sorted({allowed[round(i * (len(allowed) - 1) / 5)] for i in range(6)})


def _thin(orders: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return orders if len(orders) <= MAX_SEED_ORDERS else orders[:MAX_SEED_ORDERS]


def _block_orders(tables: StageTables) -> list[tuple[int, ...]]:
    """Kinds of card as blocks, in every order of up to four kinds; inside a block as the cluster has them."""
    blocks: dict[int, list[int]] = {}
    for slot, kind in enumerate(tables.kind_of.tolist()):
        blocks.setdefault(kind, []).append(slot)
    if len(blocks) > 4:
        return []
    return [tuple(s for kind in kinds for s in blocks[kind]) for kinds in itertools.permutations(blocks)]


def count_order(tables: StageTables) -> tuple[int, ...] | None:
    """The order of kinds with the smallest slowest stage, links left out; None if nothing fits or it is too
    big.

    State: how many cards of each kind the stages from the last one on have used; value: how early a unit they
    reach when no stage may take longer than t. The number of cards used is the distance from the end, so the
    micro-batches in flight follow from the state. t is found by bisection. Exact for max(stage seconds).
    None also above MAX_COUNT_STATES states.
    """
    kinds = sorted(set(tables.kind_of.tolist()))
    members = [np.flatnonzero(tables.kind_of == kind).tolist() for kind in kinds]
    shape = tuple(len(slots) + 1 for slots in members)
    if math.prod(shape) > MAX_COUNT_STATES:
        return None
    m = tables.instance.num_micro_batches
    depth = 1 if tables.instance.schedule == "gpipe" else min(m, tables.instance.num_slots)
    rates = [1.0 / int(tables.instance.replicas[kind]) for kind in kinds]
    lines = [
        [tables.stage(kind, tables.in_flight(-k, 1))[0] * rate for k in range(depth)]
        for kind, rate in zip(kinds, rates, strict=True)
    ]
    values = tables.periods(kinds)
    best: list[int] | None = None
    low, high = 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        answer = _reach(lines, shape, float(values[middle]))
        if answer is None:
            low = middle + 1
        else:
            best, high = answer, middle - 1
    if best is None:
        return None
    left = [list(slots) for slots in members]
    order = [left[k].pop(0) for k in best]
    if tables.instance.use_all:
        order = [slot for slots in left for slot in slots] + order
    return tuple(order)


def _reach(lines: Sequence[Sequence[Floats]], shape: tuple[int, ...], threshold: float) -> list[int] | None:
    """Kinds of the stages, first stage first, that cover all units within the threshold; None if none do."""
    num_units = lines[0][0].shape[0] - 1
    starts = [[_earliest(line, threshold) for line in per_kind] for per_kind in lines]
    reach = np.full(math.prod(shape), num_units, dtype=np.int64)
    came = np.full(math.prod(shape), -1, dtype=np.int64)
    strides = np.array([math.prod(shape[k + 1 :]) for k in range(len(shape))])
    counts = np.stack(np.unravel_index(np.arange(len(reach)), shape))
    level_of = counts.sum(axis=0)
    by_level = np.argsort(level_of, kind="stable")
    first_of = np.searchsorted(level_of[by_level], np.arange(int(level_of.max()) + 2))
    for level in range(1, int(level_of.max()) + 1):
        states = by_level[first_of[level] : first_of[level + 1]]
        reach[states] = num_units + 1
        for kind, per_kind in enumerate(starts):
            here = states[counts[kind, states] > 0]
            earliest = per_kind[min(level, len(per_kind)) - 1][reach[here - strides[kind]]]
            better = earliest < reach[here]
            reach[here[better]] = earliest[better]
            came[here[better]] = kind
        done = states[reach[states] == 0]
        if len(done):
            order: list[int] = []
            state = int(done[0])
            while level_of[state]:
                order.append(int(came[state]))
                state -= int(strides[came[state]])
            return order
    return None


def _earliest(line: Floats, threshold: float) -> Integers:
    """[U + 1]: first unit of the longest stage that ends before each unit; the end itself if none fits."""
    fits = line <= threshold
    return np.where(fits.any(axis=0), fits.argmax(axis=0), np.arange(len(line)))


# --- improving -------------------------------------------------------------------------------------------


def _improve(pool: _Pool, classes: Integers, stopped: Callable[[], bool]) -> bool:
    """Move from the best cuts to better neighbours until there is none. False if it was stopped."""
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


def neighbours(
    tables: StageTables,
    classes: Integers,
    order: tuple[int, ...],
    bounds: tuple[int, ...],
    *,
    moved: int = MAX_MOVED_STAGES,
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts one move away: a unit to another stage, two cards swapped, a card exchanged or dropped.

    In long pipelines only moves that involve one of the `moved` slowest stages.
    """
    instance, stages = tables.instance, len(order)
    seconds = [float(line[a, b]) for line, a, b in zip(tables.lines(order), bounds, bounds[1:], strict=False)]
    slowest = set(sorted(range(stages), key=lambda s: (-seconds[s], s))[:moved])
    for a, b in itertools.permutations(range(stages), 2):
        if a not in slowest:
            continue
        # One unit leaves stage a and one joins stage b; the stages between shift by one.
        low, high, shift = (a + 1, b + 1, -1) if a < b else (b + 1, a + 1, 1)
        shifted = tuple(bound + shift if low <= i < high else bound for i, bound in enumerate(bounds))
        if all(x < y for x, y in itertools.pairwise(shifted)):
            yield order, shifted
    if instance.order is not None:
        return
    sizes = [y - x for x, y in itertools.pairwise(bounds)]
    for a, b in itertools.combinations(range(stages), 2):
        if classes[order[a]] != classes[order[b]] and not slowest.isdisjoint((a, b)):
            swapped = list(order)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            yield tuple(swapped), bounds
            moved_sizes = list(sizes)
            moved_sizes[a], moved_sizes[b] = sizes[b], sizes[a]
            yield tuple(swapped), tuple(itertools.accumulate(moved_sizes, initial=0))
    idle = {int(classes[d]): d for d in reversed(range(instance.num_slots)) if d not in order}
    for a, slot in itertools.product(sorted(slowest), idle.values()):
        if classes[order[a]] != classes[slot]:
            yield (*order[:a], slot, *order[a + 1 :]), bounds
    if not instance.use_all and stages > 1:
        for a in range(stages):
            yield (*order[:a], *order[a + 1 :]), (*bounds[: max(a, 1)], *bounds[max(a, 1) + 1 :])


# --- proving ---------------------------------------------------------------------------------------------


def _prove(pool: _Pool, classes: Integers, max_work: int, stopped: Callable[[], bool]) -> bool:
    """Look at every order that a bound does not exclude; True if all were searched to the end."""
    tables, limit = pool.tables, pool.limit
    cells = (tables.instance.num_units + 1) ** 2
    most = min(MAX_PARTIAL_ORDERS, max_work // cells)
    max_rows = min(MAX_ROWS, MAX_ENDS // (tables.instance.num_units + 1))
    found = promising_orders(tables, classes, lengths(tables.instance), limit, max_rows=most)
    pool.work += found.num_partial * cells
    if not pool.best and found.orders:
        # Each of these fits somehow: any cut of one gives a limit to go by.
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


def _blocks(tables: StageTables, found: Orders) -> Iterator[tuple[list[tuple[int, ...]], float]]:
    """The orders in blocks that are cut together, first small ones, which lower the limit; and the largest
    slack of each. The stages of a block have the same numbers of replicas."""
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
