"""What a stage's own compute does not hide of its gradient reductions, and of its weights' way back.

The units [first, end) of a stage make buckets from the end: the one that ends before unit e begins at
`starts[e]`, or where the stage does. So each end's buckets continue those of the last one's start, and one
pass over the ends gives the answer for every range. Shapes: C choices of recompute, K kinds of slot, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from yuan_train.planner.solver.instance import Floats, Halves, Integers
from yuan_train.planner.solver.ranges import prefix_sums


def exposed_grad_reduce(
    backward_seconds: Floats, reduce_seconds: Floats, latency_seconds: Floats, starts: Integers
) -> Floats:
    """[C, K, U+1, U+1]: seconds from a stage's last backward to the end of its reductions, by [first, end).

    Backwards of units [C, K, U] run from the last unit to the first; a bucket, of `latency_seconds` [K] plus
    `reduce_seconds` [K, U] of its units, starts when its first unit's backward and the bucket before it have
    ended. So the last one ends at max over buckets (its backward's end + it and all buckets after it).
    """
    backward = prefix_sums(backward_seconds)
    ends = _no_stage(backward)
    for first, end, own, before, whole in _buckets(reduce_seconds, latency_seconds, starts):
        # Times are relative to the backward's end at unit 0; that of unit u ends backward[u] before it.
        ends[..., first:end, end] = own - backward[..., first:end]
        earlier = (whole[:, None] + before)[None] - backward[..., first, None]
        ends[..., :first, end] = np.maximum(ends[..., :first, first], earlier)
    return np.maximum(ends + backward[..., :, None], 0.0)


def exposed_weight_sync(
    forward_seconds: Floats, sync_seconds: Floats, latency_seconds: Floats, starts: Integers
) -> Floats:
    """[C, K, U+1, U+1]: seconds by which a stage's first forward must start later than its weights, so that
    no unit waits, by [first, end).

    The buckets' weights come one after the other, first units first, each in `latency_seconds` [K] plus
    `sync_seconds` [K, U] of its units; forwards of units [C, K, U] run in the same order.
    """
    forward = prefix_sums(forward_seconds)
    waits = _no_stage(forward)
    for first, end, own, before, whole in _buckets(sync_seconds, latency_seconds, starts):
        waits[..., first:end, end] = own - forward[..., first:end]
        last = (whole[:, None] + before)[None] - forward[..., first, None]
        waits[..., :first, end] = np.maximum(waits[..., :first, first], last)
    return np.maximum(waits + forward[..., :, None], 0.0)


def with_halves(
    table: Callable[[Floats, Floats, Floats, Integers], Floats], halves: Halves, compute_share: float
) -> Callable[[Floats, Floats, Floats, Integers], Floats]:
    """One of the tables above where some units are two buckets. A stage holds both, as each is whole.

    Of such a unit's compute the first bucket's half takes `compute_share`.
    """
    counts = 1 + halves.units
    unit_of = np.repeat(np.arange(len(counts)), counts)
    borders = np.append(0, counts.cumsum())
    is_second = np.diff(unit_of, prepend=-1) == 0
    is_half = halves.units[unit_of]

    def spread(values: Floats, first: float) -> Floats:
        return values[..., unit_of] * np.where(is_half, np.where(is_second, 1 - first, first), 1.0)

    def table_of_halves(compute: Floats, seconds: Floats, latency: Floats, starts: Integers) -> Floats:
        ends = np.arange(len(unit_of) + 1)
        of_units = borders[starts[unit_of + 1]]
        own = np.append(0, np.where(is_half, ends[:-1], of_units))
        parts = spread(compute, compute_share), spread(seconds, halves.parameters), latency, own
        return table(*parts)[..., borders[:, None], borders]

    return table_of_halves


def _no_stage(prefix: Floats) -> Floats:
    """[C, K, U+1, U+1] for prefix sums [C, K, U+1]: nothing exposed in an empty stage."""
    return np.repeat(-prefix[..., :, None], prefix.shape[-1], axis=-1)


def _buckets(
    seconds: Floats, latency_seconds: Floats, starts: Integers
) -> Iterator[tuple[int, int, Floats, Floats, Floats]]:
    """For each end: (first, end, own, before, whole).

    A stage that begins at a unit of [first, end) has one bucket, of `own` [K, end - first] seconds; one that
    begins earlier has a `whole` one [K] after buckets that take `before` [K, first] together.
    """
    prefix = prefix_sums(seconds)
    units = seconds.shape[1]
    totals = np.zeros((len(seconds), units + 1, units + 1))
    for end in range(1, units + 1):
        first = int(starts[end])
        own = prefix[:, end, None] - prefix[:, first:end]
        own = np.where(own > 0, own + latency_seconds[:, None], 0.0)
        before, whole = totals[:, :first, first], own[:, 0]
        totals[:, first:end, end] = own
        totals[:, :first, end] = before + whole[:, None]
        yield first, end, own, before, whole
