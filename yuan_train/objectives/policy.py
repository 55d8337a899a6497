"""Losses of the tokens of sampled answers; `aggregate` makes one number of them.

All arguments have a number a token, or broadcast to that: `log_probs` of the policy (l), `old` of the policy
at the batch's start (o; l itself, detached, if a batch is one step), `sampled` of the policy that drew the
token (m), advantages (A).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
