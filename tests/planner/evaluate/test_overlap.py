"""What is exposed of gradient reductions and of weights' way back: closed forms; what a bucket costs."""

import itertools
from dataclasses import replace

import pytest

from tests.planner.by_hand import entry, unit
from tests.planner.evaluate.test_any_plan import EIGHT, ONE, PAIR, on_cards, plan_of
from tests.planner.search.test_search import MODEL, problem
from yuan_train.config.cluster import Link
from yuan_train.config.model import HALVES
from yuan_train.config.profile import LinkProfile, Profile
from yuan_train.parallel.grid import Grid
from yuan_train.planner.costs.grad_reduce import bucket_costs, half_parts, place_plan
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan

LAYER = MODEL.layer_parameters + MODEL.hidden_size
"""A bucket size for one layer; the last layer's has the final norm too."""
OTHERS = [(((2,),), 4), (((3,),), 4)]
TWO_OF_ONE = plan_of((2, [ONE]), (2, [(((1,),), 8)]))
"""Two equal pipelines of one stage."""


def of(forward, backward):
    return unit(forward, backward, state=18.0, kept=1.0, output=1.0, transient_bytes=0.0)


PROFILE = Profile(
    sequence_length=256, entries=(replace(entry("Card", of(0.0, 0.0)), layers=(of(1.0, 2.0),)),)
)
"""A layer takes 1 s forward and 2 s backward; embedding and head take nothing."""


def problem_of(plan, *, layer_seconds=1.0, latency=0.0, bucket_size=LAYER, **changes):
    """Links over which two cards all-reduce a layer's fp32 gradient in `layer_seconds` (and twice the
    latency): each sends half of it twice."""
    link = Link(bandwidth=4 * MODEL.layer_parameters / layer_seconds, latency=latency)
    nodes = tuple(replace(node, link=link, network=link) for node in EIGHT.nodes)
    given = {"bucket_size": bucket_size, "profile": PROFILE, "global_batch_size": plan.global_batch_size}
    return problem(replace(EIGHT, nodes=nodes), **(given | changes))


def cost(plan, **changes):
    return cost_plan(make_costs(problem_of(plan, **changes)), plan)


def close(seconds):
    """The final norm adds a little to the last layer's bucket."""
    return pytest.approx(seconds, rel=2e-3)


def test_a_fast_reduction_leaves_only_the_last_bucket():
    # A reduction of 1 s for 2 s of backward: each ends before the next one is ready, and the first layer's,
    # ready when all is computed, is exposed. 2 micro-batches of 8 layers take 48 s.
    assert cost(TWO_OF_ONE).compute_seconds == pytest.approx(48)
    assert cost(TWO_OF_ONE).grad_reduce_seconds == close(1)
    # With 0.25 s of latency it takes 2 * 0.25 s more.
    assert cost(TWO_OF_ONE, latency=0.25).grad_reduce_seconds == close(1.5)
    # bf16 halves the bytes, not the latency.
    half = cost(TWO_OF_ONE, latency=0.25, reduce_dtype="bf16")
    assert half.grad_reduce_seconds == close(0.5 + 0.5)


def test_without_overlap_the_whole_reduction_is_exposed():
    # One bucket of all layers waits for the first layer's gradient.
    whole = cost(TWO_OF_ONE, latency=0.25, bucket_size=10**9)
    assert whole.grad_reduce_seconds == close(8 + 0.5)
    # Two buckets of four layers: the second starts when the backward ends.
    assert cost(TWO_OF_ONE, bucket_size=4 * LAYER).grad_reduce_seconds == close(4)


def test_a_slow_reduction_starts_with_the_last_layer():
    # 3 s a layer: the last layer's starts 7 * 2 s before the end, and the links are busy from then on.
    assert cost(TWO_OF_ONE, layer_seconds=3.0).grad_reduce_seconds == close(8 * 3 - 7 * 2)


def test_a_hidden_reduction_takes_compute():
    # A layer's reduction takes 1 s, and half a second of the compute that hides it: seven do. The first
    # layer's begins when all is computed, and takes none.
    num_bytes = 4 * MODEL.layer_parameters
    names = [card.name for card in EIGHT.cards[:2]]
    links = tuple(
        LinkProfile(
            from_=source,
            to=target,
            message_bytes=(1.0, float(num_bytes)),
            seconds=(0.0, 1.0),
            compute_seconds_per_byte=0.5 / num_bytes,
        )
        for source, target in itertools.permutations(names, 2)
    )
    profile = replace(PROFILE, links=links)
    assert cost(TWO_OF_ONE, profile=profile).grad_reduce_seconds == close(7 * 0.5 + 1)
    # Of a reduction of 3 s, which is hidden for 2 s, two thirds of what it takes; they pile up.
    slow = tuple(replace(link, seconds=(0.0, 3.0)) for link in links)
    expected = 8 * 3 - 7 * 2  # nothing else waits for the compute
    assert cost(TWO_OF_ONE, profile=replace(PROFILE, links=slow)).grad_reduce_seconds == close(expected)
    # In one bucket, nothing is hidden.
    assert cost(TWO_OF_ONE, profile=profile, bucket_size=10**9).grad_reduce_seconds == close(8)


