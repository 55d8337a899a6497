"""One training step of one rank, and the validation loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from yuan_train.config.errors import TrainingError
from yuan_train.data.loader import Blend
from yuan_train.parallel.activity import Activity, during
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.executor import Executor, Stopwatch
from yuan_train.parallel.groups import as_training_error, guard_world_collective
from yuan_train.parallel.world_sum import sum_over_world
from yuan_train.train.expert_load import ExpertLoad
from yuan_train.train.feed import Feed
from yuan_train.train.optimizer import Optimizer
from yuan_train.train.stage import StageRunner


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on all ranks."""

    loss: float
    """Mean loss of the batch, in nats per trained token."""
    grad_norm: float
    """Global norm before clipping."""
    stop: bool
    """Some rank requested a stop."""
    skipped: bool = False
    """The gradients overflowed on some rank, so no rank stepped its weights."""


@dataclass(frozen=True)
class Trainer:
    """One rank's runtime, stage runners and optimizer."""

    runtime: RankRuntime
    runners: Mapping[int, StageRunner]
    """By stage."""
    optimizer: Optimizer
    stopwatch: Stopwatch
    executor: Executor
    feed: Feed
    expert_load: ExpertLoad | None
    """None for a model without experts."""
    device: torch.device

    @property
    def loss(self) -> torch.Tensor:
        """This rank's share of the batch's mean loss, an fp64 scalar.

        Only tensor rank 0 of a replica counts it; the other tensor ranks return 0.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.runtime.coord.tensor_rank == 0:
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
    """Forward, backward, gradient reduction, clipping, AdamW, balance; collective over all ranks.

    The gradient reduction of a bucket starts as soon as this rank's gradient is complete, inside its last
    backward. Stepped weights are on their way to their other owners when it returns: the next forward waits
    for them, layer by layer.

    The batch is samples [first_sample, first_sample + global batch). The backward runs on `scale` times the
    loss. Gradients are clipped to the global norm `clip` (0: no clipping). `stop` requests a stop of all
    ranks after this step.

    Raises TrainingError, with the weights of the step before still in place, if the loss or the gradient norm
    is not finite; if only the norm is not and `may_skip`, the step is skipped instead.
    """
    runtime = trainer.runtime
    for bucket in runtime.buckets:
        bucket.gradient.zero_()
    next_sample = first_sample + runtime.grid.plan.global_batch_size
    _begin(trainer, blend, first_sample=first_sample, then=next_sample, scale=scale)
    squares = torch.zeros((), dtype=torch.float64, device=trainer.device)
    runtime.reducer.begin()
    with as_training_error(runtime.coord):
        trainer.executor.run(
            runtime.program,
            before_step=runtime.reducer.before_step,
            after_step=runtime.reducer.after_step,
        )
        for number, state in enumerate(runtime.states):
            with during(Activity("finish_grad_reduce", number=number)):
                squares += state.finish_grad_reduce()
    stop_flag = torch.tensor(float(stop), dtype=torch.float64, device=trainer.device)
    # On the CPU: not all cards share a communication backend, but all ranks share gloo.
    totals = torch.stack([squares, trainer.loss, stop_flag]).cpu()
    if blend.masks:
        totals = torch.cat([totals, _count(trainer, blend, next_sample)])
    sum_over_world(runtime.groups, runtime.coord, totals, "the all-reduce of loss and gradient norm")
    square, loss, stops, *next_tokens = totals.tolist()
    if next_tokens:
        trainer.feed.batch_tokens.pop((blend, first_sample), None)
        trainer.feed.batch_tokens[blend, next_sample] = round(next_tokens[0])
    grad_norm = math.sqrt(square) / scale if square >= 0 else math.nan
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        if may_skip and math.isfinite(loss):
            return StepResult(loss=loss, grad_norm=grad_norm, stop=stops > 0, skipped=True)
        raise TrainingError(_blame(trainer, loss, grad_norm))
    factor = (clip / (grad_norm + 1e-6) if clip and grad_norm > clip else 1.0) / scale
    if factor != 1.0:
        for shard in (shard for state in runtime.states for shard in state.shards):
            shard.gradient.mul_(factor)
    with as_training_error(runtime.coord):
        trainer.optimizer.step(lr)
    if trainer.expert_load is not None:
        trainer.expert_load.balance()
    return StepResult(loss=loss, grad_norm=grad_norm, stop=stops > 0)


def validation_loss(trainer: Trainer, blend: Blend, *, num_batches: int) -> float:
    """Mean loss over the first `num_batches` global batches of the validation data, in nats per token.

    Collective over all ranks.
    """
    runtime = trainer.runtime
    batch_size = runtime.grid.plan.global_batch_size
    total = torch.zeros((), dtype=torch.float64, device=trainer.device)
    for batch in range(num_batches):
        then = (batch + 1) * batch_size if batch + 1 < num_batches else None
        _begin(trainer, blend, first_sample=batch * batch_size, then=then)
        with as_training_error(runtime.coord):
            trainer.executor.run(runtime.evaluation_program)
        total += trainer.loss
    total = total.cpu()
    sum_over_world(runtime.groups, runtime.coord, total, "the all-reduce of the validation loss")
    return total.item() / num_batches


def _begin(
    trainer: Trainer, blend: Blend, *, first_sample: int, then: int | None, scale: float = 1.0
) -> None:
    """Point the stage runners at their pipeline's share of the batch; that of batch `then` is read ahead."""
    runtime = trainer.runtime
    trainer.feed.begin(blend, first_sample, then=then)
    trained_tokens = _trained_tokens(trainer, blend, first_sample)
    for runner in trainer.runners.values():
        runner.begin(
            first_sample=first_sample + runtime.grid.first_sequence(runtime.coord),
            trained_tokens=max(trained_tokens, 1),
            num_sequences=runtime.grid.plan.global_batch_size,
            scale=scale,
        )


