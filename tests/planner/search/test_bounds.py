"""The lower bound against every possible plan, on problems small enough to list them all."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.planner.search.test_search import MODEL, card, cluster, find, problem
from yuan_train.config.cluster import Card, Cluster, Link, NodeGroup
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.plan import PipelinePlan, Plan, RankPlan, StagePlan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.profile import Profile, ProfileEntry, UnitProfile
from yuan_train.config.run import Recompute, SearchConfig
from yuan_train.planner.costs.plan_problem import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.bounds import lower_bound
from yuan_train.planner.search.shapes import Shape, make_plan, read_options

SMALL = replace(MODEL, num_layers=3)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All partitions of the items into unordered groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i, group in enumerate(rest):
            yield [*rest[:i], [items[0], *group], *rest[i + 1 :]]


def shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def stage_lists(ranks: list[int], cards: list[Card], num_layers: int) -> Iterator[tuple[StagePlan, ...]]:
    """Every pipeline over exactly these cards: any order, any cut; two cards of a node also as one
    tensor-parallel stage."""
    for order in itertools.permutations(ranks):
        ways: list[list[tuple[int, ...]]] = [[(rank,) for rank in order]]
        if len(order) == 2 and cards[order[0]].node == cards[order[1]].node:
            ways.append([tuple(order)])
        for replicas in ways:
            last = len(replicas) - 1
            for cut in itertools.combinations_with_replacement(range(num_layers + 1), last):
                ends = (0, *cut, num_layers)
                yield tuple(
                    StagePlan(
                        replicas=(replica,),
                        layers=(ends[s], ends[s + 1]),
                        embedding=s == 0,
                        head=s == last,
                    )
                    for s, replica in enumerate(replicas)
                )


def every_plan(cards: list[Card], batch: int, num_layers: int) -> Iterator[Plan]:
    for count in range(1, len(cards) + 1):
        for used in itertools.combinations(range(len(cards)), count):
            working = [cards[i] for i in used]
            ranks = tuple(RankPlan(rank=r, device=c.name, type=c.type) for r, c in enumerate(working))
            for groups in partitions(list(range(count))):
                if len(groups) > batch:
                    continue
                lists = [list(stage_lists(group, working, num_layers)) for group in groups]
                for stages, split in itertools.product(itertools.product(*lists), shares(batch, len(groups))):
                    yield Plan(
                        model=SMALL,
                        sequence_length=256,
                        global_batch_size=batch,
                        schedule="1f1b",
                        optimizer_sharding=count > 1,
                        ranks=ranks,
                        pipelines=tuple(
                            PipelinePlan(micro_batch_size=1, num_micro_batches=n, stages=own)
                            for n, own in zip(split, stages, strict=True)
                        ),
                    )


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_takes_less_than_the_bound(seed):
    """Pipelines with unequal shares of the batch, two widths, idle cards, sharded optimizer state."""
    rng = np.random.default_rng(seed)
    fast, slow = [(1, 1), (2, 1), (1, 2)][seed % 3]
    speed = float(rng.uniform(1, 4))
    given_problem = problem(
        cluster(Fast=(fast, card(speed=speed)), Slow=(slow, card(float(rng.choice([0.3, 4.0]))))),
        model=SMALL,
        global_batch_size=int(rng.integers(2, 4)),
    )
    costs = make_costs(given_problem)
    lowest = np.inf
    for plan in every_plan(
        list(given_problem.cluster.cards), given_problem.global_batch_size, SMALL.num_layers
    ):
        if list(validate_plan(plan)):
            continue
        cost = cost_plan(costs, plan)
        if cost.fits:
            lowest = min(lowest, cost.step_seconds)
    try:
        result = find(given_problem, tensor=(1, 2), replicas=(1,), recompute=("none",))
    except NoPlanFits:
        assert lowest == np.inf
        return
    assert result.lower_bound_seconds <= lowest * (1 + 1e-9)
    # No proof covers mixed pipelines, but the search should come close to their best.
    assert result.best.step_seconds <= lowest * 1.05
    if result.exact:
        assert result.best.step_seconds <= lowest * (1 + 1e-7)


@pytest.mark.parametrize(
    ("bandwidth", "layers", "sharded"),
    [(1e8, 0.5, True), (1e8, 99, False), (1e9, 2.1, True), (1e10, 1, False)],
)
def test_no_cut_of_two_equal_pipelines_is_faster(bandwidth, layers, sharded):
    """Gradients are reduced in buckets of so many layers, over links from slow to fast."""
    link = Link(bandwidth=bandwidth, latency=1e-5)
    nodes = tuple(NodeGroup(name=kind, device=kind, count=2, network=link) for kind in ("Fast", "Slow"))
    types = {"Fast": card(speed=2.5), "Slow": card()}
    given_problem = problem(
        Cluster(name="four", nodes=nodes, device_types=types),
        model=SMALL,
        bucket_size=int(layers * SMALL.layer_parameters),
        global_batch_size=8,
    )
    costs, bounds = make_costs(given_problem), range(1, SMALL.num_layers + 2)
    cards = given_problem.cluster.cards
    slots = tuple(((((cards[i],),), ((cards[i + 1],),))) for i in (0, 2))
    shape = Shape(schedule="1f1b", micro_batch_size=1, num_micro_batches=4, slots=slots, sharded=sharded)
    cuts = [((i,), (0, bounds.stop)) for i in (0, 1)]
    cuts += [(order, (0, b, bounds.stop)) for order in ((0, 1), (1, 0)) for b in bounds]
    costs_of_cuts = [
        cost_plan(
            costs,
            make_plan(costs, shape, order=order, bounds=ends, recompute=["none" for _ in order]),
        )
        for order, ends in cuts
    ]
    lowest = min(cost.step_seconds for cost in costs_of_cuts)
    keys = {"tensor": (1,), "replicas": (1,), "recompute": ("none",), "num_micro_batches": (4,)}
    result = find(given_problem, pipelines=(2,), optimizer_sharding=(sharded,), **keys)
    # Over slow links deeper warm-ups are faster still. No proof covers them.
    assert result.best.step_seconds <= lowest * (1 + 1e-9)
    assert not result.exact if bandwidth == 1e8 else result.best.step_seconds < lowest or result.exact
    assert result.best.step_seconds <= lowest * (1 + 1e-9)
    assert result.lower_bound_seconds <= lowest * (1 + 1e-9)


def test_units_that_take_no_time_have_a_bound():
    """A clock may be too coarse for them under one recompute; the search for the bound ends all the same."""

    def entry(recompute: Recompute, seconds: float) -> ProfileEntry:
        unit = UnitProfile(
            forward_seconds=seconds,
            backward_seconds=seconds,
            state_bytes=1e3,
            activation_bytes=1e3,
            output_bytes=1e3,
        )
        return ProfileEntry(
            device_type="Fast", recompute=recompute, embedding=unit, layers=(unit,), head=unit
        )

    profile = Profile(sequence_length=256, entries=(entry("none", 1e-3), entry("full", 0.0)))
    given_problem = problem(cluster(Fast=(1, card())), model=SMALL, profile=profile)
    search = SearchConfig(recompute=("none", "full"), tensor=(1,), micro_batch_size=(1,))
    options = read_options(search, micro_batch_size=1, model=SMALL)
    assert lower_bound(make_costs(given_problem), given_problem.cluster.cards, options).seconds == 0.0
