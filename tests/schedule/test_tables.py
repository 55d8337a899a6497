"""Tables against closed forms, worked out here by a virtual clock of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yuan_train.schedule.check import check_table, peak_in_flight
from yuan_train.schedule.step import Lane, Step, Table
from yuan_train.schedule.tables import forward_only, gpipe, make_table, one_forward_one_backward

stages = st.integers(1, 7)
micro_batches = st.integers(1, 12)
UNSPLIT = ("1f1b", "gpipe")
"""Schedules with one stage per worker and whole backwards."""


def compute(lane: Lane) -> list[str]:
    """`F0 F1 B0 ...`"""
    return [f"{step.kind[0].upper()}{step.micro_batch}" for step in lane if step.is_compute]


def seconds_of(table: Table, *, forward: list[float], backward: list[float]) -> float:
    """When the last step ends, with free messages: each compute waits for its stage and for its input."""
    ended: dict[Step, float] = {}
    clock = [0.0] * len(table)
    waiting = [[step for step in lane if step.is_compute] for lane in table]
    while any(waiting):
        for s, lane in enumerate(waiting):
            while lane:
                step = lane[0]
                beside = s - 1 if step.kind == "forward" else s + 1
                needed = Step(step.kind, beside, step.micro_batch)
                inside = 0 <= beside < len(table)
                if inside and needed not in ended:
                    break
                seconds = (forward if step.kind == "forward" else backward)[s]
                clock[s] = max(clock[s], ended[needed] if inside else 0.0) + seconds
                ended[lane.pop(0)] = clock[s]
    return max(clock)


def test_one_forward_one_backward_by_hand() -> None:
    # Three stages, four micro-batches: warm-up of 2, 1 and 0 forwards.
    table = one_forward_one_backward(num_stages=3, num_micro_batches=4)
    assert [" ".join(compute(lane)) for lane in table] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_messages_by_hand() -> None:
    table = one_forward_one_backward(num_stages=2, num_micro_batches=2)
    assert [str(step) for step in table[1]] == [
        "receive activation of micro-batch 0 on stage 1",
        "receive activation of micro-batch 1 on stage 1",
        "forward of micro-batch 0 on stage 1",
        "backward of micro-batch 0 on stage 1",
        "send gradient of micro-batch 0 on stage 1",
        "forward of micro-batch 1 on stage 1",
        "backward of micro-batch 1 on stage 1",
        "send gradient of micro-batch 1 on stage 1",
    ]


@given(stages, micro_batches)
def test_equal_stages_take_the_closed_form(num_stages: int, num_micro_batches: int) -> None:
    # (m + S - 1)(f + b) for both schedules; powers of two keep the sums exact.
    for schedule in UNSPLIT:
        table = make_table(schedule, num_stages=num_stages, num_micro_batches=num_micro_batches)
        seconds = seconds_of(table, forward=[1.0] * num_stages, backward=[2.0] * num_stages)
        assert seconds == (num_micro_batches + num_stages - 1) * 3.0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), micro_batches)
def test_unlike_stages_are_never_faster_than_the_slowest(times: list[int], num_micro_batches: int) -> None:
    forward, backward = [float(t) for t in times], [2.0 * t for t in times]
    for schedule in UNSPLIT:
        table = make_table(schedule, num_stages=len(times), num_micro_batches=num_micro_batches)
        seconds = seconds_of(table, forward=forward, backward=backward)
        assert seconds >= 3.0 * max(times) * num_micro_batches
        assert seconds >= 3.0 * sum(times)
        if num_micro_batches == 1:
            assert seconds == 3.0 * sum(times)


@given(stages, micro_batches)
def test_activations_alive(num_stages: int, num_micro_batches: int) -> None:
    table = one_forward_one_backward(num_stages=num_stages, num_micro_batches=num_micro_batches)
    for stage, lane in enumerate(table):
        assert peak_in_flight(lane) == min(num_stages - stage, num_micro_batches)
    for lane in gpipe(num_stages=num_stages, num_micro_batches=num_micro_batches):
        assert peak_in_flight(lane) == num_micro_batches


@given(stages, micro_batches)
def test_every_table_is_whole(num_stages: int, num_micro_batches: int) -> None:
    for schedule in UNSPLIT:
        table = make_table(schedule, num_stages=num_stages, num_micro_batches=num_micro_batches)
        check_table(table)
        for stage, lane in enumerate(table):
            wanted = sorted(f"{kind}{m}" for kind in "FB" for m in range(num_micro_batches))
            assert sorted(compute(lane)) == wanted
            assert all(step.stage == stage for step in lane)
            sends = [step for step in lane if step.kind.startswith("send")]
            inner_sides = (stage > 0) + (stage < num_stages - 1)
            assert len(sends) == num_micro_batches * inner_sides
    check_table(forward_only(num_stages=num_stages, num_micro_batches=num_micro_batches))


@given(stages, micro_batches)
def test_one_receive_of_each_direction_is_open(num_stages: int, num_micro_batches: int) -> None:
    """When one is taken the next is open already, and no third."""
    for lane in one_forward_one_backward(num_stages=num_stages, num_micro_batches=num_micro_batches):
        for receive, use in (("receive_activation", "forward"), ("receive_gradient", "backward")):
            left = sum(step.kind == receive for step in lane)
            num_open = 0
            for step in lane:
                if step.kind == receive:
                    num_open, left = num_open + 1, left - 1
                elif step.kind == use and num_open:
                    assert num_open == (2 if left else num_open) <= 2
                    num_open -= 1
            assert num_open == left == 0


@given(stages, micro_batches)
def test_a_receive_is_posted_one_compute_step_ahead_or_earlier(
    num_stages: int, num_micro_batches: int
) -> None:
    for lane in one_forward_one_backward(num_stages=num_stages, num_micro_batches=num_micro_batches):
        computes = [step for step in lane if step.is_compute]
        for i, step in enumerate(lane):
            if not step.kind.startswith("receive"):
                continue
            kind = "forward" if step.kind == "receive_activation" else "backward"
            use = computes.index(Step(kind, step.stage, step.micro_batch))
            done = sum(other.is_compute for other in lane[:i])
            assert done <= max(use - 1, 0)


@st.composite
def depths(draw: st.DrawFn) -> tuple[int, ...]:
    """Micro-batches of each stage, never fewer than the next stage's."""
    return tuple(sorted(draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)), reverse=True))


