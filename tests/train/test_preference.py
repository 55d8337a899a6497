"""Preference training and reward models under the engine: the loss does not depend on the plan."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.commands import Ask, Refuse
from tests.support.project import MODEL, parse_plan, read_metrics
from tests.support.ranks import Case, run_alone, run_cases
from yuan_train.config.errors import CheckpointError, ConfigError, PlanError
from yuan_train.config.plan_constraints import check_plan_of_run
from yuan_train.config.run import load_run

PAIRS, FP64 = 13, {"precision": "fp64", "device": "cpu"}
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
        "train": {"steps": 4, "global_batch_size": 8, "micro_batch_size": 2} | FP64,
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
        run, schedule = load_run(project, (objective,)), "1f1b" if name == "dpo" else "zero_bubble"
        plan = parse_plan(run, PLAN, optimizer_sharding=True, schedule=schedule)
        overrides = (objective, "train.steps=3")
        cases[name] = Case(project, tmp_path / name, plan, overrides)
        cases[f"{name}-alone"] = Case(project, tmp_path / f"{name}-alone", None, overrides)
    plan, overrides = cases["dpo"].plan, (DPO, "train.steps=2", "optimizer.decay_steps=3")
    broken = Case(project, tmp_path / "broken", plan, overrides, without="sharded_grad_reduce")
    run_cases([cases["dpo"], cases["reward"], broken])
    for name in ("dpo", "reward"):
        run_alone(cases[f"{name}-alone"])
        for key in ("loss", "grad_norm", "margin", "accuracy"):
            found, expected = losses(tmp_path / name, key), losses(tmp_path / f"{name}-alone", key)
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-13), (name, key)
    assert losses(tmp_path / "broken") != pytest.approx(losses(tmp_path / "dpo")[:2], rel=1e-6)
    reference = [np.load(tmp_path / name / "reference.npy") for name in ("dpo", "dpo-alone")]
    np.testing.assert_allclose(*reference, rtol=1e-12)
    assert reference[0].shape == (PAIRS, 2)
    # The policy is its own reference at step 0.
    assert losses(tmp_path / "dpo")[0] == pytest.approx(np.log(2), rel=1e-12)
    assert losses(tmp_path / "dpo", "accuracy")[0] == 0


def test_resume_start_and_judge(project: Path, tmp_path: Path, ask: Ask, refuse: Refuse) -> None:
    """Two halves are the whole, to the bit; a reward model begins with a policy's body, and learns."""

    def run(name: str, *overrides: str, folder: str | None = None) -> list[dict[str, Any]]:
        return run_alone(Case(project, tmp_path / (folder or name), None, overrides))

    half = (DPO, f"checkpoint.directory={tmp_path / 'ck'}", "optimizer.decay_steps=4")
    whole = run("whole", DPO)
    run("half", *half, "train.steps=2")
    reference = (tmp_path / "half/reference.npy").read_bytes()
    found = run("half", *half)
    for key in ("loss", "grad_norm", "accuracy", "margin"):
        assert [line[key] for line in found] == [line[key] for line in whole], key
    assert (tmp_path / "half/reference.npy").read_bytes() == reference
    with pytest.raises(CheckpointError, match=r"elsewhere/reference.npy: cannot be read.*start.checkpoint"):
        run("elsewhere", *half, "train.steps=5")
    text = (project.parent / "pairs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "fewer.jsonl").write_text("".join(text[1:]))
    with pytest.raises(CheckpointError, match="is of other pairs"):
        run("half", *half, "train.steps=5", f"data.pairs={tmp_path / 'fewer.jsonl'}")

    # DPO again, from the policy that it has trained: log 2 is the loss of a policy that is its own reference.
    start = f"start.checkpoint={tmp_path / 'ck'}"
    again = run("again", DPO, start, "train.steps=1")
    assert again[0]["loss"] == pytest.approx(np.log(2), rel=1e-12)
    before, after = (np.load(tmp_path / name / "reference.npy") for name in ("half", "again"))
    assert abs(after - before).max() > 1e-3

    more = ("train.steps=20", "optimizer.learning_rate=0.02", f"checkpoint.directory={tmp_path / 'scores'}")
    learned = run("reward", REWARD, start, *more)
    assert learned[0]["loss"] == pytest.approx(np.log(1 + np.exp(0.1)), abs=0.3)
    assert learned[-1]["loss"] < 0.1 and learned[-1]["accuracy"] == 1
    pairs = project.parent / "pairs.jsonl"
    judged = ask("evaluate", "--checkpoint", tmp_path / "scores", "--pairs", pairs)
    one = ask("evaluate", "--checkpoint", tmp_path / "scores", "--pairs", pairs, "--max-sequences", 1)
    assert one["pairs"] == 1 < judged["pairs"]
    assert judged["accuracy"] == 1 and judged["pairs"] == PAIRS and judged["margin"] > 1
    for words, message in (
        (["evaluate", "--checkpoint", tmp_path / "ck", "--data", "x", "--max-sequences", -2], "wanted 0"),
        (["evaluate", "--checkpoint", tmp_path / "ck", "--pairs", pairs], "needs a reward model"),
        (["evaluate", "--checkpoint", tmp_path / "scores", "--token-ids", 1, "--logits", "x"], "predicts no"),
        (["generate", "--checkpoint", tmp_path / "scores", "--prompt-ids", 1], "only a language model"),
        (["export-hf", tmp_path / "scores", "--out", tmp_path / "hf"], "no published format"),
    ):
        assert message in refuse(*words)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "data.pairs: is read with objective.kind: dpo or reward.*\n.*data.train: wanted at least one"),
        ((DPO, "data.pairs=null"), "data.pairs: missing"),
        ((DPO, "train.micro_batch_size=1"), "train.micro_batch_size: 1: rows 2i and 2i"),
        ((DPO, "search.micro_batch_size=[2, 3]"), "search.micro_batch_size: 2, 3: rows"),
        ((DPO, "objective.margin=1"), "objective.margin: goes with kind: reward, not dpo"),
        ((DPO, "objective.loss=ipo"), "objective.smoothing: goes with loss: sigmoid"),
        ((DPO, "objective.beta=0"), "objective.beta: wanted greater than 0"),
        ((DPO, "model.output=value"), "model.output: value needs objective.kind: reward"),
        ((DPO, "data.split=[0.9, 0.1]"), "data.split: is not read"),
        ((DPO, "checkpoint.directory=x"), "log.directory: missing; the reference's"),
    ],
)
def test_runs_that_are_refused(project: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(project, overrides)


def test_a_plan_must_keep_pairs_together(project: Path) -> None:
    run = load_run(project, (REWARD,))
    assert run.model.output == "value" and not run.model.tie_embeddings
    assert run.model.parameters == sum(run.model.unit_parameters)
    check_plan_of_run(parse_plan(run, PLAN), run)
    with pytest.raises(PlanError, match=r"pipelines\[1\].micro_batch_size: rows 2i and 2i \+ 1 are one pair"):
        check_plan_of_run(parse_plan(run, "2x3: 4@0 / 1x2: 4@1"), run)
