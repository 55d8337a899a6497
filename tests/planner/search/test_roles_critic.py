"""Placement of a policy with a critic: what fits beside it, and what a step takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.by_hand import entry, unit
from tests.planner.search.test_roles import check_found
from tools.bench.roles import beside_critic, cluster_of, drawn, problem_of
from yuan_train.config.devices import CATALOGUE, GIB
from yuan_train.config.errors import NoPlanFits, PlanError
from yuan_train.config.model import load_model
from yuan_train.config.profile import Profile
from yuan_train.config.rl_plan import CriticPlan, validate_rl_plan
from yuan_train.estimate.memory import plan_memory
from yuan_train.planner.costs.unit_costs import critic_of, make_costs, value_model
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.report.roles import roles_html, roles_table
from yuan_train.planner.roles.placement import RolesProblem, policy_work
from yuan_train.planner.roles.plan import make_rl_plan, placement_of
from yuan_train.planner.roles.search import RolesResult, search_roles

MODEL = replace(load_model("configs/model/qwen2.5-0.5b.yaml"), num_layers=8, vocab_size=4096)


def on_cards(*memory_gib: float) -> RolesProblem:
    """Eight samples of MODEL on cards that differ in their memory alone, which train and draw in turns."""
    names = [f"C{i}" for i in range(len(memory_gib))]
    types = {
        name: replace(CATALOGUE["A10"], memory=int(GIB * size), reserved=0)
        for name, size in zip(names, memory_gib, strict=True)
    }
    cluster = replace(cluster_of(dict.fromkeys(names, 1)), device_types=types)
    found = problem_of(
        cluster, MODEL, prompts=2, group=4, prompt=64, new=64, placements=("shared",), modes=("sync",)
    )
    search = replace(found.policy_search, offload=(), pipelines=(1,))
    return replace(found, policy_search=search)


def layers_of(result: RolesResult) -> list[tuple[float, float]]:
    return [stage.layers for stage in result.best.policy.cost.stages]


def test_the_search_equals_brute_force_beside_a_critic(tmp_path: Path) -> None:
    problem = beside_critic(drawn(0, most_cards=4))
    result, plan, held = check_found(problem, tmp_path, priced_within=1e-6)
    assert plan.roles.critic == CriticPlan(with_="policy") and "critic" not in plan.plans
    assert held[0].categories["critic"] > 0
    # Without the critic the plan says less, by just its states.
    without = replace(plan, roles=replace(plan.roles, critic=None))
    assert held[0].peak - plan_memory(without)[0].peak == pytest.approx(held[0].categories["critic"])
    assert "of it the critic" in roles_table(result, problem, plan)
    assert "the critic follows" in roles_html(result, problem, plan)


def test_a_card_that_holds_the_policy_may_not_hold_its_critic() -> None:
    problem = on_cards(3)
    assert search_roles(problem).best.policy.cost.fits
    with pytest.raises(NoPlanFits, match="the policy has no plan on its cards"):
        search_roles(beside_critic(problem))
    tiny = beside_critic(on_cards(1.2))
    with pytest.raises(NoPlanFits, match="of the policy and its critic are more than the cards' memory"):
        search_roles(tiny)


def test_a_critic_changes_the_cut() -> None:
    """Beside a critic a small card holds fewer layers."""
    problem = on_cards(5.5, 1.5)
    alone, both = search_roles(problem), search_roles(beside_critic(problem))
    assert layers_of(alone) == [(0, 5), (5, 8)] and layers_of(both) == [(0, 6), (6, 8)]
    assert both.best.policy.cost.fits
    small = beside_critic(on_cards(2.6, 2.6))
    costs, plan = make_costs(small.policy), search_roles(on_cards(2.6, 2.6)).best.policy.plan
    assert not cost_plan(costs, plan).fits and search_roles(small).best.policy.cost.fits


def test_a_step_with_a_critic_is_longer_by_its_parts() -> None:
    """A pass for values, one for backwards, and an optimizer step for each update; of a model of its own."""
    problem = replace(on_cards(6, 6), updates=2)
    plan = search_roles(beside_critic(problem)).best.policy.plan
    costs, critic = (
        make_costs(replace(problem.policy, model=model)) for model in (MODEL, value_model(MODEL))
    )
    alone = policy_work(problem, costs, plan, cost_plan(costs, plan))
    own = make_costs(beside_critic(problem).policy)
    both = policy_work(beside_critic(problem), own, plan, cost_plan(own, plan))
    cost = cost_plan(critic, replace(plan, model=value_model(MODEL)))
    steps = cost.step_seconds + cost.step_seconds - cost.compute_seconds
    assert both.critic_seconds is not None and alone.critic_seconds is None
    assert both.training_seconds - alone.training_seconds == pytest.approx(both.critic_seconds)
    # Values are a forward pass: a third of what a micro-batch computes at least, its head apart.
    values = both.critic_seconds - steps
    assert 0.2 * cost.compute_seconds < values < 0.5 * cost.compute_seconds


def test_a_critic_has_the_measured_body_of_the_policy() -> None:
    """A profile has the policy's head, which is another than a value's."""
    own = entry("C0", unit(1.0, 2.0, state=18e6, kept=1e3, output=10.0))
    profile = Profile(sequence_length=128, entries=(own,))
    problem = replace(beside_critic(on_cards(4)).policy, profile=profile)
    costs = make_costs(problem)
    both, critic = (own.of("C0", 1, "none") for own in (costs, critic_of(costs)))
    assert [own.state_bytes for own in both.units[:-1]] == [36e6] * 9
    assert [own.forward_seconds for own in critic.units[:-1]] == [1.0] * 9
    assert critic.source == "measured" and critic.units[-1].forward_seconds < 0.01
    assert critic.units[-1].state_bytes == 18 * 2 * MODEL.hidden_size
    assert both.units[-1].forward_seconds == 1.0


def test_a_reward_model_on_the_policys_cards_takes_time_and_memory() -> None:
    problem = on_cards(4)
    plan = make_rl_plan(problem, search_roles(problem))
    with_model = replace(problem, reward_model=value_model(MODEL))
    scored = placement_of(with_model, plan)
    added = scored.step_seconds - placement_of(problem, plan).step_seconds
    assert scored.scoring_seconds > 0 and added == pytest.approx(scored.scoring_seconds)
    assert list(scored.idle) == ["policy"]
    large = replace(value_model(MODEL), num_layers=100)
    with pytest.raises(PlanError, match="does not fit card 'c0/0' beside the policy"):
        placement_of(replace(problem, reward_model=large), plan)
    (training,), (scoring,) = plan_memory(plan), plan_memory(plan, reward_model=large)
    assert training.fits and not scoring.fits
    assert scoring.categories["reward model"] == 2 * large.parameters
    # A small one is there while less is than training needs.
    assert plan_memory(plan, reward_model=replace(large, num_layers=1)) == [training]


def test_a_critic_keeps_nothing_on_hosts() -> None:
    problem = beside_critic(on_cards(6, 6))
    plan = make_rl_plan(problem, search_roles(problem))
    policy = plan.roles.policy.plan
    stages = (replace(policy.pipelines[0].stages[0], optimizer_offload=0.5), *policy.pipelines[0].stages[1:])
    away = replace(policy, pipelines=(replace(policy.pipelines[0], stages=stages),))
    moved = replace(plan, roles=replace(plan.roles, policy=replace(plan.roles.policy, plan=away)))
    assert [fault.path[-1] for fault in validate_rl_plan(moved)] == ["optimizer_offload"]
