"""Weight gradients of linears, experts, routers and filters: added to fp32 buckets at once, or later.

A product of 16-bit matrices is added to the bucket in fp32, without a rounded gradient in between. Split in
two (zero bubble, Qi et al. 2023), a backward computes the gradients of inputs and defers those of these
weights until `flush`. All other weight gradients (norms, embedding, head) are small, or were computed in the
forward, and belong to the first part. Of the embedding's only the rows of a micro-batch's tokens are added:
torch would write and add a whole matrix [V, H].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from yuan_kernels import ops

from yuan_train.parallel.shard import sharding_style

WeightGrad = Callable[[], None]
"""Computes the weight gradient of one op and accumulates it."""


class DeferredWeightGrads:
    """The deferred weight gradients of one stage, by micro-batch."""

    def __init__(self) -> None:
        self._deferred: dict[int, list[WeightGrad]] = {}
        self._recording: list[WeightGrad] | None = None

    @contextmanager
    def splitting(self, micro_batch: int, split: bool) -> Iterator[None]:
        """Around a backward of a micro-batch: if `split`, its weight gradients are deferred until `flush`."""
        self._recording = self._deferred.setdefault(micro_batch, []) if split else None
        try:
            yield
        finally:
            self._recording = None

    def flush(self, micro_batch: int) -> None:
        """Compute and accumulate the deferred weight gradients of a micro-batch, in the order of deferral."""
        for weight_grad in self._deferred.pop(micro_batch):
            weight_grad()

    def defer(self, weight_grad: WeightGrad) -> bool:
        """Keep `weight_grad` for `flush` if a split backward is running; else return False."""
        if self._recording is None:
            return False
        self._recording.append(weight_grad)
        return True


def add_weight_grads(model: Any, deferred: DeferredWeightGrads, sharding: Mapping[str, str]) -> set[str]:
    """Make the modules that multiply matrices add their weight gradients to the buckets themselves.

    In split backwards they defer that. The linears are the modules whose style in `sharding` is column or
    row, the experts those of style expert; routers and filters are known by their ops. Returns the names of
    these parameters.
    """
    added: set[str] = set()
    for path, module in model.named_modules():
        if sharding_style(path, sharding) in ("column", "row"):
            module.forward = _linear(module, deferred)
        elif sharding_style(path, sharding) == "expert":
            module.forward = _experts(module, deferred)
        if hasattr(module, "convolution"):
            module.convolution = _filter(deferred)
        if hasattr(module, "wide_linear"):
            module.wide_linear = _wide_linear(deferred)
            added.add(f"{path}.weight")
    styles = {name: sharding_style(name.rpartition(".")[0], sharding) for name, _ in model.named_parameters()}
    return added | {
        name
        for name, style in styles.items()
        # The bias of a linear is added outside of it.
        if style in ("filter", "expert") or (style in ("column", "row") and not name.endswith(".bias"))
    }


def add_embedding_rows(model: Any) -> None:
    """Make the lookup of tokens add the rows of its gradient to the bucket itself, never later."""
    if model.has_embedding:
        model.embedding.lookup = _lookup


def _lookup(tokens_BS: Tensor, weight: Tensor) -> Tensor:
    if not weight.requires_grad:
        return F.embedding(tokens_BS, weight)
    return _Lookup.apply(tokens_BS, weight)  # pyright: ignore[reportReturnType]


def _linear(module: Any, deferred: DeferredWeightGrads) -> Callable[[Tensor], Tensor]:
    def product(x: Tensor) -> Any:
        if module.weight.requires_grad:
            return _Linear.apply(x, module.weight, deferred)
        if module.lora_a is None:
            return _FrozenLinear.apply(x, module.weight)
        adapters = module.lora_a, module.lora_b, module.lora_scale
        return _AdaptedLinear.apply(x, module.weight, *adapters, deferred)

    def forward(x: Tensor) -> Tensor:
        y: Tensor = product(x)
        return y if module.bias is None else y + module.bias

    return forward


def _experts(module: Any, deferred: DeferredWeightGrads) -> Callable[..., Tensor]:
    def forward(x: Tensor, counts: Sequence[int]) -> Tensor:
        return _Experts.apply(x, module.weight, counts, deferred)  # pyright: ignore[reportReturnType]

    return forward


def _wide_linear(deferred: DeferredWeightGrads) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: _WideLinear.apply(x, weight, deferred)  # pyright: ignore[reportReturnType]


def _filter(deferred: DeferredWeightGrads) -> Callable[..., Tensor]:
    def convolution(u_BSH: Tensor, *weights: Tensor | None, document_start: Tensor | None = None) -> Tensor:
        return _Filter.apply(u_BSH, *weights, document_start, deferred)  # pyright: ignore[reportReturnType]

    return convolution


def _add_or_defer(deferred: DeferredWeightGrads, weights: Sequence[Any], add: WeightGrad) -> None:
    """Add the gradients of `weights`, or keep that for `flush`, which then says that they are there.

    Without `flush`, torch says so: it calls a parameter's hook also after an op that returns no gradient.
    """

    def add_later() -> None:
        add()
        for weight in weights:
            weight.on_main_gradient()

    if not deferred.defer(add_later):
        add()


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_BS: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_BS)
        ctx.weight = weight
        return F.embedding(tokens_BS, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        (tokens_BS,), total_VH = ctx.saved_tensors, ctx.weight.main_gradient
        tokens_T, rows_TH = tokens_BS.flatten(), gradients[0].flatten(0, -2).to(total_VH.dtype)
        # Each has one order of additions on its device: the other adds by atomics on a card, or in threads.
        if total_VH.is_cuda:
            total_VH.index_put_((tokens_T,), rows_TH, accumulate=True)
        else:
            total_VH.index_add_(0, tokens_T, rows_TH)
        return None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferred: DeferredWeightGrads) -> Tensor:
        # Not a saved tensor: under recompute that comes back as a copy, without the bucket's view.
        ctx.save_for_backward(x)
        ctx.weight, ctx.deferred = weight, deferred
        return ops.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        dy = gradients[0]

        def add() -> None:
            ops.add_product_(weight.main_gradient, dy.flatten(0, -2).T, x.flatten(0, -2))

        dx = ops.linear(dy, weight.T) if ctx.needs_input_grad[0] else None
        _add_or_defer(ctx.deferred, [weight], add)
        return dx, None, None


class _FrozenLinear(torch.autograd.Function):
    """Of a weight that is not trained: nothing is kept for the backward but the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return ops.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ops.linear(gradients[0], ctx.weight.T), None


