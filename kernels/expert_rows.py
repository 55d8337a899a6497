"""Rows of tokens in the order of their experts, and back.

A token has a slot for each of its K experts, number t K + k. `order` [R] has the slot of each row: of all T K
slots, or of those whose experts a card holds.

    copies:  rows_r = x_{order_r div K}            dx_t = sum over the slots of t, in slot order
    sums:    y_t = sum_k w_tk rows of slot (t, k), each product rounded, in slot order, absent ones zero

Slot by slot, never by an atomic addition: the sum has one order, on any card. With K = 2 it is the same sum,
bit for bit, if two cards hold one slot each and add their zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from yuan_kernels import dispatch, reference, registration
from yuan_kernels.reference import accumulation_dtype


def expert_rows(x: Tensor, order: Tensor, slots: int) -> Tensor:
    """Return copies [R, H] of the tokens x [T, H], one for each slot in `order`, int64 [R].

    Each token has `slots` of them: slot t * slots + k is token t's k-th. A slot is in `order` at most once.
    """
    if dispatch.reference_selected():
        return reference.expert_rows(x, order, slots)
    return _expert_rows(x, order, slots)


def combine_rows(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Return [T, H]: for each token its slots' rows times their weights [T, K], added in slot order.

    `rows` [R, H] are those of the slots in `order`; slots that are not there count as zero. Weights and each
    product are rounded to the rows' dtype, as published.
    """
    if dispatch.reference_selected():
        return reference.combine_rows(rows, weights, order)
    return _combine_rows(rows, weights, order)


@registration.register("yuan::expert_rows", lambda x, order, slots: x.new_empty(order.shape[0], x.shape[1]))
def _expert_rows(x: Tensor, order: Tensor, slots: int) -> Tensor:
    return x.index_select(0, order // slots)


_sum_slots = registration.register(
    "yuan::sum_slots", lambda rows, order, tokens, slots: rows.new_empty(tokens, rows.shape[1])
)(reference.sum_slots)
_combine_rows = registration.register(
    "yuan::combine_rows", lambda rows, weights, order: rows.new_empty(weights.shape[0], rows.shape[1])
)(reference.combine_rows)


@registration.register("yuan::combine_rows_backward", "rows weights")
def _combine_backward(dy: Tensor, rows: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    dy_rows = dy.index_select(0, order // weights.shape[1])
    dweights = torch.zeros(weights.shape, dtype=weights.dtype, device=weights.device)
    wide = accumulation_dtype(rows.dtype)
    dots = torch.linalg.vecdot(dy_rows.to(wide), rows.to(wide)).to(weights.dtype)
    dweights.view(-1)[order] = dots
    return dy_rows * weights.flatten()[order].to(rows.dtype).unsqueeze(-1), dweights


def _save_copies(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, order, ctx.slots = inputs
    ctx.tokens = x.shape[0]
    ctx.save_for_backward(order)


@_expert_rows.gradient(_save_copies)
def _copies_backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
    return _sum_slots(drows, *ctx.saved_tensors, ctx.tokens, ctx.slots), None, None


@_combine_rows.gradient()
def _sums_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *_combine_backward(dy, *ctx.saved_tensors), None
