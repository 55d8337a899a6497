"""The command line as a user runs it: processes, signals, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.project import make_plan, make_project, read_metrics, run_config
from yuan_train.checkpoint.load import describe
from yuan_train.config.plan_files import save_plan

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


def yuan_train(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command until it exits."""
    line = [sys.executable, "-m", "yuan_train", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=ENVIRONMENT, timeout=240)


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """Start a command."""
    line = [sys.executable, "-m", "yuan_train", *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def wait_for_step(folder: Path, step: int) -> None:
    """Wait until a run has logged a step."""
    log = folder / "metrics.jsonl"
    for _ in range(1200):
        if log.exists() and len(log.read_text().splitlines()) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"{log} did not reach step {step}")


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_sigterm_saves_and_exits_with_0(run_file: Path, tmp_path: Path, asynchronous: str) -> None:
    plan = tmp_path / "plan.yaml"
    save_plan(plan, make_plan(run_config(run_file), [[2, 4]]))
    options = ("--config", run_file, "--plan", plan, f"log.directory={tmp_path / 'log'}")
    saves = (f"checkpoint.directory={tmp_path / 'ck'}", f"checkpoint.asynchronous={asynchronous}")
    process = start(
        "launch", *options, "train.steps=100000", "checkpoint.every=2", "checkpoint.keep=2", *saves
    )
    try:
        wait_for_step(tmp_path / "log", 3)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    steps = len(read_metrics(tmp_path / "log"))
    assert describe(tmp_path / "ck")["step"] == steps and "SIGTERM" in errors


def test_torchrun_starts_the_ranks_of_a_plan(run_file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    save_plan(plan, make_plan(run_config(run_file), [[2, 4]]))
    options = ("--config", run_file, "--plan", plan, "train.steps=2", f"log.directory={tmp_path / 'log'}")
    printed = yuan_train("launch", "--print", *options)
    assert printed.returncode == 0
    (line,) = printed.stdout.splitlines()
    words = line.split()
    assert words[:4] == ["torchrun", "--nnodes=1", "--node-rank=0", "--nproc-per-node=2"]
    # torchrun chooses the port, so that parallel tests do not collide.
    words = ["--standalone", "--nproc-per-node=2", *words[words.index("-m") :]]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert len(read_metrics(tmp_path / "log")) == 2


def test_a_loss_that_is_not_finite_stops_the_run(run_file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    save_plan(plan, make_plan(run_config(run_file), [[3, 3]]))
    overrides = ("optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "checkpoint.every=1")
    done = yuan_train(
        "launch", "--config", run_file, "--plan", plan, *overrides, f"checkpoint.directory={tmp_path / 'ck'}"
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (error,) = {line for line in done.stderr.splitlines() if "error:" in line}
    assert "step " in error and "rank " in error and "last good checkpoint is that of step" in error
    assert describe(tmp_path / "ck")["whole"]


def test_a_killed_rank_ends_the_others(run_file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    save_plan(plan, make_plan(run_config(run_file), [[3, 3]]))
    options = ("--config", run_file, "--plan", plan, f"log.directory={tmp_path / 'log'}")
    process = start("launch", *options, "train.steps=100000")
    try:
        wait_for_step(tmp_path / "log", 2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "rank 1" in errors and "SIGKILL" in errors, errors


def test_a_rank_that_hangs_is_named(run_file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    save_plan(plan, make_plan(run_config(run_file), [[2, 2, 2]]))
    options = ("--config", run_file, "--plan", plan, f"log.directory={tmp_path / 'log'}")
    process = start("launch", *options, "train.steps=100000", "train.timeout=6 s")
    try:
        wait_for_step(tmp_path / "log", 2)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGSTOP)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1
    # Its neighbour reports it; rank 1 itself was stopped, and killed by the launcher.
    assert "rank 1 is gone or stuck" in errors, errors
    # Before that, as it waits, it says so.
    waits = r"step \d+: rank [02] \(pipeline 0, stage [02]\) has waited \d s in the (forward|backward) of "
    assert re.search(waits + r"micro-batch \d for rank 1's (activation|gradient)", errors), errors
    assert "Traceback" not in errors


def test_torchrun_restarts_from_the_last_checkpoint(run_file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    save_plan(plan, make_plan(run_config(run_file), [[3, 3]]))
    uninterrupted = yuan_train(
        "train", "--config", run_file, f"log.directory={tmp_path / 'uninterrupted'}", "train.steps=60"
    )
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    log = tmp_path / "log"
    words = [
        *("--standalone", "--nproc-per-node=2", "--max-restarts=2", "-m", "yuan_train", "train"),
        *("--config", str(run_file), "--plan", str(plan), f"log.directory={log}", "train.steps=60"),
        *(f"checkpoint.directory={tmp_path / 'ck'}", "checkpoint.every=5", "train.timeout=20 s"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        wait_for_step(log, 8)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    lines = read_metrics(log)
    assert [line["step"] for line in lines] == list(range(1, 61)) and "resumed from" in errors
    for restarted, expected in zip(lines, read_metrics(tmp_path / "uninterrupted"), strict=True):
        assert restarted["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_generate_greedily_and_by_seed(run_file: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "ck"
    trained = yuan_train("train", "--config", run_file, f"checkpoint.directory={checkpoints}")
    assert trained.returncode == 0, trained.stderr
    options = ("generate", "--checkpoint", checkpoints, "--prompt", "the quick", "--max-new-tokens", "8")
    greedy = [yuan_train(*options, "--temperature", "0", "--json") for _ in range(2)]
    answers = [json.loads(done.stdout) for done in greedy]
    assert answers[0] == answers[1] and set(answers[0]) == {"prompt_ids", "new_ids", "text"}
    assert 1 <= len(answers[0]["new_ids"]) <= 8
    text = yuan_train(*options, "--temperature", "0").stdout
    assert text.startswith("the quick")
    ids = ",".join(map(str, answers[0]["prompt_ids"]))
    again = yuan_train(
        "generate",
        "--checkpoint",
        checkpoints,
        "--prompt-ids",
        ids,
        *options[5:],
        "--temperature",
        "0",
        "--json",
    )
    assert json.loads(again.stdout)["new_ids"] == answers[0]["new_ids"]
