"""The localized filter before queries and keys (Yuan 2.0 paper, section 2.1): two causal convolutions.

B = sequences, S = tokens of a sequence, H = hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from yuan_kernels import ops

from yuan_train.config.model import ModelConfig
from yuan_train.models.layers import RMSNorm
from yuan_train.models.recompute import SAVE_ALL, RecomputePolicy


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
