"""Placement of roles: against every split on drawn clusters, on H800 beside H20, and with engines that go on
over the border of batches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tools.bench.roles import SPLITS, brute_force, cluster_of, drawn, fixed_step, on_h800_and_h20, problem_of
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.model import load_model
from yuan_train.config.rl_plan import RlPlan, load_rl_plan, save_rl_plan
from yuan_train.config.run import SearchConfig
from yuan_train.estimate.memory import StageBytes, plan_memory
from yuan_train.planner.report.roles import roles_html, roles_table
from yuan_train.planner.roles.placement import RolesProblem
from yuan_train.planner.roles.plan import make_rl_plan, placement_of
from yuan_train.planner.roles.search import RolesResult, RolesSearch, search_roles

ONE_CUT = SearchConfig(
    schedule=("1f1b",), tensor=(1,), recompute=("none",), replicas=(1,), micro_batch_size=(1,)
)


def check_found(
    problem: RolesProblem, folder: Path, *, priced_within: float
) -> tuple[RolesResult, RlPlan, list[StageBytes]]:
    """The search of the problem equals brute force, and its plan, read back, says of itself what the search
    had of it: what its roles hold, and what a step takes."""
    search = RolesSearch(problem)
    result = search_roles(problem, search)
    best = result.best
    assert result.exact and result.lower_bound_seconds <= best.step_seconds
    assert best.step_seconds == pytest.approx(brute_force(search), rel=1e-9)
    plan = make_rl_plan(problem, result)
    save_rl_plan(folder / "plan.yaml", plan)
    assert load_rl_plan(folder / "plan.yaml") == plan
    held = plan_memory(plan, prompt=problem.load.prompt_tokens, group=problem.load.group)
    assert all(stage.fits for stage in held)
    assert plan.forecast is not None
    told = [entry for entries in plan.forecast.roles.values() for entry in entries]
    forecast = [entry.peak_memory_bytes for entry in told]
    assert forecast == pytest.approx([math.fsum(entry.categories.values()) for entry in told])
    assert [stage.peak for stage in held] == pytest.approx(forecast, rel=1e-6)
    assert placement_of(problem, plan).step_seconds == pytest.approx(best.step_seconds, rel=priced_within)
    return result, plan, held


@pytest.mark.parametrize("seed", [0, 5])
def test_the_search_equals_brute_force(seed: int, tmp_path: Path) -> None:
    problem = drawn(seed, most_cards=4)
    result, plan, _ = check_found(problem, tmp_path, priced_within=0.02)
    assert (plan.roles.reference is not None) == problem.reference
    assert plan.roles.reward is None
    page = roles_html(result, problem, plan)
    assert "Timelines of the roles" in page and "Sync beside async" in page and "kind: rl" in page
    assert roles_table(result, problem, plan).startswith(f"RL plan: {result.best.mode}")


@pytest.mark.parametrize(("prompts", "most"), [(1, "logits"), (64, "slots")])
def test_cards_that_take_turns_hold_what_one_phase_does(prompts: int, most: str, tmp_path: Path) -> None:
    """Few answers take less than training, many slots more."""
    model = replace(load_model("configs/model/qwen2.5-0.5b.yaml"), num_layers=4)
    cluster = cluster_of({"RTX-4090": 1})
    problem = problem_of(cluster, model, prompts=prompts, group=8, prompt=64, new=64)
    _, plan, held = check_found(replace(problem, policy_search=ONE_CUT), tmp_path, priced_within=0.02)
    assert plan.roles.generation.is_shared and most in held[0].categories
    assert plan.forecast is not None
    assert plan.forecast.roles["policy"][0].categories == pytest.approx(held[0].categories, rel=1e-6)


def test_h20_cards_generate_beside_h800_that_train() -> None:
    problem = on_h800_and_h20("1.5b", 60.0, ONE_CUT)
    steps = {name: fixed_step(problem, name) for name in SPLITS}
    assert steps["swapped"] > 2.3 * steps["H20 generate"]


def test_a_reward_model_gets_cards_of_its_own() -> None:
    model = load_model("configs/model/qwen2.5-0.5b.yaml")
    model = replace(model, num_layers=4)
    problem = problem_of(
        cluster_of({"H800-80G": 2, "RTX-4090": 1}), model, prompts=2, group=4, prompt=64, new=64
    )
    problem = replace(problem, reward_model=replace(model, output="value"), policy_search=ONE_CUT)
    search = RolesSearch(problem)
    result = search_roles(problem, search)
    assert result.best.step_seconds == pytest.approx(brute_force(search), rel=1e-9)
    plan = make_rl_plan(problem, result)
    assert list(plan.plans)[-1] == "reward" and plan.roles.reward is not None
    assert plan.roles.reward.plan.global_batch_size == problem.load.samples
    assert 0 <= result.best.idle["reward"] <= 1


def test_what_does_not_fit_is_said() -> None:
    model = load_model("configs/model/qwen2.5-14b.yaml")
    small = problem_of(cluster_of({"RTX-4090": 2}), model, prompts=2, group=4, prompt=64, new=64)
    with pytest.raises(NoPlanFits, match="weights and gradients of the policy alone"):
        search_roles(small)
    short = load_model("configs/model/qwen2.5-0.5b.yaml")
    long = problem_of(cluster_of({"A10": 2}), short, prompts=1, group=4096, prompt=64, new=2048)
    with pytest.raises(NoPlanFits, match="one group of 4096 samples of 2112 tokens"):
        search_roles(replace(long, placements=("apart",)))


def test_bounds_hold_for_every_split() -> None:
    search = RolesSearch(drawn(3, most_cards=3))
    for shared, splits in ((False, search.splits()), (True, search.splits(shared=True))):
        for split in splits:
            bound = search.bound(split, shared=shared)
            placed = search.placements(split, shared=shared)
            assert all(placement.step_seconds >= bound * (1 - 1e-9) for placement in placed)
            assert placed or not math.isnan(bound)


def test_in_flight_no_batch_ends_with_its_longest_answer_and_passes_are_trained() -> None:
    problem = drawn(0, most_cards=4)
    load = replace(problem.load, expected_new_tokens=problem.load.new_tokens / 4)
    batches = replace(problem, modes=("async",), placements=("apart",), load=load)
    best = {
        name: search_roles(case).best
        for name, case in {
            "batches": batches,
            "flight": replace(batches, in_flight=True),
            "passes": replace(batches, epochs=3),
            "few bits": replace(batches, sync_share=0.1),
        }.items()
    }
    assert best["batches"].tail_seconds > 0
    assert best["flight"].step_seconds < best["batches"].step_seconds
    assert best["passes"].step_seconds >= best["batches"].step_seconds
    assert best["few bits"].step_seconds <= best["batches"].step_seconds
    assert best["few bits"].sync_bytes == pytest.approx(0.1 * best["batches"].sync_bytes)
