"""The simulator against closed forms and pipelines solved by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.by_hand import stage_times
from yuan_train.config.cluster import Sends
from yuan_train.planner.evaluate.simulator import StageTimes, simulate, simulate_schedule
from yuan_train.planner.native.core import run_rounds
from yuan_train.schedule.schedules import ProgramShape, make_schedule
from yuan_train.schedule.step import one_worker_each


def run(forward, backward, links, m, *, sends: Sends = "overlapped", schedule="1f1b"):
    times = stage_times(forward, backward, links)
    return simulate_schedule(ProgramShape(schedule, one_worker_each(len(forward)), m), times, sends=sends)


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("m", [1, 3, 12])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_without_links(stages, m, schedule):
    # (m + P - 1)(f + b)
    result = run([1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), m, schedule=schedule)
    assert result.step_seconds == pytest.approx((m + stages - 1) * 3.0)
    assert result.busy_seconds == pytest.approx([3.0 * m] * stages)


@pytest.mark.parametrize(
    ("forward", "backward", "links", "m", "overlapped", "blocking"),
    [
        ((1, 3, 2), (2, 6, 4), (0, 0), 6, 60, 60),
        ((1, 3, 2), (2, 6, 4), (0.5, 1), 6, 65, 70),
        ((1,) * 4, (2,) * 4, (0, 1.5, 0), 32, 153, 153.5),
        ((1,) * 4, (2,) * 4, (1, 1, 1), 3, 26, 27),
        # A sender that waits computes later: the first stage's second forward follows its first message, 2-3,
        # and that follows the stage before it, so that the second activation arrives at 4.
        ((1, 2), (2, 4), (1,), 2, 17, 18),
        # 5 bytes at 10 bytes/s after 0.5 s, both ways: 1 + 1 + 1 + 2 + 1 + 2
        ((1, 1), (2, 2), (0.5 + 5 / 10,), 1, 8, 8),
    ],
)
def test_known_pipelines(forward, backward, links, m, overlapped, blocking):
    assert run(forward, backward, links, m).step_seconds == pytest.approx(overlapped)
    assert run(forward, backward, links, m, sends="blocking").step_seconds == pytest.approx(blocking)


def test_two_stages_by_hand():
    # f = (1, 2), b = (2, 4), link 1 each way, m = 2. Stage 0: F0 0-1, F1 1-2. Messages 1-2, 2-3.
    # Stage 1: F0 2-4, B0 4-8, F1 8-10, B1 10-14. Gradients 8-9, 14-15. Stage 0: B0 9-11, B1 15-17.
    result = run((1, 2), (2, 4), (1,), 2)
    assert result.step_seconds == 17
    assert result.stage_end_seconds == (17, 14)
    spans = {
        (t.step.kind, t.step.stage, t.step.micro_batch): (t.start_seconds, t.end_seconds)
        for steps in result.timed_steps
        for t in steps
    }
    assert spans["forward", 1, 0] == (2, 4)
    assert spans["send_gradient", 1, 0] == (8, 9)
    assert spans["backward", 0, 0] == (9, 11)
    assert spans["backward", 0, 1] == (15, 17)
    assert result.bubble_fraction == pytest.approx(1 - (2 * 3 + 2 * 6) / 34)


def test_a_slow_link_is_first_in_first_out():
    # The link takes 5 for each message, compute 1: activations arrive at 6, 11, 16.
    result = run((1, 1), (1, 1), (5,), 3, schedule="gpipe")
    arrivals = [t.end_seconds for t in result.timed_steps[0] if t.step.kind == "send_activation"]
    assert arrivals == [6, 11, 16]


SLOW_MIDDLE = stage_times((1.0,) * 4, (2.0,) * 4, (0.0, 1.5, 0.0))


@pytest.mark.parametrize(
    ("in_flight", "seconds"),
    [
        (None, 153.0),
        ((4, 3, 2, 1), 153.0),
        # One more before the link, e = ceil((cf + cb) / w) = 1: the fifth micro-batch hides both messages.
        ((5, 4, 2, 1), 108.0),
        # Nothing is left to hide.
        ((6, 5, 2, 1), 108.0),
        # With equal depths before and after the link, both stages' compute and both messages are in series.
        ((4, 2, 2, 1), 32 * (3 + 3 + 2 * 1.5)),
    ],
)
def test_a_deeper_warm_up_hides_a_slow_link(in_flight, seconds):
    result = simulate_schedule(ProgramShape("1f1b", one_worker_each(4), 32, in_flight), SLOW_MIDDLE)
    assert result.step_seconds == pytest.approx(seconds)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.data())
def test_rounds_that_repeat_need_not_be_run(data):
    stages, count = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 60))
    # Of a few values, rounds repeat at once; of many, only after a while.
    seconds = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0.01, 1.0)

    def draw(number):
        return tuple(data.draw(st.lists(seconds, min_size=number, max_size=number)))

    times = StageTimes(
        forward_seconds=draw(stages),
        backward_seconds=draw(stages),
        send_activation_seconds=draw(stages - 1),
        send_gradient_seconds=draw(stages - 1),
    )
    deeper = data.draw(st.lists(st.integers(0, 5), min_size=stages - 1, max_size=stages - 1))
    last = data.draw(st.integers(1, 3))
    depths = data.draw(st.none() | st.just(tuple(last + sum(deeper[s:]) for s in range(stages))))
    found = simulate_schedule(ProgramShape("1f1b", one_worker_each(stages), count, depths), times)
    schedule = make_schedule(
        "1f1b", workers=one_worker_each(stages), num_micro_batches=count, in_flight=depths
    )
    every = simulate(schedule, times)
    for ours, theirs in (
        (found.stage_start_seconds, every.stage_start_seconds),
        (found.stage_end_seconds, every.stage_end_seconds),
        (found.worker_end_seconds, every.worker_end_seconds),
        (found.busy_seconds, every.busy_seconds),
    ):
        assert ours == pytest.approx(theirs, rel=1e-11, abs=1e-11)
    assert found.timed_steps == every.timed_steps
    after = data.draw(st.floats(0.0, 1.0)) * every.step_seconds + 1e-6
    messages = [sorted(simulation.sent_after(after)) for simulation in (found, every)]
    assert len(messages[0]) == len(messages[1])
    for ours, theirs in zip(*messages, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


def test_messages_of_a_much_deeper_stage_leave_later():
    # There the rounds alone would be too fast, which is why the simulator does not take them.
    times = StageTimes(
        forward_seconds=(1.0, 1.0, 0.5),
        backward_seconds=(2.0, 1.5, 1.0),
        send_activation_seconds=(0.3, 0.3),
        send_gradient_seconds=(0.2, 0.4),
    )

    def seconds(depths: tuple[int, ...]) -> tuple[float, float]:
        rounds = run_rounds(depths, 30, times.rows)
        found = simulate_schedule(ProgramShape("1f1b", one_worker_each(3), 30, depths), times)
        return max(rounds.stage_end_seconds), found.step_seconds

    direct, scheduled = seconds((9, 5, 1))
    assert scheduled == pytest.approx(direct, rel=1e-12)
    direct, scheduled = seconds((19, 12, 1))
    assert scheduled > direct * (1 + 1e-6)


def test_a_long_pipeline_is_run_in_few_rounds():
    times = stage_times((1.0, 1.1, 0.9, 1.0), (2.0, 2.1, 2.2, 2.0), (0.1,) * 3)
    rounds = run_rounds((4, 3, 2, 1), 10**9, times.rows)
    assert max(rounds.stage_end_seconds) / 10**9 == pytest.approx(3.25, rel=1e-6)
    assert rounds.num_sent < 100
