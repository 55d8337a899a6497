"""The flow of reinforcement learning in virtual time, against closed forms."""

import pytest

from yuan_train.schedule.flow import FlowTimes, play


def times_of(generate: float, train: float, *, score: float = 0.0, publish: float = 0.0):
    return FlowTimes(generate=(generate,), score=score, train=train, publish=publish)


@pytest.mark.parametrize(("generate", "train"), [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)])
def test_async_takes_the_longer_of_both_and_sync_their_sum(generate: float, train: float) -> None:
    times = times_of(generate, train, publish=0.25)
    sync = play(times, staleness=0, shared=False, scores_apart=False)
    assert sync.step_seconds == pytest.approx(generate + train + 0.25)
    assert sync.idle("engine 0") == pytest.approx(1 - generate / sync.step_seconds)
    apart = play(times, staleness=1, shared=False, scores_apart=False)
    assert apart.step_seconds == pytest.approx(max(generate, train + 0.25))
    assert apart.idle("policy") == pytest.approx(1 - (train + 0.25) / apart.step_seconds)
    assert apart.idle("engine 0") == pytest.approx(1 - generate / apart.step_seconds)


def test_shared_cards_do_one_thing_at_a_time() -> None:
    shared = play(times_of(2.0, 2.0), staleness=0, shared=True, scores_apart=False)
    assert shared.step_seconds == pytest.approx(4.0)
    assert set(shared.busy_seconds) == {"policy"}
    assert shared.idle("policy") == pytest.approx(0.0, abs=1e-9)


def test_a_reward_model_works_beside_the_others() -> None:
    times = times_of(2.0, 2.0, score=2.0)
    beside = play(times, staleness=2, shared=False, scores_apart=True)
    assert beside.step_seconds == pytest.approx(2.0)
    assert beside.idle("scoring") == pytest.approx(0.0)
    assert play(times, staleness=1, shared=False, scores_apart=False).step_seconds == pytest.approx(4.0)


def test_the_slowest_engine_decides() -> None:
    times = FlowTimes(generate=(1.0, 3.0), train=1.0)
    found = play(times, staleness=1, shared=False, scores_apart=False)
    assert found.step_seconds == pytest.approx(3.0)
    assert found.idle("engine 0") == pytest.approx(2 / 3)
