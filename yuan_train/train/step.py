"""One training step of one rank, and the validation loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from yuan_train.config.errors import NotFinite
from yuan_train.data.loader import Samples
from yuan_train.parallel.activity import Activity, during
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.device import Device
from yuan_train.parallel.executor import Executor, Stopwatch
from yuan_train.parallel.groups import as_training_error
from yuan_train.parallel.world_sum import sum_over_world
from yuan_train.train.expert_load import ExpertLoad
from yuan_train.train.feed import Passes
from yuan_train.train.objective import PairLoss, RowScores
from yuan_train.train.optimizer import Optimizer
from yuan_train.train.stage import StageRunner
from yuan_train.train.world import blame, count_trained, num_terms


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on all ranks."""

    loss: float
    """Mean loss of the batch, in nats per trained token; of pairs, per pair."""
    grad_norm: float
    """Global norm before clipping."""
    stop: bool
    """Some rank requested a stop."""
    skipped: bool = False
    """The gradients overflowed on some rank, so no rank stepped its weights."""
    preference: tuple[float, float] | None = None
    """Of pairs: the share in which the chosen answer is ahead, and by how much on average."""


@dataclass(frozen=True)
class Trainer:
    """One rank's runtime, stage runners and optimizer."""

    runtime: RankRuntime
    runners: Mapping[int, StageRunner]
    """By stage."""
    optimizer: Optimizer
    stopwatch: Stopwatch
    executor: Executor
    feed: Passes
    expert_load: ExpertLoad | None
    """None for a model without experts."""
    device: Device
    pair_loss: PairLoss | None = None
    """The objective of a run on preference pairs, shared by this rank's stages."""

    @property
    def loss(self) -> torch.Tensor:
        """This rank's share of the batch's mean loss, an fp64 scalar.

        Only tensor rank 0 of a replica counts it; the other tensor ranks return 0.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch)
        if self.runtime.coord.tensor_rank == 0:
            total += sum(runner.loss for runner in self.runners.values())
        return total

    @property
    def measures(self) -> torch.Tensor:
        """This rank's term of `PairLoss.measures` of the batch; counted as `loss` is. Empty without pairs."""
        if self.pair_loss is None:
            return torch.zeros(0, dtype=torch.float64, device=self.device.torch)
        return self.pair_loss.measures * (self.runtime.coord.tensor_rank == 0)


