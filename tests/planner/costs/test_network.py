"""Who shares a node's NIC: every ring of a tensor-parallel group's gradients, by hand."""

from dataclasses import replace

import pytest

from tests.planner.by_hand import pipeline, plan_on
from tests.planner.costs.test_costs import CARD, MODEL, problem
from yuan_train.config.cluster import Cluster, Link, NodeGroup, load_cluster
from yuan_train.config.errors import ConfigError
from yuan_train.config.profile import LinkProfile, NodeLinkProfile, Profile
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.grad_reduce import (
    crossing_rings,
    grad_reduce_seconds,
    slice_rings,
    tied_embedding_seconds,
)
from yuan_train.planner.costs.links import (
    all_gather_seconds,
    allreduce_seconds,
    find_route,
    make_topology,
    message_seconds,
    reduce_scatter_seconds,
    unmeasured,
)
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.search import notes_of

RATE = 1.25e6
"""Bytes per second of a NIC."""


def nodes_of(devices, *, count=2, latency=0.0, card=CARD):
    """A cluster of equal nodes whose own links take no time worth counting."""
    group = NodeGroup(
        name="n",
        count=count,
        device="Card",
        devices=devices,
        link=Link(bandwidth=1e15),
        network=Link(bandwidth=RATE, latency=latency),
    )
    return Cluster(name="c", nodes=(group,), device_types={"Card": card})


def costs_of(cluster, **changes):
    model = replace(MODEL, num_attention_heads=8)
    given = {"cluster": cluster, "model": model, "bucket_size": 10**9, "global_batch_size": 8}
    return make_costs(problem(**(given | changes)))


def plan_of(costs, *stages, sharded=False):
    """Equal pipelines; each stage is a list of the replica of each pipeline, of equal layers."""
    given = costs.problem
    used = [card for card in given.cluster.cards if any(card in replica for own in stages for replica in own)]
    layers = given.model.num_layers // len(stages)
    made = (
        pipeline(
            given.global_batch_size // len(replicas),
            [((tuple(map(used.index, replica)),), layers) for replica in replicas],
        )
        for replicas in zip(*stages, strict=True)
    )
    return plan_on(given, *made, cards=used, optimizer_sharding=sharded)


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


def test_cards_whose_links_were_not_measured_take_their_nodes_and_say_so():
    """Between two nodes, the first pair's link stands for the others; between nodes without any, the cluster
    file's rate, and inside of nodes too."""
    link = LinkProfile(from_="n-0/0", to="n-1/0", message_bytes=(100.0,), seconds=(7.0,))
    cluster = nodes_of(2)
    c, profile = cluster.cards, Profile(sequence_length=128, links=(link,))
    topology = make_topology(cluster, profile)
    assert message_seconds(find_route(topology, c[1], c[3]), 100.0) == 7.0
    back = message_seconds(find_route(topology, c[3], c[1]), 100.0)
    assert back == message_seconds(find_route(make_topology(cluster), c[3], c[1]), 100.0) != 7.0
    # Of twelve pairs one is measured, three are like it, eight are not known.
    assert unmeasured(topology, c) == (3, 8) and unmeasured(make_topology(cluster), c) == (0, 0)
    costs = costs_of(cluster, profile=profile)
    notes = notes_of(costs, cost_plan(costs, plan_of(costs, [c[:1]], [c[2:3]])))
    assert notes[-1] == "links of 2 pairs of cards: 1 not measured, taken as the cluster file states them"
    measured = replace(profile, links=(link, replace(link, from_="n-1/0", to="n-0/0")))
    costs = costs_of(cluster, profile=measured)
    assert "links" not in notes_of(costs, cost_plan(costs, plan_of(costs, [c[:1]], [c[2:3]])))[-1]


