"""Causal attention with a localized filter before queries and keys (Yuan 2.0 paper, section 2.1).

The values come from the unfiltered input, queries and keys from the filtered one:

    f = RMSNorm(filter(u) + u)      v = u Wv^T      (q, k) = f Wqk^T
    out = softmax(q k^T / sqrt(D)) v Wo^T

with rotary embedding on q and k. For plain attention f = u.

B = sequences, S = tokens of a sequence, T = B * S, H = hidden size, N = heads, D = size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from yuan_kernels import ops

from yuan_train.config.model import ModelConfig
from yuan_train.model.documents import DocumentRanges
from yuan_train.model.layers import Linear, RMSNorm
from yuan_train.model.recompute import SAVE_ALL, RecomputePolicy


@dataclass
class LayerCache:
    """Keys, values and filter state of the tokens that one layer has processed."""

    keys_BPND: Tensor
    """[B, P, N, D] for at most P tokens, rotary embedding applied."""
    values_BPND: Tensor
    """[B, P, N, D]."""
    filter_state: ops.FilterState | None
    """(u_last [B, H], c_last [B, channels]), zero before the first token; None for plain attention."""


class TwoTapConvolution(nn.Module):
    """Weight [out, in, 2] (last index 0: the older token) and bias [out] of one causal convolution."""

    def __init__(self, in_size: int, out_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, 2, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_size, device=device, dtype=dtype))


class LocalizedFilter(nn.Module):
    """f = RMSNorm(filter(u) + u) over the tokens t-2, t-1, t of a sequence.

    `convolve` and `convolve_step` contain all that depends on the H/2 channels. Tensor parallelism shards the
    channels and replaces `convolve` by a function that all-reduces the partial results; residual and norm
    stay as they are. `convolution` is the op itself; a split backward, which defers weight gradients,
    replaces it.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, channels = config.hidden_size, config.hidden_size // 2
        self.conv1 = TwoTapConvolution(hidden, channels, device=device, dtype=dtype)
        self.conv2 = TwoTapConvolution(channels, hidden, device=device, dtype=dtype)
        self.norm = RMSNorm(hidden, config.norm_epsilon, device=device, dtype=dtype)
        self.convolution = ops.localized_filter

    def forward(
        self, u_BSH: Tensor, document_start: Tensor | None = None, policy: RecomputePolicy = SAVE_ALL
    ) -> Tensor:
        """Return f [B, S, H]; `document_start` bool [B, S] or None."""
        f_BSH, sum_BSH = self.norm.add(self.convolve(u_BSH, document_start), u_BSH)
        return policy.mark_recomputable(f_BSH, self.norm, sum_BSH)

    def step(
        self, u_BSH: Tensor, state: ops.FilterState, document_start: Tensor | None = None
    ) -> tuple[Tensor, ops.FilterState]:
        """Return f [B, S, H] of the next tokens, and the state after them."""
        filtered_BSH, state = self.convolve_step(u_BSH, state, document_start)
        return self.norm.add(filtered_BSH, u_BSH)[0], state

    def convolve(self, u_BSH: Tensor, document_start: Tensor | None) -> Tensor:
        """Return both convolutions of u [B, S, H]."""
        return self.convolution(
            u_BSH,
            self.conv1.weight,
            self.conv1.bias,
            self.conv2.weight,
            self.conv2.bias,
            document_start=document_start,
        )

    def convolve_step(
        self, u_BSH: Tensor, state: ops.FilterState, document_start: Tensor | None
    ) -> tuple[Tensor, ops.FilterState]:
        """Return both convolutions of the next tokens u [B, S, H], and the state after them."""
        return ops.localized_filter_step(
            u_BSH,
            state,
            self.conv1.weight,
            self.conv1.bias,
            self.conv2.weight,
            self.conv2.bias,
            document_start=document_start,
        )


class Attention(nn.Module):
    """Multi-head causal attention; the rows of `query_key` are interleaved per head.

    Head j has the query rows [2jD, (2j+1)D) and the key rows [(2j+1)D, (2j+2)D), so that contiguous rows hold
    whole heads. The number of heads follows from the weights' shapes, which may be a tensor-parallel shard's.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, projection = config.hidden_size, config.projection_size
        self.head_dim = config.head_dim
        self.value = Linear(hidden, projection, device=device, dtype=dtype)
        self.query_key = Linear(hidden, 2 * projection, device=device, dtype=dtype)
        self.out = Linear(projection, hidden, device=device, dtype=dtype)

    def forward(
        self,
        u_BSH: Tensor,
        filtered_BSH: Tensor,
        rotary: tuple[Tensor, Tensor],
        document_ranges: DocumentRanges | None = None,
    ) -> Tensor:
        """Return [B, S, H]: values from u, queries and keys from filtered.

        With `document_ranges`, tokens attend only within their document.
        """
        operands_BSND = self._project(u_BSH, filtered_BSH, rotary)
        heads_BSND = ops.causal_attention(*operands_BSND, document_ranges=document_ranges)
        return self.out(heads_BSND.flatten(2))

    def step(
        self,
        u_BSH: Tensor,
        filtered_BSH: Tensor,
        rotary: tuple[Tensor, Tensor],
        cache: LayerCache,
        first: int,
        visible: Tensor | None,
    ) -> Tensor:
        """Return [B, S, H] of tokens [first, first + S), and write their keys and values into `cache`.

        `visible` is bool [B or 1, 1, S, first + S], True where a token attends to another. None: each token
        attends to itself and to all before it; allowed only if `first` is 0 or S is 1.
        """
        query_BSND, key_BSND, value_BSND = self._project(u_BSH, filtered_BSH, rotary)
        last = first + key_BSND.shape[1]
        cache.keys_BPND[:, first:last] = key_BSND
        cache.values_BPND[:, first:last] = value_BSND
        heads_BSND = _attend(
            query_BSND,
            cache.keys_BPND[:, :last],
            cache.values_BPND[:, :last],
            is_causal=visible is None and first == 0,
            visible=visible,
        )
        return self.out(heads_BSND.flatten(2))

    def _project(
        self, u_BSH: Tensor, filtered_BSH: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Queries and keys, interleaved, are rotated as one tensor of 2N heads.
        query_key = ops.rotary(self.query_key(filtered_BSH).unflatten(-1, (-1, self.head_dim)), *rotary)
        query_BSND, key_BSND = query_key.unflatten(2, (-1, 2)).unbind(3)
        return query_BSND, key_BSND, self.value(u_BSH).unflatten(-1, (-1, self.head_dim))


def _attend(
    query_BSND: Tensor,
    key_BSND: Tensor,
    value_BSND: Tensor,
    *,
    is_causal: bool,
    visible: Tensor | None = None,
) -> Tensor:
    heads_BNSD = F.scaled_dot_product_attention(
        query_BSND.transpose(1, 2),
        key_BSND.transpose(1, 2),
        value_BSND.transpose(1, 2),
        attn_mask=visible,
        is_causal=is_causal,
    )
    return heads_BNSD.transpose(1, 2)
