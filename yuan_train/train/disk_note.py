"""What a run says of its optimizer state on disks, before the first step."""

from __future__ import annotations

import torch

from yuan_train.config.disk import written_words
from yuan_train.parallel.tiers.disk import DiskFile
from yuan_train.parallel.tiers.disk_state import DiskChunk
from yuan_train.parallel.world_sum import sum_over_world
from yuan_train.train.job import Job
from yuan_train.train.step import Trainer


def disk_note(job: Job, trainer: Trainer) -> str | None:
    """How much a step writes to all disks, and whether through the page cache; None without such state.
    Collective over all ranks."""
    plan, runtime = job.plan, trainer.runtime
    if not any(stage.optimizer_disk for pipeline in plan.pipelines for stage in pipeline.stages):
        return None
    file = _file(trainer)
    totals = torch.zeros(2, dtype=torch.float64)
    if file is not None:
        totals += torch.tensor([float(file.num_bytes), float(not file.is_direct)])
    sum_over_world(runtime.groups, runtime.coord, totals, "the sum of what ranks write to disks")
    num_bytes, cached = totals.tolist()
    step_seconds = plan.forecast.step_seconds if plan.forecast else None
    note = f"optimizer state on disk: {written_words(num_bytes, step_seconds)}"
    if cached:
        note += f"; {cached:.0f} ranks through the page cache: their file system takes no direct requests"
    return note


def _file(trainer: Trainer) -> DiskFile | None:
    chunks = (chunk for state in trainer.runtime.states for chunk in state.host_chunks)
    return next((chunk.store.file for chunk in chunks if isinstance(chunk, DiskChunk)), None)
