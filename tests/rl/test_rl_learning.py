"""A model learns by rewards alone, and the page that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import rl_tasks
from yuan_train.cli.main import main


def test_copying_is_learned_from_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`a =` is to be answered by a and the end: 40 steps of 80 answers."""
    overrides = ["train.prompts_per_step=10", "algorithm.group=8", "optimizer.learning_rate=4e-3"]
    first, last = rl_tasks.learn("copy", 0, tmp_path, [*overrides, "train.micro_batch_size=80"])
    assert first < 0.3
    assert last > 0.7
    capsys.readouterr()
    assert main(["show", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<polyline") == 6 and "<script" not in page
    shown = capsys.readouterr().out
    assert "reinforcement learning (grpo)" in shown and "reward       0." in shown
