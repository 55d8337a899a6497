"""Rings and messages that share a NIC, by hand."""

import pytest

from yuan_train.config.cluster import Card
from yuan_train.planner.evaluate.plan_cost import BucketFlow, MessageFlow, run_transfers

A, B, C, D = (Card(f"{node}/{i}", node, "Card") for node in ("x", "y") for i in range(2))


def transfer(*cards, seconds=4.0, ready=0.0, rings=1):
    """A bucket of cards that takes so many seconds with one flow on its way, times the flows."""
    nodes = {card.node for card in cards}
    return BucketFlow(
        cards=cards,
        crossing=dict.fromkeys(nodes, rings) if len(nodes) > 1 else {},
        seconds=lambda flows: seconds * flows,
        ready=ready,
    )


def test_two_buckets_share_while_both_are_under_way():
    # From 2 s on both go on at half the rate: the first has half of itself left, 4 s; then the other, half
    # done, has the NIC to itself again.
    assert run_transfers([transfer(A, C), transfer(B, D, ready=2.0)]) == pytest.approx([6, 8])
    # In a node nothing is shared.
    assert run_transfers([transfer(A, B), transfer(C, D, ready=2.0)]) == pytest.approx([4, 6])
    assert run_transfers([transfer(A, C), transfer(B, ready=2.0)]) == pytest.approx([4, 6])


def test_a_bucket_waits_for_those_before_it_on_its_cards():
    # The second waits for card A although it was ready first; the third has other cards, and shares.
    order = [transfer(A, C, ready=1.0), transfer(A, D), transfer(B, D, ready=100.0)]
    assert run_transfers(order) == pytest.approx([5, 9, 104])
    assert run_transfers([transfer(A, C), transfer(A, D), transfer(B)]) == pytest.approx([4, 8, 4])


def test_wide_groups_take_more_of_a_nic():
    # Two rings and one: three flows. The bucket of two rings has 4 s alone (two flows of 2 s); at three flows
    # 6 s. The other, of 9 s alone, has 6 / 27 behind it by then.
    wide = transfer(A, C, seconds=2.0, rings=2)
    assert run_transfers([wide, transfer(B, D, seconds=9.0)]) == pytest.approx([6, 6 + 9 * (1 - 6 / 27)])


def test_messages_take_their_part():
    # A message takes half of the NIC for a second: half a second's work is left over. One inside the other
    # node, or between others, does not count; two at once take two thirds.
    order = [transfer(A, C)]
    assert run_transfers(order, [MessageFlow(1.0, 2.0, ("x", "z"))]) == pytest.approx([4.5])
    assert run_transfers(order, [MessageFlow(1.0, 2.0, ("u", "z"))]) == pytest.approx([4])
    two = [MessageFlow(0.0, 3.0, ("x", "z")), MessageFlow(0.0, 3.0, ("z", "x"))]
    assert run_transfers(order, two) == pytest.approx([3 + 3])
    # It began before the bucket, and ends after it.
    assert run_transfers([transfer(A, C, ready=5.0)], [MessageFlow(0.0, 99.0, ("y", "z"))]) == [13]


def test_a_remainder_below_the_clock_ends():
    # What is left of the short bucket when the message ends is less than a step of the clock at 1e6 s.
    short = transfer(A, C, seconds=1e-8, ready=1e6)
    message = MessageFlow(0.0, 1e6 + 1.9e-8, ("x", "z"))
    assert run_transfers([short, transfer(A, C, seconds=1e-9)], [message]) == pytest.approx([1e6, 1e6])


def test_what_runs_later_is_asked_when_its_cards_are_free():
    seen: list[tuple[int, float, float]] = []
    ends = run_transfers(
        [transfer(A, C), transfer(A, C)],
        later=lambda i: 10.0 * len(seen),
        ended=lambda i, start, end: seen.append((i, start, end)),
    )
    assert ends == [4, 14]
    assert seen == [(0, 0, 4), (1, 10, 14)]
    assert run_transfers([transfer(A, C, seconds=0.0)]) == [0] and not run_transfers([])
