"""How a rank ends when something fails: it says why at once, tells the others, and ends whatever hangs.

A rank that raises prints its error before anything is torn down, which NCCL may never finish, and writes it
to the board (`parallel/board.py`). A thread of every rank looks at the board: it ends the process if its main
thread stands in an operation that waits for a rank that has failed, and no library ends that.

On NCCL nothing raises an error when a rank is lost: the host runs ahead, and then stands in a synchronisation
until NCCL's watchdog ends the process. So another thread (`Watch`) looks, from time to time, at what the card
has not finished; without a card, at what the host is in. It says which rank waits in which step for whom, and
for how long, while it waits. A rank that runs out of memory says what of (`explaining_memory`).
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from yuan_train.config.errors import (
    CAUSE,
    INTERRUPTED,
    CheckpointError,
    LostRank,
    NotFinite,
    TrainingError,
    YuanError,
    hearing,
    mark_as_said,
    say,
)
from yuan_train.config.plan import MemoryForecast, Plan, StagePlan
from yuan_train.config.units import show_bytes
from yuan_train.parallel.activity import Activity, activity_of, observed_by
from yuan_train.parallel.board import POLL_SECONDS, Board, Fault, Meeting
from yuan_train.parallel.device import CardMemory, Device, Mark
from yuan_train.parallel.environment import (
    NEXT_PLAN,
    running_seconds,
    tell_launcher,
    under_launch,
    under_torchrun,
)
from yuan_train.parallel.grid import Grid, RankCoord
from yuan_train.parallel.groups import shutdown
from yuan_train.parallel.transport import is_lost_connection, without_frames
from yuan_train.schedule.step import Step
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
        self._board, self._is_card, self._leave = board, is_card, leave
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

    def hear_stop(self) -> bool:
        """Whether a rank has told that it is to stop."""
        return self._board is not None and self._board.why_stopped() is not None

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

    def __init__(self, tell: Callable[[], None] | None, hear: Callable[[], bool]) -> None:
        self.is_made = False
        self.moves = False
        self._tell, self._hear = tell, hear

    def take_move(self) -> Path | None:
        """The file of the plan to go on with, if this rank was asked to since the last call."""
        moves, self.moves = self.moves, False
        return Path(os.environ[NEXT_PLAN]) if moves else None

    def heard(self) -> bool:
        """Whether it has, by now; then all ranks stop, and are told who was asked before they do."""
        if self.is_made and self._tell is not None:
            self._tell()
            self._tell = None
        return self.is_made or self._hear()


@contextmanager
def stop_on_sigterm(
    tell: Callable[[], None] | None = None, hear: Callable[[], bool] = lambda: False
) -> Iterator[StopRequest]:
    """While inside, SIGTERM only makes a request; the run stops after the current step.

    `tell` tells the other ranks; `hear` says whether one that takes no part in the steps was asked. So does
    SIGUSR1 of a supervisor, after which the run goes on under another plan.
    """
    request = StopRequest(tell, hear)

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


logger = logging.getLogger(__name__)

FIRST_NOTICE_SECONDS = 60.0
"""Wait before the first notice, unless a quarter of `train.timeout` is less; each further one doubles it."""
LAST_NOTICE = 0.9
"""Share of `train.timeout` after which the last notice comes, on a card: a little before the watchdog."""
WATCH_SECONDS = 1.0
MANY_RANKS = 8
"""More than these are counted, not named."""


class Watch:
    """Observes a rank's activities, and says, when `check` is called, which one lasts too long.

    On a card, that is the first that the host has enqueued and the card has not finished.
    """

    def __init__(
        self,
        grid: Grid,
        coord: RankCoord,
        *,
        timeout_seconds: float,
        say: Callable[[str], None],
        advice: Callable[[], str],
        mark: Callable[[], Mark] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`mark` enqueues a mark; None without a card. `advice` ends the last notice, on a card."""
        self._grid, self._coord, self._say = grid, coord, say
        self._advice, self._mark, self._now = advice, mark, now
        first = min(FIRST_NOTICE_SECONDS, timeout_seconds / 4)
        self._notices = [first * 2**i for i in range(32) if first * 2**i < timeout_seconds * LAST_NOTICE]
        self._last_notice = timeout_seconds * LAST_NOTICE
        self._open: list[tuple[Activity, float]] = []
        self._enqueued: deque[tuple[Activity, Mark]] = deque()
        self._training_step = 0
        self._current: object = None
        """What was current at the last check, since `_since`, with `_said` notices."""
        self._since = 0.0
        self._said = 0

    @property
    def poll_seconds(self) -> float:
        """How often to check."""
        return min(WATCH_SECONDS, (*self._notices, self._last_notice)[0] / 4)

    def begin(self, activity: Activity) -> None:
        if activity.kind == "training_step":
            self._training_step = activity.number
        self._open.append((activity, self._now()))

    def end(self, activity: Activity) -> None:
        self._open.pop()
        # The group's broadcast after a message stands behind the message itself, which the wait names.
        in_wait = any(outer.kind == "wait" for outer, _ in self._open)
        if self._mark is not None and activity.kind not in ("training_step", "idle") and not in_wait:
            self._enqueued.append((activity, self._mark()))

    def stop_marking(self) -> None:
        """Enqueue no more marks: nobody will look at them."""
        self._mark = None

    def check(self) -> None:
        """Say what lasts longer than the next notice is due; called from another thread."""
        found = self._find()
        if found is None:
            self._current = None
            return
        key, activity, since = found
        if key is not self._current:
            self._current, self._since, self._said = key, since, 0
        waited = self._now() - self._since
        due = sum(waited >= notice for notice in self._notices)
        # Who waits for the work of others has no timeout.
        is_last = self._mark is not None and activity.kind != "idle" and waited >= self._last_notice
        if is_last and self._said <= len(self._notices):
            self._said = len(self._notices) + 1
            self._say(f"{self._text(activity, waited)}; {self._advice()}")
        elif due > self._said:
            self._said = due
            self._say(self._text(activity, waited))

    def _find(self) -> tuple[object, Activity, float] | None:
        """The current activity, what tells it from any other, and since when it is known to be current."""
        while self._enqueued and self._enqueued[0][1].query():
            self._enqueued.popleft()
        if self._enqueued:
            first = self._enqueued[0]
            return first, first[0], self._now()
        innermost = self._open[-1:]
        if not innermost or innermost[0][0].kind == "training_step":
            return None
        return innermost[0], *innermost[0]

    def _text(self, activity: Activity, waited: float) -> str:
        return f"step {self._training_step}: {self._coord} has {self._predicate(activity, f'{waited:.0f} s')}"

    def _predicate(self, activity: Activity, seconds: str) -> str:
        """`waited 62 s in the backward of micro-batch 4 for rank 5's gradient`."""
        step, ranks = activity.step, activity.ranks
        if activity.kind == "wait":
            assert step is not None
            what = "forward" if step.kind == "receive_activation" else "backward"
            # Only a rank of several stages has to say which.
            stage = f" on stage {step.stage}" if len(self._coord.stages) > 1 else ""
            where = f"the {what} of micro-batch {step.micro_batch}{stage}"
            return f"waited {seconds} in {where} for {self._message(step)}"
        if activity.kind in ("collective", "idle"):
            return f"waited {seconds} in {activity.what} for {self._others(ranks)}"
        if activity.kind == "drain":
            return f"waited {seconds} until its last messages are received"
        group = self._grid.replica(self._coord)
        shared = f", with {self._others(group)}" if activity.kind == "compute" and len(group) > 1 else ""
        return f"been {seconds} in {activity}{shared}"

    def _message(self, step: Step) -> str:
        """`rank 5's gradient`."""
        peer_stage = step.stage + (-1 if step.kind == "receive_activation" else 1)
        peer = self._grid.peer(self._coord, peer_stage, step.micro_batch)
        message = f"rank {peer}'s {step.kind.removeprefix('receive_')}"
        leader = self._grid.replica(self._coord)[0]
        if leader == self._coord.rank:
            return message
        return f"rank {leader}, which receives {message} for the tensor-parallel group"

    def _others(self, ranks: tuple[int, ...]) -> str:
        others = [rank for rank in ranks if rank != self._coord.rank]
        if len(others) == 1:
            return f"rank {others[0]}"
        if len(others) > MANY_RANKS:
            return f"{len(others)} other ranks"
        return f"ranks {', '.join(map(str, others))}"


