"""When gradient reductions start: as early as possible, in the same order on all ranks. Arithmetic only."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.parallel.gradients import grad_reduce_after
from yuan_train.schedule.schedules import make_schedule
from yuan_train.schedule.step import Step, Workers


def test_a_stage_starts_its_reduction_while_another_stage_of_the_rank_runs() -> None:
    # Two ranks with two virtual stages each: rank 0 has stages 0 and 2, and ends with the backward of 0.
    program = make_schedule("interleaved_1f1b", workers=((0,), (1,), (0,), (1,)), num_micro_batches=2)[0]
    found = grad_reduce_after(program, [frozenset({0}), frozenset({2})])
    started = {number: program.index(step) for step, numbers in found.items() for number in numbers}
    assert started[1] < program.index(Step("backward", 0, 1)) <= started[0]
    # The message that another stage waits for is sent first.
    assert program.index(Step("send_gradient", 2, 1)) <= started[1]


def test_a_bucket_of_two_stages_waits_for_both() -> None:
    program = make_schedule("zero_bubble", workers=((0,), (1,), (1,), (0,)), num_micro_batches=3)[0]
    (step,) = grad_reduce_after(program, [frozenset({0, 3})])
    last = max(i for i, taken in enumerate(program) if taken.kind.startswith("backward"))
    assert program.index(step) >= last


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.sampled_from(["1f1b", "gpipe", "zero_bubble", "interleaved_1f1b"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.data(),
)
def test_all_ranks_start_in_the_same_order(
    schedule: str, num_ranks: int, rounds: int, num_micro_batches: int, data: st.DataObject
) -> None:
    # Buckets are runs of consecutive stages; a rank takes part in those of which it runs a stage.
    virtual = schedule in ("zero_bubble", "interleaved_1f1b")
    num_stages = num_ranks * (rounds if virtual else 1)
    workers: Workers = tuple((s % num_ranks,) for s in range(num_stages))
    bucket_of = sorted(data.draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages)))
    programs = make_schedule(schedule, workers=workers, num_micro_batches=num_micro_batches)
    for worker, program in enumerate(programs):
        held = {b: frozenset(s for s in range(num_stages) if bucket_of[s] == b) for b in range(4)}
        own = {b: frozenset(s for s in held[b] if workers[s] == (worker,)) for b in held}
        numbers = [b for b in own if own[b]]
        found = grad_reduce_after(program, [own[b] for b in numbers])
        order = [numbers[i] for step in program for i in found.get(step, ())]
        assert order == sorted(numbers, reverse=True), (
            "every reduction once, in the reverse of the model's order"
        )
        for position, step in enumerate(program):
            for i in found.get(step, ()):
                later = {s.stage for s in program[position + 1 :] if s.kind.startswith("backward")}
                assert not later & own[numbers[i]], "a backward comes after its reduction"
