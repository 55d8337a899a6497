"""The product in a SwiGLU feed-forward (Shazeer 2020), forward and backward.

    (z0, z1) = x      s = 1 / (1 + exp(-z0))      y = z0 s z1
    dz0 = dy z1 s (1 + z0 (1 - s))      dz1 = dy z0 s

The backward computes s again, so that only x is saved: autograd on the definition would save silu(z0) too.
All arithmetic is fp32 (fp64 for fp64), rounded once; on a CPU in blocks of rows that stay in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from yuan_kernels import dispatch, reference, registration
from yuan_kernels.reference import accumulation_dtype
from yuan_kernels.rms_norm import BLOCK, row_blocks


def swiglu(x: Tensor) -> Tensor:
    """Return silu(z0) * z1 [..., F] of x [..., 2F] = (z0, z1) (Shazeer 2020); Yuan's `up` has z0 first.

    The backward needs x alone.

    Raises:
        ValueError: the last dim is odd.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x has shape {list(x.shape)}; swiglu halves the last dim, which must be even")
    if dispatch.uses_definition():
        return reference.swiglu(x)
    return _swiglu(x)


@registration.register("yuan::swiglu", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
def _swiglu(x: Tensor) -> Tensor:
    if x.device.type == "cpu" and x.numel() <= BLOCK and x.dtype == accumulation_dtype(x.dtype):
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(value)
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    flat_x, flat_y = _rows(x), _rows(y)
    if dispatch.implementation("swiglu", x) == "triton":
        from yuan_kernels import triton_forms

        triton_forms.swiglu_forward(flat_x, flat_y)
    else:
        _forward_blocks(flat_x, flat_y)
    return y


@registration.register("yuan::swiglu_backward", "x")
def _swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat_dy, flat_x, flat_dx = _rows(dy), _rows(x), _rows(dx)
    if dispatch.implementation("swiglu", x) == "triton":
        from yuan_kernels import triton_forms

        triton_forms.swiglu_backward(flat_dy, flat_x, flat_dx)
    else:
        _backward_blocks(flat_dy, flat_x, flat_dx)
    return dx


def _rows(x: Tensor) -> Tensor:
    """x [..., n] as [T, n]; a view if x is contiguous."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _forward_blocks(x: Tensor, y: Tensor) -> None:
    for rows in row_blocks(x):
        gate, value = x[rows].to(accumulation_dtype(x.dtype)).chunk(2, dim=-1)
        y[rows] = F.silu(gate).mul_(value)


def _backward_blocks(dy: Tensor, x: Tensor, dx: Tensor) -> None:
    for rows in row_blocks(x):
        gate, value = x[rows].to(accumulation_dtype(x.dtype)).chunk(2, dim=-1)
        scale = torch.sigmoid(gate)
        dscaled = scale * dy[rows]
        dgate, dvalue = dx[rows].chunk(2, dim=-1)
        dvalue.copy_(gate * dscaled)
        # z0 (1 - s), not z0 - z0 s, which would cancel.
        dgate.copy_((1 - scale).mul_(gate).add_(1).mul_(dscaled).mul_(value))


@_swiglu.gradient()
def _backward(ctx: Any, dy: Tensor) -> Tensor:
    return _swiglu_backward(dy, *ctx.saved_tensors)
