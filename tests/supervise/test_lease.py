"""Ranks of a node that is cut off from the others end before these go on without it."""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from yuan_train.config.errors import CAUSE
from yuan_train.supervise import agent as agents
from yuan_train.supervise.agent import POLL_SECONDS, Ranks
from yuan_train.supervise.room import CUT_SECONDS, LEASE_SECONDS, Agent, Directive


class FakeNursery:
    """Starts a program that sleeps, in place of a launcher; deaf to SIGTERM as one whose ranks hang."""

    def __init__(self, *, is_deaf: bool) -> None:
        self._take = signal.SIG_IGN if is_deaf else signal.SIG_DFL

    def fork(self, words: Sequence[str], environment: Mapping[str, str], stderr: int) -> Any:
        def hear() -> None:
            signal.signal(signal.SIGTERM, self._take)

        return subprocess.Popen(["sleep", "1000"], stderr=stderr, preexec_fn=hear)


class Saying(FakeNursery):
    """Runs a line of a shell."""

    def __init__(self, line: str) -> None:
        self._line = line

    def fork(self, words: Sequence[str], environment: Mapping[str, str], stderr: int) -> Any:
        return subprocess.Popen(["sh", "-c", self._line], stderr=stderr)


def ranks_of(nursery: FakeNursery, folder: Path, seconds: float) -> Ranks:
    made: Any = nursery
    return Ranks(made, ["launch"], folder / "next.yaml", lambda: seconds)


def code_of(ranks: Ranks) -> int | None:
    """The exit code, once they have ended; None after a minute."""
    end = time.monotonic() + 60
    while ranks.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    return ranks.poll()


@pytest.mark.parametrize(
    ("seconds", "is_deaf", "ended_by"),
    [(CUT_SECONDS + 0.1, False, signal.SIGTERM), (LEASE_SECONDS + 0.1, True, signal.SIGKILL)],
)
def test_ranks_that_are_cut_off_save_or_are_killed(
    tmp_path: Path, seconds: float, is_deaf: bool, ended_by: int
) -> None:
    ranks = ranks_of(FakeNursery(is_deaf=is_deaf), tmp_path, seconds)
    assert code_of(ranks) == -ended_by
    assert ranks.fault("b") == f"cut off from the meeting point, or stopped, for {seconds:.0f} s (on b)"


@pytest.mark.parametrize("seconds", [0.0, CUT_SECONDS + 0.1])
def test_ranks_that_end_as_they_are_asked_to_are_no_fault(tmp_path: Path, seconds: float) -> None:
    """Those of a node that is cut off end for that, whatever their launcher says."""
    said = "echo error: rank 0 was killed by SIGTERM >&2"
    line = f"trap '{said}; exit 1' TERM; while :; do sleep 0.1; done"
    ranks = ranks_of(Saying(line), tmp_path, seconds)
    time.sleep(0.5)
    ranks.ask_to_end()
    code_of(ranks)
    cut = f"cut off from the meeting point, or stopped, for {seconds:.0f} s (on b)"
    assert ranks.fault("b") == (cut if seconds else "")


@pytest.mark.parametrize(("seconds", "is_deaf"), [(CUT_SECONDS - 0.1, False), (CUT_SECONDS + 0.1, True)])
def test_others_are_left_alone(tmp_path: Path, seconds: float, is_deaf: bool) -> None:
    """An answer that is late for a moment is none that does not come; nor is who saves killed at once."""
    ranks = ranks_of(FakeNursery(is_deaf=is_deaf), tmp_path, seconds)
    time.sleep(4 * POLL_SECONDS)
    assert ranks.poll() is None
    ranks.kill()


@pytest.mark.parametrize(("said", "code"), [("", 2), (f"{CAUSE}rank 0: was killed by SIGKILL", 1)])
def test_wrong_input_is_told_by_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int
) -> None:
    """Others whose exit code says so have heard of it, or have taken a stopped rank for another program."""
    line = f"echo 'error: {said}' >&2; echo 'error: the port is taken' >&2; exit 2"
    monkeypatch.setattr(agents, "_start", lambda *_: ranks_of(Saying(line), tmp_path, 0.0))
    quiet: Any = SimpleNamespace(is_past=lambda: False, is_abandoned=lambda: False, moved_order=lambda: None)
    quiet.stop_reason, quiet.is_hopeless, quiet.is_halted = (lambda: None), (lambda: False), (lambda: False)
    one = Agent("b", "token", "127.0.0.1", 1)
    done = agents._run_ranks(quiet, quiet, quiet, one, Directive("plan"), None, agents._Signals())
    assert done.code == code
