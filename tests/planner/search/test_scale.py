"""Thousands of cards: what is shared between slots is computed once, and the time limit is kept."""

import itertools

import numpy as np

from tests.planner.search.test_relaxation import shapes_of
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.grad_reduce import tied_embedding_seconds
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.evaluate.messages import edge_flows
from yuan_train.planner.search.explore import usable_part
from yuan_train.planner.search.instances import make_instance
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
    model = ModelConfig(
        name="small",
        num_layers=num_layers,
        hidden_size=512,
        num_attention_heads=8,
        ffn_hidden_size=2048,
        vocab_size=8192,
        tie_embeddings=True,
    )
    return PlanProblem(
        cluster=Cluster(name="many", nodes=nodes),
        model=model,
        sequence_length=1024,
        global_batch_size=batch,
        precision="bf16",
    )


def test_what_slots_share_is_what_each_has():
    nodes = group("A100-80G", 2, 4, 25e9), group("A100-80G", 1, 2, 5e9), group("H100-80G", 3, 2, 12.5e9)
    costs, options, shapes = shapes_of(on_nodes(*nodes, batch=12), replicas=(1,))
    several = [shape for shape in shapes if shape.num_pipelines > 1 and 1 < len(shape.slots)]
    assert len(several) > 3
    for shape in several:
        instance = make_instance(costs, shape, options)
        owners = [[replica for part in slot for replica in part] for slot in shape.slots]
        for i, j in itertools.permutations(range(len(owners)), 2):
            expected = tied_embedding_seconds(costs, owners[i], owners[j], sharded=shape.sharded)
            assert instance.ends_seconds[i, j] == expected
            edges = [(a[0][0], b[0][0]) for a, b in zip(shape.slots[i], shape.slots[j], strict=True)]
            flows = edge_flows(edges)
            slowest = max(edges, key=lambda edge: flows.sharers(*edge))
            if slowest[0].node == slowest[1].node:
                continue
            rate = min(costs.topology.groups[card.node].network.bandwidth for card in slowest)  # type: ignore[union-attr]
            size = costs.hidden_bytes(1) * flows.sharers(*slowest)
            assert instance.message_seconds[:, i, j].max() >= 1e-5 + size / rate * (1 - 1e-9)


def test_of_many_slots_as_many_as_stages_are_kept():
    nodes = group("A100-80G", 3, 8, 25e9), group("H100-80G", 1, 2, 25e9)
    _, _, shapes = shapes_of(on_nodes(*nodes, batch=1), tensor=(1,), replicas=(1,), pipelines=(1,))
    (shape,) = shapes
    kept = usable_part(shape, 6)
    names = [slot[0][0][0].name for slot in kept.slots]
    assert names == [*(f"a100-80g-x8-0/{i}" for i in range(6)), "h100-80g-x2/0", "h100-80g-x2/1"]
    assert usable_part(kept, 6) is kept


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
