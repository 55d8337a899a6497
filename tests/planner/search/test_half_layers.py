"""Plans whose stages end in the middle of a layer: costs that add up, and the search for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.by_hand import candidate_of, pipeline_of, plan_on
from tests.support.models import tiny_model
from tests.support.project import with_stages
from tools.bench.problems import endless
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan import StagePlan, num_units, plan_unit_parameters, stage_unit_range
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.grad_reduce import divides_alike
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.local import descend, move_halves
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.shapes import read_options

WIDE = {"hidden_size": 1024, "num_attention_heads": 8, "ffn_hidden_size": 2048, "tie_embeddings": False}
MODEL = tiny_model("yuan", num_layers=3, vocab_size=1024, **WIDE)
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
    assert [name for name, _, _ in plan.layer_units] == ["0", "1.attention", "1.feed_forward", "2"]
    assert num_units(plan) == 6
    assert sum(plan_unit_parameters(plan)) == MODEL.parameters
    first, second = (stage_unit_range(plan, stage) for stage in plan.pipelines[0].stages)
    assert (first, second) == (range(3), range(3, 6))


def test_a_half_keeps_its_own_input_under_full_recompute() -> None:
    plan = found(half_layers=True).plan
    costs = make_costs(PROBLEM)
    stages = (replace(stage, recompute="full") for stage in plan.pipelines[0].stages)
    recomputed = with_stages(plan, *stages)
    hidden = costs.hidden_bytes(1)
    first, second = cost_plan(costs, recomputed).stages
    # For each micro-batch in flight on the first stage; the embedding keeps its tokens, the head its own.
    assert first.in_flight >= 2
    assert first.memory.activations == first.in_flight * (2 * hidden + 8 * 2048)
    assert [unit.activation_bytes for unit in second.units[:2]] == [hidden, hidden]


def unlike(devices: int = 1) -> PlanProblem:
    """Fast cards that hold few experts beside slow ones that hold all of them."""
    fast, roomy = (
        DeviceType(memory=memory * 2**30, bf16=rate, fp16=rate, fp32=rate / 4, memory_bandwidth=1e12)
        for memory, rate in ((24, 312e12), (48, 60e12))
    )
    network = Link(bandwidth=50e9, latency=5e-6)
    nodes = tuple(
        NodeGroup(name=name, device=name, devices=devices, link=network, network=network)
        for name in ("Fast", "Roomy")
    )
    experts = {"num_experts": 24, "experts_per_token": 2, "expert_ffn_hidden_size": 2048, "router": "softmax"}
    sizes = WIDE | {"num_layers": 6, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 8192}
    model = tiny_model("yuan", **sizes, **experts, max_sequence_length=8192)
    cluster = Cluster(name="unlike", nodes=nodes, device_types={"Fast": fast, "Roomy": roomy})
    return replace(PROBLEM, cluster=cluster, model=model, sequence_length=8192, global_batch_size=8)


def test_attention_goes_to_the_fast_card_and_experts_to_the_roomy_one() -> None:
    """As virtual stages of half a layer; whole layers balance the two cards."""
    keys = {"micro_batch_size": (1,), "pipelines": (1,), "divide_experts": False}
    whole, halved = (
        search_plan(unlike(), SearchConfig(half_layers=halves, **keys), micro_batch_size=1).best  # pyright: ignore
        for halves in (False, True)
    )
    assert halved.step_seconds < 0.95 * whole.step_seconds
    plan = halved.plan
    assert plan.schedule == "interleaved_1f1b" and not list(validate_plan(plan))
    types = {rank.rank: rank.type for rank in plan.ranks}
    halves = [stage for stage in plan.pipelines[0].stages if stage.num_layers == 0.5]
    assert len(halves) >= 4
    for stage in halves:
        is_attention = float(stage.layers[0]).is_integer()
        assert types[stage.replicas[0][0]] == ("Fast" if is_attention else "Roomy")


def test_pipelines_that_divide_experts_are_shifted_alike_or_not_at_all() -> None:
    """Two equal pipelines, each a group of two cards and a single card: one border shifted alone would divide
    half a layer's experts in one pipeline and not in the other."""
    problem = unlike(3)
    pipelines = (
        pipeline_of(
            4,
            (
                StagePlan(replicas=(group,), layers=(0, 1), experts=(12, 12)),
                StagePlan(replicas=((single,),), layers=(1, 6)),
            ),
        )
        for group, single in (((0, 1), 3), ((4, 5), 2))
    )
    plan = plan_on(problem, *pipelines)
    assert not list(validate_plan(plan))
    costs = make_costs(problem)
    options = read_options(SearchConfig(micro_batch_size=(1,)), micro_batch_size=1, model=problem.model)
    known = candidate_of(costs, plan)
    shifted = descend(endless(costs, options), known, move_halves)
    assert divides_alike(shifted.plan) and shifted.step_seconds <= known.step_seconds
