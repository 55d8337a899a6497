"""Seconds and bytes of each unit on a card, a tensor-parallel group and a stage, each looked up once.

A measured entry always takes precedence. What the profile lacks is derived from its entries where that is
sound (another micro-batch size, recompute), and `note` says so; the rest is a roofline estimate from the
catalogue.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from yuan_train.config import plan as plans
from yuan_train.config.cluster import Card
from yuan_train.config.devices import DeviceType, Precision
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import ModelConfig
from yuan_train.config.profile import Profile, ProfileEntry, StageStart, UnitProfile
from yuan_train.config.run import Recompute
from yuan_train.planner.costs import workload
from yuan_train.planner.costs.links import (
    Topology,
    all_gather_seconds,
    allreduce_seconds,
    make_topology,
    reduce_scatter_seconds,
)
from yuan_train.planner.costs.workload import (
    HalfShare,
    HostShare,
    PlanProblem,
    Replica,
    TensorGroup,
    host_share,
    is_wide,
    node_host_bytes,
    statistic_bytes,
    with_measured_reserve,
)

# Policy, not measurement: what a well-tuned dense model commonly reaches of the stated peaks.
SMALL_MATRIX_EFFICIENCY = 0.5
MEMORY_EFFICIENCY = 0.75
LARGE_MATRICES = (0.769, 3308)
"""What ever larger matrices come to, and the hidden size at which they reach half of that."""
UNIT_OVERHEAD_SECONDS = 50e-6
"""Launching the kernels of one unit, each way."""

CUDA_LOGIT_ROWS = 2048
CPU_LOGIT_ROWS = 256
"""Tokens whose logits the loss holds at a time, as the kernels choose it; a card with `slowdown` is a CPU."""

Source = Literal["measured", "estimated"]


def matrix_efficiency(hidden_size: int) -> float:
    """What matrix products of a model of this hidden size h reach of a card's stated peak.

    0.5 up to a hidden size of 6,144, and 0.769 h / (h + 3,308) above. Fitted to the step times of whole
    models of hidden size 2,304 to 25,600 on 32 to 3,072 A100, table 1 of Narayanan et al. 2021 (arXiv
    2104.04473); those above 6,144 have each matrix divided over 8 cards. Not fitted: Yuan 1.0 245B (arXiv
    2110.04725), 4 to 9 % over the measured step.
    """
    most, half = LARGE_MATRICES
    return max(SMALL_MATRIX_EFFICIENCY, most * hidden_size / (hidden_size + half))


@dataclass(frozen=True, kw_only=True)
class UnitCost:
    """One unit of the model on one type of card, for one micro-batch; all that cost and memory need."""

    forward_seconds: float
    backward_seconds: float
    parameters: int
    """That are trained: so many are reduced and stepped. `parameter_bytes` are of all."""
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    """Kept for each micro-batch in flight."""
    transient_bytes: float
    """Held for one micro-batch at a time."""
    output_bytes: float
    weight_seconds: float = 0.0
    """The weight-gradient part of the backward, for schedules that split it."""
    forward_collectives: int = 0
    """All-reduces of a hidden state over the tensor-parallel group that the seconds above do not include."""
    backward_collectives: int = 0
    divides_tokens: bool = False
    """Whether these are a reduce-scatter and an all-gather each (sequence parallelism)."""
    gathered_again: int = 0
    """All-gathers of a hidden state in the backward, besides."""
    critic: UnitCost | None = None
    """The unit of a critic that is trained beside it, whose states the bytes above include."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def state_bytes(self) -> float:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def share_of_layer(layer: UnitCost, half: HalfShare) -> UnitCost:
    """The costs of half a layer."""
    return UnitCost(
        forward_seconds=layer.forward_seconds * half.seconds,
        backward_seconds=layer.backward_seconds * half.seconds,
        parameters=round(layer.parameters * half.parameters),
        parameter_bytes=layer.parameter_bytes * half.weights,
        gradient_bytes=layer.gradient_bytes * half.parameters,
        optimizer_bytes=layer.optimizer_bytes * half.parameters,
        activation_bytes=layer.activation_bytes * half.activations,
        transient_bytes=layer.transient_bytes * half.transient,
        output_bytes=layer.output_bytes,
        weight_seconds=layer.weight_seconds * half.seconds,
        forward_collectives=half.forward_collectives,
        backward_collectives=half.backward_collectives,
        critic=None if layer.critic is None else share_of_layer(layer.critic, half),
    )


STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
"""What lasts of a unit from step to step."""


def value_model(model: ModelConfig) -> ModelConfig:
    """The model of PPO's critic beside a policy: the policy's with one number a token for a head."""
    return replace(model, output="value")


