"""Times and sizes of the model's units on this machine's card: what a profile is made of."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from yuan_train.config.devices import CATALOGUE
from yuan_train.config.model import ModelConfig
from yuan_train.config.profile import ProfileEntry, UnitProfile
from yuan_train.config.run import OptimizerConfig, Recompute
from yuan_train.model.transformer import Transformer, init_weights
from yuan_train.parallel.gradients import FlatBucket
from yuan_train.parallel.grid import Bucket
from yuan_train.train.optimizer import Optimizer

SECONDS_PER_UNIT = 1.0
"""How long each unit is repeated; the median is taken."""

FEWEST_REPEATS, MOST_REPEATS = 5, 200


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured: the shape of a micro-batch, and how the model runs on it."""

    model: ModelConfig
    sequence_length: int
    micro_batch_size: int
    recompute: str
    dtype: torch.dtype
    device: torch.device


def measure_entry(setting: Setting, *, device_type: str) -> ProfileEntry:
    """Measure embedding, layer and head, each as the engine runs it on one micro-batch."""
    return ProfileEntry(
        device_type=device_type,
        micro_batch_size=setting.micro_batch_size,
        recompute=cast(Recompute, setting.recompute),
        embedding=_measure(setting, _part(setting, layers=(0, 0), embedding=True)),
        layers=(_measure(setting, _part(setting, layers=(0, 1))),),
        head=_measure(setting, _part(setting, layers=(0, 0), head=True)),
    )


def scale_entry(entry: ProfileEntry, *, device_type: str, slowdown: float) -> ProfileEntry:
    """The entry of a simulated card that takes `slowdown` times as long as the measured one."""

    def scale(unit: UnitProfile) -> UnitProfile:
        return UnitProfile(
            forward_seconds=unit.forward_seconds * slowdown,
            backward_seconds=unit.backward_seconds * slowdown,
            state_bytes=unit.state_bytes,
            activation_bytes=unit.activation_bytes,
            output_bytes=unit.output_bytes,
        )

    return ProfileEntry(
        device_type=device_type,
        tensor_parallel=entry.tensor_parallel,
        micro_batch_size=entry.micro_batch_size,
        recompute=entry.recompute,
        embedding=scale(entry.embedding),
        layers=tuple(map(scale, entry.layers)),
        head=scale(entry.head),
    )


def name_of(device: torch.device) -> str:
    """The catalogue's name of a card, or the driver's; a processor's name on a CPU."""
    if device.type != "cuda":
        return "CPU"
    name = torch.cuda.get_device_name(device)
    memory_gb = torch.cuda.get_device_properties(device).total_memory / 1e9
    words = name.replace("NVIDIA ", "").replace("Tesla ", "").replace("GeForce ", "")
    near = [
        known
        for known, card in CATALOGUE.items()
        if words.replace(" ", "-").startswith(known.split("-")[0])
        and abs(card.memory / 1e9 - memory_gb) < 0.15 * memory_gb
    ]
    return near[0] if len(near) == 1 else name


def machine_name() -> str:
    """The processor, as the operating system calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def _part(
    setting: Setting, *, layers: tuple[int, int], embedding: bool = False, head: bool = False
) -> Transformer:
    return Transformer(
        setting.model,
        layers=layers,
        embedding=embedding,
        head=head,
        recompute=setting.recompute,
        device=setting.device,
        dtype=setting.dtype,
    )


def _measure(setting: Setting, part: Transformer) -> UnitProfile:
    """Forward and backward of one part on random data; never zeros, which run faster than real numbers."""
    init_weights(part, seed=0)
    bucket = FlatBucket(Bucket(("unit",), (0,)), dict(part.named_parameters()))
    optimizer = Optimizer([bucket], OptimizerConfig(learning_rate=1e-4))
    shape = (setting.micro_batch_size, setting.sequence_length)
    tokens_BS = torch.randint(setting.model.vocab_size, shape, device=setting.device)
    hidden_BSH = torch.randn(*shape, setting.model.hidden_size, device=setting.device).to(setting.dtype)

    def forward() -> tuple[torch.Tensor, torch.Tensor | None]:
        x = tokens_BS if part.has_embedding else hidden_BSH.detach().requires_grad_()
        output = part(x)
        if not part.has_head:
            return output, hidden_BSH
        return part.loss(output, tokens_BS) / tokens_BS.numel(), None

    forward_seconds, backward_seconds = _time(forward, setting.device)
    return UnitProfile(
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        state_bytes=_state_bytes(bucket, optimizer, setting.dtype),
        activation_bytes=_activation_bytes(forward, part),
        output_bytes=0 if part.has_head else hidden_BSH.numel() * hidden_BSH.element_size(),
    )


def _time(
    forward: Callable[[], tuple[torch.Tensor, torch.Tensor | None]], device: torch.device
) -> tuple[float, float]:
    """Median seconds of forward and backward."""
    forwards: list[float] = []
    backwards: list[float] = []
    for _ in range(2):
        torch.autograd.backward(*forward())
    end = time.perf_counter() + SECONDS_PER_UNIT
    while len(forwards) < MOST_REPEATS and (time.perf_counter() < end or len(forwards) < FEWEST_REPEATS):
        start = _now(device)
        output, gradient = forward()
        middle = _now(device)
        torch.autograd.backward(output, gradient)
        forwards.append(middle - start)
        backwards.append(_now(device) - middle)
    return statistics.median(forwards), statistics.median(backwards)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _state_bytes(bucket: FlatBucket, optimizer: Optimizer, dtype: torch.dtype) -> int:
    """Weights, gradients and optimizer state, as the engine holds them."""
    stored = [bucket.master, bucket.gradient, *optimizer.flat_states()]
    total = sum(tensor.numel() * tensor.element_size() for tensor in stored)
    rounded = dtype != bucket.master.dtype
    return total + (bucket.master.numel() * dtype.itemsize if rounded else 0)


def _activation_bytes(
    forward: Callable[[], tuple[torch.Tensor, torch.Tensor | None]], part: Transformer
) -> int:
    """Bytes that autograd keeps from the forward to the backward, weights left out, each storage once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output, _ = forward()
    kept.pop(output.untyped_storage().data_ptr(), None)
    return sum(kept.values()) + output.numel() * output.element_size()