@given(depths(), micro_batches)
def test_deeper_and_shallower_warm_up(in_flight: tuple[int, ...], num_micro_batches: int) -> None:
    table = one_forward_one_backward(
        num_stages=len(in_flight), num_micro_batches=num_micro_batches, in_flight=in_flight
    )
    # Without a window a stage that runs far ahead would wait in a send, and not open the door for gradients.
    check_table(table, window=max(in_flight))
    assert [peak_in_flight(lane) for lane in table] == [min(k, num_micro_batches) for k in in_flight]
    for lane in table:
        wanted = sorted(f"{kind}{m}" for kind in "FB" for m in range(num_micro_batches))
        assert sorted(compute(lane)) == wanted


def test_a_stage_that_holds_fewer_than_the_next_waits_for_ever() -> None:
    table = one_forward_one_backward(num_stages=2, num_micro_batches=4, in_flight=(1, 2))
    with pytest.raises(ValueError, match="deadlock: the backward of micro-batch 0 on stage 0 waits"):
        check_table(table)


def test_evaluation_goes_forward_only() -> None:
    table = forward_only(num_stages=2, num_micro_batches=2)
    assert {step.kind for lane in table for step in lane} == {
        "forward",
        "send_activation",
        "receive_activation",
    }


def test_an_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="no table for schedule 'zigzag' yet; use one of 1f1b, gpipe"):
        make_table("zigzag", num_stages=2, num_micro_batches=2)


def test_one_stage_sends_nothing() -> None:
    (lane,) = one_forward_one_backward(num_stages=1, num_micro_batches=3)
    assert compute(lane) == ["F0", "B0", "F1", "B1", "F2", "B2"]
    assert all(step.is_compute for step in lane)
