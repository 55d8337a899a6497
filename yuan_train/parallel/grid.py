"""Rank coordinates, edges and buckets of a plan: arithmetic only, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from yuan_train.config.devices import REAL, Simulated
from yuan_train.config.errors import PlanError
from yuan_train.config.model import HALVES, half_of
from yuan_train.config.plan import (
    PipelinePlan,
    Plan,
    expert_cuts,
    expert_parameters,
    expert_ranges,
    plan_unit_parameters,
    stage_unit_range,
    whole_layers,
)
from yuan_train.config.run import BUCKET_SIZE
from yuan_train.schedule.copies import TooFewResident, copied_programs
from yuan_train.schedule.flow import group_units, is_halved
from yuan_train.schedule.schedules import ProgramShape
from yuan_train.schedule.step import Workers, worker_of

Replica = tuple[int, ...]
"""The ranks of a tensor-parallel group, in order."""


@dataclass(frozen=True)
class RankCoord:
    """The coordinates of a rank in the plan."""

    rank: int
    pipeline: int
    worker: int
    """Number of its replica in the pipeline; see `schedule.step.Workers`."""
    tensor_rank: int
    """Position inside the replica, its tensor-parallel group."""
    stages: tuple[int, ...]
    """The stages that it runs: one, or several virtual stages."""

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        word = "stage" if len(self.stages) == 1 else "stages"
        return f"rank {self.rank} (pipeline {self.pipeline}, {word} {stages})"


@dataclass(frozen=True)
class Edge:
    """One direction of a cut between two workers: the messages that leave `stage`.

    With virtual stages, the activations of one stage and the gradients of another may have the same sender
    and receiver; they are two edges.
    """

    pipeline: int
    stage: int
    is_activation: bool
    """Whether it carries activations to the next stage; else gradients to the previous one."""
    sender: int
    """Rank that sends; the first of its replica, as `receiver` is of its own."""
    receiver: int


@dataclass(frozen=True)
class Bucket:
    """Adjacent units of the model with the same owners; their gradients are reduced together.

    A unit is `embedding`, `layers.7` or `head`, or half a layer that a pipeline of the plan divides:
    `layers.7.attention`, `layers.7.feed_forward`. A tied embedding is owned by both the first and the last
    stages.
    """

    units: tuple[str, ...]
    owners: tuple[Replica, ...]
    """The replicas that hold the units' parameters."""
    experts: tuple[int, int] | None = None
    """Of a layer's experts that pipelines divide differently: the [first, last) that these owners hold."""

    @cached_property
    def num_slices(self) -> int:
        """The least common multiple of the owners' widths: each rank holds a whole number of slices."""
        return math.lcm(*map(len, self.owners))

    def slice_group(self, index: int) -> tuple[int, ...]:
        """The ranks that hold a slice, one of each owner, sorted."""
        return tuple(sorted(owner[index * len(owner) // self.num_slices] for owner in self.owners))

    def slices_of(self, rank: int) -> range:
        """The slices that a rank holds; empty if it is in none of the owners."""
        for owner in self.owners:
            if rank in owner:
                each = self.num_slices // len(owner)
                first = owner.index(rank) * each
                return range(first, first + each)
        return range(0)


@dataclass(frozen=True)
class Grid:
    """The layout of a plan: coordinates of every rank, edges between workers, owners of every unit."""

    plan: Plan
    bucket_size: int = BUCKET_SIZE
    """The most parameters of a bucket of several units."""

    @cached_property
    def coords(self) -> tuple[RankCoord, ...]:
        """The coordinates of every rank, by rank."""
        found: dict[int, RankCoord] = {}
        for p, pipeline in enumerate(self.plan.pipelines):
            stages: dict[Replica, list[int]] = {}
            for s, stage in enumerate(pipeline.stages):
                for replica in stage.replicas:
                    stages.setdefault(replica, []).append(s)
            for worker, replica in enumerate(self.replicas(p)):
                held = tuple(stages[replica])
                for tensor_rank, rank in enumerate(replica):
                    found[rank] = RankCoord(rank, p, worker, tensor_rank, held)
        return tuple(found[rank] for rank in range(self.plan.world_size))

    def label(self, coord: RankCoord) -> str:
        """The coordinates of a rank and its card, for people."""
        card = next(entry.device for entry in self.plan.ranks if entry.rank == coord.rank)
        return f"{coord} on {card}"

    def replicas(self, pipeline: int) -> tuple[Replica, ...]:
        """The ranks of each worker of a pipeline, by the worker's number."""
        return self.plan.pipelines[pipeline].worker_replicas

    def ranks_of(self, pipeline: int) -> tuple[int, ...]:
        """All ranks of a pipeline, the lowest first."""
        return tuple(sorted({rank for replica in self.replicas(pipeline) for rank in replica}))

    def simulated(self, rank: int) -> Simulated:
        """How long work lasts on a rank's card, if a process simulates it."""
        device_type = self.plan.device_type(rank)
        return REAL if device_type is None else device_type.simulated

    def workers(self, pipeline: int) -> Workers:
        """The workers' numbers of each stage of a pipeline."""
        return self.plan.pipelines[pipeline].workers

    def shape(self, pipeline: int) -> ProgramShape:
        """What makes the programs of a pipeline."""
        plan, part = self.plan, self.plan.pipelines[pipeline]
        depths = part.depths(plan.schedule)
        return ProgramShape(plan.schedule, part.workers, part.num_micro_batches, depths, part.page_group)

    def check_resident_parts(self) -> None:
        """Raise PlanError where the schedule holds more halves of layers whose activations leave on a card
        than the plan lets stay there."""
        for p, part in enumerate(self.plan.pipelines):
            if any(stage.activation_offload for stage in part.stages):
                try:
                    copied_programs(self.shape(p), part.stages)
                except TooFewResident as error:
                    raise PlanError(f"pipelines[{p}]: {error}") from error

    def pipeline(self, coord: RankCoord) -> PipelinePlan:
        """The pipeline of a rank."""
        return self.plan.pipelines[coord.pipeline]

    def replica(self, coord: RankCoord) -> Replica:
        """The tensor-parallel group of a rank, itself included."""
        return self.replicas(coord.pipeline)[coord.worker]

    def peer(self, coord: RankCoord, stage: int, micro_batch: int) -> int:
        """The first rank of the worker that runs a micro-batch on a stage of the same pipeline."""
        worker = worker_of(self.workers(coord.pipeline), stage, micro_batch)
        return self.replicas(coord.pipeline)[worker][0]

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every edge that carries a message, in the same order on all ranks."""
        return tuple(edge for p in range(len(self.plan.pipelines)) for edge in self._edges(p))

    @cached_property
    def via_host(self) -> dict[Edge, bool]:
        """Whether the messages of each edge go through host memory."""
        return {edge: self.plan.via_host((edge.sender, edge.receiver)) for edge in self.edges}

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All units of the model, in the model's order; see `schedule.buckets.group_units`."""
        units, owners = zip(*self._owners(), strict=True)
        sizes = self._unit_parameters(units)
        groups = group_units(owners, sizes, bucket_size=self.bucket_size)
        runs = [run for group in groups for run in self._pages_apart(units, group)]
        found = {run: Bucket(units[run.start : run.stop], owners[run.start]) for run in runs}
        if self.plan.divides_experts:
            return tuple(self._with_experts(list(found.values())))
        return tuple(
            part for run, bucket in found.items() for part in self._in_halves(bucket, run.start, sizes)
        )

    def _in_halves(self, bucket: Bucket, unit: int, sizes: Sequence[int]) -> Iterator[Bucket]:
        """The bucket that begins at a unit or, if that is a layer with too many parameters, its halves."""
        size = self.bucket_size
        if is_halved(sizes[unit], num_owners=len(bucket.owners), bucket_size=size) and unit in self._whole:
            for half in HALVES:
                yield replace(bucket, units=(f"{bucket.units[0]}.{half}",))
        else:
            yield bucket

    @cached_property
    def _whole(self) -> frozenset[int]:
        return whole_layers(self.plan)

    @cached_property
    def layers_in_halves(self) -> frozenset[int]:
        """The layers whose halves are in different buckets, or may be."""
        halved = {
            int(unit.split(".")[1])
            for bucket in self.buckets
            for unit in bucket.units
            if unit.endswith(f".{HALVES[0]}")
        }
        return self.plan.divided_layers | halved

    def _pages_apart(self, units: Sequence[str], group: range) -> Iterator[range]:
        """A group of units, divided where one is a page of the host: that is a bucket of its own."""
        start = group.start
        for unit in group:
            if units[unit] in self.paged_units:
                if start < unit:
                    yield range(start, unit)
                yield range(unit, unit + 1)
                start = unit + 1
        if start < group.stop:
            yield range(start, group.stop)

    @cached_property
    def paged_units(self) -> frozenset[str]:
        """The layers that are pages of their hosts; their stages hold whole layers."""
        return frozenset(f"layers.{layer}" for layer in self.plan.paged_layers)

    def _unit_parameters(self, units: Sequence[str]) -> tuple[int, ...]:
        """Parameters of each unit; experts that ranks share are in buckets of their own."""
        sizes = plan_unit_parameters(self.plan)
        if not self.plan.divides_experts:
            return sizes
        experts = expert_parameters(self.plan.model)
        return tuple(size - experts * (has_experts(unit)) for unit, size in zip(units, sizes, strict=True))

    def _with_experts(self, buckets: Sequence[Bucket]) -> Iterator[Bucket]:
        """The buckets, each followed by those of its layers' experts: one for each rank of a replica.

        What is whole on every rank of a replica has each of them as an owner: the first rank of each replica
        adds its gradient, the others add zeros, so that the sum is right and all can share its state.

        Where replicas divide a layer's experts differently, they are cut at all the borders that there are:
        each range has an owner in every replica.
        """
        for bucket in buckets:
            ranks = tuple((rank,) for replica in bucket.owners for rank in replica)
            yield Bucket(bucket.units, tuple(sorted(ranks)))
            for unit in filter(has_experts, bucket.units):
                divisions = self._divisions[unit]
                alike = len(set(divisions.values())) == 1
                for experts in expert_cuts(divisions.values()):
                    owners = tuple(
                        sorted((_holder(replica, divisions[replica], experts),) for replica in bucket.owners)
                    )
                    yield Bucket((experts_of(unit),), owners, None if alike else experts)

    @cached_property
    def _divisions(self) -> dict[str, dict[Replica, tuple[tuple[int, int], ...]]]:
        """By unit with experts and by replica: the experts of each rank, contiguous ranges in order."""
        names = self._unit_names
        found: dict[str, dict[Replica, tuple[tuple[int, int], ...]]] = {}
        for stage in self.plan.stages:
            ranges = expert_ranges(self.plan.model, stage) or ((0, self.plan.model.num_experts),)
            for unit in filter(has_experts, (names[n] for n in stage_unit_range(self.plan, stage))):
                found.setdefault(unit, {}).update(dict.fromkeys(stage.replicas, ranges))
        return found

    @cached_property
    def _unit_names(self) -> tuple[str, ...]:
        return ("embedding", *(f"layers.{name}" for name, _, _ in self.plan.layer_units), "head")

    def first_sequence(self, coord: RankCoord) -> int:
        """Offset of the share of the rank's pipeline in a global batch, in sequences."""
        return sum(pipeline.num_sequences for pipeline in self.plan.pipelines[: coord.pipeline])

    def _edges(self, p: int) -> Iterator[Edge]:
        replicas, workers = self.replicas(p), self.workers(p)
        for left in range(len(workers) - 1):
            # Which workers exchange a micro-batch repeats after so many.
            period = math.lcm(len(workers[left]), len(workers[left + 1]))
            pairs = dict.fromkeys(
                (worker_of(workers, left, m), worker_of(workers, left + 1, m))
                for m in range(min(period, self.plan.pipelines[p].num_micro_batches))
            )
            for a, b in pairs:
                if a != b:
                    yield Edge(p, left, True, replicas[a][0], replicas[b][0])
                    yield Edge(p, left + 1, False, replicas[b][0], replicas[a][0])

    def _owners(self) -> Iterator[tuple[str, tuple[Replica, ...]]]:
        names = self._unit_names
        holders: list[list[Replica]] = [[] for _ in names]
        for stage in self.plan.stages:
            for unit in stage_unit_range(self.plan, stage):
                holders[unit] += stage.replicas
        if self.plan.model.tie_embeddings:
            holders[0] = list({*holders[0], *holders[-1]})
        for name, replicas in zip(names, holders, strict=True):
            yield name, tuple(sorted(replicas))


def _holder(replica: Replica, ranges: Sequence[tuple[int, int]], experts: tuple[int, int]) -> int:
    """The rank of a replica whose range contains these experts."""
    first, last = experts
    return next(r for r, (a, b) in zip(replica, ranges, strict=True) if a <= first and last <= b)


def has_experts(unit: str) -> bool:
    """Whether a unit of a model with experts has some: a layer, or its feed-forward."""
    return unit.startswith("layers.") and not unit.endswith(".attention")


def experts_of(unit: str) -> str:
    """The name of a unit's experts, where ranks share them."""
    return f"layers.{unit.split('.')[1]}.experts"


def unit_of(parameter: str, divided: Collection[int] = (), *, apart: bool = False) -> str:
    """The unit of a parameter, given its global name and the divided layers; the final norm is in `head`.

    With `apart`, the experts of a layer are a unit of their own.
    """
    parts = parameter.split(".")
    if parts[0] == "layers":
        if apart and parts[2] == "experts":
            return experts_of(parameter)
        half = f".{half_of(parts[2])}" if int(parts[1]) in divided else ""
        return f"layers.{parts[1]}{half}"
    return "embedding" if parts[0] == "embedding" else "head"
