"""The localized filter as a sandwich: product, one elementwise pass, product.

    A = [W1_old; W1_new]  (H x H)         Bm = [W2_old | W2_new]  (H x H)
    z    = x A^T + (0, b1)                z[t] = (older[t], newer[t])
    c[t] = newer[t] + k[t] older[t-1]     k[t] = 0 where a document starts, else 1
    taps[t] = (k[t] c[t-1], c[t])
    y    = taps Bm^T + b2

Folding both convolutions into one of three taps would cost half as much again. Backward, given dy:

    dtaps = dy Bm                         dtaps[t] = (p[t], q[t])
    dc[t] = q[t] + k[t+1] p[t+1]          (beyond the end: 0)
    dz[t] = (k[t+1] dc[t+1], dc[t])
    dx = dz A,  dA = dz^T x,  db1 = sum dc,  dBm = dy^T taps,  db2 = sum dy

k selects and never multiplies (0 * inf is NaN): no content of one document can change a bit of another.
The stacked matrices A and Bm are made anew in backward: kept, they would cost 2 H^2 words for each
micro-batch in flight, and to make them is a small part of one product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from yuan_kernels.reference import FilterState


def localized_filter(
    x: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    *,
    document_start: Tensor | None = None,
) -> Tensor:
    """Both convolutions over whole sequences; arguments and result as in `ops.localized_filter`."""
    return _Sandwich.apply(x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start)  # type: ignore[no-any-return]


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
    """Both convolutions over the next tokens; arguments and result as in `ops.localized_filter_step`.

    Older and newer token are interleaved as the weights store them: a few tokens are copied instead of
    both weights, which for one token is what the time goes into.
    """
    u_before, c_before = state
    c = _interleaved_taps(x, u_before, document_start, conv1_weight, conv1_bias)
    y = _interleaved_taps(c, c_before, document_start, conv2_weight, conv2_bias)
    if x.shape[1] == 0:
        return y, state
    return y, (x[:, -1], c[:, -1])


def sandwich_forward(
    x: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    continues: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (y [B, S, H], taps [B, S, H]); the weight gradient needs x and taps.

    `continues` is bool [B, S-1, 1], True where token t+1 belongs to the document of token t; None if all do.
    """
    bias = torch.cat((torch.zeros_like(conv1_bias), conv1_bias))
    z = F.linear(x, _stack_conv1(conv1_weight), bias)
    older, newer = z.chunk(2, dim=-1)
    taps = torch.empty_like(z)
    before, c = taps.chunk(2, dim=-1)
    c.copy_(newer)
    c[:, 1:] += _select(older[:, :-1], continues)
    before[:, :1] = 0
    before[:, 1:] = _select(c[:, :-1], continues)
    return F.linear(taps, _stack_conv2(conv2_weight), conv2_bias), taps


def data_gradient(
    dy: Tensor, conv1_weight: Tensor, conv2_weight: Tensor, continues: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (dx [B, S, H], dz [B, S, H]); the weight gradient needs dz."""
    dtaps = dy @ _stack_conv2(conv2_weight)
    dbefore, dc_direct = dtaps.chunk(2, dim=-1)
    dz = torch.empty_like(dtaps)
    dolder, dc = dz.chunk(2, dim=-1)
    dc.copy_(dc_direct)
    dc[:, :-1] += _select(dbefore[:, 1:], continues)
    dolder[:, -1:] = 0
    dolder[:, :-1] = _select(dc[:, 1:], continues)
    return dz @ _stack_conv1(conv1_weight), dz


def weight_gradient(x: Tensor, taps: Tensor, dz: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of conv1.weight, conv1.bias, conv2.weight and conv2.bias.

    torch sums 16-bit numbers in fp32 and rounds once, in the biases as in the products.
    """
    hidden, channels = x.shape[-1], taps.shape[-1] // 2
    flat_dz, flat_dy = dz.flatten(0, 1), dy.flatten(0, 1)
    stacked1 = flat_dz.T @ x.flatten(0, 1)
    stacked2 = flat_dy.T @ taps.flatten(0, 1)
    conv1_weight = stacked1.view(2, channels, hidden).permute(1, 2, 0).contiguous()
    conv2_weight = stacked2.view(hidden, 2, channels).permute(0, 2, 1).contiguous()
    return conv1_weight, flat_dz[:, channels:].sum(dim=0), conv2_weight, flat_dy.sum(dim=0)


class _Sandwich(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        conv1_weight: Tensor,
        conv1_bias: Tensor,
        conv2_weight: Tensor,
        conv2_bias: Tensor | None,
        document_start: Tensor | None,
    ) -> Tensor:
        continues = None if document_start is None else ~document_start[:, 1:, None]
        y, taps = sandwich_forward(x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, continues)
        ctx.save_for_backward(x, taps, conv1_weight, conv2_weight, continues)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, taps, conv1_weight, conv2_weight, continues = ctx.saved_tensors
        needs_x, *needs_weights, _ = ctx.needs_input_grad
        dx, dz = data_gradient(dy, conv1_weight, conv2_weight, continues)
        weights: tuple[Tensor | None, ...] = (None,) * 4
        if any(needs_weights):
            made = weight_gradient(x, taps, dz, dy)
            weights = tuple(g if needed else None for g, needed in zip(made, needs_weights, strict=True))
        return dx if needs_x else None, *weights, None


def _interleaved_taps(
    x: Tensor, before: Tensor, document_start: Tensor | None, weight: Tensor, bias: Tensor | None
) -> Tensor:
    older = torch.cat((before.unsqueeze(1), x), dim=1)[:, :-1]
    continues = None if document_start is None else ~document_start.unsqueeze(-1)
    window = torch.stack((_select(older, continues), x), dim=-1)
    return F.linear(window.flatten(-2), weight.flatten(1), bias)


def _stack_conv1(weight: Tensor) -> Tensor:
    """[H/2, H, 2] to [H, H]: the rows of the older tap, then those of the newer."""
    return weight.permute(2, 0, 1).flatten(0, 1)


def _stack_conv2(weight: Tensor) -> Tensor:
    """[H, H/2, 2] to [H, H]: the columns of the older tap, then those of the newer."""
    return weight.permute(0, 2, 1).flatten(1)


def _select(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else torch.where(keep, x, torch.zeros((), dtype=x.dtype, device=x.device))
