"""Chooses the implementation of each op, once per (op, device, dtype, shape class), and logs the choice.

A choice is the name of an implementation of the op's own file:

    reference   the definition in `reference.py`
    torch       our implementation in torch operations over whole tensors
    blocks      the same in blocks of rows that stay in a core's cache: CPUs
    triton      the same with our Triton kernels between torch's matrix products: CUDA
    varlen      attention over documents in one call of torch's variable-length attention: CUDA
    loop        the same by one call per document: any device. Also: matrix products group by group
    repeated    attention of grouped queries with keys and values repeated: CUDA below compute capability 8.0
    grouped     matrix products of groups in one call of torch: CUDA from compute capability 9.0
    one_pass    16-bit products added to fp32 in the product's epilogue: CUDA

A choice that needs a test makes it when it is asked for first. A run asks for all of its choices before its
first forward (`ops.choose_all`), and ranks that must round alike fall back together (`ops.fall_back`).

`YUAN_KERNELS=reference` selects the definitions. The variable is read at each call. Unset or empty, this
module chooses; any other value is a ValueError. An implementation that depends on Triton or on private
operations must first pass a test on a small case.

Triton's block sizes and warps are fixed for each kernel. Nothing is tuned at run time: a restart tunes
nothing again, and two runs round alike.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

logger = logging.getLogger("yuan_kernels")

OPS = (
    "localized_filter",
    "rms_norm",
    "linear_cross_entropy",
    "rotary",
    "swiglu",
    "causal_attention",
    "document_attention",
    "grouped_linear",
    "add_product",
)

_ANY_ROW = ("rotary", "swiglu", "causal_attention", "add_product")
"""Ops whose kernels hold no whole row, and so support any length."""

FALLBACKS = {"document_attention": "loop", "grouped_linear": "loop"}
"""Of each op the implementation that every card has: `torch` where none is named."""

MINIMUM_CAPABILITY = (7, 0)
"""Oldest compute capability that the tests compile our Triton kernels for (V100)."""

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAXIMUM_ROW = 16384
"""Elements of a row that one Triton program holds in registers without spilling."""
_MAXIMUM_HEAD = 256
"""Elements of a head that flash attention supports."""


@dataclass(frozen=True)
class Choice:
    """The implementation of an op for one kind of input, and why nothing faster is used."""

    op: str
    device: str
    dtype: torch.dtype
    shape: str
    implementation: str
    reason: str


_held: bool | None = None
"""Whether the variable selects the definitions, while `variable_held` holds it."""


@contextmanager
def variable_held() -> Iterator[None]:
    """Inside, YUAN_KERNELS is not looked up at each call: a small model's ops are no longer than a look."""
    global _held
    before, _held = _held, reference_selected()
    try:
        yield
    finally:
        _held = before


def reference_selected() -> bool:
    """Whether `YUAN_KERNELS` selects the definitions. Raises ValueError for an unknown value."""
    if _held is not None:
        return _held
    value = os.environ.get("YUAN_KERNELS", "")
    if value not in ("", "reference"):
        raise ValueError(f"YUAN_KERNELS={value!r} is unknown; unset it, or set it to 'reference'")
    return value == "reference"


def uses_definition() -> bool:
    """Whether an elementwise op is its definition: if selected, and while torch.compile is tracing.

    The compiler fuses the definition with what is around it; an op of ours would be a wall to it.
    """
    return reference_selected() or torch.compiler.is_compiling()


def implementation(op: str, x: Tensor) -> str:
    """Return the name of the implementation of `op` for x [..., H]."""
    if reference_selected():
        return "reference"
    return find(op, x.device, x.dtype, shape_class(op, x.shape[-1])).implementation


def shape_class(op: str, hidden: int) -> str:
    """Return `regular`, or `odd` for row lengths without a fast kernel; `any` if all have one."""
    if op in _ANY_ROW:
        return "any"
    if op == "grouped_linear":
        return "regular" if hidden % 8 == 0 else "odd"
    if op == "document_attention":
        return "regular" if hidden % 8 == 0 and 0 < hidden <= _MAXIMUM_HEAD else "odd"
    return "regular" if hidden % 16 == 0 and 0 < hidden <= _MAXIMUM_ROW else "odd"


def find(op: str, device: torch.device, dtype: torch.dtype, shape: str) -> Choice:
    """What is used: the choice, or what it fell back to."""
    if _fallen and (fallen := _fallen.get((op, str(device), dtype, shape))):
        return fallen
    return choose(op, device, dtype, shape)


_fallen: dict[tuple[str, str, torch.dtype, str], Choice] = {}
"""What stands in place of choices of this process, as `choose` keeps those."""


def choices(device: torch.device, dtype: torch.dtype, *, hidden: int, head_dim: int = 64) -> list[Choice]:
    """Return the implementation of each op on a device, with the reasons.

    For rows of `hidden` elements, and for heads of `head_dim`.
    """
    rows = {op: (hidden,) for op in OPS} | {"document_attention": (head_dim,)}
    return choose_all(device, dtype, rows)


def choose_all(device: torch.device, dtype: torch.dtype, rows: Mapping[str, Sequence[int]]) -> list[Choice]:
    """Choose the implementation of ops on a device, for the lengths of the rows that each will be given.

    To be called before the first forward: tests and Triton's compilation then stay out of it. What was chosen
    before is known. For the ops by name see `OPS`.
    """
    if reference_selected():
        reason = "YUAN_KERNELS=reference selects the definitions"
        return [Choice(op, str(device), dtype, "any", "reference", reason) for op in rows]
    found = {(op, shape_class(op, row)): None for op, lengths in rows.items() for row in lengths}
    return [find(op, device, dtype, shape) for op, shape in found]


