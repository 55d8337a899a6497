"""Measures the seconds and bytes of the model's units on this machine's device, for a profile.

Each unit (embedding, layer, head) is built, sharded and run as the engine does it. What a stage takes
besides its units (for caches that have gone cold since its last work, or a first launch on a card) is no part
of any unit's seconds. It follows from a single layer and several in a row.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from yuan_kernels import ops

from yuan_train.config.devices import Simulated, find_card
from yuan_train.config.model import ModelConfig, sharding_of
from yuan_train.config.plan import PROCESSOR
from yuan_train.config.profile import ProfileEntry, StageStart, UnitProfile
from yuan_train.config.run import DataConfig, OptimizerConfig, Recompute
from yuan_train.models.transformer import Transformer, choose_ops, compile_blocks, initial_rows
from yuan_train.parallel.apply import init_shard, remove_experts
from yuan_train.parallel.device import (
    Device,
    can_track_memory,
    held_bytes,
    keep_freed_memory,
    name_and_memory,
    peak_memory_bytes,
    release_free_memory,
    reset_peak_memory,
)
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.gradients import DeferredGrads, FlatBucket, add_embedding_rows, add_weight_grads
from yuan_train.parallel.grid import Bucket
from yuan_train.parallel.groups import Groups, one_communicator
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.tensor import Meanwhile, ShardSpec, apply_tensor_parallel, shard_parameters
from yuan_train.parallel.zero import OwnedState
from yuan_train.train.job import type_of
from yuan_train.train.stage import MicroBatch, StageRunner, StageSettings, make_micro_batch, resets_after
from yuan_train.train.step import Optimizer

SECONDS_PER_UNIT = 1.5
"""How long each unit is repeated, so that all cards measured together are busy all the time."""

MIN_REPEATS = 5
"""Of each unit, in all passes."""

TRIM_FRACTION = 0.05
"""Fraction of the repeats left out at either end. The mean of the rest predicts a step, which is a sum over
many forwards and backwards, some of them slowed by other load; the median would ignore that load."""

MAX_LAYERS, MAX_STATE_BYTES = 4, 2 << 30
"""Layers that are run in a row at most; on a CPU, bytes of their weights, gradients and optimizer states."""

KEPT_NUMBERS = 32
"""For each hidden number of each token, what a layer keeps for its backward at most (23 in Yuan)."""

IN_FLIGHT = 4
"""Micro-batches in flight when the bytes that each keeps are measured."""


@dataclass(frozen=True, kw_only=True)
class ProfileCase:
    """One case of a profile: the model, the shape of a micro-batch, and how the model runs on it."""

    model: ModelConfig
    sequence_length: int
    micro_batch_size: int
    recompute: str
    dtype: torch.dtype
    device: Device
    slowdown: float = 1.0
    """Of a simulated card, whose work is slowed as in training."""
    width: int = 1
    """Ranks of the tensor-parallel group."""
    position: int = 0
    """This rank's tensor rank."""
    group: dist.ProcessGroup | None = None
    """The tensor-parallel group; None with one rank."""
    seconds_per_unit: float = SECONDS_PER_UNIT
    least_repeats: int = MIN_REPEATS
    data: DataConfig | None = None
    """What the run resets at document ends; None: nothing."""
    compile: bool = False
    """Whether the layers are compiled (`train.compile`)."""


@dataclass(frozen=True)
class MeasuredCase:
    """What is measured of a case in one pass."""

    entry: ProfileEntry
    """Its seconds include a stage's start: those of the layers, their share of it."""
    single_layer: tuple[float, float]
    """Seconds of forward and backward of a stage of one layer."""


def measure_case(case: ProfileCase, *, device_type: str) -> MeasuredCase:
    """Measure embedding, layers and head, each as the engine runs it on one micro-batch.

    Collective over the tensor-parallel group.
    """
    entry = ProfileEntry(
        device_type=device_type,
        tensor_parallel=case.width,
        micro_batch_size=case.micro_batch_size,
        recompute=cast(Recompute, case.recompute),
        embedding=_measure(case, layers=0, embedding=True),
        layers=(_measure(case, layers=num_layers_in_a_row(case)),),
        head=_measure(case, layers=0, head=True),
        bare_layer=_measure(case, layers=num_layers_in_a_row(case), bare=True)
        if case.model.num_experts and not case.compile
        else None,
    )
    own = entry.layers[0]
    single = own.forward_seconds, own.backward_seconds
    if num_layers_in_a_row(case) > 1:
        release_free_memory(case.device)
        single = _compute_seconds(_Unit(case, layers=1))
    return MeasuredCase(entry, single)


