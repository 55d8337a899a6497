"""Activations on the hosts instead of recompute: where the link hides the copies, and nowhere else."""

from dataclasses import replace

from tests.planner.search.test_search import MODEL, card, cluster, find, problem, with_hosts
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import make_costs
from yuan_train.planner.report.terminal import plan_table
from yuan_train.planner.search.plan_bounds import bound_plans
from yuan_train.planner.search.shapes import read_options

DEEP = replace(MODEL, num_layers=16)
SHORT = {"recompute": ("none", "full"), "pipelines": (1,), "tensor": (1,), "replicas": (1,)}


def of_short_cards(host_link, **search):
    """Four cards in one pipeline, of which the first has no room for what it has in flight."""
    types = {"Card": replace(card(0.19), host_link=host_link)}
    cards = with_hosts(replace(cluster(Card=(4, card())), device_types=types))
    given = problem(cards, model=DEEP, global_batch_size=32)
    return given, find(given, 4, **SHORT, **search)


def test_a_fast_link_replaces_recompute_and_a_slow_one_does_not():
    given, without = of_short_cards(1e12)
    assert any(stage.num_recomputed for stage in without.best.cost.stages)
    _, found = of_short_cards(1e12, offload=("activations",))
    away = [stage for pipeline in found.best.plan.pipelines for stage in pipeline.stages]
    assert found.best.step_seconds < without.best.step_seconds and found.best.cost.fits
    assert any(stage.activation_offload for stage in away) and not list(validate_plan(found.best.plan))
    assert not found.exact and found.lower_bound_seconds <= found.best.step_seconds
    assert "optimizer state and activations on the host" in plan_table(found, given)
    _, slow = of_short_cards(1e7, offload=("activations",))
    assert slow.best.plan.pipelines == without.best.plan.pipelines


def bound_beside(given, best, micro_batch_size, **search):
    """The lower bound of these search keys, where nothing but itself keeps it below thrice a plan's step."""
    keys = {"schedule": ("1f1b",), "micro_batch_size": (micro_batch_size,)} | search
    costs, cards = make_costs(given), given.cluster.cards
    options = read_options(SearchConfig(**keys), micro_batch_size=micro_batch_size, model=given.model)
    return bound_plans(costs, cards, options, best_seconds=3 * best, stopped=lambda: False).any_seconds


def test_bounds_know_that_activations_may_leave():
    given, found = of_short_cards(1e12, offload=("activations",))
    bound = bound_beside(given, found.best.step_seconds, 4, **SHORT, offload=("activations",))
    assert bound <= found.best.step_seconds
    # Without, they are above the plan: so would they be with it, if they did not know.
    assert bound_beside(given, found.best.step_seconds, 4, **SHORT, offload=()) > found.best.step_seconds


def test_a_plan_that_recomputes_nothing_stays():
    given = problem(cluster(Fast=(2, card(speed=3.0)), Slow=(1, card())))
    plain, found = find(given), find(given, offload=("activations",))
    assert found.best.plan.pipelines == plain.best.plan.pipelines
