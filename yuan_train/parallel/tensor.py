"""Tensor parallelism, applied to a model from outside: shards its parameters and wraps its modules.

The model names a sharding style for each module (`config/model.py`). Every rank of a group holds the
full activations between modules; f and g are Megatron's operators (`collectives.copy_to_tp`,
`reduce_from_tp`):

    column      f on the input (its gradient is all-reduced, once for all modules of a layer that read the
                same tensor); the output is sharded
    row         the input is sharded; g all-reduces the output
    filter      conv1 as column, conv2 as row, over the H/2 channels; conv2's bias is added after g
    vocabulary  each rank looks up its own rows, and g all-reduces the output; the head all-gathers two
                numbers per token (its logsumexp and its target's logit), and four to draw one
    head_norm   each rank norms its own heads; the weights' gradients are all-reduced once per step

With `splits_tokens` f and g are an all-gather and a reduce-scatter: see `_SplitLayout`.

Adapters of a column or row (LoRA) are sharded with it, and need no collectives of their own in forward
and backward: of a column A sees the copied input, of a row B's output is reduced with the matrix's. The
gradient of the adapter that is whole is all-reduced once per step, with those of head norms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from yuan_kernels import ops

from yuan_train.config.model import WHOLE_ADAPTERS
from yuan_train.parallel.gradients import FlatBucket
from yuan_train.parallel.grid import unit_of
from yuan_train.parallel.shard import Shard, find_shard, sharding_style
from yuan_train.parallel.transport import blame_peers

Meanwhile = Callable[[], None] | None
"""What to do beside the reduction of an input's gradient."""


def copy_to_tp(x: Tensor, group: dist.ProcessGroup, *, meanwhile: Meanwhile = None) -> Tensor:
    """x itself; the backward all-reduces its gradient over the group, and calls `meanwhile` beside that.

    Megatron's operator f (Shoeybi et al. 2019), "copy to the tensor-parallel region": each rank uses x for
    its part of the output. The backward raises LostPeer if a rank of the group is lost.
    """
    return _exchange(x, _itself, lambda gradient: _all_reduce(gradient, group, meanwhile))


def reduce_from_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of x over the group, by an all-reduce; the backward passes the gradient through unchanged.

    Megatron's operator g (Shoeybi et al. 2019), "reduce from the tensor-parallel region": each rank computes
    one term of the sum. Raises LostPeer if a rank of the group is lost.
    """
    return _exchange(x, lambda part: _all_reduce(part, group).view_as(part), _itself)


_Map = Callable[[Tensor], Tensor]


def _exchange(x: Tensor, there: _Map, back: _Map) -> Tensor:
    """`there(x)`, whose gradient is `back` of the result's."""
    return _Exchange.apply(x, there, back)  # pyright: ignore[reportReturnType]


def _itself(x: Tensor) -> Tensor:
    return x.view_as(x)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Map, back: _Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _all_reduce(part: Tensor, group: dist.ProcessGroup, meanwhile: Meanwhile = None) -> Tensor:
    # In place: what comes is nobody else's, a product or the sum of what its readers gave back.
    total = part.contiguous()
    _run_beside(partial(dist.all_reduce, total, group=group), group, meanwhile)
    return total


def _run_beside(
    start: Callable[..., dist.Work | None], group: dist.ProcessGroup, meanwhile: Meanwhile = None
) -> None:
    """Run an operation of the group, and `meanwhile` beside it."""
    blaming = partial(
        blame_peers, "an operation of the tensor-parallel group", dist.get_process_group_ranks(group)
    )
    with blaming():
        work = start(async_op=meanwhile is not None)
    if meanwhile is not None:
        # On nccl the reduction waits for what was launched so far, and runs beside what is launched now.
        meanwhile()
        with blaming():
            cast(dist.Work, work).wait()


@dataclass(frozen=True)
class ShardSpec:
    """The model's sharding styles, and which of `count` parts this rank holds."""

    sharding: Mapping[str, str]
    row_blocks: Mapping[str, int]
    """Both by pattern of module names; see `shard.find_shard`."""
    index: int = 0
    """Rank inside the tensor-parallel group."""
    count: int = 1
    experts: tuple[int, int] | None = None
    """Where ranks share experts: those of this rank, [first, last) of each layer; all else is whole."""
    splits_tokens: bool = False
    """Whether each rank has a part of the tokens between the products of layers (sequence parallelism)."""


