"""Generation and training under plans, against one process: the same tokens, the same loss and gradient."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.project import parse_plan
from tests.support.rl import RLCase, read_lines, run_rl, run_rl_cases, write_rl
from yuan_train.config.rl import policy_run
from yuan_train.config.rl_files import load_rl

PLANS = {
    "uneven": ("2x4: 1@0 | 3@1,2", "1f1b", False),
    "pipelines": ("2x3: 1@0 | 3@1,2 / 2x1: 4@3", "1f1b", True),
    "replicas": ("2x4: 2@0;1 | 2@2", "gpipe", True),
    "wide": ("4x2: 4@0,1,2,3", "1f1b", False),
    "split": ("1x8: 2@0 | 2@1", "zero_bubble", False),
    "virtual": ("2x4: 1@0 | 1@1 | 1@0 | 1@1", "interleaved_1f1b", False),
}
KL = ("algorithm.kl={coefficient: 0.1}", "algorithm.updates=2", "generation.temperature=0.7")


def test_the_plan_changes_nothing(tmp_path: Path) -> None:
    path = write_rl(tmp_path)
    cases: dict[str, RLCase] = {}
    for name, (text, schedule, sharding) in PLANS.items():
        overrides = KL if name == "pipelines" else ("train.steps=1",)
        run = policy_run(load_rl(path, overrides), sequence_length=16)
        plan = parse_plan(run, text, schedule=schedule, optimizer_sharding=sharding)
        cases[name] = RLCase(path, tmp_path / name, plan, overrides)
    once = (*KL, "train.steps=1")
    broken = RLCase(path, tmp_path / "broken", cases["pipelines"].plan, once, without="sharded_grad_reduce")
    run_rl_cases([*cases.values(), broken])
    for name, overrides in (("alone", ("train.steps=1",)), ("alone-kl", KL)):
        run_rl(RLCase(path, tmp_path / name, None, overrides))
    for name in cases:
        alone = tmp_path / ("alone-kl" if name == "pipelines" else "alone")
        assert read_lines(tmp_path / name, "samples.jsonl") == read_lines(alone, "samples.jsonl"), name
        for found, expected in zip(read_lines(tmp_path / name), read_lines(alone), strict=True):
            for key in ("loss", "grad_norm", "reward", "entropy_estimate", "ratio_max", "kl"):
                assert found[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-12), (name, key)
            assert found["log_prob_gap"]["max"] < 1e-12
    norms = [read_lines(tmp_path / name)[0]["grad_norm"] for name in ("broken", "alone-kl")]
    assert norms[0] != pytest.approx(norms[1], rel=1e-6)
