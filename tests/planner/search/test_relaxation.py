"""The relaxed estimate of a shape against the plans that the search finds."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.search.test_search import CONFIGS, MODEL, card, cluster, find, problem
from yuan_train.config.cluster import Cluster, Link, NodeGroup, load_cluster
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem, make_costs
from yuan_train.planner.search.bounds import shape_bound
from yuan_train.planner.search.relaxation import relaxed_seconds
from yuan_train.planner.search.shapes import Options, Shape, list_shapes, read_options

ALONE: dict[str, Any] = {"pipelines": (1,), "tensor": (1,), "replicas": (1,)}
"""Search keys that leave one shape: one pipeline, one card per stage."""


def shapes_of(given_problem: PlanProblem, **search: object) -> tuple[Costs, Options, list[Shape]]:
    cards = given_problem.cluster.cards
    options = read_options(
        SearchConfig(**search),  # type: ignore[arg-type]
        micro_batch_size=1,
        model=given_problem.model,
        num_cards=len(cards),
    )
    shapes = list_shapes(cards, options, global_batch_size=given_problem.global_batch_size)
    return make_costs(given_problem), options, list(shapes)


def with_bandwidth(cards: Cluster, bandwidth: float) -> Cluster:
    link = Link(bandwidth=bandwidth, latency=1e-9)
    return replace(cards, nodes=tuple(replace(group, link=link, network=link) for group in cards.nodes))


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    fast=st.integers(1, 3),
    slow=st.integers(1, 3),
    speed=st.floats(1, 5),
    memory=st.sampled_from([0.16, 0.2, 0.3, 4.0]),
    batch=st.sampled_from([4, 8, 32]),
)
def test_near_the_best_cut_where_links_are_fast(fast, slow, speed, memory, batch):
    types = {"Fast": (fast, card(memory, speed=speed)), "Slow": (slow, card())}
    given_problem = problem(with_bandwidth(cluster(**types), 1e13), global_batch_size=batch)
    costs, options, shapes = shapes_of(given_problem, **ALONE)
    (shape,) = shapes
    relaxed = relaxed_seconds(costs, shape, options)
    try:
        result = find(given_problem, **ALONE)
    except NoPlanFits:
        assert relaxed == float("inf")
        return
    # On every input of these ranges the ratio lies between 0.81 and 1.38; most are within 1.15.
    assert result.best.step_seconds * 0.75 < relaxed < result.best.step_seconds * 1.4
    assert relaxed > 0.97 * shape_bound(costs, shape, options)


def test_less_memory_never_lowers_the_estimate():
    seconds = []
    for memory in (4.0, 0.19, 0.18, 0.17, 0.16, 0.15, 0.14, 0.13):
        cards = cluster(Fast=(2, card(memory, speed=3.0)), Slow=(2, card(memory)))
        costs, options, (shape,) = shapes_of(problem(cards), **ALONE)
        seconds.append(relaxed_seconds(costs, shape, options))
    assert all(more <= less for more, less in pairwise(seconds))
    assert seconds[0] < seconds[-2] and seconds[-1] == float("inf")


def test_a_large_search_comes_near_the_best_estimate():
    """Four nodes of eight cards, of three types, and a model that fills them: the shape with the least lower
    bound is not the most promising, because it is short of memory."""
    link, network = Link(bandwidth=3e11, latency=3e-6), Link(bandwidth=2.5e10, latency=1e-5)
    groups = (
        NodeGroup(name=name.lower(), device=name, count=n, devices=8, link=link, network=network)
        for name, n in (("A100-80G", 2), ("A100-40G", 1), ("RTX-4090", 1))
    )
    model = replace(
        MODEL,
        num_layers=24,
        hidden_size=8192,
        num_attention_heads=64,
        ffn_hidden_size=32768,
        vocab_size=135040,
        max_sequence_length=4096,
    )
    given_problem = problem(
        Cluster(name="four", nodes=tuple(groups)), model=model, sequence_length=4096, global_batch_size=128
    )
    costs, options, shapes = shapes_of(given_problem)
    estimates = [relaxed_seconds(costs, shape, options) for shape in shapes]
    bounds = [shape_bound(costs, shape, options) for shape in shapes]
    result = find(given_problem)
    # The estimates count no reductions.
    assert result.best.cost.compute_seconds < 1.04 * min(estimates)
    assert estimates[bounds.index(min(bounds))] > 1.04 * min(estimates)


def test_mixed_pipelines_shard_the_optimizer_state():
    """Each card has memory for the model's weights and gradients, and for half of its optimizer state."""
    cards = cluster(Fast=(1, card(0.195, speed=2.0)), Slow=(1, card(0.195)))
    search: dict[str, Any] = {"pipelines": (2,), "recompute": ("none",)}
    plan = find(problem(cards), **search).best.plan
    assert len(plan.pipelines) == 2 and plan.optimizer_sharding and not list(validate_plan(plan))
    with pytest.raises(NoPlanFits):
        find(problem(cards), optimizer_sharding=(False,), **search)


def test_interleaved_stages_are_found_where_the_best_cut_has_none():
    """The best 1F1B plan of this cluster has a pipeline of one stage, which has no virtual stages."""
    laptop = load_cluster(CONFIGS / "cluster" / "laptop.yaml")
    plain = find(problem(laptop, precision="fp32"))
    assert min(len(pipeline.stages) for pipeline in plain.best.plan.pipelines) == 1
    result = find(problem(laptop, precision="fp32"), schedule=("interleaved_1f1b",))
    assert result.best.plan.schedule == "interleaved_1f1b" and not list(validate_plan(result.best.plan))
    assert not result.exact
    one_layer = problem(laptop, precision="fp32", model=replace(MODEL, num_layers=1))
    with pytest.raises(NoPlanFits, match="virtual"):
        find(one_layer, schedule=("interleaved_1f1b",))
