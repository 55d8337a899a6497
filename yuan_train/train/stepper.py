"""What the training loop knows of an engine, and our own engine behind it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from yuan_train.checkpoint.local_shards import LocalShard
from yuan_train.config.disk import written_words
from yuan_train.data.loader import Samples
from yuan_train.parallel.checksums import check_weights
from yuan_train.parallel.tiers.disk import DiskFile
from yuan_train.parallel.tiers.host_state import DiskChunk
from yuan_train.parallel.world_sum import sum_over_world
from yuan_train.train.build import build, checkpoint_tensors
from yuan_train.train.job import Job
from yuan_train.train.reference import prepare_reference
from yuan_train.train.state import Progress
from yuan_train.train.step import StepResult, Trainer, train_step, validation_loss
from yuan_train.train.world import World


class Stepper(Protocol):
    """An engine: the training loop, its log, its checkpoints and its validation are the same for all."""

    @property
    def world(self) -> World: ...

    def reading(self) -> AbstractContextManager[object]:
        """Around the run: what reads the data ends with it."""
        ...

    def prepare(self, job: Job, progress: Progress) -> str | None:
        """What a run needs beside weights, before its first step; what there is to say of it. Collective."""
        ...

    def step(
        self,
        samples: Samples,
        *,
        first_sample: int,
        lr: float,
        clip: float,
        stop: bool,
        scale: float,
        may_skip: bool,
    ) -> StepResult:
        """One training step; collective over all ranks. Arguments and errors as those of `train_step`."""
        ...

    def validation_loss(self, samples: Samples, *, num_batches: int) -> float:
        """Mean loss over the first global batches, in nats per token; collective over all ranks."""
        ...

    def compute_seconds(self) -> float:
        """Seconds of compute since the last call; waits for the device."""
        ...

    def take_expert_tokens(self) -> list[list[int]] | None:
        """Tokens of each layer's experts since the last call; None if they are not counted. Collective."""
        ...

    def checkpoint_tensors(self) -> dict[str, LocalShard]:
        """What this rank writes into a checkpoint, by global name."""
        ...

    def finish(self) -> None:
        """Wait for what the last step has left under way; collective over all ranks."""
        ...

    def check_weights(self) -> None:
        """Raise TrainingError, on all ranks, unless ranks that hold the same weights have the same bits;
        collective over all ranks."""
        ...


BuildStepper = Callable[[Job], tuple[Job, Stepper, Progress]]
"""Builds the engine of a job, with initial weights or those of a checkpoint; collective over all ranks.

Also returns the job, whose ranks the engine may number otherwise, and the progress to start from.
"""


def build_stepper(job: Job) -> tuple[Job, Stepper, Progress]:
    """Build our own engine; see `BuildStepper`."""
    trainer, progress = build(job)
    return job, YuanStepper(trainer), progress


@dataclass(frozen=True)
class YuanStepper:
    """Our own engine."""

    trainer: Trainer

    @property
    def world(self) -> World:
        return self.trainer.runtime

    def reading(self) -> AbstractContextManager[object]:
        return self.trainer.feed

    def prepare(self, job: Job, progress: Progress) -> str | None:
        notes = prepare_reference(job, self.trainer, progress), disk_note(job, self.trainer)
        return "; ".join(filter(None, notes)) or None

    def step(
        self,
        samples: Samples,
        *,
        first_sample: int,
        lr: float,
        clip: float,
        stop: bool,
        scale: float,
        may_skip: bool,
    ) -> StepResult:
        return train_step(
            self.trainer,
            samples,
            first_sample=first_sample,
            lr=lr,
            clip=clip,
            stop=stop,
            scale=scale,
            may_skip=may_skip,
        )

    def validation_loss(self, samples: Samples, *, num_batches: int) -> float:
        return validation_loss(self.trainer, samples, num_batches=num_batches)

    def compute_seconds(self) -> float:
        return self.trainer.stopwatch.read()

    def take_expert_tokens(self) -> list[list[int]] | None:
        load = self.trainer.expert_load
        return load.take() if load is not None else None

    def checkpoint_tensors(self) -> dict[str, LocalShard]:
        return checkpoint_tensors(self.trainer, "written")

    def finish(self) -> None:
        for state in self.trainer.runtime.states:
            state.finish_weight_sync()

    def check_weights(self) -> None:
        self.finish()
        runtime = self.trainer.runtime
        frozen = [state.bucket for state in runtime.frozen]
        check_weights(runtime.grid, runtime.coord, runtime.buckets, frozen)


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