def with_critic(unit: UnitCost, critic: UnitCost) -> UnitCost:
    """The unit with a critic's beside it, which is trained on the same cards in turn with the policy: states
    add up, and of what both keep of a micro-batch the larger is there."""
    states = {name: getattr(unit, name) + getattr(critic, name) for name in STATES}
    kept = ("activation_bytes", "transient_bytes")
    largest = {name: max(getattr(unit, name), getattr(critic, name)) for name in kept}
    return replace(unit, **states, **largest, critic=critic)


def without_critic(unit: UnitCost) -> UnitCost:
    """The unit with its own states alone."""
    if unit.critic is None:
        return unit
    own = {name: getattr(unit, name) - getattr(unit.critic, name) for name in STATES}
    return replace(unit, **own, critic=None)


@dataclass(frozen=True, kw_only=True)
class CardCosts:
    """All units (embedding, layers, head) on one type of card, and where the numbers come from."""

    units: tuple[UnitCost, ...]
    source: Source
    note: str
    update_bytes_per_second: float
    """Rate of the optimizer step's memory traffic."""
    boundary_bytes: float
    """One hidden state at the end of a stage; 0 with an external profile, whose activations include it."""
    halves: tuple[HalfShare, HalfShare]
    """What attention and feed-forward take of a layer's costs."""
    start: StageStart = StageStart()
    """Of each stage, besides its units."""

    @cached_property
    def layer(self) -> UnitCost:
        """The first layer, with seconds and bytes averaged over all layers."""
        layers = self.units[1:-1]
        names = ("forward_seconds", "backward_seconds", *STATES, "activation_bytes", "transient_bytes")
        means = {name: statistics.fmean(getattr(unit, name) for unit in layers) for name in names}
        return replace(layers[0], **means)

    def with_head(self, head: UnitCost) -> CardCosts:
        """The same with another head."""
        return replace(self, units=(*self.units[:-1], head))


def check_profile(
    profile: Profile, model: ModelConfig, *, sequence_length: int, precision: Precision, compile: bool = False
) -> None:
    """Raise ConfigError if the profile says another shape, length, precision or compile than this run."""
    if model.lora is not None:
        raise ConfigError(
            "profile: all parameters are trained where it is measured, and adapters (lora) here; plan without"
        )
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
    if profile.compile != compile and (profile.compile or not profile.is_whole):
        measured = "compiled" if profile.compile else "plain"
        raise ConfigError(
            f"profile: measured with {measured} layers, the run has train.compile {str(compile).lower()}; "
            "measure again with this run"
        )
    for i, entry in enumerate(profile.entries):
        if len(entry.layers) not in (1, model.num_layers):
            raise ConfigError(
                f"profile: entries[{i}].layers: {len(entry.layers)} layers, the model has "
                f"{model.num_layers}; give one for all layers, or one per layer"
            )
        found = entry.layer(0).state_bytes / workload.STATE_BYTES[precision].total
        # Other tools, whose states may be others, name no model; buckets may be somewhat longer.
        ours = profile.model is not None and entry.tensor_parallel == 1
        if ours and not math.isclose(found, model.layer_parameters, rel_tol=0.05):
            raise ConfigError(
                f"profile: measured with layers of {found:,.0f} parameters, the model's have "
                f"{model.layer_parameters:,}; measure again with this model"
            )


def logit_rows(device: DeviceType) -> int:
    """Tokens whose logits the loss holds at a time on such a card."""
    return CPU_LOGIT_ROWS if device.slowdown is not None else CUDA_LOGIT_ROWS


def _memory_rate(device: DeviceType) -> float:
    """Bytes a second that a well-tuned model gets of a card's memory."""
    return MEMORY_EFFICIENCY * device.memory_bandwidth / (device.slowdown or 1.0)


def card_costs(
    model: ModelConfig,
    rows: workload.TokenRows,
    *,
    recompute: Recompute,
    type_name: str,
    device: DeviceType,
    profile: Profile | None,
    group: TensorGroup = TensorGroup(),  # noqa: B008
) -> CardCosts:
    """Every unit's seconds and bytes on one card of this type in a tensor-parallel group; `recompute` applies
    to the layers. The device must have a peak in `precision`, unless a profile entry covers it."""
    work = workload.model_work(
        model, rows, logit_rows=logit_rows(device), group=group, flash=workload.has_flash(device)
    )
    update_rate = _memory_rate(device)
    if profile is not None:
        own = [entry for entry in profile.entries if entry.device_type == type_name]
        found = _measured(own, rows.count, recompute, group.width, work.layer, update_rate)
        if found is not None:
            entry, note = found
            if group.divides_tokens and group.width > 1:
                # What a profile measures is whole on each card.
                entry = _with_divided_tokens(entry, work.layer, recompute)
                note += "; of divided tokens an estimate"
            return CardCosts(
                units=_from_profile(entry, work, workload.STATE_BYTES[rows.precision], recompute, note),
                source="measured",
                note=note,
                # A foreign profile says nothing of the optimizer step, and its activations are complete.
                update_bytes_per_second=math.inf if entry.is_whole else update_rate,
                boundary_bytes=0.0 if entry.is_whole else work.layer.output_bytes,
                halves=workload.half_shares(work, recompute),
                start=entry.start,
            )
    note = "estimated from the catalogue" + (
        f": the profile has no entry for {type_name} with recompute {recompute}" if profile else ""
    )
    return CardCosts(
        units=estimate_units(work, device, rows.precision, recompute),
        source="estimated",
        note=note,
        update_bytes_per_second=update_rate,
        boundary_bytes=work.layer.output_bytes,
        halves=workload.half_shares(work, recompute),
    )


