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
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from yuan_kernels import ops

from yuan_train.parallel.shard import sharding_style

WeightGrad = Callable[[], None]
"""Computes the weight gradient of one op and accumulates it."""
Compile = Callable[[torch.nn.Module], None]


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

    def take(self, weight_grad: WeightGrad, *, may_queue: bool) -> None:
        """Keep it for `flush` if a split backward is running, or if it `may_queue` for `run_queued`, where
        backwards call that; else compute and accumulate it now."""
        if self._recording is not None:
            self._recording.append(weight_grad)
        elif may_queue and self.reduces_inputs:
            self._queued.append(weight_grad)
        else:
            weight_grad()

    def run_queued(self) -> None:
        """Compute and accumulate what is queued, in the order of queueing."""
        queued, self._queued = self._queued, []
        for weight_grad in queued:
            weight_grad()


def take_over_weight_grads(
    model: Any, deferred: DeferredWeightGrads, sharding: Mapping[str, str], compile: Compile | None
) -> set[str]:
    """The parameters whose ops add the gradients to the buckets themselves, and later if a backward is split;
    none in a part that `compile` compiles, for a compiled graph has no side effects."""
    add_embedding_rows(model)
    if compile is None:
        return add_weight_grads(model, deferred, sharding)
    compile(model)
    return set()


def add_weight_grads(model: Any, deferred: DeferredWeightGrads, sharding: Mapping[str, str]) -> set[str]:
    """Make the modules that multiply matrices add their weight gradients to the buckets themselves.

    In split backwards they defer that. They call a weight's `on_main_gradient` when its gradient is there.
    The linears are the modules whose style in `sharding` is column or row; experts, routers and filters are
    known by their `op`. Returns the names of these parameters.
    """
    added: set[str] = set()
    for path, module in model.named_modules():
        style = sharding_style(path, sharding)
        if style in ("column", "row"):
            module.forward = _linear(module, deferred, is_column=style == "column")
        op = getattr(module, "op", None)
        if op is ops.wide_linear:
            added.add(f"{path}.weight")
        if op in _FORMS:
            forward, gradients = _FORMS[op]
            module.op = _Adding(forward, gradients, deferred)
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
        model.embedding.op = _Adding(F.embedding, _lookup_gradients, None)


def _linear(module: Any, deferred: DeferredWeightGrads, *, is_column: bool) -> Callable[[Tensor], Tensor]:
    # A look into the module's own table: its attributes take longer than a small product.
    table = module._parameters
    linear = _Adding(ops.linear, _product_gradients, deferred, may_queue=is_column)
    adapted = _Adding(_multiply_adapted, _adapted_gradients, deferred, may_queue=is_column)

    def forward(x: Tensor) -> Tensor:
        weight = table["weight"]
        if module.lora_a is None or weight.requires_grad:
            y = linear(x, weight) if torch.is_grad_enabled() else ops.linear(x, weight)
        else:
            y = adapted(x, weight, module.lora_a, module.lora_b, scale=module.lora_scale)
        return y if module.bias is None else y + module.bias

    return forward


@dataclass(frozen=True)
class _Adding:
    """An op on x and weights, some of which may be None; the gradients of those that are trained are added to
    their buckets: in its backward, or later."""

    forward: Callable[..., Tensor | tuple[Tensor, ...]]
    """Of x, the weights and options: the result; or a tuple of it and what is kept for the weights' gradients
    besides the weights, else x."""
    gradients: Callable[..., tuple[Tensor | None, WeightGrad]]
    """Of the result's gradient, the weights, what is kept and options: the gradient of x, None if it is not
    wanted (`dx`), and what adds those of the weights."""
    deferred: DeferredWeightGrads | None
    """None: they are added at once, and nobody is told."""
    may_queue: bool = False
    """Whether it may wait for the next all-reduce of an input's gradient."""

    def __call__(self, x: Tensor, *weights: Tensor | None, **options: Any) -> Tensor:
        return _AddingOp.apply(x, self, options, *weights)  # pyright: ignore[reportReturnType]

    def add(self, weights: Sequence[Any], add: WeightGrad, *, dx: Tensor | None) -> None:
        """Add the gradients of `weights` and say that they are there; or keep that for later."""

        def add_now() -> None:
            add()
            for weight in weights:
                weight.on_main_gradient()

        if self.deferred is None:
            add()
        else:
            self.deferred.take(add_now, may_queue=self.may_queue and dx is not None)


