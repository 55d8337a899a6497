"""Policies with experts: what is trained are the experts that drew, under any plan and with environments."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rl.test_environments import changes, with_length
from tests.support.models import VARIANTS
from tests.support.project import MODEL, parse_plan
from tests.support.rl import RLCase, assert_close, read_lines, roles_of, run_rl, run_rl_cases, write_rl
from yuan_train.config.errors import ConfigError
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.models.experts import Router
from yuan_train.rl import experience
from yuan_train.rl.job import check_supported

M32 = VARIANTS["yuan-m32"] | {"num_layers": 4, "num_attention_heads": 4, "vocab_size": 64, "init_std": 0.2}
QWEN = VARIANTS["qwen3-moe"] | {"num_layers": 4, "vocab_size": 64, "init_std": 0.2}


def write_experts(folder: Path, model: dict[str, Any]) -> Path:
    return write_rl(folder, model=MODEL | model)


def test_experts_draw_and_train_alike_under_any_plan(tmp_path: Path) -> None:
    """Two unlike pipelines with a replicated stage, experts divided within a group of two, and engines on
    cards of their own, in flight and with an environment: as one process in fp64."""
    path = write_experts(tmp_path, M32)
    kl = ("algorithm.kl={coefficient: 0.1}", "algorithm.updates=2")
    run = policy_run(load_rl(path, kl), sequence_length=16)
    plans = {
        "pipelines": parse_plan(run, "2x3: 1@0 | 3@1;2 / 2x1: 4@3", schedule="zero_bubble"),
        "divided": parse_plan(run, "2x4: 1@0 | 3@1,2"),
    }
    alone = run_rl(RLCase(path, tmp_path / "alone", overrides=kl))
    talk = changes(tmp_path)
    apart = {"sync": (0, ()), "flight": (1, ("generation.weights=in_flight", "train.steps=3"))}
    run_rl_cases(
        [
            *(RLCase(path, tmp_path / name, plan, kl) for name, plan in plans.items()),
            *(
                RLCase(path, tmp_path / name, with_length(roles_of(path, staleness=age), 32), talk + more)
                for name, (age, more) in apart.items()
            ),
        ]
    )
    for name in plans:
        check_same(tmp_path, name, alone)
    check_same(tmp_path, "sync", run_rl(RLCase(path, tmp_path / "alone", overrides=talk)))
    assert len(read_lines(tmp_path / "flight")) == 3


def check_same(folder: Path, name: str, alone: list[dict[str, Any]]) -> None:
    assert read_lines(folder / name, "samples.jsonl") == read_lines(folder / "alone", "samples.jsonl"), name
    assert_close(folder / name, alone, "loss", "grad_norm", "reward", "kl", "environment_tokens")
    assert all(line["log_prob_gap"]["max"] < 1e-12 for line in read_lines(folder / name))


def test_training_takes_the_experts_that_drew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where training would choose others, as it does where two are nearly equal: with what was drawn its
    log-probabilities are those of the draws, and without they are not."""
    best = Router.best

    def others(self: Router, products: torch.Tensor) -> torch.Tensor:
        found = best(self, products)
        return (found + 1) % self.num_experts if torch.is_grad_enabled() else found

    path = write_experts(tmp_path, QWEN)
    monkeypatch.setattr(Router, "best", others)
    replayed = run_rl(RLCase(path, tmp_path / "replayed"))
    monkeypatch.setattr(experience, "_experts_of", lambda *_: None)
    without = run_rl(RLCase(path, tmp_path / "without"))
    assert all(line["log_prob_gap"]["max"] < 1e-12 for line in replayed)
    assert without[0]["log_prob_gap"]["max"] > 1e-3


def test_the_reference_chooses_its_own(tmp_path: Path) -> None:
    """At step 1 it has the policy's weights, and so the same experts: the divergence is 0."""
    path = write_experts(tmp_path, QWEN)
    first, second = run_rl(RLCase(path, tmp_path / "log", overrides=("algorithm.kl={coefficient: 0.1}",)))
    assert abs(first["kl"]) < 1e-12 < second["kl"]


def test_what_is_not_there_for_experts(tmp_path: Path) -> None:
    path = write_experts(tmp_path, M32)
    with pytest.raises(ConfigError, match="a critic with experts"):
        check_supported(load_rl(path, ("algorithm={name: ppo, group: 4}",)), None)
    biased = load_rl(path, ("model.balance=bias", "model.balance_rate=0.001"))
    with pytest.raises(ConfigError, match="balance: bias"):
        check_supported(biased, None, roles_of(path, staleness=0))
    check_supported(biased, None)
