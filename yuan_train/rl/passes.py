"""Passes of a trainer over rows of answers: their micro-batches, in lanes as long as the rows need under any
plan, and what is made of each: the policy's loss, or a recording of log-probabilities.

A model that reads the policy's answers (`ReadingModel`: a reward model, or a teacher) is whole on every rank
of the policy, and the ranks share the answers. Its weights lie on the host, and on the card while it reads.
Rows are made in the same way under every plan and each is scored by one rank, so that the plan changes no bit
of a score.

B = rows of a micro-batch, S = tokens of a row, N = answer tokens of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.checkpoint.load import Checkpoint, find_checkpoint, load_weights
from yuan_train.config.errors import CheckpointError, PlanError
from yuan_train.config.rl import AlgorithmConfig, RLConfig
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.models.attention import DocumentResets, resets_at
from yuan_train.models.transformer import IGNORE_INDEX, Transformer, choose_ops
from yuan_train.objectives.losses import (
    BatchTotals,
    aggregate,
    aipo_loss,
    clipped_loss,
    decoupled_loss,
    divergence,
    loss_penalty,
)
from yuan_train.parallel.apply import make_lane
from yuan_train.parallel.device import CPU, Device
from yuan_train.parallel.executor import Executor
from yuan_train.parallel.groups import sum_over_world
from yuan_train.rl.experience import Answers, Rows, make_score_rows
from yuan_train.train.agreement import agreeing
from yuan_train.train.build import DTYPES
from yuan_train.train.engine import StepRequest, StepResult
from yuan_train.train.stage import MicroBatch, Passes, Targets
from yuan_train.train.step import Trainer, forward_pass, recording, train_step


class RowFeed(Passes):
    """The micro-batches of one rank's pipeline, out of the rows that are to be trained or scored next;
    `use` begins a batch, and how many tokens it trains is known where it is made."""

    def __init__(self, *, micro_batch_size: int, device: Device) -> None:
        super().__init__()
        self._size = micro_batch_size
        self._on_host = device.on_host
        self._rows: Rows | None = None
        self._first = 0

    def use(self, rows: Rows, *, first: int) -> None:
        """From now on rows are those of this batch; `first` is the first one of this rank's pipeline."""
        self._rows, self._first = rows, first

    def take(self, micro_batch: int) -> MicroBatch:
        """Rows of a micro-batch; those beyond the batch are padding. `places_B` are the rows' numbers."""
        rows = self._rows
        assert rows is not None
        first = self._first + micro_batch * self._size
        numbers = torch.arange(first, first + self._size)
        inside_B = numbers < rows.count
        held = numbers.where(inside_B, 0)
        tokens_BS = rows.tokens[held].where(inside_B.unsqueeze(1), 0)
        targets_BS = rows.targets[held].where(inside_B.unsqueeze(1), IGNORE_INDEX)
        # Padding behind a row's only answer is seen by none of its tokens.
        resets = resets_at(rows.starts[held]) if rows.shared else DocumentResets()
        experts_BSLK = None if rows.experts is None else rows.experts[held]
        numbers = numbers.where(inside_B, -1)
        place = self._on_host
        return MicroBatch(
            place(tokens_BS),
            place(targets_BS),
            resets.placed(place),
            0,
            numbers,
            None if experts_BSLK is None else place(experts_BSLK),
        )


