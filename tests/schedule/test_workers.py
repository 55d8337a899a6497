"""Schedules in which a worker has several stages, or a stage several workers."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.schedule.check import check_schedule
from yuan_train.schedule.schedules import SCHEDULES, forward_only, make_schedule, peak_in_flight
from yuan_train.schedule.step import Schedule, Step, Workers, num_workers, one_worker_each

UNITS = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}


def seconds_of(schedule: Schedule, workers: Workers, seconds: Callable[[Step], float]) -> float:
    """When the last step ends, with free messages: each compute step waits for its worker and its input."""
    clock, position = [0.0] * len(schedule), [0] * len(schedule)
    ended: dict[Step, float] = {}
    remaining = sum(map(len, schedule))
    while remaining:
        before = remaining
        for worker, program in enumerate(schedule):
            while position[worker] < len(program):
                step = program[position[worker]]
                if step.is_compute:
                    neighbour = step.stage - 1 if step.kind == "forward" else step.stage + 1
                    needed = Step(step.kind, neighbour, step.micro_batch)
                    inside = 0 <= neighbour < len(workers) and step.kind != "backward_weight"
                    if inside and needed not in ended:
                        break
                    clock[worker] = max(clock[worker], ended[needed] if inside else 0.0) + seconds(step)
                    ended[step] = clock[worker]
                position[worker] += 1
                remaining -= 1
        assert remaining < before, "the schedule deadlocks"
    return max(clock)


def bubble(schedule: Schedule, workers: Workers) -> float:
    """Share of idle time with free messages and F = I = W = 1."""
    busy = sum(UNITS[step.kind] for program in schedule for step in program if step.is_compute)
    return 1 - busy / (seconds_of(schedule, workers, lambda step: UNITS[step.kind]) * len(schedule))


def v_shape(num: int) -> Workers:
    return tuple((worker,) for worker in (*range(num), *reversed(range(num))))


def loop(num: int, rounds: int = 2) -> Workers:
    return tuple((worker,) for worker in range(num)) * rounds


@pytest.mark.parametrize(
    ("name", "workers", "expected"),
    [
        # Published bubbles at P = 8, m = 16, F = I = W: 1F1B 7/23; ZB-H1 9/57; interleaved by 2 21/117.
        ("1f1b", one_worker_each(8), 7 / 23),
        ("zero_bubble", one_worker_each(8), 9 / 57),
        ("interleaved_1f1b", loop(8), 21 / 117),
    ],
)
def test_bubbles(name: str, workers: Workers, expected: float) -> None:
    schedule = make_schedule(name, workers=workers, num_micro_batches=16)
    assert bubble(schedule, workers) == pytest.approx(expected)


@pytest.mark.parametrize(("num", "extra"), [(1, 0), (2, 0), (3, 0), (4, 0), (6, 2), (8, 0)])
@pytest.mark.parametrize("rounds", [2, 3, 8])
def test_the_v_shape_is_idle_only_until_its_turn_is_reached(num: int, extra: int, rounds: int) -> None:
    """With F = I = W = 1, a step takes 6 units per micro-batch, and P - 1 until the first activation reaches
    the turn of the V, which no schedule can avoid; with six workers list scheduling loses 2 more. A worker
    keeps at most 2 P activations of half stages, as much as the first stage of 1F1B.
    """
    num_micro_batches = rounds * num
    schedule = make_schedule("zero_bubble", workers=v_shape(num), num_micro_batches=num_micro_batches)
    longest = 6 * num_micro_batches + num - 1 + extra
    assert bubble(schedule, v_shape(num)) <= 1 - 6 * num_micro_batches / longest + 1e-9
    assert max(peak_in_flight(program) for program in schedule) <= 2 * num


def test_no_message_is_sent_between_two_stages_of_a_worker() -> None:
    schedule = make_schedule("zero_bubble", workers=v_shape(2), num_micro_batches=3)
    messages = [step for step in schedule[1] if "receive" in step.kind or "send" in step.kind]
    assert {step.kind for step in messages if step.stage == 1} == {"receive_activation", "send_gradient"}
    assert {step.kind for step in messages if step.stage == 2} == {"send_activation", "receive_gradient"}


def test_replicas_share_the_micro_batches() -> None:
    workers = ((0,), (1, 2))
    schedule = make_schedule("1f1b", workers=workers, num_micro_batches=4)
    assert {step.micro_batch for step in schedule[1]} == {0, 2} and {s.micro_batch for s in schedule[2]} == {
        1,
        3,
    }
    # As many in flight on stage 0 as there are workers from it to the end.
    assert [peak_in_flight(program) for program in schedule] == [3, 1, 1]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=4), st.integers(1, 12))
def test_replicas_share_any_depth(stages: list[tuple[int, int]], num_micro_batches: int) -> None:
    sizes = [size for size, _ in stages]
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    workers = tuple(tuple(range(a, a + n)) for a, n in zip(first, sizes, strict=True))
    depth = 1
    in_flight: list[int] = []
    for size, more in reversed(stages):
        # Rounded up to whole rounds of the replicas, at least what the next stage holds.
        depth = -(-depth // size) * size + more
        in_flight.insert(0, depth)
    schedule = make_schedule(
        "1f1b", workers=workers, num_micro_batches=num_micro_batches, in_flight=tuple(in_flight)
    )
    check_schedule(schedule, workers)
    for replicas, most in zip(workers, in_flight, strict=True):
        assert sum(peak_in_flight(schedule[worker]) for worker in replicas) <= max(most, len(replicas))


def test_virtual_stages_are_rejected_by_1f1b() -> None:
    with pytest.raises(ValueError, match="gives a worker one stage"):
        make_schedule("1f1b", workers=loop(2), num_micro_batches=4)


@st.composite
def any_workers(draw: st.DrawFn) -> Workers:
    """One to five workers with one to three stages each, in any order; or stages with replicas."""
    if draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
        first = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(tuple(range(a, a + n)) for a, n in zip(first, sizes, strict=True))
    count = draw(st.integers(1, 5))
    extra = draw(st.lists(st.integers(0, count - 1), max_size=2 * count))
    order = draw(st.permutations([*range(count), *extra]))
    return tuple((worker,) for worker in order)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(any_workers(), st.integers(1, 12))
def test_every_schedule_is_complete(workers: Workers, num_micro_batches: int) -> None:
    named = [worker for replicas in workers for worker in replicas]
    virtual = len(set(named)) < len(named)
    for schedule in SCHEDULES[2:] if virtual else SCHEDULES:
        schedule = make_schedule(schedule, workers=workers, num_micro_batches=num_micro_batches)
        assert len(schedule) == num_workers(workers)
        check_schedule(schedule, workers)
        bubble(schedule, workers)
    check_schedule(forward_only(workers=workers, num_micro_batches=num_micro_batches), workers)
