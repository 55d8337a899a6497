"""Where the sends and receives of a schedule stand between its compute steps.

On a card a receive that waits for its sender is a running kernel, and so is a send that waits for its
receiver. Any compute step may have to wait for all of them: the allocator frees memory, a kernel is loaded,
streams share a hardware queue. So a receive must not be posted before a compute step on which its sender
depends, and both ends of all messages must stand so that no such waits form a cycle.

`with_messages` finds such places by a virtual run of the compute steps in which every step blocks its worker:
a worker goes on when its messages have been taken over by the receivers. The order of events in a run that
ends is free of cycles by construction, and each rank program is a part of that order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from yuan_train.schedule.step import (
    RECEIVE_OF,
    SEND_OF,
    Kind,
    RankProgram,
    Schedule,
    Step,
    Workers,
    one_worker_each,
    receive_of,
    send_of,
    worker_of,
)

_UNITS: dict[Kind, int] = {"forward": 2, "backward": 4, "backward_input": 2, "backward_weight": 2}
"""Durations in the virtual run."""

FAST_MESSAGE, SLOW_MESSAGE = 1, 3
"""Units of a message: over most links, and over those that a deeper warm-up is for. More than 0: the receiver
is then behind the sender, as on devices, so that receives are posted before the step that the receiver runs
when the message is sent."""


def with_messages(
    compute: Iterable[RankProgram], workers: Workers | None = None, *, message_units: int = FAST_MESSAGE
) -> Schedule:
    """Add the sends and receives that rank programs of compute steps need.

    The result runs even if every step blocks its worker until it has ended, a send and its receive at the
    same time. So it runs with any number of hardware queues, with device-wide synchronisations anywhere, and
    on a transport that buffers nothing; `schedule.check` proves it.

    A send follows its compute step. A receive is posted when the virtual run sends its message, but not
    before the compute step that uses the previous message of the same stage and direction: at most two
    buffers of them wait at a time. Where a sender must not wait for a receiver that is so far behind, it
    sends after a later compute step. `message_units` is how long a message takes in the virtual run, where a
    forward takes 2 and a backward 4.
    """
    programs = tuple(compute)
    return _VirtualRun(programs, workers or one_worker_each(len(programs)), message_units).schedule()


def post_early(
    program: RankProgram, workers: Workers, holds_up_nothing: Callable[[Step], bool]
) -> RankProgram:
    """A rank program with the receives for which `holds_up_nothing` holds moved forward, in the same order.

    On gloo a posted receive holds up neither host nor device, and messages move only when their receive is
    posted. So there each is posted before the compute step that uses the one before it, and a message does
    not wait where devices are not as even as in the virtual run.
    """
    used_at = {receive_for(step, workers): i for i, step in enumerate(program)}
    before: dict[int, list[Step]] = {}
    moved: set[Step] = set()
    previous: dict[tuple[Kind, int], int] = {}
    for i, step in enumerate(program):
        if step.kind not in SEND_OF:
            continue
        edge = step.kind, step.stage
        if previous.get(edge, i) < i and holds_up_nothing(step):
            before.setdefault(previous[edge], []).append(step)
            moved.add(step)
        previous[edge] = used_at[step]
    steps: list[Step] = []
    for i, step in enumerate(program):
        steps += before.get(i, [])
        if step not in moved:
            steps.append(step)
    return tuple(steps)


def arrivals_proven(schedule: Schedule, workers: Workers, worker: int) -> dict[Step, tuple[Step, ...]]:
    """Which sends of a worker have arrived when it takes a message, by receive, and were not proven before.

    The sender of that message had used them in an earlier compute step of its program. Activations that prove
    activations (virtual stages) are left out: gradients prove these too.
    """
    proven: dict[Step, tuple[Step, ...]] = {}
    for peer, program in enumerate(schedule):
        used: list[Step] = []
        for step in program if peer != worker else ():
            if step.kind in RECEIVE_OF:
                receive = receive_of(step)
                if worker_of(workers, receive.stage, receive.micro_batch) != worker or not used:
                    continue
                by_activation = receive.kind == "receive_activation"
                shown = [send for send in used if not (by_activation and send.kind == "send_activation")]
                if shown:
                    proven[receive] = tuple(shown)
                used = [send for send in used if send not in shown]
            elif step.is_compute and (receive := receive_for(step, workers)) is not None:
                send = send_of(receive)
                if worker_of(workers, send.stage, send.micro_batch) == worker:
                    used.append(send)
    return proven


def receive_for(step: Step, workers: Workers) -> Step | None:
    """The receive that a compute step waits for; None if its input does not come from another worker."""
    if step.kind == "forward" and _crosses(workers, step.stage - 1, step.stage, step.micro_batch):
        return Step("receive_activation", step.stage, step.micro_batch)
    backward = step.kind in ("backward", "backward_input")
    if backward and _crosses(workers, step.stage, step.stage + 1, step.micro_batch):
        return Step("receive_gradient", step.stage, step.micro_batch)
    return None


def send_after(step: Step, workers: Workers) -> Step | None:
    """The send of a compute step's result; None if no other worker needs it."""
    if step.kind == "forward" and _crosses(workers, step.stage, step.stage + 1, step.micro_batch):
        return Step("send_activation", step.stage, step.micro_batch)
    backward = step.kind in ("backward", "backward_input")
    if backward and _crosses(workers, step.stage - 1, step.stage, step.micro_batch):
        return Step("send_gradient", step.stage, step.micro_batch)
    return None


def _crosses(workers: Workers, left: int, right: int, micro_batch: int) -> bool:
    """Whether two adjacent stages have different workers for a micro-batch, so that a message is sent."""
    if left < 0 or right >= len(workers):
        return False
    # `worker_of`, inlined: a large schedule calls this a million times.
    sources, targets = workers[left], workers[right]
    return sources[micro_batch % len(sources)] != targets[micro_batch % len(targets)]