# --- measured --------------------------------------------------------------------------------------------


def _measured(
    own: Sequence[ProfileEntry],
    micro_batch_size: int,
    recompute: Recompute,
    tensor_parallel: int,
    layer: workload.UnitWork,
    memory_rate: float,
) -> tuple[ProfileEntry, str] | None:
    """A card's own entry, if need be derived from others, and a note that says how; None if there is none to
    derive it from. By the catalogue, a layer and the rate are what selective recompute is derived from."""
    for width, kind in itertools.product(
        dict.fromkeys((tensor_parallel, 1)), dict.fromkeys((recompute, "none"))
    ):
        entries = [entry for entry in own if (entry.tensor_parallel, entry.recompute) == (width, kind)]
        if not entries:
            continue
        entry, note = _at_size(sorted(entries, key=lambda entry: entry.micro_batch_size), micro_batch_size)
        if kind != recompute:
            layers = tuple(_recomputed(one, recompute, layer, memory_rate) for one in entry.layers)
            entry = replace(entry, layers=layers, recompute=recompute)
            note += f"; {recompute} recompute derived from an entry without"
        if width != tensor_parallel:
            entry = _divided_by_width(entry, tensor_parallel)
            note += f"; {SCALED_WIDTH} {width}"
        return entry, note
    return None


SCALED_WIDTH = "estimated from tensor_parallel"


def _divided_by_width(entry: ProfileEntry, width: int) -> ProfileEntry:
    """An entry of one card as each of `width` has it, collectives not included: an estimate."""

    def share(unit: UnitProfile) -> UnitProfile:
        hidden = min(unit.output_bytes * 4, unit.activation_bytes)
        return replace(
            unit,
            forward_seconds=unit.forward_seconds / width,
            backward_seconds=unit.backward_seconds / width,
            state_bytes=unit.state_bytes / width,
            activation_bytes=hidden + (unit.activation_bytes - hidden) / width,
            transient_bytes=unit.transient_bytes and unit.transient_bytes / width,
        )

    return replace(
        entry,
        tensor_parallel=width,
        embedding=share(entry.embedding),
        layers=tuple(map(share, entry.layers)),
        head=share(entry.head),
    )


def _with_divided_tokens(entry: ProfileEntry, unit: workload.UnitWork, recompute: Recompute) -> ProfileEntry:
    """An entry of layers whose tokens the group divides: each keeps less, by as much as is estimated."""
    kept = unit.kept_bytes(recompute)
    share = kept / (kept + unit.saved_bytes(recompute))
    layers = (replace(one, activation_bytes=share * one.activation_bytes) for one in entry.layers)
    return replace(entry, layers=tuple(layers))


def _recomputed(
    layer: UnitProfile, recompute: Recompute, estimate: workload.UnitWork, memory_rate: float
) -> UnitProfile:
    """The same layer under recompute. Full: it keeps only its input; its backward runs the forward first."""
    if recompute == "selective":
        kept = layer.activation_bytes * (estimate.kept_bytes(recompute) / estimate.activation_bytes)
        again = estimate.recomputed_traffic_bytes / memory_rate
    else:
        kept, again = min(layer.output_bytes, layer.activation_bytes), layer.forward_seconds
    transient = layer.transient_bytes
    return replace(
        layer,
        backward_seconds=layer.backward_seconds + again,
        activation_bytes=kept,
        transient_bytes=None if transient is None else transient + layer.activation_bytes - kept,
    )


