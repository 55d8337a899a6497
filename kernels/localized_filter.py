"""The localized filter as a sandwich: matrix product, one elementwise pass, matrix product.

    A = [W1_old; W1_new]  (2n x H)        Bm = [W2_old | W2_new]  (H x 2n)
    z    = x A^T + (0, b1)                z[t] = (older[t], newer[t])
    c[t] = newer[t] + k[t] older[t-1]     k[t] = 0 where a document starts, else 1
    taps[t] = (k[t] c[t-1], c[t])
    y    = taps Bm^T + b2

Folding both convolutions into one of three taps would cost 1.5 times as much. Backward, given dy:

    dtaps = dy Bm                         dtaps[t] = (p[t], q[t])
    dc[t] = q[t] + k[t+1] p[t+1]          (beyond the end: 0)
    dz[t] = (k[t+1] dc[t+1], dc[t])
    dx = dz A,  dA = dz^T x,  db1 = sum dc,  dBm = dy^T taps,  db2 = sum dy

A part of a sequence that begins at token a is given x[a-1] and c[a-1]: older[a-1] = x[a-1] W1_old^T and
c[a-1] precede its first token, and the gradients of x[a-1] and c[a-1] are k[a] dc[a] W1_old and k[a] p[a].

k selects and never multiplies (0 * inf is NaN): no content of one document can change a bit of another.
The backward stacks A and Bm again: saved, they would cost 2 H^2 elements for each micro-batch in flight, and
stacking them takes a small fraction of the time of one product.

The elementwise passes have two implementations. `blocks`, for CPUs: tokens go through product, pass and
product in blocks that stay in the cache, and k is a list of the few rows to clear. `torch`, for any device,
without synchronizing with it: whole tensors and masks. On CUDA, Triton kernels replace the passes of the
latter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from yuan_kernels import dispatch, products, reference, registration
from yuan_kernels.linear import linear
from yuan_kernels.reference import FilterState, check_shape

_BLOCK = 256
"""Tokens of a block: enough for the products to run at full speed, few enough for the cache."""


def localized_filter(
    x: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    *,
    document_start: Tensor | None = None,
    before: FilterState | None = None,
) -> Tensor:
    """Return the two causal convolutions of Yuan 2.0's attention, before residual and norm.

    c[t] = A0 x[t-1] + A1 x[t] + a,  d[t] = B0 c[t-1] + B1 c[t] + b; x[-1] = 0 and c[-1] = 0
    (IEIT-Yuan/Yuan-2.0:megatron/model/transformer.py:395).

    Args:
        x: [B, S, H]; may be non-contiguous, empty, or of one token.
        conv1_weight: [n, H, 2] with n = H/2 channels, or a shard of them; last index 0 is the older token.
        conv1_bias: [n].
        conv2_weight: [H, n, 2].
        conv2_bias: [H]; None adds none, for a caller that sums the outputs of shards and adds it once.
        document_start: bool [B, S], True where a token begins a document: the terms of t-1 are absent
            there, and no value of another document can change a bit of this one. None resets nothing.
        before: (u [B, H], c [B, n]) of the token before x[:, 0], if x continues a sequence;
            `localized_filter_state` computes it. Both get gradients. None: x begins the sequence.

    Returns:
        d, [B, S, H] in x's dtype.

    Raises:
        ValueError: a shape does not fit the others, or document_start is not bool.
    """
    weights = conv1_weight, conv1_bias, conv2_weight, conv2_bias
    if dispatch.reference_selected():
        _check(x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start, before)
        state = reference.empty_filter_state(x, conv1_weight) if before is None else before
        return reference.localized_filter_step(x, state, *weights, document_start=document_start)[0]
    return _filter(x, *weights, document_start, *(before or (None, None)))[0]


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
    be any length, so a prefix can be processed in chunks; the results equal those of `localized_filter` over
    the whole sequence. Other arguments and errors as there.
    """
    _check(x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start, state)
    if dispatch.reference_selected():
        weights = conv1_weight, conv1_bias, conv2_weight, conv2_bias
        return reference.localized_filter_step(x, state, *weights, document_start=document_start)
    # Older and newer tokens are interleaved as the weights store their taps. That copies a few tokens instead
    # of both weights; for one token, copying the weights would take most of the time.
    u_before, c_before = state
    c = _interleaved_taps(x, u_before, document_start, conv1_weight, conv1_bias)
    y = _interleaved_taps(c, c_before, document_start, conv2_weight, conv2_bias)
    if x.shape[1] == 0:
        return y, state
    return y, (x[:, -1], c[:, -1])


