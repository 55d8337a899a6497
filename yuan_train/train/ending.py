"""How a rank ends when something fails: it says why at once, tells the others, and ends whatever hangs.

A rank that raises prints its error before anything is torn down, which NCCL may never finish, and writes it
to the board (`parallel/board.py`). A thread of every rank looks at the board: it ends the process if its main
thread stands in an operation that waits for a rank that has failed, and no library ends that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from yuan_train.config.errors import (
    CAUSE,
    INTERRUPTED,
    CheckpointError,
    LostRank,
    NotFinite,
    YuanError,
    mark_as_said,
    say,
)
from yuan_train.config.signals import hearing
from yuan_train.parallel.board import POLL_SECONDS, Board, Fault, Meeting
from yuan_train.parallel.device import Device
from yuan_train.parallel.environment import (
    NEXT_PLAN,
    running_seconds,
    tell_launcher,
    under_launch,
    under_torchrun,
)
from yuan_train.parallel.groups import shutdown
from yuan_train.parallel.transport import is_lost_connection, without_frames
from yuan_train.train.job import Position

GRACE_SECONDS = 1.5
"""How long the main thread may take to fail by itself once the run has a fault; then its process is ended."""
TEARDOWN_SECONDS = 6.0
"""How long a rank that fails may take to tell the others and to tear down; then its process is ended."""
MEET_SECONDS, MOST_SECONDS = 5.0, 60.0
"""In which a rank that cannot start meets the others, to tell them why; and as long more as it has taken to
come this far, at most a minute, for so slow may the others be."""
RANKS_A_LOOK = 4096
"""Ranks that look at the board more rarely the more they are: it is one process that answers."""


class Ending:
    """Watches over the end of a rank; alone, without a board, it only says what has failed."""

    def __init__(
        self, board: Board | None, *, is_card: bool, leave: Callable[[int], NoReturn] = os._exit
    ) -> None:
        """`is_card`: process groups are NCCL's, so that nothing is torn down after a failure. `leave` ends
        the process without more ado."""
        self._board = board
        self._is_card = is_card
        self._leave = leave
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        """The error of the main thread, once it says it."""
        self._has_told = False
        """Whether the store has answered since."""
        self._exit_code = 1
        self._launcher = os.getppid() if under_torchrun() or under_launch() else None
        """The process whose end ends the run; another parent may be a shell, which leaves it to itself."""
        self._thread = threading.Thread(target=self._watch, name="ending", daemon=True)
        if board is not None:
            self._thread.start()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around what may fail: says an error, and tells the others, before anything is torn down.

        What ends the run may be another rank's fault: then that is raised.
        """
        try:
            yield
        except BaseException as error:
            if self._failed is not None or self._board is None:
                raise
            with _deaf_to_interrupts():
                found = self._fail(_named(error), self._board)
            if found is error:
                raise
            raise found from error

    @property
    def has_failed(self) -> bool:
        """Whether this rank ends before the others do."""
        return self._failed is not None

    def finish(self) -> None:
        """Watch no more; at the end of a run that all ranks end together, see them leave."""
        self._stop.set()
        board = self._board
        if board is not None and self._failed is None:
            self._thread.join()
            self._has_launcher_ended(board)
            why = board.why_stopped()
            board.leave()
            if why is not None:
                print(f"note: the run has stopped: {why}", file=sys.stderr)

    def tell_stop(self) -> None:
        """Tell the others that SIGTERM, or the end of its launcher, has stopped this rank: so they stop."""
        board = self._board
        if board is not None and not self._has_launcher_ended(board):
            board.tell_stop("got SIGTERM")

    def _fail(self, error: BaseException, board: Board) -> BaseException:
        """Say an error of the main thread, tell the others, and return what to raise: what ends the run.

        On a card, ends the process.
        """
        if isinstance(error, NotFinite) and len(board.members) == dist.get_world_size():
            # All ranks are here and say the same: a save that is under way may end.
            _say_own(error)
            return error
        if isinstance(error, CheckpointError) and is_lost_connection(error.__cause__ or error):
            # What it reads is whole; another rank is not there to read it with.
            error = LostRank(_text(error))
        self._failed, self._exit_code = error, _code_of(error)
        self._end_after(TEARDOWN_SECONDS)
        # A rank that has lost another one may read why, and then says that alone.
        is_lost = isinstance(error, LostRank)
        cause = board.look() if is_lost else None
        if cause is not None:
            mark_as_said(error)
        else:
            _say_own(error)
            cause = board.accuse(_text(error)) if is_lost else board.report(_text(error), self._exit_code)
        self._has_told = True
        found = error
        if cause is not None and cause.text != _text(error):
            found = _say_cause(cause)
            self._exit_code = cause.exit_code
        if cause is not None:
            board.wait_until_heard(cause)
        if self._is_card:
            self._end()
        return found

    def _watch(self) -> None:
        """Look at the board until the run ends; end the process if the main thread does not."""
        board = self._board
        assert board is not None
        seconds = POLL_SECONDS * max(1.0, len(board.members) / RANKS_A_LOOK)
        board.learn_holder()
        fault = None
        while fault is None:
            began = time.monotonic()
            if self._stop.wait(seconds):
                return
            woke = time.monotonic()
            if self._has_launcher_ended(board) and under_torchrun():
                # As `launch` has the system do for its ranks.
                os.kill(os.getpid(), signal.SIGTERM)
            board.note_pause("still", woke - began - seconds)
            fault = board.look_around()
            board.note_pause("cut", time.monotonic() - woke)
        if self._failed is None and not self._stop.wait(GRACE_SECONDS) and self._failed is None:
            _say_cause(fault)
            self._exit_code = fault.exit_code
            self._end_after(TEARDOWN_SECONDS)
            board.wait_until_heard(fault)
            self._end()

    def _has_launcher_ended(self, board: Board) -> bool:
        """Whether this rank's launcher has ended, as it never does before; once, and the others are told."""
        launcher = self._launcher
        if launcher in (None, os.getppid()):
            return False
        self._launcher = None
        board.tell_stop(f"its launcher (process {launcher}) was killed or has crashed")
        return True

    def _end_after(self, seconds: float) -> None:
        """End the process unless it has come to its end by then; from a thread that waits for nothing else.

        A store on the other side of a dead link never answers, and has no time limit.
        """

        def end() -> None:
            if not self._stop.wait(seconds):
                if self._failed is not None and not self._has_told and self._board is not None:
                    _say_own(self._failed)
                    _say_cause(self._board.unanswered())
                self._end()

        threading.Thread(target=end, name="last resort", daemon=True).start()

    def _end(self) -> NoReturn:
        """End the process as it is: what it waits for may never come. All is said by then."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._leave(self._exit_code)


class StopRequest:
    """Whether SIGTERM has asked this rank to stop, or SIGUSR1 to go on under the plan of its supervisor."""

    def __init__(self, tell: Callable[[], None] | None) -> None:
        self.is_made = False
        self.moves = False
        self._tell = tell

    def take_move(self) -> Path | None:
        """The file of the plan to go on with, if this rank was asked to since the last call."""
        moves, self.moves = self.moves, False
        return Path(os.environ[NEXT_PLAN]) if moves else None

    def heard(self) -> bool:
        """Whether it has, by now; then all ranks stop, and are told who was asked before they do."""
        if self.is_made and self._tell is not None:
            self._tell()
            self._tell = None
        return self.is_made


@contextmanager
def stop_on_sigterm(tell: Callable[[], None] | None = None) -> Iterator[StopRequest]:
    """While inside, SIGTERM only makes a request; the run stops after the current step.

    `tell` tells the other ranks; without it, nobody hears of it: others decide when to stop. So does SIGUSR1
    of a supervisor, after which the run goes on under another plan.
    """
    request = StopRequest(tell)

    def request_stop(signum: int, frame: object) -> None:
        request.is_made = True

    def request_move(signum: int, frame: object) -> None:
        request.moves = True

    moves = {signal.SIGUSR1: request_move} if NEXT_PLAN in os.environ else {}
    with hearing({signal.SIGTERM: request_stop, **moves}):
        yield request


@contextmanager
def ending_together(board: Board | None, device: Device) -> Iterator[Ending]:
    """Around all that a rank does once it is connected, with the end of its process groups.

    An error inside ends all ranks of the board. None: a process alone.
    """
    ending = Ending(board, is_card=device.library == "nccl")
    try:
        with ending.telling():
            yield ending
    except BaseException as error:
        if ending.has_failed:
            # Something else may have failed on the way here.
            _say_own(error)
            shutdown()
        raise
    finally:
        ending.finish()
        shutdown()


def fail_together(error: Exception | KeyboardInterrupt, position: Position) -> NoReturn:
    """Say what this rank has found wrong by itself, tell the others, who are on their way, and raise it.

    It is said before the others are met, which may never come, once on each machine: another rank of it says
    nothing if it has found the same. Whoever comes within a few seconds hears of it.
    """
    if position.world_size > 1:
        # An interrupt is not found by the other ranks of the machine: each of them tells its own.
        speaks = position.local_rank == 0 or isinstance(error, KeyboardInterrupt)
        if speaks:
            _say_own(error)
        # The first of a machine has told the others by then.
        seconds = MEET_SECONDS + min(running_seconds(), MOST_SECONDS)
        told = _tell(error, seconds if speaks else seconds + POLL_SECONDS)
        if told is not None and told.text == _text(error):
            mark_as_said(error)
    raise error


@contextmanager
def telling_interrupts(position: Position) -> Iterator[None]:
    """Around the work of a rank: a Ctrl-C before the ranks have met is told to the others, who wait for it.

    From then on `Ending` tells it.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if getattr(error, "is_said", False):
            raise
        fail_together(error, position)


