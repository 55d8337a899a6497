"""Causal self-attention, whole and token by token, and how architectures project its heads.

B = sequences, S = tokens of a sequence, P = tokens of a cache, H = hidden size, N = query heads,
M = key-value heads, D = size of a head.

Where documents begin in packed sequences, and what the model resets there.

A document ends with its end-of-document token; the token after it begins the next one, and so does the
first token of every sequence. B = sequences, S = tokens of a sequence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from yuan_kernels import ops
from yuan_kernels.ops import DocumentRanges

from yuan_train.config.model import ModelConfig
from yuan_train.models.layers import Linear, RMSNorm
from yuan_train.models.rotary import RotaryTables


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
    return resets_at(
        find_document_starts(tokens_BS, eod_id),
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


def find_document_starts(tokens_BS: Tensor, eod_id: int) -> Tensor:
    """Return bool [B, S], True at the first token of each document."""
    document_start = torch.ones_like(tokens_BS, dtype=torch.bool)
    document_start[:, 1:] = tokens_BS[:, :-1] == eod_id
    return document_start


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
