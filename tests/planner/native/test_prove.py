"""Branch and bound in the compiled core, against the price of every order, cut and choice of cards."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from tests.planner.search.test_search import MODEL, card, cluster, problem
from tools.bench.problems import endless
from yuan_train.config.run import Recompute, SearchConfig
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search import prove
from yuan_train.planner.search.shapes import list_shapes, make_plan, read_options


def drawn(seed, *, schedule):
    """(what is searched, shapes) of three or four cards of two types, some with little memory."""
    draw = random.Random(seed)
    model = replace(MODEL, num_layers=4)
    cards = cluster(
        Fast=(draw.randint(1, 2), card(draw.choice((0.16, 4.0)), speed=draw.uniform(1.0, 3.0))),
        Slow=(2, card(draw.choice((0.17, 4.0)))),
    )
    given = problem(cards, model=model, global_batch_size=draw.choice((2, 4, 7)))
    keys = SearchConfig(
        pipelines=(1,),
        schedule=(schedule,),
        tensor=(1,),
        replicas=(1,),
        recompute=("none",),
        offload=(),
        use_all_devices=draw.random() < 0.5,
    )
    options = read_options(keys, micro_batch_size=1, model=model)
    everything = given.cluster.cards
    shapes = list(list_shapes(everything, options, global_batch_size=given.global_batch_size))
    return endless(make_costs(given), options), shapes


def steps(space, shapes):
    """The steps of all plans of the shapes that fit."""
    costs, options = space.costs, space.options
    units = costs.problem.model.num_layers + 2
    for shape in shapes:
        slots = range(len(shape.slots))
        for count in (len(slots),) if options.use_all_devices else range(1, len(slots) + 1):
            orders = itertools.permutations(slots, count)
            cuts = itertools.combinations(range(1, units), count - 1)
            for order, ends in itertools.product(orders, cuts):
                same: list[Recompute] = ["none"] * count
                plan = make_plan(costs, shape, order=order, bounds=(0, *ends, units), recompute=same)
                cost = cost_plan(costs, plan)
                if cost.fits:
                    yield cost.step_seconds


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_proven_is_the_fastest_of_all(seed, schedule):
    space, shapes = drawn(seed, schedule=schedule)
    best = min(steps(space, shapes), default=math.inf)
    proof = prove.prove_shapes(space, shapes, best_seconds=math.inf)
    assert proof.exact and len(proof.found) == (best < math.inf)
    for one in proof.found:
        assert one.step_seconds == pytest.approx(best, rel=1e-9)
        again = prove.prove_shapes(space, shapes, best_seconds=best)
        assert again.found[0].step_seconds == pytest.approx(best, rel=1e-7)
        faster = prove.prove_shapes(space, shapes, best_seconds=0.99 * best)
        assert faster.exact and not faster.found


def test_a_proof_without_budget_is_abandoned(monkeypatch):
    monkeypatch.setattr(prove, "BUDGET", 2)
    space, shapes = drawn(0, schedule="1f1b")
    assert not prove.prove_shapes(space, shapes, best_seconds=math.inf).exact
