"""Says which rank waits in which step for whom, and for how long, while it waits.

On NCCL nothing raises an error when a rank is lost: the host runs ahead, and then stands in a synchronisation
until NCCL's watchdog ends the process. So a thread of the host looks, from time to time, at what the card has
not finished; without a card, at what the host is in. It stands alone because it is a thread beside the loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from yuan_train.parallel.activity import Activity, observed_by
from yuan_train.parallel.device import Device, Mark
from yuan_train.parallel.grid import Grid, RankCoord
from yuan_train.schedule.step import Step

logger = logging.getLogger(__name__)

FIRST_NOTICE_SECONDS = 60.0
"""Wait before the first notice, unless a quarter of `train.timeout` is less; each further one doubles it."""
LAST_NOTICE = 0.9
"""Share of `train.timeout` after which the last notice comes, on a card: a little before the watchdog."""
POLL_SECONDS = 1.0
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
        self._grid = grid
        self._coord = coord
        self._say = say
        self._advice = advice
        self._mark = mark
        self._now = now
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
        return min(POLL_SECONDS, (*self._notices, self._last_notice)[0] / 4)

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
            where = f"the {what} of micro-batch {step.micro_batch}{self._on_stage(step)}"
            return f"waited {seconds} in {where} for {self._message(step)}"
        if activity.kind in ("collective", "idle"):
            return f"waited {seconds} in {activity.what} for {self._others(ranks)}"
        if activity.kind == "drain":
            return f"waited {seconds} until its last messages are received"
        group = self._grid.replica(self._coord)
        shared = f", with {self._others(group)}" if activity.kind == "compute" and len(group) > 1 else ""
        return f"been {seconds} in {activity}{shared}"

    def _on_stage(self, step: Step) -> str:
        """Only a rank of several stages has to say which."""
        return f" on stage {step.stage}" if len(self._coord.stages) > 1 else ""

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
    grid: Grid,
    coord: RankCoord,
    device: Device,
    *,
    timeout_seconds: float,
    last_good: Callable[[], str],
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
