"""The plan: which cards hold which layers, and the forecast of time and memory.

The planner and the trainer share only the plan and the schedule made from it. A plan can be written by hand.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen, MultipleOf

from yuan_train.config.cluster import Cluster
from yuan_train.config.devices import CATALOGUE, Backend, DeviceType, find_card
from yuan_train.config.model import HALVES, ModelConfig, half_of, is_trained, layer_table
from yuan_train.config.run import HostCopies, Recompute, RunConfig, ScheduleName, Sequences

Count = Annotated[int, Gt(0)]

Index = Annotated[int, Ge(0)]
LayerBorder = Annotated[float, Ge(0), MultipleOf(0.5)]
"""A number of layers, whole or ending in a half."""


ANY_CARD = "unknown"
"""Type of the card of a run without a plan: what the machine has, a card or its processor."""
PROCESSOR = "CPU"
"""The type that a profile gives to a processor which measures itself. `CPU-node7` is one too, of a machine
without a card, as `discover` names it."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One process on one card."""

    rank: Index
    """Its number, from 0."""
    device: str
    """The card: NODE/NUMBER."""
    type: str
    """The card's type."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Layers [first, last) of the model on one or more replicas."""

    replicas: Annotated[tuple[Annotated[tuple[Index, ...], MinLen(1)], ...], MinLen(1)]
    """Each a tensor-parallel group, its ranks in order; of n replicas, micro-batch m runs on m mod n."""
    layers: tuple[LayerBorder, LayerBorder]
    """Half-open. A border may lie in the middle of a layer, between attention and feed-forward: [3.5, 7]."""
    embedding: bool = False
    """The stage holds the embedding; it is a pipeline's first."""
    head: bool = False
    """The stage holds the last norm, the head and the loss; it is a pipeline's last."""
    recompute: Recompute = "none"
    """What of the layers is computed again in the backward in place of being kept."""
    recompute_layers: Count | None = None
    """How many layers, counted from the first, are recomputed; None: all, unless `recompute` is none. Half a
    layer counts as one."""
    optimizer_share: Annotated[float, Gt(0), Le(1e6)] = 1.0
    """With optimizer_sharding: how much of the optimizer state the stage holds, relative to the other owners
    of the same layers (3 against 1: three quarters)."""
    in_flight: Count | None = None
    """Most micro-batches in flight in the stage, over all its replicas, under 1f1b; None: the number of
    replicas from this stage to the pipeline's end. A stage before a slow link gains from more."""
    experts: Annotated[tuple[Index, ...], MinLen(1)] | None = None
    """How many experts of each layer each rank of a replica holds, in order. The rest of a layer is whole on
    all of them. None: as even as possible, where a model with experts has replicas of several ranks."""
    optimizer_offload: Annotated[float, Ge(0), Le(1)] = 0.0
    """Fraction of its optimizer state that each rank of the stage keeps in host memory and steps there."""
    optimizer_disk: Annotated[float, Ge(0), Le(1)] = 0.0
    """Fraction of `optimizer_offload` that lies on the rank's disk, and is in host memory only while it is
    stepped."""
    activation_offload: Index = 0
    """How many layers, counted from the first, send their activations to the host between a forward and its
    backward. Half a layer counts as one."""
    resident_parts: Count | None = None
    """Of these layers' halves, over all micro-batches: how many keep their activations on the card at a time;
    wanted with activation_offload."""
    fetch_ahead: Count | None = None
    """How many halves of layers before they are needed activations begin to come back; None: 2."""
    parameter_offload: Index = 0
    """How many layers, counted from the first, keep their weights, gradients and optimizer state in host
    memory, a page for each layer."""
    page_slots: Count | None = None
    """How many of these pages may be on the card at a time; wanted with parameter_offload. With 3, one is in
    use, one on its way up and one on its way down."""

    def __post_init__(self) -> None:
        whole = tuple(int(border) if float(border).is_integer() else border for border in self.layers)
        object.__setattr__(self, "layers", whole)

    @property
    def num_layers(self) -> float:
        """Layers of the stage; may be 0, and end in a half."""
        return self.layers[1] - self.layers[0]

    @property
    def num_blocks(self) -> int:
        """Layers that the stage holds, wholly or one half of."""
        return math.ceil(self.layers[1]) - math.floor(self.layers[0]) if self.num_layers > 0 else 0

    @property
    def num_recomputed(self) -> int:
        """Number of recomputed layers, halves counting as one: the stage's first ones."""
        if self.recompute == "none":
            return 0
        return self.num_blocks if self.recompute_layers is None else self.recompute_layers

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """The halves of layers that the stage holds: (number of the layer in the stage, 0 or 1)."""
        first, end = self.layers
        halves = [(int(2 * first + i) // 2, int(2 * first + i) % 2) for i in range(int(2 * (end - first)))]
        return tuple((layer - math.floor(first), half) for layer, half in halves)

    @property
    def num_leaving_parts(self) -> int:
        """How many of `parts`, the first ones, send their activations to the host."""
        return sum(layer < self.activation_offload for layer, _ in self.parts)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the stage, replica by replica."""
        return tuple(rank for replica in self.replicas for rank in replica)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """One data-parallel share of the batch, and the stages that process it."""

    micro_batch_size: Sequences
    """Sequences of a micro-batch."""
    num_micro_batches: Sequences
    """Micro-batches of a step."""
    stages: Annotated[tuple[StagePlan, ...], MinLen(1)]
    """From the first layers to the last."""
    page_group: Count = 1
    """With parameter_offload: how many micro-batches pass a stage together, layer by layer, so that a page is
    fetched once for all of them."""

    @property
    def num_sequences(self) -> int:
        """Sequences per step that this pipeline processes."""
        return self.micro_batch_size * self.num_micro_batches

    @cached_property
    def ranks(self) -> frozenset[int]:
        """All ranks of the pipeline."""
        return frozenset(rank for stage in self.stages for rank in stage.ranks)

    def micro_batches_of(self, stage: StagePlan, number: int) -> int:
        """How many micro-batches of a step a stage's replica of that number computes."""
        return len(range(number, self.num_micro_batches, len(stage.replicas)))

    @cached_property
    def worker_replicas(self) -> tuple[tuple[int, ...], ...]:
        """The replica of each worker; a replica that holds several stages is one worker."""
        return tuple(dict.fromkeys(replica for stage in self.stages for replica in stage.replicas))

    @cached_property
    def workers(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the indices of its workers in `worker_replicas`, one per replica."""
        numbers = {replica: worker for worker, replica in enumerate(self.worker_replicas)}
        return tuple(tuple(numbers[replica] for replica in stage.replicas) for stage in self.stages)

    def depths(self, schedule: ScheduleName) -> tuple[int, ...] | None:
        """Most micro-batches in flight in each stage under 1f1b; None for other schedules, which set it."""
        if schedule != "1f1b":
            return None
        to_end = list(itertools.accumulate(len(stage.replicas) for stage in reversed(self.stages)))[::-1]
        return tuple(
            stage.in_flight or count * self.page_group
            for stage, count in zip(self.stages, to_end, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Forecast bytes on each card of a stage, by category."""

    parameters: float
    """Weights in the precision of the run."""
    gradients: float
    """In fp32."""
    optimizer: float
    """Both means and fp32 master weights, as far as they are on the card."""
    activations: float
    """What micro-batches in flight keep for their backward."""
    logits: float
    """Of the head and its loss."""
    buffers: float
    """Messages, reductions and the work space of one layer."""
    reserved: float
    """What the driver and the libraries take before training."""
    critic: float | None = None
    """Parameters, gradients and optimizer state of a critic that is trained beside the model; None: there is
    none."""

    @property
    def total(self) -> float:
        """Bytes of all categories."""
        return self.lasting + self.activations + self.logits + self.buffers

    @property
    def lasting(self) -> float:
        """Of these what is there from step to step."""
        return self.parameters + self.gradients + self.optimizer + self.reserved + (self.critic or 0.0)

    @property
    def categories(self) -> dict[str, float]:
        """Bytes by name of the categories that there are."""
        found = {name: getattr(self, name) for name in type(self).__dataclass_fields__}
        return {name: float(value) for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """Forecast of a stage: seconds of one micro-batch, and peak bytes on each of its cards."""

    pipeline: Index
    """Its number, from 0."""
    stage: Index
    """Its number in the pipeline, from 0."""
    forward_seconds: float
    """Of one micro-batch."""
    backward_seconds: float
    """Of one micro-batch, recompute included."""
    weight_seconds: float | None = None
    """The part of the backward that computes weight gradients, under a schedule that splits it."""
    peak_memory_bytes: float
    """The sum of `memory`."""
    memory: MemoryForecast
    host_memory_bytes: float = 0.0
    """On the host, for each card."""
    disk_bytes: float = 0.0
    """On the node's disk; each step reads and writes them."""
    stall_seconds: float = 0.0
    """Of a step, what the card waits for copies of activations."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of a step."""

    step_seconds: float
    """Of an optimizer step."""
    tokens_per_second: float
    """Of all cards together."""
    bubble_fraction: float
    """Share of the step in which cards wait, on average."""
    lower_bound_seconds: float
    """No searched plan takes less."""
    source: Literal["measured", "estimated"]
    """Whether the times come from a profile or from the catalogue of cards."""
    stages: tuple[StageForecast, ...] = ()
    """By pipeline and stage."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An uneven partition of a model over heterogeneous cards."""

    version: int = 1
    """Of the format."""
    cluster: str = ""
    """The name of the cluster that it was made for."""
    model: ModelConfig
    """The model that it cuts."""
    sequence_length: Count
    """Tokens of a sequence."""
    global_batch_size: Sequences
    """Sequences of an optimizer step, over all pipelines."""
    schedule: ScheduleName = "1f1b"
    """The order of forwards and backwards in every pipeline."""
    optimizer_sharding: bool = False
    """The owners of the same layers divide their optimizer state (ZeRO-1)."""
    sequence_parallel: bool = False
    """The ranks of a tensor-parallel group divide the tokens between the matrix products of a layer: each
    keeps less for the backward, and norms take less time. Not where cards share experts."""
    ranks: Annotated[tuple[RankPlan, ...], MinLen(1)]
    """The processes, by number."""
    pipelines: Annotated[tuple[PipelinePlan, ...], MinLen(1)]
    """Each a share of the batch and the stages that compute it."""
    device_types: dict[str, DeviceType] = field(default_factory=dict[str, DeviceType])
    """Types of cards that the plan describes itself; the others are in the catalogue."""
    forecast: Forecast | None = None
    """What the planner expects of a step; None in a plan written by hand."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def stages(self) -> tuple[StagePlan, ...]:
        """Those of all pipelines."""
        return tuple(stage for pipeline in self.pipelines for stage in pipeline.stages)

    @property
    def numbered_stages(self) -> Iterator[tuple[int, int, StagePlan]]:
        """Each stage, behind the number of its pipeline and its own there."""
        for p, pipeline in enumerate(self.pipelines):
            yield from ((p, s, stage) for s, stage in enumerate(pipeline.stages))

    def pipeline_of(self, rank: int) -> PipelinePlan:
        """The pipeline in which a rank works."""
        return next(pipeline for pipeline in self.pipelines if rank in pipeline.ranks)

    @cached_property
    def optimizer_shares(self) -> tuple[float, ...]:
        """The `optimizer_share` of each rank, by rank."""
        shares = {rank: stage.optimizer_share for stage in self.stages for rank in stage.ranks}
        return tuple(shares[rank] for rank in range(self.world_size))

    @cached_property
    def divided_layers(self) -> frozenset[int]:
        """The layers that some pipeline cuts between attention and feed-forward."""
        borders = {border for stage in self.stages for border in stage.layers}
        return frozenset(int(border) for border in borders if border % 1)

    @cached_property
    def layer_units(self) -> tuple[tuple[str, float, float], ...]:
        """The units between embedding and head as (name, first, end), in the model's order. A layer that some
        pipeline divides is two units in all of them: attention and feed-forward."""
        found: list[tuple[str, float, float]] = []
        for layer in range(self.model.num_layers):
            if layer in self.divided_layers:
                found.append((f"{layer}.attention", layer, layer + 0.5))
                found.append((f"{layer}.feed_forward", layer + 0.5, layer + 1))
            else:
                found.append((str(layer), layer, layer + 1))
        return tuple(found)

    @cached_property
    def divides_experts(self) -> bool:
        """Whether the ranks of some replica share the experts of their layers."""
        return bool(self.model.num_experts) and any(len(stage.replicas[0]) > 1 for stage in self.stages)

    @cached_property
    def paged_layers(self) -> frozenset[int]:
        """The layers that are pages of their hosts; their stages hold whole layers."""
        return frozenset(
            int(stage.layers[0]) + layer for stage in self.stages for layer in range(stage.parameter_offload)
        )

    @cached_property
    def cards_by_type(self) -> dict[str, int]:
        """Number of cards of each type."""
        return dict(Counter(entry.type for entry in self.ranks))

    def device_type(self, rank: int) -> DeviceType | None:
        """The type of a rank's card; None if neither the plan nor the catalogue describes it."""
        return self.find_type(self._type_names[rank])

    def has_rank(self, rank: int) -> bool:
        """Whether the plan lists a rank."""
        return rank in self._type_names

    def find_type(self, name: str) -> DeviceType | None:
        """A type of cards by name; None if neither the plan nor the catalogue describes it."""
        return self.device_types.get(name) or CATALOGUE.get(find_card(name) or name)

    @cached_property
    def _type_names(self) -> dict[int, str]:
        # Looked up for every rank and edge: a search through `ranks` each time would take their square.
        return {entry.rank: entry.type for entry in self.ranks}

    def via_host(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks have no common backend but gloo, so that messages go through host memory.

        A card of unknown type has backend nccl.
        """
        cards = [self.device_type(rank) for rank in ranks]
        return share_only_gloo(card.backend if card is not None else "nccl" for card in cards)


@dataclass(frozen=True)
class Node:
    """A machine, and the ranks that a plan has on it."""

    name: str
    ranks: tuple[int, ...]


def node_of(entry: RankPlan) -> str:
    """The node of a rank's card, which is called NODE/NUMBER."""
    return entry.device.rpartition("/")[0] or entry.device


def is_real_card(name: str, described: DeviceType | None) -> bool:
    """Whether a type, `described` if anything describes it, is neither a simulated card nor a processor."""
    is_simulated = described is not None and described.slowdown is not None
    return not is_simulated and name not in (ANY_CARD, PROCESSOR) and not name.startswith(f"{PROCESSOR}-")


def share_only_gloo(backends: Iterable[Backend]) -> bool:
    """Whether cards of these backends can exchange messages only over gloo."""
    found = set(backends)
    return len(found) > 1 or found == {"gloo"}


def single_card_plan(run: RunConfig) -> Plan:
    """The plan of a single process: the whole model on one card."""
    size, batch = run.train.micro_batch_size, run.train.global_batch_size
    return one_stage_plan(run.model, run.data.sequence_length, size=size, count=batch // size)


def one_stage_plan(model: ModelConfig, length: int, *, width: int = 1, size: int = 1, count: int = 1) -> Plan:
    """The plan of a whole model on a tensor-parallel group of this machine's cards, or on one card, for
    `count` micro-batches of `size` sequences of `length` tokens."""
    ranks = tuple(range(width))
    stage = StagePlan(replicas=(ranks,), layers=(0, model.num_layers), embedding=True, head=True)
    return Plan(
        model=model,
        sequence_length=length,
        global_batch_size=size * count,
        ranks=tuple(RankPlan(rank=rank, device="this machine", type=ANY_CARD) for rank in ranks),
        pipelines=(PipelinePlan(micro_batch_size=size, num_micro_batches=count, stages=(stage,)),),
    )


def uncatalogued_types(cluster: Cluster, names: set[str]) -> dict[str, DeviceType]:
    """The types among `names` that the cluster file describes, for `Plan.device_types`."""
    return {name: cluster.device_types[name] for name in sorted(names) if name in cluster.device_types}


def whole_layers(plan: Plan) -> frozenset[int]:
    """The numbers, among all units of a plan, of layers that no pipeline divides and that are no page of a
    host."""
    units = enumerate(plan.layer_units, start=1)
    return frozenset(u for u, (_, first, end) in units if end - first == 1 and first not in plan.paged_layers)


def plan_unit_parameters(plan: Plan) -> tuple[int, ...]:
    """Trained parameters of each unit of a plan; of the head its norm alone if the embedding is tied."""
    model = plan.model
    if not plan.divided_layers:
        return model.trained_unit_parameters
    embedding, *whole, head = model.trained_unit_parameters
    trained = [p for p in layer_table(model) if is_trained(model, p.name)]
    halves = [sum(p.size for p in trained if half_of(p.name) == half) for half in HALVES]
    layers: list[int] = []
    for layer, size in enumerate(whole):
        layers += halves if layer in plan.divided_layers else [size]
    return (embedding, *layers, head)


def expert_ranges(model: ModelConfig, stage: StagePlan) -> tuple[tuple[int, int], ...] | None:
    """The experts [first, last) of each rank of a stage's replicas; None if a rank holds all there are."""
    width = len(stage.replicas[0])
    if not model.num_experts or width == 1:
        return None
    size, rest = divmod(model.num_experts, width)
    counts = stage.experts or tuple(size + (rank < rest) for rank in range(width))
    borders = (0, *itertools.accumulate(counts))
    return tuple(itertools.pairwise(borders))


def expert_cuts(divisions: Iterable[tuple[tuple[int, int], ...]]) -> tuple[tuple[int, int], ...]:
    """The ranges of experts, none empty, between all the borders of these divisions of a layer."""
    borders = {border for division in divisions for part in division for border in part}
    return tuple(itertools.pairwise(sorted(borders)))


def expert_parameters(model: ModelConfig) -> int:
    """Parameters of the experts of one layer."""
    return sum(parameter.size for parameter in model.spec.layer(model) if parameter.sharding == "expert")


def held_experts(plan: Plan, stage: StagePlan) -> list[tuple[int, int]]:
    """Experts of each layer that each rank of a stage's replicas holds, in a plan that divides them, and
    their parameters in all layers of the stage."""
    model = plan.model
    layers = max(math.floor(stage.layers[1]) - math.ceil(stage.layers[0] - 0.5), 0)
    parameters = layers * expert_parameters(model)
    counts = [last - first for first, last in expert_ranges(model, stage) or ((0, model.num_experts),)]
    return [(count, count * parameters // max(model.num_experts, 1)) for count in counts]


def num_units(plan: Plan) -> int:
    """Number of units of a plan."""
    return plan.model.num_layers + len(plan.divided_layers) + 2


def stage_unit_range(plan: Plan, stage: StagePlan) -> range:
    """The numbers of a stage's units among all units of the plan."""
    if not plan.divided_layers:
        first, end = map(int, stage.layers)
        return range(0 if stage.embedding else first + 1, num_units(plan) if stage.head else end + 1)
    borders = [0.0] + [first for _, first, _ in plan.layer_units] + [float(plan.model.num_layers)]
    first, end = borders.index(stage.layers[0], 1), borders.index(stage.layers[1], 1)
    return range(0 if stage.embedding else first, len(borders) if stage.head else end)


def copied_bytes(plan: Plan, node: str, copies: HostCopies) -> float:
    """What checkpoints copy to the host of a node, of its own ranks and of the node whose neighbour it is."""
    ranks: dict[str, set[int]] = {}
    for entry in sorted(plan.ranks, key=lambda entry: entry.rank):
        ranks.setdefault(node_of(entry), set()).add(entry.rank)
    names = list(ranks)
    before = ranks[names[names.index(node) - 1]] if len(names) > 1 else set[int]()
    sizes = {"bytes_per_parameter": copies.trained_bytes, "frozen_bytes": copies.frozen_bytes}
    own = (copies.snapshots + copies.kept) * snapshot_bytes(plan, ranks[node], **sizes)
    return own + copies.kept * snapshot_bytes(plan, before, **sizes)


def snapshot_bytes(
    plan: Plan, ranks: Collection[int], *, bytes_per_parameter: int, frozen_bytes: int = 0
) -> float:
    """What a checkpoint has of these ranks: over all ranks, the state of each parameter once, of which all
    that hold it write equal parts.

    `bytes_per_parameter` is that of a trained one, `frozen_bytes` of any other.
    """
    trained, every, total = plan.model.trained_unit_parameters, plan.model.unit_parameters, 0.0
    for unit, (own, all_) in enumerate(zip(trained, every, strict=True)):
        size = own * bytes_per_parameter + (all_ - own) * frozen_bytes
        # The embedding lies with the first layer, the head with the last.
        layer = min(max(unit - 1, 0), plan.model.num_layers - 1)
        holders = [
            rank
            for stage in plan.stages
            if stage.layers[0] < layer + 1 and layer < stage.layers[1]
            for rank in stage.ranks
        ]
        total += size * sum(rank in ranks for rank in holders) / len(holders)
    return total


def unlike_owners(plan: Plan) -> tuple[int, int] | None:
    """Two ranks that each step the same weights by unlike arithmetic, so that they drift apart; None if there
    are none.

    They have cards of different types, or not the same part of the state on their hosts; simulated cards are
    all processors. With a sharded optimizer each element has one owner, but what is whole on the ranks of a
    tensor-parallel group.
    """
    kinds = {name: _arithmetic(plan.find_type(name)) or name for name in {e.type for e in plan.ranks}}
    types = {entry.rank: kinds[entry.type] for entry in plan.ranks}
    for replica in (replica for stage in plan.stages for replica in stage.replicas):
        for rank in replica:
            if types[rank] != types[replica[0]]:
                return replica[0], rank
    if plan.optimizer_sharding:
        return None
    holders: dict[int, tuple[int, object]] = {}
    last = num_units(plan) - 1
    for stage in plan.stages:
        units = set(stage_unit_range(plan, stage))
        if plan.model.tie_embeddings and last in units:
            units.add(0)
        away = (stage.optimizer_offload, stage.optimizer_disk, len(stage.replicas[0]))
        for replica in stage.replicas:
            kind = types[replica[0]], away if stage.optimizer_offload else None
            for unit in units:
                rank, other = holders.setdefault(unit, (replica[0], kind))
                if other != kind:
                    return rank, replica[0]
    return None


def _arithmetic(card: DeviceType | None) -> str | None:
    """What computes in place of a simulated card."""
    return PROCESSOR if card is not None and card.slowdown is not None else None
