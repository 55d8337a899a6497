"""One public function per op, whatever implements it.

The environment variable `YUAN_KERNELS=reference` selects the definitions in `reference.py`; it is read at
each call. Unset or empty selects the fast forms; any other value is a ValueError.

B = sequences, S = tokens of a sequence, T = tokens, H = hidden size, N = heads, D = size of a head,
F = feed-forward width, V = vocabulary.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from yuan_kernels import cross_entropy, reference
from yuan_kernels import localized_filter as sandwich
from yuan_kernels.reference import FilterState, Reduction

__all__ = [
    "FilterState",
    "linear_cross_entropy",
    "localized_filter",
    "localized_filter_step",
    "rms_norm",
    "rotary",
    "swiglu",
]


def localized_filter(
    x: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    *,
    document_start: Tensor | None = None,
) -> Tensor:
    """Return the two causal convolutions of Yuan 2.0's attention, before residual and norm.

    c[t] = A0 x[t-1] + A1 x[t] + a,  d[t] = B0 c[t-1] + B1 c[t] + b; x[-1] = 0 and c[-1] = 0
    (IEIT-Yuan/Yuan-2.0:megatron/model/transformer.py:395).

    Args:
        x: [B, S, H]; may be non-contiguous, empty, or of one token.
        conv1_weight: [n, H, 2] with n = H/2 channels, or a part of them; last index 0 is the older token.
        conv1_bias: [n].
        conv2_weight: [H, n, 2].
        conv2_bias: [H]; None adds none, for a caller that sums parts over the channels and adds it once.
        document_start: bool [B, S], True where a token begins a document: the terms of t-1 are absent
            there, and no value of another document can change a bit of this one. None resets nothing.

    Returns:
        d, [B, S, H] in x's dtype.

    Raises:
        ValueError: a shape does not fit the others, or document_start is not bool.
    """
    _check_filter(x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start)
    form = reference.localized_filter if _reference_selected() else sandwich.localized_filter
    return form(x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start=document_start)


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
    """Return the filter of the next tokens x [B, S, H] of a sequence, and the state after them.

    `state` is (u_last [B, H], c_last [B, n]) of the token before; both zero before the first token. S may
    be any length, so a prefix can be read in chunks; the results are those of `localized_filter` over the
    whole. Other arguments and errors as there.
    """
    _check_filter(x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start)
    _check_shape("state[0]", state[0], (x.shape[0], x.shape[2]))
    _check_shape("state[1]", state[1], (x.shape[0], conv1_weight.shape[0]))
    form = reference.localized_filter_step if _reference_selected() else sandwich.localized_filter_step
    return form(x, state, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start=document_start)


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight over the last dim of x [..., H].

    Statistics and products in fp32 (fp64 for fp64), rounded once to x's dtype (Zhang and Sennrich 2019).
    """
    return reference.rms_norm(x, weight, epsilon=epsilon)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x [B, S, N, D] in the half-split layout (Su et al. 2021).

    The pair (x[i], x[i + D/2]) turns by the angle whose cosine and sine are cos[b, s, i] and sin[b, s, i];
    both are [B or 1, S, D/2], fp32 (fp64 for fp64), which is also the precision of the products.
    """
    return reference.rotary(x, cos, sin)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(z0) * z1 [..., F] of x [..., 2F] = (z0, z1) (Shazeer 2020); Yuan's `up` has z0 first."""
    return reference.swiglu(x)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "sum",
    chunk_size: int | None = None,
) -> Tensor:
    """Return the cross-entropy of the logits hidden weight^T without ever holding all logits.

    Args:
        hidden: [T, H], T may be 0.
        weight: [V, H], in hidden's dtype.
        targets: int64 [T]; tokens whose target is `ignore_index` have loss 0 and no gradient.
        reduction: `sum` over the tokens (gradients are made in the forward), or `none` for the loss of each
            token (the backward computes the logits again).
        chunk_size: tokens whose logits exist at once; None chooses 256 on a CPU and 2048 on a GPU.

    Returns:
        fp32 (fp64 for fp64): a scalar for `sum`, [T] for `none`.

    Raises:
        ValueError: a shape, a dtype or a word is wrong.
    """
    _check_shape("targets", targets, hidden.shape[:1])
    _check_shape("weight", weight, (weight.shape[0], hidden.shape[-1]))
    if weight.dtype != hidden.dtype:
        raise ValueError(f"weight is {weight.dtype} and hidden {hidden.dtype}; give both the same dtype")
    if reduction not in ("sum", "none"):
        raise ValueError(f"reduction {reduction!r} is unknown; use 'sum' or 'none'")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size} is not positive")
    if _reference_selected():
        return reference.linear_cross_entropy(
            hidden, weight, targets, ignore_index=ignore_index, reduction=reduction
        )
    return cross_entropy.linear_cross_entropy(
        hidden, weight, targets, ignore_index=ignore_index, reduction=reduction, chunk_size=chunk_size
    )


def _reference_selected() -> bool:
    choice = os.environ.get("YUAN_KERNELS", "")
    if choice not in ("", "reference"):
        raise ValueError(f"YUAN_KERNELS={choice!r} is unknown; unset it, or set it to 'reference'")
    return choice == "reference"


def _check_filter(
    x: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    document_start: Tensor | None,
) -> None:
    if x.dim() != 3:
        raise ValueError(f"x has shape {list(x.shape)}; the filter wants [batch, tokens, hidden]")
    batch, tokens, hidden = x.shape
    channels = conv1_weight.shape[0]
    _check_shape("conv1_weight", conv1_weight, (channels, hidden, 2))
    _check_shape("conv1_bias", conv1_bias, (channels,))
    _check_shape("conv2_weight", conv2_weight, (hidden, channels, 2))
    if conv2_bias is not None:
        _check_shape("conv2_bias", conv2_bias, (hidden,))
    if document_start is not None:
        _check_shape("document_start", document_start, (batch, tokens))
        if document_start.dtype != torch.bool:
            raise ValueError(f"document_start is {document_start.dtype}; it must be bool")


def _check_shape(name: str, tensor: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(wanted):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; the other arguments want {list(wanted)}")
