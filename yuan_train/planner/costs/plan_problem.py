"""The plan problem: what is to be planned for, and plans on its cards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace

from yuan_train.config import plan as plans
from yuan_train.config.cluster import Card, Cluster, Sends
from yuan_train.config.devices import Precision, usable_bytes
from yuan_train.config.model import ModelConfig
from yuan_train.config.profile import Profile
from yuan_train.config.run import BUCKET_SIZE, ReduceDtype, ScheduleName
from yuan_train.planner.costs.workload import (
    ELEMENT_BYTES,
    STATE_BYTES,
    TokenRows,
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
