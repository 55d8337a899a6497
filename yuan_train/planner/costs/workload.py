"""What is planned for: the plan problem, plans on its cards, and work and bytes of each unit of its model.

Units are embedding, layers and head. What a layer does and keeps is its architecture's
(`ModelSpec.sublayers`).

The cards of a node share its host and its disk equally. An offloaded part of the optimizer step copies
gradients down, steps on the host and copies weights up, chunk by chunk and so side by side; the card steps
its own part meanwhile.

H = hidden size, P = heads * head size, F = feed-forward width, V = vocabulary, N = heads, S = sequence
length, e = bytes of an element (2 for bf16 and fp16, 4 for fp32, 8 for fp64), w = bytes of a statistic (8 for
fp64, else 4).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from yuan_train.config import plan as plans
from yuan_train.config.cluster import Card, Cluster, Disk, NodeGroup, Sends
from yuan_train.config.devices import DeviceType, Precision, usable_bytes
from yuan_train.config.model import (
    ADAPTERS,
    HALVES,
    Kept,
    ModelConfig,
    SublayerWork,
    half_of,
    is_whole_adapter,
    layer_table,
)
from yuan_train.config.profile import HostProfile, Profile
from yuan_train.config.run import BUCKET_SIZE, Recompute, ReduceDtype, ScheduleName
from yuan_train.config.units import DISK_CHUNK, DISK_SLOTS, DISK_STATES

ELEMENT_BYTES: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}

INTEGER_BYTES = 8
KEPT_BYTES = ("activation_bytes", "input_bytes", "selective_bytes")
"""Of a unit, by kind of recompute: none, full, selective."""


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per parameter that stay on the card from step to step."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def update_traffic(self) -> int:
        """Bytes per parameter that an AdamW step moves: it reads the gradients and the optimizer state (where
        the weights are the master, these too), and writes the state and the weights."""
        master_read = self.parameters if self.optimizer == 2 * self.parameters else 0
        return self.gradients + 2 * self.optimizer + self.parameters + master_read


STATE_BYTES: dict[Precision, StateBytes] = {
    "bf16": StateBytes(parameters=2, gradients=4, optimizer=12),
    "fp16": StateBytes(parameters=2, gradients=4, optimizer=12),
    "fp32": StateBytes(parameters=4, gradients=4, optimizer=8),
    "fp64": StateBytes(parameters=8, gradients=8, optimizer=16),
}
"""16-bit runs keep fp32 gradients and an fp32 master with Adam's moments; else weights are the master."""


@dataclass(frozen=True, kw_only=True)
class UnitWork:
    """One unit of the model for one micro-batch, without recompute."""

    parameters: int
    trained: int
    """Of `parameters` those that have gradients and optimizer state: of a model with adapters these alone."""
    forward_flops: float
    backward_flops: float
    forward_traffic_bytes: float
    """Bytes that elementwise passes and weights move through the card's memory."""
    backward_traffic_bytes: float
    activation_bytes: float
    """Kept from the forward to the backward."""
    input_bytes: float
    """Kept instead under full recompute."""
    selective_bytes: float
    """Kept instead under selective recompute."""
    transient_bytes: float
    """Held only while the unit's backward runs (the head: also its forward), one micro-batch at a time."""
    output_bytes: float
    replicated_bytes: float = 0.0
    """The part of the activations that every card of a tensor-parallel group keeps in full."""
    selective_replicated_bytes: float = 0.0
    """The same under selective recompute."""
    gathered_bytes: float = 0.0
    """Of `replicated_bytes`, what every card keeps in full even where the group divides the tokens."""
    selective_gathered_bytes: float = 0.0
    """The same under selective recompute."""
    divides_tokens: bool = False
    """Whether the group divides the tokens: each all-reduce is then a reduce-scatter and an all-gather, and
    under recompute the input of products is gathered again."""
    width: int = 1
    recomputed_traffic_bytes: float = 0.0
    """Moved in the backward to recompute what selective recompute does not keep."""
    forward_collectives: int = 0
    """All-reduces of a hidden state over the tensor-parallel group."""
    backward_collectives: int = 0
    weight_share: float = 0.5
    """Of the backward: the weight gradients, which a schedule may split off."""
    whole_adapters: int = 0
    """Of `trained` what every card of a tensor-parallel group has in full."""

    def kept_bytes(self, recompute: Recompute) -> float:
        """Bytes kept from the forward to the backward."""
        return {"none": self.activation_bytes, "full": self.input_bytes, "selective": self.selective_bytes}[
            recompute
        ]

    def saved_bytes(self, recompute: Recompute) -> float:
        """Bytes that are not kept because the group divides the tokens."""
        if not self.divides_tokens:
            return 0.0
        divided = {
            "none": self.replicated_bytes - self.gathered_bytes,
            "selective": self.selective_replicated_bytes - self.selective_gathered_bytes,
            "full": self.input_bytes * self.width,
        }[recompute]
        return divided * (1 - 1 / self.width)


