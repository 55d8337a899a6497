"""The attention router of Yuan 2.0-M32 (arXiv 2405.17976, section 3.1): experts attend to each other.

    (q, k, v) = products      p_i = sum_j softmax_j(q_i k_j) v_j      w = softmax of p at the chosen experts

Every query, key and value is one number, and there is no scale. The choice is made once, without a gradient;
the weights are then a function of the products and of the choice, so that the backward needs only the rows i
that were chosen. It computes their softmax again: nothing of size experts^2 is kept.

    s_ij = softmax_j(q_i k_j)      da_ij = dp_i s_ij (v_j - p_i)
    dq_i = sum_j da_ij k_j      dk_j = sum_i da_ij q_i      dv_j = sum_i s_ij dp_i
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from yuan_kernels import dispatch, reference, registration
from yuan_kernels.reference import blocks

_TOKENS = 4096
"""Tokens whose softmax over pairs of experts exists at once."""


def attention_scores(products: Tensor) -> Tensor:
    """Return the attention router's score of each expert [T, N] of products [T, 3N] = (q, k, v).

    p_i = sum_j softmax_j(q_i k_j) v_j (arXiv 2405.17976, section 3.1). Without a gradient.
    """
    with torch.no_grad():
        return torch.cat(
            [
                reference.attention_scores(products[rows])
                for rows in blocks(max(1, products.shape[0]), _TOKENS)
            ]
        )


def attention_router_weights(products: Tensor, chosen: Tensor) -> Tensor:
    """Return the softmax [T, K] over the `attention_scores` of the chosen experts, int64 [T, K]."""
    if dispatch.reference_selected():
        return reference.attention_scores(products).gather(1, chosen).softmax(dim=-1)
    return _weights(products, chosen)


@registration.register(
    "yuan::attention_router_weights", lambda products, chosen: products.new_empty(chosen.shape)
)
def _weights(products: Tensor, chosen: Tensor) -> Tensor:
    found = [_attend(products[rows], chosen[rows])[0] for rows in blocks(max(1, products.shape[0]), _TOKENS)]
    return torch.cat(found).softmax(dim=-1)


@registration.register("yuan::attention_router_backward", "products")
def _weights_backward(dw: Tensor, w: Tensor, products: Tensor, chosen: Tensor) -> Tensor:
    gradient = torch.empty(products.shape, dtype=products.dtype, device=products.device)
    dp = w * (dw - (dw * w).sum(dim=-1, keepdim=True))
    for rows in blocks(max(1, products.shape[0]), _TOKENS):
        p_TK, s_TKN = _attend(products[rows], chosen[rows])
        query, key, value = products[rows].chunk(3, dim=-1)
        dp_TK1 = dp[rows].unsqueeze(-1)
        da_TKN = dp_TK1 * s_TKN * (value.unsqueeze(1) - p_TK.unsqueeze(-1))
        dquery, dkey, dvalue = gradient[rows].chunk(3, dim=-1)
        at = chosen[rows]
        dquery.zero_().scatter_(1, at, (da_TKN * key.unsqueeze(1)).sum(dim=-1))
        dkey.copy_((da_TKN * query.gather(1, at).unsqueeze(-1)).sum(dim=1))
        dvalue.copy_((s_TKN * dp_TK1).sum(dim=1))
    return gradient


def _attend(products: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The scores [t, K] of the chosen experts, and their softmax [t, K, N] over all."""
    query, key, value = products.chunk(3, dim=-1)
    softmax = (query.gather(1, chosen).unsqueeze(-1) * key.unsqueeze(1)).softmax(dim=-1)
    return (softmax * value.unsqueeze(1)).sum(dim=-1), softmax


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output, *inputs)


@_weights.gradient(_save)
def _backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
    return _weights_backward(dw, *ctx.saved_tensors), None
