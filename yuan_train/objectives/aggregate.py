"""From a loss per token to one number of a global batch, whatever part of the batch a rank holds.

B = rows, S = tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Normalise = Literal["sequence", "token", "constant"]


@dataclass(frozen=True)
class BatchTotals:
    """Counts over the whole global batch, known before any rank's loss: every rank divides by the same."""

    samples: int
    tokens: int
    """Trained tokens."""
    max_new_tokens: int = 0
    """Longest answer that was allowed; `constant` needs it."""


def sample_lengths(mask_BS: Tensor) -> Tensor:
    """Trained tokens of the sample of each token, int64 [B, 1], where a row is one sample."""
    return mask_BS.sum(1, keepdim=True)


def aggregate(
    losses_BS: Tensor, mask_BS: Tensor, lengths_BS: Tensor, normalise: Normalise, totals: BatchTotals
) -> Tensor:
    """This part's share of the batch's loss, a scalar: the shares of all parts add up to the loss.

        sequence  1/B sum_i 1/|o_i| sum_t L     (GRPO, Shao et al. 2024, arXiv 2402.03300, eq. 3)
        token     sum L / all trained tokens    (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 8)
        constant  sum L / (B * max_new_tokens)  (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783)

    `lengths_BS` has the trained tokens of the sample that a token belongs to: `sample_lengths`, or [B, S] if
    rows are packed from several samples. Raises ValueError for `constant` without `max_new_tokens`.
    """
    masked_BS = losses_BS.where(mask_BS, 0)
    if normalise == "sequence":
        return (masked_BS / lengths_BS.clamp(min=1)).sum() / totals.samples
    if normalise == "token":
        return masked_BS.sum() / max(totals.tokens, 1)
    if totals.max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens {totals.max_new_tokens}: 'constant' divides by it; wanted 1 or more"
        )
    return masked_BS.sum() / (totals.samples * totals.max_new_tokens)
