"""What decoders have in common: parameters and work of their parts, and their published formats. No torch.

Of the published formats these are the keys of a `config.json` that Llama and the decoders like it share,
read, written and refused, and which architecture reads which. Names and defaults are those of transformers
(LlamaConfig, Qwen2Config, Qwen3Config, modeling_rope_utils.py): a key that is absent means what it means
there.

H = hidden size, P = heads * head size, K = the same of keys or values, F = feed-forward width, N = heads,
D = head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from yuan_train.config.errors import CheckpointError, ConfigError
from yuan_train.config.load import Document, build
from yuan_train.config.model import (
    Constant,
    Kept,
    ModelConfig,
    Normal,
    ParameterSpec,
    Sharding,
    SublayerWork,
    find_format,
    find_module,
    norm,
    validate_model,
)


def feed_forward(model: ModelConfig, *, out: Normal) -> tuple[ParameterSpec, ...]:
    """A norm and the SwiGLU feed-forward, or the experts of a model that has them.

    `up` stacks z0 and z1, and a rank needs the same rows of both.
    """
    if model.num_experts:
        return _experts(model, out=out)
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    return (
        norm("feed_forward_norm.weight", hidden),
        linear("feed_forward.up", (2 * ffn, hidden), "column", Normal(model.init_std), blocks=2),
        linear("feed_forward.down", (hidden, ffn), "row", out),
    )


def linear(
    name: str, shape: tuple[int, int], sharding: Sharding, initial: Normal, *, blocks: int = 1
) -> ParameterSpec:
    """The weight [out, in] of a linear map."""
    return ParameterSpec(
        name=f"{name}.weight", shape=shape, sharding=sharding, initial=initial, blocks=blocks
    )


def feed_forward_work(model: ModelConfig, parameters: int) -> SublayerWork:
    """The SwiGLU feed-forward with its norm: it keeps 2H + 3F elements, or H + 2F under selective recompute.

    Kept: the norm's input and output, `up` (2F) and its product. Of experts with their router.
    """
    if model.num_experts:
        # The most rows there can be: all K of a token. On one card all is there, so nothing is divided.
        return _work_of_rows(model, parameters, model.experts_per_token, collectives=0)
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    return SublayerWork(
        parameters=parameters,
        products=3 * hidden * ffn,
        replicated=Kept(2 * hidden, 1),
        sharded=Kept(3 * ffn),
        selective_replicated=Kept(hidden, 1),
        selective_sharded=Kept(2 * ffn),
        gathered=hidden,
        # A norm reads and writes a hidden state; SwiGLU reads `up` and writes the product.
        recomputed=2 * hidden + 3 * ffn,
        # Gradients of `up` and of its product, of two hidden states.
        held=Kept(3 * ffn + 2 * hidden, 2 * hidden),
        largest_weight=2 * ffn * hidden,
    )


def _experts(model: ModelConfig, *, out: Normal) -> tuple[ParameterSpec, ...]:
    """A norm, the router and the experts, SwiGLU feed-forwards stacked along dim 0.

    The attention router has the rows of N queries, then of N keys and of N values; the softmax router N rows.
    """
    hidden, count, width = model.hidden_size, model.num_experts, model.expert_width
    drawn = Normal(model.init_std)

    def stacked(name: str, rows: int, columns: int, initial: Normal) -> ParameterSpec:
        shape = (count, rows, columns)
        return ParameterSpec(name=f"experts.{name}.weight", shape=shape, sharding="expert", initial=initial)

    return (
        norm("feed_forward_norm.weight", hidden),
        linear("router", (router_rows(model), hidden), "whole", drawn),
        stacked("up", 2 * width, hidden, drawn),
        stacked("down", hidden, width, out),
    )


def router_rows(model: ModelConfig) -> int:
    """Rows of the router's weight: queries, keys and values of every expert, or their scores."""
    return model.num_experts * (1 if model.router == "softmax" else 3)


def held_experts_work(model: ModelConfig, experts: int, rows: int) -> SublayerWork:
    """The same on a rank that holds `experts` of a layer's experts, and is given `rows` rows of each token.

    One all-reduce adds up the ranks' outputs, one their input's
    gradients; the small one of the gradients of the chosen experts' weights is not among `collectives`.
    """
    parameters = parameters_of(_experts(model, out=Normal(model.init_std)))
    away = model.num_experts - experts
    each = 3 * model.hidden_size * model.expert_width
    return _work_of_rows(model, parameters - away * each, rows, collectives=1)


