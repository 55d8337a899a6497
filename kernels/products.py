"""Matrix products into given places: fp32 through oneDNN where that is faster; 16 bits added to fp32 on CUDA.

On CPUs whose BLAS library is not tuned for them, torch's own fp32 product runs at half the speed of oneDNN's.
oneDNN's is reached by a private operation of torch without a derivative; it serves here inside our own
backward passes, on the processors where it is known to be faster, once it has proved right.

On CUDA a product of 16-bit matrices can be added to an fp32 matrix in its epilogue, which spares a temporary
of that size, written and read. It too is tested once before it is used.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("yuan_kernels")

_LARGE = 1 << 24
"""Multiply-adds of a product from which on the choice matters; smaller ones stay with torch's."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return x [T, K] weight^T + bias, weight [N, K]; written into `out` [T, N] where that is given."""
    if _through_onednn(x, weight.shape[0]):
        made = _onednn(x, weight, bias)
        return made if out is None else out.copy_(made)
    if bias is None:
        return torch.mm(x, weight.T) if out is None else torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T) if out is None else torch.addmm(bias, x, weight.T, out=out)


def product(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return left [M, K] right [K, N]; written into `out` [M, N] where that is given."""
    return linear(left, right.T, out=out)


@functools.cache
def onednn_is_faster() -> bool:
    """Whether fp32 products go through oneDNN on this CPU: where it is faster and, once tested, right."""
    try:
        chosen = _blas_is_foreign() and _onednn_is_right()
    except Exception as error:
        logger.info("fp32 matrix products on the CPU: torch (oneDNN's failed: %s)", error)
        return False
    logger.info("fp32 matrix products on the CPU: %s", "oneDNN" if chosen else "torch")
    return chosen


@functools.cache
def adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `add_wide_` serves 16-bit operands on a device: on CUDA, once tested."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        chosen = _add_wide_is_right(device, dtype)
    except Exception as error:
        logger.info("%s products are not added to fp32 in one pass on %s: %s", dtype, device, error)
        return False
    logger.info("%s products are %sadded to fp32 in one pass on %s", dtype, "" if chosen else "not ", device)
    return chosen


def add_wide_(total: Tensor, left: Tensor, right: Tensor, *, alpha: float) -> None:
    """total += alpha left right, of total [M, N] in fp32, left [M, K] and right [K, N] in 16 bits."""
    torch.addmm(total, left, right, out_dtype=total.dtype, alpha=alpha, out=total)


def _add_wide_is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """The first operand turned, as it is in use; sums that 16 bits would not hold."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, n, generator=generator).to(device, dtype) for n in (96, 128))
    total = torch.randn(96, 128, generator=generator).to(device)
    wanted = total.double() + 0.25 * (left.T.double() @ right.double())
    add_wide_(total, left.T, right, alpha=0.25)
    return torch.allclose(total.double(), wanted, rtol=1e-5, atol=1e-4)


def _through_onednn(x: Tensor, columns: int) -> bool:
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    return x.shape[0] * x.shape[1] * columns >= _LARGE and onednn_is_faster()


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _onednn_is_right() -> bool:
    """Both orders of both operands, and columns of wider ones; odd sizes; with and without bias."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(37, 53, generator=generator)
    right = torch.randn(29, 53, generator=generator)
    bias = torch.randn(29, generator=generator)
    lefts, rights = ((x, x.T.contiguous().T, torch.cat((x, x), dim=1)[:, 53:]) for x in (left, right))
    wanted = left.double() @ right.double().T
    return all(
        torch.allclose(_onednn(x, w, b).double(), wanted + (0 if b is None else b), rtol=1e-4, atol=1e-4)
        for x in lefts
        for w in rights
        for b in (None, bias)
    )


def _blas_is_foreign() -> bool:
    """Whether torch's BLAS is MKL on a processor that it is not tuned for.

    Measured there, oneDNN's products are about twice as fast. The processor's maker decides and no stopwatch:
    a timing may fall either way on a busy machine, and a run that is resumed must round as it did before.
    """
    if not torch.backends.mkl.is_available():
        return False
    information = Path("/proc/cpuinfo")
    return information.exists() and "AuthenticAMD" in information.read_text(errors="replace")
