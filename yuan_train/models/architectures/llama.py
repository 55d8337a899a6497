"""Llama 3 (arXiv 2407.21783): grouped-query attention, SwiGLU, RMSNorm, scaled rotary embedding.

With experts it is Mixtral (arXiv 2401.04088). The published Hugging Face formats are those of Llama
(model_type `llama`), Mistral, whose layer is Llama's, and Mixtral; Qwen's share the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from yuan_train.config.errors import CheckpointError
from yuan_train.config.model import EXPERT_FIELDS, ModelConfig, ModelSpec, Normal, ParameterSpec, SublayerWork
from yuan_train.models import decoder
from yuan_train.models.decoder import (
    DEFAULTS,
    Publishing,
    TensorMapping,
    decoder_config,
    decoder_from_config,
    decoder_layout,
    refuse,
    refuse_bias,
)


def layer(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The parameters of a layer, drawn from N(0, init_std) as transformers does."""
    return (*decoder.grouped_attention(model), *decoder.feed_forward(model, out=Normal(model.init_std)))


def sublayers(model: ModelConfig) -> tuple[SublayerWork, SublayerWork]:
    """The work of attention and of the feed-forward."""
    attention = decoder.parameters_of(decoder.grouped_attention(model))
    feed_forward = decoder.parameters_of(decoder.feed_forward(model, out=Normal(model.init_std)))
    return decoder.grouped_attention_work(model, attention), decoder.feed_forward_work(model, feed_forward)


SPEC = ModelSpec(
    title="Llama 3",
    takes=frozenset(("num_key_value_heads", "rope_scaling", *EXPERT_FIELDS)),
    defaults={"attention": "plain"},
    projections="grouped",
    constraints=lambda model: iter(()),
    layer=layer,
    sublayers=sublayers,
    tensor_sizes=decoder.tensor_sizes,
    held_experts=decoder.held_experts_work,
)


# --- the published format ---------------------------------------------------------------------------------

MODEL_TYPES = ("llama", "mistral", "mixtral")
MODEL_CODE: tuple[str, ...] = ()
STORES_TIED_HEAD = False


def published_layout(model: ModelConfig) -> Iterator[TensorMapping]:
    """Every tensor of a model, in the model's order; a tied output head is left out."""
    return decoder_layout(model, _published_layer)


def _published_layer(model: ModelConfig, ours: str, published: str) -> Iterator[TensorMapping]:
    """Yield the tensors of one layer; `feed_forward.up` stacks the gate, which has the silu, on `up_proj`."""
    hidden, width = model.hidden_size, model.ffn_hidden_size
    attention, mlp = f"{published}.self_attn", f"{published}.mlp"
    projections = (
        ("query", "q", model.projection_size),
        ("key", "k", model.key_value_size),
        ("value", "v", model.key_value_size),
    )

    def one(name: str, shape: tuple[int, ...], *parts: str) -> TensorMapping:
        return TensorMapping(f"{ours}.{name}", shape, parts)

    yield one("attention_norm.weight", (hidden,), f"{published}.input_layernorm.weight")
    for name, letter, rows in projections:
        yield one(f"attention.{name}.weight", (rows, hidden), f"{attention}.{letter}_proj.weight")
        if model.qkv_bias:
            yield one(f"attention.{name}.bias", (rows,), f"{attention}.{letter}_proj.bias")
    if model.query_key_norm:
        for name, letter, _ in projections[:2]:
            yield one(f"attention.{name}_norm.weight", (model.head_dim,), f"{attention}.{letter}_norm.weight")
    yield one("attention.out.weight", (hidden, model.projection_size), f"{attention}.o_proj.weight")
    yield one("feed_forward_norm.weight", (hidden,), f"{published}.post_attention_layernorm.weight")
    if model.num_experts:
        qwen = model.architecture == "qwen"
        names = ("gate_proj", "up_proj", "down_proj") if qwen else ("w1", "w3", "w2")
        yield from _experts(model, ours, mlp if qwen else f"{published}.block_sparse_moe", names)
        return
    yield one(
        "feed_forward.up.weight", (2 * width, hidden), f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"
    )
    yield one("feed_forward.down.weight", (hidden, width), f"{mlp}.down_proj.weight")


