"""What no plan of a shape, or of any, can beat: for where there is no proof."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.planner.candidates import Options, Shape
from yuan_train.planner.partition import SPLIT_SCHEDULES, area_bound
from yuan_train.planner.setting import Costs
from yuan_train.planner.timing import CardCosts


def shape_bound(costs: Costs, shape: Shape, options: Options) -> float:
    """No plan of the shape takes less; without making its cutting problem."""
    kinds: dict[tuple[tuple[int, ...], int], int] = {}
    parts: dict[tuple[int, ...], list[CardCosts]] = {}
    for slot in shape.slots:
        own = [costs.of_replica(slot[0][0], shape.micro_batch_size, r) for r in options.recompute]
        same = tuple(map(id, own))
        parts[same] = own
        kinds[same, len(slot[0])] = kinds.get((same, len(slot[0])), 0) + 1
    rows: list[list[float]] = []
    for same, _ in kinds:
        times = [[u.forward_seconds + u.backward_seconds for u in part.units] for part in parts[same]]
        rows.append([min(values) for values in zip(*times, strict=True)])
    return area_bound(
        np.array(rows),
        np.array(list(kinds.values())),
        np.array([replicas for _, replicas in kinds]),
        shape.num_micro_batches,
        split=shape.schedule in SPLIT_SCHEDULES,
    )


def any_bound(costs: Costs, cards: Sequence[Card], options: Options) -> float:
    """No plan of any shape takes less: every card busy all the time at its fastest size, width and recompute.

    For shares l that sum to 1 over the cards, the work that they do is at least sum_u min_type l * w_u, as in
    `partition.area_bound`.
    """
    rows: list[list[float]] = []
    for name in dict.fromkeys(card.type for card in cards):
        ways = itertools.product(options.micro_batch_sizes, options.tensor, options.recompute)
        each = [
            [
                width * (u.forward_seconds + u.backward_seconds) / size
                for u in costs.of(name, size, r, width).units
            ]
            for size, width, r in ways
        ]
        rows.append([min(values) for values in zip(*each, strict=True)])
    work = np.array(rows)
    numbers = np.array(list(Counter(card.type for card in cards).values()))
    share = 1.0 / np.maximum(work.sum(axis=1), 1e-300)
    share /= (numbers * share).sum()
    return costs.setting.global_batch_size * float((share[:, None] * work).min(axis=0).sum())
