"""Triton kernels of the ops that treat each element, or pair of elements, by itself: SwiGLU and rotary.

Imported only when a kernel is used, because Triton may not be installed. All arithmetic is fp32, and results
are rounded once. Any row length is supported: masks cut the last block. Row offsets are 64-bit.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from yuan_kernels.triton_forms import ceil_div, launch

SWIGLU_BLOCK = {"BLOCK": 1024, "num_warps": 4}
_ROTARY_TILE = 2048
"""Pairs that one program of the rotary embedding rotates: of several heads, with one load of the angles."""


# --- SwiGLU ------------------------------------------------------------------------------------------------


@triton.jit
def swiglu_forward_kernel(x, y, width, BLOCK: tl.constexpr):
    """One block of one row of y = z0 s z1, of x [tokens, 2 width] = (z0, z1)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    row = x + token * (2 * width) + column
    gate = tl.load(row, mask=live, other=0.0).to(tl.float32)
    value = tl.load(row + width, mask=live, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * value
    tl.store(y + token * width + column, result.to(y.dtype.element_ty), mask=live)


@triton.jit
def swiglu_backward_kernel(dy, x, dx, width, BLOCK: tl.constexpr):
    """One block of one row of dx = (dy z1 s (1 + z0 (1 - s)), dy z0 s)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    position = token * (2 * width) + column
    gate = tl.load(x + position, mask=live, other=0.0).to(tl.float32)
    value = tl.load(x + position + width, mask=live, other=0.0).to(tl.float32)
    upstream = tl.load(dy + token * width + column, mask=live, other=0.0).to(tl.float32)
    scale = tl.sigmoid(gate)
    dgate = upstream * value * scale * (1.0 + gate * (1.0 - scale))
    tl.store(dx + position, dgate.to(dx.dtype.element_ty), mask=live)
    tl.store(dx + position + width, (upstream * gate * scale).to(dx.dtype.element_ty), mask=live)


def swiglu_forward(x: Tensor, y: Tensor) -> None:
    """Fill y [T, F] of x [T, 2F]."""
    if y.numel():
        launch(swiglu_forward_kernel, _swiglu_grid(y), x.contiguous(), y, y.shape[1], **SWIGLU_BLOCK)


def swiglu_backward(dy: Tensor, x: Tensor, dx: Tensor) -> None:
    """Fill dx [T, 2F] of dy [T, F] and x [T, 2F]."""
    if dy.numel():
        grid, width = _swiglu_grid(dy), dy.shape[1]
        launch(swiglu_backward_kernel, grid, dy.contiguous(), x.contiguous(), dx, width, **SWIGLU_BLOCK)


def _swiglu_grid(y: Tensor) -> tuple[int, int]:
    return y.shape[0], ceil_div(y.shape[1], SWIGLU_BLOCK["BLOCK"])


# --- rotary embedding --------------------------------------------------------------------------------------


@triton.jit
def rotary_kernel(
    x,
    cos,
    sin,
    y,
    heads,
    half,
    table_rows,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some heads of one token: y = (a cos - b sin, b cos + a sin) of x [tokens, heads, 2 half] = (a, b).

    Token t has row t % table_rows of the tables [table_rows, half], which all sequences may share.
    """
    token = tl.program_id(0)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, BLOCK)
    row = (token % table_rows).to(tl.int64) * half + pair
    c = tl.load(cos + row, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + row, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        s = -s
    live = (head < heads) & (pair < half)[None, :]
    position = (token.to(tl.int64) * heads + head) * (2 * half) + pair[None, :]
    a = tl.load(x + position, mask=live, other=0.0).to(tl.float32)
    b = tl.load(x + position + half, mask=live, other=0.0).to(tl.float32)
    tl.store(y + position, (a * c - b * s).to(y.dtype.element_ty), mask=live)
    tl.store(y + position + half, (b * c + a * s).to(y.dtype.element_ty), mask=live)


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    """Return x [B, S, N, D] rotated by the angles of cos and sin [B or 1, S, D/2], or by their opposites."""
    batch, tokens, heads, head_dim = x.shape
    x = x.contiguous()
    y = torch.empty_like(x)
    if y.numel():
        sizes = rotary_block(heads, head_dim)
        grid = (batch * tokens, ceil_div(heads, sizes["HEADS"]))
        tables = cos.contiguous(), sin.contiguous()
        table_rows = cos.shape[0] * tokens
        launch(rotary_kernel, grid, x, *tables, y, heads, head_dim // 2, table_rows, INVERSE=inverse, **sizes)
    return y


def rotary_block(heads: int, head_dim: int) -> dict[str, int]:
    """Return the block sizes for heads of `head_dim` elements: at most `_ROTARY_TILE` pairs, if one fits."""
    block = max(16, _power_of_two(head_dim // 2))
    return {"HEADS": min(_power_of_two(heads), max(1, _ROTARY_TILE // block)), "BLOCK": block}


def _power_of_two(size: int) -> int:
    """The smallest power of two that is not below a positive size."""
    return 1 << (size - 1).bit_length()
