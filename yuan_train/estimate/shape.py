"""Sizes of published decoders: a catalogue, and any `config.json` of Hugging Face's with Llama's layer.

Counting bytes needs the sizes alone: neither rotary embedding nor lengths. So this reads more models than the
engine can train; `to_model` and `shape_of` lead to and from those that it can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yuan_train.config.errors import ConfigError
from yuan_train.config.load import Document, build
from yuan_train.config.model import ModelConfig, model_types, validate_model

LARGEST_SIZE = 2**31
"""Sizes of a `config.json` are below this."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder of Llama's form: RMSNorm, grouped-query attention, RMSNorm, SwiGLU in each layer."""

    name: str
    hidden_size: int
    num_layers: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool
    qkv_bias: bool = False
    out_bias: bool = False
    """The attention's output projection has a bias."""
    ffn_bias: bool = False
    """Gate, up and down projection have a bias."""
    query_key_norm: bool = False
    """An RMSNorm over each head of queries and keys."""

    @property
    def query_size(self) -> int:
        """Width of all queries."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all keys, or of all values."""
        return self.num_key_value_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: 2hq + 2hk + 3hf + 2h, and biases and head norms."""
        h, q, k, f = self.hidden_size, self.query_size, self.key_value_size, self.ffn_hidden_size
        biases = self.qkv_bias * (q + 2 * k) + self.out_bias * h + self.ffn_bias * (2 * f + h)
        return 2 * h * q + 2 * h * k + 3 * h * f + 2 * h + biases + self.query_key_norm * 2 * self.head_dim

    @property
    def parameters(self) -> int:
        """All parameters, a tied embedding counted once."""
        matrices = 1 if self.tie_embeddings else 2
        return (
            matrices * self.embedding_parameters + self.num_layers * self.layer_parameters + self.hidden_size
        )


_COLUMNS = (
    *("name", "hidden_size", "num_layers", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "tie_embeddings", "qkv_bias"),
)


def _published(*sizes: Any) -> ModelShape:
    return ModelShape(**dict(zip(_COLUMNS, sizes, strict=True)))


PUBLISHED_SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _published("Qwen2.5-0.5B", 896, 24, 4864, 14, 2, 64, 151936, True, True),
        _published("Qwen2.5-1.5B", 1536, 28, 8960, 12, 2, 128, 151936, True, True),
        _published("Qwen2.5-3B", 2048, 36, 11008, 16, 2, 128, 151936, True, True),
        _published("Qwen2.5-7B", 3584, 28, 18944, 28, 4, 128, 152064, False, True),
        _published("Qwen2.5-14B", 5120, 48, 13824, 40, 8, 128, 152064, False, True),
        _published("Qwen2.5-32B", 5120, 64, 27648, 40, 8, 128, 152064, False, True),
        _published("Llama-3.2-1B", 2048, 16, 8192, 32, 8, 64, 128256, True, False),
        _published("Llama-3.2-3B", 3072, 28, 8192, 24, 8, 128, 128256, True, False),
        _published("Llama-3.1-8B", 4096, 32, 14336, 32, 8, 128, 128256, False, False),
        _published("Llama-3.1-70B", 8192, 80, 28672, 64, 8, 128, 128256, False, False),
        _published("Llama-3.1-405B", 16384, 126, 53248, 128, 8, 128, 128256, False, False),
    )
}
"""Sizes as their `config.json` has them; parameter counts equal the published ones."""


# --- config.json -----------------------------------------------------------------------------------------

_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size")

_ABSENT: Mapping[str, Mapping[str, int]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""The values of `model_type` that have Llama's layer, and what transformers takes for sizes left out."""

_REFUSED = {
    "num_experts": "a mixture of experts is not counted; wanted a dense model",
    "num_local_experts": "a mixture of experts is not counted; wanted a dense model",
    "n_routed_experts": "a mixture of experts is not counted; wanted a dense model",
    "quantization_config": "quantized weights are not counted; wanted the unquantized model's config",
}
"""Keys of a `config.json` with what the formulas do not count."""


_OTHERS = {"phi3": "Its rotary embedding, window and projections are its own"}
"""Of dense models that look like Llama's: why they are not."""


def has_shape(document: Document) -> bool:
    """Whether `shape_from_config` is to read a `config.json`: all but those of the engine's other models."""
    kind = document.value.get("model_type", "llama")
    return kind in _ABSENT or kind not in model_types()


