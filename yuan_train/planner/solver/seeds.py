"""Initial orders of slots: all of them where there are few, otherwise some that are often good."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from yuan_train.planner.solver.cost_tables import CostTables
from yuan_train.planner.solver.instance import Floats, Instance, Integers

MAX_SEED_ORDERS = 64

NUM_SKETCH_ORDERS = 4

MAX_CLASSED_SLOTS = 96
"""Slots up to which interchangeable ones are detected; with more, each slot is a class of its own."""

MAX_COUNT_STATES = 200_000


def large_orders(tables: CostTables) -> list[tuple[int, ...]]:
    """A few orders for a sketch: `count_order`'s, the cluster's, most memory first, fastest first."""
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


def slot_classes(instance: Instance) -> Integers:
    """[D]: for each slot, the first slot with which it can be swapped without changing any cost."""
    kinds = CostTables(instance).kind_of
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
    """Whether swapping two slots of one kind changes no message, reduction or optimizer step."""
    swapped = np.arange(instance.num_slots)
    swapped[[a, b]] = b, a
    links = [*instance.message_seconds, instance.ends_seconds]
    off_diagonal = ~np.eye(instance.num_slots, dtype=bool)
    x = instance
    per_slot = [x.grad_reduce_seconds, x.weight_sync_seconds, x.update_seconds]
    per_slot += [x.grad_reduce_start_seconds, x.weight_sync_start_seconds]
    return all(
        np.array_equal(link[off_diagonal], link[np.ix_(swapped, swapped)][off_diagonal]) for link in links
    ) and all(np.array_equal(values[a], values[b]) for values in per_slot)


def lengths(instance: Instance) -> range:
    """Numbers of stages that a cut may have."""
    most = min(instance.num_slots, instance.num_units)
    if instance.order is not None:
        most = min(most, len(instance.order))
    return range(instance.num_slots if instance.use_all else 1, most + 1)


def all_orders(instance: Instance, classes: Integers) -> Iterator[tuple[int, ...]]:
    """Every order of every allowed length; orders that differ only in interchangeable slots count once."""
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


def seed_orders(tables: CostTables, classes: Integers) -> list[tuple[int, ...]]:
    """Up to MAX_SEED_ORDERS orders that are often good; all orders where there are no more than that.

    The cluster's order and its reverse; by speed and by memory, both ways; blocks of equal slots in every
    order (up to four kinds); and `count_order`'s, with the smallest bottleneck. Where slots may stay idle,
    also the same orders of the best slots alone.
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
    """A fixed order as a whole, and, where slots may stay idle, its contiguous parts."""
    result = {tuple(order): None} if len(order) in lengths(instance) else {}
    for length in reversed(_few_lengths(lengths(instance))):
        for first in range(len(order) - length + 1):
            result[tuple(order[first : first + length])] = None
    return list(result)


def _few_lengths(allowed: range) -> list[int]:
    """At most six of the allowed lengths, evenly spaced."""
    if len(allowed) <= 6:
        return list(allowed)
    return sorted({allowed[round(i * (len(allowed) - 1) / 5)] for i in range(6)})


def _thin(orders: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return orders if len(orders) <= MAX_SEED_ORDERS else orders[:MAX_SEED_ORDERS]


def _block_orders(tables: CostTables) -> list[tuple[int, ...]]:
    """Kinds of slots as blocks, in every order of up to four kinds; inside a block in the cluster's order."""
    blocks: dict[int, list[int]] = {}
    for slot, kind in enumerate(tables.kind_of.tolist()):
        blocks.setdefault(kind, []).append(slot)
    if len(blocks) > 4:
        return []
    return [tuple(s for kind in kinds for s in blocks[kind]) for kinds in itertools.permutations(blocks)]


def count_order(tables: CostTables) -> tuple[int, ...] | None:
    """The order of kinds whose slowest stage is fastest, messages ignored; None if nothing fits, or if there
    are more than MAX_COUNT_STATES states.

    Dynamic programming over counts. State: how many slots of each kind the stages from the last one backwards
    have used. Value: the earliest unit that they reach if no stage takes longer than t. The number of slots
    used is the distance from the end, so the micro-batches in flight follow from the state. Bisection finds
    t. Exact for max(stage seconds).
    """
    kinds = sorted(set(tables.kind_of.tolist()))
    members = [np.flatnonzero(tables.kind_of == kind).tolist() for kind in kinds]
    shape = tuple(len(slots) + 1 for slots in members)
    if math.prod(shape) > MAX_COUNT_STATES:
        return None
    m = tables.instance.num_micro_batches
    depth = 1 if tables.instance.schedule == "gpipe" else min(m, tables.instance.num_slots)
    rates = [1.0 / int(tables.instance.replicas[kind]) for kind in kinds]
    stages = [
        [np.ascontiguousarray(tables.stage(kind, tables.in_flight(-k, 1))[0].T) * rate for k in range(depth)]
        for kind, rate in zip(kinds, rates, strict=True)
    ]
    values = tables.periods(kinds)
    best: list[int] | None = None
    low, high = 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        answer = _reach(stages, shape, float(values[middle]))
        if answer is None:
            low = middle + 1
        else:
            best, high = answer, middle - 1
    if best is None:
        return None
    unused = [list(slots) for slots in members]
    order = [unused[k].pop(0) for k in best]
    if tables.instance.use_all:
        order = [slot for slots in unused for slot in slots] + order
    return tuple(order)


def _reach(stages: Sequence[Sequence[Floats]], shape: tuple[int, ...], threshold: float) -> list[int] | None:
    """Kinds of the stages, first stage first, that cover all units within the threshold; None if none do.

    `stages` has the seconds [U+1, U+1] of a stage, by its end and its first unit, by kind and by distance
    from the last stage; `shape` is one more than the number of slots of each kind.
    """
    num_units = stages[0][0].shape[0] - 1
    starts = [[_earliest(seconds, threshold) for seconds in per_kind] for per_kind in stages]
    reach = np.full(math.prod(shape), num_units, dtype=np.int64)
    last_kind = np.full(math.prod(shape), -1, dtype=np.int64)
    strides = np.array([math.prod(shape[k + 1 :]) for k in range(len(shape))])
    counts = np.stack(np.unravel_index(np.arange(len(reach)), shape))
    level_of = counts.sum(axis=0)
    by_level = np.argsort(level_of, kind="stable")
    first_of = np.searchsorted(level_of[by_level], np.arange(int(level_of.max()) + 2))
    for level in range(1, int(level_of.max()) + 1):
        states = by_level[first_of[level] : first_of[level + 1]]
        reach[states] = num_units + 1
        for kind, per_kind in enumerate(starts):
            able = states[counts[kind, states] > 0]
            earliest = per_kind[min(level, len(per_kind)) - 1][reach[able - strides[kind]]]
            better = earliest < reach[able]
            reach[able[better]] = earliest[better]
            last_kind[able[better]] = kind
        done = states[reach[states] == 0]
        if len(done):
            order: list[int] = []
            state = int(done[0])
            while level_of[state]:
                order.append(int(last_kind[state]))
                state -= int(strides[last_kind[state]])
            return order
    return None


def _earliest(seconds: Floats, threshold: float) -> Integers:
    """[U+1]: first unit of the longest stage that ends before each unit; the unit itself if no stage fits."""
    fits = seconds <= threshold
    ends = np.arange(len(seconds))
    first = fits.argmax(axis=1)
    return np.where(fits[ends, first], first, ends)
