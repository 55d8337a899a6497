"""Causal self-attention, whole and token by token, its rotary embedding, and how architectures project heads.

B = sequences, S = tokens of a sequence, P = tokens of a cache, H = hidden size, N = query heads,
M = key-value heads, D = size of a head, R = its rotated dims.

Rotary: frequencies, their published scalings, and the tables of a micro-batch. All of it in fp32, or fp64
where the model is fp64: bf16 has 8 significant bits, so positions above 256 would share their angles. Yuan
2.0-M32 was trained with frequencies rounded to bf16, and its published class rounds positions, angles and
tables too; `ModelConfig.rotary_form` asks for either.

Where documents begin in packed sequences, and what the model resets there: a document ends with its
end-of-document token; the token after it begins the next one, and so does the first token of every sequence.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from yuan_kernels import ops
from yuan_kernels.ops import DocumentRanges

from yuan_train.config.model import ModelConfig, RopeScaling
from yuan_train.models.layers import Linear, RMSNorm


@dataclass(frozen=True)
class RotaryTables:
    """Cosines and sines [B or 1, S, R/2] of the angles of a micro-batch's tokens."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x_BSND: Tensor) -> Tensor:
        """Return the rotary embedding of queries or keys [B, S, N, D]."""
        return ops.rotary(x_BSND, self.cos, self.sin)

    def rotate_both(self, query_BSND: Tensor, key_BSMD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary embedding of both; of single tokens in one call, which is what costs there."""
        if query_BSND.shape[1] > 1:
            return self.rotate(query_BSND), self.rotate(key_BSMD)
        both = self.rotate(torch.cat((query_BSND, key_BSMD), dim=2))
        return both[:, :, : query_BSND.shape[2]], both[:, :, query_BSND.shape[2] :]


Frequencies = tuple[Tensor, float]
"""Those of `rotary_frequencies`, with the factor of the tables."""


def rotary_tables(
    config: ModelConfig,
    positions: Tensor,
    *,
    length: int,
    dtype: torch.dtype,
    kept: dict[torch.dtype, Frequencies] | None = None,
) -> RotaryTables:
    """Return the tables of positions int64 [B or 1, S]: angle = position * frequency.

    `length` is the longest sequence so far, which `dynamic` scaling depends on. `kept`: where a caller keeps
    frequencies, by precision, from one call to the next.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = None if kept is None else kept.get(wide)
    if found is None:
        found = rotary_frequencies(config, length=length, device=positions.device, dtype=wide)
        is_dynamic = config.rope_scaling is not None and config.rope_scaling.rope_type == "dynamic"
        if kept is not None and not is_dynamic:
            kept[wide] = found
    frequencies, factor = found
    if config.rotary_form != "exact":
        frequencies = frequencies.bfloat16()
    narrow = torch.bfloat16 if config.rotary_form == "bf16" else wide
    angles = positions.to(narrow).unsqueeze(-1) * frequencies.to(narrow)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    return RotaryTables(cos, sin) if factor == 1.0 else RotaryTables(cos * factor, sin * factor)


def rotary_frequencies(
    config: ModelConfig, *, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Return the frequencies [R/2], base^(-2i/R) (Su et al. 2021) before scaling, and a factor of the tables.

    The scalings are those that transformers names (modeling_rope_utils.py).
    """
    scaling, base, dim = config.rope_scaling, config.rope_base, config.rotary_size
    original = scaling.original_max_position_embeddings if scaling is not None else 0
    original = original or config.max_sequence_length
    if scaling is not None and scaling.rope_type == "dynamic" and length > original:
        stretch = scaling.factor * length / original - (scaling.factor - 1)
        base *= stretch ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, device=device, dtype=dtype) / dim
    frequencies = 1.0 / base**exponents
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies, 1.0
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling, original), 1.0
    return _yarn(frequencies, scaling, original, base)


def _llama3(frequencies: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones stay, between them it is interpolated."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = original * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: RopeScaling, original: int, base: float) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3): a ramp over the dims between `beta_fast` and `beta_slow` turns."""
    dim = 2 * len(frequencies)

    def dim_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(dim_of(scaling.beta_fast)), 0)
    last = min(math.ceil(dim_of(scaling.beta_slow)), dim - 1)
    indices = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
    width = last - first or 0.001
    stretched = ((indices - first) / width).clamp(0.0, 1.0)
    scaled = stretched * frequencies / scaling.factor + (1 - stretched) * frequencies
    return scaled, scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class DocumentResets:
    """Document arguments of `Transformer.forward`; each field is the argument of the same name.

    Computed once per micro-batch. A field is None if its reset is off.
    """

    positions: Tensor | None = None
    """int64 [B, S]: the position of each token in its document, for the rotary embedding."""
    document_start: Tensor | None = None
    """bool [B, S]: True where the localized filter's state is reset."""
    document_ranges: DocumentRanges | None = None
    """Tokens attend only within their range."""

    def on(self, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of `Transformer.forward`, with the tensors on `device`.

        The host does not wait for copies out of pinned memory.
        """
        return self.placed(lambda tensor: tensor.to(device, non_blocking=True)).arguments()

    def placed(self, place: Callable[[Tensor], Tensor]) -> DocumentResets:
        """These resets, with each tensor where `place` puts it."""
        positions, starts = self.positions, self.document_start
        return DocumentResets(
            positions=None if positions is None else place(positions),
            document_start=None if starts is None else place(starts),
            document_ranges=self.document_ranges,
        )

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `Transformer.forward`."""
        return {
            "positions": self.positions,
            "document_start": self.document_start,
            "document_ranges": self.document_ranges,
        }


def find_resets(
    tokens_BS: Tensor,
    *,
    eod_id: int | None,
    reset_position_ids: bool = True,
    reset_attention: bool = False,
    reset_filter: bool = False,
) -> DocumentResets:
    """Return what to reset for tokens int64 [B, S]; by default, as published, rotary positions only.

    With `eod_id` None nothing is reset. With `reset_attention` the tokens should be on the host: the ranges
    are Python integers, and reading them from a GPU would synchronize with it.
    """
    if eod_id is None:
        return DocumentResets()
    # True at the first token of each document.
    document_start = torch.ones_like(tokens_BS, dtype=torch.bool)
    document_start[:, 1:] = tokens_BS[:, :-1] == eod_id
    return resets_at(
        document_start,
        reset_position_ids=reset_position_ids,
        reset_attention=reset_attention,
        reset_filter=reset_filter,
    )


def resets_at(
    document_start: Tensor,
    *,
    reset_position_ids: bool = True,
    reset_attention: bool = True,
    reset_filter: bool = True,
) -> DocumentResets:
    """Return what to reset where documents begin, bool [B, S] on the host; by default all."""
    return DocumentResets(
        positions=_positions(document_start) if reset_position_ids else None,
        document_start=document_start if reset_filter else None,
        document_ranges=_ranges(document_start) if reset_attention else None,
    )


def _positions(document_start: Tensor) -> Tensor:
    indices = torch.arange(document_start.shape[1], device=document_start.device).expand(document_start.shape)
    firsts = torch.where(document_start, indices, 0)
    return indices - firsts.cummax(dim=1).values


def _ranges(document_start: Tensor) -> DocumentRanges:
    firsts: list[int] = document_start.flatten().nonzero().flatten().tolist()
    return tuple(zip(firsts, [*firsts[1:], document_start.numel()], strict=True)) if firsts else ()


@dataclass
class LayerCache:
    """Keys, values and filter state of the tokens that one layer has processed."""

    keys_BPMD: Tensor
    """[B, P, M, D] for at most P tokens, rotary embedding applied."""
    values_BPMD: Tensor
    """[B, P, M, D]."""
    filter_state: ops.FilterState | None
    """(u_last [B, H], c_last [B, channels]), zero before the first token; None without a filter."""

    def write(self, places_T: Tensor, key_BSMD: Tensor, value_BSMD: Tensor) -> None:
        """Write keys and values of T = B * S tokens to their places among the B * P of the cache."""
        self.keys_BPMD.flatten(0, 1).index_copy_(0, places_T, key_BSMD.flatten(0, 1))
        self.values_BPMD.flatten(0, 1).index_copy_(0, places_T, value_BSMD.flatten(0, 1))


class SelfAttention(nn.Module):
    """Causal attention; a subclass says how queries, keys and values are projected.

    The number of heads follows from the weights' shapes, which may be a tensor-parallel shard's.
    """

    value: Linear
    out: Linear

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim

    @abstractmethod
    def project(
        self, u_BSH: Tensor, filtered_BSH: Tensor, rotary: RotaryTables
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, S, N, D], and keys and values [B, S, M, D]; queries and keys are rotated."""

    def split_heads(self, x: Tensor) -> Tensor:
        """Return [B, S, heads, D] of [B, S, heads * D]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(
        self,
        u_BSH: Tensor,
        filtered_BSH: Tensor,
        rotary: RotaryTables,
        document_ranges: DocumentRanges | None = None,
    ) -> Tensor:
        """Return [B, S, H]: values from u, queries and keys from filtered.

        With `document_ranges`, tokens attend only within their document.
        """
        operands = self.project(u_BSH, filtered_BSH, rotary)
        heads_BSND = ops.causal_attention(*operands, document_ranges=document_ranges)
        return self.out(heads_BSND.flatten(2))

    def step(
        self,
        u_BSH: Tensor,
        filtered_BSH: Tensor,
        rotary: RotaryTables,
        cache: LayerCache,
        places_T: Tensor,
        visible: Tensor,
    ) -> Tensor:
        """Return [B, S, H] of the next tokens, and write their keys and values into `cache`.

        `places_T`: see `LayerCache.write`. `visible` is as in `ops.masked_attention`, of the first so many
        places.
        """
        query_BSND, key_BSMD, value_BSMD = self.project(u_BSH, filtered_BSH, rotary)
        cache.write(places_T, key_BSMD, value_BSMD)
        last = visible.shape[-1]
        heads_BSND = ops.masked_attention(
            query_BSND, cache.keys_BPMD[:, :last], cache.values_BPMD[:, :last], visible
        )
        return self.out(heads_BSND.flatten(2))


class InterleavedAttention(SelfAttention):
    """Yuan's multi-head attention; the rows of `query_key` are interleaved per head.

    The values come from the unfiltered input, queries and keys from the filtered one (paper, section 2.1):

        f = RMSNorm(filter(u) + u)      v = u Wv^T      (q, k) = f Wqk^T

    with rotary embedding on q and k. For plain attention f = u. Head j has the query rows [2jD, (2j+1)D) and
    the key rows [(2j+1)D, (2j+2)D), so that contiguous rows hold whole heads.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__(config)
        hidden, projection = config.hidden_size, config.projection_size
        self.value = Linear(hidden, projection, dtype=dtype)
        self.query_key = Linear(hidden, 2 * projection, dtype=dtype)
        self.out = Linear(projection, hidden, dtype=dtype)

    def project(
        self, u_BSH: Tensor, filtered_BSH: Tensor, rotary: RotaryTables
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Queries and keys, interleaved, are rotated as one tensor of 2N heads.
        query_key = rotary.rotate(self.split_heads(self.query_key(filtered_BSH)))
        query_BSND, key_BSND = query_key.unflatten(2, (-1, 2)).unbind(3)
        return query_BSND, key_BSND, self.split_heads(self.value(u_BSH))


class GroupedAttention(SelfAttention):
    """Llama's and Qwen's: N query heads read M key-value heads, N/M of them each one (Ainslie et al. 2023);
    biases and head norms if the model asks for them."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__(config)
        hidden, epsilon = config.hidden_size, config.norm_epsilon

        def projection(size: int) -> Linear:
            return Linear(hidden, size, bias=config.qkv_bias, dtype=dtype)

        self.query = projection(config.projection_size)
        self.key = projection(config.key_value_size)
        self.value = projection(config.key_value_size)
        if config.query_key_norm:
            self.query_norm = RMSNorm(config.head_dim, epsilon, dtype=dtype)
            self.key_norm = RMSNorm(config.head_dim, epsilon, dtype=dtype)
        self.has_norms = config.query_key_norm
        self.out = Linear(config.projection_size, hidden, dtype=dtype)

    def project(
        self, u_BSH: Tensor, filtered_BSH: Tensor, rotary: RotaryTables
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_BSND = self.split_heads(self.query(u_BSH))
        key_BSMD = self.split_heads(self.key(u_BSH))
        if self.has_norms:
            query_BSND, key_BSMD = self.query_norm(query_BSND), self.key_norm(key_BSMD)
        return *rotary.rotate_both(query_BSND, key_BSMD), self.split_heads(self.value(u_BSH))


def build_attention(config: ModelConfig, *, dtype: torch.dtype) -> SelfAttention:
    """The attention of a layer, its parameters uninitialised."""
    kinds = {"interleaved": InterleavedAttention, "grouped": GroupedAttention}
    return kinds[config.spec.projections](config, dtype=dtype)
