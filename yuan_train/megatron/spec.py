"""Our layers as megatron-core ModuleSpecs: its layer, linears, embedding and head around our own operations.

Attention, filter and norms are our modules; of attention the linears are megatron-core's, which cut them over
the tensor-parallel group. The filter is whole on every rank of the group.

B = sequences, S = tokens of a sequence, H = hidden size, N = heads, D = size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from yuan_kernels import ops

from yuan_train.config.architecture import find_module
from yuan_train.config.model import ModelConfig
from yuan_train.megatron import core
from yuan_train.megatron.batches import Batches
from yuan_train.models.block import Block
from yuan_train.models.dropout import hidden_dropout
from yuan_train.models.layers import Linear


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


class SelfAttention(core.MegatronModule):
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
        whole = _our_block(model, torch.device("meta"), dtype)
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
        whole = _our_block(model, torch.device("meta"), dtype)
        self.router, self.experts = (
            whole.router.to_empty(device=device),
            whole.experts.to_empty(device=device),
        )

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
            branch_BSH, self._site, rate=self._rate, dropout_seed=seed, layer=self._layer
        )
        return residual_SBH + dropped_BSH.transpose(0, 1)


def block_spec(model: ModelConfig, layers: range, batches: Batches) -> Any:
    """The layers [first, last) of a model, and the final norm."""
    specs = [_layer_spec(model, layer, batches) for layer in layers]
    return core.TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


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
            self_attention=core.ModuleSpec(module=SelfAttention, params={"model": model, "batches": batches}),
            self_attn_bda=drop_add("attention"),
            pre_mlp_layernorm=Norm,
            mlp=experts if model.num_experts else feed_forward,
            mlp_bda=drop_add("feed_forward"),
        ),
    )


def _our_block(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Block:
    return find_module(model.architecture, "block").build_block(model, device=device, dtype=dtype)


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
