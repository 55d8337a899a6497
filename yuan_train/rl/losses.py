"""The policy's loss on a micro-batch of answers, and the recording of log-probabilities.

B = rows of a micro-batch, S = tokens of a row, N = answer tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from yuan_train.config.rl import AlgorithmConfig
from yuan_train.models.transformer import Transformer
from yuan_train.objectives.losses import (
    BatchTotals,
    aggregate,
    aipo_loss,
    clipped_loss,
    decoupled_loss,
    divergence,
    loss_penalty,
)
from yuan_train.train.objective import Targets

SUMS = ("ratio", "clipped", "kl", "tokens", "gap", "first_tokens")
"""What `PolicyLoss.sums` adds up over tokens; `maxima` has the ratio and the gap. The gap is of the first
update alone, which has `first_tokens`."""


@dataclass(frozen=True)
class Batch:
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
        self._algorithm = algorithm
        self._correction = correction
        self._temperature = temperature
        self.batch: Batch | None = None
        self._is_first = True
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(2, dtype=torch.float64, device=device)

    @property
    def needs_old(self) -> bool:
        """Whether it compares with the policy at a batch's start even in the first update."""
        return self._correction == "decoupled"

    def begin(self, batch: Batch, *, is_first: bool) -> None:
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
            [
                ratio.sum(),
                clipped.double().sum(),
                distance,
                count,
                distances.sum(),
                count * self._is_first,
            ]
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
        self._place_RS = place_RS
        self._numbers = numbers
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
