"""Rotary embedding in the half-split layout (Su et al. 2021), forward and backward.

    (a, b) = x      y = (a cos - b sin, b cos + a sin)      dx = (da cos + db sin, db cos - da sin)

Tables of R/2 angles rotate the first R dims of a head; the others pass. The backward rotates by the opposite
angles: the same op with -sin. The tables get no gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from yuan_kernels import dispatch, reference, registration
from yuan_kernels.reference import check_shape
from yuan_kernels.rms_norm import BLOCK, row_blocks


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x [B, S, N, D] in the half-split layout (Su et al. 2021).

    The pair (x[i], x[i + R/2]) is rotated by the angle whose cosine and sine are cos[b, s, i] and
    sin[b, s, i]; both are [B or 1, S, R/2], in fp32 (fp64 for fp64), which is also the precision of the
    products. They get no gradients. R is at most D; the dims from R on are returned as they are.

    Raises:
        ValueError: x is not of four dims, or a table does not fit it.
    """
    if x.dim() != 4:
        raise ValueError(f"x has shape {list(x.shape)}; rotary expects [batch, tokens, heads, head_dim]")
    for name, table in (("cos", cos), ("sin", sin)):
        batch = 1 if table.shape[:1] == (1,) else x.shape[0]
        check_shape(name, table, (batch, x.shape[1], min(cos.shape[-1], x.shape[3] // 2)))
    if dispatch.uses_definition():
        return reference.rotary(x, cos, sin)
    return _rotary(x, cos, sin, False)


@registration.register("yuan::rotary", "x")
def _rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Return x rotated by the tables' angles, or by their opposites if `inverse`."""
    if x.device.type != "cpu" and dispatch.implementation("rotary", x) == "triton":
        from yuan_kernels import triton_forms

        width = 2 * cos.shape[-1]
        rotated = triton_forms.rotary(x[..., :width], cos, sin, inverse=inverse)
        return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)
    return _rotate_blocks(x, cos, -sin if inverse else sin)


def _rotate_blocks(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The definition, in blocks of tokens: on a CPU the fp32 copy of a block stays in the cache."""
    batch = x.shape[0]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dtype == cos.dtype and x.numel() <= BLOCK:
        _rotate(x, cos.unsqueeze(-2), sin.unsqueeze(-2), y)
        return y
    flat_x, flat_y = x.flatten(0, 1), y.flatten(0, 1)
    cos, sin = (t.expand(batch, -1, -1).flatten(0, 1) for t in (cos, sin))
    for rows in row_blocks(flat_x.flatten(1)):
        flat_y[rows] = reference.rotary(flat_x[None, rows], cos[None, rows], sin[None, rows])[0]
    return y


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor) -> None:
    """The definition in the tables' precision, of one block."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=y[..., :half]).sub_(second * sin)
    torch.mul(second, cos, out=y[..., half : 2 * half]).add_(first * sin)
    if 2 * half < x.shape[-1]:
        y[..., 2 * half :] = x[..., 2 * half :]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


@_rotary.gradient(_save)
def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _rotary(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None
