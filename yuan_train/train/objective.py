"""What the last stage makes of its hidden state: a run's loss, or the scores of rows for a reference.

B = rows of a micro-batch; of preference pairs rows 2i and 2i + 1 are the chosen and the rejected answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from yuan_train.config.run import ObjectiveConfig
from yuan_train.models.transformer import IGNORE_INDEX, Transformer
from yuan_train.objectives.losses import log_ratio_margin, preference_loss, reward_loss


@dataclass(frozen=True)
class Targets:
    """What the last stage needs of a micro-batch, on the device."""

    targets_BS: Tensor
    places_B: Tensor | None = None
    """See `Batch.places`; on the host."""


class Objective(Protocol):
    """The loss of a micro-batch, as a sum over the terms of the batch's mean."""

    def total(
        self, model: Transformer, hidden_BSH: Tensor, targets: Targets, *, gradient_scale: float
    ) -> Tensor:
        """The sum, a scalar; the backward will pass `gradient_scale` to it."""
        ...


class TokenLoss:
    """The cross-entropy of the next token, of all tokens with a target."""

    def total(
        self, model: Transformer, hidden_BSH: Tensor, targets: Targets, *, gradient_scale: float
    ) -> Tensor:
        """The sum over tokens."""
        return model.loss(hidden_BSH, targets.targets_BS, gradient_scale=gradient_scale)


class PairLoss:
    """The loss of preference pairs: DPO's against a reference, or a reward model's.

    `measures` fp64 [2] adds up, over the pairs since it was reset, whether the chosen answer comes out ahead,
    and by how much: of DPO in implicit rewards beta (l - f), of a reward model in scores.
    """

    def __init__(self, config: ObjectiveConfig, *, device: torch.device) -> None:
        self._config = config
        self.reference: Tensor | None = None
        """Of DPO, fp64 [2 * pairs]: log-probabilities of answers under the reference, by place."""
        self.measures = torch.zeros(2, dtype=torch.float64, device=device)

    def total(
        self, model: Transformer, hidden_BSH: Tensor, targets: Targets, *, gradient_scale: float
    ) -> Tensor:
        """The sum over pairs."""
        config = self._config
        chosen_P, rejected_P = (
            row_scores(model, hidden_BSH, targets.targets_BS).unflatten(0, (-1, 2)).unbind(1)
        )
        if config.kind == "reward":
            assert config.margin is not None
            losses_P = reward_loss(chosen_P, rejected_P, margin=config.margin)
            ahead_P = chosen_P - rejected_P
        else:
            assert self.reference is not None and targets.places_B is not None
            assert config.beta is not None and config.smoothing is not None and config.loss is not None
            known_P2 = self.reference[targets.places_B].to(chosen_P).unflatten(0, (-1, 2))
            margin_P = log_ratio_margin(chosen_P, rejected_P, *known_P2.unbind(1))
            losses_P = preference_loss(
                margin_P, beta=config.beta, smoothing=config.smoothing, loss=config.loss
            )
            ahead_P = config.beta * margin_P
        ahead_P = ahead_P.detach().double()
        self.measures += torch.stack([(ahead_P > 0).double().sum(), ahead_P.sum()])
        return losses_P.sum()


class RowScores:
    """Records the log-probabilities of rows, for a forward pass over all pairs; its loss is 0.

    `scores` and `counts` are fp64 [2 * pairs] on the host: a sum, and of how many passes over a row.
    """

    def __init__(self, num_pairs: int) -> None:
        self.scores = torch.zeros(2 * num_pairs, dtype=torch.float64)
        self.counts = torch.zeros(2 * num_pairs, dtype=torch.float64)

    def total(
        self, model: Transformer, hidden_BSH: Tensor, targets: Targets, *, gradient_scale: float
    ) -> Tensor:
        """Record; returns 0."""
        assert targets.places_B is not None
        found_B = row_scores(model, hidden_BSH, targets.targets_BS).detach().double().cpu()
        self.scores.index_add_(0, targets.places_B, found_B)
        self.counts.index_add_(0, targets.places_B, torch.ones_like(found_B))
        return found_B.new_zeros(()).to(hidden_BSH.device)


def row_scores(model: Transformer, hidden_BSH: Tensor, targets_BS: Tensor) -> Tensor:
    """A number a row [B]: the log-probability of its targets, or of a value model the sum of scores there."""
    if model.config.output == "vocabulary":
        return -model.loss(hidden_BSH, targets_BS, reduction="none").sum(1)
    return model.scores(hidden_BSH).where(targets_BS != IGNORE_INDEX, 0).sum(1)
