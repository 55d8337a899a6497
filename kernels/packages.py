"""RMS norms of other packages, used only if installed and requested: Liger's, NVIDIA's apex's and
TransformerEngine's.

`YUAN_KERNELS=rms_norm=liger` requests one. It is used on CUDA devices, after it has matched the definition on
a small case. A timing never decides: ranks that hold the same weights must round alike, and a resumed run
must round like the run before. `relative_time` measures; `yuan-train doctor` prints its result, and the
setting that selects the package.

A package is identified by the function that we call, not by its name: PyPI's `apex` is another project.

Of TransformerEngine we call the two kernels, not its module: that holds its own weight, and in the backward
it frees the memory of its input, which other ops still read.
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
"""Maps (x [..., H], weight [H], epsilon) to the norm, shaped like x; differentiable by autograd."""

EPSILON = 1e-6


@dataclass(frozen=True)
class Package:
    """Where a package has its norm, and how to call it."""

    module: str
    attribute: str
    call: Callable[[Any, Tensor, Tensor, float], Tensor]


PACKAGES = {
    # Liger's `gemma` mode computes everything in fp32; in place, it would overwrite the upstream gradient.
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
    "transformer_engine": Package(
        "transformer_engine.pytorch.cpp_extensions",
        "rmsnorm_fwd",
        lambda _, x, w, epsilon: _TransformerEngineNorm.apply(x, w, epsilon),
    ),
}


class _TransformerEngineNorm(torch.autograd.Function):
    """TransformerEngine's kernels for x [..., H], as the releases from 2.0 on have them.

    Their arguments after epsilon: output, quantizer, type of the output, processors to leave free, whether
    the weight is an offset from 1; the backward has the last two.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        kernels: Any = importlib.import_module(PACKAGES["transformer_engine"].module)
        types = {torch.float32: "kFloat32", torch.float16: "kFloat16", torch.bfloat16: "kBFloat16"}
        x_TH = x.reshape(-1, x.shape[-1]).contiguous()
        dtype = getattr(kernels.DType, types[x.dtype])
        y_TH, _, scale_T = kernels.rmsnorm_fwd(x_TH, weight, epsilon, None, None, dtype, 0, False)
        ctx.save_for_backward(x_TH, scale_T, weight)
        ctx.kernels = kernels
        return y_TH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TH, scale_T, weight = ctx.saved_tensors
        dy_TH = gradients[0].reshape(x_TH.shape).contiguous()
        dx_TH, dweight = ctx.kernels.rmsnorm_bwd(dy_TH, x_TH, scale_T, weight, 0, False)
        return dx_TH.view(gradients[0].shape), dweight, None


def find_norm(name: str) -> Norm | None:
    """Return the norm of a package; None if it is not installed, or is another package of that name."""
    package = PACKAGES[name]
    try:
        function = getattr(importlib.import_module(package.module), package.attribute, None)
    except Exception:  # A package built for another CUDA, or another torch, may raise anything.
        return None
    return None if function is None else functools.partial(package.call, function)


def relative_time(name: str, ours: Norm, device: torch.device, dtype: torch.dtype, *, hidden: int) -> float:
    """Return a package's seconds over ours, for forward and backward of 4,096 rows of `hidden` elements.

    Both run in turns; the result is the ratio of their medians.
    """
    theirs = find_norm(name)
    assert theirs is not None
    x, weight, dy = random_inputs(4096, hidden, device, dtype)
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


def random_inputs(
    tokens: int, hidden: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [T, H], weight [H] and dy [T, H]; x and weight require gradients."""
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (
        torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)
        for shape in ((tokens, hidden), (hidden,), (tokens, hidden))
    )
    return x.requires_grad_(), weight.requires_grad_(), dy
