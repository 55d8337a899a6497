"""Gradient reductions: when they start, in the same order on all ranks; in bf16, and one for all owners."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.project import difference, make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_cases
from yuan_train.parallel.gradients import GradReducer, closing_steps
from yuan_train.schedule.schedules import make_schedule
from yuan_train.schedule.step import RankProgram, Step, Workers, one_worker_each

Event = Step | int
"""A step that ended, or a bucket whose reduction started."""


def parameters_of(names: Sequence[str]) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.zeros(1)) for name in names}


def run(
    program: RankProgram, held: dict[int, dict[str, torch.nn.Parameter]], bucket_of: dict[str, int]
) -> list[Event]:
    """Play a program whose gradients come from the last name of a stage to its first; the order of events.

    In split backwards all gradients are deferred.
    """
    events: list[Event] = []
    split = any(step.kind == "backward_weight" for step in program)
    deferred = bucket_of if split else ()
    buckets_of = {name: (number,) for name, number in bucket_of.items()}
    reducer = GradReducer(program, held, buckets_of, deferred=deferred, start=events.append)
    reducer.begin()
    for step in program:
        reducer.before_step(step)
        if step.kind in ("backward", "backward_weight"):
            for name in reversed(held.get(step.stage, {})):
                if split:
                    held[step.stage][name].on_main_gradient()  # pyright: ignore[reportAttributeAccessIssue]
                else:
                    torch.autograd.backward(held[step.stage][name], torch.ones(1))
        events.append(step)
        reducer.after_step(step)
    return events


def started(events: list[Event]) -> Iterator[int]:
    return (event for event in events if isinstance(event, int))


def test_a_bucket_starts_inside_the_last_backward() -> None:
    program = make_schedule("1f1b", workers=one_worker_each(1), num_micro_batches=3)[0]
    names = ["embedding.weight", "layers.0.a", "layers.0.b", "layers.1.a"]
    events = run(program, {0: parameters_of(names)}, dict(zip(names, [0, 1, 1, 2], strict=True)))
    # All start before the last backward ends, and none in the one before it.
    assert events[-4:] == [2, 1, 0, Step("backward", 0, 2)]
    assert list(started(events[:-4])) == []


def test_a_gradient_added_without_a_backward_ends_with_the_step() -> None:
    """The head adds its gradient in the forward; an op may never call back. After the last step all start."""
    program = make_schedule("1f1b", workers=one_worker_each(1), num_micro_batches=1)[0]
    events: list[Event] = []
    held = {0: parameters_of(["layers.0.a", "head.weight"])}
    reducer = GradReducer(program, held, {"layers.0.a": (0,), "head.weight": (1,)}, start=events.append)
    reducer.begin()
    for step in program:
        reducer.before_step(step)
        if step.kind == "backward":
            torch.autograd.backward(held[0]["layers.0.a"], torch.ones(1))
        assert events == []
        reducer.after_step(step)
    assert events == [1, 0]


def test_a_stage_starts_its_reduction_while_another_stage_of_the_rank_runs() -> None:
    # Two ranks with two virtual stages each: rank 0 has stages 0 and 2, and ends with the backward of 0.
    program = make_schedule("interleaved_1f1b", workers=((0,), (1,), (0,), (1,)), num_micro_batches=2)[0]
    held = {0: parameters_of(["layers.0.a"]), 2: parameters_of(["layers.2.a"])}
    events = run(program, held, {"layers.0.a": 0, "layers.2.a": 1})
    assert events.index(1) < events.index(Step("backward", 2, 1)) < events.index(Step("backward", 0, 1))
    assert events.index(0) > events.index(Step("backward", 0, 0))


def test_a_bucket_of_two_stages_waits_for_both() -> None:
    program = make_schedule("zero_bubble", workers=((0,), (1,), (1,), (0,)), num_micro_batches=3)[0]
    tied = parameters_of(["embedding.weight"])
    events = run(program, {0: tied, 3: tied}, {"embedding.weight": 0})
    last = max(events.index(step) for step in closing_steps(program).values())
    assert events.index(0) == last - 1


@settings(derandomize=True, deadline=None, max_examples=60)
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
        stages = [s for s in range(num_stages) if workers[s] == (worker,)]
        numbers = sorted({bucket_of[s] for s in stages})
        held = {s: parameters_of([f"layers.{s}.a", f"layers.{s}.b"]) for s in stages}
        of = {name: numbers.index(bucket_of[s]) for s, names in held.items() for name in names}
        events = run(program, held, of)
        assert list(started(events)) == list(reversed(range(len(numbers))))
        for position, event in enumerate(events):
            if isinstance(event, int):
                later = {e.stage for e in events[position + 1 :] if isinstance(e, Step) and _closes(e)}
                before_last = {
                    s
                    for s in stages
                    if of[f"layers.{s}.a"] == event and s in later and not _last(events, s, position)
                }
                assert not before_last, "a backward of the bucket comes after its reduction"


def _closes(step: Step) -> bool:
    return step.kind in ("backward", "backward_weight")


def _last(events: list[Event], stage: int, position: int) -> bool:
    """Whether at most the running backward of a stage ends after an event."""
    later = [e for e in events[position + 1 :] if isinstance(e, Step) and e.stage == stage and _closes(e)]
    return len(later) <= 1


def test_a_reduction_left_from_the_step_before_is_an_error() -> None:
    program = make_schedule("1f1b", workers=one_worker_each(1), num_micro_batches=1)[0]
    reducer = GradReducer(program, {0: parameters_of(["layers.0.a"])}, {"layers.0.a": (0,)}, start=print)
    reducer.begin()
    with pytest.raises(AssertionError):
        reducer.begin()


# --- in bf16, and in one operation -----------------------------------------------------------------------


def test_reductions_in_bf16_and_in_one_operation(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    run_file = make_project(tmp_path / "project")
    common = ("train.precision=fp32", "train.steps=2", "optimizer.bucket_size=1")
    run = run_config(run_file, *common)
    text = "1x4: 6@0 / 1x4: 6@1"
    plans = {sharded: parse_plan(run, text, optimizer_sharding=sharded) for sharded in (False, True)}
    kinds = {"fp32": (), "bf16": ("optimizer.reduce_dtype=bf16",)}
    cases = {
        (sharded, kind): Case(run_file, tmp_path / f"{sharded} {kind}", plan, (*common, *words))
        for sharded, plan in plans.items()
        for kind, words in kinds.items()
    }
    cases[True, "coalesced"] = Case(
        run_file, tmp_path / "coalesced", plans[True], common, without="operation_per_owner"
    )
    # Three owners, by which not every bucket divides: the last one's rest is an operation of its own.
    three = parse_plan(run, "1x3: 6@0 / 1x3: 6@1 / 1x2: 6@2", optimizer_sharding=True)
    for name, without in (("three", "operation_per_owner"), ("three, each", "")):
        cases[True, name] = Case(run_file, tmp_path / name, three, common, without=without)
    run_cases(list(cases.values()))
    curves = {key: read_metrics(case.folder) for key, case in cases.items()}
    for sharded in (False, True):
        pairs = zip(curves[sharded, "fp32"], curves[sharded, "bf16"], strict=True)
        errors = [abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs]
        # 8 bits: half a unit in the last place is 2^-9 of a gradient, and a norm averages over them.
        assert 1e-7 < max(errors) < 2**-9, "rounded to bf16, and no more"
    # Two owners: their sum has one order, whoever makes it.
    for key in ("loss", "grad_norm"):
        one, each = ([line[key] for line in curves[key_]] for key_ in ((True, "coalesced"), (True, "fp32")))
        assert one == each
    for key in ("loss", "grad_norm"):
        assert difference(curves[True, "three"], curves[True, "three, each"], key) < 1e-5
