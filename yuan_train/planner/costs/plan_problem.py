"""The plan problem, and what every part of the model costs on every card, each looked up once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from yuan_train.config import plan as plans
from yuan_train.config.cluster import Card, Cluster, Sends
from yuan_train.config.devices import Precision, usable_bytes
from yuan_train.config.model import ModelConfig
from yuan_train.config.profile import Profile, StageStart
from yuan_train.config.run import BUCKET_SIZE, Recompute, ReduceDtype, ScheduleName
from yuan_train.planner.costs import unit_costs
from yuan_train.planner.costs.host import HostShare, host_share
from yuan_train.planner.costs.links import (
    Topology,
    all_gather_seconds,
    allreduce_seconds,
    make_topology,
    reduce_scatter_seconds,
)
from yuan_train.planner.costs.workload import (
    ELEMENT_BYTES,
    STATE_BYTES,
    HalfShare,
    TensorGroup,
    TokenRows,
    statistic_bytes,
)

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


@dataclass(frozen=True)
class Costs:
    """Card costs and links of a plan problem, each looked up once."""

    problem: PlanProblem
    topology: Topology
    cards: dict[str, Card]
    known: dict[tuple[str, int, Recompute, int], unit_costs.CardCosts]
    """What `of` has looked up, by its arguments."""
    groups: dict[tuple[object, ...], unit_costs.CardCosts]
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
        if divided == self.problem.sequence_parallel or not any(map(_is_wide, plan.pipelines)):
            return self
        problem = replace(self.problem, sequence_parallel=divided)
        return replace(self, problem=problem, known={}, groups={}, fastest={})

    def of(
        self, type_name: str, micro_batch_size: int, recompute: Recompute, tensor_parallel: int = 1
    ) -> unit_costs.CardCosts:
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
    ) -> unit_costs.CardCosts:
        problem = self.problem

        def look_up(model: ModelConfig, profile: Profile | None) -> unit_costs.CardCosts:
            return unit_costs.card_costs(
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
        head = look_up(unit_costs.value_model(problem.model), None).units[-1]
        if self.body is not None:
            return look_up(self.body.problem.model, profile).with_head(head)
        own = look_up(problem.model, profile)
        return replace(own, units=tuple(map(unit_costs.with_critic, own.units, own.with_head(head).units)))

    def of_replica(
        self, replica: Replica, micro_batch_size: int, recompute: Recompute
    ) -> unit_costs.CardCosts:
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
    ) -> unit_costs.CardCosts:
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
            start = slowest.start
            self.groups[key] = replace(
                slowest,
                units=tuple(_with_collectives(u, ring, divided=(scatter, gather)) for u in slowest.units),
                # A stage divides the hidden state that it gets, and ends with a whole one.
                start=StageStart(
                    forward_seconds=start.forward_seconds + gather,
                    backward_seconds=start.backward_seconds + gather,
                ),
            )
        return self.groups[key]

    def of_experts(
        self, type_name: str, micro_batch_size: int, recompute: Recompute, experts: int
    ) -> unit_costs.CardCosts:
        """The same on a card that holds so many experts of each layer, and all else whole."""
        key = (type_name, micro_batch_size, recompute, "experts", experts)
        if key not in self.groups:
            problem = self.problem
            whole = self.of(type_name, micro_batch_size, recompute)
            bare = unit_costs.bare_profile(problem.profile) if whole.source == "measured" else None
            found = unit_costs.expert_card_costs(
                replace(whole, units=tuple(map(unit_costs.without_critic, whole.units))),
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
                found = replace(found, units=tuple(map(unit_costs.with_critic, found.units, critics)))
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
        counts = stage_experts(plan, stage)
        held = [_held_expert_parameters(plan, stage, count) for count in counts]
        for card, count, parameters in zip(replica, counts, held, strict=True):
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
        return float(rows.tokens * self.problem.model.hidden_size * ELEMENT_BYTES[rows.precision])


def node_host_bytes(cluster: Cluster, node: str) -> float:
    """Host memory of a node: as the cluster file states it, or else as much as its cards have together."""
    group = cluster.groups[node]
    if group.host is not None:
        return float(group.host.memory)
    return float(sum(cluster.device_type(name).memory for name in group.types))


@dataclass(frozen=True, kw_only=True)
class StageUnits:
    """The costs of a stage's units on one replica, or on one card of it where they share experts."""

    span: range
    """The numbers of the units among all of the plan."""
    units: tuple[unit_costs.UnitCost, ...]
    """Embedding, layers or halves of layers, head: those that the stage holds, as the plan divides them."""
    start: StageStart
    """What the stage takes besides them."""
    layer: unit_costs.UnitCost
    """A whole layer."""
    halves: tuple[tuple[HalfShare, HalfShare], tuple[HalfShare, HalfShare]]
    """Of a layer that is recomputed, and of one that is not."""
    boundary_bytes: float
    update_bytes_per_second: float
    source: unit_costs.Source
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
    def started(self) -> tuple[unit_costs.UnitCost, ...]:
        """The units; the last one's seconds with the stage's start."""
        *others, last = self.units
        forward = last.forward_seconds + self.start.forward_seconds
        backward = last.backward_seconds + self.start.backward_seconds
        return (*others, replace(last, forward_seconds=forward, backward_seconds=backward))


