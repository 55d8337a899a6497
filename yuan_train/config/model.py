"""A model: its sizes with their constraints, the parameters and FLOP that its architecture makes of them, and
how it is named.

A model file, a name of `configs/model`, a Hugging Face folder or its `config.json`, or a checkpoint names
one: run files and `--model` of all commands are read here (`locate_model`).

An architecture says of a layer, without torch, its parameters and its work. It is a file of
`yuan_train/models/architectures`, which has a `ModelSpec`, and the published format (`models/decoder.py`),
if there is one.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import json
import math
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from yuan_train.config.errors import CheckpointError, ConfigError, Violation, YuanError
from yuan_train.config.load import (
    Document,
    as_plain,
    build,
    graft,
    is_mapping,
    names,
    override,
    read_document,
)

FOLDER = "yuan_train.models.architectures"

Sharding = Literal["column", "row", "filter", "vocabulary", "head_norm", "expert", "whole"]
"""How a tensor-parallel group shards a module's parameters:

column      weight [out, in] and bias [out] by rows: each rank computes a part of the output
row         weight [out, in] by columns: each rank reads a part of the input, and the outputs are all-reduced
filter      the C = H/2 channels between both convolutions: conv1.weight [C, H, 2] and conv1.bias [C] by
            dim 0, conv2.weight [H, C, 2] by dim 1; conv2.bias is replicated, and added once, after the
            all-reduce
vocabulary  weight [V, H] by rows
expert      weight [experts, out, in] by experts: each rank holds a contiguous range of them (`experts` of a
            stage), and all else of a model with experts is whole on every rank
head_norm   replicated, but each rank applies it to its own heads: the gradients are all-reduced
whole       replicated on every rank, which computes the same gradient
"""


@dataclass(frozen=True)
class Normal:
    """Drawn from N(0, std)."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Drawn from U(-bound, bound)."""

    bound: float


@dataclass(frozen=True)
class Constant:
    """All of this value; nothing is drawn."""

    value: float


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter of a layer, or of the ends of a model."""

    name: str
    """Inside the layer (`attention.out.weight`), or the model (`embedding.weight`)."""
    shape: tuple[int, ...]
    sharding: Sharding
    initial: Normal | Uniform | Constant
    blocks: int = 1
    """Matrices stacked in a column-sharded weight; each of them is sharded by itself."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Kept:
    """What is kept per token: elements of the model's dtype, statistics in fp32 (fp64 for fp64), integers."""

    elements: int
    statistics: int = 0
    integers: int = 0
    """Of 64 bits."""

    def __add__(self, other: Kept) -> Kept:
        return Kept(
            self.elements + other.elements, self.statistics + other.statistics, self.integers + other.integers
        )


@dataclass(frozen=True, kw_only=True)
class SublayerWork:
    """Half of a layer, attention or feed-forward with its norm and residual; per token of one forward."""

    parameters: int
    products: int
    """Weights of the matrix products that a token meets, two FLOP each."""
    scores: int = 0
    """Width of all heads: causal scores and their weighted values cost 2 S FLOP for each of it."""
    replicated: Kept
    """Kept for the backward by every card of a tensor-parallel group."""
    sharded: Kept
    """Kept for the backward, and divided by tensor parallelism."""
    selective_replicated: Kept
    """Of `replicated`, what is kept under selective recompute; so the next."""
    selective_sharded: Kept
    gathered: int = 0
    """Elements of `replicated` that products read: kept in full without recompute where the rest of it is
    divided too (sequence parallelism), and gathered again with it."""
    shifted: int = 0
    """Elements that pass through memory beside those kept."""
    recomputed: int
    """Elements that pass through memory in the backward to recompute what selective recompute drops."""
    held: Kept
    """Held at once while the backward runs."""
    decided: int = 0
    """Integers (64 bits) per token that full recompute keeps too: what was decided is not decided again."""
    largest_weight: int
    """Elements of the largest weight gradient."""
    collectives: int = 1
    """All-reduces of a hidden state over the tensor-parallel group, in the forward as in the backward."""

    def forward_flops(self, sequence_length: int) -> int:
        """Forward FLOP per token: causal attention covers S/2 earlier tokens on average."""
        return 2 * self.products + 2 * sequence_length * self.scores


@functools.cache
def architectures() -> tuple[str, ...]:
    """The names of all architectures."""
    return tuple(
        sorted(found.name for found in pkgutil.iter_modules(importlib.import_module(FOLDER).__path__))
    )


