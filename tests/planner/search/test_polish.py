"""The polish: layers, warm-up depths and recompute, then structure; never slower, always lawful."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.search.test_search import MODEL, TWO_SPEEDS, card, cluster, find, problem
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import GIB
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.simulator import StageTimes
from yuan_train.planner.search.descent import Budget, PipelineScreen, balanced_cut
from yuan_train.planner.search.polish import (
    Realised,
    polish_plan,
    polished_estimate,
    restructure_plan,
)
from yuan_train.planner.search.regroup import regrouped
from yuan_train.planner.search.restructure import draft_of, neighbours, plan_of
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.shapes import read_options

MIDDLE = StageTimes(
    forward_seconds=(1.0,) * 4,
    backward_seconds=(2.0,) * 4,
    send_activation_seconds=(0.0, 1.5, 0.0),
    send_gradient_seconds=(0.0, 1.5, 0.0),
)
"""Four equal stages with a slow link in the middle."""


# --- layers, depths, recompute ---------------------------------------------------------------------------


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


def budget(work: float = 1e6) -> Budget:
    return Budget(work, lambda: False)


def options(**keys):
    keys = {"schedule": ("1f1b",), "micro_batch_size": (1,)} | keys
    return read_options(SearchConfig(**keys), micro_batch_size=1, model=MODEL, num_cards=4)


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
    depths = result.best.plan.pipelines[0].depths("1f1b")
    assert depths is not None and depths[0] > 4
    costs = make_costs(given_problem)
    assert result.best.step_seconds < 0.9 * cost_plan(costs, plain(result.best.plan)).step_seconds
    assert result.lower_bound_seconds <= result.best.step_seconds and not result.exact
    # The same without the memory that deeper warm-ups need.
    most = max(stage.memory.total for stage in cost_plan(costs, plain(result.best.plan)).stages)
    small = make_costs(replace(given_problem, cluster=two_nodes(most / GIB, seconds=2e-3)))
    assert not cost_plan(small, result.best.plan).fits
    unchanged = plain(result.best.plan)
    polished, cost = polish_plan(small, unchanged, cost_plan(small, unchanged), options(), budget())
    assert cost.fits and polished != result.best.plan


def test_plans_with_the_best_polished_estimate_are_polished():
    """Deeper warm-ups hide the transfers of a plan: its estimate says so before it is polished."""
    given_problem = problem(two_nodes(4.0, seconds=2e-3), model=UNTIED, global_batch_size=32)
    best = find(given_problem, **KEYS).best
    unchanged = plain(best.plan)
    cost = cost_plan(make_costs(given_problem), unchanged)
    assert polished_estimate(unchanged, cost) < 0.95 * cost.step_seconds


def test_a_card_with_room_for_three_of_five_layers_recomputes_two():
    model = replace(MODEL, num_layers=5)
    roomy = problem(cluster(Card=(1, card())), model=model)
    best = find(roomy, 4, recompute=("full",)).best
    costs = make_costs(roomy)

    def needed(count):
        stage = replace(best.plan.pipelines[0].stages[0], recompute="full", recompute_layers=count)
        pipeline = replace(best.plan.pipelines[0], stages=(stage,))
        return cost_plan(costs, replace(best.plan, pipelines=(pipeline,))).stages[0].memory.total

    memory = (needed(1) + needed(2)) / 2
    assert needed(3) < needed(2) < memory < needed(1)
    tight = replace(roomy, cluster=cluster(Card=(1, card(memory / GIB))))
    partly = find(tight, 4, recompute=("none", "full")).best
    (stage,) = partly.plan.pipelines[0].stages
    assert (stage.recompute, stage.num_recomputed) == ("full", 2)
    assert partly.cost.fits and partly.step_seconds < best.step_seconds
    # With search.recompute: [full], every layer is recomputed.
    (stage,) = find(tight, 4, recompute=("full",)).best.plan.pipelines[0].stages
    assert stage.num_recomputed == 5


def test_a_screen_prices_a_cut_as_the_whole_plan():
    given_problem = problem(TWO_SPEEDS, global_batch_size=16)
    costs = make_costs(given_problem)
    plan = find(given_problem, pipelines=(2,)).best.plan
    screen = PipelineScreen(costs, plan, cost_plan(costs, plan), 0, ("none", "selective", "full"), budget())
    assert screen.alike == (0, 1)
    assert screen.seconds(screen.cut) == pytest.approx(cost_plan(costs, plan).step_seconds, rel=1e-12)
    balanced = balanced_cut(screen)
    assert balanced is not None and balanced.borders[-1] == MODEL.num_layers


@settings(derandomize=True, deadline=None, max_examples=8)
@given(
    memory=st.sampled_from([0.17, 0.2, 0.3]),
    seconds=st.sampled_from([1e-6, 2e-3]),
    batch=st.sampled_from([4, 24]),
    sharded=st.booleans(),
)
def test_polished_plans_are_valid_fit_and_are_not_slower(memory, seconds, batch, sharded):
    given_problem = problem(two_nodes(memory, seconds=seconds), global_batch_size=batch)
    try:
        result = find(given_problem, optimizer_sharding=(sharded,))
    except NoPlanFits:
        return
    costs = make_costs(given_problem)
    for candidate in (result.best, *result.runners_up[:1]):
        assert not list(validate_plan(candidate.plan))
        cost = cost_plan(costs, candidate.plan)
        assert cost.fits and cost.step_seconds == pytest.approx(candidate.step_seconds)
        again, finer = polish_plan(costs, candidate.plan, candidate.cost, options(), budget(1e5))
        assert not list(validate_plan(again)) and finer.fits
        assert finer.step_seconds <= candidate.step_seconds
        assert cost_plan(costs, again).step_seconds == finer.step_seconds
    assert result.lower_bound_seconds <= result.best.step_seconds


# --- structure -------------------------------------------------------------------------------------------


def test_every_neighbour_keeps_the_laws_and_the_search_keys():
    given_problem = problem(TWO_SPEEDS, global_batch_size=16)
    costs = make_costs(given_problem)
    best = find(given_problem, pipelines=(2,)).best
    allowed = options(schedule=("1f1b", "zero_bubble"), micro_batch_size=(1, 2, 3), replicas=(1, 2))
    cards = list(costs.cards.values())
    draft = draft_of(best.plan, best.cost)
    drafts = list(neighbours(costs, draft, cards, allowed))
    assert draft not in drafts and len(drafts) > 10
    for other in drafts:
        plan = plan_of(costs, other)
        assert not list(validate_plan(plan))
        assert len(plan.pipelines) == 2 and plan.schedule in allowed.polished_schedules
        assert {p.micro_batch_size for p in plan.pipelines} <= {1, 2}
        assert max(len(s.replicas) for p in plan.pipelines for s in p.stages) <= 2
    held = options(use_all_devices=True, device_order="fixed", num_micro_batches=(8,))
    for other in neighbours(costs, draft, cards, held):
        plan = plan_of(costs, other)
        assert plan.world_size == best.plan.world_size
        assert {p.num_micro_batches for p in plan.pipelines} == {8}


def test_regrouped_pipelines_keep_the_laws_the_cards_and_the_batch():
    given_problem = problem(TWO_SPEEDS, global_batch_size=16)
    costs = make_costs(given_problem)
    best = find(given_problem, pipelines=(2,)).best
    draft = draft_of(best.plan, best.cost)
    numbers: set[int] = set()
    for other in regrouped(draft, options(tensor=(1, 2), replicas=(1, 2))):
        plan = plan_of(costs, other)
        assert not list(validate_plan(plan))
        assert plan.world_size == best.plan.world_size
        numbers.add(len(plan.pipelines))
    assert numbers == {1, 2, 4}
    kept = options(pipelines=(2,), replicas=(1,))
    assert {len(other.pipelines) for other in regrouped(draft, kept)} <= {2}
    assert not list(regrouped(draft, options(device_order="fixed")))


def test_restructuring_finds_a_larger_micro_batch():
    """Launching a unit's kernels takes as long as a small micro-batch's work: larger ones are faster."""
    given_problem = problem(TWO_SPEEDS, global_batch_size=16, sequence_length=16)
    costs = make_costs(given_problem)
    best = find(given_problem).best
    sizes = options(micro_batch_size=(1, 2, 4, 8))
    cards, known, first = list(costs.cards.values()), Realised(), budget()
    plan, cost = restructure_plan(costs, best.plan, best.cost, cards, sizes, first, known)
    assert plan.pipelines[0].micro_batch_size > 1 and cost.fits
    assert cost.step_seconds < 0.9 * best.step_seconds
    # What is known is not done again, and leads to the same.
    again = budget()
    assert restructure_plan(costs, best.plan, best.cost, cards, sizes, again, known)[0] == plan
    assert budget().work - again.work < 0.5 * (budget().work - first.work)
    # The search does the same by itself where no key fixes the size, and no slower.
    free = search_plan(given_problem, SearchConfig(), micro_batch_size=1)
    assert free.best.step_seconds < 0.9 * best.step_seconds
    assert free.lower_bound_seconds <= free.best.step_seconds and not free.exact
