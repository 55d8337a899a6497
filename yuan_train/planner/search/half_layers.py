"""Cuts between attention and feed-forward: borders of a plan's stages are shifted by half a layer.

Stages of a whole-layer plan are up to a layer away from the best cut; a border in the middle of a layer
halves that. With experts the halves are unlike: attention needs compute, experts memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.search.candidate import Candidate
from yuan_train.planner.search.local import alike_pipelines, improve_candidate, move_depths, shift_borders
from yuan_train.planner.search.shapes import Options

NUM_SHIFTED = 4
"""Of the fastest plans."""


def half_layer_plans(
    costs: Costs,
    cards: Sequence[Card],
    options: Options,
    known: Sequence[Candidate],
    stopped: Callable[[], bool],
) -> list[Candidate]:
    """The fastest known plans with borders in the middle of layers; none unless these are searched."""
    if not options.half_layers:
        return []
    return [improve_candidate(costs, one, move_halves, options, stopped) for one in known[:NUM_SHIFTED]]


def move_halves(plan: Plan) -> Iterator[Plan]:
    """The plan with one border, or two, of pipelines that are alike half a layer further down or up, or with
    other depths."""
    for group in alike_pipelines(plan):
        borders = range(1, len(plan.pipelines[group[0]].stages))
        for shifted in itertools.chain(
            itertools.combinations(borders, 1), itertools.combinations(borders, 2)
        ):
            for by in itertools.product((-0.5, 0.5), repeat=len(shifted)):
                yield from shift_borders(plan, group, dict(zip(shifted, by, strict=True)))
    yield from move_depths(plan)
