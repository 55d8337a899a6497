"""Thousands of cards: what is shared between slots is computed once, and the time limit is kept."""

import itertools

import numpy as np

from tests.support.models import tiny_model
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.search.search import search_plan


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
