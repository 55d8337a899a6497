"""A plan as coordinates and rank lists: arithmetic only, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.schedule.step import Workers, worker_of

Replica = tuple[int, ...]
"""The ranks of a tensor-parallel group, in order."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the plan."""

    rank: int
    pipeline: int
    worker: int
    """Its replica's number within the pipeline; see `schedule.step.Workers`."""
    position: int
    """Within the replica."""
    stages: tuple[int, ...]
    """The stages that it runs: one, or several virtual ones."""

    def __str__(self) -> str:
        stages = ", ".join(map(str, self.stages))
        word = "stage" if len(self.stages) == 1 else "stages"
        return f"rank {self.rank} (pipeline {self.pipeline}, {word} {stages})"


@dataclass(frozen=True)
class Edge:
    """One direction of a cut between two workers: messages that leave `stage`.

    With virtual stages, activations to the next stage and gradients to the one before may have the same two
    ranks; they are two edges.
    """

    pipeline: int
    stage: int
    onward: bool
    sender: int
    receiver: int


@dataclass(frozen=True)
class Bucket:
    """Adjacent units of the model that the same replicas own; gradients are summed over them together.

    A unit is `embedding`, `layers.7` or `head`; a tied embedding is owned by first and last stages alike.
    """

    units: tuple[str, ...]
    owners: tuple[Replica, ...]

    @property
    def num_slices(self) -> int:
        """The least common multiple of the owners' widths: each owner holds whole slices."""
        return math.lcm(*map(len, self.owners))

    def slice_group(self, index: int) -> tuple[int, ...]:
        """The ranks that hold a slice, one of each owner."""
        return tuple(sorted(owner[index * len(owner) // self.num_slices] for owner in self.owners))

    def slices_of(self, rank: int) -> range:
        """The slices that a rank holds; empty if it owns nothing here."""
        for owner in self.owners:
            if rank in owner:
                each = self.num_slices // len(owner)
                first = owner.index(rank) * each
                return range(first, first + each)
        return range(0)


@dataclass(frozen=True)
class Grid:
    """Who works where, who talks to whom, and who holds what."""

    plan: Plan

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The place of every rank, by rank."""
        found: dict[int, Place] = {}
        for p, pipeline in enumerate(self.plan.pipelines):
            for worker, replica in enumerate(self.replicas(p)):
                stages = tuple(s for s, stage in enumerate(pipeline.stages) if replica in stage.replicas)
                for position, rank in enumerate(replica):
                    found[rank] = Place(rank, p, worker, position, stages)
        return tuple(found[rank] for rank in range(self.plan.world_size))

    def replicas(self, pipeline: int) -> tuple[Replica, ...]:
        """The workers of a pipeline as ranks, by the worker's number."""
        return self._crews[pipeline][0]

    def workers(self, pipeline: int) -> Workers:
        """For each stage of a pipeline its workers' numbers."""
        return self._crews[pipeline][1]

    @cached_property
    def _crews(self) -> tuple[tuple[tuple[Replica, ...], Workers], ...]:
        """Replicas and workers of every pipeline; every message asks for them."""
        return tuple(_crew(pipeline) for pipeline in self.plan.pipelines)

    def pipeline(self, place: Place) -> PipelinePlan:
        return self.plan.pipelines[place.pipeline]

    def replica(self, place: Place) -> Replica:
        """The tensor-parallel group of a rank."""
        return self.replicas(place.pipeline)[place.worker]

    def peer(self, place: Place, stage: int, micro_batch: int) -> int:
        """The first rank of the worker that runs a micro-batch on a stage of the same pipeline."""
        worker = worker_of(self.workers(place.pipeline), stage, micro_batch)
        return self.replicas(place.pipeline)[worker][0]

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every edge on which a message goes, in one order on all ranks."""
        return tuple(edge for p in range(len(self.plan.pipelines)) for edge in self._edges(p))

    @cached_property
    def staged(self) -> dict[Edge, bool]:
        """Whether the messages of an edge go through host memory."""
        return {edge: self.plan.staged((edge.sender, edge.receiver)) for edge in self.edges}

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """All units of the model, grouped by owners, in the model's order."""
        grouped: list[Bucket] = []
        for unit, owners in self._owners():
            if grouped and grouped[-1].owners == owners:
                grouped[-1] = Bucket((*grouped[-1].units, unit), owners)
            else:
                grouped.append(Bucket((unit,), owners))
        return tuple(grouped)

    def first_sequence(self, place: Place) -> int:
        """Offset of the pipeline's share within a global batch, in sequences."""
        return sum(pipeline.num_sequences for pipeline in self.plan.pipelines[: place.pipeline])

    def _edges(self, p: int) -> Iterator[Edge]:
        replicas, workers = self.replicas(p), self.workers(p)
        for left in range(len(workers) - 1):
            pairs = dict.fromkeys(
                (worker_of(workers, left, m), worker_of(workers, left + 1, m))
                for m in range(self.plan.pipelines[p].num_micro_batches)
            )
            for a, b in pairs:
                if a != b:
                    yield Edge(p, left, True, replicas[a][0], replicas[b][0])
                    yield Edge(p, left + 1, False, replicas[b][0], replicas[a][0])

    def _owners(self) -> Iterator[tuple[str, tuple[Replica, ...]]]:
        embedding = self._holders(lambda stage: stage.embedding)
        head = self._holders(lambda stage: stage.head)
        tied = self.plan.model.tie_embeddings
        yield "embedding", tuple(sorted({*embedding, *head})) if tied else embedding
        for layer in range(self.plan.model.num_layers):
            yield f"layers.{layer}", self._holders(partial(_holds_layer, layer=layer))
        yield "head", head

    def _holders(self, holds: Callable[[StagePlan], bool]) -> tuple[Replica, ...]:
        stages = [stage for pipeline in self.plan.pipelines for stage in pipeline.stages if holds(stage)]
        return tuple(sorted(replica for stage in stages for replica in stage.replicas))


def _crew(pipeline: PipelinePlan) -> tuple[tuple[Replica, ...], Workers]:
    replicas = tuple(dict.fromkeys(replica for stage in pipeline.stages for replica in stage.replicas))
    numbers = {replica: worker for worker, replica in enumerate(replicas)}
    workers = tuple(tuple(numbers[replica] for replica in stage.replicas) for stage in pipeline.stages)
    return replicas, workers


def unit_of(parameter: str) -> str:
    """The unit that a parameter belongs to, by its global name."""
    parts = parameter.split(".")
    if parts[0] == "layers":
        return f"layers.{parts[1]}"
    return "embedding" if parts[0] == "embedding" else "head"


def _holds_layer(stage: StagePlan, *, layer: int) -> bool:
    return stage.layers[0] <= layer < stage.layers[1]
