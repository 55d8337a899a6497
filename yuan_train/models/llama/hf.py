"""The published Hugging Face format of Llama (model_type `llama`), and the layout that Qwen's shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from yuan_train.config.model import ModelConfig
from yuan_train.models.published import TensorMapping, decoder_layout
from yuan_train.models.published_config import DEFAULTS, decoder_config, decoder_from_config

MODEL_TYPES = ("llama",)
MODEL_CODE: tuple[str, ...] = ()
STORES_TIED_HEAD = False


def published_layout(model: ModelConfig) -> Iterator[TensorMapping]:
    """Every tensor of a model, in the model's order; a tied output head is left out."""
    return decoder_layout(model, _layer)


def _layer(model: ModelConfig, ours: str, published: str) -> Iterator[TensorMapping]:
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
    yield one(
        "feed_forward.up.weight", (2 * width, hidden), f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"
    )
    yield one("feed_forward.down.weight", (hidden, width), f"{mlp}.down_proj.weight")


def model_from_config(config: Mapping[str, Any], *, name: str, where: str) -> ModelConfig:
    """The model that a `config.json` describes. Raises CheckpointError, naming `where`."""
    absent = {**DEFAULTS, "max_position_embeddings": 2048}
    return decoder_from_config(
        config, name=name, where=where, absent=absent, fields={"architecture": "llama"}
    )


def resets_of(config: Mapping[str, Any]) -> dict[str, bool]:
    """Nothing restarts at the end of a document: transformers counts positions through."""
    return {"reset_position_ids": False, "reset_attention": False, "reset_filter": False}


def published_config(
    model: ModelConfig,
    *,
    dtype: str,
    original: Mapping[str, Any] | None = None,
    resets: Mapping[str, bool] | None = None,
    token_ids: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The `config.json` of a model, which transformers reads by itself; `resets` it has no word for."""
    derived = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
    }
    return decoder_config(model, dtype=dtype, original=original, token_ids=token_ids, derived=derived)
