"""Experts: feed-forwards of a layer, of which a router chooses K for each token (arXiv 2405.17976).

    products = u Wr^T  (fp32)      scores = attention between the experts, or the products themselves
    e_1..e_K = the K highest scores, the lower number first where they tie
    w = softmax of these K scores      y = sum_k w_k down_e(silu(z0) z1),  (z0, z1) = up_e(u)

No token is dropped and no expert has a capacity: a token's output depends on that token alone, so neither
the micro-batch nor the plan changes it. The choice is a step function of the products, so it is made once and
kept under recompute: a second time it might differ.

T = tokens, H = hidden size, F = width of an expert, N = experts, K = experts of a token, R = rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from yuan_kernels import ops

from yuan_train.config.model import ModelConfig, RouterKind
from yuan_train.models import sizes
from yuan_train.models.recompute import SAVE_ALL, RecomputePolicy


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
    Every rank of a tensor-parallel group has all of it: with equal inputs they decide alike. `wide_linear` is
    the op of its products; a split backward, which defers weight gradients, replaces it.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind: RouterKind = config.router or "attention"
        self.num_experts, self.experts_per_token = config.num_experts, config.experts_per_token
        shape = (sizes.router_rows(config), config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.wide_linear = ops.wide_linear
        self._load = [0] * config.num_experts

    def forward(self, u_TH: Tensor, policy: RecomputePolicy = SAVE_ALL) -> tuple[Choice, Tensor]:
        """Return the choice, and the weights [T, K] of the chosen experts, which sum to 1."""
        products = self.wide_linear(u_TH, self.weight)
        choice = policy.decide(lambda: self._choose(products.detach()))
        if self.kind == "softmax":
            return choice, products.gather(1, choice.chosen_TK).softmax(dim=-1)
        return choice, ops.attention_router_weights(products, choice.chosen_TK)

    def take_load(self) -> list[int]:
        """Tokens that each expert was given in training since the last call."""
        load, self._load = self._load, [0] * self.num_experts
        return load

    def _choose(self, products: Tensor) -> Choice:
        scores_TN = products if self.kind == "softmax" else ops.attention_scores(products)
        # Not topk, which leaves the order of equal scores open; large queries saturate the softmax, and tie.
        ranked_TN = scores_TN.sort(dim=-1, descending=True, stable=True).indices
        chosen_TK = ranked_TN[:, : self.experts_per_token].contiguous()
        slots = chosen_TK.flatten()
        counts = tuple(slots.bincount(minlength=self.num_experts).tolist())
        if torch.is_grad_enabled():
            self._load = [load + count for load, count in zip(self._load, counts, strict=True)]
        return Choice(chosen_TK, slots.argsort(stable=True), counts)


class ExpertLinear(nn.Module):
    """One matrix [out, in] for each expert; `weight` is [experts, out, in]."""

    def __init__(
        self, experts: int, in_size: int, out_size: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_size, in_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Return [R, out] of x [R, in], whose rows are grouped by expert."""
        return ops.grouped_linear(x, self.weight, counts)


class Experts(nn.Module):
    """The experts [first_expert, first_expert + n) of a layer, n from the weights' shape: all, or a card's.

    The outputs of cards that hold all of them together add up to the whole layer's, as do the gradients of u
    and of the weights: with K = 2 to the bit, for a token's slots of other cards are exact zeros.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        count, hidden, width = config.num_experts, config.hidden_size, config.expert_width
        self.first_expert = 0
        """Set where the ranks of a group share the experts."""
        self.up = ExpertLinear(count, hidden, 2 * width, device=device, dtype=dtype)
        self.down = ExpertLinear(count, width, hidden, device=device, dtype=dtype)

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
