"""`launch --hosts` and `--slurm`: nodes with unlike numbers of ranks, each in a folder of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hosts import Machines
from tests.support.project import difference, read_metrics
from tests.support.ranks import Case, run_alone
from tests.support.spawn import wait_for_step
from tests.support.supervised import words
from yuan_train.config.errors import INTERRUPTED

STEPS = 3
PORT = 12_000 + os.getpid() % 18_000
"""Below those that the system gives to whoever asks for a free one: ranks take it seconds later."""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Machines:
    """Two ranks on a, one on b; the losses of one process are in `alone`."""
    found = Machines(tmp_path_factory.mktemp("machines"))
    found.make_project("1x4: 3@0 | 3@1 / 4x1: 6@2", ["a/0", "a/1", "b/0"])
    before = Path.cwd()
    os.chdir(found.here)
    try:
        run_alone(Case(Path("run.yaml"), found.here / "alone", overrides=words(STEPS)))
    finally:
        os.chdir(before)
    return found


@contextmanager
def started(machines: Machines, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`launch` from `here`, ended at the end."""
    line = [sys.executable, "-m", "yuan_train", "launch", "--config", "run.yaml", "--plan", "plan.yaml"]
    process = subprocess.Popen(
        [*line, "--rendezvous", f"127.0.0.1:{PORT}", *words],
        cwd=machines.here,
        env=machines.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        with process:
            yield process
            process.terminate()
    finally:
        process.kill()


def check_losses(machines: Machines, log: Path) -> None:
    alone, together = read_metrics(machines.here / "alone"), read_metrics(log)
    assert difference(together[:STEPS], alone) < 1e-5
    assert difference(together[:STEPS], alone, "grad_norm") < 1e-4


def folder_of(pid: int) -> str:
    """Where a process works; nothing if it has ended, as one of another test may have meanwhile."""
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def processes_of(words: Sequence[str]) -> list[int]:
    """Processes whose command line has all of the words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(int(path.parent.name))
    return found


def test_one_command_trains_on_two_machines_and_one_that_is_lost_ends_all(machines: Machines) -> None:
    """Files are copied; losses are those of one process. Then b and all on it is killed: a ends in time."""
    log = machines.folder("a") / "log"
    line = ("--hosts", "a,me@b", "--ssh", machines.ssh, "--copy", "log.directory=log", *words(100000))
    with started(machines, *line) as process:
        wait_for_step(log, STEPS, lambda: process.poll() is None)
        check_losses(machines, log)
        here = str(machines.root)
        lost = [pid for pid in processes_of(["launch", "--this-node\0b"]) if here in folder_of(pid)]
        ranks = [pid for pid in processes_of(["yuan_train\0train", "run.yaml"])
                 if folder_of(pid) == str(machines.folder("b"))]  # fmt: skip
        assert len(lost) == 2 and len(ranks) == 1, (lost, ranks)
        began = time.monotonic()
        for pid in (*lost, *ranks):
            os.kill(pid, signal.SIGKILL)
        output = process.communicate(timeout=60)[0]
        assert time.monotonic() - began < 10
    assert process.returncode == 1
    assert "error: b was killed by SIGKILL; what it said is above, and the others were ended" in output
    assert "a | step      1/100000 | loss" in output and "rank 2" in output, output
    for name in "ab":
        folder = str(machines.folder(name))
        assert not [pid for pid in processes_of(["yuan_train"]) if folder_of(pid) == folder]


def test_a_slurm_job_and_its_interrupt(machines: Machines) -> None:
    """Two components; the machines that they got have other names than the plan's nodes."""
    job = {"JOB_ID": "7", "HET_SIZE": "2", "JOB_NODELIST_HET_GROUP_0": "n7", "JOB_NODELIST_HET_GROUP_1": "n9"}
    for name in ("n7", "n9"):
        machines.folder(name).mkdir()
    for name, value in job.items():
        os.environ[f"SLURM_{name}"] = value
    try:
        log = machines.folder("n7") / "log"
        with started(machines, "--slurm", "--copy", "log.directory=log", *words(100000)) as process:
            wait_for_step(log, STEPS, lambda: process.poll() is None)
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=60)[0]
    finally:
        for name in job:
            del os.environ[f"SLURM_{name}"]
    assert process.returncode == INTERRUPTED and output.rstrip().endswith("interrupted"), output
    check_losses(machines, log)
    steps = (machines.hosts / "steps").read_text()
    assert (
        "--het-group=0 -w n7" in steps and "--het-group=1 -w n9" in steps and "--kill-on-bad-exit=1" in steps
    )