def test_other_stages_drain_meanwhile():
    # Two pipelines of two stages: the second stage ends 4 * 2 s before the first one. Its reductions of 2.5 s
    # a layer start at -8 - 3 * 2 and end at -14 + 4 * 2.5 = -4; those of the first stage start at -3 * 2.
    plan = plan_of((4, PAIR), (4, OTHERS))
    assert cost(plan, layer_seconds=2.5).grad_reduce_seconds == close(-6 + 4 * 2.5)
    # At 5 s a layer, the second stage still ends at 6, before the first one at 14.
    assert cost(plan, layer_seconds=5.0).grad_reduce_seconds == close(-6 + 4 * 5)


def test_the_slowest_owner_says_when_a_bucket_is_ready():
    # One pipeline runs all layers on one card; in the other, the second of two stages ends early. The whole
    # one is behind, so that layer u is ready 2 u s before the end.
    plan = plan_of((6, [ONE]), (2, [(((1,),), 4), (((2,),), 4)]))
    assert cost(plan).compute_seconds == pytest.approx(6 * 24)
    assert cost(plan).grad_reduce_seconds == close(1)
    assert cost(plan, layer_seconds=3.0).grad_reduce_seconds == close(8 * 3 - 7 * 2)
    # One bucket for each pair of owners: card 0 reduces the later half from 8 s before the end on, then the
    # other.
    assert cost(plan, bucket_size=10**9).grad_reduce_seconds == close(4)
    assert cost(plan, bucket_size=10**9, layer_seconds=3.0).grad_reduce_seconds == close(-8 + 2 * 12)


def test_a_split_backward_counts_its_weight_part():
    # Zero bubble, one V of two cards in each pipeline: of a layer's backward, 1 s is its weights' part. The
    # first stage's last one ends the step.
    def v(a, b):
        return [(((rank,),), 2) for rank in (a, b, b, a)]

    plan = plan_of((4, v(0, 1)), (4, v(2, 3)), schedule="zero_bubble")
    result = cost(plan, layer_seconds=0.75)
    assert result.stages[0].weight_seconds == pytest.approx(2 * 1.0)
    ends = result.simulations[0].stage_end_seconds
    # Card 0 ends stage 3 long before stage 0, and has reduced it by then.
    assert ends[0] == max(ends) and ends[3] < ends[0] - 4
    assert result.grad_reduce_seconds == close(0.75)
    # At 1.5 s a layer, card 1 is the last: stage 2 ends 2 s before stage 1, its second layer's weights' part
    # 1 s before that, and from then on it reduces the four layers of both.
    assert ends[1] == pytest.approx(ends[0]) and ends[2] == pytest.approx(ends[0] - 2)
    assert cost(plan, layer_seconds=1.5).grad_reduce_seconds == close(-2 - 1 + 4 * 1.5)


def test_weights_come_back_while_the_next_forward_begins():
    sharded = replace(TWO_OF_ONE, optimizer_sharding=True)
    # Half of an all-reduce each: 0.5 s for a layer's fp32 gradient, 0.25 s for its bf16 weights. Layer u's
    # weights are there after 0.25 (u + 1) s, its forward would begin after u s: only the first one waits.
    fast = cost(sharded)
    assert fast.grad_reduce_seconds == close(0.5)
    assert fast.weight_sync_seconds == close(0.25)
    # At 2 s a layer they come later and later: the last one after 16 s, and needed after 7 s.
    slow = cost(sharded, layer_seconds=8.0)
    assert slow.weight_sync_seconds == close(8 * 2 - 7)
    # One bucket is one wait: all of it, by the first layer.
    assert cost(sharded, bucket_size=10**9).weight_sync_seconds == close(8 * 0.25)
    # With half a second of latency each, and reductions in bf16, which change no weights.
    late = cost(sharded, latency=0.5, reduce_dtype="bf16")
    assert late.weight_sync_seconds == close(0.5 + 0.25)
    assert cost(TWO_OF_ONE).weight_sync_seconds == 0


