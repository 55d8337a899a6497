"""RMS norm, alone or fused with the residual sum before it: forward and backward.

    s = x + residual        r = 1 / sqrt(mean(s^2) + epsilon)        y = s r w
    dw = sum over tokens of dy s r
    ds = r w dy - s r^3 / H sum(dy w s) + the gradient of s that bypasses the norm

(Zhang and Sennrich 2019.) s is rounded to x's dtype, as the next layer reads it; all other arithmetic is
fp32 (fp64 for fp64). On a CPU, a block of rows goes through all passes while it stays in the cache: it is
converted to fp32 once, and the sums over rows and columns are matrix-vector products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from yuan_kernels import dispatch, reference, registration
from yuan_kernels.reference import accumulation_dtype, blocks, check_shape

BLOCK = 1 << 16
"""Elements of a block: the three fp32 buffers of the backward then fit a second-level cache of 1 MB."""


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight over the last dim of x [..., H].

    Statistics and products in fp32 (fp64 for fp64), rounded once to x's dtype (Zhang and Sennrich 2019).

    Raises:
        ValueError: weight is not [H].
    """
    check_shape("weight", weight, x.shape[-1:])
    if dispatch.uses_definition():
        return reference.rms_norm(x, weight, epsilon=epsilon)
    return _rms_norm(x, weight, epsilon)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(s), s) of s = x + residual, all [..., H]; s is rounded to x's dtype first.

    Raises:
        ValueError: residual's shape is not x's, or weight is not [H].
    """
    check_shape("residual", residual, x.shape)
    check_shape("weight", weight, x.shape[-1:])
    if dispatch.uses_definition():
        return reference.add_rms_norm(x, residual, weight, epsilon=epsilon)
    return _add_rms_norm(x, residual, weight, epsilon)[:2]


def _empty(x: Tensor) -> tuple[Tensor, Tensor]:
    """(y like x, r [T])."""
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1].numel(), dtype=accumulation_dtype(x.dtype))


@registration.register("yuan::rms_norm", lambda x, weight, epsilon: _empty(x))
def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return (y like x, r [T])."""
    y, _, scale = _forward(x, None, weight, epsilon)
    return y, scale


