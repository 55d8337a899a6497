"""Times the kernels against straightforward torch code, and prints Markdown.

    OMP_NUM_THREADS=1 python tools/bench_kernels.py [--only filter norm] [--repeats 7]

Compare ratios rather than times: all variants of a row run in one process, in turns, and each figure is the
median of its turns. On a CPU it is the CPU time of one thread, which other processes do not affect; on a GPU
it is wall time, from an idle device to an idle device. The floor of an op is the time of the matrix products
that it needs, of the same shapes and operand orders; the floor of a norm is a copy of as many bytes.
Memory is the growth of the process at its peak (Linux), or the allocator's peak on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from yuan_kernels import ops, products

from yuan_train.config.model import ModelConfig, load_model
from yuan_train.models.block import Block
from yuan_train.models.rotary import rotary_tables
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.profile.units import machine_name

ROOT = Path(__file__).parents[1]
EPSILON = 1e-6
VOCABULARY = 135_040

Call = Callable[[], object]
Rows = Iterator[list[str]]


# --- measuring ---------------------------------------------------------------------------------------------


class Bench:
    """Measures time and memory on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self._repeats = repeats

    def seconds(self, variants: dict[str, Call], *, repeats: int | None = None) -> dict[str, float]:
        """Return the median seconds of each variant. They run in turns, after one warm-up turn."""
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range((repeats or self._repeats) + 1):
            for name, call in variants.items():
                seconds = self._once(call)
                if turn:
                    taken[name].append(seconds)
        return {name: statistics.median(values) for name, values in taken.items()}

    def extra_bytes(self, call: Call) -> int | None:
        """Return the bytes by which memory grows at the call's peak; None if it cannot be measured."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            call()
            return torch.cuda.max_memory_allocated(self.device) - before
        try:
            before = _resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            call()
            return _resident("VmHWM") - before
        except OSError:
            return None

    def _once(self, call: Call) -> float:
        if self.device.type != "cuda":
            start = time.thread_time()
            call()
            return time.thread_time() - start
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def random(self, *shape: int, dtype: torch.dtype, scale: float = 1.0, grad: bool = True) -> Tensor:
        """Return random numbers [*shape]. (Products of zeros would run faster.)"""
        generator = torch.Generator().manual_seed(len(shape))
        values = torch.randn(*shape, generator=generator).mul_(scale).to(self.device, dtype)
        return values.requires_grad_(grad)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def forward_backward(form: Callable[..., Any], inputs: list[Tensor], upstream: list[Tensor]) -> Call:
    """Return a call that runs `form` and computes the gradients of all inputs."""

    def call() -> object:
        result = form(*inputs)
        return torch.autograd.grad(result if isinstance(result, tuple) else (result,), inputs, upstream)

    return call


# --- one table per op --------------------------------------------------------------------------------------

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def filter_rows(bench: Bench) -> Rows:
    """Yield the rows of the localized filter: ours, the published form, and the products alone."""
    yield ["H", "B x S", "dtype", "pass", "products ms", "two Conv2d ms", "ours ms", "gain", "share of floor"]
    shapes = [(h, b, s) for h in (1024, 2048) for b, s in ((1, 1024), (2, 1024), (1, 4096))]
    cases = [(*shape, torch.bfloat16) for shape in shapes]
    cases += [(1024, 2, 1024, torch.float32), (2048, 1, 1024, torch.float32)]
    for hidden, batch, tokens, dtype in cases:
        n = hidden // 2
        x = bench.random(batch, tokens, hidden, dtype=dtype)
        sizes = (n, hidden, 2), (n,), (hidden, n, 2), (hidden,)
        inputs = [x, *(bench.random(*size, dtype=dtype, scale=hidden**-0.5) for size in sizes)]
        dy = bench.random(batch, tokens, hidden, dtype=dtype, grad=False)
        flat, square = x.detach().view(-1, hidden), bench.random(hidden, hidden, dtype=dtype, grad=False)

        def bare(flat: Tensor = flat, square: Tensor = square, *, backward: bool) -> None:
            for _ in range(2):
                products.linear(flat, square)
                if backward:
                    products.product(flat, square)
                    products.product(flat.T, flat)

        for backward in (False, True):
            calls: dict[str, Call] = {"floor": lambda bare=bare, backward=backward: bare(backward=backward)}
            for name, form in (("plain", two_convolutions), ("ours", ops.localized_filter)):
                whole = forward_backward(form, inputs, [dy])
                calls[name] = whole if backward else (lambda form=form, inputs=inputs: form(*inputs))
            taken = bench.seconds(calls)
            yield [
                str(hidden),
                f"{batch} x {tokens}",
                DTYPE_NAMES[dtype],
                "forward + backward" if backward else "forward",
                *_times(taken),
                f"{taken['floor'] / taken['ours']:.0%}",
            ]


def two_convolutions(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, **_: object) -> Tensor:
    """Return the published form: two Conv2d, each padded with one zero on the left."""
    columns = x.transpose(1, 2).unsqueeze(-1)
    c = F.conv2d(F.pad(columns, (0, 0, 1, 0)), w1.unsqueeze(-1), b1)
    return F.conv2d(F.pad(c, (0, 0, 1, 0)), w2.unsqueeze(-1), b2).squeeze(-1).transpose(1, 2)


def norm_rows(bench: Bench) -> Rows:
    """Yield the rows of the norm, alone and with the residual sum: ours and torch's."""
    yield ["op", "T x H", "dtype", "copy ms", "torch ms", "ours ms", "gain", "share of floor"]
    for hidden, dtype in ((1024, torch.bfloat16), (2048, torch.bfloat16), (2048, torch.float32)):
        tokens = 4096
        x, residual, bypass, dy = (bench.random(tokens, hidden, dtype=dtype) for _ in range(4))
        weight = bench.random(hidden, dtype=dtype)
        copy = torch.empty_like(x)
        # Tensors that must move: forward x, (residual, s,) y; backward dy, s, (bypass,) ds. A copy moves two.
        cases = {
            "rms_norm": (ops.rms_norm, plain_norm, [x, weight], [dy.detach()], 5),
            "add_rms_norm": (
                ops.add_rms_norm,
                plain_add_norm,
                [x, residual, weight],
                [dy.detach(), bypass.detach()],
                8,
            ),
        }
        for name, (ours, plain, inputs, upstream, moved) in cases.items():
            taken = bench.seconds(
                {
                    "floor": lambda x=x, copy=copy: copy.detach().copy_(x.detach()),
                    "plain": forward_backward(plain, inputs, upstream),
                    "ours": forward_backward(
                        lambda *a, ours=ours: ours(*a, epsilon=EPSILON), inputs, upstream
                    ),
                }
            )
            taken["floor"] *= moved / 2
            share = f"{taken['floor'] / taken['ours']:.0%}"
            yield [name, f"{tokens} x {hidden}", DTYPE_NAMES[dtype], *_times(taken), share]


