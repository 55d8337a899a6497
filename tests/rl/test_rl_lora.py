"""Reinforcement learning of adapters: plans, engines apart that are sent adapters alone, the reference."""

from pathlib import Path

import pytest

from tests.rl.test_rl_critic import tensors_of
from tests.rl.test_rl_plans import PLANS, cases_of, check
from tests.support.project import parse_plan
from tests.support.rl import RLCase, assert_close, read_lines, roles_of, run_rl, run_rl_cases, write_rl
from yuan_train.config.model import is_trained
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.rl.roles import weight_buckets

LORA = "lora={rank: 2, alpha: 4}"
KL = ("algorithm.kl={coefficient: 0.1}", "algorithm.updates=2", "generation.temperature=0.7", LORA)


def test_the_plan_changes_nothing_and_the_reference_is_the_base(tmp_path: Path) -> None:
    cases = cases_of(
        tmp_path, {name: PLANS[name] for name in ("uneven", "pipelines")}, dict.fromkeys(PLANS, KL)
    )
    run_rl_cases([*cases.values()])
    check(tmp_path, cases)
    curve = read_lines(cases["uneven"].folder)
    # Before the first of two updates the policy is its base; it then leaves it.
    once = run_rl(
        RLCase(tmp_path / "run.yaml", tmp_path / "once", None, (*KL, "train.steps=1", "algorithm.updates=1"))
    )
    assert once[0]["kl"] == pytest.approx(0, abs=1e-12) and curve[1]["kl"] > curve[0]["kl"] > 1e-6


def test_engines_are_sent_adapters_alone(tmp_path: Path) -> None:
    path, save = write_rl(tmp_path), f"checkpoint.directory={tmp_path / 'ck'}"
    assert load_rl(path, (LORA,)).model.lora is not None
    lora = write_rl(tmp_path, lora={"rank": 2, "alpha": 4})
    roles = {staleness: roles_of(lora, staleness=staleness) for staleness in (0, 2)}
    cases = {
        "sync": (0, ("train.steps=3",)),
        "begun": (0, (save, "train.steps=2")),
        "resumed": (0, (save, "train.steps=3")),
        "async": (2, ("train.steps=3",)),
    }
    run_rl_cases([RLCase(lora, tmp_path / name, roles[age], more) for name, (age, more) in cases.items()])
    run_rl(RLCase(lora, tmp_path / "alone", None, ("train.steps=3",)))
    alone = read_lines(tmp_path / "alone")
    assert read_lines(tmp_path / "sync", "samples.jsonl") == read_lines(tmp_path / "alone", "samples.jsonl")
    together = [*read_lines(tmp_path / "begun"), *read_lines(tmp_path / "resumed")]
    for curve in (read_lines(tmp_path / "sync"), together):
        assert_close(curve, alone, "loss", "grad_norm", "reward", "entropy_estimate")
        assert all(found["log_prob_gap"]["max"] < 1e-12 for found in curve)
    # The base once, also after a resume; then the adapters: as many bytes as they have, to each engine.
    model = roles[0].roles.policy.plan.model
    tables = [weight_buckets(roles[0], 8, trained=trained) for trained in (False, True)]
    first, later = (
        sum(8 * bucket.num_elements for engine in table for bucket in engine if bucket.source == 0)
        for table in tables
    )
    assert first > 8 * later
    for curve, sent in (
        (read_lines(tmp_path / "sync"), [first, later, later]),
        (read_lines(tmp_path / "async"), [first, later, later]),
        (together, [first, later, first]),
    ):
        assert [line["sync_bytes"] for line in curve] == sent
    names = {move.name for engine in tables[1] for bucket in engine for move in bucket.moves}
    assert names and all(is_trained(model, name) for name in names)
    # Both engines have all layers.
    elements = sum(bucket.num_elements for engine in tables[1] for bucket in engine)
    assert elements == 2 * sum(model.trained_unit_parameters)


def test_a_critic_has_adapters_too(tmp_path: Path) -> None:
    path = write_rl(tmp_path)
    ppo = (LORA, "algorithm.name=ppo", f"checkpoint.directory={tmp_path / 'ck'}")
    run = policy_run(load_rl(path, ppo), sequence_length=16)
    plan = parse_plan(run, "2x3: 1@0 | 3@1,2 / 2x1: 4@3", optimizer_sharding=True)
    run_rl_cases([RLCase(path, tmp_path / "plan", plan, ppo)])
    run_rl(RLCase(path, tmp_path / "alone", None, ppo[:2]))
    assert_close(tmp_path / "plan", tmp_path / "alone", "loss", "grad_norm", "value_loss")
    found = tensors_of(tmp_path / "ck" / "step-00000002", "critic.exp_avg.")
    assert "score.weight" in found and all(is_trained(run.model, name) for name in found)
