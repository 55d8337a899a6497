"""What a run says at its start of what may not be meant."""

import re
from pathlib import Path

import pytest
import yaml

from yuan_train.cli.main import main
from yuan_train.train import run as loop


def test_changes_and_many_epochs_are_said(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A resumed run says what of its training is another; a run of twenty epochs that it is one."""
    run = run_file
    document = yaml.safe_load(run.read_text())
    words = ["train", "--config", str(run), f"log.directory={tmp_path / 'log'}", "validation.every=0"]
    words += [f"checkpoint.directory={tmp_path / 'checkpoints'}"]
    assert main([*words, "train.steps=1", "data.split=null"]) == 0
    first = capfd.readouterr().err
    assert "not as in the run" not in first and "times over" not in first
    other = "optimizer.learning_rate=0.25", "data.sequence_length=12", "model.hidden_dropout=0.5"
    assert main([*words, "train.steps=2", *other]) == 0
    said = capfd.readouterr().err
    old = document["optimizer"]["learning_rate"]
    assert f"not as in the run that saved it: optimizer.learning_rate {float(old)} -> 0.25" in said
    assert "not as in the run that saved it: train.steps 1 -> 2" in said
    assert "not as in the run that saved it: data.sequence_length 24 -> 12" in said
    assert "not as in the run that saved it: model.hidden_dropout 0.0 -> 0.5" in said
    assert "not as in the run that saved it: data.split None -> [0.9, 0.1]" in said
    assert len([line for line in said.splitlines() if "not as in" in line]) == 5

    assert main([*words, "train.steps=3", *other]) == 0
    assert "has other corpora" not in capfd.readouterr().err
    # Token files of the same lengths that were made anew.
    corpus = Path(document["data"]["train"][0]["prefix"]).with_suffix(".bin")
    tokens = corpus.read_bytes()
    corpus.write_bytes(tokens[2:] + tokens[:2])
    assert main([*words, "train.steps=4", *other]) == 0
    corpus.write_bytes(tokens)
    assert "note: data.train has other corpora or weights than when" in capfd.readouterr().err

    monkeypatch.setattr(loop, "MANY_EPOCHS", 0.01)
    assert main([*words, "train.steps=5", "optimizer.learning_rate=0.25"]) == 0
    assert re.search(
        r"note: the run reads \S+/corpus \d+ times over: it has \d+ samples, a step takes 8\n",
        capfd.readouterr().err,
    )
