"""How ranks meet, and who is named if one ends meanwhile: several boards of one process, a thread each."""

import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

from tests.support.spawn import free_port, spawn
from yuan_train.config.errors import ConfigError, LostRank, PlanError, TrainingError, YuanError
from yuan_train.parallel import board as board_module
from yuan_train.parallel.board import Board, Meeting


def meeting_of(rank: int, world_size: int, port: int) -> Meeting:
    return Meeting("127.0.0.1", port, rank, world_size, "0", is_agents=False)


def meet(behaviours: list[Callable[[Board], None]]) -> list[Exception | None]:
    """What each rank raises that meets the others, and then does as told."""
    port, world_size = free_port(), len(behaviours)

    def run(rank: int) -> tuple[Board, Exception | None]:
        board = Board(meeting_of(rank, world_size, port), f"n/{rank}", seconds=30)
        try:
            board.wait_for_all(30)
            behaviours[rank](board)
        except TrainingError as error:
            return board, error
        return board, None

    with ThreadPoolExecutor(world_size) as pool:
        ended = list(pool.map(run, range(world_size)))
    for board, _ in reversed(ended):
        board.close()
    return [error for _, error in ended]


def refuse(board: Board) -> None:
    """As behind a firewall, which lets connections to others through."""
    board._listener.close()  # pyright: ignore[reportPrivateUsage]
    board.join_ring()


def test_a_rank_that_ends_before_it_is_watched_is_named_by_all() -> None:
    ended = threading.Event()

    def end(board: Board) -> None:
        """As if killed."""
        board.close()
        ended.set()

    def join(board: Board) -> None:
        assert ended.wait(60)
        board.join_ring()

    first, second, third = meet([join, end, join])
    assert second is None
    for error in (first, third):
        assert error is not None and "rank 1 (n/1 on " in str(error) and "does not answer" in str(error)
    assert "the connection to rank 1 was not made" in str(first)


def test_a_rank_behind_a_firewall_is_not_blamed() -> None:
    assert meet([Board.join_ring, refuse, Board.join_ring]) == [None, None, None]


def test_a_rank_that_only_tells_a_fault_is_not_counted_as_there() -> None:
    """It is named where it runs, and missing."""
    port = free_port()
    board = Board(meeting_of(0, 2, port), "n/0", seconds=30)
    other = Board(meeting_of(1, 2, port), "n/1", seconds=30)
    with pytest.raises(LostRank, match=r"rank 0 \(n/0 on .*\): rank 1 did not come to"):
        board.wait_for_all(0.1)
    other.close()
    board.close()


def silent_program(port: int) -> socket.socket:
    """Accepts connections, and says nothing."""
    return socket.create_server(("127.0.0.1", port))


def test_a_port_that_another_program_has_is_said_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "ANSWER_SECONDS", 0.5)
    port = free_port()
    with silent_program(port):
        for rank in (0, 1):
            with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} is not rank 0.*the port is another"):
                Board(meeting_of(rank, 2, port), "n/0", seconds=1)


def test_a_rank_of_another_run_that_comes_to_the_port_of_one_does_it_no_harm() -> None:
    port = free_port()
    boards = [Board(meeting_of(rank, 2, port), f"n/{rank}", seconds=30) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda board: board.wait_for_all(30), boards))
    for size in (2, 3):
        with pytest.raises(ConfigError, match="all 2 ranks of a run at .* have met already: another one"):
            Board(meeting_of(1, size, port), "m/1", seconds=30)
    with pytest.raises(Exception, match="TrainingError: .*cannot meet"):
        # torch lets one process have a store twice; another one may not.
        spawn(come_as_another, 1, meeting_of(0, 2, port))
    assert [board.look() for board in boards] == [None, None]
    for board in reversed(boards):
        board.close()


def come_as_another(_: int, meeting: Meeting) -> None:
    Board(meeting, "m/0", seconds=5)


