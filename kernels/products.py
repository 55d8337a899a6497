"""Matrix products where torch's own are slow: bf16 and fp32 on some CPUs; 16 bits added to fp32 on CUDA.

On CPUs without instructions for bf16 (no AVX-512, no AMX), torch multiplies bf16 matrices number by number:
6 to 50 times slower than in fp32, by the order of the operands. There we convert blocks of both operands to
fp32, multiply them, and round the result once: as units for bf16 do, which also add in fp32. The blocks take
16 MB, whatever the size of the matrices.

On CPUs that torch's BLAS library is not tuned for, torch's own fp32 product runs at half the speed of
oneDNN's. oneDNN's is a private operation of torch without a derivative. We call it only inside our own
forward and backward passes, only on processors where it is known to be faster, and only after it has passed
a test.

On CUDA a product of 16-bit matrices can be added to an fp32 matrix in the product's epilogue, which avoids
writing and reading a temporary of that size. It too must pass a test before it is used.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import torch
from torch import Tensor
from yuan_kernels import dispatch
from yuan_kernels.reference import blocks

logger = logging.getLogger("yuan_kernels")

_LARGE = 1 << 24
"""Multiply-adds from which the choice matters in fp32; smaller products use torch's."""

_CONVERTED = 1 << 16
"""Multiply-adds from which bf16 blocks are converted; below, the calls would cost more than they gain."""
_CONVERTED_ROWS = 4
"""Rows from which bf16 blocks are converted: for fewer, converting the weights takes longer than it saves."""
_BLOCK = 1024
"""Rows, columns and terms of a block that is converted to fp32."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias [T, N] of x [T, K], weight [N, K] and bias [N]; written to `out` if given."""
    if _uses_fp32_blocks(x, weight.shape[0]):
        if out is None:
            out = x.new_empty(x.shape[0], weight.shape[0])
        _fill_by_fp32_blocks(out, x, weight, bias)
        return out
    if _uses_onednn(x, weight.shape[0]):
        result = _onednn(x, weight, bias)
        return result if out is None else out.copy_(result)
    if bias is None:
        return torch.mm(x, weight.T) if out is None else torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T) if out is None else torch.addmm(bias, x, weight.T, out=out)