def train_step(
    trainer: Trainer,
    blend: Samples,
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

    Raises NotFinite, with the weights of the step before still in place, if the loss or the gradient norm
    is not finite; if only the norm is not and `may_skip`, the step is skipped instead.
    """
    runtime = trainer.runtime
    for bucket in runtime.buckets:
        # The first sum of a page replaces what is there.
        if not bucket.is_paged:
            bucket.gradient.zero_()
    next_sample = first_sample + runtime.grid.plan.global_batch_size
    begin_pass(trainer, blend, first_sample=first_sample, then=next_sample, scale=scale)
    runtime.reducer.begin()
    with as_training_error(runtime.coord):
        trainer.executor.run(
            runtime.program,
            before_step=runtime.reducer.before_step,
            after_step=runtime.reducer.after_step,
        )
        squares = _finish_reductions(runtime, trainer.device.torch)
    stop_flag = torch.tensor(float(stop), dtype=torch.float64, device=trainer.device.torch)
    # On the CPU: not all cards share a communication backend, but all ranks share gloo.
    totals = trainer.device.to_host(torch.stack([squares, trainer.loss, stop_flag]))
    if trainer.pair_loss is not None:
        totals = torch.cat([totals, trainer.device.to_host(trainer.measures)])
    if blend.masks:
        totals = torch.cat([totals, count_trained(trainer.feed, runtime, blend, next_sample)])
    sum_over_world(runtime.groups, runtime.coord, totals, "the all-reduce of loss and gradient norm")
    square, loss, stops, *rest = totals.tolist()
    preference = None
    if trainer.pair_loss is not None:
        pairs = blend.known_terms(runtime.grid.plan.global_batch_size)
        preference = (rest[0] / pairs, rest[1] / pairs)
    elif rest:
        trainer.feed.batch_tokens.pop((blend, first_sample), None)
        trainer.feed.batch_tokens[blend, next_sample] = round(rest[0])
    grad_norm = math.sqrt(square) / scale if square >= 0 else math.nan
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        if may_skip and math.isfinite(loss):
            return StepResult(
                loss=loss, grad_norm=grad_norm, stop=stops > 0, skipped=True, preference=preference
            )
        finite_gradient = all(bool(torch.isfinite(bucket.gradient).all()) for bucket in runtime.buckets)
        finite_output = all(bool(runner.finite) for runner in trainer.runners.values())
        found = f"loss {loss}, gradient norm {grad_norm}"
        raise NotFinite(f"{found}: {blame(runtime, finite_output, finite_gradient)}")
    factor = (clip / (grad_norm + 1e-6) if clip and grad_norm > clip else 1.0) / scale
    with as_training_error(runtime.coord):
        trainer.optimizer.step(lr, factor=factor)
    if trainer.expert_load is not None:
        trainer.expert_load.balance()
    return StepResult(loss=loss, grad_norm=grad_norm, stop=stops > 0, preference=preference)


def _finish_reductions(runtime: RankRuntime, device: torch.device) -> torch.Tensor:
    """Wait for the gradient reductions; this rank's share of the squared global norm, fp64.

    In the order in which they started: the norms of those that have ended are taken while the last ones are
    on their way. Added up in the model's order.
    """
    squares: list[torch.Tensor] = []
    for number, state in reversed(list(enumerate(runtime.states))):
        with during(Activity("finish_grad_reduce", number=number)):
            squares.append(state.finish_grad_reduce())
    return sum(reversed(squares), torch.zeros((), dtype=torch.float64, device=device))


def validation_loss(trainer: Trainer, blend: Samples, *, num_batches: int) -> float:
    """Mean loss over the first `num_batches` global batches of the validation data, in nats per token.

    Collective over all ranks.
    """
    runtime = trainer.runtime
    batch_size = runtime.grid.plan.global_batch_size
    total = torch.zeros((), dtype=torch.float64, device=trainer.device.torch)
    for batch in range(num_batches):
        then = (batch + 1) * batch_size if batch + 1 < num_batches else None
        begin_pass(trainer, blend, first_sample=batch * batch_size, then=then)
        with as_training_error(runtime.coord):
            trainer.executor.run(runtime.evaluation_program)
        total += trainer.loss
    total = trainer.device.to_host(total)
    sum_over_world(runtime.groups, runtime.coord, total, "the all-reduce of the validation loss")
    return total.item() / num_batches


def score_all_rows(trainer: Trainer, pairs: Samples, *, num_pairs: int) -> torch.Tensor:
    """Log-probabilities of all answers under the weights as they are: fp64 [2 * pairs] on the host, by place.

    One forward pass without dropout; collective over all ranks.
    """
    runtime, recorder = trainer.runtime, RowScores(num_pairs)
    objectives = {stage: runner.objective for stage, runner in trainer.runners.items()}
    for runner in trainer.runners.values():
        runner.objective = recorder
    batch_size = runtime.grid.plan.global_batch_size
    firsts = range(0, 2 * num_pairs, batch_size)
    for first in firsts:
        then = first + batch_size if first + batch_size < firsts.stop else None
        begin_pass(trainer, pairs, first_sample=first, then=then)
        with as_training_error(runtime.coord):
            trainer.executor.run(runtime.evaluation_program)
    for stage, runner in trainer.runners.items():
        runner.objective = objectives[stage]
    # Each rank of a tensor-parallel group has recorded the same.
    totals = torch.cat([recorder.scores, recorder.counts]) * (runtime.coord.tensor_rank == 0)
    sum_over_world(runtime.groups, runtime.coord, totals, "the sum of the reference's log-probabilities")
    scores, counts = totals.chunk(2)
    return scores / counts


def begin_pass(
    trainer: Trainer, blend: Samples, *, first_sample: int, then: int | None, scale: float = 1.0
) -> None:
    """Point the stage runners at their pipeline's share of the batch; that of batch `then` is read ahead."""
    runtime = trainer.runtime
    trainer.feed.begin(blend, first_sample, then=then)
    terms = num_terms(trainer.feed, runtime, blend, first_sample)
    if trainer.pair_loss is not None:
        trainer.pair_loss.measures.zero_()
    for runner in trainer.runners.values():
        runner.begin(
            first_sample=first_sample + runtime.grid.first_sequence(runtime.coord),
            num_terms=max(terms, 1),
            num_sequences=runtime.grid.plan.global_batch_size,
            scale=scale,
        )