def tell_for_node(meeting: Meeting, fault: Fault, seconds: float) -> bool:
    """Tell a fault to the ranks that meet, for the launcher of a node whose ranks cannot. Whether it could.

    As one who holds the store where the meeting's rank is the first: whoever comes within `seconds` hears. If
    another one was told first, says that.
    """
    told = _write(meeting, fault, seconds)
    if told is not None and told.text != fault.text:
        _say_cause(told)
    return told is not None


def _tell(error: BaseException, seconds: float) -> Fault | None:
    """Write an error to the board, if it is there within some seconds. Returns the first that was written."""
    try:
        meeting = Meeting.of_launcher()
    except YuanError:
        return None
    tell_launcher(meeting.rank, "tells")
    return _write(meeting, Fault(meeting.rank, "", _text(error), _code_of(error)), seconds)


def _write(meeting: Meeting, fault: Fault, seconds: float) -> Fault | None:
    """Write a fault to the board, and wait until it is heard, at most `seconds` in all; what is written.

    None if nobody is there. A fault of nowhere is that of the meeting's rank. One that has been told another
    fault leaves the waiting to who has, unless the store ends with it.
    """
    end = time.monotonic() + seconds
    try:
        board = Board(meeting, "", seconds=seconds)
        fault = replace(fault, where=fault.where or board.name(meeting.rank))
        told = board.report(fault.text, fault.exit_code, where=fault.where, silent=fault.silent)
    except (YuanError, RuntimeError):
        return None
    if told is not None and (told == fault or meeting.rank == 0 or meeting.is_agents):
        board.wait_until_heard(told, max(end - time.monotonic(), POLL_SECONDS))
    return told


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Around the telling of an error: the rank ends anyway, and a second Ctrl-C must not cut it short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with hearing({signal.SIGINT: signal.SIG_IGN}):
        yield


def _say_own(error: BaseException) -> None:
    """Print an error of this rank, unless it was said before."""
    if isinstance(error, KeyboardInterrupt):
        if not getattr(error, "is_said", False):
            print(_text(error), file=sys.stderr)
        mark_as_said(error)
    else:
        say(error)


def _say_cause(fault: Fault) -> YuanError:
    """Print what ends the run, and return it as an error that is said."""
    for line in str(fault).splitlines():
        print(f"error: {CAUSE}{line}", file=sys.stderr)
    error = fault.as_error()
    mark_as_said(error)
    return error


def _named(error: BaseException) -> BaseException:
    """An error; a lost connection, wherever torch found it, without the frames of C++."""
    if isinstance(error, YuanError) or not is_lost_connection(error):
        return error
    lost = LostRank(f"another rank is gone or stuck ({without_frames(error)})")
    lost.__cause__ = error
    return lost


def _code_of(error: BaseException) -> int:
    if isinstance(error, YuanError):
        return error.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def _text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    if isinstance(error, YuanError):
        return str(error)
    return f"{type(error).__name__}: {error}"
