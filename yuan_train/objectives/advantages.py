"""Advantages: how much better an answer, or a token of it, was than expected.

Q = prompts, G = answers to each (a group), B = answers, S = tokens of a row. Rewards are one number an
answer. The functions return a number an answer, [Q, G], or, where they whiten over tokens, a number a token.
It stands alone because losses, which serve all training, know no rewards.
"""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL; OpenRLHF adds 1e-9, verl 1e-6."""
VARIANCE_EPSILON = 1e-8


def grpo(rewards_QG: Tensor) -> Tensor:
    """(r - mean r) / (std r + 1e-4) in each group, std unbiased; [Q, G].

    Shao et al. 2024 (arXiv 2402.03300, section 4.1.2). Exactly 0 in a group of equal rewards.
    """
    return dr_grpo(rewards_QG) / (rewards_QG.std(1, keepdim=True) + STD_EPSILON)


def dr_grpo(rewards_QG: Tensor) -> Tensor:
    """r - mean r of the group; [Q, G]. Liu et al. 2025 (arXiv 2503.20783)."""
    _check_group(rewards_QG)
    # In exact arithmetic the same as r - mean r, and exactly 0 where all rewards are equal.
    shifted_QG = rewards_QG - rewards_QG[:, :1]
    return shifted_QG - shifted_QG.mean(1, keepdim=True)


def rloo(rewards_QG: Tensor) -> Tensor:
    """r - mean of the group's other rewards; [Q, G]. Ahmadian et al. 2024 (arXiv 2402.14740, eq. 8)."""
    group = rewards_QG.shape[1]
    return dr_grpo(rewards_QG) * (group / (group - 1))


def reinforce_baseline(rewards_QG: Tensor, mask_BS: Tensor) -> Tensor:
    """r - mean r of the group, whitened over the batch's tokens; [B, S], B = Q * G group by group.

    REINFORCE++-baseline, Hu et al. 2025 (arXiv 2501.03262).
    """
    return whiten(dr_grpo(rewards_QG).reshape(-1, 1).expand(mask_BS.shape), mask_BS)


def reinforce_plus_plus(rewards_B: Tensor, penalty_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Returns, whitened over the batch's tokens; [B, S]. Hu et al. 2025 (arXiv 2501.03262)."""
    return whiten(returns(rewards_B, penalty_BS, mask_BS), mask_BS)


def gae(
    rewards_B: Tensor,
    penalty_BS: Tensor,
    values_BS: Tensor,
    mask_BS: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages, whitened over the batch's tokens, and the returns to fit values to; [B, S].

    d_t = r_t + gamma V_{t+1} - V_t; A_t = d_t + gamma lam A_{t+1}; return A_t + V_t (before whitening).
    Schulman et al. 2016 (arXiv 1506.02438, eq. 11 to 16). `values_BS` are the critic's, of the state before
    each token.
    """
    rewards_BS = token_rewards(rewards_B, penalty_BS, mask_BS)
    values_BS = values_BS.where(mask_BS, 0)
    advantages_BS = torch.zeros_like(rewards_BS)
    later_B = next_value_B = torch.zeros_like(rewards_B)
    for t in reversed(range(mask_BS.shape[1])):
        inside_B = mask_BS[:, t]
        delta_B = rewards_BS[:, t] + gamma * next_value_B - values_BS[:, t]
        # A token that is not trained (of a tool, say) is passed over: its successor follows its predecessor.
        later_B = torch.where(inside_B, delta_B + gamma * lam * later_B, later_B)
        next_value_B = torch.where(inside_B, values_BS[:, t], next_value_B)
        advantages_BS[:, t] = later_B.where(inside_B, 0)
    return whiten(advantages_BS, mask_BS), advantages_BS + values_BS


def returns(rewards_B: Tensor, penalty_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """R_t = sum over s >= t of the rewards of tokens, without discount; [B, S], 0 outside the mask."""
    rewards_BS = token_rewards(rewards_B, penalty_BS, mask_BS)
    return rewards_BS.flip(1).cumsum(1).flip(1).where(mask_BS, 0)


def token_rewards(rewards_B: Tensor, penalty_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Rewards of tokens [B, S]: the answer's at its last trained token, less the penalty of each token."""
    positions_S = torch.arange(mask_BS.shape[1], device=mask_BS.device)
    last_B = torch.where(mask_BS, positions_S, -1).amax(1, keepdim=True)
    at_end_BS = mask_BS & (positions_S == last_B)
    return (rewards_B.unsqueeze(1) * at_end_BS - penalty_BS).where(mask_BS, 0)


def whiten(advantages_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over the trained tokens of the batch, 0 elsewhere; var is biased."""
    inside_N = advantages_BS[mask_BS]
    if not inside_N.numel():
        return torch.zeros_like(advantages_BS)
    mean = inside_N.mean()
    variance = (inside_N - mean).square().mean()
    return ((advantages_BS - mean) * torch.rsqrt(variance + VARIANCE_EPSILON)).where(mask_BS, 0)


def _check_group(rewards_QG: Tensor) -> None:
    if rewards_QG.dim() != 2 or rewards_QG.shape[1] < 2:
        raise ValueError(
            f"rewards {list(rewards_QG.shape)}: wanted [prompts, group] with a group of 2 or more answers, "
            "whose mean is what is expected"
        )