class _AdaptedLinear(torch.autograd.Function):
    """x W^T + scale (x A^T) B^T with a frozen W: keeps x, and the product [..., rank] between A and B.

    The products of the adapters are added to those of W in place: what they cost are passes over memory.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, deferred: DeferredWeightGrads
    ) -> Tensor:
        inner = scale * ops.linear(x, a)
        y = ops.linear(x, weight)
        ops.add_product_(_rows(y), inner.flatten(0, -2), b.T)
        ctx.save_for_backward(x, inner)
        ctx.weights, ctx.scale, ctx.deferred = (weight, a, b), scale, deferred
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, inner), (weight, a, b) = ctx.saved_tensors, ctx.weights
        dy = gradients[0]
        dinner = ctx.scale * ops.linear(dy, b.T)

        def add() -> None:
            ops.add_product_(b.main_gradient, dy.flatten(0, -2).T, inner.flatten(0, -2))
            ops.add_product_(a.main_gradient, dinner.flatten(0, -2).T, x.flatten(0, -2))

        dx = None
        if ctx.needs_input_grad[0]:
            dx = ops.linear(dy, weight.T)
            ops.add_product_(_rows(dx), dinner.flatten(0, -2), a)
        _add_or_defer(ctx.deferred, [a, b], add)
        return dx, None, None, None, None, None


def _rows(x: Tensor) -> Tensor:
    """A view [T, K] of x [..., K], to add to in place."""
    return x.view(-1, x.shape[-1])


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Sequence[int], deferred: DeferredWeightGrads
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.counts, ctx.deferred = weight, counts, deferred
        return ops.grouped_linear(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, counts = ctx.saved_tensors, ctx.weight, ctx.counts
        dy = gradients[0]

        def add() -> None:
            ops.add_grouped_products_(weight.main_gradient, dy, x, counts)

        dx = ops.grouped_linear(dy, weight.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
        _add_or_defer(ctx.deferred, [weight], add)
        return dx, None, None, None


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferred: DeferredWeightGrads) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.deferred = weight, deferred
        return ops.wide_linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        dy = gradients[0]

        def add() -> None:
            ops.add_product_(weight.main_gradient, dy.T, x.to(dy.dtype))

        dx = ops.linear(dy, weight.T.to(dy.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        _add_or_defer(ctx.deferred, [weight], add)
        return dx, None, None


class _Filter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        conv1_weight: Tensor,
        conv1_bias: Tensor,
        conv2_weight: Tensor,
        conv2_bias: Tensor | None,
        document_start: Tensor | None,
        deferred: DeferredWeightGrads,
    ) -> Tensor:
        y, taps = ops.localized_filter_forward(
            u, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start=document_start
        )
        # Of frozen weights there is no gradient that would need its input.
        kept = (u, taps) if conv1_weight.requires_grad else (None, None)
        ctx.save_for_backward(*kept, document_start)
        ctx.weights, ctx.deferred = (conv1_weight, conv1_bias, conv2_weight, conv2_bias), deferred
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        u, taps, document_start = ctx.saved_tensors
        weights = ctx.weights
        dy = gradients[0].contiguous()
        dx, dz, _ = ops.localized_filter_data_gradient(
            dy, weights[0], weights[2], document_start=document_start
        )

        def add() -> None:
            dtype = weights[0].main_gradient.dtype
            found = ops.localized_filter_weight_gradient(u, taps, dz, dy, dtype=dtype)
            for weight, gradient in zip(weights, found, strict=True):
                if weight is not None:
                    weight.main_gradient += gradient

        if weights[0].requires_grad:
            _add_or_defer(ctx.deferred, [weight for weight in weights if weight is not None], add)
        return dx, None, None, None, None, None, None
