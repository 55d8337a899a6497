"""Losses of post-training, on log-probabilities and masks.

Losses of the tokens of sampled answers; `aggregate` makes one number of them.

All arguments have a number a token, or broadcast to that: `log_probs` of the policy (l), `old` of the policy
at the batch's start (o; l itself, detached, if a batch is one step), `sampled` of the policy that drew the
token (m), advantages (A).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PreferenceLoss = Literal["sigmoid", "ipo"]


def log_ratio_margin(
    chosen_P: Tensor, rejected_P: Tensor, chosen_reference_P: Tensor, rejected_reference_P: Tensor
) -> Tensor:
    """(l_c - l_r) - (f_c - f_r) [P]: how much more than its reference a policy prefers the chosen answer.

    All are log-probabilities of whole answers: sums over their tokens.
    """
    return (chosen_P - rejected_P) - (chosen_reference_P - rejected_reference_P)


def preference_loss(
    margin_P: Tensor, *, beta: float, smoothing: float = 0.0, loss: PreferenceLoss = "sigmoid"
) -> Tensor:
    """The loss [P] of `log_ratio_margin`s h.

        sigmoid  -log sigmoid(beta h)    DPO, Rafailov et al. 2023 (arXiv 2305.18290, eq. 7)
        ipo      (h - 1 / (2 beta))^2    Azar et al. 2023 (arXiv 2310.12036, eq. 17)

    `smoothing` e is the probability that a pair's label is wrong: (1 - e) loss(h) + e loss(-h), cDPO
    (Mitchell 2023). It goes with `sigmoid`.
    """
    if loss == "ipo":
        return (margin_P - 1 / (2 * beta)).square()
    kept_P = -logsigmoid(beta * margin_P)
    if not smoothing:
        return kept_P
    return (1 - smoothing) * kept_P - smoothing * logsigmoid(-beta * margin_P)


def reward_loss(chosen_P: Tensor, rejected_P: Tensor, *, margin: float = 0.0) -> Tensor:
    """-log sigmoid(s_c - s_r - margin) [P] of two answers' scores (Bradley and Terry 1952).

    As for reward models in Ouyang et al. 2022 (arXiv 2203.02155, eq. 1), the margin in Touvron et al. 2023
    (arXiv 2307.09288, eq. 2).
    """
    return -logsigmoid(chosen_P - rejected_P - margin)


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


def clipped_loss(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = None,
) -> Tensor:
    """-min(u A, clamp(u, 1 - low, 1 + high) A), u = exp(l - o).

    Schulman et al. 2017 (arXiv 1707.06347, eq. 7); unlike bounds are DAPO's (Yu et al. 2025, eq. 10). With
    `dual_clip` c > 1, where A < 0: -max(that minimum, c A), Ye et al. 2020 (arXiv 1912.09729, eq. 8).
    """
    ratio = (log_probs - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantages)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
    return -gain


def aipo_loss(log_probs: Tensor, sampled: Tensor, advantages: Tensor, *, rho: float) -> Tensor:
    """-sg(min(exp(l - m), rho)) A l, where sg has no gradient: every token keeps one, rho A grad l at most.

    LlamaRL's asynchronous importance-weighted policy optimisation (Wu et al. 2025, arXiv 2505.24034); the
    same as TRL's `cispo` with `epsilon_high = rho`. A clamp of a ratio that is not detached, which others
    have under this name, gives clipped tokens no gradient.
    """
    weight = (log_probs.detach() - sampled).exp().clamp(max=rho)
    return -weight * advantages * log_probs


def decoupled_loss(
    log_probs: Tensor,
    old: Tensor,
    sampled: Tensor,
    advantages: Tensor,
    *,
    rho: float,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = None,
) -> Tensor:
    """sg(min(exp(o - m), rho)) times `clipped_loss`: the clip is around the batch's start, not the sampler.

    Hilton et al. 2022 (arXiv 2110.00641); AReaL (Fu et al. 2025, arXiv 2505.24298, eq. 5).
    """
    weight = (old.detach() - sampled).exp().clamp(max=rho)
    return weight * clipped_loss(log_probs, old, advantages, clip=clip, dual_clip=dual_clip)