def test_later_stages_wait_for_no_weights():
    # The second stage begins 4 s after the first one, and has had its four layers' weights by then.
    plan = replace(plan_of((4, PAIR), (4, OTHERS)), optimizer_sharding=True)
    assert cost(plan, layer_seconds=4.0).weight_sync_seconds == close(1)
    # 3 s a layer: the first stage's last layer waits for 12 - 3 s, the second's for 12 - 7 s.
    assert cost(plan, layer_seconds=12.0).weight_sync_seconds == close(12 - 3)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_parts_of_a_step_add_up(sharded):
    result = cost(replace(TWO_OF_ONE, optimizer_sharding=sharded), layer_seconds=3.0)
    parts = result.compute_seconds + result.grad_reduce_seconds + result.tied_embedding_seconds
    assert result.step_seconds == pytest.approx(parts + result.update_seconds + result.weight_sync_seconds)
    # The tied embedding comes after all: gradients and weights, or twice the gradients.
    bytes_moved = (4 + 2) / 2 if sharded else 4
    tied = 3.0 * MODEL.embedding_parameters / MODEL.layer_parameters * bytes_moved / 4
    assert result.tied_embedding_seconds == pytest.approx(tied)


def test_buckets_of_a_plan():
    # The tied embedding is in none: it is reduced over the first and the last stages.
    plan = on_cards(plan_of((4, [ONE]), (4, [(((1,),), 4), (((2,),), 4)])), [0, 4, 5])
    costs = make_costs(problem_of(plan, bucket_size=2 * LAYER))
    buckets = bucket_costs(costs, place_plan(costs, plan))
    assert [bucket.units for bucket in buckets] == [range(1, 3), range(3, 5), range(5, 7), range(7, 10)]
    assert len({bucket.owners for bucket in buckets}) == 2
    # Two layers, over rings that take turns on card 0.
    assert [bucket.grad_reduce_seconds for bucket in buckets] == [close(2)] * 4


def test_halves_of_a_large_layer_are_buckets_of_their_own():
    plan = on_cards(plan_of((4, [ONE]), (4, [(((1,),), 4), (((2,),), 4)])), [0, 4, 5])
    costs = make_costs(problem_of(plan, bucket_size=LAYER // 2))
    attention = half_parts(costs)
    buckets = bucket_costs(costs, place_plan(costs, plan))
    assert [bucket.early for bucket in buckets] == [0, attention.seconds] * 8 + [0]
    # The engine has the same ones, and the tied embedding.
    found = [f"layers.{bucket.units[0] - 1}" for bucket in buckets[:-1]]
    names = [f"{name}.{half}" for name, half in zip(found, HALVES * 8, strict=True)]
    assert [bucket.units for bucket in Grid(plan, LAYER // 2).buckets[1:]] == [
        *((n,) for n in names),
        ("head",),
    ]
    # The feed-forward of the first layer goes behind its attention's backward.
    exposed = max(attention.parameters, 1 - 2 * attention.seconds)
    assert 0.3 < exposed < 0.7
    assert cost(TWO_OF_ONE, bucket_size=LAYER // 2).grad_reduce_seconds == close(exposed)
    # One owner reduces nothing, and has whole layers.
    assert Grid(plan_of((4, [ONE])), LAYER // 2).buckets[1].units == ("layers.0",)


@pytest.mark.parametrize(("precision", "share"), [("bf16", 0.5), ("fp64", 0.25)])
def test_a_reduction_in_bf16_packs_the_gradients_of_several_owners(precision, share):
    def gradients(plan, reduce_dtype):
        given = problem(EIGHT, global_batch_size=plan.global_batch_size, precision=precision)
        given = replace(given, reduce_dtype=reduce_dtype)
        return [stage.memory.gradients for stage in cost_plan(make_costs(given), plan).stages]

    one = plan_of((4, [ONE]))
    assert gradients(one, "bf16") == gradients(one, "fp32")
    for plan in (TWO_OF_ONE, replace(TWO_OF_ONE, optimizer_sharding=True)):
        for narrow, wide in zip(gradients(plan, "bf16"), gradients(plan, "fp32"), strict=True):
            assert narrow == pytest.approx((1 + share) * wide)
    # Of one pipeline only a tied embedding has several owners: the ends of the pipeline.
    ends = plan_of((4, PAIR))
    sizes = [MODEL.embedding_parameters, 4 * MODEL.layer_parameters]
    first, _ = (n / w for n, w in zip(gradients(ends, "bf16"), gradients(ends, "fp32"), strict=True))
    assert first == pytest.approx(1 + share * sizes[0] / sum(sizes))
