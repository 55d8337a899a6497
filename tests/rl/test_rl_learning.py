"""A model learns by rewards alone, and the page that shows it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tools import make_corpus, rl_tasks
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


def test_every_story_of_the_quick_start_can_be_begun(tmp_path: Path) -> None:
    """Its prompts are beginnings of what tools/make_corpus.py tells; the reward is that of rl-story.yaml."""
    told = make_corpus.story(random.Random(0))
    rl_tasks.make("story", tmp_path / "story.jsonl")
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "story.jsonl").read_text().splitlines()]
    assert len(set(prompts)) == 8 and all(prompt.startswith("One day ") for prompt in prompts)
    assert told.split(" walked to the ")[0].split() == ["One", "day", told.split()[2]]
    assert rl_tasks.of_a_fox("There sat a kind fox, who") == 1.0 and rl_tasks.of_a_fox("a cat") == 0.0