def product(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the product [M, N] of left [M, K] and right [K, N]; written to `out` if given."""
    return linear(left, right.T, out=out)


@torch.no_grad()
def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left right [M, N] of left [M, K] and right [K, N] to `total` in place, without a gradient.

    `total` is in the operands' precision, or in fp32 for operands of 16 bits: then the product is not rounded
    to 16 bits, where the device can: on CUDA in the product's epilogue, on CPUs without instructions for bf16
    block by block.
    """
    if total.dtype == left.dtype:
        if total.is_cuda:
            total.addmm_(left, right)
        else:
            total.add_(product(left, right))
    elif supports_fp32_addmm(left.device, left.dtype):
        fp32_addmm_(total, left, right, alpha=1.0)
    elif _uses_fp32_blocks(left, right.shape[1]):
        _add_fp32_blocks(total, left, right.T)
    else:
        total.add_(product(left, right))


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product [M, N] of left [M, K] and right [K, N] in `dtype`, theirs or fp32; see `add_product_`."""
    if dtype == left.dtype:
        return product(left, right)
    if supports_fp32_addmm(left.device, left.dtype):
        return fp32_mm(left, right)
    total = torch.zeros(left.shape[0], right.shape[1], dtype=dtype, device=left.device)
    add_product_(total, left, right)
    return total


def is_small(x: Tensor, columns: int) -> bool:
    """Whether x [..., K] by [K, columns] is a product that is always torch's: nothing else is to be asked."""
    return x.dtype == torch.float32 and x.numel() * columns < _LARGE


def replaces_torch(x: Tensor, columns: int) -> bool:
    """Whether `linear` multiplies x [..., K] by [K, columns] otherwise than torch does."""
    return _uses_fp32_blocks(x, columns) or _uses_onednn(x, columns)


@functools.cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products that torch uses, through oneDNN. Cached.

    This is the question that torch itself asks before it calls oneDNN: AVX-512 and AMX on x86, BF16 on ARM.
    The processor decides, not a timing: a resumed run must round like the run before.
    """
    supported = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    logger.info("bf16 matrix products on the CPU: %s", "oneDNN" if supported else "fp32 blocks")
    return supported


def bf16_products() -> str:
    """Return `oneDNN` or `fp32 blocks`: how this CPU multiplies matrices of bf16."""
    return "oneDNN" if cpu_multiplies_bf16() else "fp32 blocks"


def fp32_products() -> str:
    """Return `oneDNN` or `torch`: the library for large fp32 products of our ops on this CPU."""
    return "oneDNN" if onednn_is_faster() else "torch"


@functools.cache
def onednn_is_faster() -> bool:
    """Whether large fp32 products use oneDNN on this CPU: where it is faster and passes its test. Cached."""
    try:
        chosen = _mkl_is_untuned() and _onednn_is_correct()
    except Exception as error:
        logger.info("fp32 matrix products on the CPU: torch (oneDNN's failed: %s)", error)
        return False
    logger.info("fp32 matrix products on the CPU: %s", "oneDNN" if chosen else "torch")
    return chosen


def supports_fp32_addmm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `fp32_addmm_` supports operands of `dtype` on a device: 16 bits on CUDA, if tested."""
    if device.type != "cuda":
        return False
    return dispatch.find("add_product", device, dtype, "any").implementation == "one_pass"


def fp32_addmm_(total: Tensor, left: Tensor, right: Tensor, *, alpha: float) -> None:
    """total += alpha left right in place: total [M, N] in fp32, left [M, K] and right [K, N] in 16 bits."""
    torch.addmm(total, left, right, out_dtype=total.dtype, alpha=alpha, out=total)


def fp32_mm(left: Tensor, right: Tensor) -> Tensor:
    """The product [M, N] in fp32 of left [M, K] and right [K, N] in 16 bits."""
    return torch.mm(left, right, out_dtype=torch.float32)


def fp32_addmm_is_correct(device: torch.device, dtype: torch.dtype) -> bool:
    """Test with a transposed first operand, as in use, and with sums that 16 bits cannot represent."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, n, generator=generator).to(device, dtype) for n in (96, 128))
    total = torch.randn(96, 128, generator=generator).to(device)
    expected = total.double() + 0.25 * (left.T.double() @ right.double())
    fp32_addmm_(total, left.T, right, alpha=0.25)
    product = fp32_mm(left.T, right), left.T.double() @ right.double()
    pairs = ((total, expected), product)
    return all(torch.allclose(x.double(), y, rtol=1e-5, atol=1e-4) for x, y in pairs)


def _uses_fp32_blocks(x: Tensor, columns: int) -> bool:
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return False
    if x.numel() * columns < _CONVERTED or x.numel() < _CONVERTED_ROWS * x.shape[-1]:
        return False
    return not cpu_multiplies_bf16()


def _fill_by_fp32_blocks(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out = x weight^T + bias, summed in fp32 and rounded once.

    `float` keeps the memory order of a transposed operand, so that the conversion reads and writes in order.
    """
    for rows in blocks(x.shape[0], _BLOCK):
        for columns in blocks(weight.shape[0], _BLOCK):
            total: Tensor | None = None
            for terms in blocks(x.shape[1], _BLOCK):
                part = linear(x[rows, terms].float(), weight[columns, terms].float())
                total = part if total is None else total.add_(part)
            if total is None:
                total = torch.zeros(out[rows, columns].shape)
            out[rows, columns] = total if bias is None else total.add_(bias[columns])


def _add_fp32_blocks(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """total += x weight^T, in fp32."""
    for rows in blocks(x.shape[0], _BLOCK):
        for columns in blocks(weight.shape[0], _BLOCK):
            for terms in blocks(x.shape[1], _BLOCK):
                total[rows, columns] += linear(x[rows, terms].float(), weight[columns, terms].float())


def _uses_onednn(x: Tensor, columns: int) -> bool:
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    return x.numel() * columns >= _LARGE and onednn_is_faster()


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _onednn_is_correct() -> bool:
    """Test both memory orders of both operands, column slices, odd sizes, with and without bias."""
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(37, 53, generator=generator)
    right = torch.randn(29, 53, generator=generator)
    bias = torch.randn(29, generator=generator)
    lefts, rights = ((x, x.T.contiguous().T, torch.cat((x, x), dim=1)[:, 53:]) for x in (left, right))
    expected = left.double() @ right.double().T
    return all(
        torch.allclose(_onednn(x, w, b).double(), expected + (0 if b is None else b), rtol=1e-4, atol=1e-4)
        for x in lefts
        for w in rights
        for b in (None, bias)
    )


def _mkl_is_untuned() -> bool:
    """Whether torch's BLAS is MKL on a processor that MKL is not tuned for (AMD).

    There oneDNN's products were measured to be about twice as fast. The CPU vendor decides, not a timing:
    timings vary on a busy machine, and a resumed run must round like the run before.
    """
    if not torch.backends.mkl.is_available():
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(errors="replace")