def _at_size(entries: Sequence[ProfileEntry], size: int) -> tuple[ProfileEntry, str]:
    """The entry for a micro-batch size, on the line through the two nearest measured sizes, and a note."""
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

    def at(x: float, y: float) -> float:
        return share * x if low is high else max(0.0, x + share * (y - x))

    def times(a: UnitProfile | StageStart, b: UnitProfile | StageStart) -> dict[str, float]:
        names = ("forward_seconds", "backward_seconds")
        return {name: at(getattr(a, name), getattr(b, name)) for name in names}

    def line(a: UnitProfile, b: UnitProfile) -> UnitProfile:
        return UnitProfile(
            **times(a, b),
            state_bytes=max(a.state_bytes, b.state_bytes),
            activation_bytes=at(a.activation_bytes, b.activation_bytes),
            output_bytes=at(a.output_bytes, b.output_bytes),
            transient_bytes=None
            if a.transient_bytes is None or b.transient_bytes is None
            else at(a.transient_bytes, b.transient_bytes),
        )

    count = max(len(low.layers), len(high.layers))
    entry = replace(
        low,
        micro_batch_size=size,
        embedding=line(low.embedding, high.embedding),
        layers=tuple(line(low.layer(i), high.layer(i)) for i in range(count)),
        head=line(low.head, high.head),
        # It does not grow with the micro-batch, unless it was seen to.
        start=low.start if low is high else StageStart(**times(low.start, high.start)),
    )
    return entry, note


def _from_profile(
    entry: ProfileEntry, work: workload.ModelWork, state: workload.StateBytes, recompute: Recompute, note: str
) -> tuple[UnitCost, ...]:
    """The entry's seconds and bytes of each unit: embedding, layers, head."""
    layers = [entry.layer(i) for i in range(work.num_layers)]
    scaled = SCALED_WIDTH in note
    # A layer of an external profile, recomputed here, holds for one micro-batch what it no longer keeps.
    add_recomputed = entry.is_whole and "recompute derived" in note
    costs: list[UnitCost] = []
    for unit, measured in zip(work.units, (entry.embedding, *layers, entry.head), strict=True):
        recomputed_bytes = _recomputed_bytes(unit, recompute) if unit is work.layer else 0.0
        forward_again = measured.forward_seconds if recomputed_bytes and recompute == "full" else 0.0
        costs.append(
            UnitCost(
                forward_seconds=measured.forward_seconds,
                backward_seconds=measured.backward_seconds,
                parameters=unit.trained,
                parameter_bytes=measured.state_bytes * state.parameters / state.total,
                gradient_bytes=measured.state_bytes * state.gradients / state.total,
                optimizer_bytes=measured.state_bytes * state.optimizer / state.total,
                activation_bytes=measured.activation_bytes,
                transient_bytes=measured.transient_bytes or (recomputed_bytes if add_recomputed else 0.0),
                output_bytes=measured.output_bytes,
                weight_seconds=max(measured.backward_seconds - forward_again, 0.0) / 2,
                forward_collectives=unit.forward_collectives if scaled else 0,
                backward_collectives=unit.backward_collectives if scaled else 0,
                divides_tokens=unit.divides_tokens,
                gathered_again=_gathered_again(unit, recompute),
            )
        )
    return tuple(costs)


# --- estimated -------------------------------------------------------------------------------------------


def _recomputed_bytes(unit: workload.UnitWork, recompute: Recompute) -> float:
    """Bytes of the activations that a unit did not keep and holds while its backward runs."""
    if recompute == "full":
        return unit.activation_bytes
    return unit.activation_bytes - unit.kept_bytes(recompute)


def _gathered_again(unit: workload.UnitWork, recompute: Recompute) -> int:
    """All-gathers in the backward of inputs not kept; under full recompute all but one are collectives."""
    if not unit.divides_tokens or recompute == "none":
        return 0
    return unit.forward_collectives if recompute == "selective" else min(unit.forward_collectives, 1)


def estimate_units(
    work: workload.ModelWork, device: DeviceType, precision: Precision, recompute: Recompute
) -> tuple[UnitCost, ...]:
    """The units of `work` by the catalogue's rates: embedding, layers, head."""
    peak = device.peak(precision)
    assert peak is not None, "a card without this precision gets no work"
    matrix_rate, memory_rate = matrix_efficiency(work.hidden_size) * peak, _memory_rate(device)
    state = workload.STATE_BYTES[precision]

    def seconds(flops: float, traffic_bytes: float) -> float:
        return flops / matrix_rate + traffic_bytes / memory_rate + UNIT_OVERHEAD_SECONDS

    def cost(unit: workload.UnitWork, recompute: Recompute = "none") -> UnitCost:
        forward = seconds(unit.forward_flops, unit.forward_traffic_bytes)
        backward = seconds(unit.backward_flops, unit.backward_traffic_bytes)
        again = {"none": 0.0, "selective": unit.recomputed_traffic_bytes / memory_rate, "full": forward}
        return UnitCost(
            forward_seconds=forward,
            backward_seconds=backward + again[recompute],
            parameters=unit.trained,
            parameter_bytes=float(state.parameters * unit.parameters),
            gradient_bytes=float(state.gradients * unit.trained),
            optimizer_bytes=float(state.optimizer * unit.trained),
            activation_bytes=unit.kept_bytes(recompute),
            transient_bytes=float(unit.transient_bytes + _recomputed_bytes(unit, recompute)),
            output_bytes=unit.output_bytes,
            weight_seconds=backward * unit.weight_share,
            forward_collectives=unit.forward_collectives,
            backward_collectives=unit.backward_collectives
            # The recomputation ends with the last tensor that the backward needs: before the last all-reduce.
            + (max(unit.forward_collectives - 1, 0) if recompute == "full" else 0),
            divides_tokens=unit.divides_tokens,
            gathered_again=_gathered_again(unit, recompute),
        )

    return (cost(work.embedding), *[cost(work.layer, recompute)] * work.num_layers, cost(work.head))


