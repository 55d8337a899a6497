"""A decoder-only transformer, whole or any contiguous part of it, on one device; its layer, also compiled.

A layer is attention and feed-forward (or experts), each behind a norm and added to the residual. Parameter
names are global: a part of the model has the names, shapes and initial values that the whole model has.

Initial weights are functions of the seed and of a parameter's global name and shape, so any rank can draw any
part of any parameter. A generator cannot jump, so the rows before a part are drawn too, but in blocks that
are dropped at once: no more than one block is in memory beside the part itself.

For training layers may be compiled. One graph for the forward of a layer and one for its backward serve all
layers of a part: the weights are inputs. The graphs have no side effects. So torch accumulates all weight
gradients, as it does those of norms and embedding, and modules keep their names and hooks: a layer's
`forward` is replaced, not the layer. Without gradients (validation, generation) the plain forward runs, which
needs no compilation of its own. What a compiled layer saves for its backward is decided in the graph.
`selective` saves the results of products, filter and attention, and recomputes everything else; `full` saves
the layer's input; with `none` the compiler chooses, which recomputes what is cheaper to compute than to read.

B = sequences, S = tokens of a sequence, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from yuan_kernels import ops

from yuan_train.config.errors import ConfigError
from yuan_train.config.model import (
    Constant,
    ModelConfig,
    Uniform,
    adapted,
    find_parameter,
    half_of,
    validate_model,
)
from yuan_train.models.attention import (
    DocumentRanges,
    Frequencies,
    LayerCache,
    RotaryTables,
    build_attention,
    rotary_tables,
)
from yuan_train.models.experts import Experts, Router
from yuan_train.models.layers import (
    SAVE_ALL,
    DropoutSeed,
    Embedding,
    FeedForward,
    KeptDecision,
    LayerDropout,
    Linear,
    LocalizedFilter,
    Parts,
    RecomputePolicy,
    RMSNorm,
    SaveInParts,
    Score,
    SelectiveRecompute,
    Tokens,
    traceable_dropout,
)

IGNORE_INDEX = -100
"""Target of a token that is not trained."""

Map = Callable[[Tensor], Tensor]
Drop = Callable[[Tensor, str, Tokens], Tensor]
"""The dropout of a layer: of x, its site and which tokens x is."""
Half = Literal["attention", "feed_forward"]


class HiddenLayout:
    """How a layer's hidden states lie between its matrix products: here whole, on one rank.

    Tensor parallelism has another: each rank the same whole ones, or (sequence parallelism, Korthikanti et
    al. 2022) a part of the tokens, [T', H].
    """

    def split(self, x_BSH: Tensor) -> Tensor:
        """The hidden state before the first layer, as it lies between products."""
        return x_BSH

    def join(self, x: Tensor, shape: torch.Size) -> Tensor:
        """What comes after the last layer, whole: of `shape` [B, S, H]."""
        return x

    def gather(self, u: Tensor, length: int, policy: RecomputePolicy) -> Tensor:
        """[B, S, H]: the input of matrix products, of sequences of `length` tokens."""
        return u

    def reduce(self, y_BSH: Tensor, like: Tensor) -> Tensor:
        """The output of matrix products, to be added to a residual and lying as that does."""
        return y_BSH

    def tokens(self, x: Tensor, length: int) -> Tokens:
        """Which tokens x is, of sequences of `length` tokens."""
        return 0, length


WHOLE = HiddenLayout()


class Block(nn.Module):
    """One layer of any architecture, its parameters uninitialised. Without a filter, queries and keys come
    from the norm, as values do.

    A stage of a plan may hold one half of a layer only; see `keep_half`.
    """

    layout: HiddenLayout = WHOLE

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.norm_epsilon
        self.attention_norm = RMSNorm(hidden, epsilon, dtype=dtype)
        has_filter = config.attention == "localized_filter"
        self.filter = LocalizedFilter(config, dtype=dtype) if has_filter else None
        self.attention = build_attention(config, dtype=dtype)
        self.feed_forward_norm = RMSNorm(hidden, epsilon, dtype=dtype)
        if config.num_experts:
            self.router = Router(config, dtype=dtype)
            self.experts = Experts(config, dtype=dtype)
        else:
            self.feed_forward = FeedForward(hidden, config.ffn_hidden_size, dtype=dtype)
        self.has_experts = config.num_experts > 0
        self.half: Half | None = None
        """The half that this part of the model holds; None: both."""

    def keep_half(self, half: Half) -> None:
        """Drop the modules of the other half: the layer is cut between attention and feed-forward."""
        self.half = half
        self.has_experts = self.has_experts and half == "feed_forward"
        for name in [name for name, _ in self.named_children() if half_of(name) != half]:
            delattr(self, name)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTables,
        document_start: Tensor | None = None,
        document_ranges: DocumentRanges | None = None,
        policy: RecomputePolicy = SAVE_ALL,
        drop: Drop | None = None,
    ) -> Tensor:
        """Return the hidden state after x, which lies as x does (`HiddenLayout`): of both halves, or of the
        one that is held.

        `drop(branch, site, tokens)` is the dropout, applied to both branches before they are added to the
        residual; `site` is `attention` or `feed_forward`.
        """
        length = rotary.cos.shape[1]
        if self.half == "feed_forward":
            u = self.feed_forward_norm(x)
        else:
            attended = self._attend(x, rotary, document_start, document_ranges, policy)
            if drop is not None:
                attended = drop(attended, "attention", self.layout.tokens(x, length))
            if self.half == "attention":
                return x + attended
            policy.enter_half(attended)
            u, x = self.feed_forward_norm.add(attended, x)
        policy.mark_recomputable(u, self.feed_forward_norm, x)
        ffn_BSH = self._transform(self.layout.gather(u, length, policy), policy)
        ffn = self.layout.reduce(ffn_BSH, x)
        return x + (ffn if drop is None else drop(ffn, "feed_forward", self.layout.tokens(x, length)))

    def _attend(
        self,
        x: Tensor,
        rotary: RotaryTables,
        document_start: Tensor | None,
        document_ranges: DocumentRanges | None,
        policy: RecomputePolicy,
    ) -> Tensor:
        layout, length = self.layout, rotary.cos.shape[1]
        u = policy.mark_recomputable(self.attention_norm(x), self.attention_norm, x)
        u_BSH = filtered_BSH = layout.gather(u, length, policy)
        if self.filter is not None:
            filtered = self.filter(u_BSH, document_start, policy, u)
            filtered_BSH = layout.gather(filtered, length, policy)
        return layout.reduce(self.attention(u_BSH, filtered_BSH, rotary, document_ranges), x)

    def step(
        self,
        x_BSH: Tensor,
        rotary: RotaryTables,
        cache: LayerCache,
        places_T: Tensor,
        document_start: Tensor | None,
        visible: Tensor,
    ) -> Tensor:
        """Return [B, S, H] of the next tokens, and add them to `cache`. Needs both halves.

        `places_T` and `visible` as in `SelfAttention.step`.
        """
        u_BSH = filtered_BSH = self.attention_norm(x_BSH)
        if self.filter is not None:
            assert cache.filter_state is not None
            filtered_BSH, cache.filter_state = self.filter.step(u_BSH, cache.filter_state, document_start)
        attended_BSH = self.attention.step(u_BSH, filtered_BSH, rotary, cache, places_T, visible)
        u_BSH, x_BSH = self.feed_forward_norm.add(self.layout.reduce(attended_BSH, x_BSH), x_BSH)
        return x_BSH + self.layout.reduce(self._transform(u_BSH), x_BSH)

    def _transform(self, u_BSH: Tensor, policy: RecomputePolicy = SAVE_ALL) -> Tensor:
        """The feed-forward, or the experts that the router chooses, of the norm's output."""
        if not self.has_experts:
            return self.feed_forward(u_BSH, policy)
        u_TH = u_BSH.flatten(0, 1)
        choice, weights_TK = self.router(u_TH, policy, num_sequences=u_BSH.shape[0])
        return self.experts(u_TH, choice, weights_TK, policy).view_as(u_BSH)


@dataclass(frozen=True)
class VocabularyPart:
    """The words whose logits this rank computes, and how it learns what the others found."""

    first: int
    """Its first word."""
    gather: Map
    """All-gathers a tensor [...] over the ranks: [ranks, ...]."""
    copy: Map
    """A hidden state as it is, whose gradients are added up over the ranks."""
    exchange: ops.Exchange
    """See `ops.linear_cross_entropy`."""


@dataclass
class Cache:
    """Keys, values and filter states of the tokens that a model has processed."""

    layers: dict[int, LayerCache]
    """By global layer number."""
    max_length: int
    """Tokens per sequence that the cache has room for."""
    length: int = 0
    """For `dynamic` scaling: tokens of the longest sequence, if these are but a chunk of it."""
    frequencies: dict[torch.dtype, Frequencies] = field(default_factory=dict[torch.dtype, Frequencies])
    """Of the rotary embedding; see `rotary_tables`."""


def _check_part(config: ModelConfig, first: float, last: float, recompute: str) -> None:
    """Raise ConfigError for sizes that do not fit each other, ValueError for a part that there is not."""
    for problem in validate_model(config):
        raise ConfigError(f"model {config.name}: {'.'.join(map(str, problem.path))}: {problem.message}")
    if not 0 <= first <= last <= config.num_layers:
        raise ValueError(f"layers [{first}, {last}) do not lie within [0, {config.num_layers})")
    if first % 0.5 or last % 0.5:
        raise ValueError(f"layers [{first}, {last}) begin or end neither with a layer nor in its middle")
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute {recompute!r} is unknown; use 'none', 'selective' or 'full'")


class Transformer(nn.Module):
    """The model, or a part of it: embedding, layers [first, last), head (final norm, output matrix or score).

    Parameters are empty until `init_weights` or a checkpoint fills them; `with torch.device("meta"):` builds
    a part that takes no memory. With tied embeddings the output matrix is `embedding.weight`: one parameter
    if the part has embedding and head, a copy if it has only the head.
    """

    layout: HiddenLayout = WHOLE
    """How hidden states lie between the products of the layers; each block has the same."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: tuple[float, float] | None = None,
        embedding: bool = True,
        head: bool = True,
        recompute: Literal["none", "selective", "full"] | str = "none",
        recompute_layers: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Build the model, or a part of it.

        Args:
            config: sizes of the whole model.
            layers: half-open range of global layer numbers, possibly empty; None for all. It may begin or
                end in the middle of a layer, between attention and feed-forward: [3.5, 7).
            embedding: whether the part begins with the token embedding.
            head: whether it ends with the final norm and the output matrix.
            recompute: `none`; `selective` to recompute norms and the SwiGLU product in the backward; or
                `full` to save only each layer's input and recompute the layer.
            recompute_layers: `recompute` applies to this many of the part's layers, the first ones, half a
                layer counting as one; None for all.
            dtype: of all parameters, and of the hidden state between the layers.

        Raises:
            ConfigError: (a ValueError) the sizes of `config` are inconsistent.
            ValueError: `layers` is not a range of the model's layers, or `recompute` is unknown.
        """
        super().__init__()
        first, last = layers if layers is not None else (0, config.num_layers)
        _check_part(config, first, last, recompute)
        numbers = range(math.floor(first), math.ceil(last)) if first < last else range(0)
        self.config = config
        self.has_embedding, self.has_head = embedding, head
        self.recompute = recompute
        self.recompute_layers = len(numbers) if recompute_layers is None else recompute_layers
        self.vocabulary_part: VocabularyPart | None = None
        """Set by tensor parallelism where each rank has a part of the output matrix."""
        if embedding or (head and config.tie_embeddings):
            self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        blocks = {str(i): Block(config, dtype=dtype) for i in numbers}
        # Not a ModuleList: its keys would count from 0 in every part.
        self.layers = nn.ModuleDict(blocks)
        for i, block in self.blocks.items():
            for name in adapted(config):
                assert config.lora is not None
                cast(Linear, block.get_submodule(name)).add_adapters(config.lora.rank, config.lora.scale)
            if i < first:
                block.keep_half("feed_forward")
            elif i + 1 > last:
                block.keep_half("attention")
        if head:
            self.final_norm = RMSNorm(config.hidden_size, config.norm_epsilon, dtype=dtype)
        if head and config.output == "value":
            self.score = Score(config.hidden_size, dtype=dtype)
        elif head and not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, dtype=dtype)

    @property
    def output_weight(self) -> nn.Parameter:
        """The output matrix [V, H]; the part must have the head, and not that of a value."""
        assert self.has_head, "this part of the model has no head"
        assert self.config.output == "vocabulary", "this model's head has no vocabulary"
        return self.embedding.weight if self.config.tie_embeddings else self.head.weight

    def set_vocabulary_part(self, index: int, gather: Map, copy: Map, exchange: ops.Exchange) -> None:
        """Note that this rank is number `index` of those that share the output matrix in equal parts."""
        if self.config.output == "vocabulary":
            first = index * self.output_weight.shape[0]
            self.vocabulary_part = VocabularyPart(first, gather, copy, exchange)

    @property
    def blocks(self) -> dict[int, Block]:
        """The layers by global number, in order."""
        return {int(name): cast(Block, block) for name, block in self.layers.items()}

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        document_start: Tensor | None = None,
        document_ranges: DocumentRanges | None = None,
        dropout_seed: DropoutSeed | None = None,
        parts: Parts | None = None,
        layers: tuple[int, int | None] = (0, None),
    ) -> Tensor:
        """Return the hidden state [B, S, H] after this part; after the final norm if it has the head.

        Args:
            x: tokens int64 [B, S] if the part has the embedding, else the hidden state [B, S, H].
            positions: int64 [B, S] for the rotary embedding; None counts from 0 in each sequence.
            document_start: bool [B, S], where the localized filter's state is reset; None: nowhere.
            document_ranges: token ranges that attention does not leave; None: whole sequences. All three
                come from `attention.find_resets`, once per micro-batch.
            dropout_seed: seed of the masks of `config.hidden_dropout`; None disables dropout.
            parts: is told of the parts of the forward, and keeps what the layers save for the backward; not
                with compiled layers, nor with recompute `full`.
            layers: (first, last) of this part. If `first` is not 0, begin with that one, on the hidden state
                before it; if `last` is given, end before that one, with all kept for the backward.
        """
        first, last = layers
        x_BSH = self.embedding(x) if self.has_embedding and not first else x
        length, hidden = x_BSH.shape[1], self.layout.split(x_BSH)
        places = torch.arange(length, device=x_BSH.device).unsqueeze(0) if positions is None else positions
        rotary = rotary_tables(self.config, places, length=length, dtype=x_BSH.dtype)
        rate = self.config.hidden_dropout
        if parts is not None:
            parts.share(x, positions, document_start, rotary.cos, rotary.sin)
        for i, (layer, block) in list(enumerate(self.blocks.items()))[first:last]:
            drop = LayerDropout(rate, dropout_seed, layer) if dropout_seed is not None and rate else None
            recompute = self.recompute_of(i) if last is None else "none"
            if parts is not None:
                parts.enter(hidden)
            hidden = _run(block, recompute, parts, hidden, (rotary, document_start, document_ranges), drop)
        x_BSH = self.layout.join(hidden, x_BSH.shape)
        return self.final_norm(x_BSH) if self.has_head and last is None else x_BSH

    def recompute_of(self, index: int) -> str:
        """How layer number `index` of this part is recomputed."""
        return self.recompute if index < self.recompute_layers else "none"

    def loss(
        self,
        hidden_BSH: Tensor,
        targets_BS: Tensor,
        *,
        reduction: Literal["sum", "none"] = "sum",
        gradient_scale: float | None = None,
    ) -> Tensor:
        """Return the cross-entropy of `forward`'s hidden state, in fp32 (fp64 for fp64), in nats.

        Targets are int64 [B, S], already shifted; `IGNORE_INDEX` marks tokens that are not trained. `sum`
        gives the sum over tokens, a scalar; `none` the loss of each token, [B, S]. `gradient_scale` is the
        gradient that the backward will pass to the sum. If it is given and the output matrix has an attribute
        `main_gradient` (fp32 [V, H]; fp64 for fp64), the forward adds the output matrix's gradient to it.
        """
        main = None if gradient_scale is None else getattr(self.output_weight, "main_gradient", None)
        part = self.vocabulary_part
        losses = ops.linear_cross_entropy(
            (hidden_BSH if part is None else part.copy(hidden_BSH)).flatten(0, 1),
            self.output_weight,
            targets_BS.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction=reduction,
            main_gradient=main,
            gradient_scale=None if main is None else gradient_scale,
            vocabulary=None if part is None else (part.first, part.exchange),
        )
        return losses if reduction == "sum" else losses.view_as(targets_BS)

    def scores(self, hidden: Tensor) -> Tensor:
        """Return the values [...] of `forward`'s hidden state [..., H], in fp32 (fp64 for fp64)."""
        assert self.has_head and self.config.output == "value", "this part of the model has no score"
        return self.score(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of `forward`'s hidden state [..., H], in fp32 (fp64 for fp64).

        Under tensor parallelism those of this rank's words, `vocabulary_part`.
        """
        logits = ops.linear(hidden, self.output_weight)
        return logits if logits.dtype == torch.float64 else logits.float()

    def new_cache(self, *, batch_size: int, max_length: int) -> Cache:
        """Return an empty cache for at most `max_length` tokens of `batch_size` sequences, with the widths of
        the weights: a sharded layer caches its own heads and channels."""
        layers: dict[int, LayerCache] = {}
        for i, block in self.blocks.items():
            value, head_dim = block.attention.value.weight, block.attention.head_dim
            shape = (batch_size, max_length, value.shape[0] // head_dim, head_dim)
            filter_state = None
            if block.filter is not None:
                channels, hidden = block.filter.conv1.weight.shape[:2]
                filter_state = (value.new_zeros(batch_size, hidden), value.new_zeros(batch_size, channels))
            layers[i] = LayerCache(value.new_zeros(shape), value.new_zeros(shape), filter_state)
        return Cache(layers, max_length)


def _run(
    block: Block,
    recompute: str,
    parts: Parts | None,
    x: Tensor,
    inputs: tuple[RotaryTables, Tensor | None, DocumentRanges | None],
    drop: Drop | None,
) -> Tensor:
    if parts is None and (recompute == "none" or not torch.is_grad_enabled()):
        return block(x, *inputs, drop=drop)
    if parts is not None or recompute == "selective":
        policy = SelectiveRecompute(parts) if recompute == "selective" else SaveInParts(parts)
        with policy.saving():
            return block(x, *inputs, policy, drop)
    # No op of a layer uses a random generator, so its state need not be saved.
    policy = KeptDecision()
    kept = checkpoint(block, x, *inputs, policy, drop, use_reentrant=False, preserve_rng_state=False)
    return cast(Tensor, kept)


def choose_ops(config: ModelConfig, device: torch.device | str, dtype: torch.dtype) -> list[ops.Choice]:
    """Choose the implementation of each op of a model, and return the choices.

    To be called before the first forward: what the choice tests and compiles is not part of that.
    """
    hidden = (config.hidden_size,)
    rows = {
        "causal_attention": (config.head_dim,),
        "document_attention": (config.head_dim,),
        "rms_norm": (*hidden, *([config.head_dim] if config.query_key_norm else [])),
        "rotary": (config.head_dim,),
        "swiglu": hidden,
        "linear_cross_entropy": hidden,
        "add_product": hidden,
    }
    if config.attention == "localized_filter":
        rows["localized_filter"] = hidden
    if config.num_experts:
        rows["grouped_linear"] = (*hidden, config.expert_width, 2 * config.expert_width)
    return ops.choose_all(torch.device(device), dtype, rows)


def init_weights(model: Transformer, *, seed: int) -> None:
    """Fill the parameters of a model, or of a part of it, with `initial_weight` by their global names."""
    for name, parameter in model.named_parameters():
        weight = initial_weight(model.config, name, tuple(parameter.shape), seed=seed)
        with torch.no_grad():
            parameter.copy_(weight)


BLOCK_ELEMENTS = 1 << 22
"""Elements that are drawn at a time, 16 MiB."""

_VECTOR = 16
"""Torch draws normal numbers in vectors of this many, and more than it needs for a rest that is shorter: so
blocks are multiples of it, and the last one is never shorter."""


def initial_weight(config: ModelConfig, name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Return the initial value of a parameter, fp32 on the CPU, from its global name and global shape.

    Each name has its own generator, so the value depends neither on the partition of the model nor on the
    order of calls. From which distribution it is drawn, the architecture says (`ParameterSpec.initial`).
    """
    weight = torch.empty(shape, dtype=torch.float32)
    for first, rows in initial_rows(config, name, shape, seed=seed):
        weight[first : first + len(rows)] = rows
    return weight


def initial_rows(
    config: ModelConfig,
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int,
    wanted: Callable[[int, int], bool] = lambda first, last: True,
) -> Iterator[tuple[int, Tensor]]:
    """Yield `initial_weight` in blocks of rows, as (first row, rows [n, ...]), in order.

    A block [first, last) of which `wanted` says no is left out; after the last wanted one nothing is drawn.
    Each expert of a stack has a generator of its own: who wants some of them draws no other.
    """
    if find_parameter(config, name).sharding == "expert":
        for expert in range(shape[0]):
            if wanted(expert, expert + 1):
                draw = _drawing(config, name, f"{seed}:{name}:{expert}")
                yield expert, draw(torch.empty((1, *shape[1:]), dtype=torch.float32))
        return
    blocks = list(_blocks(shape))
    while blocks and not wanted(*blocks[-1]):
        blocks.pop()
    draw = _drawing(config, name, f"{seed}:{name}")
    for first, last in blocks:
        rows = draw(torch.empty((last - first, *shape[1:]), dtype=torch.float32))
        if wanted(first, last):
            yield first, rows


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    row = math.prod(shape[1:])
    unit = _VECTOR // math.gcd(row, _VECTOR)
    length = max(BLOCK_ELEMENTS // row // unit, 1) * unit
    first = 0
    while first < shape[0]:
        # What would be left is less than a vector: the block takes it along.
        rest = (shape[0] - first - length) * row
        last = shape[0] if rest < _VECTOR else first + length
        yield first, last
        first = last


def _drawing(config: ModelConfig, name: str, seed: str) -> Callable[[Tensor], Tensor]:
    """Fills tensors with the next values of a parameter, in place; `seed` is of this parameter alone."""
    initial = find_parameter(config, name).initial
    if isinstance(initial, Constant):
        return lambda weight: weight.fill_(initial.value)
    digest = hashlib.sha256(seed.encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if isinstance(initial, Uniform):
        return lambda weight: weight.uniform_(-initial.bound, initial.bound, generator=generator)
    return lambda weight: weight.normal_(0.0, initial.std, generator=generator)


# --- compiled layers ----------------------------------------------------------------------------------------


BACKEND = "inductor"
"""torch.compile's own: C++ on CPUs, Triton on cards."""

_EXPENSIVE = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product",
    "yuan::linear",
    "yuan::localized_filter",
    "yuan::causal_attention",
)
"""Beginnings of the names of the ops whose results `selective` saves."""


def compile_blocks(model: Transformer) -> None:
    """Compile the training forward and backward of a model's layers, in place; at their first use.

    The layers must be neither sharded nor hooked inside, and take no `document_ranges`.
    """
    ops.prepare_compile()
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_concerns_us)
    compiled = torch.compile(_run_block, backend=BACKEND, dynamic=False, fullgraph=True)
    for i, block in enumerate(model.blocks.values()):
        block.forward = _forward(block, model.recompute_of(i), compiled)
    # What is saved for the backward is decided where a block is compiled.
    model.recompute = "none"


def _forward(block: Block, recompute: str, compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a compiled block, with the arguments of `Block.forward`."""

    def forward(
        x_BSH: Tensor,
        rotary: RotaryTables,
        document_start: Tensor | None = None,
        document_ranges: DocumentRanges | None = None,
        policy: RecomputePolicy = SAVE_ALL,
        drop: LayerDropout | None = None,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return Block.forward(block, x_BSH, rotary, document_start, document_ranges, policy, drop)
        assert document_ranges is None and policy is SAVE_ALL, "they would be compiled for every micro-batch"
        rate, keys = (0.0, None) if drop is None else (drop.rate, drop.key_tensors(x_BSH))
        return compiled(block, recompute, rate, x_BSH, rotary, document_start, keys)

    return forward


def _run_block(
    block: Block,
    recompute: str,
    rate: float,
    x_BSH: Tensor,
    rotary: RotaryTables,
    document_start: Tensor | None,
    keys: dict[str, Tensor] | None,
) -> Tensor:
    """What is compiled."""

    def run(x_BSH: Tensor) -> Tensor:
        drop = None if keys is None else partial(_drop, rate, keys)
        return Block.forward(block, x_BSH, rotary, document_start, drop=drop)

    if recompute == "none":
        return run(x_BSH)
    options: dict[str, Any] = {}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _saves)
    return cast(Tensor, checkpoint(run, x_BSH, use_reentrant=False, preserve_rng_state=False, **options))


def _drop(rate: float, keys: dict[str, Tensor], x_BSH: Tensor, site: str, _: Tokens) -> Tensor:
    return traceable_dropout(x_BSH, rate, keys[site])


def _concerns_us(record: logging.LogRecord) -> bool:
    """Not torch's advice against operations in place: of what `_saves` names, none is changed in place."""
    return "context_fn is passed" not in record.getMessage()


def _saves(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    expensive = str(op.name()).startswith(_EXPENSIVE)
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE
