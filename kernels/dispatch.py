"""Which implementation serves an op: chosen once per (op, device, dtype, shape class), logged, overridable.

A choice names an implementation of the op's own file:

    reference   the definition in `reference.py`
    torch       our form in torch operations over whole tensors
    blocks      the same in blocks of rows that stay in a core's cache: CPUs
    triton      the same with our Triton kernels between torch's matrix products: CUDA
    liger, apex the norm of another package (`packages.py`): CUDA, where it is asked for

`YUAN_KERNELS=reference` selects the definitions, `YUAN_KERNELS=rms_norm=liger` (or `apex`) another package's
norm; it is read at each call. Unset or empty lets this module choose; any other value is a ValueError. What
torch or Triton does not promise is run once on a small case and compared before it is trusted.

Triton's blocks and warps are fixed for each kernel, and nothing is tuned at run time: a restart does not tune
again, and two runs round alike.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from yuan_kernels import packages

logger = logging.getLogger("yuan_kernels")

OPS = ("localized_filter", "rms_norm", "linear_cross_entropy", "adamw")

MINIMUM_CAPABILITY = (7, 0)
"""Oldest cards whose code our Triton kernels are compiled for in the tests (V100)."""

_NORMS = {f"rms_norm={name}": name for name in packages.PACKAGES}

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAXIMUM_ROW = 16384
"""Numbers of a row that one Triton program holds in registers without spilling."""


@dataclass(frozen=True)
class Choice:
    """What serves an op on a kind of input, and why nothing faster does."""

    op: str
    device: str
    dtype: torch.dtype
    shape: str
    implementation: str
    reason: str


def reference_selected() -> bool:
    """Whether `YUAN_KERNELS` asks for the definitions. Raises ValueError for an unknown word."""
    choice = os.environ.get("YUAN_KERNELS", "")
    if choice not in ("", "reference", *_NORMS):
        known = ", ".join(repr(word) for word in ("reference", *_NORMS))
        raise ValueError(f"YUAN_KERNELS={choice!r} is unknown; unset it, or set it to one of {known}")
    return choice == "reference"


def asked_for(op: str) -> str:
    """Return the package whose form of `op` is asked for by `YUAN_KERNELS`; empty if none is."""
    choice = os.environ.get("YUAN_KERNELS", "")
    return _NORMS.get(choice, "") if op == "rms_norm" else ""


def implementation(op: str, x: Tensor) -> str:
    """Return the name of the implementation of `op` for x [..., H]."""
    if reference_selected():
        return "reference"
    return choose(op, x.device, x.dtype, shape_class(x.shape[-1]), asked_for(op)).implementation


def flat_implementation(op: str, x: Tensor) -> str:
    """Return the name of the implementation of `op` for a flat buffer x, which has no rows."""
    if reference_selected():
        return "reference"
    return choose(op, x.device, x.dtype, "regular").implementation


def shape_class(hidden: int) -> str:
    """Return `regular`, or `odd` for rows that our Triton kernels do not take."""
    return "regular" if hidden % 16 == 0 and 0 < hidden <= _MAXIMUM_ROW else "odd"


@functools.cache
def choose(op: str, device: torch.device, dtype: torch.dtype, shape: str, package: str = "") -> Choice:
    """Choose, and log the choice; later calls repeat the answer. `package`: whose form is asked for."""
    name, reason = _on_cuda(op, device, dtype, shape) if device.type == "cuda" else _elsewhere(op, device)
    if package:
        fault = package_fault(package, device, dtype)
        name, reason = (
            (name, f"{reason}; not {package}: {fault}") if fault else (package, "asked for, and tested")
        )
    choice = Choice(op, str(device), dtype, shape, name, reason)
    logger.info("%s on %s, %s, %s rows: %s (%s)", op, device, dtype, shape, name, reason)
    return choice


def package_fault(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return None where a package's norm may be used; else why not."""
    package, norm = packages.PACKAGES[name], packages.norm_of(name)
    if device.type != "cuda":
        return "it is for CUDA devices"
    if norm is None:
        return f"{package.module}.{package.attribute} is not installed"
    if dtype not in _TRITON_DTYPES:
        return f"it is not used for {dtype}"
    return _fault(lambda: _norm_is_right(norm, device, dtype))


def _elsewhere(op: str, device: torch.device) -> tuple[str, str]:
    if device.type != "cpu":
        return "torch", "Triton kernels are for CUDA devices"
    if op == "adamw":
        return "torch", "torch's fused AdamW is one pass already"
    return "blocks", "Triton kernels are for CUDA devices"


def _on_cuda(op: str, device: torch.device, dtype: torch.dtype, shape: str) -> tuple[str, str]:
    if dtype not in _TRITON_DTYPES:
        return "torch", f"no Triton kernel for {dtype}"
    if shape != "regular":
        return "torch", f"rows are no multiple of 16, or longer than {_MAXIMUM_ROW}"
    if importlib.util.find_spec("triton") is None:
        return "torch", "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        return "torch", f"compute capability {capability[0]}.{capability[1]} is below 7.0"
    fault = _fault(lambda: _triton_is_right(op, device, dtype))
    return ("torch", f"the Triton kernel failed its test: {fault}") if fault else ("triton", "tested")


def _triton_is_right(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    from yuan_kernels import self_test

    return self_test.triton_is_right(op, device, dtype)


def _norm_is_right(norm: packages.Norm, device: torch.device, dtype: torch.dtype) -> bool:
    from yuan_kernels import self_test

    return self_test.norm_is_right(norm, device, dtype)


def _fault(test: Callable[[], bool]) -> str | None:
    """None where the test passes; else what went wrong. What cannot run is a fallback, no error."""
    try:
        return None if test() else "it gives other numbers than the definition"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
