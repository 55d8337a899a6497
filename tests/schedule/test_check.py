"""The checker finds each fault that is planted, and none in tables that can run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from yuan_train.schedule.check import check_table
from yuan_train.schedule.step import Kind, Lane, Step, Table
from yuan_train.schedule.tables import gpipe, make_table, one_forward_one_backward, with_messages

TABLE = one_forward_one_backward(num_stages=3, num_micro_batches=4)


def faults(table: Table) -> str:
    with pytest.raises(ValueError) as error:
        check_table(table)
    return str(error.value)


def without(table: Table, *steps: Step) -> Table:
    return tuple(tuple(step for step in lane if step not in steps) for lane in table)


def swapped(table: Table, first: Step, second: Step) -> Table:
    other = {first: second, second: first}
    return tuple(tuple(other.get(step, step) for step in lane) for lane in table)


def moved(table: Table, step: Step, *, before: Step) -> Table:
    """`step` taken out and put in front of `before`, in the same lane."""
    lanes = [list(lane) for lane in without(table, step)]
    lane = lanes[step.stage]
    lane.insert(lane.index(before), step)
    return tuple(map(tuple, lanes))


def test_good_tables_pass() -> None:
    check_table(TABLE)
    check_table(gpipe(num_stages=3, num_micro_batches=4))
    check_table(())


@pytest.mark.parametrize(
    ("kind", "stage", "message"),
    [
        (
            "receive_activation",
            1,
            r"of stage 0 from worker 0 to worker 1: sent \[0, 1, 2, 3\], received \[0, 1, 3\]",
        ),
        (
            "receive_gradient",
            0,
            r"send_gradient of stage 1 from worker 1 to worker 0: sent \[0, 1, 2, 3\], received \[0, 1, 3\]",
        ),
        (
            "send_activation",
            0,
            r"of stage 0 from worker 0 to worker 1: sent \[0, 1, 3\], received \[0, 1, 2, 3\]",
        ),
        (
            "send_gradient",
            2,
            r"send_gradient of stage 2 from worker 2 to worker 1: sent \[0, 1, 3\], received \[0, 1, 2, 3\]",
        ),
        ("forward", 1, "the backward of micro-batch 2 on stage 1 stands before its forward"),
        ("forward", 0, r"stage 0: no forward of micro-batches \[2\], which other stages have"),
        ("backward", 1, r"stage 1: micro-batches \[2\] go only one way"),
        ("backward", 0, r"stage 0: micro-batches \[2\] go only one way"),
        (
            "backward",
            2,
            "the send gradient of micro-batch 2 on stage 2 stands before the backward whose result",
        ),
    ],
)
def test_a_dropped_step(kind: Kind, stage: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_table(without(TABLE, Step(kind, stage, 2)))


def test_a_message_dropped_at_both_ends() -> None:
    table = without(TABLE, Step("send_activation", 0, 1), Step("receive_activation", 1, 1))
    assert "the forward of micro-batch 1 on stage 1 has no message to work on" in faults(table)


def test_a_micro_batch_lost_on_the_way() -> None:
    table = with_messages([tuple(Step("forward", stage, m) for m in range(4)) for stage in range(2)])
    lost = [Step("forward", 1, 3), Step("receive_activation", 1, 3), Step("send_activation", 0, 3)]
    assert "stage 1: no forward of micro-batches [3]" in faults(without(table, *lost))


def test_a_step_taken_twice() -> None:
    lane = TABLE[1]
    assert "stands twice" in faults((TABLE[0], (*lane, lane[1]), TABLE[2]))


def test_a_step_of_another_stage() -> None:
    assert "lane 2 holds a forward of micro-batch 9 on stage 0" in faults(
        (*TABLE[:2], (*TABLE[2], Step("forward", 0, 9)))
    )


def test_orders_that_differ_between_the_ends() -> None:
    table = swapped(TABLE, Step("receive_activation", 1, 0), Step("receive_activation", 1, 1))
    said = faults(table)
    assert (
        "send_activation of stage 0 from worker 0 to worker 1: sent in the order [0, 1, 2, 3], "
        "received in the order [1, 0, 2, 3]" in said
    )


def test_a_receive_posted_too_late() -> None:
    late = Step("receive_gradient", 0, 0)
    table = moved(TABLE, late, before=Step("forward", 0, 3))
    assert f"the {late} is posted after the backward of micro-batch 0 on stage 0 that needs it" in faults(
        table
    )


def test_a_send_before_its_result() -> None:
    table = moved(TABLE, Step("send_activation", 0, 1), before=Step("forward", 0, 1))
    assert (
        "send activation of micro-batch 1 on stage 0 stands before the forward whose result it sends"
        in faults(table)
    )


@pytest.mark.parametrize(("kind", "stage"), [("receive_activation", 0), ("receive_gradient", 2)])
def test_a_receive_from_beyond_the_ends(kind: Kind, stage: int) -> None:
    lanes = list(TABLE)
    lanes[stage] = (Step(kind, stage, 0), *lanes[stage])
    assert "sent [], received [0]" in faults(tuple(lanes))


@pytest.mark.parametrize(("kind", "stage"), [("send_activation", 2), ("send_gradient", 0)])
def test_a_send_beyond_the_ends(kind: Kind, stage: int) -> None:
    lanes = list(TABLE)
    lanes[stage] = (*lanes[stage], Step(kind, stage, 0))
    assert f"{kind} of stage {stage} from worker {stage} to worker -1: sent [0], received []" in faults(
        tuple(lanes)
    )


def test_a_deadlock_of_compute() -> None:
    # Both ends wait for each other: stage 0 wants the gradient of 0 before it makes 1, stage 1 wants 1 first.
    first = (Step("forward", 0, 0), Step("backward", 0, 0), Step("forward", 0, 1), Step("backward", 0, 1))
    second = (Step("forward", 1, 0), Step("forward", 1, 1), Step("backward", 1, 0), Step("backward", 1, 1))
    said = faults(with_messages([first, second]))
    assert said.splitlines() == [
        "deadlock: the backward of micro-batch 0 on stage 0 waits for ever for the "
        "send gradient of micro-batch 0 on stage 1",
        "deadlock: the forward of micro-batch 1 on stage 1 waits for ever for the "
        "send activation of micro-batch 1 on stage 0",
    ]


def test_a_deadlock_of_sends_on_a_transport_without_buffers() -> None:
    # Each side sends before it opens the door for what the other sends.
    late = Step("receive_gradient", 0, 0)
    after = Step("send_activation", 0, 1)
    forward = (Step("forward", 0, 0), Step("send_activation", 0, 0), Step("forward", 0, 1), after, late)
    first = (*forward, Step("backward", 0, 0), Step("receive_gradient", 0, 1), Step("backward", 0, 1))
    second = (
        *(Step(kind, 1, 0) for kind in ("receive_activation", "forward", "backward", "send_gradient")),
        *(Step(kind, 1, 1) for kind in ("receive_activation", "forward", "backward", "send_gradient")),
    )
    assert "deadlock: the send activation of micro-batch 1 on stage 0 waits for ever" in faults(
        (first, second)
    )


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(2, 5), st.integers(1, 6), st.data())
def test_any_step_taken_away_is_noticed(
    schedule: str, num_stages: int, num: int, data: st.DataObject
) -> None:
    table = make_table(schedule, num_stages=num_stages, num_micro_batches=num)
    stage = data.draw(st.integers(0, num_stages - 1))
    faults(without(table, data.draw(st.sampled_from(table[stage]))))


@given(st.integers(2, 5), st.integers(2, 6), st.sampled_from(["forward", "backward"]), st.data())
def test_any_two_computes_swapped_leave_a_send_behind(
    num_stages: int, num: int, kind: Kind, data: st.DataObject
) -> None:
    # Only the computes: what they send stays where it was. The last of each way sends nothing.
    table = one_forward_one_backward(num_stages=num_stages, num_micro_batches=num)
    stage = data.draw(st.integers(0, num_stages - 2)) + (kind == "backward")
    first, second = data.draw(st.lists(st.integers(0, num - 1), min_size=2, max_size=2, unique=True))
    assert "stands before" in faults(swapped(table, Step(kind, stage, first), Step(kind, stage, second)))


@st.composite
def lanes(draw: st.DrawFn, stage: int, num_stages: int, num: int) -> Lane:
    """Compute steps of one stage: of 1F1B, of GPipe, or in any order at all."""
    steps = [step for step in gpipe(num_stages=num_stages, num_micro_batches=num)[stage] if step.is_compute]
    usual = one_forward_one_backward(num_stages=num_stages, num_micro_batches=num)[stage]
    order = draw(st.sampled_from(["1f1b", "gpipe", "any"]))
    if order == "any":
        steps = draw(st.permutations(steps))
    return tuple(step for step in usual if step.is_compute) if order == "1f1b" else tuple(steps)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_what_passes_runs_to_its_end(num_stages: int, num: int, data: st.DataObject) -> None:
    compute = tuple(data.draw(lanes(stage, num_stages, num)) for stage in range(num_stages))
    table = with_messages(compute)
    try:
        check_table(table)
    except ValueError as error:
        # In order at both ends, it can only be refused for getting stuck.
        lawful = all(
            lane.index(Step("forward", stage, m)) < lane.index(Step("backward", stage, m))
            for stage, lane in enumerate(compute)
            for m in range(num)
        )
        assert ("deadlock" in str(error)) == (lawful and _orders_agree(table))
    else:
        assert _orders_agree(table) and _runs_to_its_end(compute)


def _orders_agree(table: Table) -> bool:
    def order(stage: int, kind: Kind) -> list[int]:
        return [step.micro_batch for step in table[stage] if step.kind == kind]

    return all(
        order(s, "send_activation") == order(s + 1, "receive_activation")
        and order(s + 1, "send_gradient") == order(s, "receive_gradient")
        for s in range(len(table) - 1)
    )


def _runs_to_its_end(compute: Table) -> bool:
    done: set[Step] = set()
    left = [list(lane) for lane in compute]
    moved_on = True
    while moved_on:
        moved_on = False
        for stage, lane in enumerate(left):
            while lane:
                beside = stage - 1 if lane[0].kind == "forward" else stage + 1
                needed = Step(lane[0].kind, beside, lane[0].micro_batch)
                if 0 <= beside < len(compute) and needed not in done:
                    break
                done.add(lane.pop(0))
                moved_on = True
    return not any(left)