def measure_reserved(case: ProfileCase, kinds: Sequence[str] = ("",)) -> float | None:
    """Bytes that a process holds besides the model; None where they cannot be told.

    On a CPU Python, libraries and their buffers; on a card all that is not free, after a small step and with
    one communicator, once torch has given back what it can: the context, kernels, the communicator's buffers
    and workspaces. The driver does not say whose that is, so other processes on the card count too. To be
    called before any other measurement, with everything imported that training imports. Collective over all
    ranks, of whose cards `kinds` are as `one_communicator` has them.
    """
    keep_freed_memory(case.device)
    if not can_track_memory(case.device):
        return None
    with one_communicator(case.device, kinds):
        _warm_up(case)
        release_free_memory(case.device)
        card = case.device.memory()
    return float(held_bytes(case.device) if card is None else card.total - card.free)


def _warm_up(case: ProfileCase) -> None:
    """Take two steps of a one-layer model."""
    unit = _Unit(case, layers=1, embedding=True, head=True)
    optimizer = Optimizer([unit.state], OptimizerConfig(learning_rate=1.0))
    for _ in range(2):
        unit.backward(unit.forward())
        optimizer.step(0.0)


def num_layers_in_a_row(case: ProfileCase) -> int:
    """Layers that are run in a row: as many as the model has, or as memory and patience allow.

    On a card a layer by itself would take the time of its host, which in a row works ahead.
    """
    state = 16 * case.model.layer_parameters // case.width
    card = case.device.memory()
    if card is None:
        fitting = MAX_STATE_BYTES // state
    else:
        hidden = case.micro_batch_size * case.sequence_length * case.model.hidden_size
        fitting = card.total // 2 // (state + IN_FLIGHT * KEPT_NUMBERS * case.dtype.itemsize * hidden)
    return max(1, min(case.model.num_layers, MAX_LAYERS, fitting))


def name_of(device: Device | torch.device) -> str:
    """The catalogue's name of a card, or the driver's if the catalogue does not have it; `CPU` on a CPU."""
    if isinstance(device, torch.device):
        reported = name_and_memory(device)
        return PROCESSOR if reported is None else find_card(*reported) or reported[0]
    card = device.facts()
    return PROCESSOR if card is None else type_of(card) or card.name


