"""The compiled core's search and proof by its price of a whole step: structures and calls."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import POINTER, byref, c_double, c_int, c_void_p
from dataclasses import dataclass
from typing import Any, TypeVar

from yuan_train.planner.native.library import constant, declared, load_library, structure, with_types

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


@functools.cache
def _core() -> ctypes.CDLL:
    return with_types(
        load_library(),
        ("make_evaluator", c_void_p, [POINTER(ProblemTable)]),
        ("free_evaluator", None, [c_void_p]),
        ("search_drafts", c_int, [c_void_p, POINTER(SpaceTable), POINTER(_Wish), POINTER(_Found)]),
        ("prove_shape", c_int, [c_void_p, POINTER(SpaceTable), POINTER(ProofShape), POINTER(ProofState)]),
    )


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
    ) -> NativeFound:
        """The fastest `room` drafts that a search, or a part of it, of so many priced drafts finds."""
        cards = self._problem.num_cards + 1
        drafts = (DraftTable * room)()
        most = most_stages(self._problem) + 1
        rows = [((PipelineRow * cards)(), (StageRow * most)()) for _ in range(room)]
        for draft, (pipelines, stages) in zip(drafts, rows, strict=True):
            draft.pipelines, draft.stages = pipelines, stages
        steps = (c_double * room)()
        found = _Found(0, room, 0, steps, drafts)
        wish = _Wish(budget, seed, len(given), (DraftTable * max(len(given), 1))(*given), part)
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