# --- a card among several that share experts ----------------------------------------------------------------
#
# Each of them has everything else whole, and computes it whole; of the experts each has a contiguous range.
# So a card's seconds and bytes are those of a card alone, with another feed-forward.


def bare_profile(profile: Profile | None) -> Profile | None:
    """The profile with bare layers in place of whole ones; None if it has none."""
    every = profile.entries if profile is not None else ()
    entries = tuple(replace(one, layers=(one.bare_layer,)) for one in every if one.bare_layer is not None)
    return replace(profile, entries=entries) if profile is not None and entries else None


def expert_card_costs(
    whole: CardCosts,
    bare: CardCosts | None,
    model: ModelConfig,
    experts: int,
    rows: workload.TokenRows,
    *,
    recompute: Recompute,
    device: DeviceType,
) -> CardCosts:
    """Every unit's cost on a card with `experts` of each layer's experts, collectives not included.

    `whole` are the costs of a card alone, `bare` those of a layer without experts, where both are measured.
    Estimated, a unit is estimated anew. Measured, seconds are on the line from the bare layer to the whole
    one; without a bare one, they are scaled by the ratio of the estimates, as bytes are.
    """
    keys: dict[str, Any] = {"logit_rows": logit_rows(device), "flash": workload.has_flash(device)}
    counts = experts, model.num_experts
    held, alone = (workload.model_work(model, rows, experts=count, **keys) for count in counts)
    units = estimate_units(held, device, rows.precision, recompute)
    if whole.source == "measured":
        both = held.layer, alone.layer
        estimates = units[1], estimate_units(alone, device, rows.precision, recompute)[1]
        layers = [_scaled(unit, both, estimates) for unit in whole.units[1:-1]]
        if bare is not None and bare.source == "measured":
            share = experts / model.num_experts
            triples = zip(layers, bare.units[1:-1], whole.units[1:-1], strict=True)
            layers = [_on_line(unit, low, high, share) for unit, low, high in triples]
        units = (whole.units[0], *layers, whole.units[-1])
    return replace(whole, units=units, halves=workload.half_shares(held, recompute))


def _scaled(
    layer: UnitCost, works: tuple[workload.UnitWork, workload.UnitWork], estimates: tuple[UnitCost, UnitCost]
) -> UnitCost:
    """A measured layer with fewer experts; works and estimates are the held and the whole layer's."""

    def ratio(name: str) -> float:
        few, all_ = (getattr(estimate, name) for estimate in estimates)
        return few / all_ if all_ else 0.0

    states = works[0].parameters / works[1].parameters
    names = ("forward_seconds", "backward_seconds", "activation_bytes", "transient_bytes")
    return replace(
        layer,
        **{name: getattr(layer, name) * ratio(name) for name in names},
        **{name: getattr(layer, name) * states for name in STATES},
        weight_seconds=layer.weight_seconds * ratio("backward_seconds"),
        parameters=works[0].trained,
        forward_collectives=estimates[0].forward_collectives,
        backward_collectives=estimates[0].backward_collectives,
    )


def _on_line(layer: UnitCost, bare: UnitCost, whole: UnitCost, share: float) -> UnitCost:
    """The layer with seconds between those of a bare and a whole one."""
    names = ("forward_seconds", "backward_seconds", "weight_seconds")
    ends = {name: (getattr(bare, name), getattr(whole, name)) for name in names}
    return replace(layer, **{name: low + max(high - low, 0.0) * share for name, (low, high) in ends.items()})