def test_one_message_may_not_fill_a_nic():
    link = LinkProfile(from_="n-0/0", to="n-1/0", message_bytes=(100.0, 1100.0), seconds=(1.0, 2.0))
    cluster = nodes_of(2)

    def seconds(flows, cluster=cluster, **changes):
        profile = Profile(sequence_length=128, **changes)
        c = cluster.cards
        route = find_route(make_topology(cluster, profile), c[0], c[2])
        return message_seconds(route, 1100.0, sharers=flows)

    # Measured alone at 1,100 bytes in 1 s beyond the smallest: the cluster's NIC takes more, up to RATE.
    assert [seconds(flows, links=(link,)) for flows in (1, 2)] == [2, 2]
    assert seconds(2000, links=(link,)) == pytest.approx(1 + 2000 * 1100 / RATE)
    # All cards at once were measured to get 2,200 bytes per second.
    together = NodeLinkProfile(from_="n-0", to="n-1", bytes_per_second=2200.0)
    shared = [seconds(flows, links=(link,), node_links=(together,)) for flows in (1, 2, 4)]
    assert shared == pytest.approx([2, 2, 3])
    # A slower NIC than the link was measured on: one flow fills it.
    slow = replace(cluster, nodes=(replace(cluster.nodes[0], network=Link(bandwidth=500.0)),))
    assert [seconds(flows, slow, links=(link,)) for flows in (1, 3)] == [2, 4]
    # Not measured: by the cluster file, a stream gets a quarter of the NIC.
    part = replace(cluster, nodes=(replace(cluster.nodes[0], network=Link(bandwidth=4400.0, stream=1100.0)),))
    assert [seconds(flows, part) for flows in (1, 4, 8)] == pytest.approx([1, 1, 2])


def test_libraries():
    costs = {
        backend: costs_of(nodes_of(1, count=4, latency=0.5, card=replace(CARD, backend=backend)))
        for backend in ("nccl", "gloo")
    }

    def seconds(function, backend, n, k):
        return function(costs[backend].topology, costs[backend].problem.cluster.cards[:k], n)

    # Little data: a tree of 4 nodes has 2 hops each way, the ring 6 rounds.
    assert seconds(allreduce_seconds, "nccl", 4.0, 4) == pytest.approx(2 * 2 * 0.5, rel=1e-4)
    assert seconds(allreduce_seconds, "gloo", 4.0, 4) == pytest.approx(6 * 0.5, rel=1e-4)
    # Much: both take the ring, 3/4 of the bytes twice.
    n = 100 * RATE
    for backend in ("nccl", "gloo"):
        assert seconds(allreduce_seconds, backend, n, 4) == pytest.approx(6 * 0.5 + 150)
        assert seconds(all_gather_seconds, backend, n, 4) == pytest.approx(3 * 0.5 + 75)
    assert seconds(reduce_scatter_seconds, "nccl", n, 4) == pytest.approx(3 * 0.5 + 75)
    # Four reductions of n / 4: 15/16 of the bytes, and what of n / 4 is more than 4 times 1.8 MB again.
    again = (n / 4 - 4 * 1.8e6) / RATE
    assert seconds(reduce_scatter_seconds, "gloo", n, 4) == pytest.approx(4 * 0.5 + 100 * 15 / 16 + again)
    # Of two an all-reduce.
    assert seconds(reduce_scatter_seconds, "gloo", RATE, 2) == pytest.approx(2 * 0.5 + 1)
    # A simulated card is a process, and has gloo whatever its file says; no copies, for it is its own host.
    costs["nccl"] = costs_of(nodes_of(1, count=4, latency=0.5, card=replace(CARD, slowdown=2.0)))
    assert seconds(reduce_scatter_seconds, "nccl", RATE, 2) == pytest.approx(2 * 0.5 + 1)


