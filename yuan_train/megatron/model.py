"""This rank's chunks of the model, as megatron-core builds them, under our names.

megatron-core hands a layer one tensor besides the hidden state, the attention mask, also when it computes the
layer again in the backward. Ours is the number of a micro-batch of the pass, on the host: positions,
documents and the seed of dropout are found by it. It stands alone because it knows nothing of steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from yuan_kernels import ops

from yuan_train.config.express import Expression
from yuan_train.config.model import ModelConfig, sharding_of
from yuan_train.config.plan import Plan, StagePlan
from yuan_train.megatron import core
from yuan_train.models.attention import DocumentRanges, RotaryTables
from yuan_train.models.experts import Router
from yuan_train.models.layers import DropoutSeed, Linear, hidden_dropout
from yuan_train.models.transformer import Block
from yuan_train.parallel.grid import RankCoord
from yuan_train.parallel.shard import Shard, find_shard
from yuan_train.train.build import DTYPES


class Norm(nn.Module):
    """Our RMSNorm with megatron-core's arguments.

    Every norm is named in the spec: else megatron-core takes apex's as soon as `import apex` succeeds.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device, dtype = _place(config)
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., H] in x's dtype."""
        return ops.rms_norm(x, self.weight, epsilon=self.epsilon)


class _Column(core.ColumnParallelLinear):
    """Rows of the weight over the tensor-parallel group; the bias is added."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return super().forward(x)[0]


class _Row(core.RowParallelLinear):
    """Columns of the weight over the tensor-parallel group; the sum of the partial products."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return super().forward(x)[0]


class AttentionLayer(core.MegatronModule):
    """The filter, if the architecture has one, and the attention of one of our layers."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        model: ModelConfig,
        batches: Batches,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        device, dtype = _place(config)
        self._batches = batches
        group = pg_collection.tp
        with torch.device("meta"):
            whole = Block(model, dtype=dtype)
        self.attention = whole.attention
        for name, child in list(self.attention.named_children()):
            if isinstance(child, Linear):
                setattr(self.attention, name, _cut(child, config, group, is_row=name == "out"))
            else:
                child.to_empty(device=device)
        self.filter = None if whole.filter is None else whole.filter.to_empty(device=device)

    def forward(self, u_SBH: Tensor, attention_mask: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return ([S, B, H], no bias)."""
        inputs = self._batches.enter(attention_mask)
        u_BSH = u_SBH.transpose(0, 1)
        filtered_BSH = u_BSH if self.filter is None else self.filter(u_BSH, inputs.document_start)
        operands = self.attention.project(u_BSH, filtered_BSH, inputs.rotary)
        heads_BSND = ops.causal_attention(*operands, document_ranges=inputs.document_ranges)
        return self.attention.out(heads_BSND.flatten(2)).transpose(0, 1), None


class ExpertLayer(core.MegatronModule):
    """Our router and our experts, whole on every rank, in the place of megatron-core's feed-forward."""

    def __init__(self, config: Any, *, model: ModelConfig) -> None:
        super().__init__(config=config)
        device, dtype = _place(config)
        with torch.device("meta"):
            whole = Block(model, dtype=dtype)
        self.router = whole.router.to_empty(device=device)
        self.experts = whole.experts.to_empty(device=device)

    def forward(self, u_SBH: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Return ([S, B, H], no bias)."""
        u_BSH = u_SBH.transpose(0, 1)
        u_TH = u_BSH.flatten(0, 1)
        choice, weights_TK = self.router(u_TH, num_sequences=u_BSH.shape[0])
        return self.experts(u_TH, choice, weights_TK).view_as(u_BSH).transpose(0, 1), None


class DropAdd:
    """A branch added to the residual, after our hashed dropout, in the place of megatron-core's drawn one.

    The attention of the layer has said which micro-batch it is.
    """

    def __init__(self, *, rate: float, layer: int, site: str, batches: Batches) -> None:
        self._rate, self._layer, self._site, self._batches = rate, layer, site, batches

    def __call__(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Any], Tensor, float], Tensor]:
        return self._add

    def _add(self, branch: tuple[Tensor, Any], residual_SBH: Tensor, _: float) -> Tensor:
        branch_SBH, bias = branch
        assert bias is None and self._batches.current is not None
        seed = self._batches.current.dropout
        if seed is None or not self._rate:
            return residual_SBH + branch_SBH
        branch_BSH = branch_SBH.transpose(0, 1).contiguous()
        dropped_BSH = hidden_dropout(
            branch_BSH,
            self._site,
            rate=self._rate,
            dropout_seed=seed,
            layer=self._layer,
            tokens=(0, branch_BSH.shape[1]),
        )
        return residual_SBH + dropped_BSH.transpose(0, 1)


def _layer_spec(model: ModelConfig, layer: int, batches: Batches) -> Any:
    def drop_add(site: str) -> Any:
        params = {"rate": model.hidden_dropout, "layer": layer, "site": site, "batches": batches}
        return core.ModuleSpec(module=DropAdd, params=params)

    feed_forward = core.ModuleSpec(
        module=core.MLP,
        params={"ffn_hidden_size": model.ffn_hidden_size},
        submodules=core.MLPSubmodules(
            linear_fc1=core.ColumnParallelLinear, linear_fc2=core.RowParallelLinear
        ),
    )
    experts = core.ModuleSpec(module=ExpertLayer, params={"model": model})
    return core.ModuleSpec(
        module=core.TransformerLayer,
        submodules=core.TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=core.ModuleSpec(
                module=AttentionLayer, params={"model": model, "batches": batches}
            ),
            self_attn_bda=drop_add("attention"),
            pre_mlp_layernorm=Norm,
            mlp=experts if model.num_experts else feed_forward,
            mlp_bda=drop_add("feed_forward"),
        ),
    )


def _cut(linear: Linear, config: Any, group: Any, *, is_row: bool) -> nn.Module:
    """megatron-core's linear in the place of one of ours."""
    out_size, in_size = linear.weight.shape
    common = {
        "config": config,
        "init_method": config.init_method,
        "bias": linear.bias is not None,
        "skip_bias_add": False,
        "is_expert": False,
        "tp_group": group,
    }
    if is_row:
        return _Row(in_size, out_size, input_is_parallel=True, **common)
    return _Column(in_size, out_size, gather_output=False, **common)


def _place(config: Any) -> tuple[torch.device, torch.dtype]:
    """Where megatron-core puts its own parameters."""
    return torch.device(torch.cuda.current_device()), config.params_dtype


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What the layers need of a micro-batch besides the hidden state."""

    rotary: RotaryTables
    document_start: Tensor | None
    document_ranges: DocumentRanges | None
    dropout: DropoutSeed | None
    """None: no dropout."""


@dataclass(eq=False)
class Batches:
    """The micro-batches of a pass that were begun, and the one whose layer is computed now."""

    inputs: dict[int, LayerInputs] = field(default_factory=dict[int, LayerInputs])
    current: LayerInputs | None = None

    @staticmethod
    def mask(micro_batch: int) -> Tensor:
        """What to give the model as its attention mask."""
        return torch.tensor(micro_batch, device="cpu")

    def enter(self, mask: Tensor) -> LayerInputs:
        """The micro-batch of an attention mask; it is `current` until a layer of another one begins."""
        self.current = self.inputs[int(mask)]
        return self.current

    def clear(self) -> None:
        """Forget all: a pass begins."""
        self.inputs.clear()
        self.current = None


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
        specs = [_layer_spec(plan.model, layer, batches) for layer in range(first, last)]
        model = core.GPTModel(
            config,
            core.TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm),
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
