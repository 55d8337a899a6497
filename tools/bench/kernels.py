"""Benchmarks of the kernels: each against straightforward torch code, in one process, in turns.

Compare ratios rather than times: each figure is the median of its turns. On a CPU it is the CPU time of one
thread, which other processes do not affect; on a GPU it is wall time, from an idle device to an idle device.
The floor of an op is the time of the matrix products that it needs, of the same shapes and operand orders;
the floor of a norm is a copy of as many bytes. Memory is the growth of the process at its peak (Linux), or
the allocator's peak on a GPU.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from yuan_kernels import ops, products

from tools.bench.harness import Row, case
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.models.attention import rotary_tables
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.parallel.device import (
    CPU,
    CudaDevice,
    Device,
    can_track_memory,
    held_bytes,
    peak_memory_bytes,
    reset_peak_memory,
)

EPSILON = 1e-6
VOCABULARY = 135_040
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS = {
    **dict.fromkeys(("products ms", "two Conv2d ms", "copy ms", "torch ms", "ours ms"), ".1f"),
    **{"Conv2d and torch's norms ms": ".1f", "gain": ".2f", "share of floor": ".0%"},
    **dict.fromkeys(("torch bf16 ms", "ours bf16 ms", "ours fp32 ms"), ".0f"),
    **{"bf16 / fp32": ".2f", "seconds": ".2f", "of plain": ".2f", "6THV floor / time": ".0%"},
    **{"extra MB": ".0f", "of plain's": ".2f"},
}

Call = Callable[[], object]


class _Bench:
    """Measures time and memory on `cpu` or `cuda`."""

    def __init__(self, device: str) -> None:
        torch.set_num_threads(1)
        self.device: Device = CudaDevice(0) if device == "cuda" else CPU
        self.torch_device = torch.device(device)

    def seconds(self, variants: Mapping[str, Call], repeats: int) -> dict[str, float]:
        """The median seconds of each variant. They run in turns, after one warm-up turn."""
        taken: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(repeats + 1):
            for name, call in variants.items():
                taken[name].append(self._once(call))
        return {name: statistics.median(values[1:]) for name, values in taken.items()}

    def extra_bytes(self, call: Call) -> int | None:
        """The bytes by which memory grows at the call's peak; None if it cannot be measured."""
        if not can_track_memory(self.device):
            return None
        before = held_bytes(self.device)
        reset_peak_memory(self.device)
        call()
        return peak_memory_bytes(self.device) - before

    def _once(self, call: Call) -> float:
        clock = time.perf_counter if self.device.is_card else time.thread_time
        self.device.finish()
        start = clock()
        call()
        self.device.finish()
        return clock() - start

    def random(self, *shape: int, dtype: torch.dtype, scale: float = 1.0, grad: bool = True) -> Tensor:
        """Random numbers [*shape]. (Products of zeros would run faster.)"""
        generator = torch.Generator().manual_seed(len(shape))
        values = torch.randn(*shape, generator=generator).mul_(scale).to(self.torch_device, dtype)
        return values.requires_grad_(grad)

    def layer(self, config: ModelConfig, dtype: torch.dtype) -> Transformer:
        """A model of one layer alone."""
        with self.torch_device:
            model = Transformer(config, layers=(0, 1), embedding=False, head=False, dtype=dtype)
        init_weights(model, seed=0)
        return model


