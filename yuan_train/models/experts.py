"""Experts: feed-forwards of a layer, of which a router chooses K for each token (arXiv 2405.17976).

    products = u Wr^T  (fp32)      scores = attention between the experts, or the products themselves
    e_1..e_K = the K highest scores, the lower number first where they tie
    w = softmax of these K scores      y = sum_k w_k down_e(silu(z0) z1),  (z0, z1) = up_e(u)

which is the softmax of all scores, divided by the sum of the K chosen (Mixtral, arXiv 2401.04088; Qwen 3,
arXiv 2505.09388); without `norm_topk_prob` it is not divided.

No token is dropped and no expert has a capacity: a token's output depends on that token alone, so neither
the micro-batch nor the plan changes it. The choice is a step function of the products, so it is made once and
kept under recompute: a second time it might differ.

Where the load of the experts is to be evened (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), neither way
depends on micro-batch or plan either: a bias that moves by the counts of whole steps, or a loss of each
sequence.

A policy is trained on the experts that drew (`given`): with weights, or sums in another order, a token near
the border between two experts would take others, and its probability would be another one.

T = tokens, H = hidden size, F = width of an expert, N = experts, K = experts of a token, R = rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from yuan_kernels import ops

from yuan_train.config.model import ModelConfig, RouterKind
from yuan_train.models import decoder
from yuan_train.models.layers import SAVE_ALL, RecomputePolicy


@dataclass(frozen=True)
class Choice:
    """The experts of a micro-batch's tokens: integers without a gradient."""

    chosen_TK: Tensor
    """int64, by falling score."""
    order: Tensor
    """int64 [T K]: the slots t K + k by expert, then by token."""
    counts: tuple[int, ...]
    """Tokens of each expert, on the host."""


class Router(nn.Module):
    """Chooses the experts of each token, and weighs them. All of it in fp32 (fp64 for fp64).

    `weight` is [3N, H], the queries of all experts, then their keys, then their values; for `softmax` [N, H].
    Every rank of a tensor-parallel group has all of it: with equal inputs they decide alike. Training
    replaces `op`, to add the weight's gradient to its own buffer. With balance `bias` there is a buffer
    `bias` [N], which training moves; it changes the choice, and no weight.
    """

    bias: Tensor | None
    loss_scale = 0.0
    """Of balance `sequence`: what a sequence's loss counts in the backward; 0 outside of training."""
    given: Tensor | None = None
    """int64 [T, K]: experts chosen before, which are taken in place of the best; None: the best."""
    last: Tensor | None = None
    """Of a forward without a gradient, the experts that it has chosen; int64 [T, K]."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind: RouterKind = config.router or "attention"
        self.num_experts, self.experts_per_token = config.num_experts, config.experts_per_token
        self.sums_to_one = config.norm_topk_prob
        shape = (decoder.router_rows(config), config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.op = ops.wide_linear
        self._load = [0] * config.num_experts
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        biased = config.balance == "bias"
        zeros = torch.zeros(config.num_experts, dtype=wide) if biased else None
        self.register_buffer("bias", zeros)
        self._loss_rate = config.balance_rate if config.balance == "sequence" else 0.0

    def forward(
        self, u_TH: Tensor, policy: RecomputePolicy = SAVE_ALL, *, num_sequences: int = 1
    ) -> tuple[Choice, Tensor]:
        """Return the choice, and the weights [T, K] of the chosen experts; T are all of `num_sequences`."""
        products = self.op(u_TH, self.weight)
        choice = policy.decide(lambda: self._choose(products.detach()))
        rate = self._loss_rate * self.loss_scale
        if rate and torch.is_grad_enabled():
            balanced = _SequenceBalance.apply(products, choice.chosen_TK, num_sequences, rate)
            products: Tensor = balanced  # pyright: ignore[reportAssignmentType]
        if not self.sums_to_one:
            return choice, products.softmax(dim=-1).gather(1, choice.chosen_TK)
        if self.kind == "softmax":
            return choice, products.gather(1, choice.chosen_TK).softmax(dim=-1)
        return choice, ops.attention_router_weights(products, choice.chosen_TK)

    def take_load(self) -> list[int]:
        """Tokens that each expert was given in training since the last call."""
        load, self._load = self._load, [0] * self.num_experts
        return load

    def put_load(self, load: list[int]) -> None:
        """Count these tokens of each expert, and no others."""
        self._load = load

    def best(self, products: Tensor) -> Tensor:
        """The experts int64 [T, K] with the highest scores, their bias included, by falling score."""
        scores_TN = products if self.kind == "softmax" else ops.attention_scores(products)
        if self.bias is not None:
            shares_TN = scores_TN.softmax(dim=-1) if self.kind == "softmax" else scores_TN
            scores_TN = shares_TN + self.bias
        # Not topk, which leaves the order of equal scores open; large queries saturate the softmax, and tie.
        ranked_TN = scores_TN.sort(dim=-1, descending=True, stable=True).indices
        return ranked_TN[:, : self.experts_per_token].contiguous()

    def _choose(self, products: Tensor) -> Choice:
        chosen_TK = self.best(products) if self.given is None else self.given
        slots = chosen_TK.flatten()
        # The host waits for its card here, once a layer: products of the experts, and what other ranks are
        # sent, have sizes that only the host can give, and that nobody knows before. Both take these.
        counts = tuple(slots.bincount(minlength=self.num_experts).tolist())
        if torch.is_grad_enabled():
            self._load = [load + count for load, count in zip(self._load, counts, strict=True)]
        else:
            self.last = chosen_TK
        return Choice(chosen_TK, slots.argsort(stable=True), counts)


class _SequenceBalance(torch.autograd.Function):
    """Products [T, N] as they are; in the backward, the gradient of a loss of each sequence is added.

    For a sequence of S tokens with shares s = softmax(products) it is (DeepSeek-V3, equations 17 to 20)

        rate sum_i f_i P_i      f_i = N / (K S) (slots of expert i)      P_i = mean of s_ti over t

    f has no gradient. The loss is in no metric.
    """

    @staticmethod
    def forward(ctx: Any, products: Tensor, chosen_TK: Tensor, num_sequences: int, rate: float) -> Tensor:
        ctx.save_for_backward(products, chosen_TK)
        ctx.num_sequences, ctx.rate = num_sequences, rate
        return products.view_as(products)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        products, chosen_TK = ctx.saved_tensors
        shares_BSN = products.softmax(dim=-1).unflatten(0, (ctx.num_sequences, -1))
        length, experts = shares_BSN.shape[1:]
        slots_BR = chosen_TK.view(ctx.num_sequences, -1)
        counts_BN = products.new_zeros(ctx.num_sequences, experts)
        counts_BN.scatter_add_(1, slots_BR, torch.ones_like(slots_BR, dtype=products.dtype))
        f_B1N = (counts_BN * (experts / slots_BR.shape[1])).unsqueeze(1)
        even_BS1 = (shares_BSN * f_B1N).sum(dim=-1, keepdim=True)
        own = (shares_BSN * (f_B1N - even_BS1)).flatten(0, 1) * (ctx.rate / length)
        return gradients[0] + own, None, None, None


class ExpertLinear(nn.Module):
    """One matrix [out, in] for each expert; `weight` is [experts, out, in]. Training replaces `op`."""

    def __init__(self, experts: int, in_size: int, out_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_size, in_size, dtype=dtype))
        self.op = ops.grouped_linear

    def forward(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Return [R, out] of x [R, in], whose rows are grouped by expert."""
        return self.op(x, self.weight, counts=counts)