# --- looked up once ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Card costs and links of a plan problem, each looked up once."""

    problem: PlanProblem
    topology: Topology
    cards: dict[str, Card]
    known: dict[tuple[str, int, Recompute, int], CardCosts]
    """What `of` has looked up, by its arguments."""
    groups: dict[tuple[object, ...], CardCosts]
    """What `of_replica` found for tensor-parallel groups, with their collectives, and `of_experts` for
    cards."""
    fastest: dict[tuple[int, ...], NDArray[np.float64]] = field(
        default_factory=dict[tuple[int, ...], NDArray[np.float64]]
    )
    """What `fastest_of` found, by the costs that it is the least of."""
    rings: dict[tuple[object, ...], float] = field(default_factory=dict[tuple[object, ...], float])
    """Seconds of the collectives of owners' rings, by what they depend on."""
    hosts: dict[tuple[str, str], HostShare] = field(default_factory=dict[tuple[str, str], HostShare])
    """What `host_of` found, by node and type of card."""
    body: Costs | None = None
    """Of a critic: the policy's costs, whose embedding and layers it has."""

    @property
    def ties(self) -> bool:
        """Whether embedding and head are one matrix. A foreign profile gives the bytes of two."""
        profile = self.problem.profile
        return self.problem.model.tie_embeddings and (profile is None or not profile.is_whole)

    def for_plan(self, plan: plans.Plan) -> Costs:
        """These costs, or those of the same problem whose groups divide tokens as the plan's do."""
        divided = plan.sequence_parallel
        if divided == self.problem.sequence_parallel or not any(map(is_wide, plan.pipelines)):
            return self
        problem = replace(self.problem, sequence_parallel=divided)
        return replace(self, problem=problem, known={}, groups={}, fastest={})

    def of(
        self, type_name: str, micro_batch_size: int, recompute: Recompute, tensor_parallel: int = 1
    ) -> CardCosts:
        """Every unit's cost on a type of card, collectives not included."""
        key = (type_name, micro_batch_size, recompute, tensor_parallel)
        if key not in self.known:
            self.known[key] = self._look_up(*key, self.problem.profile)
        return self.known[key]

    def _look_up(
        self,
        type_name: str,
        micro_batch_size: int,
        recompute: Recompute,
        tensor_parallel: int,
        profile: Profile | None,
    ) -> CardCosts:
        problem = self.problem

        def look_up(model: ModelConfig, profile: Profile | None) -> CardCosts:
            return card_costs(
                model,
                problem.rows(micro_batch_size),
                recompute=recompute,
                type_name=type_name,
                device=problem.cluster.device_type(type_name),
                profile=profile,
                group=TensorGroup(tensor_parallel, problem.sequence_parallel),
            )

        if self.body is None and not problem.critic:
            return look_up(problem.model, profile)
        # A profile has the policy's head: a value's is estimated.
        head = look_up(value_model(problem.model), None).units[-1]
        if self.body is not None:
            return look_up(self.body.problem.model, profile).with_head(head)
        own = look_up(problem.model, profile)
        return replace(own, units=tuple(map(with_critic, own.units, own.with_head(head).units)))

    def of_replica(self, replica: Replica, micro_batch_size: int, recompute: Recompute) -> CardCosts:
        """Every unit's cost on each card of a group: the slowest card's, plus the collectives."""
        width = len(replica)
        types = tuple(dict.fromkeys(card.type for card in replica))
        if width == 1:
            return self.of(types[0], micro_batch_size, recompute)
        location = replica if self.topology.measured else tuple(card.node for card in replica)
        key = (location, types, micro_batch_size, recompute)
        if key not in self.groups:
            self.groups[key] = self._of_group(replica, types, micro_batch_size, recompute)
        return self.groups[key]

    def fastest_of(
        self, replica: Replica, micro_batch_size: int, recompute: tuple[Recompute, ...]
    ) -> NDArray[np.float64]:
        """[U]: seconds of each unit on a group, forward and backward, with its fastest recompute."""
        parts = [self.of_replica(replica, micro_batch_size, kind) for kind in recompute]
        key = tuple(map(id, parts))
        if key not in self.fastest:
            times = [[unit.seconds for unit in part.units] for part in parts]
            self.fastest[key] = np.array(times).min(axis=0)
        return self.fastest[key]

    def _of_group(
        self, replica: Replica, types: tuple[str, ...], micro_batch_size: int, recompute: Recompute
    ) -> CardCosts:
        """The costs of a group: one object for all groups of these types whose links are equally fast."""
        width, hidden = len(replica), self.hidden_bytes(micro_batch_size)
        ring, scatter, gather = allreduce_seconds(self.topology, replica, hidden), 0.0, 0.0
        if self.problem.sequence_parallel:
            scatter = reduce_scatter_seconds(self.topology, replica, hidden)
            gather = all_gather_seconds(self.topology, replica, hidden)
        key = (types, width, micro_batch_size, recompute, ring, scatter, gather)
        if key not in self.groups:
            parts = [self.of(name, micro_batch_size, recompute, width) for name in types]
            slowest = max(parts, key=lambda part: sum(u.forward_seconds for u in part.units))
            # Layers that are alike are one object, and stay one.
            alike, start, divided = (
                {id(unit): unit for unit in slowest.units},
                slowest.start,
                (scatter, gather),
            )
            changed = {i: _with_collectives(unit, ring, divided=divided) for i, unit in alike.items()}
            start = slowest.start
            self.groups[key] = replace(
                slowest,
                units=tuple(changed[id(unit)] for unit in slowest.units),
                # A stage divides the hidden state that it gets, and ends with a whole one.
                start=StageStart(
                    forward_seconds=start.forward_seconds + gather,
                    backward_seconds=start.backward_seconds + gather,
                ),
            )
        return self.groups[key]

    def of_experts(
        self, type_name: str, micro_batch_size: int, recompute: Recompute, experts: int
    ) -> CardCosts:
        """The same on a card that holds so many experts of each layer, and all else whole."""
        key = (type_name, micro_batch_size, recompute, "experts", experts)
        if key not in self.groups:
            problem = self.problem
            whole = self.of(type_name, micro_batch_size, recompute)
            bare = bare_profile(problem.profile) if whole.source == "measured" else None
            found = expert_card_costs(
                replace(whole, units=tuple(map(without_critic, whole.units))),
                None if bare is None else self._look_up(type_name, micro_batch_size, recompute, 1, bare),
                problem.model,
                experts,
                problem.rows(micro_batch_size),
                recompute=recompute,
                device=problem.cluster.device_type(type_name),
            )
            head = whole.units[-1].critic
            if head is not None:
                critics = found.with_head(head).units
                found = replace(found, units=tuple(map(with_critic, found.units, critics)))
            self.groups[key] = found
        return self.groups[key]

    def of_stage(
        self, plan: plans.Plan, replica: Replica, micro_batch_size: int, stage: plans.StagePlan
    ) -> StageUnits:
        """The units of a stage on each card of a replica, its recompute among them; not where cards share
        experts."""
        part = self.of_replica(replica, micro_batch_size, stage.recompute)
        plain = part
        if stage.num_recomputed not in (0, stage.num_blocks):
            plain = self.of_replica(replica, micro_batch_size, "none")
        return _stage_units(plan, stage, part, plain)

    def of_ranks(
        self, plan: plans.Plan, replica: Replica, micro_batch_size: int, stage: plans.StagePlan
    ) -> tuple[StageUnits, ...]:
        """The units of a stage on each card of a replica, in a plan that divides experts."""
        hidden, small = self.expert_ring_seconds(replica, micro_batch_size)
        kinds: tuple[Recompute, Recompute] = (stage.recompute, "none")
        ranks: list[StageUnits] = []
        for card, (count, parameters) in zip(replica, plans.held_experts(plan, stage), strict=True):
            part, plain = (self.of_experts(card.type, micro_batch_size, kind, count) for kind in kinds)
            if stage.num_recomputed in (0, stage.num_blocks):
                plain = part
            own = _stage_units(plan, stage, part, plain)
            units = tuple(_with_collectives(unit, hidden, small) for unit in own.units)
            ranks.append(replace(own, units=units, experts=count, expert_parameters=parameters))
        return tuple(ranks)

    def expert_ring_seconds(self, replica: Replica, micro_batch_size: int) -> tuple[float, float]:
        """Seconds of the all-reduces of cards that share experts: of a hidden state, and of the weights
        [T, K] of the chosen experts, whose gradients are added up too."""
        problem = self.problem
        chosen = micro_batch_size * problem.sequence_length * problem.model.experts_per_token
        sizes = self.hidden_bytes(micro_batch_size), float(chosen * statistic_bytes(problem.precision))
        hidden, small = (allreduce_seconds(self.topology, replica, size) for size in sizes)
        return hidden, small

    def host_of(self, card: Card) -> HostShare:
        """A card's share of its node's host and disk."""
        key = (card.node, card.type)
        if key not in self.hosts:
            problem, group = self.problem, self.topology.groups[card.node]
            self.hosts[key] = host_share(
                problem.cluster.device_type(card.type),
                group,
                total_bytes=node_host_bytes(problem.cluster, card.node),
                reserved_bytes=problem.host_reserved,
                measured=problem.profile.host(card.type) if problem.profile else None,
            )
        return self.hosts[key]

    def has_disk(self, card: Card) -> bool:
        """Whether the cluster file gives the card's node a disk."""
        return self.topology.groups[card.node].disk is not None

    def hidden_bytes(self, micro_batch_size: int) -> float:
        """Bytes of one hidden state, as it is sent between stages and inside a tensor-parallel group."""
        rows = self.problem.rows(micro_batch_size)
        return float(rows.tokens * self.problem.model.hidden_size * workload.ELEMENT_BYTES[rows.precision])