def shard_parameters(
    model: torch.nn.Module, spec: ShardSpec, *, device: torch.device, on_host: Collection[str] = ()
) -> dict[str, Shard]:
    """Replace every parameter of a model on the meta device by this rank's shard, uninitialised on `device`;
    those of the units `on_host` in host memory.

    Buffers are whole, and zeros. Returns the shards by parameter name. Shapes must divide, as a valid plan
    ensures.
    """
    shards: dict[str, Shard] = {}
    for path, module in model.named_modules():
        for kind, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{kind}" if path else kind
            shard = find_shard(
                name,
                tuple(parameter.shape),
                spec.sharding,
                spec.row_blocks,
                index=spec.index,
                count=spec.count,
                experts=spec.experts,
            )
            place = "cpu" if unit_of(name) in on_host else device
            local = torch.empty(shard.local_shape, dtype=parameter.dtype, device=place)
            setattr(module, kind, torch.nn.Parameter(local))
            shards[name] = shard
        for kind, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, kind, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))
    return shards


def apply_tensor_parallel(
    model: Any, spec: ShardSpec, group: dist.ProcessGroup, *, meanwhile: Meanwhile = None
) -> None:
    """Add the collectives of a tensor-parallel group to the modules of a sharded model.

    The layers get the layout of their hidden states, which has the collectives around products; the lookup of
    tokens is replaced by its parallel form. `meanwhile` is called in the backward beside each reduction of an
    input's gradient.
    """
    layout = _GroupLayout(group, meanwhile)
    if spec.splits_tokens:
        layout = _SplitLayout(group, meanwhile, spec.index, spec.count)
    for part in (model, *model.blocks.values()):
        part.layout = layout
    for path, module in model.named_modules():
        if sharding_style(path, spec.sharding) == "vocabulary" and path == "embedding":
            module.forward = _parallel_lookup(module, spec, group)
        if hasattr(module, "reduce"):
            module.reduce = layout.reduce
    if model.has_head:
        gather, copy = _all_gather(group, spec.count), partial(copy_to_tp, group=group)
        model.set_vocabulary_part(spec.index, gather, copy, _all_gather_exchange(group, spec.count))


def reduce_partial(bucket: FlatBucket, spec: ShardSpec, group: dist.ProcessGroup) -> None:
    """All-reduce a bucket's gradients of what all ranks hold, and each applies to its part: to its own heads,
    as the whole one of a sharded matrix's adapters, or to its part of the tokens.

    Once per optimizer step, before the bucket's own reduction. Blocks the host on gloo, the stream on nccl;
    the ranks of the group run one program, so that all of them come here between the same two collectives.
    Raises LostPeer.
    """
    partial = [bucket.view(bucket.gradient, name) for name in bucket.parameters if _is_partial(name, spec)]
    if not partial:
        return
    flat = torch.cat([gradient.flatten() for gradient in partial])
    with blame_peers("the reduction of partial gradients", dist.get_process_group_ranks(group)):
        dist.all_reduce(flat, group=group)
    for gradient, total in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _is_partial(name: str, spec: ShardSpec) -> bool:
    module, _, kind = name.rpartition(".")
    style = sharding_style(module, spec.sharding)
    if style == "head_norm" or (style, kind) in WHOLE_ADAPTERS:
        return True
    # Norms, and what is added after the filter's reduction: they meet the tokens of this rank.
    in_layer = spec.splits_tokens and module.startswith("layers.")
    return in_layer and (style == "whole" or (style == "filter" and name.endswith("conv2.bias")))


@dataclass(frozen=True)
class _GroupLayout:
    """Hidden states on the ranks of a tensor-parallel group: whole on each, between f and g. A layout of the
    model's (`HiddenLayout`), as the next one is."""

    group: dist.ProcessGroup
    meanwhile: Meanwhile

    def split(self, x_BSH: Tensor) -> Tensor:
        return x_BSH

    def join(self, x: Tensor, shape: torch.Size) -> Tensor:
        return x

    def tokens(self, x: Tensor, length: int) -> tuple[int, int]:
        return 0, length

    def gather(self, u: Tensor, length: int, policy: Any) -> Tensor:
        # Value and filter read the same copy: the backward adds their gradients before it all-reduces them.
        return copy_to_tp(u, self.group, meanwhile=self.meanwhile)

    def reduce(self, y_BSH: Tensor, like: Tensor) -> Tensor:
        return reduce_from_tp(y_BSH, self.group)