class Experts(nn.Module):
    """The experts [first_expert, first_expert + n) of a layer, n from the weights' shape: all, or a card's.

    The outputs of cards that hold all of them together add up to the whole layer's, as do the gradients of u
    and of the weights: with K = 2 to the bit, for a token's slots of other cards are exact zeros.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        count, hidden, width = config.num_experts, config.hidden_size, config.expert_width
        self.first_expert = 0
        """Set where the ranks of a group share the experts."""
        self.up = ExpertLinear(count, hidden, 2 * width, dtype=dtype)
        self.down = ExpertLinear(count, width, hidden, dtype=dtype)

    def forward(
        self, u_TH: Tensor, choice: Choice, weights_TK: Tensor, policy: RecomputePolicy = SAVE_ALL
    ) -> Tensor:
        """Return [T, H]: the weighted outputs of the experts held, of the tokens that chose them."""
        order, counts = self._held(choice)
        slots = choice.chosen_TK.shape[1]

        def copies(u_TH: Tensor) -> Tensor:
            return ops.expert_rows(u_TH, order, slots)

        rows = policy.mark_recomputable(copies(u_TH), copies, u_TH)
        up = self.up(rows, counts)
        gated = policy.mark_recomputable(ops.swiglu(up), ops.swiglu, up)
        return ops.combine_rows(self.down(gated, counts), weights_TK, order)

    def _held(self, choice: Choice) -> tuple[Tensor, tuple[int, ...]]:
        """Of the choice, the slots and counts of the experts held."""
        held = self.up.weight.shape[0]
        if held == len(choice.counts):
            return choice.order, choice.counts
        first, last = self.first_expert, self.first_expert + held
        start, counts = sum(choice.counts[:first]), choice.counts[first:last]
        return choice.order[start : start + sum(counts)], counts