@dataclass(frozen=True)
class TokenRows:
    """A micro-batch: `count` rows of `length` tokens, computed in `precision`."""

    count: int
    length: int
    precision: Precision

    @property
    def tokens(self) -> int:
        return self.count * self.length


@dataclass(frozen=True)
class TensorGroup:
    """Cards that share each layer; of one alone there is nothing to share."""

    width: int = 1
    divides_tokens: bool = False
    """Between the products of layers (sequence parallelism; Korthikanti et al. 2022, arXiv 2205.05198)."""


@dataclass(frozen=True)
class ModelWork:
    """All units of a model. Every layer is the same; the head includes the final norm and the loss."""

    num_layers: int
    hidden_size: int
    embedding: UnitWork
    layer: UnitWork
    halves: tuple[UnitWork, UnitWork]
    """Attention and feed-forward of a layer, each as a unit of its own."""
    head: UnitWork

    @property
    def units(self) -> tuple[UnitWork, ...]:
        """Embedding, layers, head: num_layers + 2 units."""
        return (self.embedding, *[self.layer] * self.num_layers, self.head)


@functools.lru_cache(maxsize=1024)
def model_work(
    model: ModelConfig,
    rows: TokenRows,
    *,
    logit_rows: int,
    group: TensorGroup = TensorGroup(),  # noqa: B008
    experts: int | None = None,
    flash: bool = True,
) -> ModelWork:
    """The work of each unit for a micro-batch, on one card of a tensor-parallel group.

    `logit_rows` is how many tokens' logits the loss holds at a time. With `experts`, the card is one of
    several that share the experts of each layer, and holds so many of them; all else is whole. `flash` is
    whether the card has flash attention (`has_flash`).
    """
    attention, feed_forward = model.spec.sublayers(model)
    if not flash:
        attention = _without_flash(attention, model)
    lookup, head = _embedding_work(model, rows), _head_work(model, rows, logit_rows)

    def layer(*halves: SublayerWork) -> UnitWork:
        work = _layer_work(halves, model.hidden_size, rows)
        if model.lora is not None:
            work = _with_adapters(work, model, halves, rows)
        return _share_of(work, group)

    def work(layer: UnitWork, halves: tuple[UnitWork, UnitWork], *ends: UnitWork) -> ModelWork:
        return ModelWork(model.num_layers, model.hidden_size, ends[0], layer, halves, ends[1])

    if experts is not None:
        lookup, head = (replace(end, forward_collectives=0, backward_collectives=0) for end in (lookup, head))
        alone = replace(attention, collectives=0)
        halves = layer(alone), _with_experts(model, experts, layer)
        return work(_with_experts(model, experts, lambda ffn: layer(alone, ffn)), halves, lookup, head)
    ends = replace(group, divides_tokens=False)
    # Every card adds as many rows, zeros for the tokens of others.
    embedding = replace(_share_of(lookup, ends), transient_bytes=lookup.transient_bytes)
    halves = layer(attention), layer(feed_forward)
    return work(layer(attention, feed_forward), halves, embedding, _share_of(head, ends))