def forward_backward(form: Callable[..., Any], inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> Call:
    """A call that runs `form` and computes the gradients of all inputs."""

    def call() -> object:
        result = form(*inputs)
        return torch.autograd.grad(result if isinstance(result, tuple) else (result,), inputs, upstream)

    return call


def _times(taken: Mapping[str, float], **names: str) -> Row:
    """Milliseconds by column, then the plain form's time over ours, and the floor's share of ours."""
    row: Row = {f"{column} ms": taken[name] * 1e3 for name, column in names.items()}
    row["gain"] = taken["plain"] / taken["ours"]
    return row | ({"share of floor": taken["floor"] / taken["ours"]} if "floor" in taken else {})


@case(
    "kernels/filter",
    formats=FORMATS,
    costs={"ours ms": 0.2},
    shape=(*((h, b, s, "bf16") for h in (1024, 2048) for b, s in ((1, 1024), (2, 1024), (1, 4096))),)
    + ((1024, 2, 1024, "fp32"), (2048, 1, 1024, "fp32")),
    device=("cpu",),
    repeats=(7,),
)
def localized_filter(shape: Sequence[Any], device: str, repeats: int) -> Iterator[Row]:
    """The localized filter: ours, the published form, and the products alone."""
    hidden, batch, tokens, name = shape
    bench, dtype, n = _Bench(device), DTYPES[name], hidden // 2
    x = bench.random(batch, tokens, hidden, dtype=dtype)
    sizes = (n, hidden, 2), (n,), (hidden, n, 2), (hidden,)
    inputs = [x, *(bench.random(*size, dtype=dtype, scale=hidden**-0.5) for size in sizes)]
    dy = bench.random(batch, tokens, hidden, dtype=dtype, grad=False)
    flat, square = x.detach().view(-1, hidden), bench.random(hidden, hidden, dtype=dtype, grad=False)

    def bare(backward: bool) -> None:
        for _ in range(2):
            products.linear(flat, square)
            if backward:
                products.product(flat, square)
                products.product(flat.T, flat)

    forms = {"plain": two_convolutions, "ours": ops.localized_filter}
    for backward in (False, True):
        calls: dict[str, Call] = {"floor": lambda backward=backward: bare(backward)}
        for key, form in forms.items():
            forward = lambda form=form: form(*inputs)  # noqa: E731
            calls[key] = forward_backward(form, inputs, [dy]) if backward else forward
        row: Row = {"H": hidden, "B x S": f"{batch} x {tokens}", "dtype": name}
        row["pass"] = "forward + backward" if backward else "forward"
        taken = bench.seconds(calls, repeats)
        yield row | _times(taken, floor="products", plain="two Conv2d", ours="ours")


def two_convolutions(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, **_: object) -> Tensor:
    """The published form: two Conv2d, each padded with one zero on the left."""
    columns = x.transpose(1, 2).unsqueeze(-1)
    c = F.conv2d(F.pad(columns, (0, 0, 1, 0)), w1.unsqueeze(-1), b1)
    return F.conv2d(F.pad(c, (0, 0, 1, 0)), w2.unsqueeze(-1), b2).squeeze(-1).transpose(1, 2)


@case(
    "kernels/norm",
    formats=FORMATS,
    costs={"ours ms": 0.2},
    shape=((1024, "bf16"), (2048, "bf16"), (2048, "fp32")),
    device=("cpu",),
    repeats=(7,),
)
def norm(shape: tuple[int, str], device: str, repeats: int) -> Iterator[Row]:
    """The norm, alone and with the residual sum, forward + backward: ours and torch's."""
    (hidden, name), tokens, bench = shape, 4096, _Bench(device)
    x, residual, bypass, dy = (bench.random(tokens, hidden, dtype=DTYPES[name]) for _ in range(4))
    weight = bench.random(hidden, dtype=DTYPES[name])
    copy = torch.empty_like(x)
    both = [dy.detach(), bypass.detach()]
    # Tensors that must move: forward x, (residual, s,) y; backward dy, s, (bypass,) ds. A copy moves two.
    for ours, plain, inputs, upstream, moved in (
        (ops.rms_norm, plain_norm, [x, weight], both[:1], 5),
        (ops.add_rms_norm, plain_add_norm, [x, residual, weight], both, 8),
    ):
        calls: dict[str, Call] = {"floor": lambda: copy.detach().copy_(x.detach())}
        for key, form in (("plain", plain), ("ours", ours)):
            calls[key] = forward_backward(lambda *a, form=form: form(*a, epsilon=EPSILON), inputs, upstream)
        taken = bench.seconds(calls, repeats)
        taken["floor"] *= moved / 2
        row: Row = {"op": ours.__name__, "T x H": f"{tokens} x {hidden}", "dtype": name}
        yield row | _times(taken, floor="copy", plain="torch", ours="ours")


def plain_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Torch's norm."""
    return F.rms_norm(x, weight.shape, weight, epsilon)


def plain_add_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Torch's norm of x + residual, and the sum."""
    total = x + residual
    return plain_norm(total, weight, epsilon), total


@case("kernels/cross_entropy", formats=FORMATS, costs={"seconds": 0.2}, device=("cpu",), repeats=(3,))
def cross_entropy(device: str, repeats: int) -> Iterator[Row]:
    """Head and cross-entropy, 2,048 tokens, bf16: ours and all logits at once, with time and memory."""
    bench, tokens, hidden, dtype = _Bench(device), 2048, 1024, torch.bfloat16
    h = bench.random(tokens, hidden, dtype=dtype)
    weight = bench.random(VOCABULARY, hidden, dtype=dtype, scale=0.02)
    targets = torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(0))
    targets = targets.to(bench.torch_device)
    main = torch.ones(VOCABULARY, hidden, device=bench.torch_device)
    chunk = h.detach()[:512]
    logits = torch.empty(512, VOCABULARY, dtype=dtype, device=bench.torch_device).normal_()

    def floor() -> None:
        for part in torch.arange(VOCABULARY).split(4096):
            words = slice(int(part[0]), int(part[-1]) + 1)
            w, p = weight.detach()[words], logits[:, words]
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

    forms = {
        "logits, then F.cross_entropy; dW bf16": plain,
        "ours; dW bf16": ours,
        "ours, into the fp32 main gradient": ours_main,
    }
    taken = bench.seconds({"floor": floor, **forms}, repeats)
    bare = taken.pop("floor") * tokens / 512
    memory = {name: bench.extra_bytes(form) for name, form in forms.items()}
    seconds, whole = next(iter(taken.values())), next(iter(memory.values()))
    for name, own in taken.items():
        row: Row = {"form": name, "seconds": own, "of plain": own / seconds, "6THV floor / time": bare / own}
        # With an allocator that keeps its memory (see docs/benchmarks-kernels.md) the process does not grow.
        if (extra := memory[name]) is not None:
            row |= {"extra MB": extra / 1e6} | ({"of plain's": extra / whole} if whole else {})
        yield row


