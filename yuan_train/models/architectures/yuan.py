"""Yuan 2.0 (arXiv 2311.15786): attention whose queries and keys see a localized filter; `plain` is its twin.

    layer:  u = RMSNorm(x);  x += attention(u, filter(u));  x += feed_forward(RMSNorm(x))

In Yuan 2.0-M32 (arXiv 2405.17976) the feed-forward is a mixture of experts.

H = hidden size, P = heads * head size, N = heads.

Published by Hugging Face's conventions, Yuan 2.0-M32 differs from the dense models in its experts, one tensor
each, and in the keys of its `moe_config`; the rows of an expert's `w1` are first those of the silu. In three
things the published format differs from what its names suggest:

- `q_proj` and `k_proj` are the upper and lower half of one query-key matrix whose rows are interleaved per
  head: `q_proj` has the queries and keys of the first half of the heads.
- The silu is applied to `up_proj`, not to `gate_proj`. M32 has neither.
- `v_proj` takes the unfiltered input. The filter's kernels are Conv2d weights [out, in, 2, 1].

(IEIT-Yuan/Yuan-2.0:megatron/model/yuan_hf_model.py:279-330 and tools/convert_hf.py:173-255;
IEIT-Yuan/Yuan2.0-M32:3rd_party/AutoGPTQ/auto_gptq/modeling/yuan_moe_hf_model.py.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from yuan_train.config.errors import CheckpointError, Violation
from yuan_train.config.model import (
    EXPERT_FIELDS,
    Kept,
    ModelConfig,
    ModelSpec,
    Normal,
    ParameterSpec,
    SublayerWork,
    Uniform,
    norm,
)
from yuan_train.models import decoder
from yuan_train.models.decoder import Publishing, TensorMapping, decoder_layout, described, refuse_bias


def _constraints(model: ModelConfig) -> Iterator[Violation]:
    if model.attention == "localized_filter" and model.hidden_size % 2:
        yield Violation(
            ("hidden_size",), f"{model.hidden_size} is odd; the localized filter has hidden_size / 2 channels"
        )


def _filter(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The localized filter, 2H^2 + 2.5H parameters, its norm included; drawn as PyTorch's Conv2d default."""
    if model.attention == "plain":
        return ()
    hidden, half = model.hidden_size, model.hidden_size // 2

    def convolution(name: str, out_size: int, in_size: int) -> Iterator[ParameterSpec]:
        bound = Uniform(1.0 / math.sqrt(2 * in_size))
        for kind, shape in (("weight", (out_size, in_size, 2)), ("bias", (out_size,))):
            yield ParameterSpec(name=f"{name}.{kind}", shape=shape, sharding="filter", initial=bound)

    return (
        *convolution("filter.conv1", half, hidden),
        *convolution("filter.conv2", hidden, half),
        norm("filter.norm.weight", hidden),
    )


