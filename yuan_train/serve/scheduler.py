"""Gives what is asked to the pipelines of a plan, as slots become free, and hands back what they write.

Requests come from the thread of the web server; each pipeline has a thread of its own that asks it for round
after round, and waits where there is nothing to do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from yuan_train.config.errors import TrainingError, YuanError
from yuan_train.rl.generator import Token
from yuan_train.serve.ranks import Ask, Asked, Order, WeightsRefused

POLL_SECONDS = 0.1
"""How often a pipeline without work looks whether the server is to stop."""

Deliver = Callable[[Sequence[Token] | Exception], None]
"""Takes the tokens of a round that are one request's, or why there will be no more; from any thread."""


class QueueFull(YuanError):
    """No slot is free, and as many answers wait as may."""


class Stopped(YuanError):
    """The server ends, and answers nothing any more."""


@dataclass
class _Request:
    """A ticket that waits, or is under way."""

    asked: Asked
    deliver: Deliver
    left: int
    """Answers that have not ended."""
    lane: int | None = None
    """The pipeline that has it; None while it waits."""


@dataclass
class _Pipeline:
    """What the scheduler knows of a pipeline."""

    slots: int
    taken: int = 0
    """Answers that it was given and has not ended: more than its slots only if one prompt's are."""
    leaving: list[int | str] = field(default_factory=list[int | str])

    @property
    def filled(self) -> float:
        return self.taken / self.slots


@dataclass
class _Change:
    """Weights that the pipelines are to take, and how far they are: all read them before one uses them."""

    folder: str
    read: set[int] = field(default_factory=set[int])
    """Pipelines that have, or cannot."""
    done: set[int] = field(default_factory=set[int])
    """Those that have taken, or dropped, what they read."""
    faults: list[str] = field(default_factory=list[str])


