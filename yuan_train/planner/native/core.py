"""The calls of the compiled core, and what is handed to and fro.

Schedules and pipelines run there as `schedule/` and the simulator define them, to the bit. An `Evaluator` has
the core's search and proof, by its price of a whole step.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import POINTER, byref, c_double, c_int, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from yuan_train.config.run import ScheduleName
from yuan_train.planner.native.library import (
    constant,
    declared,
    load_library,
    pointer_to,
    structure,
    with_types,
)
from yuan_train.schedule.step import Kind, Workers, num_workers


@functools.cache
def _core() -> ctypes.CDLL:
    schedule = pointer_to(_Schedule)
    return with_types(
        load_library(),
        ("make_schedule", schedule, [POINTER(_Layout), c_int]),
        ("free_schedule", None, [schedule]),
        ("run_schedule", c_int, [schedule, POINTER(_Times), c_int, POINTER(_Figures)]),
        ("run_rounds", c_int, [c_int32, c_int32, POINTER(c_int32), POINTER(_Times), POINTER(_Figures)]),
        ("make_evaluator", c_void_p, [POINTER(ProblemTable)]),
        ("free_evaluator", None, [c_void_p]),
        ("search_drafts", c_int, [c_void_p, POINTER(SpaceTable), POINTER(_Wish), POINTER(_Found)]),
        ("prove_shape", c_int, [c_void_p, POINTER(SpaceTable), POINTER(ProofShape), POINTER(ProofState)]),
    )


# --- schedules and pipelines ------------------------------------------------------------------------------

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


# --- drafts: their price, search and proof ----------------------------------------------------------------

NUM_WIDTHS, NUM_SIZES, NUM_RECOMPUTES, MAX_REPLICAS = map(
    constant, ("NUM_WIDTHS", "NUM_SIZES", "NUM_RECOMPUTES", "MAX_REPLICAS")
)
WHOLE, DEALS, HOT, WARM, COLD = map(constant, ("WHOLE", "DEALS", "HOT", "WARM", "COLD"))
"""What of a search is done, see `native/evaluate.h`."""


@declared("unit_table")
class UnitTable(ctypes.Structure):
    """What units cost on a group of cards."""


Pool = structure("pool")


@declared("route")
class RouteTable(ctypes.Structure):
    """A link between two places."""


@declared("problem")
class ProblemTable(ctypes.Structure):
    """What is planned for."""


NUM_PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MOST_THREADS = 8
"""At a time: an evaluator keeps the schedules that it has made, hundreds of MB of large batches."""
T = TypeVar("T")


def run_together(work: Callable[..., T], *arguments: Iterable[Any], most: int = MOST_THREADS) -> list[T]:
    """As `map`, with a thread for each processor, at most so many: the core works outside of the GIL."""
    with ThreadPoolExecutor(min(NUM_PROCESSORS, most)) as pool:
        return list(pool.map(work, *arguments))


def most_stages(problem: ProblemTable) -> int:
    """Stages of a draft, and replicas of all of them, that the core has memory for."""
    return 4 * problem.num_cards + 2 * problem.num_units


@declared("draft_stage")
class StageRow(ctypes.Structure):
    """A stage of a draft."""

    width: int
    recompute: int
    worker: int


@declared("draft_pipeline")
class PipelineRow(ctypes.Structure):
    """A pipeline of a draft, and which of its stages it has."""

    size: int


@declared("draft")
class DraftTable(ctypes.Structure):
    """A plan as the core has it."""

    schedule: int


@declared("space")
class SpaceTable(ctypes.Structure):
    """What a search may choose."""

    def changed(self, **fields: int) -> SpaceTable:
        """A copy with other fields, which keeps what `counts` points to."""
        other = SpaceTable.from_buffer_copy(self)
        other.counts = self.counts
        for name, value in fields.items():
            setattr(other, name, value)
        return other


_Wish = structure("wish")


_Found = structure("found")


ProofSlot = structure("proof_slot")


@declared("proof_shape")
class ProofShape(ctypes.Structure):
    """Equal pipelines to go through."""


@declared("proof_state")
class ProofState(ctypes.Structure):
    """How far a proof is."""


@dataclass(frozen=True, kw_only=True)
class NativeFound:
    """Drafts that a search found, fastest first, and their steps in seconds."""

    steps: tuple[float, ...]
    drafts: tuple[DraftTable, ...]
    num_priced: int
    rows: tuple[object, ...]
    """What the drafts point to."""


class Evaluator:
    """Prices drafts of a problem, for several threads at a time; freed with this object."""

    def __init__(self, problem: ProblemTable) -> None:
        self._problem = problem
        self._idle: list[int] = []

    @contextmanager
    def borrowed(self) -> Generator[int]:
        """Where in the core's memory an evaluator is that nobody else uses meanwhile."""
        try:
            pointer = self._idle.pop()
        except IndexError:
            pointer = _core().make_evaluator(byref(self._problem))
            if not pointer:
                raise MemoryError("no memory to price plans") from None
            weakref.finalize(self, _core().free_evaluator, pointer)
        yield pointer
        self._idle.append(pointer)

    def search(
        self,
        space: SpaceTable,
        given: Sequence[DraftTable],
        *,
        budget: int,
        seed: int,
        room: int,
        part: int = WHOLE,
        seconds: float = math.inf,
    ) -> NativeFound:
        """The fastest `room` drafts that a search, or a part of it, of so many priced drafts finds, and in
        so many seconds if it finds any."""
        cards = self._problem.num_cards + 1
        drafts = (DraftTable * room)()
        most = most_stages(self._problem) + 1
        rows = [((PipelineRow * cards)(), (StageRow * most)()) for _ in range(room)]
        for draft, (pipelines, stages) in zip(drafts, rows, strict=True):
            draft.pipelines, draft.stages = pipelines, stages
        steps = (c_double * room)()
        found = _Found(0, room, 0, steps, drafts)
        wish = _Wish(budget, seed, len(given), (DraftTable * max(len(given), 1))(*given), part, seconds)
        with self.borrowed() as pointer:
            failed = _core().search_drafts(pointer, byref(space), byref(wish), byref(found))
        if failed:
            raise MemoryError("no memory to search for plans")
        return NativeFound(
            steps=tuple(steps[: found.count]),
            drafts=tuple(drafts[: found.count]),
            num_priced=found.num_priced,
            rows=tuple(rows),
        )

    def proof_state(self, *, best: float, budget: int) -> ProofState:
        """The begin of a proof that nothing takes less than `best` seconds, which may try `budget` stages."""
        pipelines = (PipelineRow * (self._problem.num_cards + 1))()
        stages = (StageRow * (most_stages(self._problem) + 1))()
        state = ProofState(budget, 0, 0, best, DraftTable(0, 0, 0, 0, 0, pipelines, stages))
        state.rows = pipelines, stages
        return state

    def prove(self, space: SpaceTable, shape: ProofShape, state: ProofState) -> None:
        """Look for a plan of a shape below `state.best`, which then has it; a spent budget proves nothing."""
        with self.borrowed() as pointer:
            failed = _core().prove_shape(pointer, byref(space), byref(shape), byref(state))
        if failed:
            raise MemoryError("no memory to prove a plan")