def _work_of_rows(model: ModelConfig, parameters: int, rows: int, *, collectives: int) -> SublayerWork:
    """Norm, router and experts, of which each token meets `rows`.

    Kept: the norm's input and output; the router's products (or their softmax over all, where the weights are
    taken from it), the K weights and two integers for each, the chosen expert and, if there are rows, the
    slot of each; for each row a token's copy (H), `up` (2F), its product (F) and the expert's output (H).
    Selective recompute keeps neither the norm's output nor the copies nor the products of the gates.
    """
    hidden, width, chosen = model.hidden_size, model.expert_width, model.experts_per_token
    # A loss of the shares among all needs the products beside them.
    twice = model.balance == "sequence" and not model.norm_topk_prob
    routing = Kept(0, router_rows(model) * (1 + twice) + chosen, (2 if rows else 1) * chosen)
    return SublayerWork(
        parameters=parameters,
        products=router_rows(model) * hidden + rows * 3 * hidden * width,
        replicated=Kept(2 * hidden + rows * (2 * hidden + 3 * width), 1) + routing,
        sharded=Kept(0),
        selective_replicated=Kept(hidden + rows * (hidden + 2 * width), 1) + routing,
        selective_sharded=Kept(0),
        # The norm twice, for the router and the copies; a copy reads and writes, as SwiGLU does.
        recomputed=2 * hidden + rows * (2 * hidden + 3 * width),
        held=Kept(rows * (3 * width + 2 * hidden) + 2 * hidden, 2 * hidden),
        decided=2 * chosen,
        # Gradients of the experts are added to the bucket one by one.
        largest_weight=2 * width * hidden if rows else router_rows(model) * hidden,
        collectives=collectives,
    )


def grouped_attention(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """A norm and grouped-query attention (Ainslie et al. 2023), biases and norms of the heads where asked."""
    hidden, projection, narrow = model.hidden_size, model.projection_size, model.key_value_size
    drawn = Normal(model.init_std)
    table = [norm("attention_norm.weight", hidden)]
    for name, rows in (("query", projection), ("key", narrow), ("value", narrow)):
        table.append(linear(f"attention.{name}", (rows, hidden), "column", drawn))
        if model.qkv_bias:
            table.append(
                ParameterSpec(
                    name=f"attention.{name}.bias", shape=(rows,), sharding="column", initial=Constant(0.0)
                )
            )
    if model.query_key_norm:
        table += [
            ParameterSpec(
                name=f"attention.{name}_norm.weight",
                shape=(model.head_dim,),
                sharding="head_norm",
                initial=Constant(1.0),
            )
            for name in ("query", "key")
        ]
    return (*table, linear("attention.out", (hidden, projection), "row", drawn))


def grouped_attention_work(model: ModelConfig, parameters: int) -> SublayerWork:
    """Grouped-query attention with its norm: it keeps 2H + 2P + 2K elements, P + K more with head norms.

    Kept: the norm's input and output; queries, keys, values, the heads' outputs; a log-sum-exp per head; the
    inputs of the head norms.
    """
    hidden, projection, narrow = model.hidden_size, model.projection_size, model.key_value_size
    sharded = Kept(2 * projection + 2 * narrow, model.num_attention_heads)
    if model.query_key_norm:
        sharded += Kept(projection + narrow, model.num_attention_heads + model.key_value_heads)
    return SublayerWork(
        parameters=parameters,
        products=2 * hidden * (projection + narrow),
        scores=projection,
        replicated=Kept(2 * hidden, 1),
        sharded=sharded,
        selective_replicated=Kept(hidden, 1),
        selective_sharded=sharded,
        gathered=hidden,
        recomputed=2 * hidden,
        held=Kept(2 * projection + 2 * narrow + 2 * hidden, 2 * hidden),
        largest_weight=hidden * projection,
    )


def tensor_sizes(model: ModelConfig) -> dict[str, int]:
    """The sizes that a tensor-parallel group shards in every decoder."""
    halves = {"feed-forward columns": model.ffn_hidden_size}
    if model.num_experts:
        halves = {"set of experts (no tensor parallelism for a model with experts)": 1}
    return {
        "heads": model.num_attention_heads,
        "key-value heads": model.key_value_heads,
        **halves,
        "vocabulary rows": model.vocab_size,
    }


def parameters_of(table: tuple[ParameterSpec, ...]) -> int:
    """Parameters of a part."""
    return sum(parameter.size for parameter in table)


# --- published formats --------------------------------------------------------------------------------------


_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")

_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    ),
}
"""Keys of a rotary scaling, by its type."""

DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
}
"""What the configs of transformers have in common; `absent` of `decoder_from_config` begins with it."""

_NEUTRAL = (("truncate", True), ("partial_rotary_factor", 1.0))
"""Keys that may be there with the value that they have by default."""

_SET_BY_US = frozenset({"auto_map", "torch_dtype", "dtype", "rope_parameters"})
"""Keys of an imported config that an export does not keep: code, or another form of what it writes."""


def decoder_from_config(
    config: Mapping[str, Any], *, name: str, where: str, absent: Mapping[str, Any], fields: Mapping[str, Any]
) -> ModelConfig:
    """The model that a `config.json` describes.

    `absent` has the values of keys that the config leaves out, `fields` the fields of `ModelConfig` that
    follow from the architecture. Raises CheckpointError, naming `where`, if sizes are missing or invalid, or
    if it needs a feature that is not supported.
    """
    config = {**absent, **config}
    for violation in _unsupported(config, has_experts="num_experts" in fields):
        raise CheckpointError(f"{where}: {violation}")
    missing = [key for key in _SIZES if config.get(key) is None]
    if missing:
        raise CheckpointError(f"{where}: no {', '.join(missing)}; wanted the sizes of a decoder")
    base, scaling, length = _rope(config, where)
    values = {
        "name": name,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": _or(config.get("num_key_value_heads"), config["num_attention_heads"]),
        "ffn_hidden_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "head_dim": _or(config.get("head_dim"), 0),
        "rope_base": base,
        "rope_scaling": scaling,
        "norm_epsilon": config["rms_norm_eps"],
        "tie_embeddings": config["tie_word_embeddings"],
        "init_std": config["initializer_range"],
        "max_sequence_length": length,
        "attention_dropout": config.get("attention_dropout", 0.0),
        **fields,
    }
    return described(where, values)


def described(where: str, values: Mapping[str, Any]) -> ModelConfig:
    """The model of these fields, which `where` describes. Raises CheckpointError if they are of none."""
    try:
        return build(Document(where, dict(values), {}), ModelConfig, validate=validate_model)
    except ConfigError as error:
        raise CheckpointError(f"{where}: describes no model: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Publishing:
    """What a `config.json` is written with, beside its model."""

    dtype: str
    original: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The config that the model was imported with; its keys that say nothing of sizes are kept."""
    resets: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the model was trained to reset at document ends: keys of a run's `data`."""
    token_ids: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of `bos`, `eos`, `eod`, `sep`, `pad` and `mask`, those that are known."""


def decoder_config(model: ModelConfig, how: Publishing, derived: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a model; `derived` has what follows from the architecture: model_type,
    architectures and its own switches. The ids of an imported config are its own."""
    ids = how.token_ids
    defaults = {
        "use_cache": True,
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ids.get("eos", ids.get("eod")),
        "pad_token_id": ids.get("pad"),
    }
    kept = {key: value for key, value in how.original.items() if key not in _SET_BY_US}
    rope = _published_rope(model)
    if how.original and how.original.get("rope_parameters") is None:
        rope = {key: how.original[key] for key in rope if key in how.original}  # in the publisher's own words
    return {
        **defaults,
        **kept,
        "torch_dtype": how.dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_epsilon,
        **rope,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": 0.0,
        **derived,
    }


def refuse(config: Mapping[str, Any], where: str, keys: Sequence[str]) -> None:
    """Raise CheckpointError if a config has one of these keys with another value than null, 0 or []."""
    for key in keys:
        if config.get(key):
            raise CheckpointError(f"{where}: {key} {config[key]!r}: a mixture with this cannot be imported")


def _unsupported(config: Mapping[str, Any], *, has_experts: bool) -> Iterator[str]:
    """Yield what a config needs and we do not support."""
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act {config['hidden_act']!r}; wanted 'silu' (SwiGLU)"
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            yield f"{key}: biases of these projections cannot be imported"
    if _or(config.get("partial_rotary_factor"), 1) != 1:
        yield f"partial_rotary_factor {config['partial_rotary_factor']!r}: only whole heads are rotated here"
    for key in ("num_key_value_heads", "head_dim"):
        if config.get(key) == 0:
            yield f"{key} 0; wanted a number above 0"
    kinds = config.get("layer_types") or []
    is_full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if config.get("use_sliding_window") or not is_full:
        yield "sliding-window attention cannot be imported; only full attention can"
    if config.get("use_mrope"):
        yield "use_mrope: multimodal rotary embeddings cannot be imported"
    if config.get("quantization_config"):
        yield "quantization_config: import the unquantized weights"
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)]
    if experts and not has_experts:
        yield f"{experts[0]}: a mixture of experts of this model_type cannot be imported"


