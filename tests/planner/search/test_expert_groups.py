"""Stages whose cards share the experts of their layers: their costs, and the search for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.by_hand import entry, pipeline_of, plan_on, unit
from tests.support.models import tiny_model
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import DeviceType
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.profile import Profile
from yuan_train.config.run import SearchConfig
from yuan_train.parallel.grid import Grid
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.report.plan import plan_html, plan_json, plan_table
from yuan_train.planner.search.expert_groups import count_experts
from yuan_train.planner.search.search import search_plan

MODEL = tiny_model(
    "yuan-m32",
    num_layers=2,
    num_experts=16,
    hidden_size=512,
    num_attention_heads=8,
    head_dim=64,
    expert_ffn_hidden_size=4096,
    tie_embeddings=False,
)
FAST = Link(bandwidth=300e9, latency=1e-6)


def device(speed: float, memory: float = 64.0) -> DeviceType:
    """A card of `speed` times 10 TFLOP/s and `memory` GiB."""
    return DeviceType(
        memory=int(memory * 2**30), reserved=0, fp32=speed * 1e13, bf16=speed * 1e13, memory_bandwidth=1e12
    )


def three(*memory: float) -> Cluster:
    """Three cards of speeds 1, 1/2 and 1/4."""
    types = {name: device(s, gib) for (name, s), gib in zip(SPEEDS.items(), memory, strict=True)}
    nodes = tuple(NodeGroup(name=name.lower(), device=name, network=FAST) for name in types)
    return Cluster(name="three", nodes=nodes, device_types=types)


SPEEDS = {"Full": 1.0, "Half": 0.5, "Quarter": 0.25}


def problem(cluster: Cluster, **keys: object) -> PlanProblem:
    values = {"sequence_length": 512, "global_batch_size": 8, "precision": "bf16"} | keys
    return PlanProblem(cluster=cluster, model=MODEL, **values)  # pyright: ignore[reportArgumentType]


def plan_of(cluster: Cluster, pipelines: Sequence[Sequence[Any]], **keys: Any) -> Plan:
    """A plan with a stage of equal layers for each (ranks, experts) of a pipeline."""
    made: list[PipelinePlan] = []
    for stages in pipelines:
        each = MODEL.num_layers // len(stages)
        own = (
            StagePlan(replicas=(ranks,), layers=(s * each, (s + 1) * each), experts=experts)
            for s, (ranks, experts) in enumerate(stages)
        )
        made.append(pipeline_of(8 // len(pipelines), own))
    plan = plan_on(problem(cluster), *made, **keys)
    assert not list(validate_plan(plan))
    return plan


# --- counts ----------------------------------------------------------------------------------------------


@given(st.data())
def test_counts_are_the_fastest_of_all(data: st.DataObject) -> None:
    """Against every way to divide so few experts."""
    size, cards = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 3))
    times = st.floats(0, 8, allow_nan=False)
    fixed, each = (data.draw(st.lists(times, min_size=cards, max_size=cards)) for _ in range(2))
    most = data.draw(st.lists(st.integers(0, 7), min_size=cards, max_size=cards))

    def slowest(counts: tuple[int, ...]) -> float:
        return max(base + n * seconds for base, n, seconds in zip(fixed, counts, each, strict=True))

    ways = [
        counts for counts in itertools.product(*(range(limit + 1) for limit in most)) if sum(counts) == size
    ]
    found = count_experts(size, fixed, each, most)
    assert (found is None) is not bool(ways)
    if found is not None:
        assert found in ways and slowest(found) == min(map(slowest, ways))


def test_counts_of_unlike_and_of_like_cards() -> None:
    # 18/9/5 takes 20 units of time, 19/9/4 takes 19; the even 11/11/10 takes 40.
    assert count_experts(32, [0, 0, 0], [1, 2, 4], [32, 32, 32]) == (19, 9, 4)
    assert count_experts(32, [0, 0, 0], [1, 2, 4], [12, 32, 32]) == (12, 14, 6)
    assert count_experts(10, [0, 0, 0], [1, 1, 1], [9, 9, 9]) == (4, 3, 3)
    # The last card is late already without any.
    assert count_experts(4, [0, 0, 9], [1, 1, 1], [9, 9, 9]) == (2, 2, 0)


# --- costs -----------------------------------------------------------------------------------------------


def test_the_slowest_card_decides_the_time_and_the_tightest_the_memory() -> None:
    cluster = three(64, 64, 8)
    costs = make_costs(problem(cluster))
    plan = plan_of(cluster, [[((0, 1, 2), (10, 4, 2))]])
    (stage,) = cost_plan(costs, plan).stages
    assert stage.experts == (10, 4, 2) and stage.capacity_bytes == 8 * 2**30
    ranks = costs.of_ranks(plan, stage.replicas[0], 1, plan.pipelines[0].stages[0])
    assert stage.forward_seconds + stage.backward_seconds == max(part.seconds for part in ranks)
    # A card more with two experts holds 2 layers of 8 experts fewer than the first one, at 18 bytes each.
    (first, capacity), *_, (last, _) = stage.positions
    fewer = 2 * 8 * 3 * 512 * 4096
    assert capacity == 64 * 2**30 and last == stage.memory
    assert first.parameters - last.parameters == 2 * fewer and first.gradients - last.gradients == 4 * fewer
    assert first.optimizer - last.optimizer == 12 * fewer
    # No card is given more rows of a token than it has experts, nor more than two.
    assert first.activations == last.activations
    (few,) = cost_plan(costs, plan_of(cluster, [[((0, 1, 2), (15, 1, 0))]])).stages
    kept = [memory.activations for memory, _ in few.positions]
    row = 2 * 512 * 2 * (2 * 512 + 3 * 4096)
    assert [kept[0] - kept[1], kept[1] - kept[2]] == [row, row + 2 * 512 * 16]


def test_all_reduces_of_a_group_are_in_its_times() -> None:
    slow = Link(bandwidth=1e9, latency=1e-3)
    near = three(64, 64, 64)
    far = replace(near, nodes=tuple(replace(node, network=slow) for node in near.nodes))
    plan = plan_of(near, [[((0, 1, 2), (10, 4, 2))]])
    (close,), (apart,) = (cost_plan(make_costs(problem(c)), plan).stages for c in (near, far))

    def ring(link: Link, size: float) -> float:
        return 4 * (link.latency + size / 3 / link.bandwidth)

    hidden, small = 512 * 512 * 2, 512 * 2 * 4
    forward = 2 * (ring(slow, hidden) - ring(FAST, hidden))
    assert apart.forward_seconds - close.forward_seconds == pytest.approx(forward)
    backward = forward + 2 * (ring(slow, small) - ring(FAST, small))
    assert apart.backward_seconds - close.backward_seconds == pytest.approx(backward)


def test_states_are_shared_as_the_engine_shares_them() -> None:
    """Bytes of the optimizer's state of each rank, by the engine's buckets."""
    types = {"Card": device(1.0)}
    nodes = (NodeGroup(name="n", device="Card", devices=4, link=FAST),)
    cluster = Cluster(name="four", nodes=nodes, device_types=types)
    experts = 3 * 512 * 4096
    for stages in (
        [[((0, 1), (11, 5))], [((2, 3), (11, 5))]],
        [[((0, 1), (16, 0)), ((2, 3), (1, 15))]],
        [[((0, 1, 2), (6, 5, 5)), ((3,), None)]],
    ):
        plan = plan_of(cluster, stages, optimizer_sharding=True)
        owned = dict.fromkeys(range(4), 0.0)
        for bucket in Grid(plan, 1).buckets:
            ranks = [rank for owner in bucket.owners for rank in owner]
            for rank in ranks:
                owned[rank] += elements(plan, bucket.units[0], rank, experts) / len(ranks)
        cost = cost_plan(make_costs(problem(cluster)), plan)
        for stage, planned in zip(plan.stages, cost.stages, strict=True):
            for rank, (memory, _) in zip(stage.replicas[0], planned.positions, strict=True):
                assert memory.optimizer == pytest.approx(12 * owned[rank])
        assert planned.update_seconds > 0 and cost.grad_reduce_seconds > 0


def elements(plan: Plan, unit: str, rank: int, expert: int) -> float:
    """Parameters of a bucket of one unit, on a rank."""
    if unit.endswith(".experts"):
        counts = {
            rank: count
            for stage in plan.stages
            for rank, count in zip(stage.replicas[0], stage.experts or (16,), strict=True)
        }
        return expert * counts[rank]
    if unit.startswith("layers."):
        return MODEL.layer_parameters - 16 * expert
    return MODEL.embedding_parameters if unit == "embedding" else MODEL.head_parameters


def test_measured_layers_are_scaled() -> None:
    """What the profile has of a whole layer, by the ratio of the estimates."""
    own = unit(1.0, 2.0, state=18.0, kept=1.0, output=1.0, transient_bytes=0.0)
    entries = tuple(entry(name, own) for name in SPEEDS)
    profile = Profile(sequence_length=512, precision="bf16", entries=entries)
    costs = make_costs(problem(three(64, 64, 64), profile=profile))
    guessed = make_costs(problem(three(64, 64, 64)))
    whole, some = (costs.of_experts("Full", 1, "none", n).units[1] for n in (16, 4))
    alone, few = (guessed.of_experts("Full", 1, "none", n).units[1] for n in (16, 4))
    assert (whole.forward_seconds, whole.backward_seconds) == (1.0, 2.0)
    assert some.forward_seconds == pytest.approx(few.forward_seconds / alone.forward_seconds)
    assert some.state_bytes == pytest.approx(18 * few.parameters / alone.parameters)
    assert (some.forward_collectives, some.backward_collectives) == (1, 1)
    # With a layer measured without experts, seconds are on the line between the two.
    bare = replace(own, forward_seconds=0.2, backward_seconds=0.8)
    entries = tuple(replace(one, bare_layer=bare) for one in entries)
    costs = make_costs(problem(three(64, 64, 64), profile=replace(profile, entries=entries)))
    none, some = (costs.of_experts("Full", 1, "none", n).units[1] for n in (0, 4))
    assert (none.forward_seconds, none.backward_seconds) == (0.2, 0.8)
    assert (some.forward_seconds, some.backward_seconds) == pytest.approx((0.4, 1.1))
    assert some.state_bytes == pytest.approx(18 * few.parameters / alone.parameters)


# --- search ----------------------------------------------------------------------------------------------


def search(cluster: Cluster, **keys: object):
    fixed = {"schedule": ("1f1b",), "micro_batch_size": (1,), "offload": ()}
    values = {"pipelines": (1,), "recompute": ("none",), "optimizer_sharding": (False,)} | fixed | keys
    return search_plan(problem(cluster), SearchConfig(**values), micro_batch_size=1)  # pyright: ignore


def test_more_choice_never_loses_and_unlike_cards_get_unlike_counts() -> None:
    cluster = three(64, 64, 64)
    alone, found = search(cluster, divide_experts=False), search(cluster)
    assert found.best.step_seconds < 0.85 * alone.best.step_seconds
    assert not any(s.experts for s in alone.best.plan.pipelines[0].stages)
    (grouped,) = [s for s in found.best.plan.pipelines[0].stages if s.experts]
    assert grouped.experts is not None and sum(grouped.experts) == 16
    assert list(grouped.experts) == sorted(grouped.experts, reverse=True) and grouped.experts[0] > 8
    assert found.best.plan.forecast is not None and not list(validate_plan(found.best.plan))
    assert found.lower_bound_seconds <= found.best.step_seconds and not found.exact
    words = "experts " + "/".join(map(str, grouped.experts))
    assert words in plan_table(found, problem(cluster)) and words in plan_html(found, problem(cluster))
    assert any(stage["experts"] == list(grouped.experts) for stage in plan_json(found, path=None)["stages"])


def test_a_layer_that_fits_no_card_is_divided() -> None:
    """Two layers of 1.8 GiB: the cards have less, all together enough."""
    cluster = three(2.4, 1.2, 1.2)
    with pytest.raises(NoPlanFits):
        search(cluster, divide_experts=False)
    found = search(cluster).best
    assert found.cost.fits and any(stage.experts for stage in found.plan.pipelines[0].stages)
    with pytest.raises(NoPlanFits):
        search(cluster, tensor=(1,))


def test_equal_pipelines_have_equal_counts() -> None:
    types = {"Card": device(1.0, 1.6)}
    nodes = tuple(NodeGroup(name=name, device="Card", devices=4, link=FAST, network=FAST) for name in "ab")
    cluster = Cluster(name="eight", nodes=nodes, device_types=types)
    found = search(cluster, pipelines=(2,), optimizer_sharding=(True,), replicas=(1,)).best
    assert found.cost.fits and len(found.plan.pipelines) == 2
    counts = [[stage.experts for stage in pipeline.stages] for pipeline in found.plan.pipelines]
    assert counts[0] == counts[1] and any(counts[0])
