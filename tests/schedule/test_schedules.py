"""Schedules against closed forms; the virtual clock here is independent of the simulator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.test_workers import UNITS, seconds_of
from yuan_train.schedule.check import check_schedule
from yuan_train.schedule.schedules import (
    forward_only,
    gpipe,
    make_schedule,
    one_forward_one_backward,
    peak_in_flight,
)
from yuan_train.schedule.step import RankProgram, one_worker_each

stages = st.integers(1, 7)
micro_batches = st.integers(1, 12)
UNSPLIT = ("1f1b", "gpipe")
"""Schedules with one stage per worker and whole backwards."""


def compute(program: RankProgram) -> list[str]:
    """The compute steps of a program, as `F0`, `F1`, `B0`, ..."""
    return [f"{step.kind[0].upper()}{step.micro_batch}" for step in program if step.is_compute]


def test_one_forward_one_backward_by_hand() -> None:
    # Three stages, four micro-batches: warm-up of 2, 1 and 0 forwards.
    schedule = one_forward_one_backward(workers=one_worker_each(3), num_micro_batches=4)
    wanted = ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert [" ".join(compute(program)) for program in schedule] == wanted


def test_messages_by_hand() -> None:
    schedule = one_forward_one_backward(workers=one_worker_each(2), num_micro_batches=2)
    assert [str(step) for step in schedule[1]] == [
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
    workers = one_worker_each(num_stages)
    for name in UNSPLIT:
        schedule = make_schedule(name, workers=workers, num_micro_batches=num_micro_batches)
        seconds = seconds_of(schedule, workers, lambda step: UNITS[step.kind])
        assert seconds == (num_micro_batches + num_stages - 1) * 3.0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), micro_batches)
def test_unequal_stages_are_never_faster_than_the_slowest(times: list[int], num_micro_batches: int) -> None:
    workers = one_worker_each(len(times))
    for name in UNSPLIT:
        schedule = make_schedule(name, workers=workers, num_micro_batches=num_micro_batches)
        seconds = seconds_of(schedule, workers, lambda step: UNITS[step.kind] * times[step.stage])
        assert seconds >= 3.0 * max(times) * num_micro_batches
        assert seconds >= 3.0 * sum(times)
        if num_micro_batches == 1:
            assert seconds == 3.0 * sum(times)


@given(stages, micro_batches)
def test_micro_batches_in_flight(num_stages: int, num_micro_batches: int) -> None:
    workers = one_worker_each(num_stages)
    schedule = one_forward_one_backward(workers=workers, num_micro_batches=num_micro_batches)
    for stage, program in enumerate(schedule):
        assert peak_in_flight(program) == min(num_stages - stage, num_micro_batches)
    for program in gpipe(workers=workers, num_micro_batches=num_micro_batches):
        assert peak_in_flight(program) == num_micro_batches


@st.composite
def depths(draw: st.DrawFn) -> tuple[int, ...]:
    """Micro-batches of each stage, never fewer than the next stage's."""
    return tuple(sorted(draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)), reverse=True))


@given(depths(), micro_batches)
def test_deeper_and_shallower_warm_up(in_flight: tuple[int, ...], num_micro_batches: int) -> None:
    schedule = one_forward_one_backward(
        workers=one_worker_each(len(in_flight)), num_micro_batches=num_micro_batches, in_flight=in_flight
    )
    check_schedule(schedule)
    assert [peak_in_flight(program) for program in schedule] == [min(k, num_micro_batches) for k in in_flight]
    for program in schedule:
        wanted = sorted(f"{kind}{m}" for kind in "FB" for m in range(num_micro_batches))
        assert sorted(compute(program)) == wanted


def test_a_stage_that_holds_fewer_than_the_next_deadlocks() -> None:
    schedule = one_forward_one_backward(workers=one_worker_each(2), num_micro_batches=4, in_flight=(1, 2))
    with pytest.raises(ValueError, match="deadlock: the receive gradient of micro-batch 0 on stage 0 waits"):
        check_schedule(schedule)


def test_evaluation_has_only_forwards() -> None:
    schedule = forward_only(workers=one_worker_each(2), num_micro_batches=2)
    wanted = {"forward", "send_activation", "receive_activation"}
    assert {step.kind for program in schedule for step in program} == wanted


def test_an_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'zigzag'; use one of 1f1b, gpipe"):
        make_schedule("zigzag", workers=one_worker_each(2), num_micro_batches=2)
