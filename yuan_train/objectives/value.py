"""The loss of a critic's values, and how much of the returns they explain."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None = 0.5) -> Tensor:
    """0.5 max((V - R)^2, (clip(V, o - c, o + c) - R)^2), a number a token; o are the values at the batch's
    start, R the returns. Without `clip` 0.5 (V - R)^2.

    The value term of PPO (Schulman et al. 2017, arXiv 1707.06347), clipped as its authors' code does.
    """
    squares = (values - returns).square()
    if clip is not None:
        near = old + (values - old).clamp(-clip, clip)
        squares = torch.maximum(squares, (near - returns).square())
    return 0.5 * squares


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - var(R - V) / var(R): 1 where values tell all, 0 where nothing; None if all R are equal."""
    variance = returns.var(correction=0)
    return float(1 - (returns - values).var(correction=0) / variance) if variance > 0 else None
