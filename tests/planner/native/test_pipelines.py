"""The compiled core against the schedules and the simulator that define it: the same bits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.by_hand import stage_times
from yuan_train.planner.evaluate.simulator import StageTimes, order_operations, simulate, simulate_schedule
from yuan_train.planner.native.core import native_schedule, run_schedule
from yuan_train.schedule.schedules import ProgramShape, make_schedule, peak_in_flight
from yuan_train.schedule.step import Workers, one_worker_each

SECONDS = st.sampled_from([0.0, 0.25, 1.0]) | st.floats(0.0, 3.0)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, Workers, int, tuple[int, ...] | None]:
    """A schedule's name, its workers, micro-batches, and perhaps depths."""
    name = draw(st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"]))
    stages, count = draw(st.integers(1, 7)), draw(st.integers(1, 20))
    virtual = name in ("interleaved_1f1b", "zero_bubble") and draw(st.booleans())
    if virtual:
        wide = draw(st.integers(1, stages))
        is_v = draw(st.booleans()) and stages > wide
        workers = tuple(
            (min(s % (2 * wide), 2 * wide - 1 - s % (2 * wide)) if is_v else s % wide,) for s in range(stages)
        )
        return name, workers, count, None
    replicas = draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=stages, max_size=stages))
    numbers = iter(range(sum(replicas)))
    workers = tuple(tuple(next(numbers) for _ in range(n)) for n in replicas)
    if name != "1f1b" or draw(st.booleans()):
        return name, workers, count, None
    depths: list[int] = []
    for s in reversed(range(stages)):
        n = replicas[s]
        more = draw(st.sampled_from([0, 0, 1, 2, 7]))
        depths.insert(0, max(sum(replicas[s:]) + more, n, -(-(depths[0] if depths else 0) // n) * n))
    return name, workers, count, tuple(depths)


@st.composite
def any_times(draw: st.DrawFn, stages: int) -> StageTimes:
    """Seconds of a pipeline."""

    def row(number: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(SECONDS, min_size=number, max_size=number)))

    backward = row(stages)
    parts = draw(st.lists(st.floats(0.0, 1.0), min_size=stages, max_size=stages))
    return StageTimes(
        forward_seconds=row(stages),
        backward_seconds=backward,
        weight_seconds=tuple(b * part for b, part in zip(backward, parts, strict=True)),
        send_activation_seconds=row(stages - 1),
        send_gradient_seconds=row(stages - 1),
    )


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data())
def test_the_core_makes_and_runs_the_schedules_that_the_trainer_runs(data: st.DataObject) -> None:
    name, workers, count, depths = data.draw(pipelines())
    schedule = make_schedule(name, num_micro_batches=count, workers=workers, in_flight=depths)
    own = native_schedule(name, workers, count, depths)
    operations = order_operations(schedule, workers)
    assert own.operations() == operations
    assert own.held == tuple(
        max(peak_in_flight(schedule[worker], s) for worker in workers[s]) for s in range(len(workers))
    )
    times = data.draw(any_times(len(workers)))
    for sends in ("overlapped", "blocking"):
        defined = simulate(schedule, times, workers=workers, sends=sends)
        found = run_schedule(own, times.rows, blocking=sends == "blocking")
        assert found.stage_start_seconds == defined.stage_start_seconds
        assert found.stage_end_seconds == defined.stage_end_seconds
        assert found.busy_seconds == defined.busy_seconds
        assert found.worker_end_seconds == defined.worker_end_seconds
        after = defined.step_seconds / 2
        assert sorted(found.sent_after(after)) == sorted(defined.sent_after(after))
    changed = times.rows[0][0] + 1.0, *times.rows[0][1:]
    later = run_schedule(own, (changed, *times.rows[1:]), blocking=False)
    assert later.busy_seconds != simulate(schedule, times, workers=workers).busy_seconds, (
        "it looks at the times"
    )


def test_messages_that_were_let_go_of_are_found_again() -> None:
    """A long pipeline whose rounds never repeat keeps its last messages alone; asked for earlier ones, the
    simulation runs again."""
    stages, count = 4, 300
    times = stage_times((1.0, 2**0.5, 3**0.5, 5**0.5), (2.0, 7**0.5, 3**0.5, 11**0.5), (0.1,) * 3)
    found = simulate_schedule(ProgramShape("1f1b", one_worker_each(stages), count), times)
    assert found.native is not None
    assert len(found.sent_after(found.step_seconds * 0.99)) < 2 * (stages - 1) * count
    assert len(found.sent_after(0.0)) == 2 * (stages - 1) * count
