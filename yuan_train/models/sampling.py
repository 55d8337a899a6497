"""Draws of tokens that follow from a seed and a place alone: no generator, no sort, no running sum.

With Gumbel noise g the argmax of logit / T + g is a draw from softmax(logit / T) (Maddison et al. 2014). The
noise of word v is hashed, as the masks of dropout are, so that any rank, in any batch, draws the same.

N = draws, R = rows of logits, V = words of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from yuan_train.models.dropout import Keys, hash_keys, hashes
from yuan_train.models.transformer import Transformer

NOISE_ELEMENTS = 1 << 22
"""Words of all rows whose noise is in memory at once."""
CACHED_ELEMENTS = 1 << 16
"""The same on a CPU, whose cache holds them through the passes that make noise of them."""


def draw_keys(seed: int, ticket: int | str, sample: int, position: int) -> Keys:
    """The keys of the noise of one token: number `position` of an answer of a prompt."""
    return hash_keys(f"{seed}:{ticket}:{sample}:{position}:token")


@torch.no_grad()
def draw(
    model: Transformer,
    hidden_RH: Tensor,
    rows: Sequence[int],
    keys: Sequence[Keys],
    *,
    temperature: float,
    greedy: bool = False,
) -> Tensor:
    """Draw N tokens: fp64 [N, 2] on the host, the token and its log-probability under softmax(logits / T).

    `hidden_RH` is `forward`'s hidden state; draw n is of row `rows[n]` with the noise of `keys[n]`; `greedy`
    takes the most probable word instead, and no keys. A word of a logit that is not finite is never hidden:
    the log-probability is then not finite either. Under tensor parallelism collective over its ranks.
    """
    logits_RV = model.logits(hidden_RH / temperature if temperature != 1 else hidden_RH).double()
    first = model.vocabulary_part.first if model.vocabulary_part is not None else 0
    total_R = logits_RV.logsumexp(1)
    most = CACHED_ELEMENTS if logits_RV.device.type == "cpu" and not greedy else NOISE_ELEMENTS
    chunk = max(1, most // logits_RV.shape[1])
    every = len(rows) == len(logits_RV) and tuple(rows) == tuple(range(len(rows)))
    parts: list[Tensor] = []
    for start in range(0, len(rows), chunk):
        if every:
            score_NV, total_N = logits_RV[start : start + chunk], total_R[start : start + chunk]
        else:
            chosen = torch.tensor(rows[start : start + chunk], device=logits_RV.device)
            score_NV, total_N = logits_RV[chosen], total_R[chosen]
        if greedy:
            best_N, word_N = score_NV.max(1)
            logit_N = best_N
        else:
            best_N, word_N = _noise(score_NV, keys[start : start + chunk], first).add_(score_NV).max(1)
            logit_N = score_NV.gather(1, word_N.unsqueeze(1)).squeeze(1)
        parts.append(torch.stack([best_N, (word_N + first).double(), total_N, logit_N], 1))
    found_N4 = parts[0] if len(parts) == 1 else torch.cat(parts)
    if model.vocabulary_part is None:
        return torch.stack([found_N4[:, 1], found_N4[:, 3] - found_N4[:, 2]], 1).cpu()
    all_TN4 = model.vocabulary_part.gather(found_N4)
    winner_N = all_TN4[:, :, 0].argmax(0)
    word_N, logit_N = (all_TN4[:, :, i].gather(0, winner_N.unsqueeze(0)).squeeze(0) for i in (1, 3))
    return torch.stack([word_N, logit_N - all_TN4[:, :, 2].logsumexp(0)], 1).cpu()


def _noise(like_NV: Tensor, keys: Sequence[Keys], first: int) -> Tensor:
    """Gumbel noise -log(-log u), u uniform over (0, 1), of words first .. first + V - 1."""
    keys_3N1 = torch.tensor(keys).t().unsqueeze(-1).to(like_NV.device)
    found_NV = hashes(like_NV.shape[1], keys_3N1, first=first, device=like_NV.device).double()
    uniform_NV = found_NV.add_(0.5).div_(2**32)
    return uniform_NV.log_().neg_().log_().neg_()
