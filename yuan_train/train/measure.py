"""Times and sizes of the model's units on this machine's card: what a profile is made of."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from yuan_train.config.devices import CATALOGUE
from yuan_train.config.model import ModelConfig
from yuan_train.config.profile import LinkProfile, ProfileEntry, UnitProfile
from yuan_train.config.run import Recompute
from yuan_train.model.transformer import Transformer, init_weights
from yuan_train.parallel.gradients import FlatBucket
from yuan_train.parallel.grid import Bucket
from yuan_train.parallel.groups import Groups
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.zero import WholeState

OWN_SOURCE = "yuan-train profile"
"""By this source the planner (planner/timing.py) knows what these bytes hold and what they do not."""

SECONDS_PER_UNIT = 1.0
"""How long each unit is repeated; the median is taken."""

FEWEST_REPEATS, MOST_REPEATS = 5, 200

LINK_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
LINK_REPEATS = 7


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


def measure_links(
    names: Sequence[str], *, device: torch.device, sizes: Sequence[int] = LINK_SIZES
) -> tuple[LinkProfile, ...]:
    """Every directed link between the ranks by size of message; collective over all ranks.

    One pair at a time, the others wait. The target answers a message with a byte, whose way back (half the
    time of a byte there and back) is taken off.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    links: list[LinkProfile] = []
    for source in range(world_size):
        for target in range(world_size):
            if source == target:
                continue
            dist.barrier()
            times = torch.zeros(len(sizes), dtype=torch.float64)
            if rank in (source, target):
                byte = _round_trips(1, source, target, device)
                times = torch.tensor([_round_trips(size, source, target, device) for size in sizes])
                times = (times - byte / 2).clamp(min=byte / 2).to(torch.float64)
            times = times.to(device)
            dist.broadcast(times, source)
            seconds = tuple(times.flip(0).cummin(0).values.flip(0).tolist())
            link = LinkProfile(
                from_=names[source], to=names[target], message_bytes=tuple(map(float, sizes)), seconds=seconds
            )
            links.append(link)
    return tuple(links)


def _round_trips(size: int, source: int, target: int, device: torch.device) -> float:
    """Median seconds of a message there and a byte back."""
    message = torch.randint(255, (size,), dtype=torch.uint8, device=device)
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
    times: list[float] = []
    for _ in range(2 + LINK_REPEATS):
        start = _now(device)
        if dist.get_rank() == source:
            dist.send(message, target)
            dist.recv(answer, target)
        else:
            dist.recv(message, source)
            dist.send(answer, source)
        times.append(_now(device) - start)
    return statistics.median(times[2:])


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
    parameters = dict(part.named_parameters())
    shards = {name: Shard(tuple(parameter.shape)) for name, parameter in parameters.items()}
    bucket = FlatBucket(Bucket(("unit",), ((0,),)), parameters, shards, rank=0)
    state = WholeState(bucket, Groups({}, {}))
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
        state_bytes=_state_bytes(bucket, state),
        activation_bytes=_activation_bytes(forward, part, hidden_BSH),
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


def _state_bytes(bucket: FlatBucket, state: WholeState) -> int:
    """Weights, gradients and optimizer state, as the engine holds them; each buffer once."""
    buffers = [bucket.weights, bucket.gradient]
    for shard in state.shards:
        buffers += [shard.master, shard.exp_avg, shard.exp_avg_sq]
    return sum({buffer.data_ptr(): buffer.nbytes for buffer in buffers}.values())


def _activation_bytes(
    forward: Callable[[], tuple[torch.Tensor, torch.Tensor | None]], part: Transformer, hidden: torch.Tensor
) -> int:
    """Bytes that autograd keeps from the forward to the backward, each storage once: the input, but neither
    weights nor the output, which is the next unit's input."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}
    # A recomputed layer keeps its input where the hook below does not see it.
    storage = hidden.untyped_storage()
    kept: dict[int, int] = {} if part.has_embedding else {storage.data_ptr(): storage.nbytes()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output, _ = forward()
    kept.pop(output.untyped_storage().data_ptr(), None)
    return sum(kept.values())
