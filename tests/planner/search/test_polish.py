"""Post-optimisation: less recompute and deeper warm-ups."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.search.test_search import MODEL, card, cluster, find, problem
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import GIB
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.planner.costs.plan_problem import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.simulator import StageTimes, simulate_schedule
from yuan_train.planner.search.polish import deeper_warm_up, polish_plan, polished_estimate

MIDDLE = StageTimes(
    forward_seconds=(1.0,) * 4,
    backward_seconds=(2.0,) * 4,
    send_activation_seconds=(0.0, 1.5, 0.0),
    send_gradient_seconds=(0.0, 1.5, 0.0),
)
"""Four equal stages with a slow link in the middle."""


def step_seconds(times, depths, num_micro_batches=32):
    return simulate_schedule(
        "1f1b", times, num_micro_batches=num_micro_batches, in_flight=depths
    ).step_seconds


def test_one_more_micro_batch_in_flight_hides_a_slow_link():
    depths = deeper_warm_up(MIDDLE, (4, 3, 2, 1), 32, lambda stage, depth: True)
    assert depths == (5, 4, 2, 1)
    assert (step_seconds(MIDDLE, (4, 3, 2, 1)), step_seconds(MIDDLE, depths)) == (153.0, 108.0)


def test_memory_and_batch_limit_the_warm_up_depth():
    slow = replace(MIDDLE, send_activation_seconds=(0.0, 3.0, 0.0), send_gradient_seconds=(0.0, 3.0, 0.0))
    assert deeper_warm_up(slow, (4, 3, 2, 1), 32, lambda stage, depth: True) == (6, 5, 2, 1)
    assert deeper_warm_up(slow, (4, 3, 2, 1), 32, lambda stage, depth: depth + stage < 6) == (5, 4, 2, 1)
    assert deeper_warm_up(slow, (4, 3, 2, 1), 5, lambda stage, depth: True) == (5, 4, 2, 1)
    assert deeper_warm_up(slow, (4, 3, 2, 1), 4, lambda stage, depth: True) == (4, 3, 2, 1)
    free = replace(MIDDLE, send_activation_seconds=(0.0,) * 3, send_gradient_seconds=(0.0,) * 3)
    assert deeper_warm_up(free, (4, 3, 2, 1), 32, lambda stage, depth: True) == (4, 3, 2, 1)


def two_nodes(memory_gib: float, *, seconds: float) -> Cluster:
    """Two nodes of two cards; a hidden state takes `seconds` from node to node."""
    near = Link(bandwidth=1e12, latency=0.0)
    far = Link(bandwidth=1e15, latency=seconds)
    return Cluster(
        name="two",
        nodes=tuple(NodeGroup(name=name, device="Card", devices=2, link=near, network=far) for name in "ab"),
        device_types={"Card": card(memory_gib)},
    )


KEYS = {"pipelines": (1,), "tensor": (1,), "replicas": (1,), "use_all_devices": True}
UNTIED = replace(MODEL, tie_embeddings=False)


def plain(plan):
    """The plan with 1F1B's own depths."""
    pipelines = tuple(
        replace(pipeline, stages=tuple(replace(stage, in_flight=None) for stage in pipeline.stages))
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def test_a_plan_over_a_slow_network_warms_up_deeper():
    given_problem = problem(two_nodes(4.0, seconds=2e-3), model=UNTIED, global_batch_size=32)
    result = find(given_problem, **KEYS)
    depths = [stage.in_flight for stage in result.best.plan.pipelines[0].stages]
    assert depths == [6, 5, None, None]
    costs = make_costs(given_problem)
    assert result.best.step_seconds < 0.9 * cost_plan(costs, plain(result.best.plan)).step_seconds
    assert result.lower_bound_seconds <= result.best.step_seconds and not result.exact
    # The depths stay 1F1B's own if the network is fast, or if sends block the sender.
    for changes in ({"cluster": two_nodes(4.0, seconds=1e-8)}, {"overlap": False}):
        stages = find(replace(given_problem, **changes), **KEYS).best.plan.pipelines[0].stages
        assert {stage.in_flight for stage in stages} == {None}


def test_plans_with_the_best_polished_estimate_are_polished(monkeypatch):
    """Twelve slow and six fast cards: the best plan is not among the four that are fastest before
    polishing."""
    cards = cluster(Fast=(6, card(4.0, speed=3.0)), Slow=(12, card()))
    given_problem = problem(cards, model=replace(MODEL, num_layers=16), global_batch_size=32)
    result = find(given_problem)
    monkeypatch.setattr("yuan_train.planner.search.search.NUM_PROMISING", 0)
    assert result.best.step_seconds < 0.98 * find(given_problem).best.step_seconds
    for candidate in (result.best, *result.runners_up):
        assert polished_estimate(candidate.plan, candidate.cost) <= candidate.step_seconds


def test_deeper_warm_ups_need_memory():
    given_problem = problem(two_nodes(4.0, seconds=2e-3), model=UNTIED, global_batch_size=32)
    best = find(given_problem, **KEYS).best
    most = max(stage.memory.total for stage in cost_plan(make_costs(given_problem), plain(best.plan)).stages)
    small = replace(given_problem, cluster=two_nodes(most / GIB, seconds=2e-3))
    costs = make_costs(small)
    assert not cost_plan(costs, best.plan).fits
    unchanged = plain(best.plan)
    polished, cost = polish_plan(costs, unchanged, cost_plan(costs, unchanged), ("none", "full"))
    assert cost.fits and polished != best.plan


def test_a_card_with_room_for_three_of_five_layers_recomputes_two():
    model = replace(MODEL, num_layers=5)
    roomy = problem(cluster(Card=(1, card())), model=model)
    best = find(roomy, micro_batch_size=4, recompute=("full",)).best
    costs = make_costs(roomy)

    def needed(count):
        stage = replace(best.plan.pipelines[0].stages[0], recompute="full", recompute_layers=count)
        pipeline = replace(best.plan.pipelines[0], stages=(stage,))
        return cost_plan(costs, replace(best.plan, pipelines=(pipeline,))).stages[0].memory.total

    memory = (needed(1) + needed(2)) / 2
    assert needed(3) < needed(2) < memory < needed(1)
    tight = replace(roomy, cluster=cluster(Card=(1, card(memory / GIB))))
    partly = find(tight, micro_batch_size=4, recompute=("none", "full")).best
    (stage,) = partly.plan.pipelines[0].stages
    assert (stage.recompute, stage.num_recomputed) == ("full", 2)
    assert partly.cost.fits and partly.step_seconds < best.step_seconds
    # With search.recompute: [full], every layer is recomputed.
    (stage,) = find(tight, micro_batch_size=4, recompute=("full",)).best.plan.pipelines[0].stages
    assert stage.num_recomputed == 5


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    memory=st.sampled_from([0.17, 0.18, 0.2, 0.23, 0.3]),
    seconds=st.sampled_from([1e-6, 3e-4, 2e-3]),
    batch=st.sampled_from([4, 8, 24]),
    sharded=st.booleans(),
    pipelines=st.sampled_from([None, (1,), (2,)]),
)
def test_polished_plans_are_valid_fit_and_are_not_slower(memory, seconds, batch, sharded, pipelines):
    given_problem = problem(two_nodes(memory, seconds=seconds), global_batch_size=batch)
    try:
        result = find(given_problem, optimizer_sharding=(sharded,), pipelines=pipelines)
    except NoPlanFits:
        return
    costs = make_costs(given_problem)
    for candidate in (result.best, *result.runners_up):
        assert not list(validate_plan(candidate.plan))
        cost = cost_plan(costs, candidate.plan)
        assert cost.fits and cost.step_seconds == pytest.approx(candidate.step_seconds)
        again, finer = polish_plan(costs, candidate.plan, candidate.cost, ("none", "selective", "full"))
        assert not list(validate_plan(again)) and finer.fits
        assert finer.step_seconds <= candidate.step_seconds
        assert cost_plan(costs, again).step_seconds == finer.step_seconds
    assert result.lower_bound_seconds <= result.best.step_seconds
