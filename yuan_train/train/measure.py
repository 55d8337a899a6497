"""Times and sizes of the model's units on this machine's card: what a profile is made of.

Each unit is built, cut and run as the engine does it, at the pace of the card. A number of layers in a row
stands for one: a layer alone would find its weights still in the processor's caches.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from yuan_train.config.devices import CATALOGUE
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import PipelinePlan
from yuan_train.config.profile import LinkProfile, ProfileEntry, UnitProfile
from yuan_train.config.run import DataConfig, OptimizerConfig, Recompute, Source
from yuan_train.data.loader import Batch, Blend
from yuan_train.model.sharding import ROW_BLOCKS, SHARDING
from yuan_train.model.transformer import Transformer, initial_weight
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.gradients import FlatBucket
from yuan_train.parallel.grid import Bucket
from yuan_train.parallel.groups import Groups
from yuan_train.parallel.split import WeightQueue
from yuan_train.parallel.tensor import Cutting, cut_parameters, join_group
from yuan_train.parallel.zero import WholeState
from yuan_train.train.footprint import (
    begin_peak,
    can_follow,
    give_back_memory,
    held_bytes,
    keep_freed_memory,
    peak_memory_bytes,
)
from yuan_train.train.optimizer import Optimizer
from yuan_train.train.stage import StageRunner

SECONDS_PER_UNIT = 1.5
"""How long each unit is repeated, so that cards that are measured together work all the while."""

FEWEST_REPEATS = 5

TRIMMED = 0.05
"""Share of the repeats that is left out at either end. A step is a sum of many pieces of work: the mean of
the rest tells it, not the median, where some pieces meet other work on the machine."""

MOST_LAYERS, MOST_STATE_BYTES = 4, 2 << 30
"""Layers that are run in a row, and what their states may take."""

DEPTH = 4
"""Micro-batches in flight, to see what each keeps."""

LINK_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
LINK_REPEATS = 15


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is measured: the shape of a micro-batch, and how the model runs on it."""

    model: ModelConfig
    sequence_length: int
    micro_batch_size: int
    recompute: str
    dtype: torch.dtype
    device: torch.device
    slowdown: float = 1.0
    """Of a simulated card; its work is slowed as in training."""
    width: int = 1
    position: int = 0
    """This rank's among the `width` ranks of its tensor-parallel group."""
    group: dist.ProcessGroup | None = None
    seconds_per_unit: float = SECONDS_PER_UNIT
    data: DataConfig | None = None
    """What the run does where documents end; None: nothing."""


def measure_entry(setting: Setting, *, device_type: str) -> ProfileEntry:
    """Measure embedding, layer and head, each as the engine runs it on one micro-batch; collective over the
    tensor-parallel group."""
    return ProfileEntry(
        device_type=device_type,
        tensor_parallel=setting.width,
        micro_batch_size=setting.micro_batch_size,
        recompute=cast(Recompute, setting.recompute),
        embedding=_measure(setting, layers=0, embedding=True),
        layers=(_measure(setting, layers=_layers_in_a_row(setting)),),
        head=_measure(setting, layers=0, head=True),
    )


def measure_reserved(setting: Setting) -> float | None:
    """What a process holds beside the model: libraries, their buffers, Python. None on CUDA, where the
    catalogue's figure for the driver stands.

    To be called first; all that training loads must have been loaded, and is used once here.
    """
    keep_freed_memory(setting.device)
    if setting.device.type == "cuda" or not can_follow(setting.device):
        return None
    _warm_up(setting)
    give_back_memory(setting.device)
    return float(held_bytes(setting.device))


def _warm_up(setting: Setting) -> None:
    unit = _Unit(setting, layers=1, embedding=True, head=True)
    optimizer = Optimizer([unit.state], OptimizerConfig(learning_rate=1.0))
    for _ in range(2):
        unit.backward(unit.forward())
        optimizer.step(0.0)


def _layers_in_a_row(setting: Setting) -> int:
    most = MOST_STATE_BYTES // (16 * setting.model.layer_parameters // setting.width)
    return max(1, min(setting.model.num_layers, MOST_LAYERS, most))


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


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _RandomText:
    """Stands for the data: the same random tokens at every call."""

    def __init__(self, setting: Setting) -> None:
        shape = (setting.micro_batch_size, setting.sequence_length)
        tokens = np.random.default_rng(0).integers(setting.model.vocab_size, size=shape)
        self._batch = Batch(tokens, tokens)

    def batch(self, first: int, size: int) -> Batch:
        """Inputs and targets [B, S]."""
        return self._batch


@dataclass(frozen=True)
class _Held:
    """A micro-batch between its forward and its backward."""

    hidden_BSH: torch.Tensor | None
    output: torch.Tensor


