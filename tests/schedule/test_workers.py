"""Tables where a worker has several stages, or a stage several workers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.schedule.check import check_table, peak_in_flight
from yuan_train.schedule.step import Step, Table, Workers, num_workers, one_worker_each, worker_of
from yuan_train.schedule.tables import SCHEDULES, forward_only, make_table

UNITS = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}


def bubble(table: Table, workers: Workers) -> float:
    """Share of idle time with free messages and F = I = W = 1."""
    clock, position = [0] * len(table), [0] * len(table)
    ended: dict[Step, int] = {}
    left = sum(map(len, table))
    while left:
        before = left
        for worker, lane in enumerate(table):
            while position[worker] < len(lane):
                step = lane[position[worker]]
                if step.is_compute:
                    beside = step.stage - 1 if step.kind == "forward" else step.stage + 1
                    needed = Step(step.kind, beside, step.micro_batch)
                    inside = 0 <= beside < len(workers) and step.kind != "backward_weight"
                    if inside and needed not in ended:
                        break
                    clock[worker] = max(clock[worker], ended[needed] if inside else 0) + UNITS[step.kind]
                    ended[step] = clock[worker]
                position[worker] += 1
                left -= 1
        assert left < before, "the table waits for ever"
    busy = sum(UNITS[step.kind] for lane in table for step in lane if step.is_compute)
    return 1 - busy / (max(clock) * len(table))


def v_shape(num: int) -> Workers:
    return tuple((worker,) for worker in (*range(num), *reversed(range(num))))


def loop(num: int, rounds: int = 2) -> Workers:
    return tuple((worker,) for worker in range(num)) * rounds


@pytest.mark.parametrize(
    ("schedule", "workers", "expected"),
    [
        # Published bubbles at P = 8, m = 16, F = I = W: 1F1B 7/23; ZB-H1 9/57; interleaved by 2 21/117.
        ("1f1b", one_worker_each(8), 7 / 23),
        ("zero_bubble", one_worker_each(8), 9 / 57),
        ("interleaved_1f1b", loop(8), 21 / 117),
    ],
)
def test_bubbles(schedule: str, workers: Workers, expected: float) -> None:
    table = make_table(schedule, workers=workers, num_micro_batches=16)
    assert bubble(table, workers) == pytest.approx(expected)


def test_the_v_shape_has_the_smallest_bubble_and_the_memory_of_1f1b() -> None:
    table = make_table("zero_bubble", workers=v_shape(8), num_micro_batches=16)
    assert bubble(table, v_shape(8)) < 0.09
    # 16 halves are 8 whole stages, what 1F1B keeps on its first one.
    assert max(peak_in_flight(lane) for lane in table) <= 16


@pytest.mark.parametrize(("num", "late"), [(1, 0), (2, 0), (3, 0), (4, 0), (6, 2), (8, 0)])
@pytest.mark.parametrize("rounds", [2, 3, 8])
def test_the_v_shape_idles_only_until_its_turn_is_reached(num: int, late: int, rounds: int) -> None:
    """With F = I = W: 6 a micro-batch, and P - 1 until the first activation is at the V's turn, which no
    table can save; of six workers the listing loses 2 more. It keeps the activations of P whole workers (2 P
    halves), as 1F1B does on its first stage.
    """
    num_micro_batches = rounds * num
    table = make_table("zero_bubble", workers=v_shape(num), num_micro_batches=num_micro_batches)
    longest = 6 * num_micro_batches + num - 1 + late
    assert bubble(table, v_shape(num)) <= 1 - 6 * num_micro_batches / longest + 1e-9
    assert max(peak_in_flight(lane) for lane in table) <= 2 * num


def test_between_two_stages_of_a_worker_there_is_no_message() -> None:
    table = make_table("zero_bubble", workers=v_shape(2), num_micro_batches=3)
    turn = [step for step in table[1] if "receive" in step.kind or "send" in step.kind]
    assert {step.kind for step in turn if step.stage == 1} == {"receive_activation", "send_gradient"}
    assert {step.kind for step in turn if step.stage == 2} == {"send_activation", "receive_gradient"}


def test_replicas_share_the_micro_batches() -> None:
    workers = ((0,), (1, 2))
    table = make_table("1f1b", workers=workers, num_micro_batches=4)
    assert {step.micro_batch for step in table[1]} == {0, 2} and {s.micro_batch for s in table[2]} == {1, 3}
    # As many in flight on stage 0 as there are workers from it to the end.
    assert [peak_in_flight(lane) for lane in table] == [3, 1, 1]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=4), st.integers(1, 12))
def test_replicas_share_any_depth(stages: list[tuple[int, int]], num_micro_batches: int) -> None:
    sizes = [size for size, _ in stages]
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    workers = tuple(tuple(range(a, a + n)) for a, n in zip(first, sizes, strict=True))
    depth = 1
    in_flight: list[int] = []
    for size, more in reversed(stages):
        # In whole rounds of the replicas at least what the next stage holds.
        depth = -(-depth // size) * size + more
        in_flight.insert(0, depth)
    table = make_table(
        "1f1b", workers=workers, num_micro_batches=num_micro_batches, in_flight=tuple(in_flight)
    )
    check_table(table, workers, window=1 + max(peak_in_flight(lane) for lane in table))
    for replicas, most in zip(workers, in_flight, strict=True):
        assert sum(peak_in_flight(table[worker]) for worker in replicas) <= max(most, len(replicas))


def test_virtual_stages_need_a_schedule_for_them() -> None:
    with pytest.raises(ValueError, match="gives a worker one stage"):
        make_table("1f1b", workers=loop(2), num_micro_batches=4)


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
def test_every_table_is_whole(workers: Workers, num_micro_batches: int) -> None:
    named = [worker for replicas in workers for worker in replicas]
    virtual = len(set(named)) < len(named)
    for schedule in SCHEDULES[2:] if virtual else SCHEDULES:
        table = make_table(schedule, workers=workers, num_micro_batches=num_micro_batches)
        assert len(table) == num_workers(workers)
        check_table(table, workers, window=1 + max(peak_in_flight(lane) for lane in table))
        bubble(table, workers)
    check_table(
        forward_only(workers=workers, num_micro_batches=num_micro_batches),
        workers,
        window=num_micro_batches,
    )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(any_workers(), st.integers(0, 20))
def test_each_micro_batch_has_one_worker_a_stage(workers: Workers, micro_batch: int) -> None:
    for stage, replicas in enumerate(workers):
        assert worker_of(workers, stage, micro_batch) in replicas
