"""Near ties go to the simplest plan, and what the fastest gains is said."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.planner.by_hand import candidate_of
from tests.planner.search.test_offload import pipeline_of
from tests.planner.search.test_search import MODEL, card, cluster, find, problem
from tests.support.project import with_stages
from tools.bench.problems import mixed_problem
from yuan_train.config.cluster import Link
from yuan_train.config.errors import PlanError
from yuan_train.config.plan import Plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.native.core import Evaluator
from yuan_train.planner.search.candidate import (
    NAMES,
    Candidate,
    burdens,
    passed_over,
    prefer_simple,
    simplicity_note,
)
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.shapes import read_options


def plain_and_deep(given: PlanProblem) -> list[Plan]:
    """Two equal stages; and the same with a warm-up of its own."""
    plain = pipeline_of(given, given.cluster.cards, (0, MODEL.num_layers // 2, MODEL.num_layers))
    first, last = plain.pipelines[0].stages
    return [plain, with_stages(plain, replace(first, in_flight=4), last)]


def test_a_warm_up_that_gains_little_is_left_out_and_one_that_gains_more_is_not() -> None:
    # Over a slow link a deeper warm-up hides the messages.
    (group,) = cluster(Card=(1, card())).nodes
    slow = replace(group, count=2, network=Link(bandwidth=3e7, latency=1e-5))
    given = problem(replace(cluster(Card=(1, card())), nodes=(slow,)), global_batch_size=16)
    costs = make_costs(given)
    plain, deep = plain_and_deep(given)
    assert [a - b for a, b in zip(burdens(deep), burdens(plain), strict=True)] == [
        int(name == "warm-ups of their own") for name in NAMES
    ]
    fastest = candidate_of(costs, deep)
    gain = cost_plan(costs, plain).step_seconds / fastest.step_seconds - 1
    assert gain > 0
    for simplicity, taken in ((gain * 1.01, plain), (gain * 0.99, deep)):
        options = read_options(SearchConfig(simplicity=simplicity), micro_batch_size=1, model=given.model)
        best, *_ = prefer_simple(costs, [fastest], options)
        assert best.plan == taken
        note = simplicity_note(best, fastest)
        assert bool(note) == (taken is plain)
    assert (
        "warm-ups of their own 1 instead of 0; search.simplicity: 0 takes it"
        in simplicity_note(replace(fastest, plan=plain, cost=cost_plan(costs, plain)), fastest)[0]
    )


@pytest.mark.parametrize(("gain", "wanted"), [(0.0004, ()), (0.0006, ("0.1% faster with more beside",))])
def test_a_gain_that_rounds_to_nothing_is_not_said(gain: float, wanted: tuple[str, ...]) -> None:
    given = problem(cluster(Card=(2, card())))
    plan = pipeline_of(given, given.cluster.cards, (0, 2, MODEL.num_layers))
    faster = candidate_of(make_costs(given), plan)
    slower = cast(Candidate, SimpleNamespace(step_seconds=faster.step_seconds * (1 + gain)))
    assert tuple(note[:28] for note in passed_over(slower, faster)) == wanted


def test_a_search_takes_no_plan_that_is_slower_than_it_may_be() -> None:
    given = problem(cluster(Fast=(3, card(speed=3.0)), Slow=(2, card())), global_batch_size=12)
    keys = {"schedule": ("1f1b", "zero_bubble"), "micro_batch_size": (1, 2), "effort": "quick"}
    fastest, simple = (find(given, simplicity=part, **keys).best for part in (0.0, 0.05))
    assert fastest.step_seconds <= simple.step_seconds <= 1.05 * fastest.step_seconds
    assert burdens(simple.plan) <= burdens(fastest.plan)


def test_effort_is_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third and ten times the drafts of a normal search."""
    monkeypatch.setattr("yuan_train.planner.search.drafts.LEAST_BUDGET", 24_000)
    monkeypatch.setattr("yuan_train.planner.search.drafts.BUDGET_PER_CARD", 0)
    budgets: list[int] = []
    whole = Evaluator.search

    def search(self: Evaluator, *arguments: Any, budget: int, **keys: Any) -> Any:
        budgets.append(budget)
        return whole(self, *arguments, budget=budget, **keys)

    monkeypatch.setattr(Evaluator, "search", search)
    given = problem(cluster(Card=(2, card())))
    found, first = dict[str, int](), dict[str, int]()
    for effort in ("quick", "normal", "thorough"):
        budgets.clear()
        find(given, effort=effort, time_limit=60.0)
        found[effort] = max(budgets)
        first[effort] = budgets[0]
    # More effort begins as a normal search does.
    assert first["thorough"] == first["normal"]
    assert found["quick"] == pytest.approx(found["normal"] / 3, rel=1e-2)
    assert found["thorough"] == pytest.approx(10 * found["normal"], rel=1e-2)


def test_a_plan_does_not_depend_on_how_many_processors_search_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations on hosts among it, whose copies an evaluator keeps from one price to the next."""
    found = list[tuple[Plan, int]]()
    for processors in (1, 3):
        monkeypatch.setattr("yuan_train.planner.native.core.NUM_PROCESSORS", processors)
        search = SearchConfig(effort="quick", time_limit=3600.0)
        result = search_plan(mixed_problem(216), search, micro_batch_size=1)
        assert any(stage.activation_offload for stage in result.best.plan.stages)
        found.append((result.best.plan, result.num_simulated))
    assert found[0] == found[1]


def test_what_cannot_run_without_a_thing_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations away may need the depths that a simpler plan would leave out."""
    given = problem(cluster(Card=(2, card())), global_batch_size=16)
    costs, (_, deep) = make_costs(given), plain_and_deep(given)
    fastest = candidate_of(costs, deep)

    def refuse(*_: object) -> None:
        raise PlanError("resident_parts: 6 is too small")

    monkeypatch.setattr("yuan_train.planner.search.candidate.cost_plan", refuse)
    options = read_options(SearchConfig(simplicity=0.05), micro_batch_size=1, model=given.model)
    assert prefer_simple(costs, [fastest], options) == [fastest]