def find_module(architecture: str) -> ModuleType:
    """The file of an architecture."""
    return importlib.import_module(f"{FOLDER}.{architecture}")


def find_format(config: Mapping[str, Any], *, where: str) -> ModuleType:
    """The architecture that reads a `config.json`, by its `model_type`: see `models/decoder.py`.

    Raises CheckpointError, naming `where`, for another one.
    """
    wanted = config.get("model_type", "yuan")
    known = model_types()
    if not isinstance(wanted, str) or wanted not in known:
        raise CheckpointError(f"{where}: model_type {wanted!r}; wanted one of {', '.join(known)}")
    return find_module(known[wanted])


def model_types() -> dict[str, str]:
    """The architecture that reads a `config.json`, by its `model_type`; one without a published format has
    none."""
    return {kind: own for own in architectures() for kind in getattr(find_module(own), "MODEL_TYPES", ())}


ADAPTERS = ("lora_a", "lora_b")
"""The last words of the names of adapters, which are named beside their matrix's `weight`."""

WHOLE_ADAPTERS = (("column", "lora_a"), ("row", "lora_b"))
"""By sharding: the adapter that every rank of a tensor-parallel group has in full. Each computes a part of
its gradient: of the rows, or of the columns, that it holds."""


def is_whole_adapter(parameter: ParameterSpec) -> bool:
    """Whether every rank of a tensor-parallel group has this adapter in full: the one that neither reads a
    part of the input nor makes a part of the output."""
    kind = parameter.name.rpartition(".")[2]
    return (parameter.sharding, kind) in WHOLE_ADAPTERS


HALVES: tuple[Literal["attention"], Literal["feed_forward"]] = ("attention", "feed_forward")
"""Of a layer, in the order in which they run."""


def half_of(module: str) -> Literal["attention", "feed_forward"]:
    """The half of a layer that a module of it belongs to, by its name inside the layer."""
    first = module.partition(".")[0]
    return "attention" if first in ("attention_norm", "filter", "attention") else "feed_forward"


AttentionKind = Literal["localized_filter", "plain"]
RopeType = Literal["linear", "dynamic", "llama3", "yarn"]
RouterKind = Literal["attention", "softmax"]
OutputKind = Literal["vocabulary", "value"]
Balance = Literal["bias", "sequence"]
RotaryForm = Literal["exact", "bf16_frequencies", "bf16"]
Count = Annotated[int, Gt(0)]
Size = Annotated[int, Ge(0)]
Length = Annotated[int, Ge(0), Lt(2**31)]
Rate = Annotated[float, Ge(0), Lt(1)]
Positive = Annotated[float, Gt(0), Lt(math.inf)]

