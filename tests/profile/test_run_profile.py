"""A profile of a run: with it, what the ranks were seen to compute is what is forecast."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.search.test_search import MODEL, card, cluster, find, problem
from tests.support.commands import Refuse, command
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import LoraConfig
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.profile import load_profile
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.profile.of_run import profile_of_run

CARDS = cluster(Fast=(2, card(speed=3.0)), Slow=(2, card(speed=1.0)))


def computing(plan: Plan, cost: PlanCost) -> dict[int, float]:
    """Seconds that each rank is forecast to compute in a step."""
    found: dict[int, float] = {}
    for own in cost.stages:
        pipeline = plan.pipelines[own.pipeline]
        stage = pipeline.stages[own.stage]
        for number, replica in enumerate(stage.replicas):
            count = pipeline.micro_batches_of(stage, number)
            for rank in replica:
                seconds = count * (own.forward_seconds + own.backward_seconds)
                found[rank] = found.get(rank, 0.0) + seconds
    return found


def test_the_forecast_of_the_same_plan_is_then_what_was_measured() -> None:
    given: PlanProblem = problem(CARDS)
    plan = find(given, tensor=(1,), use_all_devices=True, recompute=("none", "selective")).best.plan
    estimated = computing(plan, cost_plan(make_costs(given), plan))
    slower = {"Fast": 1.5, "Slow": 4.0}
    measured = {rank: own * slower[plan.ranks[rank].type] for rank, own in estimated.items()}
    profile = profile_of_run(plan, measured, precision="bf16")
    again = computing(plan, cost_plan(make_costs(replace(given, profile=profile)), plan))
    assert again == pytest.approx(measured, rel=1e-9)
    # The fast cards are now more than twice as far ahead: they get more.
    found = find(replace(given, profile=profile), tensor=(1,), use_all_devices=True).best
    assert found.cost.source == "measured"
    assert found.step_seconds <= cost_plan(make_costs(replace(given, profile=profile)), plan).step_seconds


def test_what_no_profile_is_made_of() -> None:
    plan = find(problem(CARDS), tensor=(1,), use_all_devices=True).best.plan
    with pytest.raises(ConfigError, match="has not measured its ranks yet"):
        profile_of_run(plan, {}, precision="bf16")
    with pytest.raises(ConfigError, match="Fast: neither the catalogue nor the plan has its rates"):
        profile_of_run(replace(plan, device_types={}), {0: 1.0}, precision="bf16")
    adapted = replace(plan, model=replace(MODEL, lora=LoraConfig(rank=2)))
    with pytest.raises(ConfigError, match="adapters"):
        profile_of_run(adapted, {0: 1.0}, precision="bf16")


def test_the_command_reads_a_log(tmp_path: Path, refuse: Refuse) -> None:
    given = problem(CARDS)
    plan = find(given, tensor=(1,), use_all_devices=True).best.plan
    measured = [2 * own for _, own in sorted(computing(plan, cost_plan(make_costs(given), plan)).items())]
    lines = [
        {"step": i, "loss": 1.0, "step_seconds": 1.0, "stage_seconds": measured, "peak_memory_bytes": [1] * 4}
        for i in range(1, 9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("profile", "--of-run", tmp_path, "--out", tmp_path / "p.json")
    assert "has no plan.yaml" in refuse(*words)
    save_plan(tmp_path / "plan.yaml", plan)
    assert command(*words) == 0
    profile = load_profile(tmp_path / "p.json")
    assert profile.precision == "bf16" and {own.device_type for own in profile.entries} == {"Fast", "Slow"}
    again = computing(plan, cost_plan(make_costs(replace(given, profile=profile)), plan))
    assert [own for _, own in sorted(again.items())] == pytest.approx(measured, rel=1e-9)
