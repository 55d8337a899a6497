"""Seconds and bytes of each unit on one type of card: a measured entry, else a roofline estimate.

A measured entry always wins. What it lacks is derived from it where that is sound (another micro-batch size,
full recompute), and said in `note`; what cannot be derived is estimated from the catalogue.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from yuan_train.config.devices import DeviceType, Precision
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import ModelConfig
from yuan_train.config.profile import Profile, ProfileEntry, UnitProfile
from yuan_train.config.run import Recompute
from yuan_train.planner.workload import STATE_BYTES, ModelWork, StateBytes, UnitWork, model_work

# Policy, not measurement: what a well-tuned dense model commonly reaches of the stated peaks.
MATRIX_EFFICIENCY = 0.5
MEMORY_EFFICIENCY = 0.75
UNIT_OVERHEAD_SECONDS = 50e-6
"""Launching the kernels of one unit, each way."""

CUDA_LOGIT_ROWS = 2048
CPU_LOGIT_ROWS = 256
"""Tokens whose logits the loss holds at a time, as the kernels choose it; a card with `slowdown` is a CPU."""

Source = Literal["measured", "estimated"]


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """One unit of the model on one type of card, for one micro-batch; all that cost and memory need."""

    forward_seconds: float
    backward_seconds: float
    parameters: int
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    """Kept for each micro-batch in flight."""
    logit_bytes: float
    """The same, for the head's weight gradient."""
    transient_bytes: float
    """Held for one micro-batch at a time."""
    output_bytes: float

    @property
    def state_bytes(self) -> float:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class CardCosts:
    """All units (embedding, layers, head) on one type of card, and where the numbers come from."""

    units: tuple[UnitCost, ...]
    source: Source
    note: str
    update_bytes_per_second: float
    """Rate of the optimizer step's memory traffic."""


def check_profile(
    profile: Profile, model: ModelConfig, *, sequence_length: int, precision: Precision
) -> None:
    """Raise ConfigError unless the profile was measured for this model's depth, length and precision."""
    if profile.sequence_length != sequence_length:
        raise ConfigError(
            f"profile: measured at sequence_length {profile.sequence_length}, the run has {sequence_length}; "
            "measure again with this length"
        )
    if profile.precision is not None and profile.precision != precision:
        raise ConfigError(
            f"profile: measured in {profile.precision}, the run has train.precision {precision}; "
            "measure again in this precision"
        )
    for i, entry in enumerate(profile.entries):
        if len(entry.layers) not in (1, model.num_layers):
            raise ConfigError(
                f"profile: entries[{i}].layers: {len(entry.layers)} layers, "
                f"the model has {model.num_layers}; "
                "give one that stands for all, or one per layer"
            )


def card_costs(
    model: ModelConfig,
    *,
    sequence_length: int,
    micro_batch_size: int,
    precision: Precision,
    recompute: Recompute,
    type_name: str,
    device: DeviceType,
    profile: Profile | None,
) -> CardCosts:
    """Every unit's seconds and bytes on a card of this type. `recompute` is `none` or `full`, of the layers.

    The device must have a peak in `precision`, unless a profile entry covers it.
    """
    work = model_work(
        model,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        precision=precision,
        logit_rows=CPU_LOGIT_ROWS if device.slowdown is not None else CUDA_LOGIT_ROWS,
    )
    found = _measured(profile, type_name, micro_batch_size, recompute) if profile else None
    update_rate = MEMORY_EFFICIENCY * device.memory_bandwidth / (device.slowdown or 1.0)
    if found is not None:
        entry, note = found
        units = _from_profile(entry, work, STATE_BYTES[precision], recompute)
        return CardCosts(units=units, source="measured", note=note, update_bytes_per_second=update_rate)
    note = "estimated from the catalogue" + (
        f": the profile has no entry for {type_name} with recompute {recompute}" if profile else ""
    )
    units = _estimate(work, device, precision, recompute)
    return CardCosts(units=units, source="estimated", note=note, update_bytes_per_second=update_rate)


# --- measured --------------------------------------------------------------------------------------------


def _measured(
    profile: Profile, type_name: str, micro_batch_size: int, recompute: Recompute
) -> tuple[ProfileEntry, str] | None:
    """The entry for this card, derived from its neighbours if need be; None if there is nothing to go by."""
    for measured_as in (recompute, "none") if recompute == "full" else (recompute,):
        entries = sorted(
            (
                entry
                for entry in profile.entries
                if entry.device_type == type_name
                and entry.tensor_parallel == 1
                and entry.recompute == measured_as
            ),
            key=lambda entry: entry.micro_batch_size,
        )
        if not entries:
            continue
        entry, note = _at_size(entries, micro_batch_size)
        if measured_as != recompute:
            entry = replace(
                entry, layers=tuple(_recomputed(layer) for layer in entry.layers), recompute="full"
            )
            note += "; full recompute derived from an entry without"
        return entry, note
    return None


