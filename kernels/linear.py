"""Linear maps through `products.py`: on CPUs where torch's own product is slow. Elsewhere they are torch's.

    y = x W^T + b      dx = dy W      dW = dy^T x      db = sum dy

Both products of the backward are linear maps too, of transposed operands: one op serves all three.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from yuan_kernels import dispatch, products, reference, registration


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias [..., N] of x [..., K], weight [N, K] and bias [N].

    Torch's, except on CPUs where torch's is slow: bf16 without instructions for it goes through fp32 blocks
    and is rounded once, large fp32 products may go through oneDNN (see `products.py`).
    """
    is_torchs = products.is_small(x, weight.shape[0]) and not torch.compiler.is_compiling()
    if is_torchs or dispatch.reference_selected() or not _may_replace_torch(x, weight.shape[0]):
        return F.linear(x, weight, bias)
    return _linear(x, weight, bias)


def _may_replace_torch(x: Tensor, columns: int) -> bool:
    """Whether to call our op. Where torch.compile is tracing, the op itself decides, when it runs: the tests
    that decide cannot be traced."""
    return x.device.type == "cpu" if torch.compiler.is_compiling() else products.replaces_torch(x, columns)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T [..., N] in fp32 (fp64 for fp64) of x [..., K] and weight [N, K].

    For operands of 16 bits nothing is rounded before or after the product but their gradients.
    """
    wide = reference.accumulation_dtype(x.dtype)
    if x.dtype == wide:
        return linear(x, weight)
    if dispatch.reference_selected():
        return F.linear(x.to(wide), weight.to(wide))
    return _wide_linear(x, weight)


@registration.register(
    "yuan::wide_linear",
    lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0], dtype=torch.float32),
)
def _wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    return products.linear(_rows(x).float(), weight.float()).view(*x.shape[:-1], weight.shape[0])


@_wide_linear.gradient()
def _wide_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    rows = _rows(dy)
    dweight = _linear(rows.T, _rows(x).T.float(), None)
    return _linear(dy, weight.T.float(), None).to(x.dtype), dweight.to(weight.dtype)


@registration.register("yuan::linear", lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]))
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return products.linear(_rows(x), weight, bias).view(*x.shape[:-1], weight.shape[0])


def _rows(x: Tensor) -> Tensor:
    """x [..., K] as [T, K]."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


@_linear.gradient(_save)
def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    rows = _rows(dy)
    return (
        _linear(dy, weight.T, None) if needs_x else None,
        _linear(rows.T, _rows(x).T, None) if needs_weight else None,
        rows.sum(dim=0) if needs_bias else None,
    )