def _rope(config: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any] | None, Any]:
    """The rotary base, its scaling, and the longest sequence: `rope_parameters` or the older two keys."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    found = _or(config.get(key), {})
    length = config.get("max_position_embeddings")
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: {key} {found!r}; wanted an object such as {{'rope_type': 'llama3'}}")
    if key == "rope_parameters" and config.get("rope_scaling") not in (None, found):
        raise CheckpointError(f"{where}: rope_parameters and rope_scaling differ; give one of them")
    given = {name: value for name, value in found.items() if value is not None}
    base = given.pop("rope_theta", config["rope_theta"])
    kinds = [given.pop(name) for name in ("rope_type", "type") if name in given] or ["default"]
    if kinds != kinds[:1] * len(kinds) or not isinstance(kinds[0], str) or kinds[0] not in _ROPE_KEYS:
        known = ", ".join(_ROPE_KEYS)
        raise CheckpointError(f"{where}: {key}: type {kinds[-1]!r} is not supported; wanted one of {known}")
    given = {name: value for name, value in given.items() if (name, value) not in _NEUTRAL}
    if unknown := sorted(map(str, given.keys() - _ROPE_KEYS[kinds[0]])):
        raise CheckpointError(f"{where}: {key}.{unknown[0]} is not supported with type {kinds[0]!r}")
    if kinds[0] == "default":
        return base, None, length
    return base, *_scaling(kinds[0], given, length, f"{where}: {key}")


def _scaling(kind: str, given: dict[str, Any], length: Any, where: str) -> tuple[dict[str, Any], Any]:
    """The fields of `RopeScaling`, and the longest sequence that they are meant for."""
    scaling = {"rope_type": kind, **given}
    if kind == "linear":
        return scaling, length
    if missing := [key for key in _REQUIRED.get(kind, ()) if key not in given]:
        raise CheckpointError(f"{where}: no {missing[0]}; {kind} scaling needs it")
    if given.get("attention_factor") == 0:
        raise CheckpointError(f"{where}: attention_factor 0; wanted a number above 0")
    original = scaling.setdefault("original_max_position_embeddings", length)
    if kind == "llama3":
        return scaling, length
    if kind == "dynamic" and original != length:
        raise CheckpointError(
            f"{where}: original_max_position_embeddings {original!r} is not max_position_embeddings "
            f"{length!r}, from which dynamic scaling is computed"
        )
    stretched = _stretched(original, given.get("factor"))
    return scaling, length if stretched is None or not _is_number(length) else max(length, stretched)


_REQUIRED = {"llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
"""Keys without a default in transformers; `factor` has none here either."""


def _stretched(original: Any, factor: Any) -> int | None:
    """The length that a factor makes of the original one; None if either is no sensible number."""
    if not _is_number(original) or not _is_number(factor):
        return None
    product = original * factor
    return round(product) if math.isfinite(product) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _or(value: Any, default: Any) -> Any:
    """The value, or the default of null."""
    return default if value is None else value


def _published_rope(model: ModelConfig) -> dict[str, Any]:
    """Base, scaling and longest sequence, in the keys that all releases since 4.43 read."""
    scaling = model.rope_scaling
    published = {"rope_theta": model.rope_base, "rope_scaling": None}
    if scaling is None:
        return published | {"max_position_embeddings": model.max_sequence_length}
    original = scaling.original_max_position_embeddings or model.max_sequence_length
    values = {key: getattr(scaling, key) for key in sorted(_ROPE_KEYS[scaling.rope_type])}
    if "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = original
    if values.get("attention_factor") == 0:
        del values["attention_factor"]
    if scaling.rope_type != "dynamic":
        published["max_position_embeddings"] = model.max_sequence_length
    else:
        # transformers stretches it from max_position_embeddings on.
        del values["original_max_position_embeddings"]
        published["max_position_embeddings"] = original
    return published | {"rope_scaling": {"rope_type": scaling.rope_type, **values}}


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TensorMapping:
    """One of our tensors, and the published tensors (`parts`) that it is the row-wise concatenation of.

    `name` and `shape` are ours. All parts have `part_shape`, with equal numbers of rows; a Conv2d's ends
    in a dimension of size 1 that ours does not have. `stacked` parts lack our first dim: each is one entry of
    it, as a matrix of one expert, or equal rows of one, as an expert's gate and up.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    conv2d: bool = False
    stacked: bool = False

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of each published part."""
        if self.stacked:
            return (self.shape[0] * self.shape[1] // len(self.parts), *self.shape[2:])
        rows = self.shape[0] // len(self.parts)
        return (rows, *self.shape[1:], *((1,) if self.conv2d else ()))


Layer = Callable[[ModelConfig, str, str], Iterator[TensorMapping]]
"""Yields the tensors of a layer, given the prefixes of our names and of the published ones."""


def decoder_layout(model: ModelConfig, layer: Layer) -> Iterator[TensorMapping]:
    """Yield every tensor of a decoder, in the model's order; a tied output head is left out."""
    hidden = model.hidden_size
    yield TensorMapping("embedding.weight", (model.vocab_size, hidden), (EMBEDDING,))
    for i in range(model.num_layers):
        yield from layer(model, f"layers.{i}", f"model.layers.{i}")
    yield TensorMapping("final_norm.weight", (hidden,), ("model.norm.weight",))
    if not model.tie_embeddings:
        yield TensorMapping("head.weight", (model.vocab_size, hidden), (HEAD,))