def machine_name() -> str:
    """The processor's name, as the operating system gives it, and its number of cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def now(device: Device) -> float:
    """Seconds on a clock, when the device has finished its work."""
    device.finish()
    return device.now()


def make_part(
    case: ProfileCase, model: ModelConfig, *, bare: bool = False, meanwhile: Meanwhile = None, **what: Any
) -> tuple[Transformer, dict[str, Shard]]:
    """A part of a model (`what` as `Transformer` takes it; `bare`: no rank's experts) and its shards:
    initialised, and with the collectives of the tensor-parallel group, which `meanwhile` runs beside."""
    choose_ops(model, case.device.torch, case.dtype)
    spec = ShardSpec(*sharding_of(model), case.position, case.width, (0, 0) if bare else None)
    with torch.device("meta"):
        part = Transformer(model, **what, dtype=case.dtype)
    shards = shard_parameters(part, spec, device=case.device.torch)
    for name, parameter in part.named_parameters():
        init_shard(name, parameter, shards[name], partial(initial_rows, model, seed=0))
    if case.group is not None:
        apply_tensor_parallel(part, spec, case.group, meanwhile=meanwhile)
    return part, shards


class _RandomSource:
    """In place of the data: the same random tokens at every call."""

    def __init__(self, case: ProfileCase) -> None:
        shape = (case.micro_batch_size, case.sequence_length)
        tokens = torch.from_numpy(np.random.default_rng(0).integers(case.model.vocab_size, size=shape))
        resets = {"eod_id": None} if case.data is None else resets_after(case.data, 0)
        self._batch = make_micro_batch(tokens, tokens, resets=resets, device=case.device)

    def take(self, micro_batch: int) -> MicroBatch:
        """Tokens and targets [B, S]."""
        return self._batch


@dataclass(frozen=True)
class _InFlight:
    """A micro-batch between its forward and its backward."""

    hidden_BSH: torch.Tensor | None
    output: torch.Tensor


class _Unit:
    """A part of the model by itself, with gradients and optimizer state, as a stage of a plan has them: some
    layers (`bare` of experts), or with `ends` the embedding or the head."""

    def __init__(self, case: ProfileCase, *, layers: int, bare: bool = False, **ends: bool) -> None:
        self.case = case
        deferred = DeferredGrads(reduces_inputs=case.group is not None)
        what = {"layers": (0, layers), "embedding": False, "head": False, **ends, "recompute": case.recompute}
        self.part, shards = make_part(case, case.model, bare=bare, meanwhile=deferred.run_queued, **what)
        if bare:
            remove_experts(self.part)
        add_embedding_rows(self.part)
        if case.compile:
            # Another case's graphs count towards the compiler's limit of graphs for one function.
            torch.compiler.reset()
            compile_blocks(self.part)
        else:
            add_weight_grads(self.part, deferred, sharding_of(case.model)[0])
        ranks = tuple(range(case.width))
        parameters = {name: p for name, p in self.part.named_parameters() if p.numel()}
        self.bucket = FlatBucket(Bucket(("unit",), (ranks,)), parameters, shards, rank=case.position)
        self.state = OwnedState(self.bucket, Groups({}, {}), None)
        self._runner = StageRunner(
            self.part,
            _RandomSource(case),
            StageSettings(
                micro_batch_size=case.micro_batch_size,
                seed=0,
                resets=case.data is not None and case.data.resets,
            ),
            device=case.device,
            deferred=deferred,
        )
        tokens = case.micro_batch_size * case.sequence_length
        self._runner.begin(first_sample=0, num_terms=tokens, num_sequences=1, scale=1.0)
        # Not zeros, on which the hardware runs faster than on real numbers.
        shape = (case.micro_batch_size, case.sequence_length, case.model.hidden_size)
        self._hidden_BSH = torch.randn(*shape, device=case.device.torch).to(case.dtype)

    @property
    def output_bytes(self) -> int:
        """Bytes of a hidden state; 0 for the head, whose output is the loss."""
        return 0 if self.part.has_head else self._hidden_BSH.nbytes

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state, as the engine holds them; each buffer once."""
        buffers = [self.bucket.weights, self.bucket.gradient]
        for shard in self.state.shards:
            buffers += [shard.master, shard.exp_avg, shard.exp_avg_sq]
        return sum({buffer.data_ptr(): buffer.nbytes for buffer in buffers}.values())

    def receive(self) -> torch.Tensor | None:
        """A hidden state [B, S, H], as if from the stage before; None for the embedding. Loads the data."""
        self._runner.load(0)
        return None if self.part.has_embedding else self._hidden_BSH.clone().requires_grad_()

    def forward(self, hidden_BSH: torch.Tensor | None = None) -> _InFlight:
        """Run the forward of a micro-batch on `hidden_BSH`, or on what `receive` gives."""
        hidden_BSH = self.receive() if hidden_BSH is None else hidden_BSH
        return _InFlight(hidden_BSH, self._runner.forward(0, hidden_BSH))

    def backward(self, in_flight: _InFlight) -> None:
        """Run the backward of a micro-batch; except at the loss, the output's gradient is a random tensor."""
        torch.autograd.backward(in_flight.output, None if self.part.has_head else self._hidden_BSH)


def _measure(case: ProfileCase, *, layers: int, **part: bool) -> UnitProfile:
    """Measure one unit, a `part` as `_Unit` takes it; of `layers` layers in a row, the mean."""
    release_free_memory(case.device)
    unit = _Unit(case, layers=layers, **part)
    count = max(layers, 1)
    activation, transient = _activation_bytes(unit)
    forward, backward = _compute_seconds(unit)
    return UnitProfile(
        forward_seconds=forward / count,
        backward_seconds=backward / count,
        state_bytes=unit.state_bytes / count,
        activation_bytes=activation / count,
        output_bytes=unit.output_bytes,
        transient_bytes=transient,
    )


def _compute_seconds(unit: _Unit) -> tuple[float, float]:
    """Trimmed mean seconds of forward and backward."""
    stopwatch = Stopwatch(unit.case.device, simulated=Simulated(unit.case.slowdown))
    _time_once(unit, stopwatch)
    end = time.perf_counter() + unit.case.seconds_per_unit
    pairs: list[tuple[float, float]] = []
    while len(pairs) < unit.case.least_repeats or not all_agree(time.perf_counter() > end, unit.case):
        pairs.append(_time_once(unit, stopwatch))
    forwards, backwards = zip(*pairs, strict=True)
    return trimmed_mean(forwards), trimmed_mean(backwards)


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without TRIM_FRACTION of the values at either end."""
    trimmed = int(TRIM_FRACTION * len(values))
    return statistics.fmean(sorted(values)[trimmed : len(values) - trimmed])


def _time_once(unit: _Unit, stopwatch: Stopwatch) -> tuple[float, float]:
    """Seconds of one forward and its backward."""
    hidden_BSH = unit.receive()
    with ops.variable_held():
        with stopwatch.running():
            in_flight = unit.forward(hidden_BSH)
        forward = stopwatch.read()
        with stopwatch.running():
            unit.backward(in_flight)
    return forward, stopwatch.read()


def all_agree(enough: bool, case: ProfileCase) -> bool:
    """Whether it is `enough` for every rank of the tensor-parallel group; collective over it."""
    if case.group is None:
        return enough
    votes = torch.tensor(int(enough), device=case.device.torch)
    dist.all_reduce(votes, dist.ReduceOp.MIN, group=case.group)
    return bool(votes.item())


def _activation_bytes(unit: _Unit) -> tuple[float, float]:
    """Bytes that a micro-batch keeps from forward to backward, without its output; and transient bytes.

    Both follow from the peak of the device's memory with one micro-batch in flight and with several. The
    former is at least what autograd saves; where memory cannot be tracked, it is that, and the latter 0.
    """
    saved = float(_saved_bytes(unit))
    if not can_track_memory(unit.case.device):
        return saved, 0.0
    one, several = _peak_bytes(unit, in_flight=1), _peak_bytes(unit, in_flight=IN_FLIGHT)
    kept = max((several - one) / (IN_FLIGHT - 1), saved + unit.output_bytes)
    return kept - unit.output_bytes, max(several - IN_FLIGHT * kept, 0.0)


def _peak_bytes(unit: _Unit, *, in_flight: int) -> float:
    """Peak bytes of alternating forwards and backwards with `in_flight` micro-batches in flight."""
    device = unit.case.device
    release_free_memory(device)
    idle = held_bytes(device)
    reset_peak_memory(device)
    waiting = [unit.forward() for _ in range(in_flight - 1)]
    for _ in range(IN_FLIGHT):
        waiting.append(unit.forward())
        unit.backward(waiting.pop(0))
    return float(peak_memory_bytes(device) - idle)


def _saved_bytes(unit: _Unit) -> int:
    """Bytes that autograd saves from the forward to the backward, each storage once.

    The input is counted; neither weights are, nor the output, which is the next unit's input.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in unit.part.parameters()}
    saved: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        in_flight = unit.forward()
    saved.pop(in_flight.output.untyped_storage().data_ptr(), None)
    if in_flight.hidden_BSH is not None:
        # A recomputed layer saves its input where the hook does not see it.
        storage = in_flight.hidden_BSH.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
    return sum(saved.values())


PASS_SECONDS, MOST_PASSES = 0.5, 3
"""A CPU's speed may change from one second to the next, most of all a virtual one's. There a unit's time is
divided into passes over all cases, so that all see the same changes."""


def num_passes(case: ProfileCase) -> int:
    """Passes over all cases in which the units' seconds are measured."""
    if case.device.is_card:
        return 1
    return max(1, min(MOST_PASSES, int(case.seconds_per_unit / PASS_SECONDS)))


def of_pass(case: ProfileCase, passes: int) -> ProfileCase:
    """A case's part of a pass."""
    repeats = max(2, case.least_repeats // passes)
    return replace(case, seconds_per_unit=case.seconds_per_unit / passes, least_repeats=repeats)


def make_entry(case: ProfileCase, passes: Sequence[MeasuredCase]) -> ProfileEntry:
    """The mean seconds of a case's passes, and the first one's bytes.

    n layers in a row take a stage's start and n layers, a single one the start and one layer.
    """
    entries = [measured.entry for measured in passes]
    bare = [entry.bare_layer for entry in entries if entry.bare_layer is not None]
    count, row = num_layers_in_a_row(case), _mean([entry.layers[0] for entry in entries])
    single = list(map(statistics.fmean, zip(*(one.single_layer for one in passes), strict=True)))
    start = StageStart(
        forward_seconds=_start_seconds(single[0], row.forward_seconds, count),
        backward_seconds=_start_seconds(single[1], row.backward_seconds, count),
    )
    return replace(
        entries[0],
        embedding=_without_start(_mean([entry.embedding for entry in entries]), start, 1),
        layers=(_without_start(row, start, count),),
        head=_without_start(_mean([entry.head for entry in entries]), start, 1),
        start=start,
        bare_layer=_without_start(_mean(bare), start, count) if bare else None,
    )


def _start_seconds(single: float, mean: float, count: int) -> float:
    """What a stage takes besides its layers, from the seconds of a single one and the mean of several. Beside
    other load a single one may take longer than all: a layer keeps a tenth of its mean."""
    found = max(single - mean, 0.0) * count / (count - 1) if count > 1 else 0.0
    return min(found, 0.9 * count * mean)


def _without_start(unit: UnitProfile, start: StageStart, count: int) -> UnitProfile:
    """The mean of `count` units in a row without their share of a stage's start."""
    return replace(
        unit,
        forward_seconds=max(unit.forward_seconds - start.forward_seconds / count, 0.0),
        backward_seconds=max(unit.backward_seconds - start.backward_seconds / count, 0.0),
    )


def _mean(units: Sequence[UnitProfile]) -> UnitProfile:
    return replace(
        units[0],
        forward_seconds=statistics.fmean(unit.forward_seconds for unit in units),
        backward_seconds=statistics.fmean(unit.backward_seconds for unit in units),
    )
