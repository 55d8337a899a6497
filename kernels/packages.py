"""RMS norms of other packages, where one of them is installed and asked for: Liger's and NVIDIA apex's.

`YUAN_KERNELS=rms_norm=liger` asks for one. It is used on CUDA devices, once it has given the definition's
numbers on a small case. A stopwatch never chooses: ranks that hold the same weights must round alike, and a
run that is resumed as it did before. `times` measures; `yuan-train doctor` prints that, and what to set.

A package is known by the function that we call and not by its name: PyPI's `apex` is another project.

What is not here: TransformerEngine's norm is a module that keeps its weight and lets go of its input's memory
in the backward, which others still read; AdamW of apex wants gradients in the precision of the rounded
weights, where ours are fp32.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""(x [..., H], weight [H], epsilon) to the norm like x; autograd knows it."""

EPSILON = 1e-6


@dataclass(frozen=True)
class Package:
    """Where a package has its norm, and how that is called."""

    module: str
    attribute: str
    call: Callable[[Any, Tensor, Tensor, float], Tensor]


PACKAGES = {
    # Liger's mode `gemma` is the one that computes all in fp32; in place, it would overwrite the gradient.
    "liger": Package(
        "liger_kernel.transformers.functional",
        "liger_rms_norm",
        lambda norm, x, w, epsilon: norm(x, w, epsilon, offset=0.0, casting_mode="gemma", in_place=False),
    ),
    "apex": Package(
        "apex.normalization.fused_layer_norm",
        "fused_rms_norm_affine",
        lambda norm, x, w, epsilon: norm(x, w, tuple(w.shape), eps=epsilon),
    ),
}


def norm_of(name: str) -> Norm | None:
    """The norm of a package; None where it is not installed, or is another package of that name."""
    package = PACKAGES[name]
    try:
        function = getattr(importlib.import_module(package.module), package.attribute, None)
    except Exception:  # One that was built for another CUDA, or another torch, may raise anything.
        return None
    return None if function is None else functools.partial(package.call, function)


def times(name: str, ours: Norm, device: torch.device, dtype: torch.dtype, *, hidden: int) -> float:
    """Return a package's seconds over ours, forward and backward of 4,096 rows, taken in turns; medians."""
    theirs = norm_of(name)
    assert theirs is not None
    x, weight, dy = case(4096, hidden, device, dtype)
    taken: dict[Norm, list[float]] = {theirs: [], ours: []}
    for turn in range(12):
        for norm, seconds in taken.items():
            torch.accelerator.synchronize(device)
            start = time.perf_counter()
            torch.autograd.grad(norm(x, weight, EPSILON), (x, weight), dy)
            torch.accelerator.synchronize(device)
            if turn > 1:
                seconds.append(time.perf_counter() - start)
    return statistics.median(taken[theirs]) / statistics.median(taken[ours])


def case(tokens: int, hidden: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and dy; the former two want gradients."""
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (
        torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)
        for shape in ((tokens, hidden), (hidden,), (tokens, hidden))
    )
    return x.requires_grad_(), weight.requires_grad_(), dy
