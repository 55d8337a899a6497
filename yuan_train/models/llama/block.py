"""Llama's layer, and Qwen's: grouped-query attention (Ainslie et al. 2023), biases and head norms if asked.

B = sequences, S = tokens of a sequence, H = hidden size, N = query heads, M = key-value heads, D = size of a
head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yuan_train.config.model import ModelConfig
from yuan_train.models.attention import SelfAttention
from yuan_train.models.block import Block
from yuan_train.models.layers import Linear, RMSNorm
from yuan_train.models.rotary import RotaryTables


def build_block(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> Block:
    """Return one layer, its parameters uninitialised."""
    return Block(
        config,
        filter=None,
        attention=GroupedAttention(config, device=device, dtype=dtype),
        device=device,
        dtype=dtype,
    )


class GroupedAttention(SelfAttention):
    """N query heads read M key-value heads, N/M of them each one."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config)
        hidden, epsilon = config.hidden_size, config.norm_epsilon

        def projection(size: int) -> Linear:
            return Linear(hidden, size, bias=config.qkv_bias, device=device, dtype=dtype)

        self.query = projection(config.projection_size)
        self.key = projection(config.key_value_size)
        self.value = projection(config.key_value_size)
        if config.query_key_norm:
            self.query_norm = RMSNorm(config.head_dim, epsilon, device=device, dtype=dtype)
            self.key_norm = RMSNorm(config.head_dim, epsilon, device=device, dtype=dtype)
        self.has_norms = config.query_key_norm
        self.out = Linear(config.projection_size, hidden, device=device, dtype=dtype)

    def project(
        self, u_BSH: Tensor, filtered_BSH: Tensor, rotary: RotaryTables
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_BSND = self.split_heads(self.query(u_BSH))
        key_BSMD = self.split_heads(self.key(u_BSH))
        if self.has_norms:
            query_BSND, key_BSMD = self.query_norm(query_BSND), self.key_norm(key_BSMD)
        return *rotary.rotate_both(query_BSND, key_BSMD), self.split_heads(self.value(u_BSH))