def plain_norm(x: Tensor, weight: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return torch's norm."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def plain_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float = EPSILON
) -> tuple[Tensor, Tensor]:
    """Return torch's norm of x + residual, and the sum."""
    total = x + residual
    return plain_norm(total, weight, epsilon), total


def cross_entropy_rows(bench: Bench, tokens: int = 2048, hidden: int = 1024) -> Rows:
    """Yield the rows of head and cross-entropy: ours and all logits at once, with time and memory."""
    yield ["form", "seconds", "of plain", "6THV floor / time", "extra MB", "of plain"]
    dtype = torch.bfloat16
    h = bench.random(tokens, hidden, dtype=dtype)
    weight = bench.random(VOCABULARY, hidden, dtype=dtype, scale=0.02)
    targets = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(0)).to(
        bench.device
    )
    main = torch.ones(VOCABULARY, hidden, device=bench.device)
    chunk = h.detach()[:512]
    logits = torch.empty(512, VOCABULARY, dtype=dtype, device=bench.device).normal_()

    def floor() -> None:
        for words in torch.arange(VOCABULARY).split(4096):
            part = slice(int(words[0]), int(words[-1]) + 1)
            w, p = weight.detach()[part], logits[:, part]
            for left, right in ((chunk, w.T), (p, w), (p.T, chunk)):
                torch.mm(left, right)

    def plain() -> None:
        loss = F.cross_entropy((h @ weight.T).float(), targets, reduction="sum")
        torch.autograd.grad(loss / tokens, (h, weight))

    def ours() -> None:
        torch.autograd.grad(ops.linear_cross_entropy(h, weight, targets) / tokens, (h, weight))

    def ours_main() -> None:
        scale = 1.0 / tokens
        loss = ops.linear_cross_entropy(h, weight, targets, main_gradient=main, gradient_scale=scale)
        torch.autograd.grad(loss * scale, h)

    forms: dict[str, Call] = {
        "logits, then F.cross_entropy; dW bf16": plain,
        "ours; dW bf16": ours,
        "ours, into the fp32 main gradient": ours_main,
    }
    taken = bench.seconds({"floor": floor, **forms}, repeats=3)
    bare = taken.pop("floor") * tokens / 512
    memory = {name: bench.extra_bytes(form) for name, form in forms.items()}
    first = next(iter(forms))
    for name in forms:
        # With an allocator that keeps its memory (see docs/benchmarks-kernels.md) the process does not grow.
        extra, plain_extra = memory[name], memory[first] or None
        yield [
            name,
            f"{taken[name]:.2f}",
            f"{taken[name] / taken[first]:.2f}",
            f"{bare / taken[name]:.0%}",
            "not measured" if extra is None else f"{extra / 1e6:.0f}",
            "not measured" if extra is None or plain_extra is None else f"{extra / plain_extra:.2f}",
        ]


