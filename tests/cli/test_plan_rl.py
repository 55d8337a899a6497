"""plan, simulate, estimate and launch with a run of reinforcement learning."""

import json
from pathlib import Path

import pytest

from tests.support.commands import Ask, Refuse
from tests.support.rl import write_rl
from yuan_train.cli.main import main
from yuan_train.config.rl_plan import load_rl_plan

CLUSTER = """\
name: two
nodes:
  - {name: a, device: A100-40G, devices: 2, link: {bandwidth: 100 GB/s}, network: {bandwidth: 10 GB/s}}
  - {name: b, device: L40S, devices: 1, network: {bandwidth: 10 GB/s}}
"""
SEARCH = (
    "search.policy={schedule: [1f1b], tensor: [1], recompute: [none], replicas: [1], micro_batch_size: [1]}"
)


def test_the_way_of_an_rl_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ask: Ask, refuse: Refuse
) -> None:
    run, cluster, plan = write_rl(tmp_path), tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    cluster.write_text(CLUSTER)
    given = ["--config", str(run), "--cluster", str(cluster)]
    bf16 = ("train.precision=bf16", SEARCH)
    out = ("--out", plan, "--report", tmp_path / "r.html")
    found = ask("plan", *given, *out, *bf16, "search.modes=[async]")
    assert (found["kind"], found["mode"], found["placement"]) == ("rl", "async", "apart")
    assert main(["plan", *given, *bf16, "search.modes=[async]", "train.steps=7"]) == 0
    first, second, third, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("not measured") and f"measure: yuan-train profile --config {run}" in first
    assert second.startswith("the run takes ") and "(7 steps; a step of " in second
    assert third.startswith("memory: ") and " left on the fullest card (" in third
    assert rest[0].startswith("next: yuan-train plan ") and rest[1].startswith("RL plan: async")
    assert load_rl_plan(plan).staleness == 1 and found["splits_priced"] <= found["splits"]
    played = ask("simulate", "--plan", plan, "--trace", tmp_path / "t.json")
    assert played["step_seconds"] == pytest.approx(found["forecast"]["step_seconds"], rel=0.05)
    priced = ask("simulate", "--plan", plan, *given, *bf16)
    assert priced["step_seconds"] == pytest.approx(found["forecast"]["step_seconds"], rel=1e-3)
    roles = ask("estimate", "--plan", plan)["roles"]
    # No prompt is longer than a sample.
    length = load_rl_plan(plan).plans["generation"].sequence_length
    assert roles == ask("estimate", "--plan", plan, "--prompt", length)["roles"]
    assert {entry["role"] for entry in roles} == {"policy", "generation"} and all(e["fits"] for e in roles)
    said = refuse("launch", "--config", run, "--plan", plan, "algorithm.group=2", *bf16)
    assert "global_batch_size: not the run's" in said


def test_a_plan_with_a_critic_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ask: Ask, refuse: Refuse
) -> None:
    run, cluster, plan = write_rl(tmp_path), tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    cluster.write_text("name: one\nnodes:\n  - {name: a, device: A10}\n")
    given = ["--config", str(run), "--cluster", str(cluster), "train.precision=fp32", SEARCH]
    ppo = [*given, "algorithm.name=ppo"]
    forecast = ask("plan", *ppo, "--out", plan)["forecast"]
    assert 0 < forecast["critic_seconds"] < forecast["training_seconds"]
    assert forecast["roles"]["policy"][0]["categories"]["critic"] > 0
    assert ask("inspect", plan)["critic"] == "policy"
    priced = ask("simulate", "--plan", plan, *ppo)
    assert priced["step_seconds"] == pytest.approx(forecast["step_seconds"], rel=1e-3)
    assert main(["estimate", "--plan", str(plan), "--reward-model", "Qwen2.5-7B"]) == 0
    words = capsys.readouterr().out
    assert "| critic " in words and "| reward model 14.1 " in words and ", fits (" in words
    trained = ["--config", str(run), "--plan", str(plan), "train.precision=fp32", "train.steps=1"]
    assert main(["rl", *trained, "algorithm.name=ppo", f"log.directory={tmp_path / 'log'}"]) == 0
    (line,) = (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    logged = json.loads(line)
    assert logged["value_loss"] > 0 and logged["forecast_step_seconds"] == forecast["step_seconds"]
    # It is not the plan of a run without.
    assert "roles.critic: the plan has one, and algorithm.name is grpo" in refuse("rl", *trained)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("search.modes=[async]", "search.placement=[shared]"), "shared cards cannot be async"),
        (("search.expected_new_tokens=9",), "expected_new_tokens: 9, but generation.max_new_tokens is 5"),
        (("algorithm.name=ppo", "search.policy={offload: [optimizer]}"), "what a critic's stage keeps on"),
        (("schedule.mode=async", "search.modes=[sync]"), "but schedule.mode is async"),
        (("--largest",), "--largest: not with a run of reinforcement learning"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    tmp_path: Path, refuse: Refuse, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    words = ("--config", write_rl(tmp_path), "--cluster", tmp_path / "cluster.yaml")
    assert message in refuse("plan", *words, *arguments)
