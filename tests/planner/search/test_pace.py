"""Plans for cards that compute slower than their type."""

from __future__ import annotations

import pytest

from tests.planner.by_hand import entry, unit
from tests.planner.search.test_search import card, cluster, problem
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.profile import Profile
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.what_if import plan_at_pace, step_at_pace

SEARCH = SearchConfig(schedule=("1f1b",), micro_batch_size=(1,), offload=(), use_all_devices=True)


def layers_of(plan: Plan, device: str) -> float:
    """Layers of a card for each of its micro-batches, over all pipelines."""
    rank = next(entry.rank for entry in plan.ranks if entry.device == device)
    return sum(
        stage.num_layers * p.num_sequences / len(stage.replicas)
        for p in plan.pipelines
        for stage in p.stages
        if rank in stage.ranks
    )


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_slow_card_gets_less_and_the_forecast_counts_it(is_measured: bool) -> None:
    measured = entry("Card", unit(1e-3, 2e-3, transient_bytes=1e4))
    profile = Profile(sequence_length=256, precision="bf16", entries=(measured,))
    given = problem(cluster(Card=(3, card())), profile=profile if is_measured else None)
    plain = plan_at_pace(given, {}, SEARCH, micro_batch_size=1)
    pace = {"card/1": 3.0, "card/2": 1.04}
    slow = plan_at_pace(given, pace, SEARCH, micro_batch_size=1)
    assert layers_of(slow, "card/1") < layers_of(plain, "card/1") < layers_of(slow, "card/2")
    # It is a plan of the cards that there are; the forecast is that of cards at this pace.
    assert {one.type for one in slow.ranks} == {"Card"} and not list(validate_plan(slow))
    assert slow.forecast is not None and plain.forecast is not None
    assert step_at_pace(given, pace, slow) == pytest.approx(slow.forecast.step_seconds, rel=1e-9)
    assert step_at_pace(given, {}, plain) == pytest.approx(plain.forecast.step_seconds, rel=1e-9)
    before = step_at_pace(given, pace, plain)
    assert plain.forecast.step_seconds < slow.forecast.step_seconds < 0.75 * before
    # Without its pace the plan for the slow card is not the fastest.
    assert cost_plan(make_costs(given), slow).step_seconds > plain.forecast.step_seconds


def test_a_card_may_be_faster_than_its_type() -> None:
    given = problem(cluster(Card=(2, card())))
    fast = plan_at_pace(given, {"card/1": 0.5}, SEARCH, micro_batch_size=1)
    assert layers_of(fast, "card/1") > layers_of(fast, "card/0")
