"""What a rank says and does at its end, in one process whose exit is only written down."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from tests.support.spawn import free_port
from yuan_train.config.errors import CheckpointError
from yuan_train.parallel.board import Board, Meeting
from yuan_train.train.ending import Ending


class Left(BaseException):
    """What stands for the end of the process."""


@pytest.fixture
def board() -> Iterator[Board]:
    """That of a job of one rank, in which a launcher has started it."""
    interrupt = signal.getsignal(signal.SIGINT)
    meeting = Meeting("127.0.0.1", free_port(), 0, 1, "0", is_agents=False)
    board = Board(meeting, "a/0", seconds=5)
    yield board
    board.close()
    signal.signal(signal.SIGINT, interrupt)


def end_on_a_card(board: Board, error: Exception, said: Callable[[], str] = str) -> tuple[int, str]:
    """With which code a rank on a card ends that has failed, and what has been said by then."""
    ended: list[tuple[int, str]] = []

    def leave(code: int) -> NoReturn:
        ended.append((code, said()))
        raise Left

    ending = Ending(board, is_card=True, leave=leave)
    try:
        with pytest.raises(Left), ending.telling():
            raise error
    finally:
        ending.finish()
    (found,) = ended
    return found


def test_on_a_card_a_rank_says_its_error_and_ends_with_nothing_torn_down(
    board: Board, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = end_on_a_card(board, KeyError("no such sample"), lambda: capfd.readouterr().err)
    assert code == 1 and text.endswith("KeyError: 'no such sample'\n")
    fault = board.look()
    assert fault is not None and fault.rank == 0 and fault.text == "KeyError: 'no such sample'"


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.99.0.1]:15010", 1),
        ("PytorchStreamReader failed reading zip archive", 2),
    ],
)
def test_a_rank_lost_while_all_read_a_checkpoint_is_no_wrong_input(
    board: Board, cause: str, code: int
) -> None:
    """Another start may read it."""
    error = CheckpointError(f"step-5: cannot be read: {cause}")
    error.__cause__ = RuntimeError(cause)
    assert end_on_a_card(board, error)[0] == code
    fault = board.look()
    assert fault is not None and fault.exit_code == code
    assert fault.text.startswith("step-5: cannot be read")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_whose_main_thread_hangs_says_the_cause_before_it_ends(
    board: Board, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yuan_train.train.ending.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("yuan_train.train.ending.TEARDOWN_SECONDS", 0.1)
    has_left, said = threading.Event(), list[tuple[int, str]]()

    def leave(code: int) -> NoReturn:
        said.append((code, capfd.readouterr().err))
        has_left.set()
        raise Left

    ending = Ending(board, is_card=False, leave=leave)
    assert board.report("tokenizer: nowhere", 2) is not None
    assert has_left.wait(30)
    ending.finish()
    assert said[0] == (2, f"error: the run ends: {board.name(0)}: tokenizer: nowhere\n")


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "YUAN_TOLD_DIRECTORY", "SHELL"])
def test_a_run_stops_when_the_launcher_of_a_rank_has_ended(
    board: Board, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """As it does on SIGTERM, which `launch` has the system send; a shell may end before its ranks."""
    for name in ("TORCHELASTIC_RUN_ID", "YUAN_TOLD_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "x")
    got: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    ending, adopter = Ending(board, is_card=False), os.getppid() + 1
    try:
        monkeypatch.setattr(os, "getppid", lambda: adopter)
        deadline = time.monotonic() + 30
        while board.why_stopped() is None and variable != "SHELL" and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        ending.finish()
        signal.signal(signal.SIGTERM, previous)
    assert got == ([signal.SIGTERM] if variable == "TORCHELASTIC_RUN_ID" else [])
