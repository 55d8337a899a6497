"""When gradient sums begin: as early as they may, and in one order on all ranks. Arithmetic only."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.parallel.gradients import sums_after
from yuan_train.schedule.step import Step, Workers
from yuan_train.schedule.tables import make_table


def test_a_stage_begins_its_sum_while_another_of_the_rank_goes_on() -> None:
    # A V of two ranks: rank 0 has stages 0 and 3, whose backwards come last and first.
    lane = make_table("interleaved_1f1b", workers=((0,), (1,), (0,), (1,)), num_micro_batches=2)[0]
    found = sums_after(lane, [frozenset({0}), frozenset({2})])
    begun = {number: lane.index(step) for step, numbers in found.items() for number in numbers}
    assert begun[1] < lane.index(Step("backward", 0, 1)) <= begun[0]
    # What another stage waits for goes first.
    assert lane.index(Step("send_gradient", 2, 1)) <= begun[1]


def test_a_bucket_of_two_stages_waits_for_both() -> None:
    lane = make_table("zero_bubble", workers=((0,), (1,), (1,), (0,)), num_micro_batches=3)[0]
    (step,) = sums_after(lane, [frozenset({0, 3})])
    last = max(i for i, taken in enumerate(lane) if taken.kind.startswith("backward"))
    assert lane.index(step) >= last


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.sampled_from(["1f1b", "gpipe", "zero_bubble", "interleaved_1f1b"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.data(),
)
def test_all_ranks_begin_in_one_order(
    schedule: str, num_ranks: int, rounds: int, num_micro_batches: int, data: st.DataObject
) -> None:
    # Buckets are runs of stages; a rank takes part in those of which it runs a stage.
    virtual = schedule in ("zero_bubble", "interleaved_1f1b")
    num_stages = num_ranks * (rounds if virtual else 1)
    workers: Workers = tuple((s % num_ranks,) for s in range(num_stages))
    bucket_of = sorted(data.draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages)))
    table = make_table(schedule, workers=workers, num_micro_batches=num_micro_batches)
    for worker, lane in enumerate(table):
        held = {b: frozenset(s for s in range(num_stages) if bucket_of[s] == b) for b in range(4)}
        mine = {b: frozenset(s for s in held[b] if workers[s] == (worker,)) for b in held}
        numbers = [b for b in mine if mine[b]]
        found = sums_after(lane, [mine[b] for b in numbers])
        order = [numbers[i] for step in lane for i in found.get(step, ())]
        assert order == sorted(numbers, reverse=True), "every sum once, against the model's order"
        for position, step in enumerate(lane):
            for i in found.get(step, ()):
                later = {s.stage for s in lane[position + 1 :] if s.kind.startswith("backward")}
                assert not later & mine[numbers[i]], "a backward comes after its sum"
