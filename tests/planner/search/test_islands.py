"""Thousands of cards: the time limit is kept; islands of alike nodes, priced as the whole plan."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.models import tiny_model
from tools.bench.problems import endless, large_problem, mixed_problem
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search import islands
from yuan_train.planner.search.candidate import Candidate, Space, TimeLimit
from yuan_train.planner.search.drafts import plan_of
from yuan_train.planner.search.find import Plans
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.shapes import read_options, wanted_shapes
from yuan_train.planner.search.shortfall import most_copies, state_of


def group(device: str, count: int, devices: int, bandwidth: float) -> NodeGroup:
    return NodeGroup(
        name=f"{device}-x{devices}".lower(),
        device=device,
        count=count,
        devices=devices,
        link=Link(bandwidth=100e9, latency=3e-6),
        network=Link(bandwidth=bandwidth, latency=1e-5),
    )


def on_nodes(*nodes: NodeGroup, batch: int, num_layers: int = 4) -> PlanProblem:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 2048, "vocab_size": 8192}
    model = tiny_model("yuan", num_layers=num_layers, **sizes)
    return PlanProblem(
        cluster=Cluster(name="many", nodes=nodes),
        model=model,
        sequence_length=1024,
        global_batch_size=batch,
        precision="bf16",
    )


def best_of(problem: PlanProblem, **keys: Any) -> Candidate:
    return search_plan(problem, SearchConfig(**keys), micro_batch_size=1).best


def test_a_time_limit_leaves_a_lawful_plan_on_thousands_of_cards():
    nodes = group("A100-80G", 129, 8, 25e9), group("H100-80G", 130, 8, 25e9)
    ticks = itertools.count()
    result = search_plan(
        on_nodes(*nodes, batch=256),
        SearchConfig(time_limit=1.0),
        micro_batch_size=1,
        clock=lambda: 0.2 * next(ticks),
    )
    assert result.stopped
    assert not list(validate_plan(result.best.plan))
    assert result.best.cost.fits
    assert not result.exact
    assert np.isfinite(result.lower_bound_seconds)
    assert result.lower_bound_seconds <= result.best.step_seconds


# --- islands of nodes that are alike ---------------------------------------------------------------------


NODES = group("A100-80G", 9, 4, 25e9), group("RTX-4090", 7, 4, 5e9), group("H100-80G", 4, 8, 12.5e9)
NO_LIMIT = TimeLimit(lambda: 0.0, 0.0, math.inf)


def made(problem: PlanProblem, count: int):
    costs = make_costs(problem)
    options = read_options(SearchConfig(), micro_batch_size=1, model=problem.model, num_cards=96)
    island = islands._make_island(costs, options, count)
    assert island is not None
    return costs, island.searched(NO_LIMIT, 2_000, seed=1)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_price_of_an_island_is_that_of_all_together(count: int, is_tied: bool) -> None:
    problem = on_nodes(*NODES, batch=48, num_layers=12)
    problem = replace(problem, model=replace(problem.model, tie_embeddings=is_tied))
    costs, island = made(problem, count)
    assert len(island.steps) > 1
    for step, draft in zip(island.steps, island.drafts, strict=True):
        plan = islands._plan_of_all(costs, island, plan_of(island.tables, draft))
        assert plan is not None
        assert not list(validate_plan(plan))
        assert len(plan.pipelines) == count * draft.num_pipelines
        assert cost_plan(costs, plan).step_seconds == pytest.approx(step, rel=1e-9)


def test_a_batch_that_does_not_divide_is_dealt_by_single_sequences() -> None:
    costs, island = made(on_nodes(*NODES, batch=47, num_layers=12), 3)
    plan = islands._plan_of_all(costs, island, plan_of(island.tables, island.drafts[0]))
    assert plan is not None
    assert sum(one.num_micro_batches * one.micro_batch_size for one in plan.pipelines) == 47
    cost = cost_plan(costs, plan)
    assert cost.fits
    # A pipeline with fewer micro-batches ends earlier, and its reductions meet other messages.
    assert cost.step_seconds <= island.steps[0] * 1.01


def test_many_cards_are_searched_as_islands_within_the_limits_of_the_search_keys() -> None:
    problem = on_nodes(*NODES, batch=48, num_layers=12)
    best = best_of(problem, pipelines=(6, 9), tensor=(1, 2))
    assert len(best.plan.pipelines) in (6, 9)
    assert {len(own) for stage in best.plan.stages for own in stage.replicas} <= {1, 2}
    free = best_of(problem)
    assert free.step_seconds <= best.step_seconds
    assert best_of(problem).plan == free.plan


@pytest.mark.parametrize("count", [1, 3])
def test_the_price_of_an_island_counts_what_is_on_hosts(count: int) -> None:
    problem = replace(on_nodes(*NODES, batch=48, num_layers=400), memory_fraction=0.06)
    costs, island = made(problem, count)
    found = replace(island, space=island.beside, steps=(), drafts=()).searched(NO_LIMIT, 4_000, seed=1)
    plans = [islands._plan_of_all(costs, found, plan_of(found.tables, draft)) for draft in found.drafts]
    stages = [stage for plan in plans if plan for stage in plan.stages]
    assert any(stage.optimizer_offload or stage.activation_offload for stage in stages)
    for step, plan in zip(found.steps, plans, strict=True):
        assert plan is not None
        cost = cost_plan(costs, plan)
        assert cost.fits
        assert cost.step_seconds == pytest.approx(step, rel=1e-9)


def test_hosts_help_many_cards_whose_memory_state_fills() -> None:
    problem = large_problem(64, irregular=True)
    problem = replace(problem, model=replace(problem.model, num_layers=100))
    free = best_of(problem)
    assert free.step_seconds < 0.95 * best_of(problem, offload=()).step_seconds
    assert any(stage.optimizer_offload or stage.activation_offload for stage in free.plan.stages)


def test_a_model_whose_state_is_more_than_all_cards_hold_is_planned_with_hosts() -> None:
    problem = large_problem(64, irregular=True)
    problem = replace(problem, global_batch_size=64, model=replace(problem.model, num_layers=200))
    own, optimizer, room = state_of(make_costs(problem), problem.cluster.cards)
    assert own + optimizer > room
    best = best_of(problem)
    assert best.cost.fits
    stages = best.plan.stages
    assert sum(stage.optimizer_offload > 0.0 for stage in stages) > len(stages) / 2


def test_what_hosts_have_no_room_for_is_recomputed_on_few_cards() -> None:
    problem = mixed_problem(200)
    problem = replace(problem, model=replace(problem.model, num_layers=74))
    own, optimizer, room = state_of(make_costs(problem), problem.cluster.cards)
    assert own + optimizer > room
    best = best_of(problem, effort="quick")
    # It takes 611 s where stages put state on hosts that have no room for it, and drafts are drawn alike.
    assert best.cost.fits
    assert best.step_seconds < 400


def test_the_nearest_plan_is_taken_where_a_search_meets_none_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = large_problem(64, irregular=True)
    problem = replace(problem, model=replace(problem.model, num_layers=200))

    def nothing(*_: object) -> tuple[Space, Plans]:
        options = read_options(SearchConfig(), micro_batch_size=1, model=problem.model, num_cards=64)
        space = endless(make_costs(problem), options)
        shapes = [next(wanted_shapes(space.cards, options, global_batch_size=256))]
        return space, Plans(shapes=shapes, has_all_shapes=True, ranked=(), num_simulated=1, any_fits=False)

    monkeypatch.setattr("yuan_train.planner.search.search.find_plans", nothing)
    best = best_of(problem)
    assert best.cost.fits
    assert not list(validate_plan(best.plan))
    # Three times the layers are more than cards and hosts hold together: nothing is searched.
    monkeypatch.setattr("yuan_train.planner.search.search.find_plans", None)
    problem = replace(problem, model=replace(problem.model, num_layers=600))
    with pytest.raises(NoPlanFits, match=r"no plan fits: .* TiB on all cards\. Nearest"):
        best_of(problem)
    # Nor is it where no card has room for a layer.
    problem = replace(problem, model=replace(problem.model, num_layers=4), memory_fraction=0.07)
    with pytest.raises(NoPlanFits, match=r"no plan fits\. Nearest: [456] stages; .* layers? [0-3].* needs"):
        best_of(problem, tensor=(1,))


def test_islands_are_as_many_as_memory_suffices_for() -> None:
    problem = on_nodes(*NODES, batch=48, num_layers=12)
    costs = make_costs(problem)

    def most(**keys: Any) -> int:
        options = read_options(SearchConfig(**keys), micro_batch_size=1, model=problem.model, num_cards=96)
        return most_copies(costs, problem.cluster.cards, options)

    own, optimizer, room = state_of(costs, problem.cluster.cards)
    assert most() >= most(offload=()) >= most(offload=(), optimizer_sharding=(False,)) > 0
    assert (most(offload=(), optimizer_sharding=(False,)) + 1) * (own + optimizer) > room