def fall_back(choice: Choice, reason: str) -> None:
    """Use the implementation that every card has, from now on, in place of a choice."""
    fallen = replace(choice, implementation=FALLBACKS.get(choice.op, "torch"), reason=reason)
    _fallen[choice.op, choice.device, choice.dtype, choice.shape] = fallen
    logger.info(_SAID, *_told(fallen))


def forget_fallbacks() -> None:
    """Use what was chosen again: another run begins, with other ranks."""
    _fallen.clear()


_SAID = "%s on %s, %s, %s rows: %s (%s)"


def _told(choice: Choice) -> tuple[object, ...]:
    return choice.op, choice.device, choice.dtype, choice.shape, choice.implementation, choice.reason


@functools.cache
def choose(op: str, device: torch.device, dtype: torch.dtype, shape: str) -> Choice:
    """Choose an implementation and log it; later calls return the cached choice. On a CPU
    one line stands for all."""
    if op == "document_attention":
        fault = varlen_fault(device, dtype, shape)
        name, reason = ("loop", fault) if fault else ("varlen", "tested")
    elif op == "grouped_linear":
        fault = grouped_fault(device, dtype, shape)
        name, reason = ("loop", fault) if fault else ("grouped", "tested")
    elif op == "causal_attention":
        name, reason = _whole_attention(device, dtype)
    elif op == "add_product":
        name, reason = _add_product(device, dtype)
    elif device.type == "cuda":
        name, reason = _on_cuda(op, device, dtype, shape)
    else:
        name = "blocks" if device.type == "cpu" else "torch"
        reason = "Triton kernels are for CUDA devices"
    choice = Choice(op, str(device), dtype, shape, name, reason)
    if device.type == "cpu":
        _say_cpu(dtype)
        logger.debug(_SAID, *_told(choice))
    else:
        logger.info(_SAID, *_told(choice))
    return choice


@functools.cache
def _say_cpu(dtype: torch.dtype) -> None:
    logger.info("kernels on the CPU: torch's and blocks, %s (yuan-train doctor --verbose lists them)", dtype)


def _on_cuda(op: str, device: torch.device, dtype: torch.dtype, shape: str) -> tuple[str, str]:
    from yuan_kernels import self_test

    if dtype not in _TRITON_DTYPES:
        return "torch", f"no Triton kernel for {dtype}"
    if shape == "odd":
        return "torch", f"the row length is not a multiple of 16, or above {_MAXIMUM_ROW}"
    if importlib.util.find_spec("triton") is None:
        return "torch", "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        return "torch", f"compute capability {capability[0]}.{capability[1]} is below 7.0"
    fault = _fault(lambda: self_test.triton_is_correct(op, device, dtype))
    return ("torch", f"the Triton kernel failed its test: {fault}") if fault else ("triton", "tested")


def varlen_fault(device: torch.device, dtype: torch.dtype, shape: str) -> str | None:
    """Return None if torch's variable-length attention can be used; otherwise the reason why not."""
    from yuan_kernels import attention, self_test

    if device.type != "cuda":
        return "torch's variable-length attention is for CUDA devices"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention does not support {dtype}"
    if shape == "odd":
        return f"the heads' size is not a multiple of 8, or above {_MAXIMUM_HEAD}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
    if attention.varlen_attention() is None:
        return f"torch {torch.__version__} has no variable-length attention with windows"
    fault = _fault(lambda: self_test.varlen_is_correct(device, dtype))
    return fault and f"it failed its test: {fault}"


def grouped_fault(device: torch.device, dtype: torch.dtype, shape: str) -> str | None:
    """Return None if torch's grouped product can be used; otherwise the reason why not."""
    from yuan_kernels import grouped_linear, self_test

    if device.type != "cuda":
        return "group by group, each product by the fastest library of this CPU"
    if dtype != torch.bfloat16:
        return f"torch has no grouped kernel for {dtype}"
    if shape == "odd":
        return "the rows are not a multiple of 16 bytes"
    capability = torch.cuda.get_device_capability(device)
    if capability < (9, 0):
        return f"compute capability {capability[0]}.{capability[1]} is below 9.0"
    if grouped_linear.grouped_mm() is None:
        return f"torch {torch.__version__} has no grouped product"
    fault = _fault(lambda: self_test.grouped_is_correct(device, dtype))
    return fault and f"it failed its test: {fault}"


def _whole_attention(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    from yuan_kernels import attention, products

    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= (8, 0):
            return "torch", "its kernels read grouped queries"
        return "repeated", f"compute capability {capability[0]}.{capability[1]}: flash attention needs 8.0"
    if dtype != torch.bfloat16 or products.cpu_multiplies_bf16():
        return "torch", "its kernels are fast here"
    fault = _fault(attention.own_backward_is_correct)
    return ("torch", f"our backward failed its test: {fault}") if fault else ("blocks", "tested")


def _add_product(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    from yuan_kernels import products

    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "torch", "one pass is for 16 bits on CUDA devices"
    fault = _fault(lambda: products.fp32_addmm_is_correct(device, dtype))
    return ("torch", f"one pass failed its test: {fault}") if fault else ("one_pass", "tested")


def _fault(test: Callable[[], bool]) -> str | None:
    """None if the test passes, else what failed. A kernel that cannot run causes a fallback, not an error.

    Also inside a forward that is recomputed, or without gradients: hooks of ours hide from those of a
    checkpoint what the test saves for its own backward.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    try:
        with torch.enable_grad(), hooks:
            return None if test() else "its results differ from the definition's"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
