"""Pipelines of three stages, all of those that time and memory allow, against what the bound says of them."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.planner.search.test_lower_bounds import SIZES, random_problem
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import make_costs
from yuan_train.planner.search import pipeline_bound
from yuan_train.planner.search.card_limits import card_limits
from yuan_train.planner.search.equal_bound import Scope, Setting, make_setting
from yuan_train.planner.search.mixtures import GRIDS, Stages, Work
from yuan_train.planner.search.pipeline_bound import make_cells
from yuan_train.planner.search.shapes import read_options
from yuan_train.planner.search.stage_moves import Cells, Moves, Schedules, find_moves
from yuan_train.planner.search.stage_parts import FIRST, LAST, MIDDLE, ONLY, Floats

pytestmark = pytest.mark.bounds

NUM_MICRO_BATCHES = 6
MANY = 10**6
ROLES = (ONLY,), (FIRST, LAST), (FIRST, MIDDLE, LAST)


def stages_of(setting: Setting, schedules: Schedules, seconds: float) -> Stages:
    table = setting.table(1, 0.5, 0.0, Work(1e12))
    limits = setting.limits(
        table,
        1,
        schedules,
        compute_seconds=seconds,
        num_micro_batches=NUM_MICRO_BATCHES,
        most_cards=len(setting.cards),
        owners=1,
    )
    return Stages(table, setting.kinds, setting.ways(limits), limits, setting.card_limits)


@dataclass(frozen=True)
class Pipeline:
    seconds: float
    """W, each stage rounded down to cells."""
    layers: float
    uses: Floats


def every_pipeline(stages: Stages, cells: Cells) -> Iterator[Pipeline]:
    """Those of up to three stages, each with up to so many micro-batches in flight, that keep the conditions
    of the module's docstring."""
    for roles in ROLES:
        menus = [list(_stages(stages, role)) for role in roles]
        for row in itertools.product(*menus):
            if _is_allowed(stages, cells, row):
                whole = sum(int((w + e) / cells.seconds + 1e-9) for _, _, _, w, e in row)
                yield Pipeline(
                    whole * cells.seconds,
                    sum(float(stages.table.layers[x]) for _, x, _, _, _ in row),
                    np.sum([stages.ways.uses[way] for way, _, _, _, _ in row], axis=0),
                )


def _stages(stages: Stages, role: int) -> Iterator[tuple[int, int, int, float, float]]:
    """(way, entry, micro-batches in flight, seconds, seconds of messages)"""
    edges = stages.limits.edges.seconds
    for way, kind in enumerate(stages.ways.kinds.tolist()):
        for x in range(int(role == MIDDLE), len(stages.table.layers)):
            seconds = stages.table.seconds(role, np.array([kind]), np.array([x]))[0]
            held = [*range(1, len(seconds) + 1), *[MANY] * bool(np.isfinite(seconds[-1]))]
            # Of micro-batches in flight that take as long, the most.
            longest = {float(seconds[min(n, len(seconds)) - 1]): n for n in held}
            for own, number in longest.items():
                if np.isfinite(own):
                    yield way, x, number, own, float(edges[kind])


def _is_allowed(stages: Stages, cells: Cells, row: tuple[tuple[int, int, int, float, float], ...]) -> bool:
    limits, h = stages.limits, stages.limits.compute_seconds
    slack = limits.edges.slack
    whole = [w + e for _, _, _, w, e in row]
    used = sum(stages.kinds[stages.ways.kinds[way]].cards for way, _, _, _, _ in row)
    # One micro-batch passes all stages in time, perhaps without weight gradients.
    longest = h if limits.schedules == "plain" else 2 * h
    if used > limits.most_cards or sum(whole) - slack > longest:
        return False
    for s, (way, x, held, w, _) in enumerate(row):
        batches = float(stages.ways.batches[way])
        filled = cells.fill * max(sum(whole[:s]) - slack, 0.0)
        tail = sum(whole[s:]) - slack
        reduce = float(limits.reduce_seconds[stages.ways.kinds[way], x])
        if batches * w + filled > h or (batches - 1) * w + reduce > h:
            return False
        room = h - filled if limits.schedules == "plain" else h
        if held < batches and batches * tail > held * room and limits.schedules != "any":
            return False
        is_one = bool(stages.ways.is_one[way])
        if limits.schedules == "split" and is_one and held < min(len(row), batches):
            return False
        if limits.schedules == "any" and held < min(0.5 * batches * tail / h, batches):
            return False
    return True


