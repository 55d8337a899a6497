"""`yuan-train show`: log directories of all kinds of runs, as text and as a page that fits a phone."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import Ask, Refuse
from tests.support.logs import OF_RL
from tests.support.project import make_plan, make_project, run_config, with_forecast, write_lines
from yuan_train.cli.main import main
from yuan_train.config.load import dump
from yuan_train.config.plan_constraints import save_plan
from yuan_train.report.html import round_ticks


def step(i: int, **more: Any) -> dict[str, Any]:
    seconds = {"step_seconds": 9.0 if i < 4 else 0.5, "forecast_step_seconds": 0.4}
    speed = {"tokens": 100 * i, "tokens_per_second": 200.0, "mfu": 0.25}
    return {"step": i, "loss": 8.0 - 0.1 * i, "grad_norm": 1.0, **speed, **seconds, **more}


def write_log(folder: Path, lines: list[dict[str, Any]], config: str = "") -> Path:
    log = folder / "log"
    log.mkdir(parents=True, exist_ok=True)
    write_lines(log / "metrics.jsonl", lines)
    if config:
        (log / "config.yaml").write_text(config)
    return log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return long_log(tmp_path)


def long_log(tmp_path: Path) -> Path:
    """Of 40 steps of 50, on two unlike ranks, with a plan that has a forecast."""
    run = run_config(make_project(tmp_path), "train.steps=50", f"log.directory={tmp_path / 'log'}")
    measured = {"stage_seconds": [0.45, 0.2], "peak_memory_bytes": [3 * 2**30, 2**30]}
    lines = [step(i, **(measured if i % 5 == 0 else {})) for i in range(1, 41)]
    lines[19]["validation_loss"] = 5.5
    plan = with_forecast(
        make_plan(run, [[4, 2]]),
        seconds=[(0.01, 0.04), (0.01, 0.02)],
        memory={"parameters": 2.0**30},
        step_seconds=0.4,
        source="measured",
    )
    found = write_log(tmp_path, lines, dump(run))
    save_plan(found / "plan.yaml", plan)
    return found


def test_a_run_is_summed_up_with_its_ranks_beside_their_forecast(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = time.time() - 180
    os.utime(log / "metrics.jsonl", (old, old))
    assert main(["show", str(log)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for words in (
        "run          language modelling of test, ",
        "steps        40 of 50; no step for 3.0 minutes",
        "loss         7.900 -> 4.950 (mean of the last 20 steps)",
        "validation   5.500 -> 5.500",
        "step time    500 ms (median); 400 ms forecast: the forecast is 20% too short",
        "speed        200 tokens/s, MFU 25.0%",
        "waits        35% of the cards' time (20% by the forecast); rank 0 (card/0) computes longest, 90% of",
        "left         5 s at this speed",
    ):
        assert any(line.startswith(words) for line in lines), words
    # 8 micro-batches of 10 + 40 ms, and of 10 + 20 ms.
    first, second = lines[-2:]
    times = (r"400 ms +450 ms \(\+12%\) +0% +10% +-", r"240 ms +200 ms \(-17%\) +40% +60% +0")
    state = "no step for 3.0 minutes"
    assert re.fullmatch(rf"0 +card card/0 +0-3 \+emb +{times[0]} +1.0 GiB +3.0 GiB +{state}", first)
    assert re.fullmatch(rf"1 +card card/1 +4-5 \+head +{times[1]} +1.0 GiB +1.0 GiB +{state}", second)


def test_inspect_of_a_log_directory_names_show(log: Path, ask: Ask) -> None:
    facts = ask("inspect", log)
    assert facts["kind"] == "log" and facts["steps_done"] == 40
    assert facts["more"] == f"yuan-train show {log}"


def pages(log: Path, tmp_path: Path) -> dict[str, Path]:
    """A page of each kind of run."""
    pairs = yaml.safe_load((log / "config.yaml").read_text()) | {"objective": {"kind": "dpo"}}
    answers = yaml.safe_load((log / "config.yaml").read_text())
    answers["data"]["loss_on_answers"] = True
    of_rl = OF_RL | {"rewards": {"exact": 0.5, "format": 0.1}, "evaluation": None}
    rl = [step(i, **of_rl) for i in range(1, 30)]
    rl[10]["evaluation"] = {"pass_1": 0.25}
    logs = {
        "language modelling": log,
        "supervised fine-tuning": write_log(tmp_path / "sft", [step(1)], yaml.safe_dump(answers)),
        "direct preference optimisation": write_log(
            tmp_path / "dpo", [step(i, accuracy=0.5, margin=0.1) for i in range(1, 9)], yaml.safe_dump(pairs)
        ),
        "reinforcement learning (grpo)": write_log(tmp_path / "rl", rl),
    }
    long = "a" * 300
    samples = [{"step": i, "prompt": "2 + 2 =", "text": f"{long}<b>{i}", "reward": 0.5} for i in (1, 20)]
    write_lines(tmp_path / "rl" / "log" / "samples.jsonl", samples)
    found: dict[str, Path] = {}
    for kind, directory in logs.items():
        found[kind] = directory.parent / "page.html"
        assert main(["show", str(directory), "--out", str(found[kind])]) == 0
    return found


def test_every_kind_of_run_has_a_page_without_scripts(log: Path, tmp_path: Path) -> None:
    found = {kind: path.read_text() for kind, path in pages(log, tmp_path).items()}
    for kind, page in found.items():
        assert f": {kind}</h1>" in page and "<polyline" in page
        assert "<script" not in page and not re.search(r"(src|href)=", page)
    assert found["language modelling"].count("measured") > 3 and "plan.yaml" in found["language modelling"]
    assert "Accuracy of pairs" in found["direct preference optimisation"]
    rl = found["reinforcement learning (grpo)"]
    assert rl.index("&lt;b&gt;1<") < rl.index("&lt;b&gt;20<") and "pass@1" in rl


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "has no metrics.jsonl; wanted the log directory of a run"),
        ("", "no finished step yet"),
        ("{torn", "no finished step yet"),
        ('{"step": 1, "loss": "none", "step_seconds": 1.0}\n', "no finished step yet"),
    ],
)
def test_no_finished_step(tmp_path: Path, text: str | None, words: str, refuse: Refuse) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert words in refuse("show", tmp_path, "--out", tmp_path / "page.html")


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.0), (0.0, 1.25), (-3.0, 12.0), (5.5, 5.6), (1.0, 20000.0)])
def test_ticks_are_round_and_around_the_values(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 9
    distance = ticks[1] - ticks[0]
    assert f"{distance:.0e}"[0] in "125"
