"""What the card and its libraries are, and what kernels take; most of it without a config to load."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.cuda import nccl
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.gpu_checks.bench import ROOT, Bench, Verdict, megabytes

PACKAGES = (
    *("pydantic", "annotated_types", "yaml", "numpy", "sentencepiece", "safetensors", "triton", "pytest"),
    *("hypothesis", "megatron", "transformers", "tokenizers"),
)

CONTEXT = """
import torch
torch.cuda.init()
free, total = torch.cuda.mem_get_info()
x = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
(x @ x).sum().item()
print(total - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved(), total)
"""
"""Prints what is taken of a card that has nothing else to do, besides torch's own memory; and all of it."""

TOOL_SECONDS = 85

SELF_TESTS = """
import torch
from yuan_kernels import self_test
for op in self_test._TESTS:
    for dtype in (torch.float32, torch.bfloat16):
        assert self_test.triton_is_correct(op, torch.device("cuda"), dtype), (op, dtype)
"""


def versions(bench: Bench) -> Verdict:
    """The head of the table, and a product on the device against the CPU's."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    bench.note(torch=torch.__version__, Python=platform.python_version(), missing=missing)
    bench.note(device=f"{platform.machine()} CPU, {os.cpu_count()} cores")
    if bench.on_card:
        properties = torch.cuda.get_device_properties(0)
        bench.note(device=properties.name, CUDA=torch.version.cuda, NCCL=nccl.version())
        bench.note(architectures=torch.cuda.get_arch_list(), capability=[properties.major, properties.minor])
        bench.note(driver=_nvidia_smi("driver_version"))
        bench.note(clocks_and_power=_nvidia_smi("clocks.max.sm,power.limit"))
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    on_device = x.to(bench.device)
    worst = ((on_device @ on_device).cpu() - x @ x).abs().max().item()
    return worst < 1e-3, f"largest difference {worst:.1e}"


def _nvidia_smi(query: str) -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return _run(words, 30).stdout.strip().split("\n")[0]


def _run(words: list[str], seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command from the root. Raises TimeoutExpired."""
    own = {**os.environ, **environment}
    return subprocess.run(words, cwd=ROOT, env=own, capture_output=True, text=True, timeout=seconds)


def memory(bench: Bench) -> Verdict:
    """The card's memory beside the catalogue's, and what a process takes of it before any tensor."""
    taken: dict[str, int] = {}
    for mode in ("LAZY", "EAGER"):
        done = _run([sys.executable, "-c", CONTEXT], 50, CUDA_MODULE_LOADING=mode)
        done.check_returncode()
        taken[mode] = int(done.stdout.split()[0])
    total = torch.cuda.get_device_properties(0).total_memory
    bench.note(total_memory=total, context=taken)
    words = ", ".join(f"{mode.lower()} {megabytes(count)}" for mode, count in taken.items())

    from yuan_train.config.devices import CATALOGUE
    from yuan_train.profile.units import name_of

    name = name_of(torch.device("cuda", 0))
    card = CATALOGUE.get(name)
    if card is None:
        return None, f"context {words}; {name} is not in the catalogue"
    bench.note(name=name, catalogue_memory=card.memory, reserved=card.reserved)
    fits = 0.98 * total < card.memory < 1.005 * total and max(taken.values()) <= card.reserved
    return fits, f"{name}: torch reports {total / card.memory:.2%} of the catalogue's; context {words}"


