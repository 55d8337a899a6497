"""Experts that the ranks of a group share: each runs its own; all else is whole on each rank.

All ranks hold the same hidden state, so their routers choose alike and no choice is sent. A rank's experts
give the outputs of the tokens that chose them, and zeros elsewhere; one all-reduce adds them up. With two
experts for a token the sum has two terms, in any order the same bits: the result is that of one process.

In the backward one all-reduce adds up the gradients of the experts' input, and a small one those of the
weights [T, K] that the router gives. The router's own gradient is added after that, by each rank alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.parallel.tensor import copy_to_tp, reduce_from_tp


def apply_expert_parallel(model: Any, group: dist.ProcessGroup, *, first_expert: int) -> None:
    """Add the collectives of a group to the experts of a model, of which this rank holds a range."""
    for module in model.modules():
        if hasattr(module, "first_expert"):
            module.first_expert = first_expert
            module.forward = _shared(module, module.forward, group)


def remove_experts(model: Any) -> None:
    """Let a model run as on a rank that holds no experts, without a group: they add zeros."""
    for module in model.modules():
        if hasattr(module, "first_expert"):
            module.forward = lambda u_TH, choice, weights_TK, *policy: _Nothing.apply(u_TH, weights_TK)


def _shared(module: Any, own: Callable[..., Tensor], group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def forward(u_TH: Tensor, choice: Any, weights_TK: Tensor, *policy: Any) -> Tensor:
        u_TH, weights_TK = copy_to_tp(u_TH, group), copy_to_tp(weights_TK, group)
        if module.up.weight.shape[0]:
            part_TH = own(u_TH, choice, weights_TK, *policy)
        else:
            part_TH: Tensor = _Nothing.apply(u_TH, weights_TK)  # pyright: ignore[reportAssignmentType]
        return reduce_from_tp(part_TH, group)

    return forward


class _Nothing(torch.autograd.Function):
    """What a rank without experts adds: zeros, whose gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, u_TH: Tensor, weights_TK: Tensor) -> Tensor:
        ctx.shapes = u_TH.shape, weights_TK.shape
        ctx.dtypes = u_TH.dtype, weights_TK.dtype
        return torch.zeros_like(u_TH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        du, dweights = (
            gradients[0].new_zeros(shape, dtype=dtype)
            for shape, dtype in zip(ctx.shapes, ctx.dtypes, strict=True)
        )
        return du, dweights
