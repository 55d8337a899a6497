"""A trained reward model in the loop: its scores, beside functions, under plans, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from yuan_kernels import products

from tests.support.memory import most_bytes
from tests.support.project import parse_plan
from tests.support.ranks import Case, run_alone
from tests.support.rl import RLCase, facts, read_lines, roles_of, run_rl, run_rl_cases, write_rl
from tests.train.test_preference import REWARD, write_run
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.config.devices import CATALOGUE
from yuan_train.config.errors import CheckpointError, ConfigError, TrainingError
from yuan_train.config.model import load_model
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.models.transformer import Transformer
from yuan_train.planner.costs.unit_costs import card_costs
from yuan_train.planner.costs.workload import TokenRows
from yuan_train.planner.evaluate.stage_cost import scoring_bytes
from yuan_train.rl.job import prepare_rl
from yuan_train.rl.passes import ReadingModel
from yuan_train.train.evaluate import load_trained
from yuan_train.train.job import Position


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run file, and the checkpoints of a reward model that `train` made."""
    folder = tmp_path_factory.mktemp("reward-model")
    (folder / "pairs").mkdir()
    pairs = write_run(folder / "pairs")
    saved = folder / "scores"
    run_alone(Case(pairs, folder / "log", None, (REWARD, f"checkpoint.directory={saved}")))
    return write_rl(folder), saved


def model_of(saved: Path, *, weight: float) -> str:
    return f"reward.model={{checkpoint: '{saved}', weight: {weight}}}"


def test_the_planner_counts_what_a_reward_model_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights to the byte; of a forward no more than is counted, nor less than two thirds of it."""
    # What another library of products works with on some CPUs is none of the model's.
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    model = load_model("configs/model/qwen2.5-0.5b.yaml")
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = replace(model, num_layers=3, ffn_hidden_size=1024, vocab_size=512, output="value", **sizes)
    counted = scoring_bytes(
        model,
        card_costs(
            model,
            TokenRows(1, 256, "fp32"),
            recompute="none",
            type_name="A10",
            device=CATALOGUE["A10"],
            profile=None,
        ),
        "fp32",
    )
    scorer = Transformer(model, dtype=torch.float32).eval()
    assert sum(p.nbytes for p in scorer.parameters()) == counted["weights"]
    tokens = torch.zeros(1, 256, dtype=torch.int64)
    with torch.no_grad():
        held = most_bytes(lambda: scorer.scores(scorer(tokens)))
        assert 2 / 3 * counted["activations"] < held <= counted["activations"]
    # A pass that keeps what a backward needs holds that of every layer.
    assert most_bytes(lambda: scorer.scores(scorer(tokens))) > 2 * counted["activations"]


def test_scores_are_those_of_each_answer_alone(
    project: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read by itself; weighed with a function; the same bits if resumed, and under plans."""
    path, saved = project
    asked: list[tuple[Any, list[float]]] = []
    score = ReadingModel.score

    def record(self: ReadingModel, sequences: Any) -> list[float]:
        asked.append((sequences, score(self, sequences)))
        return asked[-1][1]

    monkeypatch.setattr(ReadingModel, "score", record)
    overrides = (model_of(saved, weight=-2.0), f"checkpoint.directory={tmp_path / 'whole'}")
    run_rl(RLCase(path, tmp_path / "alone", None, overrides))
    monkeypatch.setattr(ReadingModel, "score", score)
    assert len(asked) == 2
    model = load_trained(find_checkpoint(saved), dtype=torch.float64).model
    for sequences, scores in asked:
        assert len({len(sequence) for sequence in sequences}) > 1
        for sequence, found in zip(sequences, scores, strict=True):
            with torch.no_grad():
                expected = model.score(model(torch.tensor([sequence]))[0, -1])
            assert found == pytest.approx(float(expected), abs=1e-12)
    samples = read_lines(tmp_path / "alone", "samples.jsonl")
    for sample in samples:
        rewards = sample["rewards"]
        assert sample["reward"] == rewards["evenness"] - 2 * rewards["model"]
    line = read_lines(tmp_path / "alone")[0]
    assert line["rewards"]["model"] == pytest.approx(sum(asked[0][1]) / len(asked[0][1]))

    resumed = (overrides[0], f"checkpoint.directory={tmp_path / 'parts'}")
    run_rl(RLCase(path, tmp_path / "parts", None, (*resumed, "train.steps=1")))
    run_rl(RLCase(path, tmp_path / "parts", None, resumed))
    assert facts(tmp_path / "parts") == facts(tmp_path / "alone")

    run = policy_run(load_rl(path, overrides[:1]), sequence_length=16)
    plan = parse_plan(run, "2x3: 1@0 | 3@1,2 / 2x1: 4@3", schedule="1f1b", optimizer_sharding=True)
    once = (overrides[0], "train.steps=1")
    plans = {"plan": plan, "apart": roles_of(path, staleness=0)}
    run_rl_cases([RLCase(path, tmp_path / name, own, once) for name, own in plans.items()])
    for name in plans:
        assert read_lines(tmp_path / name, "samples.jsonl") == samples[:2], name


def test_a_reward_model_alone(
    project: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without functions and packing; a score that is no number is a group that failed."""
    path, saved = project
    overrides = (model_of(saved, weight=1.0), "reward.functions=[]", "train.pack=false", "train.steps=1")
    line = run_rl(RLCase(path, tmp_path / "alone", None, overrides))[0]
    assert list(line["rewards"]) == ["model"] and line["grad_norm"] > 0
    assert line["reward"] == pytest.approx(line["rewards"]["model"])
    monkeypatch.setattr(ReadingModel, "score", lambda self, sequences: [float("nan")] * len(sequences))
    with pytest.raises(TrainingError, match="ticket 0: the reward model: gave nan, no finite number"):
        run_rl(RLCase(path, tmp_path / "nan", None, (*overrides, "reward.on_error=stop")))


def test_what_cannot_score(project: tuple[Path, Path], tmp_path: Path) -> None:
    path, saved = project

    def refused(kind: type[Exception], message: str, *overrides: str) -> None:
        with pytest.raises(kind, match=message):
            prepare_rl(load_rl(path, overrides), None, Position())

    model = model_of(saved, weight=1.0)
    run_rl(RLCase(path, tmp_path, None, ("train.steps=1", f"checkpoint.directory={tmp_path / 'c'}")))
    refused(
        CheckpointError, "holds a language model, which has no score", model_of(tmp_path / "c", weight=1.0)
    )
    refused(CheckpointError, "has a vocabulary of 64, the policy one of 128", model, "model.vocab_size=128")
    prompts = path.parent / "prompts.jsonl"
    refused(ConfigError, "pass@1 counts", model, "reward.functions=[]", f"data.evaluation={prompts}")
    refused(ConfigError, "'model' is the name of", model, "reward.functions=[{python: 'rewards.py:model'}]")
