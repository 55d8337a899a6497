"""Triton kernels for CUDA devices: the memory-bound passes between torch's matrix products.

This module is imported only when a kernel is used, because Triton may not be installed. No kernel of it
multiplies matrices: on the oldest GPUs that we support (sm_70, sm_75) Triton does that without tensor cores,
and nowhere better than torch. All arithmetic is fp32; results are rounded once, where the torch
implementations round.

Row offsets are 64-bit: T x V logits have more than 2^31 elements.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

FILTER_BLOCK = {"TOKENS": 16, "CHANNELS": 128, "num_warps": 4}
SOFTMAX_BLOCK = {"BLOCK": 4096, "num_warps": 8}
SWIGLU_BLOCK = {"BLOCK": 1024, "num_warps": 4}
_ROTARY_TILE = 2048
"""Pairs that one program of the rotary embedding rotates: of several heads, with one load of the angles."""
_BACKWARD_PROGRAMS = 512
"""Programs of the norm's backward, each with a row of partial sums for dw: a few per multiprocessor."""


# --- the filter's passes -----------------------------------------------------------------------------------


@triton.jit
def filter_forward_kernel(
    z,
    starts,
    older_before,
    c_before,
    taps,
    tokens,
    channels,
    HAS_STARTS: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """taps[t] = (k[t] c[t-1], c[t]) of z [B, tokens, 2 channels].

    c[t-1] is recomputed, so that no program waits for another.
    """
    blocks = tl.cdiv(tokens, TOKENS)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    t = ((tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS))[:, None]
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    within = channel < channels
    live = (t < tokens) & within
    row = (sequence * tokens + t) * (2 * channels) + channel

    newer = tl.load(z + row + channels, mask=live, other=0.0).to(tl.float32)
    older1 = tl.load(z + row - 2 * channels, mask=live & (t > 0), other=0.0).to(tl.float32)
    newer1 = tl.load(z + row - channels, mask=live & (t > 0), other=0.0).to(tl.float32)
    older2 = tl.load(z + row - 4 * channels, mask=live & (t > 1), other=0.0).to(tl.float32)
    if HAS_BEFORE:
        position = sequence * channels + channel
        first_older = tl.load(older_before + position, mask=within, other=0.0).to(tl.float32)
        older1 = tl.where(t == 0, first_older, older1)
        older2 = tl.where(t == 1, first_older, older2)
    if HAS_STARTS:
        is_start = tl.load(starts + sequence * tokens + t, mask=t < tokens, other=0) != 0
        is_start1 = tl.load(starts + sequence * tokens + t - 1, mask=(t > 0) & (t < tokens), other=0) != 0
        older1 = tl.where(is_start, 0.0, older1)
        older2 = tl.where(is_start1, 0.0, older2)
    c = newer + older1
    c1 = newer1 + older2
    if HAS_BEFORE:
        c1 = tl.where(t == 0, tl.load(c_before + position, mask=within, other=0.0).to(tl.float32), c1)
    else:
        c1 = tl.where(t == 0, 0.0, c1)
    if HAS_STARTS:
        c1 = tl.where(is_start, 0.0, c1)
    tl.store(taps + row, c1.to(taps.dtype.element_ty), mask=live)
    tl.store(taps + row + channels, c.to(taps.dtype.element_ty), mask=live)


@triton.jit
def filter_backward_kernel(
    dtaps,
    starts,
    dz,
    tokens,
    channels,
    HAS_STARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """dz[t] = (k[t+1] dc[t+1], dc[t]) with dc[t] = q[t] + k[t+1] p[t+1], of dtaps = (p, q)."""
    blocks = tl.cdiv(tokens, TOKENS)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    t = ((tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS))[:, None]
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    live = (t < tokens) & (channel < channels)
    live1 = (t + 1 < tokens) & (channel < channels)
    live2 = (t + 2 < tokens) & (channel < channels)
    row = (sequence * tokens + t) * (2 * channels) + channel

    q = tl.load(dtaps + row + channels, mask=live, other=0.0).to(tl.float32)
    p1 = tl.load(dtaps + row + 2 * channels, mask=live1, other=0.0).to(tl.float32)
    q1 = tl.load(dtaps + row + 3 * channels, mask=live1, other=0.0).to(tl.float32)
    p2 = tl.load(dtaps + row + 4 * channels, mask=live2, other=0.0).to(tl.float32)
    if HAS_STARTS:
        start = starts + sequence * tokens + t
        is_start1 = tl.load(start + 1, mask=t + 1 < tokens, other=0) != 0
        is_start2 = tl.load(start + 2, mask=t + 2 < tokens, other=0) != 0
        p1 = tl.where(is_start1, 0.0, p1)
        p2 = tl.where(is_start2, 0.0, p2)
    dc1 = q1 + p2
    if HAS_STARTS:
        dc1 = tl.where(is_start1, 0.0, dc1)
    tl.store(dz + row, dc1.to(dz.dtype.element_ty), mask=live)
    tl.store(dz + row + channels, (q + p1).to(dz.dtype.element_ty), mask=live)


def filter_forward(
    z: Tensor, document_start: Tensor | None, older_before: Tensor | None, c_before: Tensor | None
) -> Tensor:
    """Return taps [B, S, 2n] of z [B, S, 2n]."""
    z = z.contiguous()
    taps = torch.empty_like(z)
    grid, sizes = _filter_grid(z)
    starts = None if document_start is None else document_start.contiguous().view(torch.uint8)
    before = [z if x is None else x.contiguous() for x in (older_before, c_before)]
    if taps.numel():
        tensors = z, z if starts is None else starts, *before, taps
        switches = {"HAS_STARTS": starts is not None, "HAS_BEFORE": older_before is not None}
        launch(filter_forward_kernel, grid, *tensors, *sizes, **switches, **FILTER_BLOCK)
    return taps


def filter_backward(dtaps: Tensor, document_start: Tensor | None) -> Tensor:
    """Return dz [B, S, 2n] of dtaps [B, S, 2n]."""
    dtaps = dtaps.contiguous()
    dz = torch.empty_like(dtaps)
    grid, sizes = _filter_grid(dtaps)
    starts = None if document_start is None else document_start.contiguous().view(torch.uint8)
    if dz.numel():
        tensors = dtaps, dtaps if starts is None else starts, dz
        launch(filter_backward_kernel, grid, *tensors, *sizes, HAS_STARTS=starts is not None, **FILTER_BLOCK)
    return dz


def _filter_grid(z: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    batch, tokens, width = z.shape
    blocks = ceil_div(tokens, FILTER_BLOCK["TOKENS"])
    return (batch * blocks, ceil_div(width // 2, FILTER_BLOCK["CHANNELS"])), (tokens, width // 2)


# --- norm --------------------------------------------------------------------------------------------------


@triton.jit
def norm_forward_kernel(
    x,
    residual,
    weight,
    y,
    s,
    scale,
    hidden,
    epsilon,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of s = x + residual, y = s r w and r."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < hidden
    position = token * hidden + column
    total = tl.load(x + position, mask=live, other=0.0)
    if HAS_RESIDUAL:
        total = total.to(tl.float32) + tl.load(residual + position, mask=live, other=0.0).to(tl.float32)
        total = total.to(s.dtype.element_ty)
        tl.store(s + position, total, mask=live)
    total = total.to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(total * total, axis=0) / hidden + epsilon)
    w = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    tl.store(scale + token, r)
    tl.store(y + position, (total * r * w).to(y.dtype.element_ty), mask=live)


@triton.jit
def norm_backward_kernel(
    dy,
    bypass,
    s,
    weight,
    scale,
    ds,
    partial,
    tokens,
    hidden,
    HAS_BYPASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows i, i + programs, ... of ds, and their partial sum of dw, for program i."""
    column = tl.arange(0, BLOCK)
    live = column < hidden
    w = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        position = token * hidden.to(tl.int64) + column
        gradient = tl.load(dy + position, mask=live, other=0.0).to(tl.float32)
        total = tl.load(s + position, mask=live, other=0.0).to(tl.float32)
        r = tl.load(scale + token)
        dw += gradient * total * r
        gradient *= w
        correction = tl.sum(gradient * total, axis=0) * r * r * r / hidden
        gradient = gradient * r - total * correction
        if HAS_BYPASS:
            gradient += tl.load(bypass + position, mask=live, other=0.0).to(tl.float32)
        tl.store(ds + position, gradient.to(ds.dtype.element_ty), mask=live)
    tl.store(partial + tl.program_id(0).to(tl.int64) * hidden + column, dw, mask=live)


def rms_norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, y: Tensor, s: Tensor, scale: Tensor
) -> None:
    """Fill y [T, H], `scale` (r) [T] and, with a residual, s [T, H] of x [T, H]."""
    tokens, hidden = x.shape
    if not x.numel():
        return
    x = x.contiguous()
    tensors = x, x if residual is None else residual.contiguous(), weight.contiguous(), y, s, scale
    options = {"HAS_RESIDUAL": residual is not None, **norm_block(hidden)}
    launch(norm_forward_kernel, (tokens,), *tensors, hidden, epsilon, **options)


def rms_norm_backward(
    dy: Tensor, bypass: Tensor | None, s: Tensor, weight: Tensor, scale: Tensor, ds: Tensor
) -> Tensor:
    """Fill ds [T, H] of dy [T, H]; return dw [H] in fp32. `bypass` [T, H], if given, is added to ds."""
    tokens, hidden = s.shape
    programs = min(tokens, _BACKWARD_PROGRAMS)
    if not programs:
        return scale.new_zeros(hidden)
    partial = scale.new_empty(programs, hidden)
    dy = dy.contiguous()
    others = s.contiguous(), weight.contiguous(), scale, ds, partial
    tensors = dy, dy if bypass is None else bypass.contiguous(), *others
    options = {"HAS_BYPASS": bypass is not None, **norm_block(hidden)}
    launch(norm_backward_kernel, (programs,), *tensors, tokens, hidden, **options)
    return partial.sum(dim=0)


def norm_block(hidden: int) -> dict[str, int]:
    """Return the block size that holds a row of `hidden` elements, and the number of warps for it."""
    block = max(16, _power_of_two(hidden))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


# --- softmax in place --------------------------------------------------------------------------------------


@triton.jit
def softmax_kernel(
    logits,
    probabilities,
    normalizer,
    words,
    factor,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """logsumexp of one row; then factor * softmax, from a second read of the row, now in the cache."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row = logits + token * words
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, words, BLOCK):
        value = tl.load(row + first + column, mask=first + column < words, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, value)
        # Lanes past the end have read only -inf, and -inf - -inf would be NaN.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - base) + tl.exp(value - base)
        largest = larger
    row_maximum = tl.max(largest, axis=0)
    row_total = tl.sum(total * tl.exp(largest - row_maximum), axis=0)
    logsumexp = row_maximum + tl.log(row_total)
    tl.store(normalizer + token, logsumexp)
    if WRITE:
        for first in range(0, words, BLOCK):
            live = first + column < words
            value = tl.load(row + first + column, mask=live, other=float("-inf")).to(tl.float32)
            value = tl.exp(value - logsumexp) * factor
            pointer = probabilities + token * words + first + column
            tl.store(pointer, value.to(probabilities.dtype.element_ty), mask=live)


def softmax(logits: Tensor, dtype: torch.dtype | None, factor: float) -> tuple[Tensor, Tensor]:
    """Return (factor * softmax [t, V] in `dtype`, logsumexp [t] in fp32) of logits [t, V].

    In place if `dtype` is the logits' dtype. With None no probabilities are computed, and the first result is
    `logits`, unchanged.
    """
    tokens, words = logits.shape
    normalizer = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    in_place = dtype is None or dtype == logits.dtype
    probabilities = logits if in_place else torch.empty_like(logits, dtype=dtype)
    if tokens:
        tensors, options = (logits, probabilities, normalizer), {"WRITE": dtype is not None, **SOFTMAX_BLOCK}
        launch(softmax_kernel, (tokens,), *tensors, words, factor, **options)
    return probabilities, normalizer


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


# --- launches ----------------------------------------------------------------------------------------------


def ceil_div(size: int, block: int) -> int:
    """Return how many blocks cover a size."""
    return -(-size // block)


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its tensors; Triton itself would use the current device.

    From the second launch on it goes straight to what Triton has compiled: Triton's own way there takes as
    long on the host as a small kernel takes on a card. (Under Triton's interpreter, where tensors are on the
    CPU, there is no such thing.)
    """
    if not first.is_cuda:
        kernel[grid](first, *arguments, **options)
        return
    number = first.get_device()
    key = (id(kernel), number, *options.values(), *map(specialization, (first, *arguments)))
    known = _compiled.get(key)
    with nullcontext() if torch.cuda.current_device() == number else torch.cuda.device(number):
        if known is None:
            names = kernel.arg_names[1 + len(arguments) :]
            constants = tuple(options[name] for name in names)
            _compiled[key] = kernel[grid](first, *arguments, **options), constants
        else:
            compiled, constants = known
            compiled[(*grid, 1, 1)[:3]](first, *arguments, *constants)


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""By kernel, device, options and kinds of arguments, the compiled kernel and its last arguments."""


def specialization(argument: Any) -> Any:
    """What Triton compiles anew for: arguments for which it would compile another kernel differ in it."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return "int", argument == 1, argument % 16 == 0, argument.bit_length() > 31
    return type(argument)
