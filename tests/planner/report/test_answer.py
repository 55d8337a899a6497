"""What `plan` says first: time, speed, memory, money, what next; both precisions where it matters."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Ask
from yuan_train.cli.main import command_parser, main

LINK = "link: {bandwidth: 20 GB/s}, network: {bandwidth: 10 Gb/s}"
CARD = "{memory: 4 GiB, fp32: 4 TFLOP/s, fp16: 8 TFLOP/s, %smemory_bandwidth: 100 GB/s}"
CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Two new cards, and two old ones without bf16."""
    path = tmp_path / "lab.yaml"
    path.write_text(
        "name: lab\n"
        "nodes:\n"
        f"  - {{name: a, device: New, devices: 2, {LINK}, price: 0.5}}\n"
        f"  - {{name: v, device: Old, devices: 2, {LINK}, price: 0.25}}\n"
        f"device_types: {{New: {CARD % 'bf16: 8 TFLOP/s, '}, Old: {CARD % ''}}}\n"
    )
    return path


def plan(cluster: Path, *words: str) -> list[str]:
    run = str(CONFIGS / "run" / "tiny.yaml")
    return ["plan", "--cluster", str(cluster), "--config", run, "search.effort=quick", *words]


def test_the_answer_stands_before_the_table(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    assert main(plan(cluster, "train.precision=bf16", "train.steps=1000", "--out", str(out))) == 0
    lines = capsys.readouterr().out.splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("Plan: "))
    measure, time, memory, rent, precision, following = lines[:table]
    assert "not measured" in measure and "yuan-train profile --config" in measure
    assert (
        time.startswith("the run takes ") and "1,000 steps" in time and "tokens/s" in time and "MFU" in time
    )
    assert memory.startswith("memory: ") and "left on the fullest card (New a/" in memory
    assert rent.startswith("rent: 1 an hour, ") and rent.endswith("for the run")
    assert "2 Old have no bf16 units: bf16 without them" in precision and "fp16, which they have" in precision
    assert following.startswith("next: yuan-train launch --config ") and f"--plan {out}" in following
    # What was changed on the command line is changed in what is typed next, or the plan is of another run.
    for line in (measure, following):
        words = shlex.split(line[line.index("yuan-train") : line.index(" (")])[1:]
        parsed = command_parser(words[0])[0].parse_args(words)
        assert parsed.overrides == ["search.effort=quick", "train.precision=bf16", "train.steps=1000"]


def test_the_answer_has_the_figures_of_both_precisions(cluster: Path, ask: Ask) -> None:
    found: dict[str, dict[str, Any]] = {}
    for precision in ("bf16", "fp16"):
        found[precision] = ask(*plan(cluster, f"train.precision={precision}"))["answer"]
    for own, other in (("bf16", "fp16"), ("fp16", "bf16")):
        told = found[own]["other_precision"]
        assert told["precision"] == other and told["fp16_only"] == {"Old": 2}
        assert told["tokens_per_second"] == pytest.approx(found[other]["tokens_per_second"], rel=0.02)
    answer = found["bf16"]
    assert answer["run_seconds"] == pytest.approx(
        answer["num_steps"] * 16 * 128 / answer["tokens_per_second"]
    )


def test_nothing_is_said_of_precisions_where_all_cards_are_alike(cluster: Path, ask: Ask) -> None:
    cluster.write_text(cluster.read_text().replace("device: Old", "device: New").replace(", price: 0.25", ""))
    assert ask(*plan(cluster, "train.precision=bf16"))["answer"]["other_precision"] is None


def test_without_a_run_file_the_time_is_that_of_tokens(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(CONFIGS / "model" / "tiny.yaml"), "search.effort=quick", "--verbose"]
    assert main(["plan", "--cluster", str(cluster), *words]) == 0
    text = capsys.readouterr().out
    assert "a billion tokens " in text and "next: yuan-train init pretrain" in text
    assert "runner-up: " in text and "New: estimated from the catalogue" in text