class _AddingOp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, op: _Adding, options: Mapping[str, Any], *weights: Tensor | None
    ) -> Tensor:
        found = op.forward(x, *weights, **options)
        y, *kept = found if isinstance(found, tuple) else (found, x)
        ctx.trained = [weight for weight in weights if weight is not None and weight.requires_grad]
        # For the gradient of x, frozen weights are enough.
        ctx.save_for_backward(*(kept if ctx.trained else [None] * len(kept)))
        # Not saved tensors: under recompute those come back as copies, without the bucket's view.
        ctx.op, ctx.options, ctx.weights = op, options, weights
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        op, weights, wanted = ctx.op, ctx.weights, ctx.needs_input_grad[0]
        dx, add = op.gradients(gradients[0], weights, *ctx.saved_tensors, dx=wanted, **ctx.options)
        if ctx.trained:
            op.add(ctx.trained, add, dx=dx)
        return dx, None, None, *[None for _ in weights]


def _rows(x: Tensor) -> Tensor:
    """A view [T, K] of x [..., K], to multiply or to add to in place."""
    return x.view(-1, x.shape[-1])


def _product_gradients(dy: Tensor, weights: Any, x: Tensor, *, dx: bool) -> tuple[Tensor | None, WeightGrad]:
    (weight,) = weights

    def add() -> None:
        ops.add_product_(weight.main_gradient, dy.flatten(0, -2).T, x.flatten(0, -2).to(dy.dtype))

    return ops.linear(dy, weight.T.to(dy.dtype)).to(weight.dtype) if dx else None, add


def _multiply_adapted(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, *, scale: float) -> tuple[Tensor, ...]:
    """x W^T + scale (x A^T) B^T with a frozen W: keeps x, and the product [..., rank] between A and B.

    The products of the adapters are added to those of W in place: what they cost are passes over memory.
    """
    inner = scale * ops.linear(x, a)
    y = ops.linear(x, weight)
    ops.add_product_(_rows(y), inner.flatten(0, -2), b.T)
    return y, x, inner


def _adapted_gradients(
    dy: Tensor, weights: Any, x: Tensor, inner: Tensor, *, dx: bool, scale: float
) -> tuple[Tensor | None, WeightGrad]:
    weight, a, b = weights
    dinner = scale * ops.linear(dy, b.T)

    def add() -> None:
        ops.add_product_(b.main_gradient, dy.flatten(0, -2).T, inner.flatten(0, -2))
        ops.add_product_(a.main_gradient, dinner.flatten(0, -2).T, x.flatten(0, -2))

    if not dx:
        return None, add
    found = ops.linear(dy, weight.T)
    ops.add_product_(_rows(found), dinner.flatten(0, -2), a)
    return found, add


def _lookup_gradients(dy: Tensor, weights: Any, tokens_BS: Tensor, *, dx: bool) -> tuple[None, WeightGrad]:
    total_VH = weights[0].main_gradient

    def add() -> None:
        tokens_T, rows_TH = tokens_BS.flatten(), dy.flatten(0, -2).to(total_VH.dtype)
        # Each has one order of additions on its device: the other adds by atomics on a card, or in threads.
        if total_VH.is_cuda:
            total_VH.index_put_((tokens_T,), rows_TH, accumulate=True)
        else:
            total_VH.index_add_(0, tokens_T, rows_TH)

    return None, add


def _grouped_gradients(
    dy: Tensor, weights: Any, x: Tensor, *, dx: bool, counts: Sequence[int]
) -> tuple[Tensor | None, WeightGrad]:
    (weight,) = weights

    def add() -> None:
        ops.add_grouped_products_(weight.main_gradient, dy, x, counts)

    return ops.grouped_linear(dy, weight.transpose(1, 2), counts) if dx else None, add


def _filter(u: Tensor, *weights: Any, document_start: Tensor | None) -> tuple[Tensor, ...]:
    y, taps = ops.localized_filter_forward(u, *weights, document_start=document_start)
    return y, u, taps


def _filter_gradients(
    dy: Tensor, weights: Any, u: Tensor, taps: Tensor, *, dx: bool, document_start: Tensor | None
) -> tuple[Tensor | None, WeightGrad]:
    dy = dy.contiguous()
    du, dz, _ = ops.localized_filter_data_gradient(dy, weights[0], weights[2], document_start=document_start)

    def add() -> None:
        dtype = weights[0].main_gradient.dtype
        found = ops.localized_filter_weight_gradient(u, taps, dz, dy, dtype=dtype)
        for weight, gradient in zip(weights, found, strict=True):
            if weight is not None:
                weight.main_gradient += gradient

    return du, add


_FORMS = {
    ops.grouped_linear: (ops.grouped_linear, _grouped_gradients),
    ops.wide_linear: (ops.wide_linear, _product_gradients),
    ops.localized_filter: (_filter, _filter_gradients),
}
"""By the op of a module."""
