"""One optimizer step of one rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from yuan_train.config.errors import TrainingError
from yuan_train.data.loader import Blend
from yuan_train.parallel.apply import Worker
from yuan_train.parallel.executor import Executor, Stopwatch
from yuan_train.parallel.groups import naming, watching
from yuan_train.train.optimizer import Optimizer
from yuan_train.train.stage import StageRunner


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step."""

    loss: float
    grad_norm: float
    stop: bool
    """Some rank was asked to stop."""
    skipped: bool = False
    """The gradients overflowed, on whichever rank: nothing was stepped, on none."""


@dataclass(frozen=True)
class Trainer:
    """One rank's model, optimizer and place in the plan."""

    worker: Worker
    runners: Mapping[int, StageRunner]
    """By stage."""
    optimizer: Optimizer
    stopwatch: Stopwatch
    device: torch.device

    @property
    def executor(self) -> Executor:
        return Executor(self.runners, self.worker.bridge, self.stopwatch)

    @property
    def loss(self) -> torch.Tensor:
        """This rank's share of the batch's mean loss, fp64; one rank of a tensor-parallel group tells it."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.worker.place.position == 0:
            total += sum(runner.loss for runner in self.runners.values())
        return total


def train_step(
    trainer: Trainer,
    blend: Blend,
    *,
    first_sample: int,
    lr: float,
    clip: float,
    stop: bool,
    scale: float = 1.0,
    may_skip: bool = False,
) -> StepResult:
    """Forward, backward, gradient sum, clipping, AdamW; collective over all ranks.

    A gradient sum begins as soon as the rank has its part, while the rest of its lane runs.

    The batch is samples [first_sample, first_sample + global batch). The backward runs on `scale` times the
    loss. Raises TrainingError, with the weights of the step before still in place, if the loss or the
    gradient norm is not finite; if it is the norm alone and `may_skip`, the step is skipped instead.
    """
    worker = trainer.worker
    for bucket in worker.buckets:
        bucket.gradient.zero_()
    _begin(trainer, blend, first_sample=first_sample, scale=scale)
    squares = torch.zeros((), dtype=torch.float64, device=trainer.device)
    with naming(worker.place):
        trainer.executor.run(worker.lane, worker.begin_sums)
        for state in worker.states:
            squares += state.end_sum()
    asked = torch.tensor(float(stop), dtype=torch.float64, device=trainer.device)
    # On the host, where all ranks can meet, whatever their cards.
    totals = torch.stack([squares, trainer.loss, asked]).cpu()
    if dist.is_initialized():
        with watching(worker.place, "the sum of loss and gradient norm over all ranks"):
            dist.all_reduce(totals)
    square, loss, stops = totals.tolist()
    grad_norm = math.sqrt(square) / scale if square >= 0 else math.nan
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        if may_skip and math.isfinite(loss):
            return StepResult(loss=loss, grad_norm=grad_norm, stop=stops > 0, skipped=True)
        raise TrainingError(_blame(trainer, loss, grad_norm))
    factor = (clip / (grad_norm + 1e-6) if clip and grad_norm > clip else 1.0) / scale
    if factor != 1.0:
        for shard in (shard for state in worker.states for shard in state.shards):
            shard.gradient.mul_(factor)
    with naming(worker.place):
        trainer.optimizer.step(lr)
    return StepResult(loss=loss, grad_norm=grad_norm, stop=stops > 0)


def validation_loss(trainer: Trainer, blend: Blend, *, num_batches: int) -> float:
    """Mean loss per token over the first batches of the validation data; collective over all ranks."""
    worker = trainer.worker
    batch_size = worker.grid.plan.global_batch_size
    total = torch.zeros((), dtype=torch.float64, device=trainer.device)
    for batch in range(num_batches):
        _begin(trainer, blend, first_sample=batch * batch_size)
        with naming(worker.place):
            trainer.executor.run(worker.evaluation_lane)
        total += trainer.loss
    total = total.cpu()
    if dist.is_initialized():
        with watching(worker.place, "the sum of the validation loss over all ranks"):
            dist.all_reduce(total)
    return total.item() / num_batches


def _begin(trainer: Trainer, blend: Blend, *, first_sample: int, scale: float = 1.0) -> None:
    """Point the runner at its pipeline's share of the batch."""
    worker = trainer.worker
    # Of the whole batch, not of this pipeline's share: every rank must divide by the same number.
    trained_tokens = blend.trained_tokens(first_sample, worker.grid.plan.global_batch_size)
    for runner in trainer.runners.values():
        runner.begin(
            blend,
            first_sample=first_sample + worker.grid.first_sequence(worker.place),
            trained_tokens=max(trained_tokens, 1),
            scale=scale,
        )


def _blame(trainer: Trainer, loss: float, grad_norm: float) -> str:
    """Name the first rank, in the model's order, whose output or gradient was not finite."""
    worker = trainer.worker
    sound_gradient = all(bool(torch.isfinite(bucket.gradient).all()) for bucket in worker.buckets)
    sound_output = all(bool(runner.finite) for runner in trainer.runners.values())
    mine = torch.tensor([float(sound_output), float(sound_gradient)])
    flags = [mine]
    if dist.is_initialized():
        flags = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(flags, mine)
    found = f"loss {loss}, gradient norm {grad_norm}"
    order = sorted(worker.grid.places, key=lambda place: (place.stages, place.pipeline))
    for what, index in (("output", 0), ("gradient", 1)):
        for place in order:
            if not flags[place.rank][index]:
                return f"{found}: the first {what} that is not finite came from {place}"
    return f"{found}: every rank's outputs and gradients were finite; their sum was not"
