"""Plans as drafts of the compiled core, whose price of them is compared with that of `cost_plan`."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.planner.native import core
from yuan_train.planner.native.core import MAX_REPLICAS, NAMES, DraftTable, PipelineRow, StageRow, most_stages
from yuan_train.planner.native.library import structure
from yuan_train.planner.search.drafts import RECOMPUTES, Tables
from yuan_train.schedule.copies import DEFAULT_AHEAD

structure("stage_price")
_Price = structure("price")


def price_of(tables: Tables, draft: DraftTable) -> Any:
    """`struct price` of a draft, its stages' own among it; None if one of its groups cannot be."""
    price, price_draft = _Price(), core.load_library().price_draft
    price_draft.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_double, ctypes.c_void_p]
    pointers = ctypes.addressof(draft), ctypes.addressof(price)
    with tables.evaluator.borrowed() as own:
        failed = price_draft(own, pointers[0], math.inf, pointers[1])
    assert failed >= 0, "memory"
    return None if failed else price


def draft_of(tables: Tables, plan: Plan) -> DraftTable | None:
    """A plan as a draft; None if it has what the core does not price."""
    stages = plan.stages
    if (
        any(map(_is_special, stages))
        or plan.divides_experts
        or any(len(stage.replicas) > MAX_REPLICAS for stage in stages)
        or any(pipeline.page_group > 1 for pipeline in plan.pipelines)
    ):
        return None
    workers = list(itertools.chain.from_iterable(map(_workers_of, plan.pipelines)))
    count = sum(len(stage.replicas) for stage in stages)
    if None in workers or count > most_stages(tables.problem):
        return None
    rows = (StageRow * len(stages))()
    for row, stage, worker in zip(rows, stages, workers, strict=True):
        row.worker = worker
        row.layers, row.width = int(stage.num_layers), len(stage.replicas[0])
        row.num_replicas = len(stage.replicas)
        row.depth = stage.in_flight or 0
        recomputes = row.layers and stage.num_recomputed == row.layers
        row.may_offload = (2 if recomputes else 1) if stage.optimizer_offload > 0 else 0
        row.recompute, row.num_recomputed = RECOMPUTES.index(stage.recompute), int(stage.num_recomputed)
        row.offload, row.share = stage.optimizer_offload, stage.optimizer_share
        row.away, row.resident = stage.activation_offload, stage.resident_parts or 1
        row.sends = 1 + row.recompute if row.away else 0
        row.ahead = stage.fetch_ahead or DEFAULT_AHEAD
        for r, replica in enumerate(stage.replicas):
            own = {tables.pool_of[plan.ranks[rank].device] for rank in replica}
            if len(own) > 1:
                return None
            (row.pools[r],) = own
    draft = DraftTable()
    draft.schedule, draft.is_sharded = NAMES.index(plan.schedule), plan.optimizer_sharding
    draft.num_pipelines, draft.num_stages = len(plan.pipelines), len(stages)
    lines = (PipelineRow * len(plan.pipelines))()
    first = 0
    for line, pipeline in zip(lines, plan.pipelines, strict=True):
        line.size = tables.sizes.index(pipeline.micro_batch_size)
        line.num_micro_batches = pipeline.num_micro_batches
        line.first_stage, line.num_stages = first, len(pipeline.stages)
        _fill_deeper(rows[first : first + len(pipeline.stages)])
        first += len(pipeline.stages)
    draft.pipelines, draft.stages = lines, rows
    return draft


def _workers_of(pipeline: PipelinePlan) -> Iterator[int | None]:
    """Of each stage, 0 if its replicas have no stage before it, else 1 more than the number of their first
    one; None where they have different ones, or activations leave a card with several stages."""
    sends = any(stage.activation_offload for stage in pipeline.stages)
    first: dict[tuple[int, ...], int] = {}
    for s, stage in enumerate(pipeline.stages):
        before = {first.setdefault(replica, s) for replica in stage.replicas}
        is_same = pipeline.stages[min(before)].replicas == stage.replicas
        worker = 0 if s in before else 1 + min(before)
        yield worker if is_same and len(before) == 1 and not (worker and sends) else None


def _fill_deeper(rows: Sequence[StageRow]) -> None:
    """By how much the stages of a pipeline are deeper than they need be."""
    rest = 0
    for row in reversed(rows):
        rest += row.num_replicas
        row.deeper = row.depth - rest if row.depth else 0


def _is_special(stage: StagePlan) -> bool:
    halves = any(border % 1 for border in stage.layers)
    tiers = stage.optimizer_disk or stage.parameter_offload
    return bool(halves or tiers or stage.experts)
