"""This rank's chunks of the model, as megatron-core builds them, under our names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from yuan_train.config.architecture import sharding_of
from yuan_train.config.express import Expression
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan, StagePlan
from yuan_train.megatron import core
from yuan_train.megatron.batches import Batches
from yuan_train.megatron.spec import ExpertLayer, block_spec
from yuan_train.models.experts import Router
from yuan_train.parallel.grid import RankCoord
from yuan_train.parallel.shard import Shard, find_shard
from yuan_train.train.build import DTYPES

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


@dataclass(frozen=True)
class Chunk:
    """One virtual stage of this rank."""

    stage: StagePlan
    module: Any
    """DistributedDataParallel around the GPTModel."""

    @property
    def model(self) -> Any:
        """The GPTModel inside of megatron-core's wrappers."""
        return unwrap(self.module)


@dataclass(frozen=True)
class Named:
    """One parameter of this rank."""

    name: str
    """Ours."""
    shard: Shard
    parameter: Any
    is_copy: bool
    """Whether it is the last stage's copy of a tied embedding."""


def unwrap(module: Any) -> Any:
    """The GPTModel inside of megatron-core's wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def build_chunks(
    plan: Plan, coord: RankCoord, expression: Expression, batches: Batches, *, precision: str, timers: Any
) -> tuple[Chunk, ...]:
    """The chunks of a rank, in the order of their stages; its groups must be there."""
    stages = [plan.pipelines[coord.pipeline].stages[s] for s in coord.stages]
    chunks: list[Chunk] = []
    for number, stage in enumerate(stages):
        config = _config(plan, expression, stage, precision=precision, timers=timers)
        virtual = number if expression.virtual > 1 else None
        first, last = int(stage.layers[0]), int(stage.layers[1])
        model = core.GPTModel(
            config,
            block_spec(plan.model, range(first, last), batches),
            vocab_size=plan.model.vocab_size,
            max_sequence_length=plan.sequence_length,
            pre_process=stage.embedding,
            post_process=stage.head,
            # Ours is inside the attention: megatron-core's knows neither documents nor all our scalings.
            position_embedding_type="none",
            vp_stage=virtual,
            share_embeddings_and_output_weights=plan.model.tie_embeddings,
        )
        assert first == last or core.layer_offset(config, virtual) == first, "the layout is the plan's"
        mark_cut_weights(model, plan, stage, coord.tensor_rank, expression.tensor)
        ddp = core.DistributedDataParallelConfig(
            use_distributed_optimizer=plan.optimizer_sharding,
            overlap_grad_reduce=False,
            check_for_nan_in_grad=False,
            grad_reduce_in_fp32=True,
        )
        wrapped = model if precision == "fp32" else core.Float16Module(config, model)
        chunks.append(Chunk(stage, core.DistributedDataParallel(config, ddp, wrapped)))
    return tuple(chunks)


def _config(plan: Plan, expression: Expression, stage: StagePlan, *, precision: str, timers: Any) -> Any:
    model, dtype = plan.model, DTYPES[precision]
    interleaved = expression.virtual > 1
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": stage.num_recomputed,
    }
    several = expression.pipeline > 1
    return core.TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.key_value_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        # Ours is hashed, and applied in the spec.
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        tensor_model_parallel_size=expression.tensor,
        pipeline_model_parallel_size=expression.pipeline,
        virtual_pipeline_model_parallel_size=expression.virtual if interleaved else None,
        pipeline_model_parallel_layout=expression.layout if several else None,
        # Sums over tokens: the loss is divided by the batch's tokens before.
        calculate_per_token_loss=True,
        timers=timers,
        **point_to_point(interleaved),
        **(recompute if stage.num_recomputed else {}),
    )


def point_to_point(interleaved: bool) -> dict[str, bool]:
    """How megatron-core sends between stages.

    With its defaults interleaving gives wrong gradients over gloo and says nothing: batched messages of
    several stages meet in another order than they were posted in.
    """
    return {"overlap_p2p_comm": interleaved, "batch_p2p_comm": not interleaved}


def mark_cut_weights(model: Any, plan: Plan, stage: StagePlan, index: int, count: int) -> None:
    """Mark the parameters that tensor parallelism cuts.

    megatron-core marks them only where it also fills them; without the marks its gradient norm counts them on
    the first rank of the group alone, and says nothing.
    """
    for named in named_parameters(model, plan, stage, index, count):
        if named.shard.dim is not None and count > 1:
            for key in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                named.parameter.__dict__.pop(key, None)
            core.mark_tensor_parallel(named.parameter, True, named.shard.dim, 1)


def named_parameters(model: Any, plan: Plan, stage: StagePlan, index: int, count: int) -> Iterator[Named]:
    """The parameters of a chunk, under our names; `index` of `count` is the rank of its group."""
    tied = plan.model.tie_embeddings
    for name, parameter in model.named_parameters():
        own = global_name(name, first_layer=int(stage.layers[0]), tied=tied)
        shard = shard_of(plan.model, own, tuple(parameter.shape), index=index, count=count)
        yield Named(own, shard, parameter, is_copy=tied and name.endswith("output_layer.weight"))


def routers_of(chunks: tuple[Chunk, ...]) -> Iterator[tuple[int, Router]]:
    """The routers of a rank's chunks, with their layers."""
    for chunk in chunks:
        for layer, module in enumerate(chunk.model.decoder.layers, int(chunk.stage.layers[0])):
            if isinstance(module.mlp, ExpertLayer):
                yield layer, module.mlp.router


def sum_head_norms(chunks: tuple[Chunk, ...]) -> None:
    """Add up the gradients of norms over heads, which each rank of a tensor-parallel group has of its own."""
    group = core.parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return
    for chunk in chunks:
        for name, parameter in chunk.module.named_parameters():
            if name.endswith(("query_norm.weight", "key_norm.weight")):
                torch.distributed.all_reduce(parameter.main_grad, group=group)
