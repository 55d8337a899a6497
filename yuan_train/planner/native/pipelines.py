"""Schedules and pipelines in the compiled core: to the bit what `schedule/` and the simulator define."""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_double, c_int, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

from yuan_train.config.run import ScheduleName
from yuan_train.planner.native.library import load_library, pointer_to, structure, with_types
from yuan_train.schedule.step import Kind, Workers, num_workers

_COMPUTE: tuple[Kind, ...] = ("forward", "backward", "backward_input", "backward_weight")
KINDS: tuple[Kind, ...] = (*_COMPUTE, "send_activation", "send_gradient")
"""Of `enum kind`."""
NAMES: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")
"""Of `enum schedule_name`."""

ROUNDS_KEPT = 4
"""Messages of so many times as many rounds as the first stage is deep are kept: more than a pipeline that
drains sends."""

Sent = tuple[float, float, int, int]
"""A message: start and end, in seconds from the step's start, and the workers of sender and receiver."""


_Layout, _, _Schedule, _Times, _Message, _Figures = map(
    structure, ("layout", "operation", "schedule", "times", "message", "figures")
)


@functools.cache
def _core() -> ctypes.CDLL:
    schedule = pointer_to(_Schedule)
    return with_types(
        load_library(),
        ("make_schedule", schedule, [POINTER(_Layout), c_int]),
        ("free_schedule", None, [schedule]),
        ("run_schedule", c_int, [schedule, POINTER(_Times), c_int, POINTER(_Figures)]),
        ("run_rounds", c_int, [c_int32, c_int32, POINTER(c_int32), POINTER(_Times), POINTER(_Figures)]),
    )


def _integers(values: Sequence[int]) -> ctypes.Array[c_int32]:
    return (c_int32 * max(len(values), 1))(*values)


def _doubles(values: Sequence[float]) -> ctypes.Array[c_double]:
    return (c_double * max(len(values), 1))(*values)


class Operation(NamedTuple):
    """A step of the simulation: compute, or the sending of a message."""

    kind: Kind
    stage: int
    micro_batch: int
    worker: int
    peer: int
    """The worker that receives the message; -1 for compute."""
    waits: bool
    """Whether a compute step waits for a message, or a message for its receiver."""


class NativeSchedule:
    """A schedule in the core's memory, freed with this object."""

    def __init__(self, pointer: Any) -> None:
        if not pointer:
            raise MemoryError("no memory for a schedule of the planner")
        self.pointer = pointer
        own: Callable[[c_void_p], None] = _core().free_schedule
        weakref.finalize(self, own, pointer)

    @functools.cached_property
    def held(self) -> tuple[int, ...]:
        """The most micro-batches in flight on a worker of each stage."""
        own = self.pointer.contents
        return tuple(own.held[: own.num_stages])

    def operations(self) -> tuple[Operation, ...]:
        """Its operations, each after what it waits for."""
        own = self.pointer.contents
        return tuple(
            Operation(KINDS[o.kind], o.stage, o.micro_batch, o.worker, o.peer, bool(o.waits))
            for o in own.operations[: own.num_operations]
        )


@functools.lru_cache(maxsize=256)
def native_schedule(
    schedule: str, workers: Workers, num_micro_batches: int, in_flight: tuple[int, ...] | None
) -> NativeSchedule:
    """What `schedule.make_schedule` and `simulator.order_operations` make; of a schedule that is valid."""
    flat = [worker for replicas in workers for worker in replicas]
    first = list(itertools.accumulate(map(len, workers), initial=0))
    layout = _Layout(
        len(workers),
        num_workers(workers),
        num_micro_batches,
        NAMES.index(schedule),
        _integers(first),
        _integers(flat),
        None if in_flight is None else _integers(in_flight),
    )
    return NativeSchedule(_core().make_schedule(byref(layout), 0))


@dataclass(frozen=True, kw_only=True)
class RunSeconds:
    """Seconds of one pipeline's step."""

    stage_start_seconds: tuple[float, ...]
    """Start of each stage's first forward."""
    stage_end_seconds: tuple[float, ...]
    """End of each stage's last compute step, over all its workers."""
    busy_seconds: tuple[float, ...]
    """Compute of each worker."""
    worker_end_seconds: tuple[float, ...]
    """End of each worker's last compute step."""

    @property
    def step_seconds(self) -> float:
        return max(self.stage_end_seconds, default=0.0)


@dataclass(frozen=True, kw_only=True)
class NativeRun(RunSeconds):
    """The same, and the last messages."""

    sent_from: float
    """`sent_after` knows the messages that arrive later than this."""
    messages: ctypes.Array[Any]
    num_sent: int

    def sent_after(self, seconds: float) -> list[Sent]:
        """The messages that arrive later than that, at least `sent_from`; none that take no time."""
        return [
            (message.start, message.end, message.worker, message.peer)
            for message in self.messages[: self.num_sent]
            if message.end > seconds and message.end > message.start
        ]


def _run(run: Callable[[Any], int], num_stages: int, count: int, room: int) -> NativeRun:
    """What `run` writes of stages and `count` workers, with room for so many messages."""
    starts, ends = ((c_double * num_stages)() for _ in range(2))
    busy, last = ((c_double * count)() for _ in range(2))
    room = max(room, 2)
    sent = (_Message * room)()
    figures = _Figures(starts, ends, busy, last, sent, room, 0, 0.0)
    if run(figures):
        raise MemoryError("no memory to simulate a pipeline of the planner")
    return NativeRun(
        stage_start_seconds=tuple(starts),
        stage_end_seconds=tuple(ends),
        busy_seconds=tuple(busy),
        worker_end_seconds=tuple(last),
        sent_from=figures.sent_from,
        messages=sent,
        num_sent=figures.num_sent,
    )


def run_schedule(own: NativeSchedule, times: Sequence[Sequence[float]], *, blocking: bool) -> NativeRun:
    """Run a schedule. `times`: seconds [stages] of forwards, backwards and their weight-gradient parts, then
    seconds [stages - 1] of activations and gradients."""
    core, schedule = _core(), own.pointer.contents
    seconds = _Times(*map(_doubles, times))
    return _run(
        lambda figures: core.run_schedule(own.pointer, byref(seconds), int(blocking), byref(figures)),
        schedule.num_stages,
        schedule.num_workers,
        schedule.num_messages,
    )


def run_rounds(
    depths: tuple[int, ...], num_micro_batches: int, times: Sequence[Sequence[float]]
) -> NativeRun:
    """Run 1F1B, sends overlapped, a worker for each stage, without rounds that repeat; `times` as above."""
    core, stages = _core(), len(depths)
    own, seconds = _integers(depths), _Times(*map(_doubles, times))
    return _run(
        lambda figures: core.run_rounds(stages, num_micro_batches, own, byref(seconds), byref(figures)),
        stages,
        stages,
        2 * (stages - 1) * min(num_micro_batches, ROUNDS_KEPT * depths[0]),
    )
