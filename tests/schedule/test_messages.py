"""Where messages stand: no cycle of waits, few buffers, and no time lost by it."""

from typing import cast

import pytest

from tests.schedule.test_workers import loop, v_shape
from yuan_train.schedule.check import check_schedule
from yuan_train.schedule.schedules import (
    arrivals_proven,
    forward_only,
    make_schedule,
    post_early,
    receive_for,
    send_after,
)
from yuan_train.schedule.step import RECEIVE_OF, Kind, Schedule, Step, Workers, one_worker_each

UNITS = {"forward": 2.0, "backward": 4.0, "backward_input": 2.0, "backward_weight": 2.0}


CASES: list[tuple[str, Workers, tuple[int, ...] | None]] = [
    ("1f1b", one_worker_each(2), None),
    ("1f1b", one_worker_each(4), None),
    ("gpipe", one_worker_each(4), None),
    ("zero_bubble", one_worker_each(4), None),
    ("zero_bubble", v_shape(4), None),
    ("interleaved_1f1b", loop(4), None),
    ("interleaved_1f1b", loop(4, 3), None),
    ("interleaved_1f1b", ((0,), (1,), (0,)), None),
    ("1f1b", one_worker_each(2), (3, 1)),
    ("1f1b", one_worker_each(2), (6, 1)),
    ("1f1b", one_worker_each(4), (5, 4, 2, 1)),
    ("1f1b", ((0,), (1, 2), (3,)), None),
    ("1f1b", ((0, 1), (2,)), None),
    ("1f1b", ((0,), tuple(range(1, 9)), (9,)), None),
]


def early(schedule: Schedule, workers: Workers) -> Schedule:
    """All receives at the start, and each send right after what it sends."""
    programs = []
    for program in schedule:
        compute = [step for step in program if step.is_compute]
        receives = [receive for step in compute if (receive := receive_for(step, workers))]
        pairs = [(step, send_after(step, workers)) for step in compute]
        programs.append((*receives, *(step for pair in pairs for step in pair if step is not None)))
    return tuple(programs)


def step_units(schedule: Schedule, workers: Workers, message: float) -> float:
    """Units of a step on devices that run ahead of nothing: a message starts when both its ends are posted,
    and an end is posted when the compute step before it has ended."""
    position, free = [0] * len(schedule), [0.0] * len(schedule)
    posted: dict[Step, float] = {}
    sent: dict[Step, float] = {}
    advanced = True
    while advanced:
        advanced = False
        for worker, program in enumerate(schedule):
            while position[worker] < len(program):
                step = program[position[worker]]
                if step.kind in RECEIVE_OF:
                    kind, offset = RECEIVE_OF[step.kind]
                    sent[Step(kind, step.stage + offset, step.micro_batch)] = free[worker]
                elif not step.is_compute:
                    posted[step] = free[worker]
                else:
                    receive = receive_for(step, workers)
                    if receive is not None and receive not in sent:
                        break
                    arrival = max(sent[receive], posted[receive]) + message if receive is not None else 0.0
                    free[worker] = max(free[worker], arrival) + UNITS[step.kind]
                position[worker] += 1
                advanced = True
    assert position == [len(program) for program in schedule]
    return max(free)


@pytest.mark.parametrize(("name", "workers", "in_flight"), CASES)
def test_safe_places_cost_no_time(name: str, workers: Workers, in_flight: tuple[int, ...] | None) -> None:
    schedule = make_schedule(name, workers=workers, num_micro_batches=16, in_flight=in_flight)
    check_schedule(schedule, workers)
    for message in (0.5, 1.0, 2.0):
        fastest = step_units(early(schedule, workers), workers, message)
        assert step_units(schedule, workers, message) == pytest.approx(fastest, rel=0.002)


@pytest.mark.parametrize(("name", "workers", "in_flight"), CASES)
def test_two_receives_of_a_direction_at_most(
    name: str, workers: Workers, in_flight: tuple[int, ...] | None
) -> None:
    schedule = make_schedule(name, workers=workers, num_micro_batches=16, in_flight=in_flight)
    for program in (*schedule, *forward_only(workers=workers, num_micro_batches=16)):
        waiting: dict[tuple[str, int], int] = {}
        for step in program:
            receive = receive_for(step, workers) if step.is_compute else None
            if step.kind.startswith("receive"):
                waiting[step.kind, step.stage] = waiting.get((step.kind, step.stage), 0) + 1
                assert waiting[step.kind, step.stage] <= 2
            elif receive is not None:
                waiting[receive.kind, receive.stage] -= 1
        assert not any(waiting.values())


def test_gloo_gets_its_receives_earlier() -> None:
    """In 1F1B a receive moves before the use of the one before it; without gloo nothing moves."""
    workers = one_worker_each(3)
    for program in make_schedule("1f1b", workers=one_worker_each(3), num_micro_batches=6):
        assert post_early(program, workers, lambda receive: False) == program
        moved = post_early(program, workers, lambda receive: True)
        assert sorted(map(str, moved)) == sorted(map(str, program))
        for kind, use in (("receive_activation", "forward"), ("receive_gradient", "backward")):
            receives = [step for step in moved if step.kind == kind]
            assert receives == [step for step in program if step.kind == kind]
            for one, following in zip(receives, receives[1:], strict=False):
                assert moved.index(following) < moved.index(one._replace(kind=cast(Kind, use)))


@pytest.mark.parametrize("num_stages", [2, 4])
def test_receives_that_are_all_posted_early_are_refused(num_stages: int) -> None:
    workers = one_worker_each(num_stages)
    schedule = make_schedule("1f1b", workers=one_worker_each(num_stages), num_micro_batches=8)
    with pytest.raises(ValueError, match="deadlock: the receive gradient of micro-batch 0 on stage 0 waits"):
        check_schedule(early(schedule, workers), workers)


def test_a_send_waits_where_its_receiver_is_far_behind() -> None:
    """Stage 0 forwards six micro-batches before its first backward, and until then it holds gradient 0 and
    posts no receive of gradient 1: stage 1 goes on with micro-batch 2 before it sends gradient 1."""
    program = make_schedule("1f1b", workers=one_worker_each(2), num_micro_batches=8, in_flight=(6, 1))[1]
    late = Step("send_gradient", 1, 1)
    assert program.index(late) > program.index(Step("forward", 1, 2))


def test_what_a_message_proves() -> None:
    """In 1F1B on two stages, activation 2 leaves stage 0 after its backward of 0, which took gradient 0."""
    schedule = make_schedule("1f1b", workers=one_worker_each(2), num_micro_batches=4)
    assert arrivals_proven(schedule, one_worker_each(2), 1) == {
        Step("receive_activation", 1, 2): (Step("send_gradient", 1, 0),),
        Step("receive_activation", 1, 3): (Step("send_gradient", 1, 1),),
    }
    # A gradient proves its activation; that of 1 proves no more, as stage 1 takes activation 2 later.
    proven = arrivals_proven(schedule, one_worker_each(2), 0)
    assert proven[Step("receive_gradient", 0, 1)] == (Step("send_activation", 0, 1),)