@contextmanager
def watching(
    grid: Grid, coord: RankCoord, device: Device, *, timeout_seconds: float, last_good: Callable[[], str]
) -> Iterator[None]:
    """Watch what this thread does inside, from a thread of its own; nothing if there is a single rank.

    `last_good` says which checkpoint is the last good one.
    """
    if len(grid.coords) == 1:
        yield
        return

    def advice() -> str:
        return (
            f"NCCL is about to end this rank (train.timeout, {timeout_seconds:g} s); {last_good()}. Torch's "
            "flight recorder then writes the rank's last operations to the file that TORCH_FR_DUMP_TEMP_FILE "
            "names. Follow who waits for whom: the rank that waits for none is the one to look at"
        )

    watch = Watch(
        grid,
        coord,
        timeout_seconds=timeout_seconds,
        say=logger.warning,
        advice=advice,
        mark=device.mark if device.is_card else None,
    )
    stop = threading.Event()
    thread = threading.Thread(target=_check_until, args=(watch, stop, device), name="watch", daemon=True)
    thread.start()
    try:
        with observed_by(watch):
            yield
    finally:
        stop.set()
        thread.join()


def _check_until(watch: Watch, stop: threading.Event, device: Device) -> None:
    device.use()
    while not stop.wait(watch.poll_seconds):
        try:
            watch.check()
        except RuntimeError:
            # The card itself has failed, which the main thread reports.
            watch.stop_marking()
            return


