"""The backward in two: input gradients now, weight gradients when there is time (zero bubble, Qi 2023).

While a queue is open, the linears and the filter of a stage compute the gradient of their input and leave a
note for that of their weights; the note is worked off later. All else (norms, embedding, head) is small, or
was done in the forward, and goes with the first part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from yuan_kernels import ops

from yuan_train.parallel.shard import sharding_word

Note = Callable[[], None]


class WeightQueue:
    """Weight gradients that are still to be computed, by micro-batch."""

    def __init__(self) -> None:
        self._notes: dict[int, list[Note]] = {}
        self._open: list[Note] | None = None

    @contextmanager
    def splitting(self, micro_batch: int, split: bool) -> Iterator[None]:
        """Around a backward: if `split`, its weight gradients are put off."""
        self._open = self._notes.setdefault(micro_batch, []) if split else None
        try:
            yield
        finally:
            self._open = None

    def work_off(self, micro_batch: int) -> None:
        """Compute what was put off."""
        for note in self._notes.pop(micro_batch):
            note()

    def put_off(self, note: Note) -> bool:
        """Take a note, if the queue is open."""
        if self._open is None:
            return False
        self._open.append(note)
        return True


def split_backward(model: Any, queue: WeightQueue, sharding: Mapping[str, str]) -> None:
    """Let the linears and filters of a model put their weight gradients off while the queue is open.

    The linears are what `sharding` calls column or row.
    """
    for path, module in model.named_modules():
        if sharding_word(path, sharding) in ("column", "row"):
            module.forward = _linear(module, queue)
        if hasattr(module, "convolution"):
            module.convolution = _filter(queue)


def _linear(module: Any, queue: WeightQueue) -> Callable[[Tensor], Tensor]:
    return lambda x: _Linear.apply(x, module.weight, queue)  # pyright: ignore[reportReturnType]


def _filter(queue: WeightQueue) -> Callable[..., Tensor]:
    def convolution(u_BSH: Tensor, *weights: Tensor | None, document_start: Tensor | None = None) -> Tensor:
        return _Filter.apply(u_BSH, *weights, document_start, queue)  # pyright: ignore[reportReturnType]

    return convolution


def _add(weight: Tensor, gradient: Tensor) -> None:
    """Accumulate a gradient as autograd would, with the hooks that wait for it."""
    torch.autograd.backward(weight, gradient)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: WeightQueue) -> Tensor:
        # The weight itself: under recompute a saved one comes back as a copy, whose gradient nobody sees.
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        dy = gradients[0]
        dx = dy @ weight if ctx.needs_input_grad[0] else None

        def dw() -> Tensor:
            return dy.flatten(0, -2).T @ x.flatten(0, -2)

        later = ctx.queue.put_off(lambda: _add(weight, dw()))
        return dx, None if later else dw(), None


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
        queue: WeightQueue,
    ) -> Tensor:
        y, taps = ops.localized_filter_forward(
            u, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start=document_start
        )
        ctx.save_for_backward(u, taps, document_start)
        ctx.weights, ctx.queue = (conv1_weight, conv1_bias, conv2_weight, conv2_bias), queue
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
            for weight, gradient in zip(
                weights, ops.localized_filter_weight_gradient(u, taps, dz, dy), strict=True
            ):
                if weight is not None:
                    _add(weight, gradient)

        if ctx.queue.put_off(add):
            return dx, None, None, None, None, None, None
        found = ops.localized_filter_weight_gradient(u, taps, dz, dy)
        return dx, *found[:3], found[3] if weights[3] is not None else None, None, None