@dataclass(frozen=True, kw_only=True)
class StageUnits:
    """The costs of a stage's units on one replica, or on one card of it where they share experts."""

    span: range
    """The numbers of the units among all of the plan."""
    units: tuple[UnitCost, ...]
    """Embedding, layers or halves of layers, head: those that the stage holds, as the plan divides them."""
    start: StageStart
    """What the stage takes besides them."""
    layer: UnitCost
    """A whole layer."""
    halves: tuple[tuple[HalfShare, HalfShare], tuple[HalfShare, HalfShare]]
    """Of a layer that is recomputed, and of one that is not."""
    boundary_bytes: float
    update_bytes_per_second: float
    source: Source
    note: str
    experts: int = 0
    """Of each layer, that the card holds, where cards share them."""
    expert_parameters: int = 0
    """Of these, in all layers."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def forward_seconds(self) -> float:
        return math.fsum((self.start.forward_seconds, *(unit.forward_seconds for unit in self.units)))

    @property
    def backward_seconds(self) -> float:
        return math.fsum((self.start.backward_seconds, *(unit.backward_seconds for unit in self.units)))

    @property
    def started(self) -> tuple[UnitCost, ...]:
        """The units; the last one's seconds with the stage's start."""
        *others, last = self.units
        forward = last.forward_seconds + self.start.forward_seconds
        backward = last.backward_seconds + self.start.backward_seconds
        return (*others, replace(last, forward_seconds=forward, backward_seconds=backward))


def _stage_units(plan: plans.Plan, stage: plans.StagePlan, part: CardCosts, plain: CardCosts) -> StageUnits:
    """The units of a stage: its first layers of `part`, those that are not recomputed of `plain`."""
    span = plans.stage_unit_range(plan, stage)
    if not plan.divided_layers:
        # Units count the embedding before the layers.
        first_kept = 1 + int(stage.layers[0]) + stage.num_recomputed
        first_kept = min(max(first_kept, span.start), span.stop)
        units = (*part.units[span.start : first_kept], *plain.units[first_kept : span.stop])
    else:
        units = tuple(_with_halves(plan, stage, part, plain))
    return StageUnits(
        span=span,
        units=units,
        start=part.start,
        layer=part.units[1],
        halves=(part.halves, plain.halves),
        boundary_bytes=part.boundary_bytes,
        update_bytes_per_second=part.update_bytes_per_second,
        source=part.source if plain.source == "measured" else "estimated",
        note=part.note,
    )


def _with_halves(
    plan: plans.Plan, stage: plans.StagePlan, part: CardCosts, plain: CardCosts
) -> Iterator[UnitCost]:
    """The same of a plan that divides layers."""
    if stage.embedding:
        yield part.units[0]
    recomputed = math.floor(stage.layers[0]) + stage.num_recomputed
    for _, first, end in plan.layer_units:
        if stage.layers[0] <= first and end <= stage.layers[1]:
            layer = int(first)
            source = part if layer < recomputed else plain
            whole = source.units[layer + 1]
            yield whole if end - first == 1 else share_of_layer(whole, source.halves[first > layer])
    if stage.head:
        yield part.units[-1]


def _with_collectives(
    unit: UnitCost, allreduce_seconds: float, small: float = 0.0, divided: tuple[float, float] = (0.0, 0.0)
) -> UnitCost:
    """The unit with its all-reduces, or where tokens are `divided` its reduce-scatters and all-gathers, and
    with a `small` one beside each of the backward's."""
    each = sum(divided) if unit.divides_tokens else allreduce_seconds
    backward = unit.backward_collectives * (each + small) + unit.gathered_again * divided[1]
    return replace(
        unit,
        forward_seconds=unit.forward_seconds + unit.forward_collectives * each,
        backward_seconds=unit.backward_seconds + backward,
    )


def make_costs(problem: PlanProblem) -> Costs:
    """The costs of a problem; the cluster's `reserved` bytes are the profile's where it measured them. Raises
    ConfigError if the profile does not belong to the problem."""
    if problem.profile is not None:
        check_profile(
            problem.profile,
            problem.model,
            sequence_length=problem.sequence_length,
            precision=problem.precision,
            compile=problem.compile,
        )
        problem = replace(problem, cluster=with_measured_reserve(problem.cluster, problem.profile))
    cards = {card.name: card for card in problem.cluster.cards}
    return Costs(problem, make_topology(problem.cluster, problem.profile), cards, {}, {})


def critic_of(costs: Costs) -> Costs:
    """The costs of a policy's critic on the same cards: its embedding and layers, a head of one number."""
    problem = replace(costs.problem, model=value_model(costs.problem.model), critic=False)
    return Costs(problem, costs.topology, costs.cards, {}, {}, body=costs)