class Scheduler:
    """The queue of a server, and what each pipeline has of it; all methods may be called by any thread."""

    def __init__(self, slots: Sequence[int], *, queue: int) -> None:
        """`slots` of each pipeline; `queue`: answers that may wait."""
        self._lanes = [_Pipeline(count) for count in slots]
        self._room = sum(slots) + queue
        self._waiting: deque[_Request] = deque()
        self._held: dict[int | str, _Request] = {}
        """By number: those that wait and those under way."""
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._change: _Change | None = None

    @property
    def most(self) -> int:
        """Answers that may be asked for at once, at most."""
        return self._room

    def load(self) -> dict[str, int]:
        """How many slots there are, how many answers are written, and how many wait for a slot."""
        with self._changed:
            return {
                "slots": sum(lane.slots for lane in self._lanes),
                "running": sum(lane.taken for lane in self._lanes),
                "waiting": sum(request.left for request in self._waiting),
            }

    @property
    def failure(self) -> Exception | None:
        """Why nothing is answered any more; None while something is."""
        return self._failure

    def submit(self, asked: Sequence[Asked], deliver: Deliver) -> None:
        """Have tickets answered: all of them, or none. Raises QueueFull, or Stopped after an end."""
        wanted = sum(one.count for one in asked)
        with self._changed:
            if self._failure is not None:
                raise Stopped(f"the server has stopped: {self._failure}")
            held = sum(request.left for request in self._held.values())
            if held + wanted > self._room:
                raise QueueFull(
                    f"{held} answers are written or wait, of at most {self._room}; {wanted} more were asked "
                    "for: try again later"
                )
            for one in asked:
                request = _Request(one, deliver, one.count)
                self._held[one.number] = request
                self._waiting.append(request)
            self._changed.notify_all()

    def change_weights(self, folder: str) -> None:
        """Have all pipelines use the weights of a folder; waits until they do.

        A pipeline first finishes the answers that it has; those that wait are begun with the new weights. So
        each answer is of one version. Raises WeightsRefused, and then none has changed; Stopped after an end.
        """
        with self._changed:
            while self._change is not None and self._failure is None:
                self._changed.wait(POLL_SECONDS)
            own = _Change(folder)
            if self._failure is None:
                self._change = own
                self._changed.notify_all()
            while len(own.done) < len(self._lanes):
                if self._failure is not None:
                    raise Stopped(f"the server has stopped: {self._failure}")
                self._changed.wait(POLL_SECONDS)
            self._change = None
            self._changed.notify_all()
        if own.faults:
            raise WeightsRefused("; ".join(dict.fromkeys(own.faults)))

    def cancel(self, numbers: Sequence[int | str]) -> None:
        """Give up tickets that nobody waits for any more; those that have ended are none."""
        with self._changed:
            for number in numbers:
                request = self._held.pop(number, None)
                if request is None:
                    continue
                if request.lane is None:
                    self._waiting.remove(request)
                else:
                    self._lanes[request.lane].leaving.append(number)
                    self._lanes[request.lane].taken -= request.left
            self._changed.notify_all()

    def run(self, asks: Sequence[Ask], home: int, stop_requested: Sequence[bool]) -> None:
        """Keep all pipelines at work until element 0 of `stop_requested`; that of number `home` here.

        Then nothing is answered any more, and all ranks are told to stop. Raises TrainingError if a rank of
        a pipeline is lost.
        """
        threads = [
            threading.Thread(target=self._guarded, args=(ask, number), name=f"pipeline {number}", daemon=True)
            for number, ask in enumerate(asks)
            if number != home
        ]
        for thread in threads:
            thread.start()
        try:
            self._serve(asks[home], home, lambda: stop_requested[0])
        except Exception as error:
            self.stop(error)
            raise
        self.stop(Stopped("the server was told to stop"))
        for thread in threads:
            thread.join()
        asks[home](Order(stop=True))
        if isinstance(self._failure, TrainingError):
            raise self._failure

    def stop(self, why: Exception) -> None:
        """Answer nothing any more; the first reason counts, and is told to all who wait."""
        with self._changed:
            self._failure = self._failure or why
            requests = list(self._held.values())
            self._held.clear()
            self._waiting.clear()
            self._changed.notify_all()
        for deliver in dict.fromkeys(request.deliver for request in requests):
            deliver(self._failure)

    def _guarded(self, ask: Ask, number: int) -> None:
        """The thread of another pipeline than this rank's own."""
        try:
            self._serve(ask, number, lambda: False)
            if isinstance(self._failure, Stopped):
                ask(Order(stop=True))
        except Exception as error:
            self.stop(error if isinstance(error, TrainingError) else TrainingError(str(error)))

    def _serve(self, ask: Ask, number: int, is_stopped: Callable[[], bool]) -> None:
        """Ask a pipeline for round after round, until the server stops."""
        while (order := self._next_order(number, is_stopped)) is not None:
            if order.read is None and order.take is None:
                self._hand_out(number, ask(order))
                continue
            change, faults = self._change, list[str]()
            assert change is not None
            try:
                ask(order)
            except WeightsRefused as error:
                faults.append(str(error))
            with self._changed:
                change.faults += faults
                (change.done if order.read is None else change.read).add(number)
                self._changed.notify_all()

    def _next_order(self, number: int, is_stopped: Callable[[], bool]) -> Order | None:
        """What a pipeline does next, once there is something; None at the end."""
        lane = self._lanes[number]
        with self._changed:
            while True:
                if self._failure is not None or is_stopped():
                    return None
                change = self._change
                if change is not None and not lane.taken and not lane.leaving:
                    if number not in change.read:
                        return Order(read=change.folder)
                    if len(change.read) == len(self._lanes) and number not in change.done:
                        return Order(take=not change.faults)
                join = self._take(number) if change is None else []
                if join or lane.taken or lane.leaving:
                    leave, lane.leaving = tuple(lane.leaving), []
                    return Order(tuple(join), leave)
                self._changed.wait(POLL_SECONDS)

    def _take(self, number: int) -> list[Asked]:
        """Those that wait, in their order, as far as slots of this pipeline are free.

        While another one is emptier, that takes them.
        """
        lane, found = self._lanes[number], list[Asked]()
        while self._waiting and lane.taken < lane.slots:
            if min(other.filled for other in self._lanes) < lane.filled:
                break
            request = self._waiting.popleft()
            request.lane = number
            lane.taken += request.left
            found.append(request.asked)
        return found

    def _hand_out(self, number: int, tokens: Sequence[Token]) -> None:
        """Give each request its tokens, and free the slots of answers that have ended."""
        told: dict[Deliver, list[Token]] = {}
        with self._changed:
            for token in tokens:
                request = self._held.get(token.ticket)
                if request is None:
                    continue
                told.setdefault(request.deliver, []).append(token)
                if token.sample is not None:
                    request.left -= 1
                    self._lanes[number].taken -= 1
                    if not request.left:
                        del self._held[token.ticket]
        for deliver, own in told.items():
            deliver(own)