class _Unit:
    """A part of the model on its own, with gradients and optimizer state, as a stage of a plan would be."""

    def __init__(self, setting: Setting, *, layers: int, embedding: bool = False, head: bool = False) -> None:
        self.setting = setting
        cutting = Cutting(SHARDING, ROW_BLOCKS, setting.position, setting.width)
        self.part = Transformer(
            setting.model,
            layers=(0, layers),
            embedding=embedding,
            head=head,
            recompute=setting.recompute,
            device="meta",
            dtype=setting.dtype,
        )
        shards = cut_parameters(self.part, cutting, device=setting.device)
        with torch.no_grad():
            for name, parameter in self.part.named_parameters():
                whole = initial_weight(setting.model, name, shards[name].shape, seed=0)
                parameter.copy_(shards[name].local(whole))
        if setting.group is not None:
            join_group(self.part, cutting, setting.group)
        ranks = tuple(range(setting.width))
        parameters = dict(self.part.named_parameters())
        self.bucket = FlatBucket(Bucket(("unit",), (ranks,)), parameters, shards, rank=setting.position)
        self.state = WholeState(self.bucket, Groups({}, {}))
        text = DataConfig(
            train=(Source(prefix="random"),),
            sequence_length=setting.sequence_length,
            reset_position_ids=False,
        )
        self._runner = StageRunner(
            self.part,
            PipelinePlan(micro_batch_size=setting.micro_batch_size, num_micro_batches=1, stages=()),
            setting.data or text,
            seed=0,
            eod_id=0,
            device=setting.device,
            queue=WeightQueue(),
        )
        tokens = setting.micro_batch_size * setting.sequence_length
        self._runner.begin(
            cast(Blend, _RandomText(setting)), first_sample=0, trained_tokens=tokens, scale=1.0
        )
        # Never zeros, which run faster than real numbers.
        shape = (setting.micro_batch_size, setting.sequence_length, setting.model.hidden_size)
        self._hidden_BSH = torch.randn(*shape, device=setting.device).to(setting.dtype)

    @property
    def output_bytes(self) -> int:
        return 0 if self.part.has_head else self._hidden_BSH.nbytes

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state, as the engine holds them; each buffer once."""
        buffers = [self.bucket.weights, self.bucket.gradient]
        for shard in self.state.shards:
            buffers += [shard.master, shard.exp_avg, shard.exp_avg_sq]
        return sum({buffer.data_ptr(): buffer.nbytes for buffer in buffers}.values())

    def receive(self) -> torch.Tensor | None:
        """A hidden state, as if from the stage before."""
        return None if self.part.has_embedding else self._hidden_BSH.clone().requires_grad_()

    def forward(self, hidden_BSH: torch.Tensor | None = None) -> _Held:
        hidden_BSH = self.receive() if hidden_BSH is None else hidden_BSH
        return _Held(hidden_BSH, self._runner.forward(0, hidden_BSH))

    def backward(self, held: _Held) -> None:
        torch.autograd.backward(held.output, None if self.part.has_head else self._hidden_BSH)


def _measure(setting: Setting, *, layers: int, embedding: bool = False, head: bool = False) -> UnitProfile:
    """One unit, or one of so many layers in a row."""
    give_back_memory(setting.device)
    unit = _Unit(setting, layers=layers, embedding=embedding, head=head)
    count = max(layers, 1)
    activation, transient = _bytes(unit)
    forward, backward = _seconds(unit)
    return UnitProfile(
        forward_seconds=forward / count,
        backward_seconds=backward / count,
        state_bytes=unit.state_bytes / count,
        activation_bytes=activation / count,
        output_bytes=unit.output_bytes,
        transient_bytes=transient,
    )


def _seconds(unit: _Unit) -> tuple[float, float]:
    """Mean seconds of forward and backward."""
    stopwatch = Stopwatch(unit.setting.device, slowdown=unit.setting.slowdown)
    _once(unit, stopwatch)
    end = time.perf_counter() + unit.setting.seconds_per_unit
    pairs: list[tuple[float, float]] = []
    while len(pairs) < FEWEST_REPEATS or not _all_agree(time.perf_counter() > end, unit.setting):
        pairs.append(_once(unit, stopwatch))
    forwards, backwards = zip(*pairs, strict=True)
    return _trimmed_mean(forwards), _trimmed_mean(backwards)


def _trimmed_mean(values: Sequence[float]) -> float:
    cut = int(TRIMMED * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _once(unit: _Unit, stopwatch: Stopwatch) -> tuple[float, float]:
    hidden_BSH = unit.receive()
    with stopwatch.running():
        held = unit.forward(hidden_BSH)
    forward = stopwatch.read()
    with stopwatch.running():
        unit.backward(held)
    return forward, stopwatch.read()


def _all_agree(enough: bool, setting: Setting) -> bool:
    """Whether it is enough for every rank of the group."""
    if setting.group is None:
        return enough
    votes = torch.tensor(int(enough), device=setting.device)
    dist.all_reduce(votes, dist.ReduceOp.MIN, group=setting.group)
    return bool(votes.item())


def _bytes(unit: _Unit) -> tuple[float, float]:
    """What a micro-batch keeps from its forward to its backward, its output apart, and what is held for a
    moment beside: by the card's memory at its peak, with one micro-batch in flight and with several.

    The former is never less than what autograd says it keeps.
    """
    counted = float(_counted_bytes(unit))
    if not can_follow(unit.setting.device):
        return counted, 0.0
    one, several = _peak_bytes(unit, in_flight=1), _peak_bytes(unit, in_flight=DEPTH)
    kept = max((several - one) / (DEPTH - 1), counted + unit.output_bytes)
    return kept - unit.output_bytes, max(several - DEPTH * kept, 0.0)


def _peak_bytes(unit: _Unit, *, in_flight: int) -> float:
    """Most bytes that forwards and backwards in turn take, so many micro-batches held."""
    device = unit.setting.device
    give_back_memory(device)
    empty = held_bytes(device)
    begin_peak(device)
    waiting = [unit.forward() for _ in range(in_flight - 1)]
    for _ in range(DEPTH):
        waiting.append(unit.forward())
        unit.backward(waiting.pop(0))
    return float(peak_memory_bytes(device) - empty)


def _counted_bytes(unit: _Unit) -> int:
    """What autograd keeps from the forward to the backward, each storage once: the input, but neither weights
    nor the output, which is the next unit's input."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in unit.part.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = unit.forward()
    kept.pop(held.output.untyped_storage().data_ptr(), None)
    if held.hidden_BSH is not None:
        # A recomputed layer keeps its input where the hook does not see it.
        storage = held.hidden_BSH.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
    return sum(kept.values())
