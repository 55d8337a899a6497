"""Preference training and reward models under the engine: the loss does not depend on the plan."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.project import MODEL, parse_plan, read_metrics
from tests.support.ranks import Case, run_alone, run_cases
from yuan_train.config.run import load_run

PAIRS = 13
PLAN = "2x3: 1@0 | 3@1,2 / 2x1: 4@3"
"""Two pipelines with unlike shares: one layer, then three on a tensor-parallel pair; and a card alone."""
DPO = "objective={kind: dpo, beta: 0.3, smoothing: 0.1}"
REWARD = "objective={kind: reward, margin: 0.1}"


def write_run(folder: Path, **changes: Any) -> Path:
    """A run of 4 fp64 steps on 13 pairs of drawn tokens: three steps are an epoch, almost."""
    generator = random.Random(0)

    def ids(low: int, high: int) -> list[int]:
        return [generator.randrange(1, 64) for _ in range(generator.randint(low, high))]

    lines = [
        {"prompt_ids": ids(2, 6), "chosen_ids": ids(1, 9), "rejected_ids": ids(1, 9)} for _ in range(PAIRS)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = {
        "model": MODEL | {"num_layers": 4, "vocab_size": 64},
        "data": {"pairs": str(folder / "pairs.jsonl"), "sequence_length": 16},
        "train": {
            "steps": 4,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "precision": "fp64",
            "device": "cpu",
        },
        "optimizer": {"learning_rate": 3e-3, "warmup_steps": 0},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run | changes, sort_keys=False))
    return path


def losses(folder: Path, key: str = "loss") -> list[float]:
    return [line[key] for line in read_metrics(folder)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("pairs"))


def test_the_loss_does_not_depend_on_the_plan(project: Path, tmp_path: Path) -> None:
    """DPO and a reward model on four ranks as on one; and without the sum of gradients they differ."""
    cases: dict[str, Case] = {}
    for name, objective in (("dpo", DPO), ("reward", REWARD)):
        plan = parse_plan(load_run(project, (objective,)), PLAN, optimizer_sharding=True)
        cases[name] = Case(project, tmp_path / name, plan, (objective,))
        cases[f"{name}-alone"] = Case(project, tmp_path / f"{name}-alone", None, (objective,))
    broken = Case(project, tmp_path / "broken", cases["dpo"].plan, (DPO,), without="sharded_grad_reduce")
    run_cases([cases["dpo"], cases["reward"], broken])
    for name in ("dpo", "reward"):
        run_alone(cases[f"{name}-alone"])
        for key in ("loss", "grad_norm", "margin", "accuracy"):
            found, expected = losses(tmp_path / name, key), losses(tmp_path / f"{name}-alone", key)
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-13), (name, key)
    assert losses(tmp_path / "broken") != pytest.approx(losses(tmp_path / "dpo"), rel=1e-6)
    reference = [np.load(tmp_path / name / "reference.npy") for name in ("dpo", "dpo-alone")]
    np.testing.assert_allclose(*reference, rtol=1e-12)
    assert reference[0].shape == (PAIRS, 2)
    # The policy is its own reference at step 0.
    assert losses(tmp_path / "dpo")[0] == pytest.approx(np.log(2), rel=1e-12)
    assert losses(tmp_path / "dpo", "accuracy")[0] == 0