def _attention(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The norm, the filter and attention; the rows of `query_key` are interleaved per head, so that
    contiguous rows hold whole heads."""
    hidden, projection = model.hidden_size, model.projection_size
    return (
        norm("attention_norm.weight", hidden),
        *_filter(model),
        decoder.linear("attention.value", (projection, hidden), "column", Normal(model.init_std)),
        decoder.linear("attention.query_key", (2 * projection, hidden), "column", Normal(model.init_std)),
        decoder.linear("attention.out", (hidden, projection), "row", _out(model)),
    )


def _out(model: ModelConfig) -> Normal:
    """Of the maps back to the hidden state: N(0, init_std / sqrt(2 * num_layers)), as published."""
    return Normal(model.init_std / math.sqrt(2 * model.num_layers))


def _feed_forward(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    return decoder.feed_forward(model, out=_out(model))


def _sublayers(model: ModelConfig) -> tuple[SublayerWork, SublayerWork]:
    feed_forward = decoder.parameters_of(_feed_forward(model))
    return _attention_work(model), decoder.feed_forward_work(model, feed_forward)


def _attention_work(model: ModelConfig) -> SublayerWork:
    """What autograd saves in the model's code (equal to a count with `saved_tensors_hooks`):

    the norms (attention, filter)         the input, and 1/rms
    u (also the filter's input), f        H each
    taps of the filter's convolutions     H
    q, k, v, heads' output                P each, and N log-sum-exps

    Plain attention has neither the filter's norm nor taps, and f is u. No attention scores are stored. A
    frozen filter (the model has adapters) keeps no taps: they are for its weights' gradients.
    """
    hidden, projection = model.hidden_size, model.projection_size
    filters = 1 if model.attention == "localized_filter" else 0
    taps = filters if model.lora is None else 0
    sharded = Kept(4 * projection + taps * hidden, model.num_attention_heads)
    return SublayerWork(
        parameters=decoder.parameters_of(_attention(model)),
        products=4 * hidden * projection + filters * 2 * hidden * hidden,
        scores=projection,
        replicated=Kept((2 + 2 * filters) * hidden, 1 + filters),
        sharded=sharded,
        selective_replicated=Kept((1 + filters) * hidden, 1 + filters),
        selective_sharded=sharded,
        gathered=(1 + filters) * hidden,
        # The filter's shift and residual add a pass.
        shifted=3 * hidden * filters,
        recomputed=(1 + filters) * 2 * hidden,
        held=Kept(4 * projection + 2 * hidden, 2 * hidden),
        largest_weight=2 * projection * hidden,
        collectives=1 + filters,
    )


def _tensor_sizes(model: ModelConfig) -> dict[str, int]:
    found = decoder.tensor_sizes(model)
    del found["key-value heads"]
    return found if model.attention == "plain" else found | {"filter channels": model.hidden_size // 2}


SPEC = ModelSpec(
    title="Yuan 2.0",
    takes=frozenset(("attention", "rotary_dim", "rotary_form", *EXPERT_FIELDS)),
    defaults={"attention": "localized_filter"},
    projections="interleaved",
    constraints=_constraints,
    layer=lambda model: (*_attention(model), *_feed_forward(model)),
    sublayers=_sublayers,
    tensor_sizes=_tensor_sizes,
    held_experts=decoder.held_experts_work,
)


# --- the published format ---------------------------------------------------------------------------------

MODEL_TYPES = ("yuan",)
"""`model_type` of the configs that `model_from_config` reads."""
MODEL_CODE = ("configuration_yuan.py", "modeling_yuan.py")
"""Files of `hf_export` that transformers needs beside the weights."""
STORES_TIED_HEAD = True
END_OF_DOCUMENT_ID = 77185
SEPARATOR_ID = 77187
MASK_ID = 134953


def published_layout(model: ModelConfig) -> Iterator[TensorMapping]:
    """Every tensor of a model, in the model's order; a tied output head is left out."""
    return decoder_layout(model, _published_layer)


def _published_layer(model: ModelConfig, our_prefix: str, published_prefix: str) -> Iterator[TensorMapping]:
    """Yield the tensors of one layer."""
    hidden, projection = model.hidden_size, model.projection_size
    attention, filter_, mlp = (
        f"{published_prefix}.self_attn",
        f"{published_prefix}.self_attn.lf_gate",
        f"{published_prefix}.mlp",
    )

    def one(name: str, shape: tuple[int, ...], *parts: str, conv2d: bool = False) -> TensorMapping:
        return TensorMapping(f"{our_prefix}.{name}", shape, parts, conv2d)

    yield one("attention_norm.weight", (hidden,), f"{published_prefix}.input_layernorm.weight")
    if model.attention == "localized_filter":
        half = hidden // 2
        yield one("filter.conv1.weight", (half, hidden, 2), f"{filter_}.conv1.weight", conv2d=True)
        yield one("filter.conv1.bias", (half,), f"{filter_}.conv1.bias")
        yield one("filter.conv2.weight", (hidden, half, 2), f"{filter_}.conv2.weight", conv2d=True)
        yield one("filter.conv2.bias", (hidden,), f"{filter_}.conv2.bias")
        yield one("filter.norm.weight", (hidden,), f"{filter_}.output_layernorm.weight")
    yield one("attention.value.weight", (projection, hidden), f"{attention}.v_proj.weight")
    yield one(
        "attention.query_key.weight",
        (2 * projection, hidden),
        f"{attention}.q_proj.weight",
        f"{attention}.k_proj.weight",
    )
    yield one("attention.out.weight", (hidden, projection), f"{attention}.o_proj.weight")
    yield one("feed_forward_norm.weight", (hidden,), f"{published_prefix}.post_attention_layernorm.weight")
    if model.num_experts:
        yield from _experts(model, our_prefix, mlp)
        return
    width = model.ffn_hidden_size
    yield one(
        "feed_forward.up.weight", (2 * width, hidden), f"{mlp}.up_proj.weight", f"{mlp}.gate_proj.weight"
    )
    yield one("feed_forward.down.weight", (hidden, width), f"{mlp}.down_proj.weight")


def _experts(model: ModelConfig, our_prefix: str, mlp: str) -> Iterator[TensorMapping]:
    """Yield the router and the experts of a layer. Raises CheckpointError for a router that M32 has not."""
    if model.router != "attention":
        raise CheckpointError(f"router {model.router!r}: the published format has the attention router only")
    refuse_bias(model)
    hidden, width, count = model.hidden_size, model.expert_width, model.num_experts
    gates = tuple(f"{mlp}.gate.{name}.weight" for name in ("query", "key", "value"))
    yield TensorMapping(f"{our_prefix}.router.weight", (3 * count, hidden), gates)
    for ours, theirs, shape in (("up", "w1", (2 * width, hidden)), ("down", "w2", (hidden, width))):
        parts = tuple(f"{mlp}.experts.{expert}.{theirs}.weight" for expert in range(count))
        yield TensorMapping(f"{our_prefix}.experts.{ours}.weight", (count, *shape), parts, stacked=True)


def model_from_config(config: Mapping[str, Any], *, name: str, where: str) -> ModelConfig:
    """The model that a published `config.json` describes; `where` names the file in messages.

    Raises CheckpointError if sizes are missing or invalid, or if it needs a feature that is not supported.
    """
    for violation in _unsupported(config):
        raise CheckpointError(f"{where}: {violation}")
    experts = _expert_sizes(config)
    values = {
        "name": name,
        "num_layers": config.get("num_hidden_layers"),
        "hidden_size": config.get("hidden_size"),
        "num_attention_heads": config.get("num_attention_heads"),
        # M32's published class reads the width in moe_config alone, which may differ.
        "ffn_hidden_size": config.get("intermediate_size") or experts.get("expert_ffn_hidden_size"),
        "vocab_size": config.get("vocab_size"),
        "head_dim": _head_dim(config),
        "attention": "localized_filter" if config.get("localized_filter", True) else "plain",
        "rope_base": _rope_base(config),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "init_std": config.get("initializer_range", 0.02),
        "max_sequence_length": config.get("max_position_embeddings") or config.get("model_max_length"),
        **experts,
    }
    missing = [key for key, ours in _SIZES.items() if values[ours] is None]
    if missing or values["max_sequence_length"] is None:
        wanted = missing or ["max_position_embeddings"]
        raise CheckpointError(f"{where}: no {', '.join(wanted)}; wanted the sizes of a Yuan 2.0 model")
    return described(where, values)


_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
}


def _expert_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The experts of a published config, and what is rotated of a head; of a dense model that is all."""
    moe = config.get("moe_config")
    if not isinstance(moe, Mapping):
        return {key: config[key] for key in ("rotary_dim", "rotary_form") if config.get(key)}
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    rotated = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else 0
    return {
        "num_experts": moe.get("moe_num_experts"),
        "experts_per_token": moe.get("moe_top_k"),
        "expert_ffn_hidden_size": moe.get("ffn_hidden_size"),
        "router": "attention",
        # The class has no key for it: it rotates hidden_size / num_attention_heads dims of a wider head.
        "rotary_dim": config.get("rotary_dim", rotated),
        "rotary_form": config.get("rotary_form", "exact"),
    }


def _head_dim(config: Mapping[str, Any]) -> int:
    """Width of a head if the config gives it; 0 for hidden_size / num_attention_heads."""
    if isinstance(config.get("head_dim"), int):
        return config["head_dim"]
    projection, heads = config.get("attention_projection_size"), config.get("num_attention_heads")
    if isinstance(projection, int) and isinstance(heads, int) and heads > 0 and projection % heads == 0:
        return projection // heads
    return 0


def _rope_base(config: Mapping[str, Any]) -> Any:
    """The rotary base, as old or new releases of transformers write it; 10000 if absent, as published."""
    rope_parameters = config.get("rope_parameters")
    rope_theta = rope_parameters.get("rope_theta") if isinstance(rope_parameters, dict) else None
    return config.get("rope_theta") or rope_theta or config.get("rotary_base") or 10000.0


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a config needs and we do not support."""
    if config.get("model_type", "yuan") != "yuan":
        yield f"model_type {config['model_type']!r}; wanted 'yuan' (Yuan 2.0)"
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {config['hidden_act']!r}; Yuan 2.0 has 'silu'"
    if config.get("use_shareqk"):
        yield "use_shareqk: the variant without a filter, which no released model uses, cannot be imported"
    rope_parameters = config.get("rope_parameters")
    scaled = isinstance(rope_parameters, dict) and rope_parameters.get("rope_type", "default") != "default"
    if config.get("rope_scaling") or scaled:
        yield "rope_scaling: scaled rotary embeddings cannot be imported"
    if config.get("quantization_config"):
        yield "quantization_config: import the unquantized weights"
    moe = config.get("moe_config")
    if isinstance(moe, Mapping):
        yield from _unsupported_experts(moe)
    elif moe or config.get("num_experts") or config.get("use_moe"):
        yield "a mixture of experts without a moe_config, where Yuan 2.0-M32 has its sizes"
    kv_heads = config.get("num_key_value_heads")
    if kv_heads not in (None, config.get("num_attention_heads")):
        yield f"num_key_value_heads {kv_heads}: Yuan 2.0 has no grouped queries"


def _unsupported_experts(moe: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a `moe_config` needs and we do not support."""
    count, chosen = moe.get("moe_num_experts"), moe.get("moe_top_k")
    for key, value in (("moe_num_experts", count), ("moe_top_k", chosen)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 2:
            yield f"moe_config.{key} {value!r}; wanted 2 or more"
    if not isinstance(moe.get("ffn_hidden_size"), int):
        yield f"moe_config.ffn_hidden_size {moe.get('ffn_hidden_size')!r}; wanted the width of an expert"
    if not moe.get("norm_topk_prob", True):
        yield "moe_config.norm_topk_prob false: the weights of the chosen experts must sum to 1"
    if not moe.get("gated_linear_unit", True):
        yield "moe_config.gated_linear_unit false: the experts must be SwiGLU"


def resets_of(config: Mapping[str, Any]) -> dict[str, bool]:
    """What a model with this `config.json` resets at document ends."""
    return {
        "reset_position_ids": bool(config.get("reset_position_ids", True)),
        "reset_attention": bool(config.get("reset_attention_mask", False)),
        "reset_filter": bool(config.get("reset_filter", False)),
    }


_AUTO_MAP = {
    "AutoConfig": "configuration_yuan.YuanConfig",
    "AutoModel": "modeling_yuan.YuanModel",
    "AutoModelForCausalLM": "modeling_yuan.YuanForCausalLM",
}


def published_config(model: ModelConfig, how: Publishing) -> dict[str, Any]:
    """A `config.json` with every key that our exported model code and the published code read."""
    ids = {"eod": END_OF_DOCUMENT_ID, "sep": SEPARATOR_ID, "pad": END_OF_DOCUMENT_ID, "mask": MASK_ID}
    ids |= how.token_ids
    resets = how.resets
    defaults = {
        "use_cache": True,
        "causal_mask": True,
        "use_flash_attention": False,
        "use_loss_mask": False,
        "dropout": 0,
        "reset_position_ids": resets.get("reset_position_ids", True),
        "reset_attention_mask": resets.get("reset_attention", False),
        "eod_token": ids["eod"],
        "eod_token_id": ids["eod"],
        "sep_token": ids["sep"],
        "sep_token_id": ids["sep"],
        "mask_token": ids["mask"],
        "pad_token_id": ids["pad"],
        "bos_token_id": ids["eod"],
        "eos_token_id": ids["eod"],
    }
    kept = {key: value for key, value in how.original.items() if key not in ("auto_map", "torch_dtype")}
    derived = {
        "model_type": "yuan",
        "architectures": ["YuanForCausalLM"],
        "auto_map": _AUTO_MAP,
        "torch_dtype": how.dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "head_dim": model.head_dim,
        "attention_projection_size": model.projection_size,
        "hidden_act": "silu",
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_base,
        "max_position_embeddings": model.max_sequence_length,
        "model_max_length": model.max_sequence_length,
        "tie_word_embeddings": model.tie_embeddings,
        "localized_filter": model.attention == "localized_filter",
        "reset_filter": resets.get("reset_filter", False),
        **_published_experts(model),
    }
    return {**defaults, **kept, **derived}


def _published_experts(model: ModelConfig) -> dict[str, Any]:
    """The keys that only a model with experts or partly rotated heads has."""
    found: dict[str, Any] = {}
    if model.num_experts:
        found["use_moe"] = True
        found["moe_config"] = {
            "moe_num_experts": model.num_experts,
            "moe_top_k": model.experts_per_token,
            "ffn_hidden_size": model.expert_width,
            "norm_topk_prob": True,
            "gated_linear_unit": True,
        }
    if model.num_experts or model.rotary_dim:
        # Without it a model with experts rotates hidden_size / num_attention_heads, as M32 does.
        found["rotary_dim"] = model.rotary_size
    if model.rotary_form != "exact":
        found["rotary_form"] = model.rotary_form
    return found
