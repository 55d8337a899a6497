"""One layer: attention and feed-forward (or experts), each behind a norm and added to the residual.

B = sequences, S = tokens of a sequence, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from yuan_train.config.architecture import half_of
from yuan_train.config.model import ModelConfig
from yuan_train.models.attention import DocumentRanges, LayerCache, SelfAttention
from yuan_train.models.experts import Experts, Router
from yuan_train.models.layers import FeedForward, LocalizedFilter, RMSNorm
from yuan_train.models.recompute import SAVE_ALL, RecomputePolicy
from yuan_train.models.rotary import RotaryTables

Drop = Callable[[Tensor, str], Tensor]
"""The dropout of a layer: of x [B, S, H] at a site."""
Half = Literal["attention", "feed_forward"]


class Block(nn.Module):
    """One layer of any architecture. Without `filter`, queries and keys come from the norm, as values do.

    A stage of a plan may hold one half of a layer only; see `keep_half`.
    """

    recomputes_itself = False
    """A compiled block does: what it saves for the backward is decided where it is compiled."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        filter: LocalizedFilter | None,
        attention: SelfAttention,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.norm_epsilon
        self.attention_norm = RMSNorm(hidden, epsilon, device=device, dtype=dtype)
        self.filter = filter
        self.attention = attention
        self.feed_forward_norm = RMSNorm(hidden, epsilon, device=device, dtype=dtype)
        if config.num_experts:
            self.router = Router(config, device=device, dtype=dtype)
            self.experts = Experts(config, device=device, dtype=dtype)
        else:
            sizes = hidden, config.ffn_hidden_size
            self.feed_forward = FeedForward(*sizes, device=device, dtype=dtype)
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
        x_BSH: Tensor,
        rotary: RotaryTables,
        document_start: Tensor | None = None,
        document_ranges: DocumentRanges | None = None,
        policy: RecomputePolicy = SAVE_ALL,
        drop: Drop | None = None,
    ) -> Tensor:
        """Return [B, S, H] of x [B, S, H]: of both halves, or of the one that is held.

        `drop(branch, site)` is the dropout, applied to both branches before they are added to the residual;
        `site` is `attention` or `feed_forward`.
        """
        if self.half == "feed_forward":
            u_BSH = self.feed_forward_norm(x_BSH)
        else:
            attended_BSH = self._attend(x_BSH, rotary, document_start, document_ranges, policy)
            if drop is not None:
                attended_BSH = drop(attended_BSH, "attention")
            if self.half == "attention":
                return x_BSH + attended_BSH
            policy.enter_half(attended_BSH)
            u_BSH, x_BSH = self.feed_forward_norm.add(attended_BSH, x_BSH)
        policy.mark_recomputable(u_BSH, self.feed_forward_norm, x_BSH)
        ffn_BSH = self._transform(u_BSH, policy)
        return x_BSH + (ffn_BSH if drop is None else drop(ffn_BSH, "feed_forward"))

    def _attend(
        self,
        x_BSH: Tensor,
        rotary: RotaryTables,
        document_start: Tensor | None,
        document_ranges: DocumentRanges | None,
        policy: RecomputePolicy,
    ) -> Tensor:
        u_BSH = policy.mark_recomputable(self.attention_norm(x_BSH), self.attention_norm, x_BSH)
        filtered_BSH = u_BSH if self.filter is None else self.filter(u_BSH, document_start, policy)
        return self.attention(u_BSH, filtered_BSH, rotary, document_ranges)

    def step(
        self,
        x_BSH: Tensor,
        rotary: RotaryTables,
        cache: LayerCache,
        first: int | Tensor,
        document_start: Tensor | None,
        visible: Tensor | None,
    ) -> Tensor:
        """Return [B, S, H] of the next tokens, and add them to `cache`. Needs both halves.

        `first` and `visible` as in `SelfAttention.step`.
        """
        u_BSH = filtered_BSH = self.attention_norm(x_BSH)
        if self.filter is not None:
            assert cache.filter_state is not None
            filtered_BSH, cache.filter_state = self.filter.step(u_BSH, cache.filter_state, document_start)
        attended_BSH = self.attention.step(u_BSH, filtered_BSH, rotary, cache, first, visible)
        u_BSH, x_BSH = self.feed_forward_norm.add(attended_BSH, x_BSH)
        return x_BSH + self._transform(u_BSH)

    def _transform(self, u_BSH: Tensor, policy: RecomputePolicy = SAVE_ALL) -> Tensor:
        """The feed-forward, or the experts that the router chooses, of the norm's output."""
        if not self.has_experts:
            return self.feed_forward(u_BSH, policy)
        u_TH = u_BSH.flatten(0, 1)
        choice, weights_TK = self.router(u_TH, policy, num_sequences=u_BSH.shape[0])
        return self.experts(u_TH, choice, weights_TK, policy).view_as(u_BSH)
