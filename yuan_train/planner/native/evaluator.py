"""The compiled core's price of a whole step: its structures, and the calls."""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_int, c_int16, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from yuan_train.planner.native.library import load_library

NUM_WIDTHS, NUM_SIZES, NUM_RECOMPUTES, MAX_REPLICAS = 6, 8, 3, 16
DOUBLES, INTEGERS = POINTER(c_double), POINTER(c_int32)


class UnitTable(ctypes.Structure):
    """`struct unit_table`."""

    _fields_ = [
        *(
            (name, DOUBLES)
            for name in (
                *("forward", "backward", "weight", "parameters", "parameter_bytes"),
                *("gradient_bytes", "optimizer_bytes", "activation_bytes", "transient", "output"),
            )
        ),
        *(
            (name, c_double)
            for name in ("start_forward", "start_backward", "boundary_bytes", "update_seconds")
        ),
        *((name, DOUBLES) for name in ("critic_parameters", "critic_gradients", "critic_optimizer")),
        *((name, c_double * 2) for name in ("half_seconds", "half_activations")),
    ]


class Pool(ctypes.Structure):
    """`struct pool`: cards of one type in one node."""

    _fields_ = [
        *((name, c_int32) for name in ("node", "count", "kind", "type")),
        *((name, c_int32) for name in ("first_place", "place_step", "backend", "is_simulated")),
        *((name, c_double) for name in ("reserved", "limit", "host_bytes", "host_seconds")),
        *((name, c_double) for name in ("host_bytes_each", "host_link")),
        *((name, c_double) for name in ("disk_bytes", "disk_seconds", "disk_slots", "copy_seconds")),
    ]


class RouteTable(ctypes.Structure):
    """`struct route`."""

    _fields_ = [
        *((name, c_double) for name in ("latency", "stream_rate", "rate", "shared_rate")),
        *((name, c_double) for name in ("copy_seconds", "compute_seconds")),
        *((name, DOUBLES) for name in ("sizes", "seconds")),
        *((name, c_int32) for name in ("num_sizes", "is_shared")),
    ]