ONLY_IN_TRAINING = ("hidden_dropout", "attention_dropout", "balance_rate")
"""Fields that affect neither the names and shapes of weights nor the output of a trained model."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of the rotary frequencies for longer sequences, with the keys of published configs."""

    rope_type: RopeType
    """Which formula stretches the frequencies."""
    factor: Annotated[float, Ge(1), Lt(1e6)]
    """New length / original length."""
    original_max_position_embeddings: Length = 0
    """Length that the model was trained with before; 0: max_sequence_length. `linear` does not need it."""
    low_freq_factor: Positive = 1.0
    """Of `llama3`: wavelengths above original length / this are stretched by `factor`."""
    high_freq_factor: Positive = 4.0
    """Of `llama3`: wavelengths below original length / this stay; between both they are interpolated."""
    beta_fast: Positive = 32.0
    """Of `yarn`: frequencies that turn more often than this over the original length stay."""
    beta_slow: Positive = 1.0
    """Of `yarn`: those that turn less often than this are divided by `factor`."""
    attention_factor: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    """Of `yarn`: multiplies cosine and sine; 0: 0.1 ln(factor) + 1."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder-only transformer. Which fields it may set, `architecture` says."""

    name: str
    """What reports and exported files call the model."""
    num_layers: Count
    """Transformer layers, each of attention and feed-forward."""
    hidden_size: Count
    """Width of the residual stream."""
    num_attention_heads: Count
    """Heads of queries."""
    ffn_hidden_size: Count
    """Width of the SwiGLU feed-forward; Yuan 2.0 uses 4 * hidden_size."""
    vocab_size: Count
    """Rows of the embedding matrix, padding included."""
    architecture: str = "yuan"
    """A folder of `yuan_train/models`."""
    num_key_value_heads: Size = 0
    """Heads of keys and values, each read by several query heads; 0 means num_attention_heads."""
    head_dim: Size = 0
    """Width of one attention head; 0 means hidden_size / num_attention_heads."""
    attention: AttentionKind | None = None
    """Input of queries and keys: the two-convolution filter (`localized_filter`), or the norm (`plain`)."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias."""
    query_key_norm: bool = False
    """An RMSNorm over each head of queries and keys, before the rotary embedding."""
    rope_base: Positive = 10000.0
    """Base of the rotary frequencies: dimension pair i of d turns by base^(-2i/d) a position."""
    rope_scaling: RopeScaling | None = None
    """For sequences longer than the model was made for; None: as it was made."""
    rotary_dim: Size = 0
    """The first dims of each head that are rotated; 0: all of head_dim."""
    rotary_form: RotaryForm = "exact"
    """Rotary tables in full precision (`exact`), from frequencies rounded to bf16 as Yuan 2.0-M32 was trained
    (`bf16_frequencies`), or rounded throughout, positions too, as its published class does (`bf16`)."""
    num_experts: Size = 0
    """Feed-forwards of a layer, of which a router chooses for each token; 0: one, for all tokens."""
    experts_per_token: Size = 0
    """Experts that the router chooses for each token; wanted with num_experts."""
    expert_ffn_hidden_size: Size = 0
    """Width of an expert; 0 means ffn_hidden_size."""
    router: RouterKind | None = None
    """Scores of the experts: Yuan 2.0-M32's attention between them (`attention`, Yuan's default), or a linear
    map (`softmax`: Mixtral, Qwen 3; the default of all others)."""
    norm_topk_prob: bool = True
    """The weights of a token's experts sum to 1; else, with `softmax`, each is its share among all."""
    balance: Balance | None = None
    """How the load of the experts is evened (DeepSeek-V3, arXiv 2412.19437). `bias`: by a bias of each, in
    the choice alone, that moves against its load after each step. `sequence`: by a loss of each sequence,
    with router softmax. None: not at all."""
    balance_rate: Annotated[float, Ge(0), Lt(1)] = 0.0
    """How far a bias moves in a step (DeepSeek-V3: 0.001), or the coefficient of the loss (0.0001)."""
    norm_epsilon: Positive = 1e-6
    """Added to the mean square in every RMSNorm."""
    tie_embeddings: bool = True
    """The output head shares the embedding matrix."""
    output: OutputKind = "vocabulary"
    """What the head computes of a token: the logits of the next one (`vocabulary`), or one number (`value`),
    as a reward model does. Nothing is tied then."""
    init_std: Positive = 0.02
    """Standard deviation of the weights that training begins with."""
    max_sequence_length: Annotated[Length, Gt(0)] = 4096
    """The most tokens of a sequence that the model is made for."""
    hidden_dropout: Rate = 0.0
    """Fraction of elements dropped after attention and after the feed-forward, before the residual."""
    attention_dropout: Rate = 0.0
    """Dropout of attention probabilities; only 0 is supported."""
    lora: LoraConfig | None = None
    """Adapters beside the matrices of the layers, the only parameters that are trained; a run sets it."""

    def __post_init__(self) -> None:
        if self.head_dim == 0 and self.hidden_size % self.num_attention_heads == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.num_experts and self.router is None:
            router = "attention" if self.architecture == "yuan" else "softmax"
            object.__setattr__(self, "router", router)
        if self.output == "value":
            object.__setattr__(self, "tie_embeddings", False)
        if self.architecture in architectures():
            for name, value in self.spec.defaults.items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)

    @property
    def rotary_size(self) -> int:
        """Rotated dims of a head."""
        return self.rotary_dim or self.head_dim

    @property
    def expert_width(self) -> int:
        """Width of an expert's SwiGLU."""
        return self.expert_ffn_hidden_size or self.ffn_hidden_size

    @property
    def spec(self) -> ModelSpec:
        """What the architecture is. Raises KeyError for an unknown one."""
        return find_spec(self.architecture)

    @property
    def projection_size(self) -> int:
        """Width of all queries: heads times head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_heads(self) -> int:
        """Heads of keys, or of values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def key_value_size(self) -> int:
        """Width of all keys, or of all values."""
        return self.key_value_heads * self.head_dim

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of one layer: 18H^2 + 4.5H for Yuan 2.0's published shapes."""
        return sum(parameter.size for parameter in layer_table(self))

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the final norm and of the output matrix (which may be the embedding's)."""
        return self.hidden_size + self.output_size * self.hidden_size

    @property
    def output_size(self) -> int:
        """Numbers that the head computes of a token."""
        return 1 if self.output == "value" else self.vocab_size

    @cached_property
    def unit_parameters(self) -> tuple[int, ...]:
        """Parameters of each unit: embedding, layers, head (its norm alone if the embedding is tied)."""
        head = self.hidden_size if self.tie_embeddings else self.head_parameters
        return (self.embedding_parameters, *[self.layer_parameters] * self.num_layers, head)

    @property
    def parameters(self) -> int:
        """All parameters, a tied embedding counted once."""
        return sum(self.unit_parameters)

    @cached_property
    def trained_unit_parameters(self) -> tuple[int, ...]:
        """Of `unit_parameters` those that are trained: with adapters these alone, and a score."""
        if self.lora is None:
            return self.unit_parameters
        layer = sum(p.size for p in layer_table(self) if is_trained(self, p.name))
        head = sum(p.size for p in ends(self) if is_trained(self, p.name))
        return (0, *[layer] * self.num_layers, head)

    @cached_property
    def adapter_parameters(self) -> int:
        """Parameters of the adapters of one layer."""
        return sum(p.size for p in layer_table(self) if p.name.rpartition(".")[2] in ADAPTERS)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets: of the experts only those chosen for it."""
        experts = sum(p.size for p in self.spec.layer(self) if p.sharding == "expert")
        idle = experts - (experts // self.num_experts * self.experts_per_token if experts else 0)
        return self.parameters - self.num_layers * idle

    def layer_forward_flops(self, sequence_length: int) -> int:
        """Forward FLOP of one layer per token: 36H^2 + 2SH for Yuan 2.0's published shapes.

        Each weight of a matrix product costs two FLOP; convolutions are matrix products over all tokens.
        Attention scores, and their weighted sum of values, cover S/2 earlier tokens on average.
        """
        halves = sum(half.forward_flops(sequence_length) for half in self.spec.sublayers(self))
        return halves + 2 * self.adapter_parameters

    @property
    def head_forward_flops(self) -> int:
        """Forward FLOP of the output head per token: 2VH, or 2H of a value."""
        return 2 * self.output_size * self.hidden_size

    def training_flops(self, sequence_length: int) -> int:
        """FLOP per trained token, forward and backward without recompute: three times the forward, less the
        weight gradients of what is frozen."""
        layers = self.num_layers * self.layer_forward_flops(sequence_length)
        frozen = 0
        if self.lora is not None:
            products = sum(half.products for half in self.spec.sublayers(self))
            frozen = 2 * self.num_layers * products + self.head_forward_flops
        return 3 * (layers + self.head_forward_flops) - frozen


EXPERT_FIELDS = (
    "num_experts",
    "experts_per_token",
    "expert_ffn_hidden_size",
    "router",
    "norm_topk_prob",
    "balance",
    "balance_rate",
)
"""Fields of an architecture that may have experts."""
OPTIONAL_FIELDS = (
    "attention",
    "num_key_value_heads",
    "qkv_bias",
    "query_key_norm",
    "rope_scaling",
    "rotary_dim",
    "rotary_form",
    *EXPERT_FIELDS,
)
"""Fields that only some architectures take."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One architecture, without torch."""

    title: str
    """As messages name it: `Yuan 2.0`."""
    takes: frozenset[str]
    """Fields of `ModelConfig` that not all architectures have."""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of fields whose default depends on the architecture."""
    projections: Literal["interleaved", "grouped"]
    """How weights hold queries, keys and values (`models/attention.py`)."""
    constraints: Callable[[ModelConfig], Iterator[Violation]]
    layer: Callable[[ModelConfig], tuple[ParameterSpec, ...]]
    """The parameters of a layer; names are inside the layer."""
    sublayers: Callable[[ModelConfig], tuple[SublayerWork, SublayerWork]]
    """The work of attention and of the feed-forward."""
    tensor_sizes: Callable[[ModelConfig], dict[str, int]]
    """The sizes that a tensor-parallel group shards, by name; its width must divide each."""
    held_experts: Callable[[ModelConfig, int, int], SublayerWork] | None = None
    """Of an architecture with experts: the work of the feed-forward on a rank that holds so many experts of a
    layer, and is given so many rows of each token. Their all-reduces are the group's."""


@functools.cache
def find_spec(architecture: str) -> ModelSpec:
    """The spec of an architecture. Raises KeyError if there is none of this name."""
    if architecture not in architectures():
        raise KeyError(architecture)
    return find_module(architecture).SPEC


def ends(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The parameters outside the layers, in order: embedding, final norm, untied head or score."""
    matrix = (model.vocab_size, model.hidden_size)
    drawn = Normal(model.init_std)
    found = (
        ParameterSpec(name="embedding.weight", shape=matrix, sharding="vocabulary", initial=drawn),
        norm("final_norm.weight", model.hidden_size),
    )
    if model.output == "value":
        # A vector: replicated like a norm's weight, and without weight decay.
        shape = (model.hidden_size,)
        return (*found, ParameterSpec(name="score.weight", shape=shape, sharding="whole", initial=drawn))
    if model.tie_embeddings:
        return found
    return (*found, ParameterSpec(name="head.weight", shape=matrix, sharding="vocabulary", initial=drawn))


def norm(name: str, size: int) -> ParameterSpec:
    """The weight of a norm over the hidden state."""
    return ParameterSpec(name=name, shape=(size,), sharding="whole", initial=Constant(1.0))


def layer_table(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The parameters of a layer, each matrix followed by its adapters, if it has some.

    A is drawn as Kaiming's rule has it for `a = sqrt(5)`, as the paper's code does, and B is zero.
    """
    if model.lora is None:
        return model.spec.layer(model)
    table: list[ParameterSpec] = []
    for parameter in model.spec.layer(model):
        table.append(parameter)
        if parameter.name.removesuffix(".weight") in adapted(model):
            table += _adapters_of(parameter, model.lora.rank)
    return tuple(table)


def _adapters_of(weight: ParameterSpec, rank: int) -> tuple[ParameterSpec, ParameterSpec]:
    """A [rank, in] and B [out, rank] of a matrix [out, in]; sharded with it, see `parallel/shard.py`."""
    module, (rows, columns) = weight.name.rpartition(".")[0], weight.shape
    drawn = Uniform(1.0 / math.sqrt(columns))
    return (
        ParameterSpec(
            name=f"{module}.lora_a", shape=(rank, columns), sharding=weight.sharding, initial=drawn
        ),
        ParameterSpec(
            name=f"{module}.lora_b",
            shape=(rows, rank),
            sharding=weight.sharding,
            initial=Constant(0.0),
            blocks=weight.blocks,
        ),
    )


def adaptable(model: ModelConfig) -> tuple[str, ...]:
    """The linear maps of a layer that may have adapters, by their names inside the layer."""
    return tuple(
        parameter.name.removesuffix(".weight")
        for parameter in model.spec.layer(model)
        if parameter.sharding in ("column", "row") and len(parameter.shape) == 2
    )


def adapted(model: ModelConfig) -> tuple[str, ...]:
    """The linear maps of a layer that have adapters, by their names inside the layer."""
    if model.lora is None:
        return ()
    targets = model.lora.targets
    return tuple(name for name in adaptable(model) if not targets or name.rpartition(".")[2] in targets)


def is_trained(model: ModelConfig, name: str) -> bool:
    """Whether a parameter is trained, given its name: of a model with adapters these alone, and a score."""
    return model.lora is None or name.rpartition(".")[2] in ADAPTERS or name == "score.weight"


def find_parameter(model: ModelConfig, name: str) -> ParameterSpec:
    """A parameter by its global name, such as `layers.3.attention.out.weight`. Raises KeyError."""
    layers, _, rest = name.partition(".")
    inside = rest.partition(".")[2] if layers == "layers" else name
    return _by_name(model, layers == "layers")[inside]


@functools.lru_cache(maxsize=16)
def _by_name(model: ModelConfig, in_layers: bool) -> dict[str, ParameterSpec]:
    found = layer_table(model) if in_layers else ends(model)
    return {parameter.name: parameter for parameter in found}


def sharding_of(model: ModelConfig) -> tuple[dict[str, str], dict[str, int]]:
    """How each module is sharded, and the blocks of its weight where there are several.

    Both by pattern of module names (`fnmatch`; `*` is the number of a layer); each module matches one.
    """
    table = [(f"layers.*.{parameter.name}", parameter) for parameter in layer_table(model)]
    table += [(parameter.name, parameter) for parameter in ends(model)]
    modules = {name.rpartition(".")[0]: parameter for name, parameter in table}
    return (
        {module: parameter.sharding for module, parameter in modules.items()},
        {module: parameter.blocks for module, parameter in modules.items() if parameter.blocks > 1},
    )


def validate_model(model: ModelConfig) -> Iterator[Violation]:
    """Yield the violated constraints between the fields of a model."""
    if model.architecture not in architectures():
        known = ", ".join(architectures())
        close = difflib.get_close_matches(model.architecture, architectures(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        yield Violation(("architecture",), f"{model.architecture!r} is unknown{hint} (has: {known})")
        return
    yield from _foreign_fields(model)
    if model.head_dim == 0:
        yield Violation(
            ("num_attention_heads",),
            f"{model.num_attention_heads} heads do not divide hidden_size {model.hidden_size}; "
            "give head_dim, or heads that divide",
        )
    if model.head_dim % 2:
        yield Violation(
            ("head_dim",), f"head_dim {model.head_dim} is odd; rotary embedding needs an even one"
        )
    if model.num_attention_heads % model.key_value_heads:
        yield Violation(
            ("num_key_value_heads",),
            f"{model.num_key_value_heads} key-value heads do not divide {model.num_attention_heads} heads; "
            "as many query heads must read each of them",
        )
    if model.attention_dropout:
        yield Violation(
            ("attention_dropout",),
            f"wanted 0, got {model.attention_dropout:g}: fused attention draws its own masks, which would "
            "depend on the partition of the model, and takes an outside mask only with all S x S scores; "
            "use hidden_dropout",
        )
    yield from lora_violations(model)
    yield from _rope_violations(model)
    if model.rotary_dim % 2 or model.rotary_dim > model.head_dim:
        yield Violation(
            ("rotary_dim",), f"{model.rotary_dim} must be even, and at most head_dim {model.head_dim}"
        )
    yield from _expert_constraints(model)
    yield from model.spec.constraints(model)


def _rope_violations(model: ModelConfig) -> Iterator[Violation]:
    """Scalings that are undefined, or that no sequence of the model would meet."""
    scaling = model.rope_scaling
    if scaling is None:
        return
    if scaling.rope_type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield Violation(
            ("rope_scaling", "low_freq_factor"),
            f"{scaling.low_freq_factor:g} must be less than high_freq_factor {scaling.high_freq_factor:g}",
        )
    if scaling.rope_type == "yarn" and scaling.beta_slow >= scaling.beta_fast:
        yield Violation(
            ("rope_scaling", "beta_slow"),
            f"{scaling.beta_slow:g} must be less than beta_fast {scaling.beta_fast:g}",
        )
    if scaling.rope_type == "yarn" and model.rope_base <= 1:
        yield Violation(("rope_base",), f"{model.rope_base:g} must be above 1 with yarn scaling")
    original = scaling.original_max_position_embeddings
    if scaling.rope_type == "dynamic" and not 0 < original < model.max_sequence_length:
        yield Violation(
            ("rope_scaling", "original_max_position_embeddings"),
            f"{original} must be above 0 and below max_sequence_length {model.max_sequence_length}: dynamic "
            "scaling begins with sequences longer than this",
        )
    if scaling.rope_type == "dynamic" and model.head_dim <= 2:
        yield Violation(("head_dim",), f"{model.head_dim} must be above 2 with dynamic scaling")


def _expert_constraints(model: ModelConfig) -> Iterator[Violation]:
    if not model.num_experts:
        for name in EXPERT_FIELDS[1:]:
            value = getattr(model, name)
            if value != ModelConfig.__dataclass_fields__[name].default:
                yield Violation((name,), f"{value!r}, but num_experts is 0; set both or none")
        return
    if model.num_experts == 1:
        yield Violation(("num_experts",), "1: nothing to choose; give 2 or more, or 0 for a dense layer")
        return
    if model.router == "attention" and not model.norm_topk_prob:
        yield Violation(
            ("norm_topk_prob",), "false, but router attention has no shares among all; set router: softmax"
        )
    if (model.balance is not None) != (model.balance_rate > 0):
        yield Violation(
            ("balance_rate",), f"{model.balance_rate:g} with balance {model.balance}; set both or none"
        )
    if model.balance == "sequence" and model.router == "attention":
        yield Violation(
            ("balance",),
            "sequence is a loss of the softmax router's shares; set balance: bias, or router: softmax",
        )
    fewest = 2 if model.norm_topk_prob else 1
    if not fewest <= model.experts_per_token <= model.num_experts:
        why = " (the weight of a single expert would be 1, and the router would learn nothing)"
        yield Violation(
            ("experts_per_token",),
            f"{model.experts_per_token} of {model.num_experts} experts; wanted {fewest} or more"
            f"{why if model.norm_topk_prob else ''}, and at most all",
        )


def _foreign_fields(model: ModelConfig) -> Iterator[Violation]:
    """Fields that are set, and that the architecture does not take."""
    spec = model.spec
    for name in OPTIONAL_FIELDS:
        unset = (spec.defaults.get(name), ModelConfig.__dataclass_fields__[name].default, None, 0)
        if name not in spec.takes and getattr(model, name) not in unset:
            yield Violation((name,), f"architecture {model.architecture} ({spec.title}) has no {name}")


def load_model(path: str | Path, overrides: tuple[str, ...] = ()) -> ModelConfig:
    """Read a model, by whatever `locate_model` knows. Raises ConfigError with every violation."""
    document = read_model_document(locate_model(path))
    for assignment in overrides:
        document = override(document, assignment)
    return build(document, ModelConfig, validate=validate_model)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which matrices of each layer have adapters, and of what rank."""

    rank: Annotated[int, Gt(0), Le(1 << 16)]
    """Rows of A and columns of B in each adapter."""
    alpha: Annotated[float, Gt(0), Lt(math.inf)] | None = None
    """Adapters are scaled by alpha / rank; None: the rank, as in the paper."""
    targets: tuple[str, ...] = ()
    """Last words of the names of linear maps: `query`, `value`, `out`, `up`, `down`, ...; empty: all."""

    def __post_init__(self) -> None:
        if self.alpha is None:
            object.__setattr__(self, "alpha", float(self.rank))

    @property
    def scale(self) -> float:
        """alpha / rank."""
        assert self.alpha is not None
        return self.alpha / self.rank


def lora_violations(model: ModelConfig) -> Iterator[Violation]:
    """Yield what is wrong with a model's adapters."""
    lora = model.lora
    if lora is None:
        return
    if model.num_experts:
        yield Violation(("lora",), "a model with experts has no adapters yet; wanted a dense model")
        return
    words = [name.rpartition(".")[2] for name in adaptable(model)]
    for i, target in enumerate(lora.targets):
        if target not in words:
            yield Violation(
                ("lora", "targets", i), f"{target!r} is no matrix of a layer (has: {', '.join(words)})"
            )


STATE = "state.json"
"""Of a step's checkpoint: what it holds beside the tensors, the model too."""
WANTED = "a model file, a name of configs/model, a Hugging Face folder or its config.json, or a checkpoint"

_PUBLISHED_KEYS = ("model_type", "num_hidden_layers", "architectures")
"""Of a `config.json`; no model file of ours has them."""
_OTHER_KINDS = {
    "nodes": "a cluster file",
    "pipelines": "a plan",
    "roles": "an RL plan",
    "entries": "a profile",
    "train": "a run file",
    "weight_map": "an index of weights",
    "tokenizer_class": "a tokenizer's config",
    "base_model_name_or_path": "a config of adapters; wanted the model that they belong to",
}
"""By a key that no model has: what the file is."""
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""ORG/NAME, as models are called on the Hugging Face Hub."""


def locate_model(name: str | Path, folders: Sequence[Path] = (Path(),)) -> Path:
    """The file or folder that a name means: in one of `folders`, else of `configs/model`, in any case.

    Raises ConfigError if there is none, with what to do.
    """
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    known = names("model")
    plain = str(name).lower()
    if plain in known:
        return known[plain]
    first = folders[0] / name
    if re.search(r"\.(ya?ml|json)$", plain):
        raise ConfigError(f"{first}: no such file")
    if advice := hub_advice(name):
        raise ConfigError(f"{first}: no such folder; {advice}")
    close = difflib.get_close_matches(plain, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{first}: no such file or folder{hint}; wanted {WANTED}")


def hub_advice(name: str | Path) -> str:
    """How to get a model of the Hub, for a path that is not there but reads like its name; else nothing."""
    if not HUB_NAME.fullmatch(str(name)):
        return ""
    folder = str(name).rpartition("/")[2]
    return (
        f"a model of the Hub is fetched by: yuan-train import-hf {name} --out runs/{folder}; then give "
        f"runs/{folder}"
    )


def read_model_document(path: str | Path) -> Document:
    """The model in a file or folder, by our keys. Raises ConfigError for what holds none."""
    path = Path(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return _published(read_document(path / "config.json"))
        if (found := _checkpoint_model(path)) is not None:
            return found
        raise ConfigError(
            f"{path}: a folder with neither a config.json (Hugging Face) nor a checkpoint; wanted {WANTED}"
        )
    document = read_document(path)
    value = document.value
    if is_published(document):
        return _published(document)
    if is_mapping(value) and is_mapping(value.get("run")) and (found := _model_of_state(path)) is not None:
        return found
    if is_mapping(value) and "num_layers" not in value:
        if kinds := [kind for key, kind in _OTHER_KINDS.items() if key in value]:
            raise ConfigError(f"{path}: {kinds[0]}; wanted {WANTED}")
    return document


def is_published(document: Document) -> bool:
    """Whether it is a `config.json` of Hugging Face's."""
    return is_mapping(document.value) and any(key in document.value for key in _PUBLISHED_KEYS)


def published_name(path: Path) -> str:
    """What the model of a `config.json` is called: as its folder."""
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def model_of_checkpoint(path: str | Path) -> Document:
    """The model of a checkpoint, or of the newest one of a directory of them. Raises ConfigError."""
    found = _checkpoint_model(Path(path))
    if found is None:
        what = "there is no checkpoint here" if Path(path).is_dir() else "no such directory"
        raise ConfigError(
            f"{path}: {what}, so its model is not known; name a checkpoint, or the model (model:)"
        )
    return found


def _checkpoint_model(path: Path) -> Document | None:
    """None if no checkpoint is there. The names are those of `checkpoint/load.py`, a floor above."""
    steps = [path] if (path / STATE).is_file() else newest_steps(path)
    return next((found for step in steps if (found := _model_of_state(step / STATE)) is not None), None)


def newest_steps(path: Path) -> list[Path]:
    """The checkpoints in a directory of them, newest first; none of another directory."""
    steps = [step for step in path.glob("step-*") if step.name[5:].isdecimal()]
    return sorted(steps, key=lambda step: int(step.name[5:]), reverse=True)


def _model_of_state(path: Path) -> Document | None:
    """The model in a checkpoint's state; None if it is torn or not there."""
    try:
        model: Any = json.loads(path.read_text(encoding="utf-8"))["run"]["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Document(str(path), model, {(): str(path)}) if is_mapping(model) else None


def _published(document: Document) -> Document:
    """The model that a `config.json` describes. Raises ConfigError if it is of no known kind, or torn."""
    path, config = Path(document.name), document.value
    if not is_mapping(config):
        raise ConfigError(f"{path}: wanted keys and values, got {type(config).__name__}")
    try:
        published = find_format(config, where=str(path))
        model = published.model_from_config(config, name=published_name(path), where=str(path))
    except YuanError as error:
        raise ConfigError(str(error)) from None
    return Document(str(path), as_plain(model), {(): str(path)})


def is_rl_document(document: Document) -> bool:
    """Whether a run file is one of reinforcement learning: it has the key `algorithm`."""
    return is_mapping(document.value) and "algorithm" in document.value


def with_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """The document with its overrides and its model.

    Overrides of the model's own keys come last, when it is known whose keys they are. Raises ConfigError.
    """
    of_model = [assignment for assignment in overrides if assignment.startswith("model.")]
    for assignment in overrides:
        if assignment not in of_model:
            document = override(document, assignment)
    document = _with_model(document)
    for assignment in of_model:
        document = override(document, assignment)
    return document


def _with_model(document: Document) -> Document:
    """Replace the name of the model by the model; without one, take that of the checkpoint to start from.

    A path is relative to the run file, or else to the working directory, as data and checkpoints are; on the
    command line to that alone.
    """
    if not is_mapping(document.value):
        return document
    name, start = document.value.get("model"), document.value.get("start")
    keys: tuple[str, ...] = ("model",)
    if name is None and is_mapping(start) and isinstance(start.get("checkpoint"), str):
        keys, name = ("start", "checkpoint"), start["checkpoint"]
    if not isinstance(name, str):
        return document
    where = document.source(keys)
    folders = [Path()] if where.startswith("command line") else [Path(document.name).parent, Path()]
    try:
        if keys == ("model",):
            model = read_model_document(locate_model(name, folders))
        else:
            model = _model_to_start_from(document, name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {'.'.join(keys)}: {error}") from None
    return graft(document, ("model",), model)


def _model_to_start_from(document: Document, checkpoint: str) -> Document:
    """The model of a checkpoint; if that is gone, of the run's own checkpoints, with which it goes on."""
    try:
        return model_of_checkpoint(checkpoint)
    except ConfigError:
        own = document.value.get("checkpoint")
        directory = own.get("directory") if is_mapping(own) else None
        if not isinstance(directory, str):
            raise
        with contextlib.suppress(ConfigError):
            return model_of_checkpoint(directory)
        raise
