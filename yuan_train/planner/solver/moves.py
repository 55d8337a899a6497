"""Local moves from one cut to its neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from yuan_train.planner.solver.cost_tables import CostTables
from yuan_train.planner.solver.instance import Integers

MAX_MOVED_STAGES = 24
"""Slowest stages that moves are tried on."""


def neighbours(
    tables: CostTables,
    classes: Integers,
    order: tuple[int, ...],
    bounds: tuple[int, ...],
    *,
    moved: int = MAX_MOVED_STAGES,
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts one move away: a unit moved to another stage, two slots swapped (with or without their units), a
    slot replaced by an idle one, or dropped.

    In long pipelines units are taken only from the `moved` slowest stages; swaps and replacements also
    involve one of them. `classes` [D] has the same number for slots whose swap changes nothing.
    """
    instance, stages = tables.instance, len(order)
    seconds = [
        float(table[a, b])
        for table, a, b in zip(tables.stage_seconds(order), bounds, bounds[1:], strict=False)
    ]
    slowest = set(sorted(range(stages), key=lambda s: (-seconds[s], s))[:moved])
    for a, b in itertools.permutations(range(stages), 2):
        if a not in slowest:
            continue
        # Stage a gives up one unit and stage b gets one more; the stages between shift by one unit.
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