@dataclass(frozen=True)
class _SplitLayout(_GroupLayout):
    """Sequence parallelism (Korthikanti et al. 2022): between products each rank has a part of the tokens.

    What would be an all-reduce is a reduce-scatter before a norm and an all-gather after it. All B * S tokens
    are divided, padded by zeros to as many for each rank. Under recompute the input of products is gathered
    again in the backward.
    """

    index: int
    count: int

    def split(self, x_BSH: Tensor) -> Tensor:
        whole = x_BSH.flatten(0, 1)
        return _exchange(whole, self._own, partial(self._gather, num_tokens=len(whole)))

    def join(self, x: Tensor, shape: torch.Size) -> Tensor:
        num_tokens = shape[:-1].numel()
        return _exchange(x, partial(self._gather, num_tokens=num_tokens), self._own).view(shape)

    def gather(self, u: Tensor, length: int, policy: Any) -> Tensor:
        if u.dim() > 2:
            return super().gather(u, length, policy)
        # Less than a sequence is padding.
        num_tokens = self.count * len(u) // length * length

        def gather(u: Tensor) -> Tensor:
            back = partial(self._scatter, meanwhile=self.meanwhile)
            whole = _exchange(u, partial(self._gather, num_tokens=num_tokens), back)
            return whole.view(-1, length, u.shape[-1])

        return policy.mark_recomputable(gather(u), gather, u)

    def reduce(self, y_BSH: Tensor, like: Tensor) -> Tensor:
        if like.dim() > 2:
            return super().reduce(y_BSH, like)
        whole = y_BSH.flatten(0, 1)
        return _exchange(whole, self._scatter, partial(self._gather, num_tokens=len(whole)))

    def tokens(self, x: Tensor, length: int) -> tuple[int, int]:
        return (self.index * len(x) if x.dim() == 2 else 0), length

    def _padded(self, whole: Tensor) -> Tensor:
        return F.pad(whole, (0, 0, 0, -len(whole) % self.count)).contiguous()

    def _own(self, whole: Tensor) -> Tensor:
        return self._padded(whole).chunk(self.count)[self.index].clone()

    def _gather(self, own: Tensor, *, num_tokens: int) -> Tensor:
        whole = own.new_empty(self.count * len(own), *own.shape[1:])
        _run_beside(partial(_ALL_GATHER, whole, own.contiguous(), group=self.group), self.group)
        return whole[:num_tokens]

    def _scatter(self, whole: Tensor, *, meanwhile: Meanwhile = None) -> Tensor:
        padded = self._padded(whole)
        own = padded.new_empty(len(padded) // self.count, *padded.shape[1:])
        _run_beside(partial(_REDUCE_SCATTER, own, padded, group=self.group), self.group, meanwhile)
        return own


# Torch 2.13 renames both functions.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _all_gather(group: dist.ProcessGroup, count: int) -> Callable[[Tensor], Tensor]:
    def gather(local: Tensor) -> Tensor:
        gathered = [torch.empty_like(local) for _ in range(count)]
        with blame_peers("the gathering of a draw", dist.get_process_group_ranks(group)):
            dist.all_gather(gathered, local.contiguous(), group=group)
        return torch.stack(gathered)

    return gather


def _parallel_lookup(module: Any, spec: ShardSpec, group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def forward(tokens_BS: Tensor) -> Tensor:
        rows = module.weight.shape[0]
        is_local_BS = tokens_BS // rows == spec.index
        # The rows of others' tokens are spread too: in the backward zeros are added to them.
        embedded_BSH = module.op(tokens_BS % rows, module.weight)
        return reduce_from_tp(embedded_BSH * is_local_BS.unsqueeze(-1), group)

    return forward


def _all_gather_exchange(group: dist.ProcessGroup, count: int) -> ops.Exchange:
    """An exchange that all-gathers two vectors [T] over the group in one message; the caller waits later."""

    def exchange(logsumexp_T: Tensor, target_T: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        local_2T = torch.stack([logsumexp_T, target_T])
        gathered = [torch.empty_like(local_2T) for _ in range(count)]
        work = dist.all_gather(gathered, local_2T, group=group, async_op=True)
        assert work is not None

        def wait() -> tuple[Tensor, Tensor]:
            with blame_peers("the head's all-gather", dist.get_process_group_ranks(group)):
                work.wait()
            all_ranks = torch.stack(gathered)
            return all_ranks[:, 0], all_ranks[:, 1]

        return wait

    return exchange