_WORDS = re.compile(r"out of memory|allocate memory", re.IGNORECASE)
"""What says so in errors without a class of their own: of torch's allocator on the CPU, and of NCCL."""
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_IN_PIECES = "expandable_segments:True"
MAX_FOREIGN = 256 << 20
"""Bytes beyond a card's `reserved` that others than the allocator may hold without a word."""


@contextmanager
def explaining_memory(plan: Plan, rank: int, device: Device) -> Iterator[None]:
    """Raise out of memory as a TrainingError that says what to do. A rank's plan is that of its role."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not _WORDS.search(str(error)):
            raise
        raise TrainingError(
            _explain(error, plan, Grid(plan).coords[rank], device.memory(), device.largest_free_block())
        ) from error


def _explain(
    error: BaseException, plan: Plan, coord: RankCoord, memory: CardMemory | None, block: int
) -> str:
    """`memory` and the largest free `block` are the card's, if there is one."""
    where = activity_of(error)
    card = plan.ranks[coord.rank]
    # What else the driver says is below, and its advice is for those who have no plan.
    reason = str(error).partition("\n")[0].partition(" GPU ")[0].strip()[:300]
    place = card.device if card.type == "unknown" else f"{card.type} {card.device}"
    lines = [f"{coord}, {place}: out of memory in {where or 'a step'} ({reason or type(error).__name__})"]
    forecast = _forecast_of(plan, coord)
    lines.append("forecast: " + (_parts(forecast) if forecast is not None else "none in this plan"))
    if memory is not None:
        lines.append(_taken(memory, block))
    lines.append(f"what would help: {'; '.join(_remedies(plan, coord, forecast, memory, block))}")
    return "\n".join(lines)


def _forecast_of(plan: Plan, coord: RankCoord) -> MemoryForecast | None:
    """What the plan has for the rank's card; of several virtual stages that with the most."""
    stages = plan.forecast.stages if plan.forecast is not None else ()
    own = [s.memory for s in stages if s.pipeline == coord.pipeline and s.stage in coord.stages]
    return max(own, key=lambda memory: memory.total, default=None)


def _parts(forecast: MemoryForecast) -> str:
    """`21.3 GiB: parameters 3.1 GiB, ...`."""
    parts = ", ".join(f"{name} {show_bytes(value)}" for name, value in forecast.categories.items() if value)
    return f"{show_bytes(forecast.total)}: {parts}"


def _taken(memory: CardMemory, block: int) -> str:
    return (
        f"taken: allocated {show_bytes(memory.allocated)} (most {show_bytes(memory.most_allocated)}), "
        f"reserved {show_bytes(memory.reserved)}, {show_bytes(memory.foreign)} outside of torch, free "
        f"{show_bytes(memory.free)} of {show_bytes(memory.total)}; largest free block {show_bytes(block)}"
    )


def _remedies(
    plan: Plan, coord: RankCoord, forecast: MemoryForecast | None, memory: CardMemory | None, block: int
) -> list[str]:
    """What to change, the likeliest first; keys of the run file, with which to plan again."""
    found: list[str] = []
    expected = 0.0 if forecast is None else forecast.reserved
    if memory is not None and memory.foreign > expected + MAX_FOREIGN:
        found.append(
            f"others hold {show_bytes(memory.foreign)} of the card, {show_bytes(expected)} were expected: "
            "end other processes there (nvidia-smi), or raise `reserved` of its type in the cluster file"
        )
    unused = 0 if memory is None else memory.reserved - memory.allocated
    if (
        unused > MAX_FOREIGN
        and block < unused / 2
        and not any(_IN_PIECES in os.environ.get(name, "") for name in _ALLOCATOR)
    ):
        found.append(f"{_ALLOCATOR[0]}={_IN_PIECES}, for what is free is in pieces")
    pipeline = plan.pipelines[coord.pipeline]
    stages = [pipeline.stages[stage] for stage in coord.stages]
    if plan.forecast is not None:
        found.append("plan again with a smaller search.memory_fraction")
    if pipeline.micro_batch_size > 1:
        key = "micro_batch_size" if plan.world_size > 1 else "train.micro_batch_size"
        found.append(f"{key} below {pipeline.micro_batch_size}")
    found += _of_stages(stages, is_card=memory is not None)
    found.append("a shorter data.sequence_length")
    return found


def _of_stages(stages: list[StagePlan], *, is_card: bool) -> list[str]:
    """What the stages do not use yet."""
    found: list[str] = []
    if any(stage.num_recomputed < stage.num_blocks for stage in stages):
        found.append("recompute: full of more layers (search.recompute)")
    if is_card and any(stage.optimizer_offload < 1 for stage in stages):
        found.append("more optimizer_offload (search.offload: [optimizer])")
    if is_card and not any(stage.activation_offload for stage in stages):
        found.append("activation_offload (search.offload: [activations])")
    return found
