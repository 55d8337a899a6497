"""The plan problem: what is to be planned for, plans on its cards, and what a card has of its host and disk.

The cards of a node share its host and its disk equally. An offloaded part of the optimizer step copies
gradients down, steps on the host and copies weights up, chunk by chunk and so side by side; the card steps
its own part meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace

from yuan_train.config import plan as plans
from yuan_train.config.cluster import Card, Cluster, Disk, NodeGroup, Sends
from yuan_train.config.devices import DeviceType, Precision, usable_bytes
from yuan_train.config.model import ModelConfig
from yuan_train.config.profile import HostProfile, Profile
from yuan_train.config.run import BUCKET_SIZE, ReduceDtype, ScheduleName
from yuan_train.config.units import DISK_CHUNK, DISK_SLOTS, DISK_STATES
from yuan_train.planner.costs.workload import ELEMENT_BYTES, STATE_BYTES, TokenRows

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