def test_cards_without_a_common_library_copy_through_their_hosts():
    other = replace(CARD, backend="rccl", host_link=5e5)
    mixed = replace(
        nodes_of(1, count=1),
        nodes=(
            NodeGroup(name="a", device="Card", network=Link(bandwidth=RATE)),
            NodeGroup(name="b", device="Other", network=Link(bandwidth=RATE)),
        ),
        device_types={"Card": replace(CARD, host_link=1e6), "Other": other},
    )
    topology = make_topology(mixed)
    a, b = mixed.cards
    assert message_seconds(find_route(topology, a, b), 1e6) == pytest.approx(1 + 1e6 / RATE + 2)
    assert message_seconds(find_route(topology, b, a), 1e6) == pytest.approx(2 + 1e6 / RATE + 1)
    # The slower card copies all bytes to its host and back.
    assert allreduce_seconds(topology, [a, b], 1e6) == pytest.approx(2 * 0.5e6 / RATE + 2 * 2)


def test_rings_of_several_owners_share_by_their_number():
    costs = costs_of(nodes_of(4, latency=0.5))
    c = costs.problem.cluster.cards
    wide = (c[0:2], c[4:6])
    # Two rings of a group of two; beside them one ring of single cards.
    assert set(crossing_rings(wide).values()) == {2}
    assert set((crossing_rings(wide) + crossing_rings((c[2:3], c[6:7]))).values()) == {3}
    assert not crossing_rings((c[0:2], c[2:4])), "in a node"
    # 1,000 parameters: each ring has 2,000 bytes, 1,000 of them in each of two rounds, two rings at a time.
    seconds = grad_reduce_seconds(costs, wide, 1000, sharded=False, sharers=2)
    assert seconds == pytest.approx(2 * (0.5 + 2 * 1000 / RATE))


def test_owners_of_different_widths_send_all_their_bytes():
    costs = costs_of(nodes_of(4, count=3))
    c = costs.problem.cluster.cards
    # Four cards against two: four slices in the engine; the NIC of each node carries all n bytes either way.
    assert slice_rings([c[0:4], c[4:6]]) == [[c[0], c[4]], [c[2], c[5]]]
    for owners in ([c[0:4], c[4:6]], [c[0:4], c[4:8]], [c[0:1], c[4:8]]):
        sharers = max(crossing_rings(owners).values())
        seconds = grad_reduce_seconds(costs, owners, 1000, sharded=False, sharers=sharers)
        assert seconds == pytest.approx(4000 / RATE)
    # Three owners: 2 (k - 1) / k of the bytes leave each node.
    owners = [c[0:4], c[4:6], c[8:12]]
    sharers = max(crossing_rings(owners).values())
    seconds = grad_reduce_seconds(costs, owners, 1000, sharded=False, sharers=sharers)
    assert seconds == pytest.approx(4 / 3 * 4000 / RATE)
    # A group over two nodes: each of its rings leaves through one of them.
    assert max(crossing_rings([(c[0], c[4]), (c[8], c[9])]).values()) == 2
    assert not crossing_rings([(c[0], c[4]), (c[1], c[5])])


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


def test_the_clusters_library_says_who_waits_unless_the_run_does(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("{name: c, nodes: [{name: n, device: T4}], library: {sends: blocking}}")
    cluster = load_cluster(path)
    assert problem(cluster=cluster).send_mode == "blocking" and problem().send_mode == "overlapped"
    assert problem(cluster=cluster, sends="overlapped").send_mode == "overlapped"
    assert SearchConfig().send_mode is None and SearchConfig(overlap=False).send_mode == "blocking"
    assert SearchConfig(overlap=False, sends="overlapped").send_mode == "overlapped"
    with pytest.raises(ConfigError, match="sends: wanted 'overlapped' or 'blocking'"):
        load_cluster(path, ("library.sends=both",))


def test_a_plan_takes_longer_where_more_wait_for_its_messages():
    c = nodes_of(1, count=3).cards
    seconds = []
    for sends in ("overlapped", "blocking"):
        costs = costs_of(nodes_of(1, count=3), sends=sends)
        seconds.append(cost_plan(costs, plan_of(costs, [c[:1]], [c[1:2]], [c[2:]])).compute_seconds)
    assert seconds == sorted(set(seconds))
