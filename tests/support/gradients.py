"""Results and gradients of the forms of an op, against each other."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def with_gradients(
    form: Callable[..., Any], *inputs: Tensor, scale: float | Tensor | None = None, **options: Any
) -> list[Tensor]:
    """Results, then the gradients of all inputs but whole numbers, under upstream gradients that are not
    uniform, or those of results times `scale`."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    results = form(*leaves, **options)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(9)
    upstream = [
        torch.randn(y.shape, generator=generator, dtype=torch.float64)
        if scale is None
        else torch.as_tensor(scale, dtype=torch.float64).expand(y.shape)
        for y in results
    ]
    narrow = [one.to(y.dtype) for one, y in zip(upstream, results, strict=True)]
    gradients = torch.autograd.grad(results, [x for x in leaves if x.requires_grad], narrow)
    return [*(y.detach() for y in results), *gradients]


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], *, atol: float = 1e-12) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def assert_rounds_no_worse(
    ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], *, most: float = 2.0
) -> None:
    """No error is larger than so many times that of the plain form."""
    for a, b, truth in zip(ours, plain, exact, strict=True):
        assert (a.double() - truth).norm() <= most * (b.double() - truth).norm()
