"""The command line as a user runs it: processes, signals, exit codes."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.project import difference, make_plan, read_metrics, run_config
from tests.support.spawn import start_command, start_ranks, wait_for_step
from yuan_train.checkpoint.load import describe
from yuan_train.cli.main import main
from yuan_train.config.plan_constraints import save_plan

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
IMPATIENT = {"yuan_train.supervise.launched.GRACE_SECONDS": 1.0}


@pytest.fixture
def job(run_file: Path, tmp_path: Path) -> list[str]:
    """A run that never ends, under a plan of two stages, with its log and its checkpoints in `tmp_path`."""
    save_plan(tmp_path / "plan.yaml", make_plan(run_config(run_file), [[2, 4]]))
    return [
        *("--config", str(run_file), "--plan", str(tmp_path / "plan.yaml"), f"log.directory={tmp_path}"),
        *(f"checkpoint.directory={tmp_path / 'ck'}", "train.steps=100000", "validation.every=0"),
    ]


def pids_of_ranks(launcher: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def test_sigterm_to_the_launcher_saves_and_exits_with_0(job: list[str], tmp_path: Path) -> None:
    """While others are saved in the background."""
    words = ["launch", *job, "checkpoint.every=2", "checkpoint.keep=2", "checkpoint.asynchronous=true"]
    environment = {"OMP_NUM_THREADS": "1"}
    launcher = start_command(words, tmp_path / "stderr", environment=environment, constants=IMPATIENT)
    try:
        wait_for_step(tmp_path, 3, launcher.process.is_alive)
        launcher.process.terminate()
        code, errors = launcher.wait(within_seconds=120)
    finally:
        launcher.kill()
    assert code == 0, errors
    assert describe(tmp_path / "ck")["step"] == len(read_metrics(tmp_path)) and "SIGTERM" in errors


def test_a_loss_that_is_not_finite_stops_the_run(job: list[str], tmp_path: Path) -> None:
    more = ["optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "checkpoint.every=1"]
    with start_ranks(["train", *job, *more], tmp_path, 2) as ranks:
        ended = [rank.wait(within_seconds=120) for rank in ranks]
    assert [code for code, _ in ended] == [1, 1]
    said = "".join(errors for _, errors in ended)
    assert "Traceback" not in said
    (error,) = {line for line in said.splitlines() if "error:" in line}
    assert "the first output that is not finite came from rank " in error
    assert "step " in error and "last good checkpoint is that of step" in error
    assert describe(tmp_path / "ck")["whole"]


def test_torchrun_runs_the_printed_line_and_restarts_from_the_last_checkpoint(
    run_file: Path, job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 12
    alone = ("validation.every=0", f"log.directory={tmp_path / 'alone'}", f"train.steps={steps}")
    assert main(["train", "--config", str(run_file), *alone]) == 0
    capsys.readouterr()
    more = (f"train.steps={steps}", "checkpoint.every=3", "train.timeout=20 s")
    assert main(["launch", "--print", *job, *more]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    words = shlex.split(line)
    assert words[:4] == ["torchrun", "--nnodes=1", "--node-rank=0", "--nproc-per-node=2"]
    # torchrun chooses the port, so that parallel tests do not collide.
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=2", *words[words.index("-m") :]]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        wait_for_step(tmp_path, 4, lambda: process.poll() is None)
        os.kill(pids_of_ranks(process.pid)[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, steps + 1)) and "resumed from" in errors
    assert difference(lines, read_metrics(tmp_path / "alone")) < 1e-5


def test_generate_greedily_and_by_seed(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = str(tmp_path / "ck")
    keys = ("train.steps=8", "validation.every=0", f"log.directory={tmp_path}")
    assert main(["train", "--config", str(run_file), f"checkpoint.directory={checkpoints}", *keys]) == 0

    def generate(*words: str) -> str:
        capsys.readouterr()
        assert main(["generate", "--checkpoint", checkpoints, "--max-new-tokens", "8", *words]) == 0
        return capsys.readouterr().out

    prompt = ("--prompt", "the quick")
    greedy = [json.loads(generate(*prompt, "--temperature", "0", "--json")) for _ in range(2)]
    assert greedy[0] == greedy[1] and set(greedy[0]) == {"prompt_ids", "new_ids", "text"}
    assert 1 <= len(greedy[0]["new_ids"]) <= 8
    assert generate(*prompt, "--temperature", "0").startswith("the quick")
    ids = ",".join(map(str, greedy[0]["prompt_ids"]))
    again = json.loads(generate("--prompt-ids", ids, "--temperature", "0", "--json"))
    assert again["new_ids"] == greedy[0]["new_ids"]
    sampled = [generate(*prompt, "--top-k", "4", "--seed", seed) for seed in "112"]
    assert sampled[0] == sampled[1] != sampled[2]
