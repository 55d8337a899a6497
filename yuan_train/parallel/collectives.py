"""Collectives of a tensor-parallel group that autograd sees through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from yuan_train.parallel.groups import meeting


def enter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x itself; its gradient is summed over the group, each rank having used x for a part of the output."""
    return _Enter.apply(x, group)  # pyright: ignore[reportReturnType]


def leave(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of every rank's x; the gradient passes as it is, each rank having made a part of the sum."""
    return _Leave.apply(x, group)  # pyright: ignore[reportReturnType]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _sum(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = part.contiguous().clone()
    with meeting("a sum inside the tensor-parallel group", dist.get_process_group_ranks(group)):
        dist.all_reduce(total, group=group)
    return total
