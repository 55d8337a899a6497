"""Yuan 2.0's layer: causal attention with a localized filter before queries and keys (paper, section 2.1).

The values come from the unfiltered input, queries and keys from the filtered one:

    f = RMSNorm(filter(u) + u)      v = u Wv^T      (q, k) = f Wqk^T

with rotary embedding on q and k. For plain attention f = u.

B = sequences, S = tokens of a sequence, H = hidden size, N = heads, D = size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yuan_train.config.model import ModelConfig
from yuan_train.models.attention import SelfAttention
from yuan_train.models.block import Block
from yuan_train.models.layers import Linear, LocalizedFilter
from yuan_train.models.rotary import RotaryTables


def build_block(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> Block:
    """Return one layer, its parameters uninitialised."""
    has_filter = config.attention == "localized_filter"
    return Block(
        config,
        filter=LocalizedFilter(config, device=device, dtype=dtype) if has_filter else None,
        attention=InterleavedAttention(config, device=device, dtype=dtype),
        device=device,
        dtype=dtype,
    )


class InterleavedAttention(SelfAttention):
    """Multi-head attention; the rows of `query_key` are interleaved per head.

    Head j has the query rows [2jD, (2j+1)D) and the key rows [(2j+1)D, (2j+2)D), so that contiguous rows hold
    whole heads.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config)
        hidden, projection = config.hidden_size, config.projection_size
        self.value = Linear(hidden, projection, device=device, dtype=dtype)
        self.query_key = Linear(hidden, 2 * projection, device=device, dtype=dtype)
        self.out = Linear(projection, hidden, device=device, dtype=dtype)

    def project(
        self, u_BSH: Tensor, filtered_BSH: Tensor, rotary: RotaryTables
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Queries and keys, interleaved, are rotated as one tensor of 2N heads.
        query_key = rotary.rotate(self.split_heads(self.query_key(filtered_BSH)))
        query_BSND, key_BSND = query_key.unflatten(2, (-1, 2)).unbind(3)
        return query_BSND, key_BSND, self.split_heads(self.value(u_BSH))
