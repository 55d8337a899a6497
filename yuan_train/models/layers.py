"""Modules of a layer: linear maps, embedding, norm, feed-forward.

B = sequences, S = tokens of a sequence, H = hidden size, F = feed-forward width, V = vocabulary.

Parameters are created empty; `transformer.init_weights` or a checkpoint fills them. A tensor-parallel shard
of a layer has the same modules with fewer rows or columns, so the code here takes widths from the weights'
shapes, not from the config.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from yuan_kernels import ops

from yuan_train.config.model import ModelConfig
from yuan_train.models.recompute import SAVE_ALL, RecomputePolicy


class Linear(nn.Module):
    """x weight^T + bias; weight is [out, in], bias [out] or none. For adapters see `add_adapters`."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype)) if bias else None
        self.lora_a: nn.Parameter | None = None
        self.lora_b: nn.Parameter | None = None
        self.lora_scale = 0.0

    def add_adapters(self, rank: int, scale: float) -> None:
        """Add scale (x lora_a^T) lora_b^T to the result; lora_a is [rank, in], lora_b [out, rank]."""
        (rows, columns), new = self.weight.shape, self.weight.new_empty
        self.lora_a = nn.Parameter(new(rank, columns))
        self.lora_b = nn.Parameter(new(rows, rank))
        self.lora_scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        y = ops.linear(x, self.weight, self.bias)
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + ops.linear(self.lora_scale * ops.linear(x, self.lora_a), self.lora_b)


class Score(nn.Module):
    """One number a token: the product with weight [H]."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return [...] of x [..., H], in fp32 (fp64 for fp64)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ self.weight.to(wide)


class Embedding(nn.Module):
    """Token embedding: the rows of weight [V, H]. Training replaces `op`, to add the rows of the gradient to
    its own buffer."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype))
        self.op = F.embedding

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return [B, S, H] of int64 tokens [B, S]."""
        return self.op(tokens_BS, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, statistics in fp32 (fp64 for fp64)."""

    def __init__(self, hidden_size: int, epsilon: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., H] in x's dtype."""
        return ops.rms_norm(x, self.weight, epsilon=self.epsilon)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(s), s) of s = x + residual [..., H], in one fused op."""
        return ops.add_rms_norm(x, residual, self.weight, epsilon=self.epsilon)


class FeedForward(nn.Module):
    """SwiGLU feed-forward: down(silu(z0) * z1), where (z0, z1) = up(x)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = Linear(hidden_size, 2 * ffn_hidden_size, dtype=dtype)
        self.down = Linear(ffn_hidden_size, hidden_size, dtype=dtype)

    def forward(self, x: Tensor, policy: RecomputePolicy = SAVE_ALL) -> Tensor:
        """Return [B, S, H] of x [B, S, H]."""
        up = self.up(x)
        return self.down(policy.mark_recomputable(ops.swiglu(up), ops.swiglu, up))


class TwoTapConvolution(nn.Module):
    """Weight [out, in, 2] (last index 0: the older token) and bias [out] of one causal convolution."""

    def __init__(self, in_size: int, out_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, 2, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype))


class LocalizedFilter(nn.Module):
    """f = RMSNorm(filter(u) + u) over the tokens t-2, t-1, t of a sequence.

    Tensor parallelism shards the H/2 channels and gives `reduce`, which adds up the partial results so that
    they lie as a residual does; residual and norm stay as they are. Training replaces `op` alone, to add the
    weights' gradients to its own buffers.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, channels = config.hidden_size, config.hidden_size // 2
        self.conv1 = TwoTapConvolution(hidden, channels, dtype=dtype)
        self.conv2 = TwoTapConvolution(channels, hidden, dtype=dtype)
        self.norm = RMSNorm(hidden, config.norm_epsilon, dtype=dtype)
        self.op = ops.localized_filter
        self.reduce: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Weight and bias of either convolution; no bias if it is added to the sum of partial results."""
        last = self.conv2.bias if self.reduce is None else None
        return self.conv1.weight, self.conv1.bias, self.conv2.weight, last

    def forward(
        self,
        u_BSH: Tensor,
        document_start: Tensor | None = None,
        policy: RecomputePolicy = SAVE_ALL,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return f, which lies as `residual` does, by default as u [B, S, H]; `document_start` bool [B, S]
        or None."""
        residual = u_BSH if residual is None else residual
        filtered = self._reduced(self.op(u_BSH, *self.weights, document_start=document_start), residual)
        f, total = self.norm.add(filtered, residual)
        return policy.mark_recomputable(f, self.norm, total)

    def step(
        self, u_BSH: Tensor, state: ops.FilterState, document_start: Tensor | None = None
    ) -> tuple[Tensor, ops.FilterState]:
        """Return f [B, S, H] of the next tokens, and the state after them."""
        part_BSH, state = ops.localized_filter_step(
            u_BSH, state, *self.weights, document_start=document_start
        )
        return self.norm.add(self._reduced(part_BSH, u_BSH), u_BSH)[0], state

    def _reduced(self, part_BSH: Tensor, residual: Tensor) -> Tensor:
        return part_BSH if self.reduce is None else self.reduce(part_BSH, residual) + self.conv2.bias
