"""Plans whose stages end in the middle of a layer: costs that add up, and the search for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan_units import layer_units, num_units, plan_unit_parameters, stage_unit_range
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import PlanProblem, make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.search import search_plan

MODEL = ModelConfig(
    name="m",
    num_layers=3,
    hidden_size=1024,
    num_attention_heads=8,
    ffn_hidden_size=2048,
    vocab_size=1024,
    tie_embeddings=False,
)
PROBLEM = PlanProblem(
    cluster=Cluster(
        name="two",
        nodes=(NodeGroup(name="n", device="A100-80G", devices=2, link=Link(bandwidth=300e9, latency=3e-6)),),
    ),
    model=MODEL,
    sequence_length=2048,
    global_batch_size=16,
    precision="bf16",
)
KEYS = {"tensor": (1,), "pipelines": (1,), "recompute": ("none",), "replicas": (1,)}
KEYS |= {"schedule": ("1f1b",), "micro_batch_size": (1,)}


def found(**keys: object):
    return search_plan(PROBLEM, SearchConfig(**(KEYS | keys)), micro_batch_size=1).best  # pyright: ignore


def test_three_layers_on_two_equal_cards_are_halved() -> None:
    whole, halved = found(), found(half_layers=True)
    assert not whole.plan.divided_layers
    assert halved.plan.divided_layers == {1}
    assert [stage.layers for stage in halved.plan.pipelines[0].stages] == [(0, 1.5), (1.5, 3)]
    assert halved.step_seconds < 0.9 * whole.step_seconds
    assert halved.cost.fits and halved.plan.forecast is not None
    assert halved.plan.forecast.lower_bound_seconds <= halved.step_seconds
    # What halves take adds up to what layers take.
    for name in ("forward_seconds", "backward_seconds"):
        totals = [sum(getattr(stage, name) for stage in best.cost.stages) for best in (whole, halved)]
        assert totals[1] == pytest.approx(totals[0], rel=1e-9), name
    for name in ("parameters", "gradients", "optimizer"):
        totals = [sum(getattr(s.memory, name) for s in best.cost.stages) for best in (whole, halved)]
        assert totals[1] == pytest.approx(totals[0], rel=1e-9), name


def test_units_of_a_plan_that_divides_a_layer() -> None:
    plan = found(half_layers=True).plan
    assert [name for name, _, _ in layer_units(plan)] == ["0", "1.attention", "1.feed_forward", "2"]
    assert num_units(plan) == 6
    assert sum(plan_unit_parameters(plan)) == MODEL.parameters
    first, second = (stage_unit_range(plan, stage) for stage in plan.pipelines[0].stages)
    assert (first, second) == (range(3), range(3, 6))


def test_a_half_keeps_its_own_input_under_full_recompute() -> None:
    plan = found(half_layers=True).plan
    costs = make_costs(PROBLEM)
    stages = tuple(replace(stage, recompute="full") for stage in plan.pipelines[0].stages)
    recomputed = replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),))
    hidden = costs.hidden_bytes(1)
    first, second = cost_plan(costs, recomputed).stages
    # For each micro-batch in flight on the first stage; the embedding keeps its tokens, the head its own.
    assert first.in_flight >= 2
    assert first.memory.activations == first.in_flight * (2 * hidden + 8 * 2048)
    assert [unit.activation_bytes for unit in second.units[:2]] == [hidden, hidden]