@case(
    "kernels/layer",
    formats=FORMATS,
    costs={"ours ms": 0.2},
    tokens=(1024, 2048),
    device=("cpu",),
    repeats=(5,),
)
def layer(tokens: int, device: str, repeats: int) -> Row:
    """A layer of Yuan2-2B, forward + backward: ours, and the same with Conv2d and torch's norms."""
    bench, dtype, config = _Bench(device), torch.bfloat16, load_model("configs/model/yuan2-2b.yaml")
    block = next(iter(bench.layer(config, dtype).blocks.values()))
    x = bench.random(1, tokens, config.hidden_size, dtype=dtype)
    dy = bench.random(1, tokens, config.hidden_size, dtype=dtype, grad=False)
    positions = torch.arange(tokens, device=bench.torch_device).unsqueeze(0)
    tables = rotary_tables(config, positions, length=tokens, dtype=dtype)
    step = forward_backward(lambda x, *_: block(x, tables), [x, *block.parameters()], [dy])

    def plain() -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(block.filter, "op", two_convolutions))
            norms = {"rms_norm": plain_norm, "add_rms_norm": plain_add_norm}
            stack.enter_context(mock.patch.multiple(ops, **norms))
            step()

    taken = bench.seconds({"plain": plain, "ours": step}, repeats)
    row: Row = {"layer": "yuan2-2b", "B x S": f"1 x {tokens}", "dtype": "bf16"}
    return row | _times(taken, plain="Conv2d and torch's norms", ours="ours")


@case("kernels/bf16", formats=FORMATS, tokens=(1024,), repeats=(3,))
def bf16(tokens: int, repeats: int) -> Iterator[Row]:
    """bf16 beside fp32 on a CPU: one product in each order of operands, and a layer."""
    bench = _Bench("cpu")
    x, dy, square = (bench.random(n, 1024, dtype=torch.float32, grad=False) for n in (512, 512, 1024))

    def beside(what: str, calls: dict[str, Call]) -> Row:
        taken = bench.seconds(calls, repeats)
        row: Row = {"what": what}
        row |= {f"{column} ms": seconds * 1e3 for column, seconds in taken.items()}
        return row | {"bf16 / fp32": taken["ours bf16"] / taken["ours fp32"]}

    orders = (("x W^T, 512 x 1024 x 1024", x, square), ("dy W", dy, square.T), ("dy^T x", dy.T, x.T))
    for name, left, right in orders:
        low = left.bfloat16(), right.bfloat16()
        calls: dict[str, Call] = {
            "torch bf16": lambda low=low: torch.mm(low[0], low[1].T),
            "ours bf16": lambda low=low: products.linear(*low),
            "ours fp32": lambda left=left, right=right: products.linear(left, right),
        }
        yield beside(name, calls)
    config = load_model("configs/model/yuan2-2b.yaml")
    config = replace(config, hidden_size=1024, num_attention_heads=16, ffn_hidden_size=4096)
    steps: dict[str, Call] = {}
    for name, dtype in DTYPES.items():
        model = bench.layer(config, dtype)
        x = bench.random(1, tokens, 1024, dtype=dtype)
        dy = bench.random(1, tokens, 1024, dtype=dtype, grad=False)
        steps[f"ours {name}"] = forward_backward(lambda x, *_, m=model: m(x), [x, *model.parameters()], [dy])
    yield beside(f"a layer, H 1024, 1 x {tokens}, forward + backward", steps)