class Lanes:
    """A trainer's lanes of as many micro-batches as a batch of rows needs."""

    def __init__(self, trainer: Trainer, feed: RowFeed) -> None:
        self.trainer = trainer
        """Of the plan's own lane."""
        self._feed = feed
        self._answers = Answers([])
        self._lanes: dict[tuple[int, ...], tuple[Trainer, tuple[int, ...]]] = {}

    def train(self, rows: Rows, request: StepRequest) -> StepResult:
        """One optimizer step on rows, as a request says but for its samples; see `train_step`."""
        trainer = self._use(rows)
        trainer.runtime.reducer.follow(trainer.runtime.program)
        return train_step(trainer, replace(request, samples=self._answers, first_sample=0, stop=False))

    def record(self, rows: Rows, count: int, numbers: Numbers, what: str) -> Tensor:
        """The numbers of `count` tokens, or answers, under the weights as they are: fp64 [N] on the host.

        Collective over all ranks.
        """
        trainer = self._use(rows)
        runtime, recorder = (
            trainer.runtime,
            TokenRecorder(rows.place.to(trainer.device.torch), count, numbers),
        )
        with recording(trainer, recorder):
            forward_pass(trainer, self._answers, first_sample=0, then=None)
        # Each rank of a tensor-parallel group has recorded the same.
        scores = recorder.scores * (runtime.coord.tensor_rank == 0)
        sum_over_world(runtime.groups, runtime.coord, scores, f"the sum of {what}")
        return scores

    def _use(self, rows: Rows) -> Trainer:
        """The trainer of a lane as long as rows need; the feed has them."""
        grid = self.trainer.runtime.grid
        pipelines = grid.plan.pipelines
        room = sum(pipeline.num_sequences for pipeline in pipelines)
        # Every replica of a stage has a micro-batch, if one of padding: a rank without any step ends none.
        least = [max(map(len, grid.workers(p))) for p in range(len(pipelines))]
        counts = tuple(
            max(own, -(-pipeline.num_micro_batches * rows.count // room))
            for own, pipeline in zip(least, pipelines, strict=True)
        )
        if counts not in self._lanes:
            self._lanes[counts] = self._make_lane(counts)
        trainer, counts = self._lanes[counts]
        before = range(self.trainer.runtime.coord.pipeline)
        self._feed.use(rows, first=sum(pipelines[p].micro_batch_size * counts[p] for p in before))
        return trainer

    def _make_lane(self, counts: tuple[int, ...]) -> tuple[Trainer, tuple[int, ...]]:
        """The trainer of a lane of so many micro-batches of each pipeline, or of the plan's own lane."""
        whole = self.trainer
        planned = tuple(pipeline.num_micro_batches for pipeline in whole.runtime.grid.plan.pipelines)
        if counts == planned:
            return whole, planned
        try:
            runtime = make_lane(whole.runtime, counts)
        except PlanError:
            # Some schedules take some numbers only: the rows that are not needed are padding.
            return whole, planned
        executor = Executor(whole.runners, runtime.bridge, whole.stopwatch)
        return replace(whole, runtime=runtime, executor=executor), counts


SUMS = ("ratio", "clipped", "kl", "tokens", "gap", "first_tokens")
"""What `PolicyLoss.sums` adds up over tokens; `maxima` has the ratio and the gap. The gap is of the first
update alone, which has `first_tokens`."""


@dataclass(frozen=True)
class PolicyBatch:
    """What the loss needs of the tokens of one update; [N] each, on the device."""

    place_RS: Tensor
    """int64: see `Rows.place`."""
    sampled: Tensor
    """Log-probability when it was drawn."""
    advantages: Tensor
    lengths: Tensor
    """Tokens of its answer."""
    totals: BatchTotals
    old: Tensor | None = None
    """Log-probability at the batch's start; None: the current one, without a gradient."""
    reference: Tensor | None = None


class PolicyLoss:
    """The loss of answers under an algorithm; `batch` is set before each update."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        *,
        correction: Literal["aipo", "decoupled", "none"],
        temperature: float,
        device: torch.device,
    ) -> None:
        self._algorithm, self._correction, self._temperature = algorithm, correction, temperature
        self.batch: PolicyBatch | None = None
        self._is_first = True
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(2, dtype=torch.float64, device=device)

    @property
    def needs_old(self) -> bool:
        """Whether it compares with the policy at a batch's start even in the first update."""
        return self._correction == "decoupled"

    def begin(self, batch: PolicyBatch, *, is_first: bool) -> None:
        """The next update is of this batch; with the first one, what is measured begins anew."""
        self.batch, self._is_first = batch, is_first
        if is_first:
            self.sums.zero_()
            self.maxima.zero_()

    def total(
        self, model: Transformer, hidden_BSH: Tensor, targets: Targets, *, gradient_scale: float
    ) -> Tensor:
        """This micro-batch's share of the batch's loss, a scalar."""
        batch, algorithm = self.batch, self._algorithm
        assert batch is not None
        place_BS, mask_BS = places(batch.place_RS, targets)
        log_probs = token_log_probs(model, hidden_BSH, targets, self._temperature)

        def of_tokens(values_N: Tensor) -> Tensor:
            return values_N[place_BS].to(log_probs)

        sampled, advantages = of_tokens(batch.sampled), of_tokens(batch.advantages)
        old = log_probs.detach() if batch.old is None else of_tokens(batch.old)
        clip, dual_clip = algorithm.clip, algorithm.dual_clip
        if self._correction == "aipo":
            losses = aipo_loss(log_probs, sampled, advantages, rho=algorithm.rho)
        elif self._correction == "decoupled":
            losses = decoupled_loss(
                log_probs, old, sampled, advantages, rho=algorithm.rho, clip=clip, dual_clip=dual_clip
            )
        else:
            losses = clipped_loss(log_probs, old, advantages, clip=clip, dual_clip=dual_clip)
        kl = algorithm.kl
        penalty = None
        if batch.reference is not None:
            reference = of_tokens(batch.reference)
            penalty = divergence(log_probs.detach(), reference, kl.estimator)
            if kl.where == "loss" and kl.coefficient:
                losses = losses + loss_penalty(log_probs, reference, kl.estimator, coefficient=kl.coefficient)
        self._measure(log_probs.detach(), sampled, old, penalty, mask_BS)
        assert algorithm.normalise is not None
        return aggregate(losses, mask_BS, of_tokens(batch.lengths), algorithm.normalise, batch.totals)

    def _measure(
        self, log_probs: Tensor, sampled: Tensor, old: Tensor, penalty: Tensor | None, mask_BS: Tensor
    ) -> None:
        """Add up what the metrics tell of the tokens, before anything is clipped."""
        gap = (log_probs - sampled)[mask_BS].double()
        if not gap.numel():
            return
        ratio, low, high = gap.exp(), 1 - self._algorithm.clip[0], 1 + self._algorithm.clip[1]
        if self._correction == "aipo":
            clipped = ratio > self._algorithm.rho
        else:
            since_start = (log_probs - old)[mask_BS].double().exp()
            clipped = (since_start < low) | (since_start > high)
        distance = penalty[mask_BS].double().sum() if penalty is not None else gap.new_zeros(())
        count = gap.new_tensor(gap.numel())
        # Behind a step the policy is another one: no longer a gap of what both sides compute.
        distances = gap.abs() if self._is_first else torch.zeros_like(gap)
        self.sums += torch.stack(
            [ratio.sum(), clipped.double().sum(), distance, count, distances.sum(), count * self._is_first]
        )
        self.maxima = torch.maximum(self.maxima, torch.stack([ratio.max(), distances.max()]))


Numbers = Callable[[Transformer, Tensor, Targets, Tensor], Tensor]
"""Of a model, the hidden state and the targets of a micro-batch, and where it has what is recorded, bool
[B, S]: a number of each such place, in their order."""


class TokenRecorder:
    """An objective that records a number of each token, or answer, in a forward pass; its loss is 0.

    `scores` fp64 [N] on the host: those that this rank has seen, else 0.
    """

    def __init__(self, place_RS: Tensor, count: int, numbers: Numbers) -> None:
        self._place_RS, self._numbers = place_RS, numbers
        self.scores = torch.zeros(count, dtype=torch.float64)

    def total(
        self, model: Transformer, hidden_BSH: Tensor, targets: Targets, *, gradient_scale: float
    ) -> Tensor:
        """Record; returns 0."""
        place_BS, mask_BS = places(self._place_RS, targets)
        found = self._numbers(model, hidden_BSH, targets, mask_BS)
        self.scores[place_BS[mask_BS].cpu()] = found.double().cpu()
        return hidden_BSH.new_zeros((), dtype=torch.float64)


def log_probs_at(temperature: float) -> Numbers:
    """Log-probabilities of tokens."""

    def numbers(model: Transformer, hidden_BSH: Tensor, targets: Targets, mask_BS: Tensor) -> Tensor:
        return token_log_probs(model, hidden_BSH, targets, temperature)[mask_BS]

    return numbers


def token_values(model: Transformer, hidden_BSH: Tensor, targets: Targets, mask_BS: Tensor) -> Tensor:
    """A critic's values of the states before tokens."""
    return model.scores(hidden_BSH)[mask_BS]


def last_values(model: Transformer, hidden_BSH: Tensor, targets: Targets, mask_BS: Tensor) -> Tensor:
    """A reward model's values at the last tokens of sequences."""
    return model.scores(hidden_BSH[mask_BS])


def token_log_probs(model: Transformer, hidden_BSH: Tensor, targets: Targets, temperature: float) -> Tensor:
    """Log-probabilities [B, S] of the targets under softmax(logits / temperature); 0 where there is none."""
    # As in the draw: both divide the hidden state.
    scaled_BSH = hidden_BSH if temperature == 1 else hidden_BSH / temperature
    return -model.loss(scaled_BSH, targets.targets_BS, reduction="none")


def places(place_RS: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """The token of each position of a micro-batch (0 for none), and where there is one; [B, S]."""
    assert targets.places_B is not None
    rows_B = targets.places_B.to(place_RS.device)
    place_BS = place_RS[rows_B].where((rows_B >= 0).unsqueeze(1), -1)
    return place_BS.clamp(min=0), place_BS >= 0


def find_reading_model(run: RLConfig, tokenizer: Tokenizer | None) -> Checkpoint | None:
    """The checkpoint of `reward.model` or `reward.teacher`, or None. Raises CheckpointError if it cannot read
    the answers."""
    if run.reward.reader is None:
        return None
    teaches = run.reward.teacher is not None
    found = find_checkpoint(run.reward.reader.checkpoint)
    model = found.model
    where = f"reward.{'teacher' if teaches else 'model'}.checkpoint: {found.path}"
    if model.output != run.reward.wanted_output:
        raise CheckpointError(
            f"{where} holds a reward model, which knows no probability of a token; wanted a language model, "
            "or reward.model for it"
            if teaches
            else f"{where} holds a language model, which has no score; wanted one that `yuan-train train` "
            "made with objective.kind: reward, or reward.teacher for it"
        )
    if model.vocab_size != run.model.vocab_size:
        raise CheckpointError(
            f"{where} has a vocabulary of {model.vocab_size}, the policy one of {run.model.vocab_size}; it "
            "reads the policy's tokens, so wanted one of the policy's tokenizer"
        )
    if found.tokenizer is not None and tokenizer is not None:
        own = Tokenizer.load(found.tokenizer)
        if own.digest != tokenizer.digest:
            raise CheckpointError(
                f"{where} was trained with another tokenizer than data.tokenizer {tokenizer.path}; it reads "
                "the policy's tokens, so wanted one of the policy's tokenizer"
            )
    if model.max_sequence_length < run.sequence_length:
        raise CheckpointError(
            f"{where} reads {model.max_sequence_length} tokens (model.max_sequence_length), but a prompt and "
            f"an answer may have {run.sequence_length}; shorten generation.max_new_tokens, or take another"
        )
    return found


class ReadingModel:
    """Reads answers; every rank calls the same, at the same time."""

    def __init__(self, checkpoint: Checkpoint, run: RLConfig, trainer: Trainer) -> None:
        """Read the weights. Raises CheckpointError, on all ranks, if they cannot be read."""
        self._trainer = trainer
        self._length = run.sequence_length
        self._rows = run.train.micro_batch_size
        self._packed = run.train.pack
        self._temperature = run.generation.temperature
        choose_ops(checkpoint.model, trainer.device.torch, DTYPES[run.train.precision])
        self._model = Transformer(checkpoint.model, dtype=DTYPES[run.train.precision]).eval()
        with agreeing():
            load_weights(checkpoint, self._model)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The value at the last token of each sequence, a prompt and its answer.

        Where rows are packed, no sequence sees another. A value may be not finite.
        """
        if not sequences:
            return []
        rows = make_score_rows(sequences, length=self._length, packed=self._packed)
        return self._read(rows, len(sequences), last_values).tolist()

    def log_probs(self, batches: Sequence[Rows], counts: Sequence[int]) -> Tensor:
        """Of a teacher, the log-probability of each token of some batches of rows, of so many each: fp64 [N]
        on the host."""
        numbers = log_probs_at(self._temperature)
        pairs = zip(batches, counts, strict=True)
        return torch.cat([self._read(rows, count, numbers) for rows, count in pairs])

    def _read(self, rows: Rows, count: int, numbers: Numbers) -> Tensor:
        """What is recorded of rows, each read by one rank; on all of them."""
        feed = RowFeed(micro_batch_size=self._rows, device=CPU)
        feed.use(rows, first=0)
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        device = self._trainer.device.torch
        recorder = TokenRecorder(rows.place.to(device), count, numbers)
        self._model.to(device)
        with torch.no_grad():
            for number in range(rank, -(-rows.count // self._rows), num_ranks):
                batch = feed.take(number)
                assert batch.tokens_BS is not None and batch.targets_BS is not None
                hidden_BSH = self._model(batch.tokens_BS.to(device), **batch.resets.on(device))
                targets = Targets(batch.targets_BS.to(device), batch.places_B)
                recorder.total(self._model, hidden_BSH, targets, gradient_scale=1.0)
        self._model.to("cpu")
        runtime = self._trainer.runtime
        sum_over_world(runtime.groups, runtime.coord, recorder.scores, "the sum of a reading model's scores")
        return recorder.scores


def score_error(scores: Sequence[float]) -> str | None:
    """What is wrong with the scores of a group, if anything."""
    odd = next((score for score in scores if not math.isfinite(score)), None)
    return None if odd is None else f"the reward model: gave {odd}, no finite number"
