"""The Triton kernels: correct in the interpreter, and compiled for every GPU generation, without a GPU."""

import importlib.util
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

OPS = ["localized_filter", "rms_norm", "linear_cross_entropy", "rotary", "swiglu"]
TARGETS = [("fp16", "70"), ("bf16", "80"), ("fp16", "90"), ("bf16", "90")]


def run(code: str, **environment: str) -> str:
    """Run code in a process of its own: Triton reads its environment variables when it is imported."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    if "only 0-dimensional arrays can be converted to Python scalars" in result.stderr:
        pytest.skip("the interpreter of this Triton (3.6) cannot loop under this numpy (2.4)")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_interpreted_kernels_agree_with_torch():
    # In 16 bits the interpreter truncates where GPUs round, so only fp32 is compared.
    code = (
        "import torch; from yuan_kernels import self_test\n"
        f"for op in {OPS!r}:\n"
        "    print(op, self_test.triton_is_correct(op, torch.device('cpu'), torch.float32))"
    )
    assert run(code, TRITON_INTERPRET="1").split("\n")[:-1] == [f"{op} True" for op in OPS]


COMPILE = """
import subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from yuan_kernels import triton_forms as forms

dtype, capability = sys.argv[1], int(sys.argv[2])
x, f, i = f"*{dtype}", "*fp32", "i32"
filters, norm = forms.FILTER_BLOCK, forms.norm_block(8192)
yes = {"HAS_STARTS": True, "HAS_BEFORE": True}
shapes = {"tokens": i, "channels": i}
CASES = [
    (forms.filter_forward_kernel, filters, yes,
     {"z": x, "starts": "*u8", "older_before": x, "c_before": x, "taps": x, **shapes}),
    (forms.filter_backward_kernel, filters, {"HAS_STARTS": True},
     {"dtaps": x, "starts": "*u8", "dz": x, **shapes}),
    (forms.norm_forward_kernel, norm, {"HAS_RESIDUAL": True},
     {"x": x, "residual": x, "weight": x, "y": x, "s": x, "scale": f, "hidden": i, "epsilon": "fp32"}),
    (forms.norm_backward_kernel, norm, {"HAS_BYPASS": True},
     {"dy": x, "bypass": x, "s": x, "weight": x, "scale": f, "ds": x, "partial": f,
      "tokens": i, "hidden": i}),
    (forms.softmax_kernel, forms.SOFTMAX_BLOCK, {"WRITE": True},
     {"logits": f, "probabilities": x, "normalizer": f, "words": i, "factor": "fp32"}),
    (forms.rotary_kernel, forms.rotary_block(64, 128), {"INVERSE": True},
     {"x": x, "cos": f, "sin": f, "y": x, "heads": i, "half": i, "table_rows": i}),
    (forms.swiglu_forward_kernel, forms.SWIGLU_BLOCK, {}, {"x": x, "y": x, "width": i}),
    (forms.swiglu_backward_kernel, forms.SWIGLU_BLOCK, {},
     {"dy": x, "x": x, "dx": x, "width": i}),
]
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
for kernel, block, switches, signature in CASES:
    constants = switches | {k: v for k, v in block.items() if k != "num_warps"}
    # Pointers, and the sizes of regular rows, are multiples of 16, as at run time.
    sizes = ("hidden", "channels", "half", "width")
    aligned = [k for k, v in signature.items() if v.startswith("*") or k in sizes]
    names = [p.name for p in kernel.params]
    attrs = {(names.index(k),): [["tt.divisibility", 16]] for k in aligned}
    full = signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, full, {(names.index(k),): v for k, v in constants.items()}, attrs)
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": block.get("num_warps", 4)}
    compiled = triton.compile(source, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"]); file.flush()
        line = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(line, capture_output=True, text=True).stdout
    Path(sys.argv[3], kernel.fn.__name__ + ".ttir").write_text(compiled.asm["ttir"])
    words = [word for word in usage.split() if word.startswith(("REG:", "STACK:"))]
    print(dtype, capability, kernel.fn.__name__, *words)
"""


def test_kernels_compile_without_spilling(tmp_path):
    """No register spills, which would show as stack usage; row offsets are 64-bit."""
    words = [(*target, str(tmp_path / "-".join(target))) for target in TARGETS]
    for *_, folder in words:
        os.mkdir(folder)
    # All in one process, for it takes seconds until that has imported Triton.
    each = "    sys.argv = ['', *words]\n    exec(code, {})\n"
    code = f"import sys\ncode = {COMPILE!r}\nfor words in {words!r}:\n{each}"
    lines = run(code, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0").splitlines()
    assert len(lines) == 8 * len(TARGETS)
    assert not [line for line in lines if not re.search(r"STACK:0\b", line)]
    files = list(tmp_path.glob("*-*/*.ttir"))
    assert len(files) == len(lines)
    assert {path: narrow_offsets(path.read_text()) for path in files} == {path: [] for path in files}


def narrow_offsets(code: str) -> list[str]:
    """Lines of Triton IR whose 32-bit products may overflow: T x V logits have more than 2^31 elements.

    In 32 bits, run-time sizes may be multiplied only by constants, and a program id not at all: it must be
    converted to 64 bits first, or split into sequence and block of the sequence.
    """
    numbers = re.findall(r"(%\w+) = tt\.get_program_id x", code)
    found = []
    for line in (line.partition(" loc(")[0].strip() for line in code.splitlines()):
        product = re.search(r"arith\.muli (%\w+), (%\w+) : (?:tensor<\w+xi32>|i32)$", line)
        if product is not None:
            constant = any(re.fullmatch(r"%c\d+_i32\w*|%cst\w*", operand) for operand in product.groups())
            if not constant or set(product.groups()) & set(numbers):
                found.append(line)
    return found


@pytest.mark.parametrize(
    ("line", "narrow"),
    [
        ("%a = arith.muli %sequence, %tokens : i32", True),
        ("%a = arith.muli %t, %w : tensor<16x1xi32>", True),
        ("%a = arith.muli %p, %c1024_i32 : i32", True),
        ("%a = arith.muli %sequence, %tokens : i64", False),
        ("%a = arith.muli %t, %w : tensor<16x1xi64>", False),
        ("%a = arith.muli %channels, %c2_i32_3 : i32", False),
    ],
)
def test_narrow_offsets_are_found(line, narrow):
    assert bool(narrow_offsets(f"%p = tt.get_program_id x : i32 loc(#loc1)\n  {line} loc(#loc2)\n")) == narrow


def test_arguments_that_triton_compiles_anew_for_are_told_apart():
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend
    from yuan_kernels.triton_forms import specialization

    numbers = [n + m for n in (0, 1, 16, 48, 2**31 - 16, 2**31, 2**40) for m in (0, 1, 5, 15)]
    rows = [torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.uint8)]
    arguments = [*numbers, 0.5, 1.0, *(row[first:] for row in rows for first in (0, 1, 16))]
    found = [
        (specialization(x), native_specialize_impl(BaseBackend, x, False, True, True)) for x in arguments
    ]
    assert all(own != other for own, one in found for other, another in found if one != another)
    assert len({own for own, _ in found}) < len(arguments) / 2


class Card(SimpleNamespace):
    """A tensor that says that it is on the first card."""

    is_cuda = True

    def get_device(self) -> int:
        return 0


def test_a_kernel_is_launched_by_what_was_compiled_for_equal_arguments(monkeypatch):
    from yuan_kernels import triton_forms

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments: launched.append((grid, arguments))

    class Kernel:
        arg_names = ("x", "words", "WRITE", "BLOCK")

        def __getitem__(self, grid):
            return lambda *arguments, **options: compiled.append((grid, arguments, options)) or Compiled()

    launched, compiled, kernel = [], [], Kernel()
    x: Any = Card()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_forms, "_compiled", {})
    for words, write in ((32, True), (48, True), (33, True), (32, False)):
        triton_forms.launch(kernel, (words,), x, words, WRITE=write, BLOCK=16, num_warps=4)
    assert [arguments[1] for _, arguments, _ in compiled] == [32, 33, 32]
    # The constants of the kernel follow its arguments, and a grid has three sides.
    assert launched == [((48, 1, 1), (x, 48, True, 16))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_kernels_agree_with_torch(op, dtype):
    from yuan_kernels import self_test

    assert self_test.triton_is_correct(op, torch.device("cuda"), dtype)
