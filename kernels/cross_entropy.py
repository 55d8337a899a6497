"""Output head and cross-entropy in one op, block by block over the tokens (Yuan 2.0 paper, section 3.4).

For the rows R of a block, with W the output matrix:

    z = h_R W^T      loss_i = logsumexp(z_i) - z_i[y_i]      dz = (softmax(z) - onehot(y)) * g_i
    dh_R = dz W      dW += dz^T h_R

so that T x V logits never exist whole. With `sum` every g_i is the same number, and the gradients are made
in the forward at g = 1 and scaled in the backward: no logit is computed twice (6THV instead of 8THV). With
`none` the g_i are known in the backward only, which computes each block's logits again.

Products take 16-bit operands as they come; CUDA writes their results in fp32. A CPU has no such product in
torch: bf16 results are rounded once, then summed in fp32; fp16 operands, whose range is small, are widened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from yuan_kernels.reference import Reduction, accumulation_dtype

_VOCABULARY_BLOCK = 4096
"""Rows of dW per product where its result needs a temporary; larger ones cost memory and gain nothing."""

_HALF_SCALE = 1024.0
"""fp16 only: lifts probabilities of 1 / V, below fp16's normal range, before they become an operand."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "sum",
    chunk_size: int | None = None,
) -> Tensor:
    """Cross-entropy of hidden weight^T against targets; arguments and result as in `ops`."""
    # Few large blocks where dW is read and written in fast memory, small ones where logits must fit a cache.
    chunk_size = chunk_size or (2048 if hidden.is_cuda else 256)
    if not torch.is_grad_enabled():
        # An autograd function is told which inputs require gradients, but not that nobody will ask.
        hidden, weight = hidden.detach(), weight.detach()
    if reduction == "none":
        return _TokenLosses.apply(hidden, weight, targets, ignore_index, chunk_size)  # type: ignore[no-any-return]
    return _LossSum.apply(hidden, weight, targets, ignore_index, chunk_size)  # type: ignore[no-any-return]


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk_size: int
    ) -> Tensor:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        gradients = _Gradients(hidden, weight, needs_hidden=needs_hidden, needs_weight=needs_weight)
        losses = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
        for rows in _blocks(hidden.shape[0], chunk_size):
            logits = _product(hidden[rows], weight.T)
            normalizer = _losses_into(losses[rows], logits, targets[rows], ignore_index)
            if needs_hidden or needs_weight:
                _logit_gradients_(logits, normalizer, targets[rows], ignore_index)
                gradients.add(rows, logits, hidden, weight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.save_for_backward(gradients.hidden, gradients.weight)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scaled = (
            None if gradient is None else (gradient * scale).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk_size: int
    ) -> Tensor:
        losses = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
        for rows in _blocks(hidden.shape[0], chunk_size):
            logits = _product(hidden[rows], weight.T)
            _losses_into(losses[rows], logits, targets[rows], ignore_index)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.sizes = (ignore_index, chunk_size)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets = ctx.saved_tensors
        ignore_index, chunk_size = ctx.sizes
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        gradients = _Gradients(hidden, weight, needs_hidden=needs_hidden, needs_weight=needs_weight)
        for rows in _blocks(hidden.shape[0], chunk_size):
            logits = _product(hidden[rows], weight.T)
            normalizer = torch.logsumexp(logits, dim=-1)
            _logit_gradients_(logits, normalizer, targets[rows], ignore_index)
            gradients.add(rows, logits.mul_(scale[rows].unsqueeze(-1)), hidden, weight)
        made = (
            None if gradient is None else gradient.to(like.dtype)
            for gradient, like in ((gradients.hidden, hidden), (gradients.weight, weight))
        )
        return *made, None, None, None


class _Gradients:
    """dh [T, H] and dW [V, H] in fp32 (fp64 for fp64), filled block by block; None where not needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, *, needs_hidden: bool, needs_weight: bool) -> None:
        wide = accumulation_dtype(hidden.dtype)
        self.hidden = torch.empty_like(hidden, dtype=wide) if needs_hidden else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None

    def add(self, rows: slice, dlogits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        lift = _HALF_SCALE if weight.dtype == torch.float16 else 1.0
        operand = (dlogits * lift if lift != 1.0 else dlogits).to(weight.dtype)
        if self.hidden is not None:
            self.hidden[rows] = _product(operand, weight).div_(lift)
        if self.weight is None:
            return
        if self.weight.dtype == weight.dtype:
            self.weight.addmm_(operand.T, hidden[rows])
            return
        # fp32 += 16-bit product: a V x H temporary for each block would cost as much as the product itself.
        for columns in _blocks(weight.shape[0], _VOCABULARY_BLOCK):
            self.weight[columns].add_(_product(operand[:, columns].T, hidden[rows]), alpha=1.0 / lift)


def _blocks(count: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left right in fp32 (fp64 for fp64)."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.dtype == torch.float16:
        return left.float() @ right.float()
    return (left @ right).float()


def _losses_into(losses: Tensor, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Write each token's loss, 0 where ignored; return logsumexp [T] of the logits."""
    ignored = targets == ignore_index
    picked = logits.gather(1, targets.masked_fill(ignored, 0).unsqueeze(1)).squeeze(1)
    normalizer = torch.logsumexp(logits, dim=-1)
    losses.copy_((normalizer - picked).masked_fill_(ignored, 0.0))
    return normalizer


def _logit_gradients_(logits: Tensor, normalizer: Tensor, targets: Tensor, ignore_index: int) -> None:
    """Turn logits into softmax(z) - onehot(y) in place, rows of ignored tokens into zeros."""
    ignored = targets == ignore_index
    logits.sub_(normalizer.unsqueeze(1)).exp_()
    index = targets.masked_fill(ignored, 0).unsqueeze(1)
    logits.scatter_add_(1, index, torch.full_like(index, -1, dtype=logits.dtype))
    logits.masked_fill_(ignored.unsqueeze(1), 0.0)