def make_stages(seed: int, schedules: Schedules) -> tuple[Stages, random.Random]:
    chance = random.Random(seed)
    given = random_problem(chance)
    given = replace(given, model=replace(given.model, num_layers=2), global_batch_size=NUM_MICRO_BATCHES)
    costs = make_costs(given)
    options = read_options(
        SearchConfig(tensor=(1, 2), micro_batch_size=SIZES), micro_batch_size=1, model=given.model
    )
    # With half layers there are no virtual stages, which are not enumerated here.
    options = replace(options, half_layers=schedules == "any")
    scope = Scope(schedules=("1f1b",), sizes=(1,), any_replicas=True, uneven_shares=True)
    setting = make_setting(costs, given.cluster.cards, options, scope, 1.0)
    least = setting.table(1, 0.5, 0.0, Work(1e12)).least_seconds
    seconds = NUM_MICRO_BATCHES * float(np.median(least[np.isfinite(least)]))
    return stages_of(setting, schedules, seconds * chance.uniform(0.7, 1.6)), chance


def check(seed: int, schedules: Schedules, level: int) -> int:
    """How many pipelines are worth more than the bound says of their bucket."""
    stages, chance = make_stages(seed, schedules)
    grid = GRIDS[level]
    cells = make_cells(stages.table, stages.kinds, stages.limits, grid, (0.0, float("inf")))
    pipelines = list(every_pipeline(stages, cells))
    assert pipelines
    bound = stages.bound(grid)
    wrong = 0
    for _ in range(8):
        prices = np.array([chance.choice([0.0, chance.random()]) for _ in bound.first.uses[0]])
        value = chance.uniform(0.2, 1.0)
        worth = bound.priced(prices, value, np.arange(len(bound.low))).worth
        for one in pipelines:
            bucket = int(np.searchsorted(bound.high * cells.seconds, one.seconds + 1e-12, side="right"))
            own = value * one.layers - float(prices @ one.uses)
            wrong += bucket >= len(worth) or own > worth[bucket] + 1e-9
    return wrong


@pytest.mark.parametrize("schedules", ["plain", "split", "any"])
@pytest.mark.parametrize(("seed", "level"), [(0, 0), (1, 2), (2, 1), (6, 0)])
def test_no_pipeline_is_worth_more_than_its_bucket(seed: int, level: int, schedules: Schedules):
    assert check(seed, schedules, level) == 0


@pytest.mark.parametrize("change", ["begin", "end", "cells"])
def test_moves_with_less_room_are_caught(monkeypatch: pytest.MonkeyPatch, change: str):
    """The same check, of moves that start a cell later, end a cell earlier, or take a cell more."""

    def fewer(*args: object) -> Moves:
        moves = find_moves(*args)  # type: ignore[arg-type]
        return replace(moves, **{change: getattr(moves, change) + (-1 if change == "end" else 1)})

    monkeypatch.setattr(pipeline_bound, "find_moves", fewer)
    assert sum(check(seed, "plain", level) for seed, level in ((0, 0), (1, 2), (2, 1), (6, 0))) > 0


def test_spans_of_finer_cells_hold_what_coarser_ones_do():
    """W of a pipeline in finer cells is in the span that is given for its bucket of coarser ones."""
    found = 0
    for seed in range(4):
        stages, _ = make_stages(seed, "plain")
        coarse, fine = (
            make_cells(stages.table, stages.kinds, stages.limits, grid, (0.0, float("inf")))
            for grid in GRIDS[:2]
        )
        bound = stages.bound(GRIDS[0])
        pairs = zip(every_pipeline(stages, coarse), every_pipeline(stages, fine), strict=True)
        for rough, exact in pairs:
            bucket = int(np.searchsorted(bound.high * coarse.seconds, rough.seconds + 1e-12, side="right"))
            low, high = bound.span(np.array([bucket]))
            assert low - 1e-12 <= exact.seconds <= high + 1e-12
            found += exact.seconds > rough.seconds + 1e-12
    assert found


def test_wide_groups_are_limited_by_the_nodes_that_have_so_many_cards():
    sizes = (8, 4, 4, 2)
    nodes = tuple(
        NodeGroup(name=f"n{i}", device="A10", devices=size, link=Link(bandwidth=1e10))
        for i, size in enumerate(sizes)
    )
    cards = Cluster(name="c", nodes=nodes).cards
    found = card_limits(cards, (1, 2, 4, 8))
    assert dict(zip(found.widths.tolist(), found.most.tolist(), strict=True)) == {1: 18, 4: 16, 8: 8}
    # Two equal pipelines: no group of eight in each.
    assert dict(zip(found.widths.tolist(), found.of_each(2).tolist(), strict=True)) == {1: 9, 4: 8, 8: 0}
    uses = found.uses(np.array([0, 0]), np.array([2, 8]), np.array([4, 8]))
    assert uses.tolist() == [[4, 0, 0], [8, 8, 8]]
    # Groups of three: one in each node of four, two in that of eight.
    assert card_limits(cards, (1, 3)).most.tolist() == [18, 12]
