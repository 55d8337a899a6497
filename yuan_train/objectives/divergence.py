"""Estimates of KL(policy || reference) from one sampled token, and what they cost.

With d = log reference - log policy (Schulman, "Approximating KL divergence", 2020):

    k1  -d              unbiased, any sign
    k2  d^2 / 2         biased, small variance; its gradient is the KL's
    k3  exp(d) - d - 1  unbiased, never negative
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def divergence(log_probs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """The estimate of each token."""
    d = reference - log_probs
    if estimator == "k1":
        return -d
    return d.square() / 2 if estimator == "k2" else d.exp() - d - 1


def loss_penalty(log_probs: Tensor, reference: Tensor, estimator: Estimator, *, coefficient: float) -> Tensor:
    """What is added to each token's loss: coefficient * k.

    Raises ValueError for k1: its gradient, that of the log-probability, has a mean of zero.
    """
    if estimator == "k1":
        raise ValueError("k1 in the loss has a mean gradient of zero; use k2 or k3, or put k1 in the reward")
    return coefficient * divergence(log_probs, reference, estimator)


def reward_penalty(
    log_probs: Tensor, reference: Tensor, estimator: Estimator, *, coefficient: float
) -> Tensor:
    """What is taken from each token's reward: coefficient * k, without a gradient."""
    return coefficient * divergence(log_probs, reference, estimator).detach()
