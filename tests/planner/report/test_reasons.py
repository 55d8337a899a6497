"""What reports say of bounds, of runners-up, and of what limits a stage."""

from __future__ import annotations

from dataclasses import replace

from tests.planner.by_hand import candidate_of
from tests.planner.search.test_offload import pipeline_of
from tests.planner.search.test_search import MODEL, card, cluster, problem
from tests.support.project import with_stages
from yuan_train.config.plan import Plan, StagePlan
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.report.plan import (
    bound_values,
    bound_words,
    differences,
    limited_by,
    slower_because,
)
from yuan_train.planner.search.prove import Bound


def test_a_bound_is_said_with_its_plans_and_what_it_knows() -> None:
    bound = Bound(seconds=1.6, schedules=("1f1b",), sizes=(1, 2))
    first, knows, effort = bound_words(bound, 2.0, 54)
    assert first == ("no plan takes less than 1.6 s (1f1b, micro-batches of 1/2); the step is 25.0% longer")
    assert "work, memory and filling" in knows
    assert effort.startswith("ten times the normal effort shortened plans of up to 54 cards by")
    assert len(bound_words(bound, 2.0, 55)) == 2, "no one measured more cards"
    assert bound_values(bound) == {"seconds": 1.6, "schedules": ["1f1b"], "micro_batch_sizes": [1, 2]}
    assert bound_values(None) is None


def two_stages(given: PlanProblem, layers: int, **first: object) -> Plan:
    """The first stage on two cards, a replica each; what is `first` in it."""
    plan = pipeline_of(given, given.cluster.cards, (0, layers, layers, MODEL.num_layers))
    one, _, last = plan.pipelines[0].stages
    stage: StagePlan = replace(one, replicas=((0,), (1,)), **first)  # type: ignore[arg-type]
    return with_stages(plan, stage, last)


def test_replicas_divide_what_limits_a_stage() -> None:
    """The first stage takes longer for a micro-batch, and its two replicas half of the step's."""
    given = problem(cluster(Card=(3, card())))
    plan = two_stages(given, MODEL.num_layers // 2 + 1)
    cost = cost_plan(make_costs(given), plan)
    first, last = cost.stages
    assert last.forward_seconds + last.backward_seconds < first.forward_seconds + first.backward_seconds
    assert limited_by([first], cost) == "-" and limited_by([last], cost) == "time, the slowest"


def test_a_runner_up_says_in_what_it_differs() -> None:
    given = problem(cluster(Card=(3, card())))
    costs, half = make_costs(given), MODEL.num_layers // 2
    best = candidate_of(costs, two_stages(given, half))
    other = candidate_of(costs, two_stages(given, half, recompute="full", in_flight=4))
    assert differences(other, best) == f"recompute {half} full,none; in flight 4,least"
    assert differences(best, best) == "the same on other cards of these types"
    slower = replace(best.cost, compute_seconds=best.cost.compute_seconds + 1)
    assert slower_because(best.cost, best.cost) == "as fast"
    assert slower_because(slower, best.cost) == "bubble and waiting +1 s"