def attention(bench: Bench) -> Verdict:
    """Peak bytes and seconds of causal attention with and without flash, heads grouped or repeated.

    Holds if grouped and repeated heads agree, and if without flash (as on cards below capability 8.0)
    repeated heads do not keep scores [heads, S, S].
    """
    length, dtype = bench.pick((8192, torch.float16), (128, torch.float32))
    holds, worst = True, 0
    for heads, groups, dim in ((32, 32, 64), (32, 8, 128), (16, 16, 256)):
        heads, groups = bench.pick((heads, groups), (heads // 8, groups // 8))
        shapes = [(1, number, length, dim) for number in (heads, groups, groups)]
        drawn = {"device": bench.device, "dtype": dtype, "requires_grad": True}
        inputs = [torch.randn(shape, **drawn) for shape in shapes]
        outputs: list[Tensor] = []
        for backends in (None, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            for repeated in (False, True):
                with sdpa_kernel(backends) if backends else nullcontext():
                    row = _measure_attention(bench, inputs, repeated=repeated)
                outputs.append(row.pop("output"))
                bench.note(**{f"{heads}/{groups} heads of {dim}, {_words(backends, repeated)}": row})
                if backends and repeated and row["bytes"] is not None:
                    holds = holds and row["bytes"] < heads * length**2 * dtype.itemsize
                    worst = max(worst, row["bytes"])
        close = [torch.allclose(y, outputs[0], rtol=1e-2, atol=bench.pick(1e-2, 1e-5)) for y in outputs]
        holds = holds and all(close)
    return holds, f"forms agree; without flash at S = {length}, heads repeated: {megabytes(worst or None)}"


def _words(backends: Any, repeated: bool) -> str:
    return f"{'without flash' if backends else 'as torch chooses'}, {'repeated' if repeated else 'grouped'}"


def _measure_attention(bench: Bench, inputs: list[Tensor], *, repeated: bool) -> dict[str, Any]:
    query, key, value = inputs
    times = query.shape[1] // key.shape[1]

    def forward() -> Tensor:
        k, v = (x.repeat_interleave(times, 1) if repeated else x for x in (key, value))
        grouped = k.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, k, v, is_causal=True, enable_gqa=grouped)

    def both() -> None:
        torch.autograd.grad(forward().sum(), inputs)

    try:
        taken = bench.peak_bytes(both)
        return {"output": forward().detach(), "bytes": taken, "seconds": bench.seconds(both, 3)}
    except torch.OutOfMemoryError as error:
        return {"output": forward().detach(), "bytes": None, "error": str(error)[:160]}


def buffers(bench: Bench) -> Verdict:
    """Bytes of the gradient norm, and of the embedding's gradient dense and by rows."""
    from yuan_kernels import products

    per_element, error = _norm(bench)
    rows_agree = _embedding(bench)
    for dtype in (torch.bfloat16, torch.float16):
        bench.note(**{f"products of {dtype} into fp32": products.supports_fp32_addmm(bench.device, dtype)})
    words = megabytes(None) if per_element is None else f"the norm takes {per_element:.2f} bytes an element"
    return error < 1e-9 and (per_element or 0) < 1 and rows_agree, f"sums agree; {words}"


def _norm(bench: Bench) -> tuple[float | None, float]:
    """Of the squared norm: the bytes it takes for each element, and its relative error."""
    from yuan_train.parallel.gradients import sum_of_squares

    flat = torch.randn(1 << bench.pick(29, 16), device=bench.device)
    taken = bench.peak_bytes(lambda: sum_of_squares(flat))
    exact = sum(part.double().square().sum().item() for part in flat.split(1 << 22))
    error = abs(float(sum_of_squares(flat)) / exact - 1)
    took = bench.seconds(lambda: sum_of_squares(flat), 3)
    bench.note(norm_bytes=taken, norm_error=error, norm_seconds=took)
    return None if taken is None else taken / flat.numel(), error


def _embedding(bench: Bench) -> bool:
    """Whether the embedding's gradient added by rows is the dense one added whole; notes both's bytes."""
    words, hidden, tokens = bench.pick((135040, 2048, 4096), (500, 32, 64))
    dtype = bench.pick(torch.bfloat16, torch.float32)
    weight = torch.randn(words, hidden, device=bench.device, dtype=dtype).requires_grad_()
    index = torch.randint(words, (1, tokens), device=bench.device)
    dy = torch.randn(1, tokens, hidden, device=bench.device, dtype=dtype)
    sums = [torch.zeros(words, hidden, device=bench.device) for _ in range(2)]

    def dense() -> None:
        F.embedding(index, weight).backward(dy)
        assert weight.grad is not None
        sums[0].add_(weight.grad)
        weight.grad = None

    def rows() -> None:
        sums[1].index_put_((index.flatten(),), dy.flatten(0, 1).float(), accumulate=True)

    for name, form in (("dense", dense), ("by rows", rows)):
        taken = bench.peak_bytes(form)
        bench.note(**{f"embedding's gradient {name}": {"bytes": taken, "seconds": bench.seconds(form)}})
    return torch.allclose(sums[0], sums[1], rtol=2e-2, atol=1e-1)


def gpu_tests(bench: Bench) -> Verdict:
    """The tests that need a card."""
    return run_pytest(["-m", "gpu", "tests/kernels", "tests/parallel"], seconds=95)


def run_pytest(words: list[str], *, seconds: float, **environment: str) -> Verdict:
    """Whether tests pass; `filterwarnings = error` is for CPUs: a warning of CUDA's is no failure."""
    import pytest  # pyright: ignore[reportUnusedImport]  # noqa: F401 (its absence is told)

    line = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", *words]
    try:
        done = _run(line, seconds, **environment)
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode()[-20_000:], flush=True)
        return False, f"not done within {seconds:.0f} s"
    print(done.stdout[-200_000:], done.stderr[-20_000:], flush=True)
    lacking = r"No module named '(hypothesis|pydantic|annotated_types|yaml)"
    missing = re.search(lacking, done.stdout + done.stderr)
    if missing is not None:
        return None, f"{missing[1]} is not installed"
    last = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1]
    return done.returncode == 0, last.strip("= ")


