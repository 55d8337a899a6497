"""Weight gradients of linears, experts, routers and filters: added to fp32 buckets at once, or later.

A product of 16-bit matrices is added to the bucket in fp32, without a rounded gradient in between. Split in
two (zero bubble, Qi et al. 2023), a backward computes the gradients of inputs and defers those of these
weights until `flush`. All other weight gradients (norms, embedding, head) are small, or were computed in the
forward, and belong to the first part. Of the embedding's only the rows of a micro-batch's tokens are added:
torch would write and add a whole matrix [V, H].

Under tensor parallelism the products of column matrices wait for the all-reduce of their input's gradient,
and run beside it (as in Megatron-LM's `LinearWithGradAccumulationAndAsyncCommunication`).
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
    """The deferred weight gradients of one stage, by micro-batch.

    With `reduces_inputs` every backward all-reduces the gradients of the inputs of column matrices, and calls
    `run_queued` meanwhile.
    """

    def __init__(self, *, reduces_inputs: bool = False) -> None:
        self.reduces_inputs = reduces_inputs
        self._queued: list[WeightGrad] = []
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
        assert not self._queued, "a backward has not reduced the gradient of a column matrix's input"

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

    def queue(self, weight_grad: WeightGrad) -> bool:
        """Keep `weight_grad` for `run_queued` if the backward will call it; else return False."""
        if self.reduces_inputs:
            self._queued.append(weight_grad)
        return self.reduces_inputs

    def run_queued(self) -> None:
        """Compute and accumulate what is queued, in the order of queueing."""
        queued, self._queued = self._queued, []
        for weight_grad in queued:
            weight_grad()


def add_weight_grads(model: Any, deferred: DeferredWeightGrads, sharding: Mapping[str, str]) -> set[str]:
    """Make the modules that multiply matrices add their weight gradients to the buckets themselves.

    In split backwards they defer that. They call a weight's `on_main_gradient` when its gradient is there.
    The linears are the modules whose style in `sharding` is column or row, the experts those of style expert;
    routers and filters are known by their ops. Returns the names of these parameters.
    """
    added: set[str] = set()
    for path, module in model.named_modules():
        style = sharding_style(path, sharding)
        if style in ("column", "row"):
            module.forward = _linear(module, deferred, is_column=style == "column")
        elif style == "expert":
            module.forward = _experts(module, deferred)
        if hasattr(module, "convolution"):
            module.convolution = _filter(deferred)
        if hasattr(module, "wide_linear"):
            module.wide_linear = lambda x, weight: _WideLinear.apply(x, weight, deferred)
            added.add(f"{path}.weight")
    styles = {name: sharding_style(name.rpartition(".")[0], sharding) for name, _ in model.named_parameters()}
    return added | {
        name
        for name, style in styles.items()
        if style in ("filter", "expert", "column", "row") and not _is_added_outside(name, style, deferred)
    }


def _is_added_outside(name: str, style: str, deferred: DeferredWeightGrads) -> bool:
    """Whether a parameter is the bias of a linear, or under tensor parallelism the filter's last one."""
    return name.endswith(".bias") and (
        style in ("column", "row") or (deferred.reduces_inputs and name.endswith("conv2.bias"))
    )


def add_embedding_rows(model: Any) -> None:
    """Make the lookup of tokens add the rows of its gradient to the bucket itself, never later."""
    if model.has_embedding:
        model.embedding.lookup = _lookup


def _lookup(tokens_BS: Tensor, weight: Tensor) -> Tensor:
    if not weight.requires_grad or not torch.is_grad_enabled():
        return F.embedding(tokens_BS, weight)
    return _Lookup.apply(tokens_BS, weight)  # pyright: ignore[reportReturnType]


def _linear(module: Any, deferred: DeferredWeightGrads, *, is_column: bool) -> Callable[[Tensor], Tensor]:
    # A look into the module's own table: its attributes take longer than a small product.
    table = module._parameters

    def product(x: Tensor, weight: Tensor) -> Any:
        if module.lora_a is None and not torch.is_grad_enabled():
            return ops.linear(x, weight)
        if weight.requires_grad:
            return _Linear.apply(x, weight, deferred, is_column)
        if module.lora_a is None:
            return _FrozenLinear.apply(x, weight)
        adapters = module.lora_a, module.lora_b, module.lora_scale
        return _AdaptedLinear.apply(x, weight, *adapters, deferred, is_column)

    def forward(x: Tensor) -> Tensor:
        y: Tensor = product(x, table["weight"])
        return y if module.bias is None else y + module.bias

    return forward


def _experts(module: Any, deferred: DeferredWeightGrads) -> Callable[..., Tensor]:
    def forward(x: Tensor, counts: Sequence[int]) -> Tensor:
        return _Experts.apply(x, module.weight, counts, deferred)  # pyright: ignore[reportReturnType]

    return forward


def _filter(deferred: DeferredWeightGrads) -> Callable[..., Tensor]:
    def convolution(u_BSH: Tensor, *weights: Tensor | None, document_start: Tensor | None = None) -> Tensor:
        return _Filter.apply(u_BSH, *weights, document_start, deferred)  # pyright: ignore[reportReturnType]

    return convolution


def _add_or_defer(
    deferred: DeferredWeightGrads, weights: Sequence[Any], add: WeightGrad, *, may_queue: bool = False
) -> None:
    """Add the gradients of `weights` and say that they are there; or keep that for `flush`, or if it
    `may_queue` for the next all-reduce of an input's gradient."""

    def add_now() -> None:
        add()
        for weight in weights:
            weight.on_main_gradient()

    if not (deferred.defer(add_now) or (may_queue and deferred.queue(add_now))):
        add_now()


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
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, deferred: DeferredWeightGrads, is_column: bool
    ) -> Tensor:
        # Not a saved tensor: under recompute that comes back as a copy, without the bucket's view.
        ctx.save_for_backward(x)
        ctx.weight, ctx.deferred, ctx.is_column = weight, deferred, is_column
        return ops.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        dy = gradients[0]

        def add() -> None:
            ops.add_product_(weight.main_gradient, dy.flatten(0, -2).T, x.flatten(0, -2))

        dx = ops.linear(dy, weight.T) if ctx.needs_input_grad[0] else None
        _add_or_defer(ctx.deferred, [weight], add, may_queue=ctx.is_column and dx is not None)
        return dx, None, None, None


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
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
        deferred: DeferredWeightGrads,
        is_column: bool,
    ) -> Tensor:
        inner = scale * ops.linear(x, a)
        y = ops.linear(x, weight)
        ops.add_product_(_rows(y), inner.flatten(0, -2), b.T)
        ctx.save_for_backward(x, inner)
        ctx.weights, ctx.scale = (weight, a, b), scale
        ctx.deferred, ctx.is_column = deferred, is_column
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
        _add_or_defer(ctx.deferred, [a, b], add, may_queue=ctx.is_column and dx is not None)
        return dx, None, None, None, None, None, None


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