def _recomputed(layer: UnitProfile) -> UnitProfile:
    """The same layer under full recompute: its backward runs the forward first, only its input is kept."""
    return replace(
        layer,
        backward_seconds=layer.backward_seconds + layer.forward_seconds,
        activation_bytes=min(layer.output_bytes, layer.activation_bytes),
    )


def _at_size(entries: Sequence[ProfileEntry], size: int) -> tuple[ProfileEntry, str]:
    """The entry of a micro-batch size, on the line through the two nearest measured ones."""
    sizes = [entry.micro_batch_size for entry in entries]
    if size in sizes:
        return entries[sizes.index(size)], "measured"
    if len(entries) == 1:
        share = size / sizes[0]
        low = high = entries[0]
        note = f"scaled from micro_batch_size {sizes[0]}"
    else:
        after = min(max(bisect.bisect(sizes, size), 1), len(sizes) - 1)
        low, high = entries[after - 1], entries[after]
        share = (size - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        word = "interpolated" if sizes[0] < size < sizes[-1] else "extrapolated"
        note = f"{word} from micro_batch_size {sizes[after - 1]} and {sizes[after]}"

    def line(a: UnitProfile, b: UnitProfile) -> UnitProfile:
        def at(x: float, y: float) -> float:
            return share * x if low is high else max(0.0, x + share * (y - x))

        return UnitProfile(
            forward_seconds=at(a.forward_seconds, b.forward_seconds),
            backward_seconds=at(a.backward_seconds, b.backward_seconds),
            state_bytes=max(a.state_bytes, b.state_bytes),
            activation_bytes=at(a.activation_bytes, b.activation_bytes),
            output_bytes=at(a.output_bytes, b.output_bytes),
        )

    count = max(len(low.layers), len(high.layers))
    entry = replace(
        low,
        micro_batch_size=size,
        embedding=line(low.embedding, high.embedding),
        layers=tuple(line(low.layer(i), high.layer(i)) for i in range(count)),
        head=line(low.head, high.head),
    )
    return entry, note


def _from_profile(
    entry: ProfileEntry, work: ModelWork, state: StateBytes, recompute: Recompute
) -> tuple[UnitCost, ...]:
    """Seconds, states and activations as measured; what a profile does not hold (transients) from the work.

    A measured activation of the head holds the gradient that it keeps, so none is added.
    """
    layers = [entry.layer(i) for i in range(work.num_layers)]
    costs: list[UnitCost] = []
    for unit, measured in zip(work.units, (entry.embedding, *layers, entry.head), strict=True):
        again = unit.activation_bytes if recompute == "full" and unit is work.layer else 0.0
        costs.append(
            UnitCost(
                forward_seconds=measured.forward_seconds,
                backward_seconds=measured.backward_seconds,
                parameters=unit.parameters,
                parameter_bytes=measured.state_bytes * state.parameters / state.total,
                gradient_bytes=measured.state_bytes * state.gradients / state.total,
                optimizer_bytes=measured.state_bytes * state.optimizer / state.total,
                activation_bytes=measured.activation_bytes,
                logit_bytes=0.0,
                transient_bytes=unit.transient_bytes + again,
                output_bytes=measured.output_bytes,
            )
        )
    return tuple(costs)


# --- estimated -------------------------------------------------------------------------------------------


def _estimate(
    work: ModelWork, device: DeviceType, precision: Precision, recompute: Recompute
) -> tuple[UnitCost, ...]:
    peak = device.peak(precision)
    assert peak is not None, "a card without this precision gets no work"
    matrix_rate = MATRIX_EFFICIENCY * peak
    memory_rate = MEMORY_EFFICIENCY * device.memory_bandwidth / (device.slowdown or 1.0)
    state = STATE_BYTES[precision]

    def seconds(flops: float, traffic_bytes: float) -> float:
        return flops / matrix_rate + traffic_bytes / memory_rate + UNIT_OVERHEAD_SECONDS

    def cost(unit: UnitWork, *, again: bool) -> UnitCost:
        forward = seconds(unit.forward_flops, unit.forward_traffic_bytes)
        backward = seconds(unit.backward_flops, unit.backward_traffic_bytes)
        return UnitCost(
            forward_seconds=forward,
            backward_seconds=backward + (forward if again else 0.0),
            parameters=unit.parameters,
            parameter_bytes=float(state.parameters * unit.parameters),
            gradient_bytes=float(state.gradients * unit.parameters),
            optimizer_bytes=float(state.optimizer * unit.parameters),
            activation_bytes=unit.input_bytes if again else unit.activation_bytes,
            logit_bytes=unit.logit_bytes,
            transient_bytes=unit.transient_bytes + (unit.activation_bytes if again else 0.0),
            output_bytes=unit.output_bytes,
        )

    layer = cost(work.layer, again=recompute == "full")
    ends = [cost(unit, again=False) for unit in (work.embedding, work.head)]
    return (ends[0], *[layer] * work.num_layers, ends[1])
