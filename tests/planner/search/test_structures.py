"""The relaxed estimate of a shape against the plans that the search finds."""

from dataclasses import replace
from typing import Any

import pytest

from tests.planner.search.test_search import CONFIGS, MODEL, card, cluster, find, problem
from yuan_train.config.cluster import load_cluster
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.plan_constraints import validate_plan

ALONE: dict[str, Any] = {"pipelines": (1,), "tensor": (1,), "replicas": (1,)}
"""Search keys that leave one shape: one pipeline, one card per stage."""


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