def test_ranks_of_unlike_plans_end_together() -> None:
    port = free_port()
    first = Board(meeting_of(0, 2, port), "n/0", seconds=30)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(first.wait_for_all, 30)
        with pytest.raises(PlanError, match="started as rank 1 of 3, but at .* 2 ranks meet") as error:
            Board(meeting_of(1, 3, port), "m/1", seconds=30)
        with pytest.raises(YuanError, match=f"the run ends: rank 1.*{re.escape(str(error.value))}") as told:
            meeting.result()
    assert told.value.exit_code == 2
    first.close()


def test_a_rank_that_comes_twice_is_named() -> None:
    port = free_port()
    first = Board(meeting_of(0, 3, port), "n/0", seconds=30)
    again = [Board(meeting_of(1, 3, port), f"n/{i}", seconds=30) for i in (1, 2)]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(board.wait_for_all, 30) for board in (first, *again)]
        errors = [str(future.exception()) for future in waiting]
    assert all("rank 1 has come to" in error and "twice, from n/" in error for error in errors), errors
    for board in (*again, first):
        board.close()


def test_what_a_launcher_tells_is_heard_by_the_first_rank_too() -> None:
    """A launcher that does not know its node holds the store itself when nobody is there."""
    port = free_port()
    launcher = Board(meeting_of(0, 0, port), "", seconds=5)
    told = launcher.report("nowhere.yaml: no such file", 2, where="launch of m")
    first = Board(meeting_of(0, 2, port), "n/0", seconds=30)
    with pytest.raises(YuanError, match="the run ends: launch of m: nowhere.yaml"):
        first.wait_for_all(30)
    assert told is not None and first.report("port in use", 2) == told
    first.close()
    launcher.close()


def test_the_roll_call_ends_once_all_but_the_ended_rank_have_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 has ended without a word; hours would be waited for a rank that only does not answer."""
    monkeypatch.setattr(board_module, "ROLL_CALL_SECONDS", 10_000.0)
    ended = threading.Event()

    def end(board: Board) -> None:
        board.join_ring()
        board.close()
        ended.set()

    def find(board: Board) -> None:
        board.join_ring()
        assert ended.wait(60)
        while (fault := board.look_around()) is None:
            ended.wait(0.05)
        raise fault.as_error()

    *found, last = meet([find, find, end])
    assert last is None
    for error in found:
        assert str(error).startswith("rank 2 (n/2 on ") and "does not answer" in str(error), error


@pytest.mark.parametrize(
    ("pauses", "named"),
    [
        ({1: ("still", 5.0)}, "rank 1 (n/1 on HERE): stood still for 5.0 s: stopped by a signal"),
        ({1: ("still", 5.0), 2: ("cut", 5.0)}, "rank 1 (n/1 on HERE): stood still for 5.0 s"),
        (
            {2: ("cut", 4.0)},
            "rank 2 (n/2 on HERE): cut off from rank 0 (n/0 on HERE), rank 1 (n/1 on HERE) for",
        ),
        # It seems so to all others where the one at the store is.
        (
            {1: ("cut", 4.0), 2: ("cut", 5.0)},
            "rank 0 (n/0 on HERE): cut off from rank 1 (n/1 on HERE), rank 2 (",
        ),
        ({1: ("still", 0.1)}, "rank 0 (n/0 on HERE): rank 2 is gone or stuck"),
        ({}, "rank 0 (n/0 on HERE): rank 2 is gone or stuck"),
    ],
)
def test_who_was_away_for_a_while_is_named_by_who_waited_for_another(
    monkeypatch: pytest.MonkeyPatch, pauses: dict[int, tuple[Literal["still", "cut"], float]], named: str
) -> None:
    """All answer the roll call: what has stopped one, or cut it off, is over."""
    monkeypatch.setattr(board_module, "ROLL_CALL_SECONDS", 1.0)

    def find(board: Board) -> None:
        rank = board.meeting.rank
        if rank in pauses:
            board.note_pause(*pauses[rank])
        end = time.monotonic() + 30
        fault = board.accuse("rank 2 is gone or stuck") if rank == 0 else None
        while fault is None and time.monotonic() < end:
            fault = board.look()
            time.sleep(0.05)
        assert fault is not None
        raise fault.as_error()

    for error in meet([find, find, find]):
        assert str(error).startswith(named.replace("HERE", socket.gethostname())), error
