"""Lower bounds of the step over all plans of a shape, and over all plans of any shape."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.search.shapes import Options, Shape
from yuan_train.planner.solver.area_bound import area_bound
from yuan_train.planner.solver.instance import SPLIT_SCHEDULES, Floats


def shape_bound(costs: Costs, shape: Shape, options: Options) -> float:
    """Seconds that no plan of the shape can beat: `area_bound`, without building the shape's instance."""
    kinds: Counter[tuple[int, int]] = Counter()
    rows: dict[int, Floats] = {}
    measured, names = costs.topology.measured, costs.topology.groups
    firsts = [slot[0] for slot in shape.slots]
    # Replicas on nodes of a group are alike, unless their links were measured.
    places = [
        id(g) if measured else (names[g[0][0].node].name, g[0][0].type, len(g[0]), len(g)) for g in firsts
    ]
    example = dict(zip(places, firsts, strict=True))
    for place, number in Counter(places).items():
        group = example[place]
        row = costs.fastest_of(group[0], shape.micro_batch_size, options.recompute)
        rows[id(row)] = row
        kinds[id(row), len(group)] += number
    return area_bound(
        np.array([rows[row] for row, _ in kinds]),
        np.array(list(kinds.values())),
        np.array([replicas for _, replicas in kinds]),
        shape.num_micro_batches,
        split=shape.schedule in SPLIT_SCHEDULES,
    )


def any_bound(costs: Costs, cards: Sequence[Card], options: Options, sizes: Sequence[int]) -> float:
    """Seconds that no plan of any shape can beat: every card is busy all the time, with its fastest
    width, recompute and micro-batch size among `sizes`.

    For weights l that sum to 1 over the cards, their weighted work is at least sum_u min_type l * w_u, as in
    `solver.area_bound`.
    """
    rows: list[list[float]] = []
    for name in dict.fromkeys(card.type for card in cards):
        ways = itertools.product(sizes, options.tensor, options.recompute)
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
    return costs.problem.global_batch_size * float((share[:, None] * work).min(axis=0).sum())