FLASH_CAPABILITY = 8.0
"""Compute capability from which torch has flash attention (`kernels/dispatch.py` asks for the same)."""
FLASH_GAIN = 2
"""How many times as fast scores are with flash attention as with the memory-efficient kernel. Policy, not
measurement: about what FlashAttention-2 (arXiv 2307.08691) shows beside xFormers' kernel on an A100."""


def has_flash(device: DeviceType) -> bool:
    """Whether torch has flash attention on such a card; where the capability is not known, it is taken to."""
    return device.capability is None or device.capability >= FLASH_CAPABILITY


def _without_flash(attention: SublayerWork, model: ModelConfig) -> SublayerWork:
    """Attention by the memory-efficient kernel: slower, with grouped keys and values copied per query."""
    copies = 2 * (model.num_attention_heads - model.key_value_heads) * model.head_dim
    more = Kept(elements=copies)
    return replace(
        attention,
        scores=FLASH_GAIN * attention.scores,
        sharded=attention.sharded + more,
        selective_sharded=attention.selective_sharded + more,
    )


def _with_experts(model: ModelConfig, experts: int, unit: Callable[[SublayerWork], UnitWork]) -> UnitWork:
    """A unit on a card with so many of its experts; `unit` makes it of a feed-forward's work. It works on the
    rows that it expects, with room for the most that it can get: a token chooses different experts."""
    held, chosen = model.spec.held_experts, model.experts_per_token
    assert held is not None, "only architectures with experts divide them"
    none, each, most = (unit(held(model, experts, rows)) for rows in (0, chosen, min(chosen, experts)))
    share = experts / model.num_experts
    names = [f"{way}_{what}" for way in ("forward", "backward") for what in ("flops", "traffic_bytes")]
    ends = {name: (getattr(none, name), getattr(each, name)) for name in (*names, "recomputed_traffic_bytes")}
    return replace(most, **{name: low + (high - low) * share for name, (low, high) in ends.items()})