def shape_from_config(document: Document, *, name: str) -> ModelShape:
    """The shape that a `config.json` describes.

    A config without `model_type` is taken for Llama's. Raises ConfigError, naming the key and its line, if
    sizes are missing or impossible, or if its layer is not Llama's.
    """
    config = document.value
    kind = config.get("model_type", "llama")
    if kind not in _ABSENT:
        refused = [why for key, why in _REFUSED.items() if config.get(key)]
        advice = "If its layer is Llama's, write model_type: llama in a copy"
        raise ConfigError(
            f"{document.source(('model_type',))}: model_type {kind!r}; wanted one with Llama's layer: "
            f"{', '.join(_ABSENT)}. {refused[0] if refused else _OTHERS.get(kind, advice)}"
        )
    for key, why in _REFUSED.items():
        if config.get(key):
            raise ConfigError(f"{document.source((key,))}: {key}: {why}")
    if missing := [key for key in _SIZES if config.get(key) is None]:
        raise ConfigError(f"{document.name}: no {', '.join(missing)}; wanted the sizes of a decoder")
    h, layers, f, n, vocab = (_size(document, key) for key in _SIZES)
    biased = _switch(document, "attention_bias") and kind in ("llama", "qwen3")
    return ModelShape(
        name=name,
        hidden_size=h,
        num_layers=layers,
        ffn_hidden_size=f,
        num_attention_heads=n,
        num_key_value_heads=_key_value_heads(document, kind, n),
        head_dim=_head_dim(document, kind, h, n),
        vocab_size=vocab,
        tie_embeddings=_switch(document, "tie_word_embeddings"),
        qkv_bias=biased or kind == "qwen2",
        out_bias=biased,
        ffn_bias=_switch(document, "mlp_bias") and kind == "llama",
        query_key_norm=kind == "qwen3",
    )


def _size(document: Document, key: str) -> int:
    value = document.value[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < LARGEST_SIZE:
        raise ConfigError(
            f"{document.source((key,))}: {key} {value!r}; wanted a whole number from 1 to {LARGEST_SIZE - 1}"
        )
    return value


def _switch(document: Document, key: str) -> bool:
    value = document.value.get(key)
    if value not in (None, True, False) or isinstance(value, int) and not isinstance(value, bool):
        raise ConfigError(f"{document.source((key,))}: {key} {value!r}; wanted true or false")
    return bool(value)


def _key_value_heads(document: Document, kind: str, heads: int) -> int:
    key = "num_key_value_heads"
    if document.value.get(key) is not None:
        count = _size(document, key)
    elif key in document.value:
        count = heads  # null: as many as query heads
    else:
        count = _ABSENT[kind].get(key, heads)
    if heads % count:
        raise ConfigError(
            f"{document.source((key,))}: {key} {count} does not divide {heads} heads; "
            f"wanted one of {', '.join(str(i) for i in range(1, min(heads, 128) + 1) if heads % i == 0)}"
        )
    return count


def _head_dim(document: Document, kind: str, hidden: int, heads: int) -> int:
    if document.value.get("head_dim") is not None:
        return _size(document, "head_dim")
    if "head_dim" not in document.value and "head_dim" in _ABSENT[kind]:
        return _ABSENT[kind]["head_dim"]
    if hidden % heads:
        raise ConfigError(
            f"{document.source(('num_attention_heads',))}: {heads} heads do not divide hidden_size {hidden}; "
            "give head_dim, or heads that divide"
        )
    return hidden // heads


# --- to and from the models of the engine ----------------------------------------------------------------


def shape_of(model: ModelConfig) -> ModelShape:
    """The shape of one of the engine's models. Raises ConfigError if its layer is not Llama's."""
    other = [
        what
        for what, there in (
            ("a localized filter", model.attention == "localized_filter"),
            ("a mixture of experts", model.num_experts > 0),
        )
        if there
    ]
    if other:
        raise ConfigError(
            f"{model.name}: {' and '.join(other)} in each layer, which other trainers do not have; "
            "wanted Llama's layer; take --engine yuan"
        )
    return ModelShape(
        name=model.name,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.key_value_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        tie_embeddings=model.tie_embeddings,
        qkv_bias=model.qkv_bias,
        query_key_norm=model.query_key_norm,
    )


def to_model(shape: ModelShape) -> ModelConfig:
    """The engine's model of this shape. Raises ConfigError if the engine has none."""
    if shape.out_bias or shape.ffn_bias:
        raise ConfigError(
            f"{shape.name}: attention_bias or mlp_bias, which our engine lacks; take --engine trl-0.14"
        )
    switches = {key: True for key in ("qkv_bias", "query_key_norm") if getattr(shape, key)}
    values: dict[str, Any] = {
        "name": shape.name,
        "architecture": "qwen" if switches else "llama",
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "vocab_size": shape.vocab_size,
        "tie_embeddings": shape.tie_embeddings,
        "max_sequence_length": LARGEST_SIZE - 1,  # a shape does not say
        **switches,
    }
    return build(Document(shape.name, values, {}), ModelConfig, validate=validate_model)
