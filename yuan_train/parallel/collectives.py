"""Differentiable collectives of a tensor-parallel group: Megatron's f and g (Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from yuan_train.parallel.transport import blame_peers


def copy_to_tp(
    x: torch.Tensor, group: dist.ProcessGroup, *, meanwhile: Callable[[], None] | None = None
) -> torch.Tensor:
    """x itself; the backward all-reduces its gradient over the group, and calls `meanwhile` beside that.

    Megatron's operator f (Shoeybi et al. 2019), "copy to the tensor-parallel region": each rank uses x for
    its part of the output. The backward raises LostPeer if a rank of the group is lost.
    """
    return _CopyToTP.apply(x, group, meanwhile)  # pyright: ignore[reportReturnType]


def reduce_from_tp(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of x over the group, by an all-reduce; the backward passes the gradient through unchanged.

    Megatron's operator g (Shoeybi et al. 2019), "reduce from the tensor-parallel region": each rank computes
    one term of the sum. Raises LostPeer if a rank of the group is lost.
    """
    return _ReduceFromTP.apply(x, group)  # pyright: ignore[reportReturnType]


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, meanwhile: Callable[[], None] | None
    ) -> torch.Tensor:
        ctx.group, ctx.meanwhile = group, meanwhile
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_reduce(gradients[0], ctx.group, ctx.meanwhile), None, None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def _all_reduce(
    part: torch.Tensor, group: dist.ProcessGroup, meanwhile: Callable[[], None] | None = None
) -> torch.Tensor:
    # Not in place: autograd may share a gradient.
    total = part.contiguous().clone()
    blaming = partial(
        blame_peers, "an all-reduce of the tensor-parallel group", dist.get_process_group_ranks(group)
    )
    with blaming():
        work = dist.all_reduce(total, group=group, async_op=meanwhile is not None)
    if meanwhile is not None:
        # On nccl the reduction waits for what was launched so far, and runs beside what is launched now.
        meanwhile()
        with blaming():
            cast(dist.Work, work).wait()
    return total
