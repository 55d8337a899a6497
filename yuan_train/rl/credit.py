"""Advantages of a batch's tokens, from the rewards of its groups.

Q = prompts, G = answers to each, B = Q * G answers, T = tokens of the longest, N = tokens of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from yuan_train.config.rl import AlgorithmConfig, CriticConfig
from yuan_train.objectives import advantages as kinds
from yuan_train.rl.experience import Group


def lengths_of(groups: Sequence[Group]) -> list[int]:
    """Tokens of each answer."""
    return [len(sample.ids) for group in groups for sample in group.samples]


def token_advantages(
    groups: Sequence[Group], algorithm: AlgorithmConfig, *, penalty_N: Tensor | None = None
) -> Tensor:
    """Advantages fp64 [N], by answer. `penalty_N`: what each token loses of the reward.

    What compares the answers of a group takes the penalties of an answer's tokens from its reward; `return`
    takes each from that token on.
    """
    mask_BT, penalty_BT = _by_answer(groups, penalty_N)
    rewards_QG = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
    if algorithm.advantage == "return":
        found_BT = kinds.returns(rewards_QG.flatten(), penalty_BT, mask_BT)
    else:
        rewards_QG = rewards_QG - penalty_BT.sum(1).view_as(rewards_QG)
        found_BT = _of_answers(rewards_QG, algorithm).reshape(-1, 1).expand(mask_BT.shape)
    if algorithm.scale == "batch":
        found_BT = kinds.whiten(found_BT, mask_BT)
    return found_BT[mask_BT]


def critic_advantages(
    groups: Sequence[Group], values_N: Tensor, critic: CriticConfig, *, penalty_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantages, whitened, and the returns to fit values to: fp64 [N] each, by answer.

    `values_N` are the critic's, of the state before each token; `penalty_N`: see `token_advantages`.
    """
    rewards_B = torch.tensor([r for group in groups for r in group.rewards], dtype=torch.float64)
    mask_BT, penalty_BT = _by_answer(groups, penalty_N)
    values_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    values_BT[mask_BT] = values_N.double()
    advantages_BT, returns_BT = kinds.gae(
        rewards_B, penalty_BT, values_BT, mask_BT, gamma=critic.gamma, lam=critic.lam
    )
    return advantages_BT[mask_BT], returns_BT[mask_BT]


def _by_answer(groups: Sequence[Group], penalty_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where answers have tokens, and what each token loses of the reward: [B, T] both."""
    lengths = torch.tensor(lengths_of(groups))
    mask_BT = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    penalty_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    if penalty_N is not None:
        penalty_BT[mask_BT] = penalty_N.double()
    return mask_BT, penalty_BT


def _of_answers(rewards_QG: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    if algorithm.advantage == "leave_one_out":
        found_QG = kinds.rloo(rewards_QG)
    else:
        found_QG = kinds.dr_grpo(rewards_QG)
    if algorithm.scale == "group":
        found_QG = found_QG / (rewards_QG.std(1, keepdim=True) + kinds.STD_EPSILON)
    return found_QG
