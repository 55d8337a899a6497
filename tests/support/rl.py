"""Runs of reinforcement learning of tests: a tiny model, drawn prompts, a reward of the tokens alone."""

import json
import os
import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.project import MODEL, on_devices, parse_plan
from tests.support.ranks import disabled
from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.cli.rl import _prepare_role  # pyright: ignore[reportPrivateUsage]
from yuan_train.cli.train import run_rank
from yuan_train.config.plan import Plan
from yuan_train.config.rl import RLConfig, load_rl, policy_run
from yuan_train.config.rl_plan import GenerationPlan, RlPlan, RolePlan, RolePlans
from yuan_train.rl.job import prepare_rl
from yuan_train.rl.loop import train_rl
from yuan_train.train.job import Position

TIMINGS = ("seconds", "per_second", "idle_", "mfu", "peak_memory")
"""Metrics that depend on the clock have one of these in their name."""
REWARDS = """\
def evenness(completion_ids):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)


def raises(ticket):
    if ticket % 3 == 1:
        raise KeyError("no such answer")
    return float(ticket % 2)
"""


def write_rl(folder: Path, **changes: Any) -> Path:
    """A run of 2 fp64 steps: 2 prompts of 2 to 6 tokens, 4 answers of up to 5 tokens to each."""
    generator = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [
        {"prompt_ids": [generator.randrange(4, 64) for _ in range(generator.randint(2, 6))], "answer": i}
        for i in range(10)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "rewards.py").write_text(REWARDS)
    run: dict[str, Any] = {
        "model": MODEL | {"num_layers": 4, "num_attention_heads": 4, "vocab_size": 64},
        "data": {"prompts": [{"file": str(folder / "prompts.jsonl")}], "max_prompt_tokens": 6},
        "generation": {"max_new_tokens": 5, "stop_ids": [1, 2, 3, 4, 5, 6], "prefill_chunk": 4},
        # A starved machine's reward comes late, and with the default's 10 s not at all.
        "reward": {
            "functions": [{"python": f"{folder / 'rewards.py'}:evenness"}],
            "workers": 1,
            "timeout": "120 s",
        },
        "algorithm": {"name": "grpo", "group": 4},
        "train": {"steps": 2, "prompts_per_step": 2, "micro_batch_size": 2}
        | {"precision": "fp64", "device": "cpu"},
        "optimizer": {"learning_rate": 3e-3, "schedule": "constant"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run | changes, sort_keys=False))
    return path


@dataclass(frozen=True)
class RLCase:
    """One run under one plan, of its roles together or apart (None: a single rank), with its log in
    `folder`."""

    run_file: Path
    folder: Path
    plan: Plan | RlPlan | None = None
    overrides: tuple[str, ...] = ()
    without: str = ""
    port: int = field(default_factory=free_port)

    @property
    def run(self) -> RLConfig:
        return load_rl(self.run_file, (*self.overrides, f"log.directory={self.folder}"))

    @property
    def num_ranks(self) -> int:
        return self.plan.world_size if self.plan else 1


def run_rl_cases(cases: list[RLCase]) -> None:
    """Run the cases one after another in one set of processes."""
    spawn(run_cases_of_rank, max(case.num_ranks for case in cases), cases)


def run_rl(case: RLCase) -> list[dict[str, Any]]:
    """Run a case in this process, and return its metrics."""
    torch.set_num_threads(1)
    assert not isinstance(case.plan, RlPlan)
    train_rl(prepare_rl(case.run, case.plan, Position()))
    return read_lines(case.folder)


def read_lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of a run's file."""
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def facts(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock."""
    return [
        {key: value for key, value in line.items() if not any(part in key for part in TIMINGS)}
        for line in read_lines(folder)
    ]


def assert_same_run(folder: Path, other: Path, last: str) -> None:
    """Metrics, samples and the weights of the checkpoint `last` are the same to the bit."""
    assert facts(folder) == facts(other)
    assert (folder / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    tensors = sorted(path.name for path in (other / last).glob("*.distcp"))
    assert tensors
    for name in tensors:
        assert (folder / last / name).read_bytes() == (other / last / name).read_bytes()


def assert_close(
    found: Path | list[dict[str, Any]], expected: Path | list[dict[str, Any]], *keys: str
) -> None:
    """These figures of two runs, by their log or its lines, are the same up to rounding in fp64."""
    ours, theirs = (read_lines(own) if isinstance(own, Path) else own for own in (found, expected))
    for line, wanted in zip(ours, theirs, strict=True):
        for key in keys:
            assert line[key] == pytest.approx(wanted[key], rel=1e-9, abs=1e-12), (found, key)


def roles_of(
    path: Path, *, staleness: int, policy: str = "2x4: 1@0 | 3@1", engines: str = "4x1: 1@0 | 3@1 / 4x1: 4@2"
) -> RlPlan:
    """Policy and engines on cards of their own, on nodes p and g."""
    run = policy_run(load_rl(path))
    generation = GenerationPlan(shares=None, plan=with_names(parse_plan(run, engines), "g"))
    roles = RolePlans(policy=RolePlan(plan=with_names(parse_plan(run, policy), "p")), generation=generation)
    return RlPlan(mode="async" if staleness else "sync", staleness=staleness, roles=roles)


def with_names(plan: Plan, node: str) -> Plan:
    return on_devices(plan, *(f"{node}/{rank}" for rank in range(plan.world_size)))


def run_cases_of_rank(rank: int, cases: list[RLCase]) -> None:
    """What one of the processes does."""
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    for case in cases:
        if rank < case.num_ranks:
            as_rank(rank, case.num_ranks, case.port)
            if isinstance(case.plan, RlPlan):
                prepare_rank = partial(_prepare_role, case.run, case.plan)
                run_rank(lambda own=prepare_rank: own)
                continue
            position = Position(rank, case.num_ranks, rank, case.num_ranks)
            with disabled(case.without):
                train_rl(prepare_rl(case.run, case.plan, position))
