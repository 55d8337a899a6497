"""megatron-core's names of parameters, and ours, which are global."""

from __future__ import annotations

import re

from yuan_train.config.architecture import sharding_of
from yuan_train.config.model import ModelConfig
from yuan_train.parallel.shard import Shard, find_shard

_OF_A_LAYER = {
    "input_layernorm.": "attention_norm.",
    "self_attention.filter.": "filter.",
    "self_attention.attention.": "attention.",
    "pre_mlp_layernorm.": "feed_forward_norm.",
    "mlp.linear_fc1.": "feed_forward.up.",
    "mlp.linear_fc2.": "feed_forward.down.",
    "mlp.router.": "router.",
    "mlp.experts.": "experts.",
}
"""Modules of a layer; what follows is the same under both names."""
_ENDS = {
    "embedding.word_embeddings.weight": "embedding.weight",
    "decoder.final_layernorm.weight": "final_norm.weight",
    "output_layer.weight": "head.weight",
}


def global_name(name: str, *, first_layer: int, tied: bool) -> str:
    """Our name of a parameter of a chunk whose layers begin with `first_layer`."""
    name = re.sub(r"^(module\.)+", "", name)
    if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
        prefix = next(prefix for prefix in _OF_A_LAYER if match[2].startswith(prefix))
        return f"layers.{int(match[1]) + first_layer}.{_OF_A_LAYER[prefix]}{match[2].removeprefix(prefix)}"
    found = _ENDS[name]
    return "embedding.weight" if tied and found == "head.weight" else found


def shard_of(model: ModelConfig, name: str, local_shape: tuple[int, ...], *, index: int, count: int) -> Shard:
    """The shard that a rank of a tensor-parallel group holds of a parameter, by our name; see `spec`."""
    sharding, row_blocks = sharding_of(model)
    whole_filter = {module: "whole" if style == "filter" else style for module, style in sharding.items()}
    place = find_shard(name, local_shape, whole_filter, row_blocks, index=index, count=count)
    if place.dim is None:
        return place
    shape = tuple(n * count if dim == place.dim else n for dim, n in enumerate(local_shape))
    return find_shard(name, shape, whole_filter, row_blocks, index=index, count=count)
