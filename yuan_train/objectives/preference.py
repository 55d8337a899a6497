"""Losses of pairs of answers, of which one is preferred; one number a pair.

P = pairs.
"""

from __future__ import annotations

from typing import Literal

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
