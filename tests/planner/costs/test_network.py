"""Who shares a node's NIC: every ring of a tensor-parallel group's gradients, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from tests.planner.costs.test_costs import CARD, MODEL, problem
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.grad_reduce import (
    grad_reduce_seconds,
    ring_sharers,
    slice_rings,
    tied_embedding_seconds,
)
from yuan_train.planner.costs.plan_problem import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.instances import make_instance
from yuan_train.planner.search.shapes import PipelineCut, assemble_plan, list_shapes, read_options
from yuan_train.planner.solver.cost_tables import CostTables
from yuan_train.planner.solver.estimate import simulate_cuts

RATE = 1.25e6
"""Bytes per second of a NIC."""


def nodes_of(devices, *, count=2, latency=0.0):
    """A cluster of equal nodes whose own links take no time worth counting."""
    group = NodeGroup(
        name="n",
        count=count,
        device="Card",
        devices=devices,
        link=Link(bandwidth=1e15),
        network=Link(bandwidth=RATE, latency=latency),
    )
    return Cluster(name="c", nodes=(group,), device_types={"Card": CARD})


def costs_of(cluster, **changes):
    model = replace(MODEL, num_attention_heads=8)
    given = {"cluster": cluster, "model": model, "bucket_size": 10**9, "global_batch_size": 8}
    return make_costs(problem(**(given | changes)))


def plan_of(costs, *stages, sharded=False):
    """Equal pipelines; each stage is a list of the replica of each pipeline, of equal layers."""
    num_layers, count = costs.problem.model.num_layers, len(stages)
    bounds = [0, *(1 + num_layers * (s + 1) // count for s in range(count))]
    bounds[-1] += 1
    cuts = [
        PipelineCut(
            micro_batch_size=1,
            num_micro_batches=costs.problem.global_batch_size // len(stages[0]),
            stage_groups=tuple((stage[p],) for stage in stages),
            bounds=tuple(bounds),
            recompute=("none",) * count,
        )
        for p in range(len(stages[0]))
    ]
    return replace(assemble_plan(costs, cuts, schedule="1f1b"), optimizer_sharding=sharded)


@pytest.mark.parametrize("sharded", [False, True])
def test_all_rings_of_a_tensor_parallel_group_leave_the_node(sharded):
    costs = costs_of(nodes_of(8))
    cards = costs.problem.cluster.cards
    plan = plan_of(costs, [cards[:8], cards[8:]], sharded=sharded)
    # Of n bytes, each of the 8 rings has n / 8, and sends it once: half in each of two rounds. All of them go
    # through the one NIC of their node: n / RATE, whatever the width.
    gradients = 4.0 * costs.problem.model.parameters
    result = cost_plan(costs, plan)
    reduced = result.grad_reduce_seconds + result.tied_embedding_seconds
    tied = 4.0 * costs.problem.model.embedding_parameters / RATE
    if not sharded:
        # The tied embedding is one of the parameters.
        assert reduced == pytest.approx(gradients / RATE, rel=1e-3)
        assert result.tied_embedding_seconds == pytest.approx(tied)
    else:
        # Half on the way out, and the weights' half back; the tied embedding's both are in one figure.
        assert reduced == pytest.approx((gradients / 2 + tied * RATE / 2) / RATE, rel=1e-3)
        weights = result.weight_sync_seconds + tied / 2
        assert weights == pytest.approx(gradients / 2 / RATE, rel=1e-3)


def test_the_search_charges_all_rings_too():
    costs = costs_of(nodes_of(4))
    keys = SearchConfig(tensor=(4,), pipelines=(2,), replicas=(1,), optimizer_sharding=(False,))
    options = read_options(keys, micro_batch_size=1, model=costs.problem.model)
    (shape,) = [
        shape
        for shape in list_shapes(costs.problem.cluster.cards, options, global_batch_size=8)
        if len(shape.slots) == 1
    ]
    cards = costs.problem.cluster.cards
    num_units = costs.problem.model.num_layers + 2
    tables = CostTables(make_instance(costs, shape, options))
    (seconds,) = simulate_cuts(tables, np.array([[0]]), np.array([[0, num_units]]))
    plan = plan_of(costs, [cards[:4], cards[4:]])
    assert seconds == pytest.approx(cost_plan(costs, plan).step_seconds, rel=1e-9)


def test_rings_of_several_owners_share_by_their_number():
    costs = costs_of(nodes_of(4, latency=0.5))
    c = costs.problem.cluster.cards
    wide = (c[0:2], c[4:6])
    # Two rings of a group of two; beside them one ring of single cards.
    assert ring_sharers([wide]) == [2]
    assert ring_sharers([wide, (c[2:3], c[6:7])]) == [3, 3]
    assert ring_sharers([(c[0:2], c[2:4])]) == [1], "in a node"
    # 1,000 parameters: each ring has 2,000 bytes, 1,000 of them in each of two rounds, two rings at a time.
    seconds = grad_reduce_seconds(costs, wide, 1000, sharded=False, sharers=2)
    assert seconds == pytest.approx(2 * (0.5 + 2 * 1000 / RATE))


def test_owners_of_different_widths_send_all_their_bytes():
    costs = costs_of(nodes_of(4, count=3))
    c = costs.problem.cluster.cards
    # Four cards against two: four slices in the engine; the NIC of each node carries all n bytes either way.
    assert slice_rings([c[0:4], c[4:6]]) == [[c[0], c[4]], [c[2], c[5]]]
    for owners in ([c[0:4], c[4:6]], [c[0:4], c[4:8]], [c[0:1], c[4:8]]):
        (sharers,) = ring_sharers([owners])
        seconds = grad_reduce_seconds(costs, owners, 1000, sharded=False, sharers=sharers)
        assert seconds == pytest.approx(4000 / RATE)
    # Three owners: 2 (k - 1) / k of the bytes leave each node.
    owners = [c[0:4], c[4:6], c[8:12]]
    seconds = grad_reduce_seconds(costs, owners, 1000, sharded=False, sharers=ring_sharers([owners])[0])
    assert seconds == pytest.approx(4 / 3 * 4000 / RATE)
    # A group over two nodes: each of its rings leaves through one of them.
    assert ring_sharers([[(c[0], c[4]), (c[8], c[9])]]) == [2]
    assert ring_sharers([[(c[0], c[4]), (c[1], c[5])]]) == [1]


def test_the_tied_table_crosses_by_all_rings():
    costs = costs_of(nodes_of(4))
    c = costs.problem.cluster.cards
    table = 4.0 * costs.problem.model.embedding_parameters
    # First stage in one node, last stage in the other: one ring per card, all at once.
    assert tied_embedding_seconds(costs, [c[0:4]], [c[4:8]]) == pytest.approx(table / RATE)
    # Two owners in each node are passed one after the other: each ring enters and leaves a node once.
    owners = [c[0:2], c[4:6]], [c[2:4], c[6:8]]
    assert tied_embedding_seconds(costs, *owners) == pytest.approx(2 * 3 / 4 * table / RATE)
    assert tied_embedding_seconds(costs, [c[0:4]], [c[0:4]]) == 0