def _stage_units(
    plan: plans.Plan, stage: plans.StagePlan, part: unit_costs.CardCosts, plain: unit_costs.CardCosts
) -> StageUnits:
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
    plan: plans.Plan, stage: plans.StagePlan, part: unit_costs.CardCosts, plain: unit_costs.CardCosts
) -> Iterator[unit_costs.UnitCost]:
    """The same of a plan that divides layers."""
    if stage.embedding:
        yield part.units[0]
    recomputed = math.floor(stage.layers[0]) + stage.num_recomputed
    for _, first, end in plan.layer_units:
        if stage.layers[0] <= first and end <= stage.layers[1]:
            layer = int(first)
            source = part if layer < recomputed else plain
            whole = source.units[layer + 1]
            yield (
                whole if end - first == 1 else unit_costs.share_of_layer(whole, source.halves[first > layer])
            )
    if stage.head:
        yield part.units[-1]


def stage_experts(plan: plans.Plan, stage: plans.StagePlan) -> tuple[int, ...]:
    """Experts of each layer that each rank of a stage's replicas holds, in a plan that divides them."""
    ranges = plans.expert_ranges(plan.model, stage) or ((0, plan.model.num_experts),)
    return tuple(last - first for first, last in ranges)


def _held_expert_parameters(plan: plans.Plan, stage: plans.StagePlan, experts: int) -> int:
    """Parameters of the experts of a stage's layers on a rank that holds so many of each."""
    layers = max(math.floor(stage.layers[1]) - math.ceil(stage.layers[0] - 0.5), 0)
    return layers * experts * plans.expert_parameters(plan.model) // max(plan.model.num_experts, 1)


def _with_collectives(
    unit: unit_costs.UnitCost,
    allreduce_seconds: float,
    small: float = 0.0,
    divided: tuple[float, float] = (0.0, 0.0),
) -> unit_costs.UnitCost:
    """The unit with its all-reduces, or where tokens are `divided` its reduce-scatters and all-gathers, and
    with a `small` one beside each of the backward's."""
    each = sum(divided) if unit.divides_tokens else allreduce_seconds
    backward = unit.backward_collectives * (each + small) + unit.gathered_again * divided[1]
    return replace(
        unit,
        forward_seconds=unit.forward_seconds + unit.forward_collectives * each,
        backward_seconds=unit.backward_seconds + backward,
    )


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
        sequence_parallel=problem.sequence_parallel and any(map(_is_wide, made)),
        ranks=tuple(
            plans.RankPlan(rank=rank, device=card.name, type=card.type) for card, rank in rank_of.items()
        ),
        pipelines=made,
        device_types=plans.uncatalogued_types(problem.cluster, {card.type for card in cards}),
    )


def _is_wide(pipeline: plans.PipelinePlan) -> bool:
    """Whether it has a tensor-parallel group of several cards."""
    return any(len(replica) > 1 for stage in pipeline.stages for replica in stage.replicas)


def make_costs(problem: PlanProblem) -> Costs:
    """The costs of a problem; the cluster's `reserved` bytes are the profile's where it measured them. Raises
    ConfigError if the profile does not belong to the problem."""
    if problem.profile is not None:
        unit_costs.check_profile(
            problem.profile,
            problem.model,
            sequence_length=problem.sequence_length,
            precision=problem.precision,
            compile=problem.compile,
        )
        problem = replace(problem, cluster=_with_measured_reserve(problem.cluster, problem.profile))
    cards = {card.name: card for card in problem.cluster.cards}
    return Costs(problem, make_topology(problem.cluster, problem.profile), cards, {}, {})


def critic_of(costs: Costs) -> Costs:
    """The costs of a policy's critic on the same cards: its embedding and layers, a head of one number."""
    problem = replace(costs.problem, model=unit_costs.value_model(costs.problem.model), critic=False)
    return Costs(problem, costs.topology, costs.cards, {}, {}, body=costs)


def _with_measured_reserve(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster with its cards' `reserved` as the profile measured it, where it did."""
    types = dict(cluster.device_types)
    for name in {name for group in cluster.nodes for name in group.types}:
        measured = profile.reserved_bytes(name)
        if measured is not None:
            types[name] = replace(cluster.device_type(name), reserved=math.ceil(measured))
    return replace(cluster, device_types=types)