class ProblemTable(ctypes.Structure):
    """`struct problem`."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                *("num_units", "num_pools", "num_nodes", "num_cards", "global_batch_size", "is_tied"),
                *("num_places", "sends", "is_measured"),
            )
        ),
        ("sizes", c_int32 * NUM_SIZES),
        ("pools", POINTER(Pool)),
        ("tables", POINTER(UnitTable)),
        ("table_of", INTEGERS),
        ("routes", POINTER(RouteTable)),
        ("reduced", DOUBLES),
        ("held", DOUBLES),
        *(
            (name, c_double)
            for name in (
                *("bucket_size", "half_parameters", "half_seconds", "embedding_parameters"),
                *("reduce_bytes", "weight_bytes", "reduce_copy_share"),
            )
        ),
        ("hidden_bytes", c_double * NUM_SIZES),
        ("num_islands", c_int32),
    ]


def most_stages(problem: ProblemTable) -> int:
    """Stages of a draft, and replicas of all of them, that the core has memory for."""
    return 4 * problem.num_cards + 2 * problem.num_units


class StageRow(ctypes.Structure):
    """`struct draft_stage`."""

    layers: int
    width: int
    num_replicas: int
    depth: int
    recompute: int
    num_recomputed: int
    away: int
    resident: int
    ahead: int
    pools: Any
    offload: float
    share: float
    deeper: int
    may_offload: int
    sends: int
    worker: int
    tilt: int
    _fields_ = [
        *((name, c_int16) for name in ("layers", "width", "num_replicas", "depth")),
        *((name, c_int16) for name in ("recompute", "num_recomputed", "away", "resident", "ahead")),
        ("pools", c_int16 * MAX_REPLICAS),
        *((name, c_double) for name in ("offload", "share")),
        *((name, c_int16) for name in ("deeper", "may_offload", "sends", "worker", "tilt")),
    ]


class PipelineRow(ctypes.Structure):
    """`struct draft_pipeline`."""

    size: int
    num_micro_batches: int
    first_stage: int
    num_stages: int
    _fields_ = [(name, c_int32) for name in ("size", "num_micro_batches", "first_stage", "num_stages")]


class DraftTable(ctypes.Structure):
    """`struct draft`."""

    schedule: int
    is_sharded: int
    num_pipelines: int
    num_stages: int
    rounds: int
    pipelines: Any
    stages: Any
    _fields_ = [
        *((name, c_int32) for name in ("schedule", "is_sharded", "num_pipelines", "num_stages", "rounds")),
        ("pipelines", POINTER(PipelineRow)),
        ("stages", POINTER(StageRow)),
    ]


class StagePrice(ctypes.Structure):
    """`struct stage_price`."""

    _fields_ = [
        *(
            (name, c_double)
            for name in (
                *("forward", "backward", "weight", "update", "memory", "capacity"),
                *("host_bytes", "host_capacity", "disk_bytes", "disk_seconds", "disk_slots"),
                *("optimizer_share", "packed_share"),
                *("activations", "reserved", "copied_share"),
            )
        ),
        *((name, c_int32) for name in ("in_flight", "first_unit", "end_unit", "slowest", "place")),
    ]


class SpaceTable(ctypes.Structure):
    """`struct space`."""

    _fields_ = [
        *((name, c_int32) for name in ("recomputes", "schedules", "shardings")),
        *((name, c_uint64) for name in ("pipelines", "replicas")),
        *((name, c_int32) for name in ("may_offload", "may_send", "uses_all", "like_owners")),
        *((name, c_int32) for name in ("is_ordered", "is_even", "is_plain")),
        ("counts", POINTER(c_uint8)),
    ]

    def changed(self, **fields: int) -> SpaceTable:
        """A copy with other fields, which keeps what `counts` points to."""
        other = SpaceTable.from_buffer_copy(self)
        other.counts = self.counts
        for name, value in fields.items():
            setattr(other, name, value)
        return other


class _Wish(ctypes.Structure):
    _fields_ = [
        ("budget", c_int64),
        ("seed", c_uint64),
        ("num_given", c_int32),
        ("given", POINTER(DraftTable)),
        ("goes_on", c_int32),
        ("deals", c_int32),
    ]


class _Found(ctypes.Structure):
    _fields_ = [
        ("count", c_int32),
        ("room", c_int32),
        ("num_priced", c_int64),
        ("steps", DOUBLES),
        ("drafts", POINTER(DraftTable)),
    ]


class ProofSlot(ctypes.Structure):
    """`struct proof_slot`."""

    num_replicas: int
    width: int
    alike: int
    block: int
    block_kind: int
    pools: Any
    _fields_ = [
        *((name, c_int32) for name in ("num_replicas", "width", "alike", "block", "block_kind")),
        ("pools", POINTER(c_int16)),
    ]


class ProofShape(ctypes.Structure):
    """`struct proof_shape`."""

    _fields_ = [
        *((name, c_int32) for name in ("schedule", "size", "num_micro_batches", "num_pipelines")),
        *((name, c_int32) for name in ("is_sharded", "needs_first", "needs_last", "num_slots")),
        ("slots", POINTER(ProofSlot)),
    ]


class ProofState(ctypes.Structure):
    """`struct proof_state`."""

    budget: int
    spent: int
    num_priced: int
    best: float
    draft: DraftTable
    rows: object
    """What the draft points to."""
    _fields_ = [
        *((name, c_int64) for name in ("budget", "spent", "num_priced")),
        ("best", c_double),
        ("draft", DraftTable),
    ]


class _Price(ctypes.Structure):
    _fields_ = [
        *((name, c_double) for name in ("step", "compute", "reduce", "tied", "update", "sync", "over")),
        ("stages", POINTER(StagePrice)),
    ]


@dataclass(frozen=True, kw_only=True)
class NativePrice:
    """Seconds of a step and its parts, as `PlanCost` has them; bytes that do not fit, of all cards."""

    step_seconds: float
    compute_seconds: float
    grad_reduce_seconds: float
    tied_embedding_seconds: float
    update_seconds: float
    weight_sync_seconds: float
    over_bytes: float
    stage_memory_bytes: tuple[float, ...]
    """[stages]: on the tightest card of each."""


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
    core = load_library()
    for name, result, arguments in (
        ("make_evaluator", c_void_p, [POINTER(ProblemTable)]),
        ("free_evaluator", None, [c_void_p]),
        (
            "search_drafts",
            c_int,
            [c_void_p, POINTER(SpaceTable), POINTER(_Wish), POINTER(_Found)],
        ),
        (
            "prove_shape",
            c_int,
            [c_void_p, POINTER(SpaceTable), POINTER(ProofShape), POINTER(ProofState)],
        ),
        ("price_draft", c_int, [c_void_p, POINTER(DraftTable), c_double, POINTER(_Price)]),
    ):
        function: Any = getattr(core, name)
        function.restype, function.argtypes = result, arguments
    return core


class Evaluator:
    """Prices drafts of a problem; freed with this object."""

    def __init__(self, problem: ProblemTable) -> None:
        self._problem = problem
        self._pointer = _core().make_evaluator(byref(problem))
        if not self._pointer:
            raise MemoryError("no memory to price plans")
        weakref.finalize(self, _core().free_evaluator, self._pointer)

    def price(self, draft: DraftTable) -> NativePrice | None:
        """The price of a draft; None if one of its groups cannot be, or its schedule does not end."""
        price = _Price()
        failed = _core().price_draft(self._pointer, byref(draft), math.inf, byref(price))
        if failed < 0:
            raise MemoryError("no memory to price a plan")
        if failed:
            return None
        return NativePrice(
            step_seconds=price.step,
            compute_seconds=price.compute,
            grad_reduce_seconds=price.reduce,
            tied_embedding_seconds=price.tied,
            update_seconds=price.update,
            weight_sync_seconds=price.sync,
            over_bytes=price.over,
            stage_memory_bytes=tuple(stage.memory for stage in price.stages[: draft.num_stages]),
        )

    def search(
        self,
        space: SpaceTable,
        given: Sequence[DraftTable],
        *,
        budget: int,
        seed: int,
        room: int,
        goes_on: bool = False,
        deals: bool = False,
    ) -> NativeFound:
        """The fastest `room` drafts that a search of so many priced drafts finds; it begins with those that
        are given, and with random ones unless it `goes_on` from the given ones alone, or deals
        layers to their stages first."""
        cards = self._problem.num_cards + 1
        drafts = (DraftTable * room)()
        most = most_stages(self._problem) + 1
        rows = [((PipelineRow * cards)(), (StageRow * most)()) for _ in range(room)]
        for draft, (pipelines, stages) in zip(drafts, rows, strict=True):
            draft.pipelines, draft.stages = pipelines, stages
        steps = (c_double * room)()
        found = _Found(0, room, 0, steps, drafts)
        wish = _Wish(budget, seed, len(given), (DraftTable * max(len(given), 1))(*given), goes_on, deals)
        if _core().search_drafts(self._pointer, byref(space), byref(wish), byref(found)):
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
        """Look for a plan of a shape that takes less than `state.best`, which then has it; nothing is proven
        any more once all of its budget is spent."""
        if _core().prove_shape(self._pointer, byref(space), byref(shape), byref(state)):
            raise MemoryError("no memory to prove a plan")
