"""The definition of each op in plain PyTorch: the reference for tests, self-tests and benchmarks.

Nothing here is optimised. Autograd differentiates all of it.

B = sequences, S = tokens of a sequence, T = B * S, H = hidden size, N = heads, D = size of a head,
F = feed-forward width, V = vocabulary, N also = experts, K = experts of a token, R = rows of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["sum", "none"]

FilterState = tuple[Tensor, Tensor]
"""(u_last [B, H], c_last [B, H/2]): the last token's input and first convolution's output."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and losses: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raise ValueError if a tensor has not the shape that the other arguments of an op need."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; the other arguments need {list(expected)}")


def blocks(count: int, size: int) -> Iterator[slice]:
    """Return an iterator over slices of at most `size` that cover range(count) in order."""
    size = max(1, size)
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def localized_filter_step(
    x: Tensor,
    state: FilterState,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    *,
    document_start: Tensor | None = None,
) -> tuple[Tensor, FilterState]:
    """Return the filter of a sequence's next tokens and the new state; `state` is the prefix's. See `ops`.

    c[t] = A0 u[t-1] + A1 u[t] + a and d[t] = B0 c[t-1] + B1 c[t] + b, where the terms of t-1 are
    absent at the start of a document.
    """
    u_before, c_before = state
    c = _two_taps(_older(x, u_before, document_start), x, conv1_weight, conv1_bias)
    d = _two_taps(_older(c, c_before, document_start), c, conv2_weight, conv2_bias)
    return d, (_last(x, u_before), _last(c, c_before))


def empty_filter_state(x: Tensor, conv1_weight: Tensor) -> FilterState:
    """Return the state before any token: both tensors zero, so that c[-1] = 0 and not the bias."""
    batch, _, hidden = x.shape
    return x.new_zeros(batch, hidden), x.new_zeros(batch, conv1_weight.shape[0])


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight over the last dim, in fp32 (fp64 for fp64)."""
    wide = x.to(accumulation_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide * scale * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(s), s) of s = x + residual, rounded to x's dtype."""
    total = x + residual
    return rms_norm(total, weight, epsilon=epsilon), total


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + R/2]) of the first R dims of each head of x [B, S, N, D]; see `ops`."""
    half = cos.shape[-1]
    first, second = x[..., : 2 * half].to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.cat((*(part.to(x.dtype) for part in rotated), x[..., 2 * half :]), dim=-1)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(z0) * z1, where (z0, z1) are the halves of the last dim."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Return x_e W_e^T for the rows of each group e, in order."""
    # unbind, not weight[e]: each index would make a gradient of the size of all groups.
    groups = zip(x.split(list(counts)), weight.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in groups])


def attention_scores(products: Tensor) -> Tensor:
    """Return p [T, N], p_i = sum_j softmax_j(q_i k_j) v_j, of products [T, 3N] = (q, k, v)."""
    query, key, value = products.chunk(3, dim=-1)
    softmax = (query.unsqueeze(-1) * key.unsqueeze(-2)).softmax(dim=-1)
    return (softmax * value.unsqueeze(-2)).sum(dim=-1)


def expert_rows(x: Tensor, order: Tensor, slots: int) -> Tensor:
    """Return the rows of x [T, H] of each slot in `order` [R]; slot t K + k is of token t."""
    return x[order // slots]


def sum_slots(rows: Tensor, order: Tensor, tokens: int, slots: int) -> Tensor:
    """Return [T, H]: the rows [R, H] of each token's slots, added in slot order; absent ones are zero."""
    empty = rows.new_zeros(tokens * slots, rows.shape[1])
    first, *others = empty.index_copy(0, order, rows).view(tokens, slots, -1).unbind(1)
    for other in others:
        first = first + other
    return first


def combine_rows(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Return `sum_slots` of the rows [R, H], each times its slot's weight of weights [T, K]."""
    weighted = rows * weights.flatten()[order].to(rows.dtype).unsqueeze(-1)
    return sum_slots(weighted, order, *weights.shape)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "sum",
) -> Tensor:
    """Return logsumexp(z) - z[target] with z = hidden weight^T, all logits at once; see `ops`."""
    acc_dtype = accumulation_dtype(hidden.dtype)
    logits = hidden.to(acc_dtype) @ weight.to(acc_dtype).T
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)


def _older(x: Tensor, before: Tensor, document_start: Tensor | None) -> Tensor:
    """Return x[t-1] at index t. Document starts are masked by selection: a product 0 * inf would be NaN."""
    older = torch.cat((before.unsqueeze(1), x[:, :-1]), dim=1)[:, : x.shape[1]]
    if document_start is None:
        return older
    return torch.where(document_start.unsqueeze(-1), torch.zeros((), dtype=x.dtype, device=x.device), older)


def _two_taps(older: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(older, weight[:, :, 0]) + F.linear(x, weight[:, :, 1], bias)


def _last(x: Tensor, before: Tensor) -> Tensor:
    return x[:, -1] if x.shape[1] else before
