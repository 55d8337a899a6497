"""One layer: attention and feed-forward (or experts), each behind a norm and added to the residual.

B = sequences, S = tokens of a sequence, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from yuan_train.config.model import ModelConfig, half_of
from yuan_train.models.attention import DocumentRanges, LayerCache, RotaryTables, build_attention
from yuan_train.models.experts import Experts, Router
from yuan_train.models.layers import FeedForward, LocalizedFilter, RMSNorm, Tokens
from yuan_train.models.recompute import SAVE_ALL, RecomputePolicy

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
            sizes = hidden, config.ffn_hidden_size
            self.feed_forward = FeedForward(*sizes, dtype=dtype)
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
