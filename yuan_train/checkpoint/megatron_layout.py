"""Tensor names and sharding of Yuan 2.0's original format, one file per rank.

The files are `mp_rank_TT_PPP/model_optim_rng.pt`: TT is the tensor-parallel rank, PPP the pipeline stage
(absent with one stage). A stage numbers its layers from 0 and may hold any number of them. A rank's shard of
a tensor is one of:

    rows      v_proj and query-key (complete heads), the embedding: a contiguous range of rows
    columns   the output projections of attention and feed-forward: a contiguous range of columns
    halves    dense_h_to_4h: the rank's rows of the silu half, then its rows of the other half
    whole     norms and the filter: replicated on every rank
    expert up, expert down    the experts of a layer of Yuan 2.0-M32 in one matrix; see `EXPERT_NAMES`

(IEIT-Yuan/Yuan-2.0:megatron/model/transformer.py; its tools/merge_tp_partitions.py:202-211 halves the wrong
dim. IEIT-Yuan/Yuan2.0-M32:megatron/core/transformer/moe/experts.py:46-50.) Optimizer states are not
converted: they are only valid for the partition that wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from yuan_train.config.model import ModelConfig

FILE = "model_optim_rng.pt"

TRACKER = "latest_checkpointed_iteration.txt"
"""File that names the newest iteration."""

COMMON_NAMES = {
    # Our name, after `layers.N.`: the original name, and how tensor parallelism shards it.
    "attention_norm.weight": ("input_layernorm.weight", "whole"),
    "filter.conv1.weight": ("self_attention.lf_gate.conv1.weight", "whole"),
    "filter.conv1.bias": ("self_attention.lf_gate.conv1.bias", "whole"),
    "filter.conv2.weight": ("self_attention.lf_gate.conv2.weight", "whole"),
    "filter.conv2.bias": ("self_attention.lf_gate.conv2.bias", "whole"),
    "filter.norm.weight": ("self_attention.lf_gate.output_layernorm.weight", "whole"),
    "attention.value.weight": ("self_attention.get_value.weight", "rows"),
    "attention.query_key.weight": ("self_attention.get_query_key.weight", "rows"),
    "attention.out.weight": ("self_attention.dense.weight", "columns"),
    "feed_forward_norm.weight": ("post_attention_layernorm.weight", "whole"),
}

DENSE_NAMES = COMMON_NAMES | {
    "feed_forward.up.weight": ("mlp.dense_h_to_4h.weight", "halves"),
    "feed_forward.down.weight": ("mlp.dense_4h_to_h.weight", "columns"),
}

EXPERT_NAMES = COMMON_NAMES | {
    # The router's rows are Q, K, V; a rank has the next 3N/t of them, whatever they are.
    "router.weight": ("mlp.router.attention_router.query_key_value.weight", "rows"),
    # For t ranks `weight1` is named [H, N 2F/t], and its memory is [N, H, 2F/t]: reading it as N blocks of
    # columns mixes the experts. On the last dim a rank has its part of the silu half, then of the other.
    "experts.up.weight": ("mlp.experts.weight1", "expert up"),
    # `weight2` is named [N F/t, H]; its memory is [N, F/t, H].
    "experts.down.weight": ("mlp.experts.weight2", "expert down"),
}


def layer_names(model: ModelConfig) -> dict[str, tuple[str, str]]:
    """By our name, after `layers.N.`: the original name of a layer's tensor, and how it is sharded."""
    return EXPERT_NAMES if model.num_experts else DENSE_NAMES


BUFFER = "rotary_pos_emb.inv_freq"
"""Suffix of buffers that are computed, and not converted."""

Tensors = dict[str, torch.Tensor]


def join_shards(shards: Sequence[torch.Tensor], sharding: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The full tensor [shape] from the shards of all tensor ranks, in order; the inverse of `take_shard`."""
    if sharding == "expert up":
        halves = [shard.reshape(shape[0], shape[2], -1).chunk(2, dim=2) for shard in shards]
        return torch.cat([half[i] for i in range(2) for half in halves], dim=2).transpose(1, 2)
    if sharding == "expert down":
        parts = [shard.reshape(shape[0], -1, shape[1]) for shard in shards]
        return torch.cat(parts, dim=1).transpose(1, 2)
    if sharding == "whole":
        return shards[0]
    if sharding == "columns":
        return torch.cat(list(shards), dim=1)
    if sharding == "halves":
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[i] for i in range(2) for half in halves])
    return torch.cat(list(shards))


def take_shard(tensor: torch.Tensor, sharding: str, rank: int, width: int) -> torch.Tensor:
    """The shard of a full tensor on tensor rank `rank` of `width`."""
    if sharding == "whole":
        return tensor
    if sharding == "expert up":
        halves = tensor.transpose(1, 2).chunk(2, dim=2)
        part = torch.cat([half.chunk(width, dim=2)[rank] for half in halves], dim=2)
        return part.reshape(tensor.shape[2], -1)
    if sharding == "expert down":
        return tensor.transpose(1, 2).chunk(width, dim=1)[rank].reshape(-1, tensor.shape[1])
    if sharding == "columns":
        return tensor.chunk(width, dim=1)[rank]
    if sharding == "halves":
        return torch.cat([half.chunk(width)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(width)[rank]