def layer_rows(bench: Bench) -> Rows:
    """Yield the rows of a layer of Yuan2-2B: ours, and the same layer with Conv2d and torch's norms."""
    yield ["layer", "B x S", "dtype", "Conv2d and torch's norms ms", "ours ms", "gain"]
    config = load_model(ROOT / "configs/model/yuan2-2b.yaml")
    dtype = torch.bfloat16
    model = Transformer(config, layers=(0, 1), embedding=False, head=False, device=bench.device, dtype=dtype)
    init_weights(model, seed=0)
    block = next(iter(model.blocks.values()))
    for tokens in (1024, 2048):
        x = bench.random(1, tokens, config.hidden_size, dtype=dtype)
        dy = bench.random(1, tokens, config.hidden_size, dtype=dtype, grad=False)
        positions = torch.arange(tokens, device=bench.device).unsqueeze(0)
        tables = rotary_tables(config, positions, length=tokens, dtype=dtype)
        inputs = [x, *block.parameters()]

        def step(block: Block = block, inputs: list[Tensor] = inputs, dy: Tensor = dy, tables=tables) -> None:
            torch.autograd.grad(block(inputs[0], tables), inputs, dy)

        def plain(step: Call = step) -> None:
            with torchs_norms(), mock.patch.object(block.filter, "convolution", two_convolutions):
                step()

        taken = bench.seconds({"plain": plain, "ours": step}, repeats=5)
        yield ["yuan2-2b", f"1 x {tokens}", DTYPE_NAMES[dtype], *_times(taken)]