def _experts(
    model: ModelConfig, ours: str, published: str, names: tuple[str, str, str]
) -> Iterator[TensorMapping]:
    """Yield the router and the experts of a layer; `names` are those of an expert's gate, up and down.

    Raises CheckpointError for a router that transformers does not have.
    """
    if model.router != "softmax":
        raise CheckpointError(f"router {model.router!r}: the published format has the softmax router only")
    refuse_bias(model)
    hidden, width, count = model.hidden_size, model.expert_width, model.num_experts
    yield TensorMapping(f"{ours}.router.weight", (count, hidden), (f"{published}.gate.weight",))
    for name, parts, shape in (("up", names[:2], (2 * width, hidden)), ("down", names[2:], (hidden, width))):
        of_all = tuple(f"{published}.experts.{e}.{part}.weight" for e in range(count) for part in parts)
        yield TensorMapping(f"{ours}.experts.{name}.weight", (count, *shape), of_all, stacked=True)


def model_from_config(config: Mapping[str, Any], *, name: str, where: str) -> ModelConfig:
    """The model that a `config.json` describes. Raises CheckpointError, naming `where`."""
    absent = {**DEFAULTS, "max_position_embeddings": 2048}
    fields: dict[str, Any] = {"architecture": "llama"}
    if config["model_type"] == "mixtral":
        absent |= _MIXTRAL
        refuse(config, where, ("router_jitter_noise", "sliding_window", "shared_expert_intermediate_size"))
        fields |= {
            "num_experts": config.get("num_local_experts", 8),
            "experts_per_token": config.get("num_experts_per_tok", 2),
            "router": "softmax",
        }
    elif config["model_type"] == "mistral":
        absent |= _MISTRAL
    model = decoder_from_config(config, name=name, where=where, absent=absent, fields=fields)
    if config["model_type"] == "mistral":
        _refuse_window(config.get("sliding_window", _MISTRAL["sliding_window"]), model, where)
    return model


def _refuse_window(window: Any, model: ModelConfig, where: str) -> None:
    """Raise CheckpointError if a token of the longest sequence does not see all before it."""
    if window is None or isinstance(window, int) and window >= model.max_sequence_length:
        return
    raise CheckpointError(
        f"{where}: sliding_window {window!r}: a token sees the last {window} alone, of up to "
        f"{model.max_sequence_length} (max_position_embeddings), and attention here is full; take a model "
        f'with "sliding_window": null, or, for sequences that the window holds, write '
        f'"max_position_embeddings": {window} in a copy'
    )


_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
"""What an absent key of a Mistral means in transformers."""


_MIXTRAL = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
"""What an absent key of a Mixtral means in transformers."""


def resets_of(config: Mapping[str, Any]) -> dict[str, bool]:
    """Nothing restarts at the end of a document: transformers counts positions through."""
    return {"reset_position_ids": False, "reset_attention": False, "reset_filter": False}


def published_config(model: ModelConfig, how: Publishing) -> dict[str, Any]:
    """The `config.json` of a model, which transformers reads by itself; it has no word for resets.

    Raises CheckpointError for a mixture that Mixtral's class does not compute.
    """
    plain = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
    }
    return decoder_config(model, how, _mixtral(model) if model.num_experts else plain)


def _mixtral(model: ModelConfig) -> dict[str, Any]:
    """What a Mixtral's config has of its own."""
    if not model.norm_topk_prob:
        raise CheckpointError("norm_topk_prob false: Mixtral's weights of the chosen experts sum to 1")
    if model.rope_scaling is not None:
        raise CheckpointError("rope_scaling: Mixtral's class has none")
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": model.expert_width,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    }