def localized_filter_state(
    x_tail: Tensor, conv1_weight: Tensor, conv1_bias: Tensor, *, document_start: Tensor | None = None
) -> FilterState:
    """Return the state (u [B, H], c [B, n]) after x_tail [B, 2, H], the last two tokens of a sequence part.
    With a sequence split over devices (context parallelism), the state is the halo: the device that holds a
    part sends it to the device that holds the next part, which passes it to `localized_filter` as `before`.
    It needs no other result, so it can be sent first. Autograd propagates its gradient to x_tail and the
    weights. Every part but the last has at least two tokens. `document_start` is bool [B, 2], for x_tail.

    Raises:
        ValueError: x_tail is not [B, 2, H].
    """
    check_shape("x_tail", x_tail, (x_tail.shape[0], 2, x_tail.shape[-1]))
    starts = None if document_start is None else document_start[:, 1:]
    c = _interleaved_taps(x_tail[:, 1:], x_tail[:, 0], starts, conv1_weight, conv1_bias)
    return x_tail[:, 1], c[:, 0]


@torch.no_grad()
def localized_filter_forward(
    x: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    *,
    document_start: Tensor | None = None,
    before: FilterState | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y [B, S, H], taps [B, S, 2n]): `localized_filter` for a caller that splits the backward.

    The call is not recorded by autograd. Arguments and errors as in `localized_filter`.
    """
    _check(x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start, before)
    u_before, c_before = before or (None, None)
    older_before = None if u_before is None else u_before @ conv1_weight[:, :, 0].T
    stacked1, stacked2 = _stack_conv1(conv1_weight), _stack_conv2(conv2_weight)
    bias1 = torch.cat((torch.zeros_like(conv1_bias), conv1_bias))
    implementation = dispatch.implementation("localized_filter", x)
    if implementation == "blocks":
        return _forward_blocks(
            x, stacked1, bias1, stacked2, conv2_bias, document_start, older_before, c_before
        )
    z = F.linear(x, stacked1, bias1)
    if implementation == "triton":
        from yuan_kernels import triton_forms

        taps = triton_forms.filter_forward(z, document_start, older_before, c_before)
    else:
        taps = _taps(z, document_start, older_before, c_before)
    return F.linear(taps, stacked2, conv2_bias), taps


@torch.no_grad()
def localized_filter_data_gradient(
    dy: Tensor, conv1_weight: Tensor, conv2_weight: Tensor, *, document_start: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx [B, S, H], dz [B, S, 2n], dc_before [B, n]) of the gradient dy [B, S, H].

    dz is for `localized_filter_weight_gradient`; dc_before is the gradient of before[1], if the forward had
    one. (That of before[0] is dz[:, 0, n:] conv1_weight[:, :, 0], or 0 at a document's start.)
    """
    stacked1, stacked2 = _stack_conv1(conv1_weight), _stack_conv2(conv2_weight)
    implementation = dispatch.implementation("localized_filter", dy)
    if implementation == "blocks":
        return _data_gradient_blocks(dy, stacked1, stacked2, document_start)
    dtaps = dy @ stacked2
    if implementation == "triton":
        from yuan_kernels import triton_forms

        dz = triton_forms.filter_backward(dtaps, document_start)
    else:
        dz = _dz(dtaps, document_start)
    return dz @ stacked1, dz, _first_p(dtaps, document_start)


