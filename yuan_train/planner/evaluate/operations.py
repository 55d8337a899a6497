"""The operations of a simulation in an order in which each follows what it waits for.

All durations are known beforehand, so this order depends on the schedule and on the kind of sends alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from yuan_train.planner.native.pipelines import Operation
from yuan_train.schedule.step import (
    COMPUTE,
    RankProgram,
    Schedule,
    Step,
    Workers,
    one_worker_each,
    worker_of,
)

Message = tuple[bool, int, int]
"""Whether it is an activation (else a gradient), the stage that receives it, the micro-batch."""


def order_operations(schedule: Schedule, workers: Workers | None = None) -> tuple[Operation, ...]:
    """The schedule's compute and sends, in an order in which each follows what it waits for."""
    workers = workers or one_worker_each(len(schedule))
    operations: list[Operation] = []
    position = [0] * len(schedule)
    sent: set[tuple[bool, int, int]] = set()
    awaited: set[tuple[bool, int, int]] = set()
    ready = list(range(len(schedule)))
    while ready:
        worker = ready.pop()
        steps = schedule[worker]
        while position[worker] < len(steps):
            step = steps[position[worker]]
            kind, stage, micro_batch = step.kind, step.stage, step.micro_batch
            if kind == "receive_activation" or kind == "receive_gradient":
                awaited.add((kind == "receive_activation", stage, micro_batch))
            elif kind in COMPUTE:
                key = (kind == "forward", stage, micro_batch)
                # The weight-gradient part of a backward waits for no message: the input part received it.
                waits = kind != "backward_weight" and key in awaited
                if waits and key not in sent:
                    break
                operations.append(Operation(kind, stage, micro_batch, worker, -1, waits))
            else:
                is_activation = kind == "send_activation"
                target = stage + 1 if is_activation else stage - 1
                peer = worker_of(workers, target, micro_batch)
                operations.append(Operation(kind, stage, micro_batch, worker, peer, False))
                sent.add((is_activation, target, micro_batch))
                if peer not in ready:
                    ready.append(peer)
            position[worker] += 1
    assert all(p == len(steps) for p, steps in zip(position, schedule, strict=True)), "deadlock"
    return tuple(operations)


def order_rendezvous(schedule: Schedule, workers: Workers | None = None) -> tuple[Operation, ...]:
    """The same where sender and receiver hand a message over together.

    Between two compute steps a worker has its sends, at the schedule's places, and the one message that the
    next step needs; it hands them over in any order, each when the other worker is there too. If all workers
    wait for one that is not there, the first of them leaves its message behind: `waits` is False.
    """
    return tuple(_Meetings(schedule, workers or one_worker_each(len(schedule))).operations())


class _Meetings:
    """The workers of a schedule, each at some place between two of its compute steps."""

    def __init__(self, schedule: Schedule, workers: Workers) -> None:
        self.workers = workers
        self.stops = [_stops(program) for program in schedule]
        self.place = [-1] * len(schedule)
        self.open = [0] * len(schedule)
        """Messages of each worker that are still to be handed over at its place."""
        self.sends: dict[Message, tuple[Step, int]] = {}
        """Those to be sent: the step, and its worker."""
        self.needs: dict[Message, int] = {}
        """Those that a worker is there to receive."""
        self.left_behind: set[Message] = set()
        self.ready: deque[Message] = deque()

    def operations(self) -> Iterator[Operation]:
        for worker in range(len(self.stops)):
            yield from self._go_on(worker)
        while self.sends:
            if not self.ready:
                message, (step, worker) = next(iter(self.sends.items()))
                self.left_behind.add(message)
                yield from self._send(message, step, worker, meets=False)
                continue
            message = self.ready.popleft()
            step, worker = self.sends[message]
            receiver = self.needs.pop(message)
            yield from self._send(message, step, worker, meets=True)
            self.open[receiver] -= 1
            yield from self._go_on(receiver)
        assert all(p == len(stops) for p, stops in zip(self.place, self.stops, strict=True)), "deadlock"

    def _send(self, message: Message, step: Step, worker: int, *, meets: bool) -> Iterator[Operation]:
        del self.sends[message]
        peer = worker_of(self.workers, message[1], message[2])
        yield Operation(step.kind, step.stage, step.micro_batch, worker, peer, meets)
        self.open[worker] -= 1
        yield from self._go_on(worker)

    def _go_on(self, worker: int) -> Iterator[Operation]:
        """Run compute steps of a worker until it has messages to hand over."""
        stops = self.stops[worker]
        while not self.open[worker] and self.place[worker] < len(stops):
            if self.place[worker] >= 0 and (step := stops[self.place[worker]].compute) is not None:
                needed = stops[self.place[worker]].needs is not None
                yield Operation(step.kind, step.stage, step.micro_batch, worker, -1, needed)
            self.place[worker] += 1
            if self.place[worker] < len(stops):
                self._arrive(worker, stops[self.place[worker]])

    def _arrive(self, worker: int, stop: _Stop) -> None:
        for message, step in stop.sends:
            self.sends[message] = step, worker
            self.open[worker] += 1
            if message in self.needs:
                self.ready.append(message)
        if stop.needs is not None and stop.needs not in self.left_behind:
            self.needs[stop.needs] = worker
            self.open[worker] += 1
            if stop.needs in self.sends:
                self.ready.append(stop.needs)


class _Stop(NamedTuple):
    """A place between two compute steps."""

    sends: list[tuple[Message, Step]]
    needs: Message | None
    """What the next compute step waits for."""
    compute: Step | None
    """None at the end of the program."""


def _stops(program: RankProgram) -> list[_Stop]:
    stops: list[_Stop] = []
    sends: list[tuple[Message, Step]] = []
    received: set[Message] = set()
    for step in program:
        if step.kind == "receive_activation" or step.kind == "receive_gradient":
            received.add((step.kind == "receive_activation", step.stage, step.micro_batch))
        elif step.kind in COMPUTE:
            key = (step.kind == "forward", step.stage, step.micro_batch)
            waits = step.kind != "backward_weight" and key in received
            stops.append(_Stop(sends, key if waits else None, step))
            sends = []
        else:
            sends.append((_message_of(step), step))
    return [*stops, _Stop(sends, None, None)]


def _message_of(step: Step) -> Message:
    """What a sending step sends."""
    is_activation = step.kind == "send_activation"
    return is_activation, step.stage + 1 if is_activation else step.stage - 1, step.micro_batch
