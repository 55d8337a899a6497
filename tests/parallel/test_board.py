"""How ranks meet, and who is named if one ends meanwhile: several boards of one process, a thread each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.spawn import free_port
from yuan_train.config.errors import LostRank, TrainingError
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


def end(board: Board) -> None:
    """As if killed."""
    board.close()


def refuse(board: Board) -> None:
    """As behind a firewall, which lets connections to others through."""
    board._listener.close()  # pyright: ignore[reportPrivateUsage]
    board.join_ring()


def test_a_rank_that_ends_before_it_is_watched_is_named_by_all() -> None:
    first, second, third = meet([Board.join_ring, end, Board.join_ring])
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