@registration.register(
    "yuan::add_rms_norm",
    lambda x, residual, weight, epsilon: (x.new_empty(x.shape), *_empty(x)),
)
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y like x, s like x, r [T])."""
    return _forward(x, residual, weight, epsilon)


@registration.register("yuan::rms_norm_backward", "s weight")
def _rms_norm_backward(
    dy: Tensor, bypass: Tensor | None, s: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (ds like s, dw [H]); `bypass` is the gradient of s that bypasses the norm, added to ds."""
    hidden = s.shape[-1]
    ds = torch.empty(s.shape, dtype=s.dtype, device=s.device)
    flat_bypass = None if bypass is None else bypass.reshape(-1, hidden)
    flat_dy, flat_s, flat_ds = dy.reshape(-1, hidden), s.reshape(-1, hidden), ds.view(-1, hidden)
    if dispatch.implementation("rms_norm", s) == "triton":
        from yuan_kernels import triton_forms

        dw = triton_forms.rms_norm_backward(flat_dy, flat_bypass, flat_s, weight, scale, flat_ds)
    else:
        dw = torch.zeros(hidden, dtype=scale.dtype, device=s.device)
        _backward_blocks(flat_dy, flat_bypass, flat_s, weight.to(scale.dtype), scale, flat_ds, dw)
    return ds, dw.to(weight.dtype)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, s, r); s is x itself if there is no residual."""
    hidden = x.shape[-1]
    acc_dtype = accumulation_dtype(x.dtype)
    if x.device.type == "cpu" and x.dtype == weight.dtype == acc_dtype and 0 < x.numel() <= BLOCK:
        # Nothing to convert, and no blocks: the same operations without the copies.
        s = x if residual is None else x + residual
        scale = torch.linalg.vector_norm(s, dim=-1, keepdim=True)
        scale.square_().div_(hidden).add_(epsilon).rsqrt_()
        return (s * scale).mul_(weight), s, scale.flatten()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    s = x if residual is None else torch.empty_like(y)
    scale = torch.empty(y.numel() // max(1, hidden), dtype=acc_dtype, device=x.device)
    flat_x, flat_y = x.reshape(-1, hidden), y.view(-1, hidden)
    flat_residual = None if residual is None else residual.reshape(-1, hidden)
    flat_s = flat_x if residual is None else s.view(-1, hidden)
    if dispatch.implementation("rms_norm", x) == "triton":
        from yuan_kernels import triton_forms

        triton_forms.rms_norm_forward(flat_x, flat_residual, weight, epsilon, flat_y, flat_s, scale)
    else:
        _forward_blocks(flat_x, flat_residual, weight.to(acc_dtype), epsilon, flat_y, flat_s, scale)
    return y, s, scale


def _forward_blocks(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, y: Tensor, s: Tensor, scale: Tensor
) -> None:
    buffers = _buffers(x, 2, weight.dtype)
    for rows in row_blocks(x):
        wide, added = (buffer[: rows.stop - rows.start] for buffer in buffers)
        wide.copy_(x[rows])
        if residual is not None:
            s[rows] = wide.add_(added.copy_(residual[rows]))
            wide.copy_(s[rows])
        mean = torch.linalg.vector_norm(wide, dim=-1).square_().div_(x.shape[-1])
        scale[rows] = mean.add_(epsilon).rsqrt_()
        y[rows] = wide.mul_(scale[rows].unsqueeze(1)).mul_(weight)


def _backward_blocks(
    dy: Tensor, bypass: Tensor | None, s: Tensor, weight: Tensor, scale: Tensor, ds: Tensor, dw: Tensor
) -> None:
    """Fill ds [T, H] and add to dw [H]."""
    buffers = _buffers(s, 3, weight.dtype)
    for rows in row_blocks(s):
        gradient, wide, product = (buffer[: rows.stop - rows.start] for buffer in buffers)
        r = scale[rows]
        torch.mul(gradient.copy_(dy[rows]), wide.copy_(s[rows]), out=product)
        dw.addmv_(product.T, r)
        correction = torch.mv(product, weight).mul_(r * r * r).div_(-s.shape[-1])
        gradient.mul_(weight).mul_(r.unsqueeze(1)).addcmul_(wide, correction.unsqueeze(1))
        if bypass is not None:
            gradient.add_(wide.copy_(bypass[rows]))
        ds[rows] = gradient


def row_blocks(x: Tensor) -> Iterator[slice]:
    """Return an iterator over slices of x's rows [T, H], which on a CPU stay in the cache."""
    return blocks(x.shape[0], _block_rows(x))


def _block_rows(x: Tensor) -> int:
    """One block off the CPU, because a GPU is faster with few large operations, and for small inputs."""
    if x.device.type != "cpu":
        return max(1, x.shape[0])
    return max(1, min(x.shape[0], BLOCK // max(1, x.shape[1])))


def _buffers(x: Tensor, count: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(_block_rows(x), x.shape[1], dtype=dtype, device=x.device) for _ in range(count)]


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, s, scale = output
    ctx.save_for_backward(s, inputs[2], scale)
    ctx.mark_non_differentiable(scale)
    ctx.set_materialize_grads(False)


@_rms_norm.gradient(_save_norm)
def _norm_backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    ds, dw = _rms_norm_backward(dy, None, *ctx.saved_tensors)
    return ds, dw, None


@_add_rms_norm.gradient(_save_add_norm)
def _add_norm_backward(
    ctx: Any, dy: Tensor | None, bypass: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    if dy is None:
        return bypass, bypass, None, None
    ds, dw = _rms_norm_backward(dy, bypass, *ctx.saved_tensors)
    return ds, ds, dw, None