@torch.no_grad()
def localized_filter_weight_gradient(
    x: Tensor, taps: Tensor, dz: Tensor, dy: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of conv1_weight, conv1_bias, conv2_weight and conv2_bias, in `dtype` (None: x's).

    From x and taps [B, S, 2n] of the forward, dz [B, S, 2n] of the data gradient, and dy [B, S, H]. The
    contribution of `before` to conv1_weight's gradient is not included.
    """
    dtype = dtype or x.dtype
    channels = taps.shape[-1] // 2
    flat_dz, flat_dy = dz.flatten(0, 1), dy.flatten(0, 1)
    stacked1 = products.wide_product(flat_dz.T, x.flatten(0, 1), dtype)
    stacked2 = products.wide_product(flat_dy.T, taps.flatten(0, 1), dtype)
    conv1_weight = _interleave(stacked1[:channels], stacked1[channels:])
    conv2_weight = _interleave(stacked2[:, :channels], stacked2[:, channels:])
    conv1_bias, conv2_bias = flat_dz[:, channels:].sum(dim=0, dtype=dtype), flat_dy.sum(dim=0, dtype=dtype)
    return conv1_weight, conv1_bias, conv2_weight, conv2_bias


def _check(
    x: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    document_start: Tensor | None,
    state: FilterState | None,
) -> None:
    if x.dim() != 3:
        raise ValueError(f"x has shape {list(x.shape)}; the filter expects [batch, tokens, hidden]")
    batch, tokens, hidden = x.shape
    channels = conv1_weight.shape[0]
    check_shape("conv1_weight", conv1_weight, (channels, hidden, 2))
    check_shape("conv1_bias", conv1_bias, (channels,))
    check_shape("conv2_weight", conv2_weight, (hidden, channels, 2))
    if conv2_bias is not None:
        check_shape("conv2_bias", conv2_bias, (hidden,))
    if document_start is not None:
        check_shape("document_start", document_start, (batch, tokens))
        if document_start.dtype != torch.bool:
            raise ValueError(f"document_start is {document_start.dtype}; it must be bool")
    if state is not None:
        check_shape("the state's u", state[0], (batch, hidden))
        check_shape("the state's c", state[1], (batch, channels))


# --- on a CPU: blocks of tokens, with all sequences concatenated -------------------------------------------


def _forward_blocks(
    x: Tensor,
    stacked1: Tensor,
    bias1: Tensor,
    stacked2: Tensor,
    bias2: Tensor | None,
    document_start: Tensor | None,
    older_before: Tensor | None,
    c_before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    batch, length, hidden = x.shape
    width = stacked1.shape[0]
    flat = x.reshape(-1, hidden)
    y, taps = x.new_empty(flat.shape), x.new_empty(flat.shape[0], width)
    last_older = last_c = x.new_zeros(width // 2)
    for rows, cleared in _blocks_of(batch, length, document_start):
        z = products.linear(flat[rows], stacked1, bias1, out=taps[rows])
        older, c = z.chunk(2, dim=-1)
        next_older = older[-1].clone()
        # The row before a cleared one is not added to it. Zeroing it here saves masking the sum.
        _clear(older, [row - 1 for row in cleared if row > 0])
        c[1:] += older[:-1]
        if 0 not in cleared:
            c[0] += last_older
        first_rows = _first_rows(rows, length, document_start) if older_before is not None else []
        for row, sequence in first_rows:
            assert older_before is not None
            c[row] += older_before[sequence]
        older[1:] = c[:-1]
        older[0] = last_c
        _clear(older, cleared)
        for row, sequence in first_rows:
            assert c_before is not None
            older[row] = c_before[sequence]
        last_older, last_c = next_older, c[-1]
        products.linear(z, stacked2, bias2, out=y[rows])
    return y.view(batch, length, hidden), taps.view(batch, length, width)


def _data_gradient_blocks(
    dy: Tensor, stacked1: Tensor, stacked2: Tensor, document_start: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, hidden = dy.shape
    width = stacked1.shape[0]
    flat = dy.reshape(-1, hidden)
    dx, dz = dy.new_empty(flat.shape), dy.new_empty(flat.shape[0], width)
    p_first = dy.new_zeros(batch, width // 2)
    next_p = next_dc = dy.new_zeros(width // 2)
    for rows, cleared in reversed(list(_blocks_of(batch, length, document_start))):
        dtaps = products.product(flat[rows], stacked2, out=dz[rows])
        p, dc = dtaps.chunk(2, dim=-1)
        for row, sequence in _first_rows(rows, length, document_start):
            p_first[sequence] = p[row]
        _clear(p, cleared)
        first_p = p[0].clone()
        dc[:-1] += p[1:]
        dc[-1] += next_p
        p[:-1] = dc[1:]
        p[-1] = next_dc
        _clear(p, [row - 1 for row in cleared if row > 0])
        next_p, next_dc = first_p, torch.zeros_like(next_dc) if 0 in cleared else dc[0]
        products.product(dtaps, stacked1, out=dx[rows])
    return dx.view(batch, length, hidden), dz.view(batch, length, width), p_first


def _clear(x: Tensor, rows: list[int]) -> None:
    if rows:
        x[rows] = 0


def _blocks_of(batch: int, length: int, document_start: Tensor | None) -> Iterator[tuple[slice, list[int]]]:
    """Yield (rows, indices within the block of the rows that have no predecessor)."""
    tokens = batch * length
    if tokens == 0:
        return
    starts = torch.zeros(batch, length, dtype=torch.bool)
    if document_start is not None:
        starts.copy_(document_start)
    starts[:, 0] = True
    for first in range(0, tokens, _BLOCK):
        rows = slice(first, min(first + _BLOCK, tokens))
        yield rows, starts.view(-1)[rows].nonzero().flatten().tolist()


def _first_rows(rows: slice, length: int, document_start: Tensor | None) -> list[tuple[int, int]]:
    """(row of the block, sequence) for each sequence that begins in the block and continues a document."""
    first = -(-rows.start // length)
    sequences = range(first, -(-rows.stop // length))
    return [
        (sequence * length - rows.start, sequence)
        for sequence in sequences
        if document_start is None or not document_start[sequence, 0]
    ]


# --- on any device: whole tensors and masks ----------------------------------------------------------------


def _taps(
    z: Tensor, document_start: Tensor | None, older_before: Tensor | None, c_before: Tensor | None
) -> Tensor:
    continues = None if document_start is None else ~document_start.unsqueeze(-1)
    older, newer = z.chunk(2, dim=-1)
    c = newer + _select(_shift_right(older_before, older), continues)
    return torch.cat((_select(_shift_right(c_before, c), continues), c), dim=-1)


def _dz(dtaps: Tensor, document_start: Tensor | None) -> Tensor:
    continues = None if document_start is None else ~document_start[:, 1:, None]
    p, q = dtaps.chunk(2, dim=-1)
    dc = q + _pad_end(_select(p[:, 1:], continues), q)
    return torch.cat((_pad_end(_select(dc[:, 1:], continues), q), dc), dim=-1)


def _first_p(dtaps: Tensor, document_start: Tensor | None) -> Tensor:
    batch, length, width = dtaps.shape
    if length == 0:
        return dtaps.new_zeros(batch, width // 2)
    continues = None if document_start is None else ~document_start[:, :1]
    return _select(dtaps[:, 0, : width // 2], continues).clone()


def _shift_right(before: Tensor | None, x: Tensor) -> Tensor:
    """x[t-1] at index t; at index 0 `before`, or 0."""
    first = torch.zeros_like(x[:, :1]) if before is None else before.unsqueeze(1)
    return torch.cat((first, x), dim=1)[:, : x.shape[1]]


def _pad_end(x: Tensor, like: Tensor) -> Tensor:
    """x [B, S-1, n] padded with zeros at the end to the shape of `like` [B, S, n]."""
    return F.pad(x, (0, 0, 0, like.shape[1] - x.shape[1]))


def _select(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device))


# --- the two layouts of the weights ------------------------------------------------------------------------


def _interleaved_taps(
    x: Tensor, before: Tensor, document_start: Tensor | None, weight: Tensor, bias: Tensor | None
) -> Tensor:
    older = torch.cat((before.unsqueeze(1), x), dim=1)[:, :-1]
    continues = None if document_start is None else ~document_start.unsqueeze(-1)
    window = torch.stack((_select(older, continues), x), dim=-1)
    return linear(window.flatten(-2), weight.flatten(1), bias)


def _stack_conv1(weight: Tensor) -> Tensor:
    """[n, H, 2] to [2n, H]: the rows of the older tap, then those of the newer."""
    channels, hidden, _ = weight.shape
    stacked = weight.new_empty(2 * channels, hidden)
    # Two copies, each with one stride: one permuted copy takes three times as long.
    stacked[:channels].copy_(weight[:, :, 0])
    stacked[channels:].copy_(weight[:, :, 1])
    return stacked


def _stack_conv2(weight: Tensor) -> Tensor:
    """[H, n, 2] to [H, 2n]: the columns of the older tap, then those of the newer."""
    hidden, channels, _ = weight.shape
    stacked = weight.new_empty(hidden, 2 * channels)
    stacked[:, :channels].copy_(weight[:, :, 0])
    stacked[:, channels:].copy_(weight[:, :, 1])
    return stacked


def _interleave(older: Tensor, newer: Tensor) -> Tensor:
    """Two [a, b] to one [a, b, 2]."""
    interleaved = older.new_empty(*older.shape, 2)
    interleaved[:, :, 0].copy_(older)
    interleaved[:, :, 1].copy_(newer)
    return interleaved


# --- registration ------------------------------------------------------------------------------------------


def _empty_outputs(x: Tensor, conv1_weight: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(*x.shape[:2], 2 * conv1_weight.shape[0])


def _empty_data_gradient(dy: Tensor, conv1_weight: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
    return *_empty_outputs(dy, conv1_weight), dy.new_empty(dy.shape[0], conv1_weight.shape[0])


def _empty_weight_gradient(x: Tensor, taps: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    hidden, channels = x.shape[-1], taps.shape[-1] // 2
    shapes = (channels, hidden, 2), (channels,), (hidden, channels, 2), (hidden,)
    return tuple(x.new_empty(shape) for shape in shapes)


@registration.register("yuan::localized_filter", _empty_outputs)
def _filter(
    x: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    document_start: Tensor | None,
    u_before: Tensor | None,
    c_before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (y, taps) as `localized_filter_forward` does."""
    before = None if u_before is None or c_before is None else (u_before, c_before)
    weights = conv1_weight, conv1_bias, conv2_weight, conv2_bias
    return localized_filter_forward(x, *weights, document_start=document_start, before=before)


@registration.register("yuan::localized_filter_data_gradient", _empty_data_gradient)
def _filter_data_gradient(
    dy: Tensor, conv1_weight: Tensor, conv2_weight: Tensor, document_start: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return localized_filter_data_gradient(dy, conv1_weight, conv2_weight, document_start=document_start)


@registration.register("yuan::localized_filter_weight_gradient", _empty_weight_gradient)
def _filter_weight_gradient(
    x: Tensor, taps: Tensor, dz: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return localized_filter_weight_gradient(x, taps, dz, dy)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, conv1_weight, _, conv2_weight, _, document_start, u_before, _ = inputs
    ctx.save_for_backward(x, output[1], conv1_weight, conv2_weight, document_start, u_before)
    ctx.mark_non_differentiable(output[1])


@_filter.gradient(_save)
def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, taps, conv1_weight, conv2_weight, document_start, u_before = ctx.saved_tensors
    needs_x, *needs_weights, _, _, _ = ctx.needs_input_grad
    dx, dz, dc_before = _filter_data_gradient(dy, conv1_weight, conv2_weight, document_start)
    weights: tuple[Tensor | None, ...] = (None,) * 4
    if any(needs_weights):
        weights = _filter_weight_gradient(x, taps, dz, dy)
    du_before = None
    if u_before is None:
        dc_before = None
    else:
        du_before, weights = _gradients_before(dz, u_before, conv1_weight, document_start, weights)
    weights = tuple(g if needed else None for g, needed in zip(weights, needs_weights, strict=True))
    return dx if needs_x else None, *weights, None, du_before, dc_before


def _gradients_before(
    dz: Tensor,
    u_before: Tensor,
    conv1_weight: Tensor,
    document_start: Tensor | None,
    weights: tuple[Tensor | None, ...],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Gradient of u before the first token, and the weights' gradients with its contribution to conv1's."""
    if dz.shape[1] == 0:
        return torch.zeros_like(u_before), weights
    channels = conv1_weight.shape[0]
    continues = None if document_start is None else ~document_start[:, :1]
    dolder = _select(dz[:, 0, channels:], continues)
    du_before = dolder @ conv1_weight[:, :, 0]
    if weights[0] is None:
        return du_before, weights
    share = torch.stack((dolder.T @ u_before, torch.zeros_like(conv1_weight[:, :, 0])), dim=-1)
    return du_before, (weights[0] + share, *weights[1:])