@dataclass(slots=True)
class _Message:
    """One message; positions are indices into the compute steps of the worker."""

    receive: Step
    receiver: int
    used_at: int
    """The step that waits for it."""
    post_from: int
    """The first step before which its receive may be posted."""
    send: Step | None = None
    """None until its sender is found, which a complete schedule has."""
    sender: int = -1
    made_at: int = -1
    is_sent: bool = False
    arrives_at: int = 0


class _VirtualRun:
    """The compute steps in virtual time; a worker goes on when its messages have been taken over."""

    def __init__(self, programs: tuple[RankProgram, ...], workers: Workers, message_units: int) -> None:
        self._programs, self._message_units = programs, message_units
        count = len(programs)
        self._next = [0] * count
        """The first step of each worker that has not ended."""
        self._is_running = [False] * count
        self._unsent: list[list[_Message]] = [[] for _ in range(count)]
        """Messages by sender, and the same by receiver, that have been made and not taken over."""
        self._expected: list[list[_Message]] = [[] for _ in range(count)]
        self._events: list[tuple[int, int]] = []
        """Times at which a worker may go on: its step ends, or a message arrives."""
        self._ends_at = [0] * count
        self._before: list[list[list[Step]]] = [[[] for _ in range(len(p) + 1)] for p in programs]
        """By worker and position, the messages that stand before that compute step."""
        self._inputs: list[list[_Message | None]] = []
        self._outputs: list[list[_Message | None]] = []
        self._find_messages(workers)

    def _find_messages(self, workers: Workers) -> None:
        found: dict[Step, _Message] = {}
        for worker, program in enumerate(self._programs):
            last_use: dict[tuple[Kind, int], int] = {}
            inputs: list[_Message | None] = []
            for i, step in enumerate(program):
                receive = receive_for(step, workers)
                if receive is None:
                    inputs.append(None)
                    continue
                edge = receive.kind, receive.stage
                message = _Message(receive, worker, i, last_use.get(edge, 0))
                last_use[edge] = i
                found[receive] = message
                inputs.append(message)
            self._inputs.append(inputs)
        for worker, program in enumerate(self._programs):
            outputs: list[_Message | None] = []
            for i, step in enumerate(program):
                send = send_after(step, workers)
                message = None if send is None else found.get(receive_of(send))
                if message is not None:
                    message.send, message.sender, message.made_at = send, worker, i
                elif send is not None:
                    # Nobody receives it; `check_schedule` says so.
                    self._before[worker][i + 1].append(send)
                outputs.append(message)
            self._outputs.append(outputs)

    def schedule(self) -> Schedule:
        """Run to the end, and return the rank programs with their messages."""
        for worker in range(len(self._programs)):
            self._go_on(worker, 0)
        now = 0
        # If all workers wait, the last one that only waits for a receiver takes its next step.
        last_first = range(len(self._programs))[::-1]
        while self._events or any(self._go_on(worker, now, overrun=True) for worker in last_first):
            if not self._events:
                continue
            now, worker = heapq.heappop(self._events)
            if self._is_running[worker] and self._ends_at[worker] == now:
                self._end_step(worker, now)
            self._go_on(worker, now)
        self._place_the_rest()
        return tuple(map(self._merged, range(len(self._programs))))

    def _end_step(self, worker: int, now: int) -> None:
        self._is_running[worker] = False
        made = self._outputs[worker][self._next[worker]]
        self._next[worker] += 1
        if made is not None:
            self._unsent[worker].append(made)
            self._expected[made.receiver].append(made)
            self._take_over(made.receiver, now)
        self._take_over(worker, now)

    def _take_over(self, receiver: int, now: int) -> None:
        """Start the messages to a worker whose receives may be posted by now."""
        waiting = self._expected[receiver]
        if not waiting:
            return
        left: list[_Message] = []
        for message in waiting:
            if message.post_from > self._next[receiver]:
                left.append(message)
                continue
            assert message.send is not None
            message.is_sent = True
            message.arrives_at = now + self._message_units
            self._before[message.sender][self._next[message.sender]].append(message.send)
            self._before[receiver][self._next[receiver]].append(message.receive)
            self._unsent[message.sender].remove(message)
            heapq.heappush(self._events, (message.arrives_at, receiver))
            # The sender may go on at once.
            heapq.heappush(self._events, (now, message.sender))
        self._expected[receiver] = left

    def _go_on(self, worker: int, now: int, *, overrun: bool = False) -> bool:
        """Start a worker's next step if it can start, and say so; with `overrun` although it has messages."""
        position = self._next[worker]
        program = self._programs[worker]
        if self._is_running[worker] or position == len(program) or (self._unsent[worker] and not overrun):
            return False
        needed = self._inputs[worker][position]
        if needed is not None and (not needed.is_sent or needed.arrives_at > now):
            return False
        self._is_running[worker] = True
        self._ends_at[worker] = now + _UNITS[program[position].kind]
        heapq.heappush(self._events, (self._ends_at[worker], worker))
        return True

    def _place_the_rest(self) -> None:
        """Messages of steps that wait forever: at their compute steps, for `check_schedule` to name."""
        for messages in self._inputs:
            for message in messages:
                if message is None or message.is_sent:
                    continue
                self._before[message.receiver][message.used_at].append(message.receive)
                if message.send is not None:
                    self._before[message.sender][message.made_at + 1].append(message.send)

    def _merged(self, worker: int) -> RankProgram:
        steps: list[Step] = []
        for messages, step in zip(self._before[worker], self._programs[worker], strict=False):
            steps += [*messages, step]
        return (*steps, *self._before[worker][-1])
