"""What a shape promises at a glance, against the plans that are found."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.test_search import CONFIGS, MODEL, card, cluster, find, setting
from yuan_train.config.cluster import Cluster, Link, NodeGroup, load_cluster
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.plan import plan_laws
from yuan_train.config.run import SearchConfig
from yuan_train.planner.bounds import shape_bound
from yuan_train.planner.candidates import Options, Shape, list_shapes, read_options
from yuan_train.planner.outlook import outlook_seconds
from yuan_train.planner.setting import Costs, Setting, make_costs

ALONE: dict[str, Any] = {"pipelines": (1,), "tensor": (1,), "replicas": (1,)}
"""One pipeline of single cards: one shape."""


def shapes_of(given_setting: Setting, **search: object) -> tuple[Costs, Options, list[Shape]]:
    cards = given_setting.cluster.cards
    options = read_options(
        SearchConfig(**search),  # type: ignore[arg-type]
        micro_batch_size=1,
        model=given_setting.model,
        num_cards=len(cards),
    )
    shapes = list_shapes(cards, options, global_batch_size=given_setting.global_batch_size)
    return make_costs(given_setting), options, list(shapes)


def joined(cards: Cluster, bandwidth: float) -> Cluster:
    link = Link(bandwidth=bandwidth, latency=1e-9)
    return replace(cards, nodes=tuple(replace(group, link=link, network=link) for group in cards.nodes))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    fast=st.integers(1, 3),
    slow=st.integers(1, 3),
    speed=st.floats(1, 5),
    memory=st.sampled_from([0.16, 0.2, 0.3, 4.0]),
    batch=st.sampled_from([4, 8, 32]),
)
def test_near_the_best_cut_where_links_are_fast(fast, slow, speed, memory, batch):
    types = {"Fast": (fast, card(memory, speed=speed)), "Slow": (slow, card())}
    given_setting = setting(joined(cluster(**types), 1e13), global_batch_size=batch)
    costs, options, shapes = shapes_of(given_setting, **ALONE)
    (shape,) = shapes
    outlook = outlook_seconds(costs, shape, options)
    try:
        result = find(given_setting, **ALONE)
    except NoPlanFits:
        assert outlook == float("inf")
        return
    assert result.best.step_seconds * 0.75 < outlook < result.best.step_seconds * 1.15
    assert outlook > 0.97 * shape_bound(costs, shape, options)


def test_less_memory_never_promises_more():
    seconds = []
    for memory in (4.0, 0.19, 0.18, 0.17, 0.16, 0.15, 0.14, 0.13):
        cards = cluster(Fast=(2, card(memory, speed=3.0)), Slow=(2, card(memory)))
        costs, options, (shape,) = shapes_of(setting(cards), **ALONE)
        seconds.append(outlook_seconds(costs, shape, options))
    assert all(more <= less for more, less in pairwise(seconds))
    assert seconds[0] < seconds[-2] and seconds[-1] == float("inf")


def test_a_large_search_comes_near_the_best_promise():
    """Four nodes of eight unlike cards and a model that fills them: by its bound alone (the order without an
    outlook) a shape is first that memory spoils."""
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
    given_setting = setting(
        Cluster(name="four", nodes=tuple(groups)), model=model, sequence_length=4096, global_batch_size=128
    )
    costs, options, shapes = shapes_of(given_setting)
    outlooks = [outlook_seconds(costs, shape, options) for shape in shapes]
    bounds = [shape_bound(costs, shape, options) for shape in shapes]
    result = find(given_setting)
    assert result.best.step_seconds < 1.04 * min(outlooks)
    assert outlooks[bounds.index(min(bounds))] > 1.04 * min(outlooks)


def test_unlike_pipelines_share_the_optimizers_state():
    """Each card has room for the model's weights and gradients, and for half of its optimizer state."""
    cards = cluster(Fast=(1, card(0.195, speed=2.0)), Slow=(1, card(0.195)))
    search: dict[str, Any] = {"pipelines": (2,), "recompute": ("none",)}
    plan = find(setting(cards), **search).best.plan
    assert len(plan.pipelines) == 2 and plan.optimizer_sharding and not list(plan_laws(plan))
    with pytest.raises(NoPlanFits):
        find(setting(cards), optimizer_sharding=(False,), **search)


def test_interleaved_stages_are_found_where_the_best_cut_has_none():
    """The best plan of this cluster has a pipeline of one stage, which cannot be split."""
    laptop = load_cluster(CONFIGS / "cluster" / "laptop.yaml")
    plain = find(setting(laptop, precision="fp32"))
    assert min(len(pipeline.stages) for pipeline in plain.best.plan.pipelines) == 1
    result = find(setting(laptop, precision="fp32"), schedule=("interleaved_1f1b",))
    assert result.best.plan.schedule == "interleaved_1f1b" and not list(plan_laws(result.best.plan))
    assert not result.exact
    one_layer = setting(laptop, precision="fp32", model=replace(MODEL, num_layers=1))
    with pytest.raises(NoPlanFits, match="virtual"):
        find(one_layer, schedule=("interleaved_1f1b",))