def bf16_rows(bench: Bench, *, layer_tokens: int = 1024) -> Rows:
    """Yield the rows of bf16 beside fp32: one product in each order of operands, and a layer."""
    yield ["what", "torch bf16 ms", "ours bf16 ms", "ours fp32 ms", "bf16 / fp32"]
    x, weight, dy = (bench.random(512, n, dtype=torch.float32, grad=False) for n in (1024, 1024, 1024))
    square = bench.random(1024, 1024, 1, dtype=torch.float32, grad=False).squeeze(2)
    products_of: dict[str, tuple[Tensor, Tensor]] = {
        "x W^T, 512 x 1024 x 1024": (x, square),
        "dy W": (dy, square.T),
        "dy^T x": (dy.T, x.T),
    }
    for name, (left, right) in products_of.items():
        half = left.bfloat16(), right.bfloat16()
        calls: dict[str, Call] = {
            "plain": lambda half=half: torch.mm(half[0], half[1].T),
            "ours": lambda half=half: products.linear(*half),
            "fp32": lambda left=left, right=right: products.linear(left, right),
        }
        yield [name, *_beside_fp32(bench.seconds(calls, repeats=3))]
    config = load_model(ROOT / "configs/model/yuan2-2b.yaml")
    config = replace(config, hidden_size=1024, num_attention_heads=16, ffn_hidden_size=4096)
    steps = {
        name: _layer_step(bench, config, layer_tokens, dtype)
        for name, dtype in (("ours", torch.bfloat16), ("fp32", torch.float32))
    }
    name = f"a layer, H 1024, 1 x {layer_tokens}, forward + backward"
    yield [name, "not measured", *_beside_fp32(bench.seconds(steps, repeats=3))]


def _beside_fp32(taken: dict[str, float]) -> list[str]:
    """Milliseconds of each variant, then ours in bf16 over fp32."""
    return [*(f"{s * 1e3:.0f}" for s in taken.values()), f"{taken['ours'] / taken['fp32']:.2f}"]


def _layer_step(bench: Bench, config: ModelConfig, tokens: int, dtype: torch.dtype) -> Call:
    """Forward and backward of one layer."""
    model = Transformer(config, layers=(0, 1), embedding=False, head=False, device=bench.device, dtype=dtype)
    init_weights(model, seed=0)
    x = bench.random(1, tokens, config.hidden_size, dtype=dtype)
    dy = bench.random(1, tokens, config.hidden_size, dtype=dtype, grad=False)
    inputs = [x, *model.parameters()]
    return lambda: torch.autograd.grad(model(x), inputs, dy)


@contextlib.contextmanager
def torchs_norms() -> Iterator[None]:
    """Context in which the model uses torch's norms."""
    with mock.patch.multiple(ops, rms_norm=plain_norm, add_rms_norm=plain_add_norm):
        yield


def _times(taken: dict[str, float]) -> list[str]:
    """Milliseconds of each variant, then the plain form's time over ours."""
    return [*(f"{s * 1e3:.1f}" for s in taken.values()), f"{taken['plain'] / taken['ours']:.2f}"]


# --- the report --------------------------------------------------------------------------------------------

TABLES: dict[str, tuple[str, Callable[[Bench], Rows]]] = {
    "filter": ("Localized filter", filter_rows),
    "norm": ("RMS norm, forward + backward", norm_rows),
    "cross_entropy": ("Head and cross-entropy, 2048 tokens, H 1024, V 135,040, bf16", cross_entropy_rows),
    "layer": ("One layer, forward + backward", layer_rows),
    "bf16": ("bf16 beside fp32, on a CPU", bf16_rows),
}


def main() -> None:
    """Run the selected tables, and print each row once measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES), metavar="TABLE")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    bench = Bench(device, arguments.repeats)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else machine_name()
    threads = "" if device.type == "cuda" else ", one thread"
    print(f"{machine}{threads}; torch {torch.__version__}, Python {platform.python_version()}")
    print(f"fp32 products through {ops.fp32_products()}\n" if device.type == "cpu" else "", flush=True)
    for name in arguments.only:
        title, rows_of = TABLES[name]
        print(f"### {title}\n")
        for number, row in enumerate(rows_of(bench)):
            print("| " + " | ".join(row) + " |", flush=True)
            if number == 0:
                print("|" + "---|" * len(row))
        print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