def refuse_bias(model: ModelConfig) -> None:
    """Raise CheckpointError for a model whose router chooses by a bias, for which a format has no place."""
    if model.balance == "bias":
        raise CheckpointError("balance bias: the published format has no bias of experts in the choice")


def rotary_buffer(layer: int) -> str:
    """Published name of a layer's rotary frequencies [rotary_size / 2], which files need not store."""
    return f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"


class PublishedFormat(Protocol):
    """The published format of an architecture, in its file."""

    MODEL_TYPES: tuple[str, ...]
    """`model_type` of the configs that it reads."""
    MODEL_CODE: tuple[str, ...]
    """Files of `hf_export` that transformers needs beside the weights; none where it has the model itself."""
    STORES_TIED_HEAD: bool
    """Whether published files hold a copy of a tied output head."""

    def published_layout(self, model: ModelConfig) -> Iterator[TensorMapping]:
        """Yield every tensor of a model, in the model's order; a tied output head is left out."""
        ...

    def model_from_config(self, config: Mapping[str, Any], *, name: str, where: str) -> ModelConfig:
        """The model that a `config.json` describes. Raises CheckpointError, naming `where`."""
        ...

    def resets_of(self, config: Mapping[str, Any]) -> dict[str, bool]:
        """What a model with this `config.json` resets at document ends: keys of a run's `data`."""
        ...

    def published_config(self, model: ModelConfig, how: Publishing) -> dict[str, Any]:
        """The `config.json` of a model. Raises CheckpointError for one that the format has no words for."""
        ...


def format_of(architecture: str) -> PublishedFormat:
    """The published format of an architecture."""
    return cast(PublishedFormat, find_module(architecture))


def format_for(config: Mapping[str, Any], *, where: str) -> PublishedFormat:
    """The format that reads a `config.json`, by its `model_type`. Raises CheckpointError for another one."""
    return cast(PublishedFormat, find_format(config, where=where))
