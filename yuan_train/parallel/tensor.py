"""Tensor parallelism from outside: cut parameters, and the collectives around the modules that hold them.

The model says in words what may be cut (`model/sharding.py`); here it is cut. Activations are whole on every
rank of a group:

    column      the input enters the group (its gradient is summed), the output is a part
    row         the input is a part, the outputs are summed
    filter      conv1 as column, conv2 as row, over the H/2 channels; conv2's bias is added after the sum
    vocabulary  each rank looks up its own rows, and the outputs are summed; the head exchanges two numbers
                per token (its logsumexp and its target's logit)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from yuan_kernels import ops

from yuan_train.parallel.collectives import enter, leave
from yuan_train.parallel.groups import meeting
from yuan_train.parallel.shard import Shard, find_shard, sharding_word


@dataclass(frozen=True)
class Cutting:
    """What may be cut, in the model's words, and which part is ours."""

    sharding: Mapping[str, str]
    row_blocks: Mapping[str, int]
    index: int = 0
    count: int = 1


def cut_parameters(model: torch.nn.Module, cutting: Cutting, *, device: torch.device) -> dict[str, Shard]:
    """Give a model built on the meta device its own part of every parameter, empty; return what it holds.

    Shapes that do not divide were refused with the plan.
    """
    shards: dict[str, Shard] = {}
    for path, module in model.named_modules():
        for kind, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{kind}" if path else kind
            shard = find_shard(
                name,
                tuple(parameter.shape),
                cutting.sharding,
                cutting.row_blocks,
                index=cutting.index,
                count=cutting.count,
            )
            local = torch.empty(shard.local_shape, dtype=parameter.dtype, device=device)
            setattr(module, kind, torch.nn.Parameter(local))
            shards[name] = shard
    return shards


def join_group(model: Any, cutting: Cutting, group: dist.ProcessGroup) -> None:
    """Put the group's collectives around the modules of a cut model."""
    for path, module in model.named_modules():
        word = sharding_word(path, cutting.sharding)
        if word == "column":
            module.register_forward_pre_hook(_entering(group))
        elif word == "row":
            module.register_forward_hook(_leaving(group))
        elif word == "vocabulary" and path == "embedding":
            module.forward = _vocabulary_lookup(module, cutting, group)
        if hasattr(module, "convolve"):
            module.convolve = _cut_filter(module, group)
    if model.has_head:
        model.loss = _vocabulary_loss(model, cutting, group)


def _entering(group: dist.ProcessGroup) -> Callable[..., tuple[Tensor, ...]]:
    def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (enter(inputs[0], group), *inputs[1:])

    return hook


def _leaving(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return leave(output, group)

    return hook


def _cut_filter(module: Any, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def convolve(u_BSH: Tensor, document_start: Tensor | None) -> Tensor:
        part_BSH = module.convolution(
            enter(u_BSH, group),
            module.conv1.weight,
            module.conv1.bias,
            module.conv2.weight,
            None,
            document_start=document_start,
        )
        return leave(part_BSH, group) + module.conv2.bias

    return convolve


def _vocabulary_lookup(module: Any, cutting: Cutting, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def forward(tokens_BS: Tensor) -> Tensor:
        rows = module.weight.shape[0]
        local_BS = tokens_BS - cutting.index * rows
        ours_BS = (local_BS >= 0) & (local_BS < rows)
        found_BSH = torch.nn.functional.embedding(local_BS.where(ours_BS, 0), module.weight)
        return leave(found_BSH * ours_BS.unsqueeze(-1), group)

    return forward


def _vocabulary_loss(model: Any, cutting: Cutting, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    exchange = _gathering(group, cutting.count)

    def loss(
        hidden_BSH: Tensor,
        targets_BS: Tensor,
        *,
        reduction: Any = "sum",
        gradient_scale: float | None = None,
    ) -> Tensor:
        main = None if gradient_scale is None else getattr(model.output_weight, "main_gradient", None)
        losses = ops.linear_cross_entropy(
            enter(hidden_BSH, group).flatten(0, 1),
            model.output_weight,
            targets_BS.flatten(),
            reduction=reduction,
            main_gradient=main,
            gradient_scale=None if main is None else gradient_scale,
            vocabulary=(cutting.index * model.output_weight.shape[0], exchange),
        )
        return losses if reduction == "sum" else losses.view_as(targets_BS)

    return loss


def _gathering(group: dist.ProcessGroup, count: int) -> ops.Exchange:
    """Gather two vectors over the group in one message, while the caller goes on."""

    def exchange(logsumexp_T: Tensor, target_T: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        mine_2T = torch.stack([logsumexp_T, target_T])
        gathered = [torch.empty_like(mine_2T) for _ in range(count)]
        work = dist.all_gather(gathered, mine_2T, group=group, async_op=True)
        assert work is not None

        def wait() -> tuple[Tensor, Tensor]:
            with meeting("the head's exchange", dist.get_process_group_ranks(group)):
                work.wait()
            whole = torch.stack(gathered)
            return whole[:, 0], whole[:, 1]

        return wait

    return exchange
