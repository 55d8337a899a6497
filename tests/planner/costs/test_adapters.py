"""Seconds and bytes of what is trained, where that is adapters on a frozen base."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.planner.by_hand import pipeline, plan_on
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import GIB, DeviceType
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import LoraConfig, ModelConfig, is_trained, layer_table, sharding_of
from yuan_train.config.plan import Plan
from yuan_train.config.profile import Profile
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.grad_reduce import bucket_costs, place_plan, tied_embedding_seconds
from yuan_train.planner.costs.unit_costs import check_profile, make_costs
from yuan_train.planner.costs.workload import STATE_BYTES, PlanProblem, TensorGroup, TokenRows, model_work
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.roles.engines import DecodeStage, EnginePlan, holders_of, sync_bytes
from yuan_train.planner.search.search import search_plan

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 128,
    "vocab_size": 256,
}
BASE = ModelConfig(name="test", architecture="llama", **SIZES)
MODEL = replace(BASE, lora=LoraConfig(rank=3))
CARD = DeviceType(memory=16 * GIB, reserved=GIB, bf16=1e14, fp32=1e13, memory_bandwidth=1e12)


def work_of(model: ModelConfig, width: int = 1) -> Any:
    return model_work(model, TokenRows(2, 16, "bf16"), logit_rows=16, group=TensorGroup(width))


def test_flops_of_a_frozen_base() -> None:
    """Backward of a matrix product: 2 FLOP a weight in place of 4; of an adapter 4."""
    base, adapted = work_of(BASE), work_of(MODEL)
    products = 2 * 32 * sum(half.products for half in BASE.spec.sublayers(BASE))
    adapters = 2 * 32 * MODEL.adapter_parameters
    assert adapted.layer.forward_flops == base.layer.forward_flops + adapters
    assert adapted.layer.backward_flops == base.layer.backward_flops - products + 2 * adapters
    assert adapted.layer.weight_share == adapters / adapted.layer.backward_flops
    # The loss computes logits and the hidden state's gradient, and no gradient of the matrix.
    assert adapted.head.forward_flops == base.head.forward_flops * 2 / 3
    assert adapted.embedding.trained == adapted.head.trained == 0
    assert adapted.embedding.transient_bytes == 0
    tokens = 32
    units = sum(unit.forward_flops + unit.backward_flops for unit in adapted.units)
    assert units == tokens * MODEL.training_flops(16)


def test_passes_of_adapters() -> None:
    """One adapter, of `down` [64, 128], for 32 tokens in bf16: x, y twice; dy twice, x, dx twice."""
    one = replace(BASE, lora=LoraConfig(rank=3, targets=("down",)))
    adapted, base = work_of(one).layer, work_of(BASE).layer
    weights, inner = 3 * (64 + 128), 32 * 3
    forward = adapted.forward_traffic_bytes - base.forward_traffic_bytes
    assert forward == 2 * (weights + 2 * inner + 32 * (128 + 2 * 64))
    backward = adapted.backward_traffic_bytes - base.backward_traffic_bytes
    frozen = 2 * 4 * (weights - BASE.layer_parameters)
    assert backward == 2 * (2 * weights + 4 * inner + 32 * (3 * 128 + 2 * 64)) + frozen


@pytest.mark.parametrize("width", [1, 2])
def test_each_card_holds_what_the_engine_gives_it(width: int) -> None:
    pytest.importorskip("torch")
    from yuan_train.parallel.shard import find_shard

    sharding, blocks = sharding_of(MODEL)
    sizes: dict[bool, int] = {True: 0, False: 0}
    for p in layer_table(MODEL):
        shard = find_shard(f"layers.0.{p.name}", p.shape, sharding, blocks, index=0, count=width)
        sizes[is_trained(MODEL, p.name)] += math.prod(shard.local_shape)
    layer = work_of(MODEL, width).layer
    assert layer.trained == sizes[True]
    # The few weights of norms are divided in the forecast, and whole on each card.
    assert 0 <= sizes[False] - (layer.parameters - layer.trained) <= 2 * 64


def problem(model: ModelConfig) -> PlanProblem:
    link = Link(bandwidth=1e10, latency=1e-5)
    groups = (NodeGroup(name="n", count=2, device="Card", devices=2, link=link, network=link),)
    return PlanProblem(
        cluster=Cluster(name="c", nodes=groups, device_types={"Card": CARD}),
        model=model,
        sequence_length=16,
        global_batch_size=8,
        precision="bf16",
        profile=None,
    )


def two_pipelines(model: ModelConfig) -> Plan:
    made = (pipeline(4, [(((first,),), 2), (((first + 1,),), 2)]) for first in (0, 2))
    return plan_on(problem(model), *made, optimizer_sharding=True)


def test_memory_and_reductions_of_a_plan() -> None:
    costs, plan = make_costs(problem(MODEL)), two_pipelines(MODEL)
    first, last = cost_plan(costs, plan).stages[:2]
    state, adapters = STATE_BYTES["bf16"], MODEL.adapter_parameters
    assert first.memory.parameters == 2 * (MODEL.embedding_parameters + 2 * MODEL.layer_parameters)
    for stage in (first, last):
        assert stage.memory.gradients == state.gradients * 2 * adapters
        # Two owners share the optimizer's state.
        assert stage.memory.optimizer == state.optimizer * 2 * adapters / 2
    placed = place_plan(costs, plan)
    buckets = bucket_costs(costs, placed)
    # Neither embedding nor head, which alone would be a bucket, is reduced.
    assert {unit for bucket in buckets for unit in bucket.units} >= {1, 2, 3, 4}
    assert all(set(bucket.units) & {1, 2, 3, 4} for bucket in buckets)
    replicas = [row[0][0] for row in placed.cards], [row[-1][0] for row in placed.cards]
    assert tied_embedding_seconds(costs, *replicas) == 0.0
    full = make_costs(problem(BASE))
    assert tied_embedding_seconds(full, *replicas) > 0.0
    assert cost_plan(full, two_pipelines(BASE)).step_seconds > cost_plan(costs, plan).step_seconds


def test_a_plan_is_found_that_keeps_nothing_on_hosts() -> None:
    found = search_plan(problem(MODEL), SearchConfig(time_limit=20.0, offload=()), micro_batch_size=1)
    plan = found.best.plan
    assert plan.model.lora == MODEL.lora
    assert not any(s.optimizer_offload or s.activation_offload or s.parameter_offload for s in plan.stages)


def test_engines_are_sent_what_the_transfer_sends_them() -> None:
    pytest.importorskip("torch")
    from yuan_train.parallel.transfer import plan_holdings

    cards = problem(MODEL).cluster.cards
    ends = ((0, 1, True, False), (1, 4, False, True))
    stages = [
        DecodeStage(cards=cards[2 * s : 2 * s + 2], layers=(a, b), embedding=embedding, head=head)
        for s, (a, b, embedding, head) in enumerate(ends)
    ]
    plan = plan_on(problem(MODEL), pipeline(8, [(((0, 1),), 1), (((2, 3),), 3)]))
    elements = sum(
        math.prod(shard.local_shape)
        for held in plan_holdings(plan).values()
        for name, shard in held.items()
        if is_trained(MODEL, name)
    )
    engine = EnginePlan(stages=tuple(stages), slots_per_group=8, num_groups=1)
    assert sync_bytes(MODEL, [engine], "bf16") == 2 * elements
    # Of four layers the first card has one, whatever the embedding weighs.
    assert [(h.first, h.last) for h in holders_of(MODEL, stages)] == [(0, 0.25)] * 2 + [(0.25, 1)] * 2


def test_a_profile_of_full_training_is_refused() -> None:
    profile = Profile(machine="m", sequence_length=16, precision="bf16", entries=())
    with pytest.raises(ConfigError, match="all parameters are trained where it is measured"):
        check_profile(profile, MODEL, sequence_length=16, precision="bf16")
