"""Linear maps of groups of rows, each group by its own matrix: the experts of a mixture.

    y_r = x_r W_e^T      dx_r = dy_r W_e      dW_e = sum dy_r^T x_r      for the rows r of group e

`loop` multiplies group by group through `products.py`. A group's result then depends on its own rows alone:
the same bits come out whichever other groups a card holds. `grouped` is one call of torch's grouped product
for the forward and dx, on cards that have a kernel for it (compute capability 9.0; below it torch itself
loops, or refuses). dW is always a loop, because it is added to fp32 without rounding, and without a product
of all groups in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from yuan_kernels import dispatch, products, reference, registration
from yuan_kernels.reference import check_shape


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Return x_e weight_e^T [R, N] of rows x [R, K] in E groups, and matrices weight [E, N, K].

    Group e has the next counts[e] rows, of which there may be none. Counts are integers of the host, so that
    no group's size is read from a device. In 16 bits and fp32 as `linear` rounds.

    Raises:
        ValueError: there is not one count for each matrix, or they do not sum to the rows.
    """
    if weight.dim() != 3 or len(counts) != weight.shape[0] or sum(counts) != x.shape[0]:
        raise ValueError(
            f"{len(counts)} counts of {sum(counts)} rows in all; wanted one for each matrix of weight "
            f"{list(weight.shape)}, and the rows of x {list(x.shape)}"
        )
    check_shape("x", x, (x.shape[0], weight.shape[2]))
    if dispatch.reference_selected():
        return reference.grouped_linear(x, weight, counts)
    return _grouped_linear(x, weight, list(counts))


@torch.no_grad()
def add_grouped_products_(total: Tensor, dy: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    """Add dy_e^T x_e to total[e] for each group, in place: the weights' gradient of `grouped_linear`.

    `total` is [E, N, K], dy [R, N], x [R, K]; precisions as in `add_product_`.
    """
    for rows, group in _groups(counts):
        products.add_product_(total[group], dy[rows].T, x[rows])


@registration.register(
    "yuan::grouped_linear", lambda x, weight, counts: x.new_empty(x.shape[0], weight.shape[1])
)
def _grouped_linear(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    shape = dispatch.shape_class("grouped_linear", math.gcd(weight.shape[1], weight.shape[2]))
    found = dispatch.find("grouped_linear", x.device, x.dtype, shape)
    if found.implementation == "grouped" and x.shape[0]:
        return one_call(x, weight, counts)
    return loop(x, weight, counts)


@registration.register(
    "yuan::grouped_weight_gradient",
    lambda dy, x, counts: x.new_empty(len(counts), dy.shape[1], x.shape[1]),
)
def _weight_gradient(dy: Tensor, x: Tensor, counts: list[int]) -> Tensor:
    gradient = torch.zeros(len(counts), dy.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    for rows, group in _groups(counts):
        products.product(dy[rows].T, x[rows], out=gradient[group])
    return gradient


def loop(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Group by group, on any device."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    for rows, group in _groups(counts):
        products.linear(x[rows], weight[group], out=y[rows])
    return y


def one_call(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """All groups in one call of torch. Rows must be multiples of 16 bytes; no fp64."""
    found = grouped_mm()
    assert found is not None, "the dispatcher asked"
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    # An expanded gradient has strides that torch refuses here.
    return found(x.contiguous(), weight.transpose(1, 2), offs=ends.to(x.device, non_blocking=True))


def grouped_mm() -> Callable[..., Tensor] | None:
    """torch's grouped product, public since 2.10; None if this torch has none."""
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def _groups(counts: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """The rows of each group that has any, and its number."""
    first = 0
    for group, count in enumerate(counts):
        if count:
            yield slice(first, first + count), group
        first += count


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.counts = inputs
    ctx.save_for_backward(x, weight)


@_grouped_linear.gradient(_save)
def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    return (
        _grouped_linear(dy, weight.transpose(1, 2), ctx.counts) if needs_x else None,
        _weight_gradient(dy, x, ctx.counts) if needs_weight else None,
        None,
    )