def doctor(bench: Bench) -> Verdict:
    """The command's own findings, in JSON."""
    done = _run([sys.executable, "-m", "yuan_train", "doctor", "--json"], TOOL_SECONDS)
    print(done.stdout, done.stderr, flush=True)
    if "ModuleNotFoundError" in done.stderr:
        return None, done.stderr.strip().splitlines()[-1]
    found = json.loads(done.stdout)
    slow = [op["op"] for op in found["ops"] if op["device"] != "cpu" and "failed" in op["reason"]]
    bench.note(found=found)
    return done.returncode == 0 and not slow, str(found["summary"])


def kernels(bench: Bench) -> Verdict:
    """The rows of tools/bench/kernels.py: our forms beside torch's, with bytes."""
    try:
        from tools.bench import harness, kernels
    except ModuleNotFoundError as error:
        return None, str(error)
    log, count = bench.folder / "kernels.md", 0
    cases = (kernels.localized_filter, kernels.norm, kernels.cross_entropy, kernels.layer)
    wanted = bench.pick(cases, (kernels.norm,))
    for name in [name for name, one in harness.CASES.items() if one.measure in wanted]:
        few = bench.pick([], ["shape=[[1024,bf16]]"])
        words = [f"device={bench.device.type}", f"repeats={bench.pick(7, 1)}", *few]
        found = [harness.measure_here(name, given) for given in harness.combinations(name, words)]
        rows = [row for own in found for row in own]
        with log.open("a") as file:
            print(f"{name}\n\n{harness.table(name, rows)}\n", file=file)
        bench.note(rows=rows)
        count += len(rows)
    return count > 0, f"{count} rows in kernels.md"


def sanitizer(bench: Bench) -> Verdict:
    """Whether our Triton kernels read and write where they may, by NVIDIA's tool."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        return None, "compute-sanitizer is not on the PATH"
    for kind in ("memcheck", "racecheck"):
        # Its errors have an exit code of their own.
        words = [tool, "--tool", kind, "--error-exitcode", "86", sys.executable, "-c", SELF_TESTS]
        try:
            done = _run(words, TOOL_SECONDS, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        except subprocess.TimeoutExpired:
            return None, f"{kind}: no answer within {TOOL_SECONDS} s"
        print(done.stdout[-20_000:], done.stderr[-20_000:], flush=True)
        bench.note(**{kind: done.stdout.strip().splitlines()[-1:]})
        if done.returncode:
            return False, f"{kind}: exit code {done.returncode}"
    return True, "memcheck and racecheck: no errors"