def _trained_tokens(trainer: Trainer, blend: Blend, first_sample: int) -> int:
    """Tokens with a loss in a whole global batch: every rank divides by the same number.

    With a mask only the last stages know, each of its own share. Their sum over the ranks is known since the
    step before, in whose all-reduce it was; if there was none, collective over all ranks.
    """
    runtime = trainer.runtime
    plan = runtime.grid.plan
    if not blend.masks:
        return plan.global_batch_size * plan.sequence_length
    known = trainer.feed.batch_tokens
    if (blend, first_sample) not in known:
        total = _count(trainer, blend, first_sample)
        sum_over_world(runtime.groups, runtime.coord, total, "the all-reduce of the tokens with a loss")
        known[blend, first_sample] = round(total.item())
    return known[blend, first_sample]


def _count(trainer: Trainer, blend: Blend, first_sample: int) -> torch.Tensor:
    """This rank's term of the tokens with a loss in a batch that is begun or announced: fp64 [1], exact."""
    counts = trainer.runtime.coord.tensor_rank == 0
    number = trainer.feed.count_trained(blend, first_sample) if counts else 0
    return torch.tensor([number], dtype=torch.float64)


def _blame(trainer: Trainer, loss: float, grad_norm: float) -> str:
    """A message that names the first rank, in the model's order, whose output or gradient was not finite.

    Collective over all ranks.
    """
    runtime = trainer.runtime
    finite_gradient = all(bool(torch.isfinite(bucket.gradient).all()) for bucket in runtime.buckets)
    finite_output = all(bool(runner.finite) for runner in trainer.runners.values())
    local = torch.tensor([float(finite_output), float(finite_gradient)])
    flags = [local]
    if dist.is_initialized():
        flags = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        with guard_world_collective(runtime.coord, "the search for the first value that is not finite"):
            dist.all_gather(flags, local)
    found = f"loss {loss}, gradient norm {grad_norm}"
    order = sorted(runtime.grid.coords, key=lambda coord: (coord.stages, coord.pipeline))
    for what, index in (("output", 0), ("gradient", 1)):
        for coord in order:
            if not flags[coord.rank][index]:
                return f"{found}: the first {what} that is not finite came from {coord}"
    return f"{found}: every rank's outputs and gradients were finite; their sum was not"
