"""Checkpoints that a run has exported to Hugging Face's format, by a process beside it."""

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Refuse
from tests.support.project import make_project, parse_plan
from tests.support.rl import RLCase, run_cases_of_rank, write_rl
from tests.support.spawn import spawn
from yuan_train.cli.main import main
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.train import run as loop
from yuan_train.train import saver


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def train_words(folder: Path, *more: str) -> list[str]:
    run = make_project(folder)
    words = ["train", "--config", str(run), f"log.directory={folder / 'log'}", "validation.every=0"]
    return [*words, f"checkpoint.directory={folder / 'c'}", "checkpoint.every=1", *more]


@pytest.mark.parametrize("kind", ["train", "rl"])
def test_a_run_exports_as_the_command_does(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every second checkpoint; of RL without critic and reference."""
    words, last = train_words(tmp_path, "checkpoint.asynchronous=true"), 3
    if kind == "rl":
        run, last = write_rl(tmp_path), 2
        words = ["rl", "--config", str(run), f"checkpoint.directory={tmp_path / 'c'}", "checkpoint.every=1"]
        words += ["algorithm.name=ppo", "algorithm.kl={coefficient: 0.1, renew: 1}", "train.precision=fp32"]
    checkpoint = tmp_path / "c" / "step-00000002"
    assert main([*words, f"train.steps={last}", "checkpoint.export=2", "checkpoint.keep=2"]) == 0
    assert names(tmp_path / "c") == {"hf-step-00000002", *(f"step-0000000{last - n}" for n in (0, 1))}
    assert re.findall(r"exported \S+/(\S+)", capfd.readouterr().err) == ["hf-step-00000002"]
    assert main(["export-hf", str(checkpoint), "--out", str(tmp_path / "hf")]) == 0
    exported = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert "model.safetensors" in exported and "config.json" in exported
    for name in exported:
        exported_beside = checkpoint.with_name(f"hf-{checkpoint.name}") / name
        assert exported_beside.read_bytes() == (tmp_path / "hf" / name).read_bytes(), name


def test_an_export_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(checkpoint: Path, out: Path) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('note\\nerror: no room')"]

    monkeypatch.setattr(saver, "export_command", fails)
    assert main(train_words(tmp_path, "train.steps=2", "checkpoint.export=1")) == 0
    for step in (1, 2):
        assert f"c/hf-step-0000000{step} was not exported: no room; the run goes on" in caplog.text
    assert names(tmp_path / "c") == {"step-00000001", "step-00000002"}
    monkeypatch.setattr(saver, "export_command", lambda checkpoint, out: ["/nowhere/at/all"])
    assert main(train_words(tmp_path, "train.steps=3", "checkpoint.export=1")) == 0
    assert "step-00000003 was not exported: [Errno 2]" in caplog.text


def slow_export(checkpoint: Path, out: Path) -> list[str]:
    """Takes longer than train.timeout, and fails if its checkpoint is removed meanwhile."""
    return ["sh", "-c", f"sleep 5 && cat {checkpoint}/state.json >/dev/null && mkdir {out}"]


def run_with_slow_exports(rank: int, case: RLCase) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "export_command", slow_export)
        with (case.folder.parent / f"stderr-{rank}").open("w") as file:
            os.dup2(file.fileno(), 2)
        run_cases_of_rank(rank, [case])


def test_a_slow_export_has_its_checkpoint_and_keeps_no_rank_from_the_run(tmp_path: Path) -> None:
    """With `keep: 1` the next checkpoint would remove it: its save waits, and so does the end of rank 0."""
    path = write_rl(tmp_path)
    overrides = (
        f"checkpoint={{directory: {tmp_path / 'c'}, every: 1, export: 1, keep: 1}}",
        "train.timeout=4 s",
        "train.steps=2",
    )
    plan = parse_plan(policy_run(load_rl(path, overrides), sequence_length=11), "2x4: 1@0 | 3@1")
    spawn(run_with_slow_exports, 2, RLCase(path, tmp_path / "log", plan, overrides))
    assert names(tmp_path / "c") == {"step-00000002", "hf-step-00000002"}
    said = (tmp_path / "stderr-0").read_text()
    assert re.findall(r"exported \S+/(\S+)", said) == ["hf-step-00000001", "hf-step-00000002"], said


def test_sigterm_waits_for_no_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    step = loop._step  # pyright: ignore[reportPrivateUsage]

    def stop_in_step_2(*arguments: Any) -> Any:
        if arguments[3] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    # It is heard before step 3, which is the last.
    monkeypatch.setattr(loop, "_step", stop_in_step_2)
    monkeypatch.setattr(saver, "export_command", lambda checkpoint, out: ["sleep", "100"])
    start = time.monotonic()
    assert main(train_words(tmp_path, "train.steps=9", "checkpoint.export=3")) == 0
    said = capfd.readouterr().err
    assert "stopped by SIGTERM after step 3" in said and "c/hf-step-00000003 was given up" in said
    assert time.monotonic() - start < 60
    assert names(tmp_path / "c") == {f"step-0000000{n}" for n in (1, 2, 3)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("checkpoint.export=3",), "3: what is exported is a checkpoint, and one is saved every 2 steps"),
        (
            ("checkpoint.export=2", "checkpoint.every=0"),
            "2: what is exported is a checkpoint, and one is saved every 0 steps",
        ),
        (("checkpoint.export=2", "checkpoint.directory="), "2, but nothing is saved"),
    ],
)
@pytest.mark.parametrize("kind", ["train", "rl"])
def test_what_is_refused(
    run_file: Path, tmp_path: Path, kind: str, overrides: tuple[str, ...], message: str, refuse: Refuse
) -> None:
    run = run_file if kind == "train" else write_rl(tmp_path)
    words = [kind, "--config", str(run), f"checkpoint.directory={tmp_path}", "checkpoint.every=2"]
    assert f"checkpoint.export: {message}" in refuse(*words, *overrides)
