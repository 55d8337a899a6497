"""Causal self-attention, whole and token by token: all that does not depend on how heads are projected.

B = sequences, S = tokens of a sequence, P = tokens of a cache, H = hidden size, N = query heads,
M = key-value heads, D = size of a head.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor, nn
from yuan_kernels import ops

from yuan_train.config.model import ModelConfig
from yuan_train.models.documents import DocumentRanges
from yuan_train.models.layers import Linear
from yuan_train.models.rotary import RotaryTables


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
        first: int | Tensor,
        visible: Tensor | None,
    ) -> Tensor:
        """Return [B, S, H] of tokens [first, first + S), and write their keys and values into `cache`.

        `first` may also be the place of each token among those of all sequences, see `LayerCache.write`.
        `visible` is as in `ops.masked_attention`, of the first so many places. None: each token attends to
        itself and to all before it; allowed only if `first` is 0, or a number and S is 1.
        """
        query_BSND, key_BSMD, value_BSMD = self.project(u_BSH, filtered_BSH, rotary)
        if isinstance(first, Tensor):
            assert visible is not None
            last = visible.shape[-1]
            cache.write(first, key_BSMD, value_BSMD)
        else:
            last = first + key_BSMD.shape[1]
            cache.keys_BPMD[:, first:last] = key_BSMD
            cache.values_BPMD[:, first:last] = value_BSMD
        heads_BSND = ops.masked_attention(
            query_BSND,
            cache.keys_BPMD[:, :last],
            cache.values_BPMD[:, :last],
            visible,
            is_causal=visible is None and isinstance(first, int) and first == 0,
        )
        return self.out(heads_BSND.flatten(2))