def _share_of(unit: UnitWork, group: TensorGroup) -> UnitWork:
    """A card's share in a tensor-parallel group: all but replicated bytes is divided, norms' weights too."""
    width, divides_tokens = group.width, group.divides_tokens
    if width == 1:
        return unit
    plain, selective = unit.replicated_bytes, unit.selective_replicated_bytes
    if divides_tokens:
        plain, selective = unit.gathered_bytes, unit.selective_gathered_bytes

    def share(bytes_: float, replicated_bytes: float = plain) -> float:
        replicated = min(replicated_bytes, bytes_)
        return replicated + (bytes_ - replicated) / width

    whole = unit.whole_adapters
    return replace(
        unit,
        parameters=whole - (-(unit.parameters - whole) // width),
        trained=whole - (-(unit.trained - whole) // width),
        forward_flops=unit.forward_flops / width,
        backward_flops=unit.backward_flops / width,
        forward_traffic_bytes=share(unit.forward_traffic_bytes),
        backward_traffic_bytes=share(unit.backward_traffic_bytes),
        activation_bytes=share(unit.activation_bytes),
        selective_bytes=share(unit.selective_bytes, selective),
        input_bytes=share(unit.input_bytes, 0.0) if divides_tokens else unit.input_bytes,
        divides_tokens=divides_tokens,
        width=width,
        recomputed_traffic_bytes=share(unit.recomputed_traffic_bytes),
        transient_bytes=unit.transient_bytes / width,
    )


def _bytes(kept: Kept, precision: Precision) -> int:
    statistics = statistic_bytes(precision) * kept.statistics
    return ELEMENT_BYTES[precision] * kept.elements + statistics + INTEGER_BYTES * kept.integers


def statistic_bytes(precision: Precision) -> int:
    """w: bytes of a statistic."""
    return 8 if precision == "fp64" else 4


def _layer_work(halves: Sequence[SublayerWork], hidden: int, rows: TokenRows) -> UnitWork:
    """A layer, or one half of it: forward, and backward with twice the FLOP."""
    tokens, precision, e = rows.tokens, rows.precision, ELEMENT_BYTES[rows.precision]
    flops = float(tokens * sum(half.forward_flops(rows.length) for half in halves))
    kept = tokens * sum(_bytes(half.replicated + half.sharded, precision) for half in halves)
    parameters = sum(half.parameters for half in halves)
    # Each kept tensor is written once and read about once.
    traffic = 2.0 * kept + e * tokens * sum(half.shifted for half in halves) + e * parameters
    replicated = sum(_bytes(half.replicated, precision) for half in halves)
    selective_replicated = sum(_bytes(half.selective_replicated, precision) for half in halves)
    selective = selective_replicated + sum(_bytes(half.selective_sharded, precision) for half in halves)
    collectives = sum(half.collectives for half in halves)
    return UnitWork(
        parameters=parameters,
        trained=parameters,
        replicated_bytes=tokens * replicated,
        gathered_bytes=float(e * tokens * sum(half.gathered for half in halves)),
        forward_collectives=collectives,
        backward_collectives=collectives,
        forward_flops=flops,
        backward_flops=2 * flops,
        forward_traffic_bytes=traffic,
        backward_traffic_bytes=2 * traffic + STATE_BYTES[precision].gradients * 2 * parameters,
        activation_bytes=kept,
        input_bytes=tokens * (e * hidden + INTEGER_BYTES * sum(half.decided for half in halves)),
        selective_bytes=tokens * selective,
        selective_replicated_bytes=tokens * selective_replicated,
        recomputed_traffic_bytes=tokens * e * sum(half.recomputed for half in halves),
        transient_bytes=max(
            tokens * _bytes(half.held, precision) + e * half.largest_weight for half in halves
        ),
        output_bytes=e * hidden * tokens,
    )


def _with_adapters(
    base: UnitWork, model: ModelConfig, halves: Sequence[SublayerWork], rows: TokenRows
) -> UnitWork:
    """A layer, or one half of it, whose base is frozen, with its adapters.

    The backward has no weight gradients but the adapters' own. Beside what the base keeps, an adapter keeps
    the product between its two matrices; what of the base only frozen matrices would read is counted though.
    Low rank makes its products passes over memory.
    """
    tokens, precision = rows.tokens, rows.precision
    e, gradients = ELEMENT_BYTES[precision], STATE_BYTES[precision].gradients
    names = [name for name, half in zip(HALVES, model.spec.sublayers(model), strict=True) if half in halves]
    found = [p for p in layer_table(model) if p.name.endswith(ADAPTERS) and half_of(p.name) in names]
    trained = sum(p.size for p in found)
    assert model.lora is not None
    rank = model.lora.rank
    kept = e * tokens * rank * len(found) // 2
    products = 2.0 * tokens * sum(half.products for half in halves)
    weight_flops = 2.0 * tokens * trained
    backward = base.backward_flops - products + 2 * weight_flops
    inputs, outputs = (sum(p.size for p in found if p.name.endswith(kind)) // rank for kind in ADAPTERS)
    # Forward: x is read, and y read and written again. Backward: dy is read twice, x once, and dx read and
    # written again.
    forward_traffic = 2.0 * kept + e * (trained + tokens * (inputs + 2 * outputs))
    backward_traffic = 4.0 * kept + e * (2 * trained + tokens * (3 * inputs + 2 * outputs))
    held = max(tokens * _bytes(half.held, precision) for half in halves)
    more = ("activation_bytes", "selective_bytes", "replicated_bytes", "selective_replicated_bytes")
    return replace(
        base,
        parameters=base.parameters + trained,
        trained=trained,
        whole_adapters=sum(p.size for p in found if is_whole_adapter(p)),
        weight_share=weight_flops / backward,
        forward_flops=base.forward_flops + weight_flops,
        backward_flops=backward,
        forward_traffic_bytes=base.forward_traffic_bytes + forward_traffic,
        backward_traffic_bytes=base.backward_traffic_bytes
        + backward_traffic
        + gradients * 2 * (trained - base.parameters),
        **{name: getattr(base, name) + kept for name in (*more, "gathered_bytes")},
        selective_gathered_bytes=float(kept),
        transient_bytes=held + e * max((p.size for p in found), default=0),
    )


def _embedding_work(model: ModelConfig, rows: TokenRows) -> UnitWork:
    """Forward, a gather of rows; backward, unless it is frozen, their gradients are widened and added."""
    tokens, matrix = rows.tokens, model.embedding_parameters
    hidden = ELEMENT_BYTES[rows.precision] * model.hidden_size * tokens
    trained = matrix if model.lora is None else 0
    wide = STATE_BYTES[rows.precision].gradients * model.hidden_size * tokens * (trained > 0)
    return UnitWork(
        parameters=matrix,
        trained=trained,
        replicated_bytes=hidden,
        forward_collectives=1,
        forward_flops=0.0,
        backward_flops=0.0,
        forward_traffic_bytes=2.0 * hidden,
        # Read, written wide, read again, and added to what is read and written.
        backward_traffic_bytes=hidden * (trained > 0) + 4.0 * wide,
        **dict.fromkeys(KEPT_BYTES, INTEGER_BYTES * tokens),
        transient_bytes=wide,
        output_bytes=hidden,
    )


def _head_work(model: ModelConfig, rows: TokenRows, logit_rows: int) -> UnitWork:
    """The block-wise loss computes its gradients in the forward: all 6VH FLOP a token are there, and about
    none in the backward. Of a frozen matrix there is no dW: 4VH. dW [V, H] is added to the main gradient at
    once; dh is kept in w until the backward. At most three blocks of logits are held at a time."""
    e, w, tokens = ELEMENT_BYTES[rows.precision], statistic_bytes(rows.precision), rows.tokens
    hidden, matrix = model.hidden_size, model.output_size * model.hidden_size
    norm_bytes = tokens * (2 * e * hidden + w)
    kept = norm_bytes + w * hidden * tokens
    logit_rows = min(logit_rows, tokens)
    blocks = -(-tokens // logit_rows)
    frozen = model.lora is not None
    return UnitWork(
        parameters=model.head_parameters,
        trained=model.trained_unit_parameters[-1] if frozen else model.head_parameters,
        replicated_bytes=kept,
        selective_replicated_bytes=kept,
        forward_collectives=1,
        forward_flops=(2.0 if frozen else 3.0) * tokens * model.head_forward_flops,
        backward_flops=0.0,
        forward_traffic_bytes=2.0 * norm_bytes
        + 6.0 * w * model.output_size * tokens
        + blocks * (2 * w * (not frozen) + 2 * e) * matrix,
        backward_traffic_bytes=2.0 * norm_bytes,
        **dict.fromkeys(KEPT_BYTES, kept),
        transient_bytes=3 * w * logit_rows * model.output_size,
        output_bytes=0,
    )


# --- halves of a layer --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class HalfShare:
    """What half a layer takes of a layer's costs; 1 for all of it."""

    seconds: float
    parameters: float
    """That are trained; `weights` are all."""
    weights: float
    activations: float
    """Under full recompute, both halves keep their input."""
    transient: float
    forward_collectives: int
    backward_collectives: int


def half_shares(work: ModelWork, recompute: Recompute) -> tuple[HalfShare, HalfShare]:
    """What attention and feed-forward take of a layer."""
    whole = work.layer

    def share(half: UnitWork) -> HalfShare:
        return HalfShare(
            seconds=half.forward_flops / whole.forward_flops,
            parameters=half.trained / whole.trained,
            weights=half.parameters / whole.parameters,
            activations=half.kept_bytes(recompute) / whole.kept_bytes(recompute),
            transient=half.transient_bytes / whole.transient_bytes,
            forward_collectives=half.forward_collectives,
            backward_collectives=half.backward_collectives,
        )

    return share(work.halves[0]), share(work.halves[1])


# --- the problem --------------------------------------------------------------------------------------------


Replica = tuple[Card, ...]
"""The cards of a tensor-parallel group, in order."""


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """What to plan for: cluster, model, batch, and the profile that the costs come from."""

    cluster: Cluster
    model: ModelConfig
    sequence_length: int
    global_batch_size: int
    precision: Precision
    profile: Profile | None = None
    sends: Sends | None = None
    """Who waits for a message; None: as the cluster's library has it."""
    reduce_dtype: ReduceDtype = "fp32"
    """Of gradients on their way between owners; see `OptimizerConfig`."""
    bucket_size: int = BUCKET_SIZE
    """The most parameters whose gradients are reduced in one operation."""
    memory_fraction: float = 1.0
    """Of a card's memory, what a plan may fill; see `SearchConfig`."""
    host_reserved: int = 0
    """Bytes of each host's memory that are left to other programs; see `MemoryConfig`."""
    compile: bool = False
    """Whether layers are compiled (`train.compile`), which only a profile tells the effect of."""
    sequence_parallel: bool = False
    """Whether tensor-parallel groups divide the tokens between products; see `Plan`."""
    critic: bool = False
    """Whether the critic of PPO is trained on the same cards in turn, under the same plan (see `critic_of`):
    its states are counted in the memory of each unit, its time in none."""

    def usable_bytes(self, type_name: str) -> float:
        """What a plan may fill of a card of a type."""
        return usable_bytes(self.cluster.device_type(type_name), self.memory_fraction)

    def room_bytes(self, type_name: str) -> float:
        """The same, without the bytes that are not available to training."""
        return self.usable_bytes(type_name) - self.cluster.device_type(type_name).reserved

    def rows(self, micro_batch_size: int) -> TokenRows:
        """A micro-batch of so many sequences."""
        return TokenRows(micro_batch_size, self.sequence_length, self.precision)

    @property
    def send_mode(self) -> Sends:
        return self.sends or self.cluster.library.sends

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a parameter's gradient on its way between owners."""
        if self.reduce_dtype == "bf16":
            return ELEMENT_BYTES["bf16"]
        return STATE_BYTES[self.precision].gradients

    @property
    def reduce_copy_share(self) -> float:
        """The share of its gradients, at most, that a reduction in another dtype holds again, packed."""
        gradient_bytes = STATE_BYTES[self.precision].gradients
        return self.reduce_bytes / gradient_bytes if self.reduce_bytes != gradient_bytes else 0.0


def node_host_bytes(cluster: Cluster, node: str) -> float:
    """Host memory of a node: as the cluster file states it, or else as much as its cards have together."""
    group = cluster.groups[node]
    if group.host is not None:
        return float(group.host.memory)
    return float(sum(cluster.device_type(name).memory for name in group.types))


def plan_on_cards(
    problem: PlanProblem,
    used: Set[Card],
    pipelines: Callable[[Mapping[Card, int]], Iterable[plans.PipelinePlan]],
    *,
    schedule: ScheduleName,
    sharded: bool,
) -> plans.Plan:
    """A plan of these cards, ranked in the cluster file's order; `pipelines` makes its pipelines of ranks."""
    cards = [card for card in problem.cluster.cards if card in used]
    rank_of = {card: rank for rank, card in enumerate(cards)}
    made = tuple(pipelines(rank_of))
    return plans.Plan(
        cluster=problem.cluster.name,
        model=problem.model,
        sequence_length=problem.sequence_length,
        global_batch_size=problem.global_batch_size,
        schedule=schedule,
        optimizer_sharding=sharded,
        sequence_parallel=problem.sequence_parallel and any(map(is_wide, made)),
        ranks=tuple(
            plans.RankPlan(rank=rank, device=card.name, type=card.type) for card, rank in rank_of.items()
        ),
        pipelines=made,
        device_types=plans.uncatalogued_types(problem.cluster, {card.type for card in cards}),
    )


def is_wide(pipeline: plans.PipelinePlan) -> bool:
    """Whether it has a tensor-parallel group of several cards."""
    return any(len(replica) > 1 for stage in pipeline.stages for replica in stage.replicas)


def with_measured_reserve(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster with its cards' `reserved` as the profile measured it, where it did."""
    types = dict(cluster.device_types)
    for name in {name for group in cluster.nodes for name in group.types}:
        measured = profile.reserved_bytes(name)
        if measured is not None:
            types[name] = replace(cluster.device_type(name), reserved=math.ceil(measured))
    return replace(cluster, device_types=types)


ASSUMED_DISK = Disk(read=2e9, write=1e9)
"""Of a node whose cluster file says nothing: a modest NVMe disk."""


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """A card's share of its node's host and disk."""

    memory_bytes: float
    link_bytes_per_second: float
    memory_bytes_per_second: float
    disk_bytes: float
    """Inf if the cluster file does not say."""
    disk_read_bytes_per_second: float
    disk_write_bytes_per_second: float


def host_share(
    device: DeviceType,
    group: NodeGroup,
    *,
    total_bytes: float,
    reserved_bytes: float,
    measured: HostProfile | None = None,
) -> HostShare:
    """The share in its host, which has `total_bytes`, and in its disk of a card of such a node;
    `reserved_bytes` are left to other programs. Rates that were `measured`, with all cards of a node at once,
    are its own already."""
    host, disk, count = group.host, group.disk or ASSUMED_DISK, group.num_cards
    link, rate = device.host_link, device.host_memory_bandwidth
    if measured is not None:
        link = min(measured.host_link_down, measured.host_link_up)
        rate = measured.host_step_bytes_per_second
    elif host is not None:
        link = min(link, host.link_bandwidth / count if host.link_bandwidth else math.inf)
        rate = host.bandwidth / count if host.bandwidth else rate
    return HostShare(
        memory_bytes=max(0.0, total_bytes - reserved_bytes) / count,
        link_bytes_per_second=link,
        memory_bytes_per_second=rate,
        disk_bytes=disk.capacity / count if disk.capacity else math.inf,
        disk_read_bytes_per_second=disk.read / count,
        disk_write_bytes_per_second=disk.write / count,
    )


def host_step_seconds(share: HostShare, precision: Precision) -> float:
    """Seconds by parameter of an optimizer step on the host: of the slowest of gradients on their way down,
    the step itself, and weights on their way up. A link takes both directions at once."""
    state = STATE_BYTES[precision]
    return max(
        state.gradients / share.link_bytes_per_second,
        state.update_traffic / share.memory_bytes_per_second,
        state.parameters / share.link_bytes_per_second,
    )


def host_bytes(precision: Precision) -> float:
    """Bytes by parameter on a host, in the gradient's precision: master, gradient, AdamW's two moments."""
    return 4.0 * STATE_BYTES[precision].gradients


def disk_bytes(precision: Precision) -> float:
    """Bytes by parameter on a disk: its master and AdamW's two moments. Each step reads and writes them."""
    return float(DISK_STATES * STATE_BYTES[precision].gradients)


def disk_step_seconds(share: HostShare, precision: Precision) -> float:
    """Seconds by parameter in which a disk reads and writes; it does one of the two at a time."""
    each = disk_bytes(precision)
    return each / share.disk_read_bytes_per_second + each / share.disk_write_bytes_per_second


def slot_bytes(precision: Precision, num_parameters: float) -> float:
    """Host memory of the chunks in flight of so many parameters on a disk."""
    return DISK_SLOTS * host_bytes(precision) * min(DISK_CHUNK, num_parameters)
