"""The checker finds every planted fault, and none in schedules that can run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import table
from yuan_train.schedule.check import check_schedule
from yuan_train.schedule.schedules import gpipe, make_schedule, one_forward_one_backward, with_messages
from yuan_train.schedule.step import Kind, RankProgram, Schedule, Step, one_worker_each

SCHEDULE = one_forward_one_backward(workers=one_worker_each(3), num_micro_batches=4)


def faults(schedule: Schedule) -> str:
    with pytest.raises(ValueError) as error:
        check_schedule(schedule)
    return str(error.value)


def without(schedule: Schedule, *steps: Step) -> Schedule:
    return tuple(tuple(step for step in program if step not in steps) for program in schedule)


def swapped(schedule: Schedule, first: Step, second: Step) -> Schedule:
    other = {first: second, second: first}
    return tuple(tuple(other.get(step, step) for step in program) for program in schedule)


def moved(schedule: Schedule, step: Step, *, before: Step) -> Schedule:
    """The schedule with `step` moved in front of `before`, in the same rank program."""
    programs = [list(program) for program in without(schedule, step)]
    program = programs[step.stage]
    program.insert(program.index(before), step)
    return tuple(map(tuple, programs))


def test_valid_schedules_pass() -> None:
    check_schedule(SCHEDULE)
    check_schedule(gpipe(workers=one_worker_each(3), num_micro_batches=4))
    check_schedule(())


@table(r"""
kind | stage | message
receive_activation | 1 | of stage 0 from worker 0 to worker 1: sent [0, 1, 2, 3], received [0, 1, 3]
receive_gradient | 0 |
    send_gradient of stage 1 from worker 1 to worker 0: sent [0, 1, 2, 3], received [0, 1, 3]
send_activation | 0 | of stage 0 from worker 0 to worker 1: sent [0, 1, 3], received [0, 1, 2, 3]
send_gradient | 2 | send_gradient of stage 2 from worker 2 to worker 1: sent [0, 1, 3], received [0, 1, 2, 3]
forward | 1 | the backward of micro-batch 2 on stage 1 comes before its forward
forward | 0 | stage 0: no forward of micro-batches [2], which other stages have
backward | 1 | stage 1: micro-batches [2] have a forward or a backward, not both
backward | 0 | stage 0: micro-batches [2] have a forward or a backward, not both
backward | 2 | the send gradient of micro-batch 2 on stage 2 comes before the backward whose result
""")
def test_a_dropped_step(kind: Kind, stage: str, message: str) -> None:
    assert message in faults(without(SCHEDULE, Step(kind, int(stage), 2)))


def test_a_message_dropped_at_both_ends() -> None:
    schedule = without(SCHEDULE, Step("send_activation", 0, 1), Step("receive_activation", 1, 1))
    assert "the forward of micro-batch 1 on stage 1 has no receive for its input" in faults(schedule)


def test_a_micro_batch_lost_on_the_way() -> None:
    schedule = with_messages([tuple(Step("forward", stage, m) for m in range(4)) for stage in range(2)])
    lost = [Step("forward", 1, 3), Step("receive_activation", 1, 3), Step("send_activation", 0, 3)]
    assert "stage 1: no forward of micro-batches [3]" in faults(without(schedule, *lost))


def test_a_step_taken_twice() -> None:
    program = SCHEDULE[1]
    assert "appears twice" in faults((SCHEDULE[0], (*program, program[1]), SCHEDULE[2]))


def test_a_step_of_another_stage() -> None:
    assert "the program of worker 2 holds a forward of micro-batch 9 on stage 0" in faults(
        (*SCHEDULE[:2], (*SCHEDULE[2], Step("forward", 0, 9)))
    )


def test_orders_that_differ_between_the_ends() -> None:
    schedule = swapped(SCHEDULE, Step("receive_activation", 1, 0), Step("receive_activation", 1, 1))
    message = faults(schedule)
    assert (
        "send_activation of stage 0 from worker 0 to worker 1: sent in the order [0, 1, 2, 3], "
        "received in the order [1, 0, 2, 3]" in message
    )


def test_a_receive_posted_too_late() -> None:
    late = Step("receive_gradient", 0, 0)
    schedule = moved(SCHEDULE, late, before=Step("forward", 0, 3))
    assert f"the {late} is posted after the backward of micro-batch 0 on stage 0 that needs it" in faults(
        schedule
    )


def test_a_send_before_its_result() -> None:
    schedule = moved(SCHEDULE, Step("send_activation", 0, 1), before=Step("forward", 0, 1))
    words = "send activation of micro-batch 1 on stage 0 comes before the forward whose result it sends"
    assert words in faults(schedule)


@pytest.mark.parametrize(("kind", "stage"), [("receive_activation", 0), ("receive_gradient", 2)])
def test_a_receive_from_beyond_the_ends(kind: Kind, stage: int) -> None:
    programs = list(SCHEDULE)
    programs[stage] = (Step(kind, stage, 0), *programs[stage])
    assert "sent [], received [0]" in faults(tuple(programs))


@pytest.mark.parametrize(("kind", "stage"), [("send_activation", 2), ("send_gradient", 0)])
def test_a_send_beyond_the_ends(kind: Kind, stage: int) -> None:
    programs = list(SCHEDULE)
    programs[stage] = (*programs[stage], Step(kind, stage, 0))
    assert f"{kind} of stage {stage} from worker {stage} to worker -1: sent [0], received []" in faults(
        tuple(programs)
    )


def test_a_deadlock_of_compute() -> None:
    # Each waits for the other: stage 0 for the gradient of 0 before it forwards 1, stage 1 for activation 1.
    first = (Step("forward", 0, 0), Step("backward", 0, 0), Step("forward", 0, 1), Step("backward", 0, 1))
    second = (Step("forward", 1, 0), Step("forward", 1, 1), Step("backward", 1, 0), Step("backward", 1, 1))
    message = faults(with_messages([first, second]))
    assert message.splitlines() == [
        "deadlock: the receive gradient of micro-batch 0 on stage 0 waits for the send gradient of "
        "micro-batch 0 on stage 1, which comes after the receive activation of micro-batch 1 on stage 1; "
        "the receive activation of micro-batch 1 on stage 1 waits for the send activation of micro-batch 1 "
        "on stage 0, which comes after the receive gradient of micro-batch 0 on stage 0"
    ]


def test_a_deadlock_of_sends_on_a_transport_without_buffers() -> None:
    # Each side sends before it posts the receive of the other's message.
    late = Step("receive_gradient", 0, 0)
    after = Step("send_activation", 0, 1)
    forward = (Step("forward", 0, 0), Step("send_activation", 0, 0), Step("forward", 0, 1), after, late)
    first = (*forward, Step("backward", 0, 0), Step("receive_gradient", 0, 1), Step("backward", 0, 1))
    second = (
        *(Step(kind, 1, 0) for kind in ("receive_activation", "forward", "backward", "send_gradient")),
        *(Step(kind, 1, 1) for kind in ("receive_activation", "forward", "backward", "send_gradient")),
    )
    assert faults((first, second)).startswith(
        "deadlock: the send activation of micro-batch 1 on stage 0 waits for the receive activation of "
        "micro-batch 1 on stage 1, which comes after the send gradient of micro-batch 0 on stage 1; the send "
        "gradient of micro-batch 0 on stage 1 waits for the receive gradient of micro-batch 0 on stage 0"
    )


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(2, 5), st.integers(1, 6), st.data())
def test_any_removed_step_is_found(name: str, num_stages: int, num: int, data: st.DataObject) -> None:
    schedule = make_schedule(name, workers=one_worker_each(num_stages), num_micro_batches=num)
    stage = data.draw(st.integers(0, num_stages - 1))
    faults(without(schedule, data.draw(st.sampled_from(schedule[stage]))))


@given(st.integers(2, 5), st.integers(2, 6), st.sampled_from(["forward", "backward"]), st.data())
def test_any_two_swapped_compute_steps_are_found(
    num_stages: int, num: int, kind: Kind, data: st.DataObject
) -> None:
    # Sends are not swapped. The last stage's forwards and the first stage's backwards have none.
    schedule = one_forward_one_backward(workers=one_worker_each(num_stages), num_micro_batches=num)
    stage = data.draw(st.integers(0, num_stages - 2)) + (kind == "backward")
    first, second = data.draw(st.lists(st.integers(0, num - 1), min_size=2, max_size=2, unique=True))
    assert "comes before" in faults(swapped(schedule, Step(kind, stage, first), Step(kind, stage, second)))


@st.composite
def programs(draw: st.DrawFn, stage: int, num_stages: int, num: int) -> RankProgram:
    """The compute steps of one stage, in the order of 1F1B, of GPipe, or in any order."""
    steps = [
        step
        for step in gpipe(workers=one_worker_each(num_stages), num_micro_batches=num)[stage]
        if step.is_compute
    ]
    usual = one_forward_one_backward(workers=one_worker_each(num_stages), num_micro_batches=num)[stage]
    order = draw(st.sampled_from(["1f1b", "gpipe", "any"]))
    if order == "any":
        steps = draw(st.permutations(steps))
    return tuple(step for step in usual if step.is_compute) if order == "1f1b" else tuple(steps)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_schedules_that_pass_run_to_their_end(num_stages: int, num: int, data: st.DataObject) -> None:
    compute = tuple(data.draw(programs(stage, num_stages, num)) for stage in range(num_stages))
    schedule = with_messages(compute)
    try:
        check_schedule(schedule)
    except ValueError as error:
        # With valid rank programs and the same order at both ends, the only fault can be a deadlock.
        valid = all(
            program.index(Step("forward", stage, m)) < program.index(Step("backward", stage, m))
            for stage, program in enumerate(compute)
            for m in range(num)
        )
        assert ("deadlock" in str(error)) == (valid and _orders_agree(schedule))
    else:
        assert _orders_agree(schedule) and _runs_to_its_end(compute)


def _orders_agree(schedule: Schedule) -> bool:
    def order(stage: int, kind: Kind) -> list[int]:
        return [step.micro_batch for step in schedule[stage] if step.kind == kind]

    return all(
        order(s, "send_activation") == order(s + 1, "receive_activation")
        and order(s + 1, "send_gradient") == order(s, "receive_gradient")
        for s in range(len(schedule) - 1)
    )


def _runs_to_its_end(compute: Schedule) -> bool:
    done: set[Step] = set()
    remaining = [list(program) for program in compute]
    advanced = True
    while advanced:
        advanced = False
        for stage, program in enumerate(remaining):
            while program:
                neighbour = stage - 1 if program[0].kind == "forward" else stage + 1
                needed = Step(program[0].kind, neighbour, program[0].micro_batch)
                if 0 <= neighbour < len(compute) and needed not in done:
                    break
                done.add(program.pop(0))
                advanced = True
    return not any(remaining)
