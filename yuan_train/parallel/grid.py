"""A plan as coordinates and rank lists: arithmetic only, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

from yuan_train.config.plan import PipelinePlan, Plan, StagePlan


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the plan."""

    rank: int
    pipeline: int
    stage: int
    replica: int = 0
    position: int = 0
    """Within the replica's tensor-parallel group."""

    def __str__(self) -> str:
        return f"rank {self.rank} (pipeline {self.pipeline}, stage {self.stage})"


@dataclass(frozen=True)
class Bucket:
    """Adjacent units of the model whose owners are the same ranks; gradients are summed over them together.

    A unit is `embedding`, `layers.7` or `head`; a tied embedding is owned by first and last stages alike.
    """

    units: tuple[str, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """Who works where, who talks to whom, and who holds what."""

    plan: Plan

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The place of every rank, by rank."""
        found = {
            rank: Place(rank, p, s, r, i)
            for p, pipeline in enumerate(self.plan.pipelines)
            for s, stage in enumerate(pipeline.stages)
            for r, replica in enumerate(stage.replicas)
            for i, rank in enumerate(replica)
        }
        return tuple(found[rank] for rank in range(self.plan.world_size))

    def pipeline(self, place: Place) -> PipelinePlan:
        return self.plan.pipelines[place.pipeline]

    def stage(self, place: Place) -> StagePlan:
        return self.pipeline(place).stages[place.stage]

    def neighbour(self, place: Place, offset: int) -> int | None:
        """The rank that runs the stage `offset` away for the same micro-batches, or None at the ends."""
        stages = self.pipeline(place).stages
        peer = place.stage + offset
        return stages[peer].replicas[0][0] if 0 <= peer < len(stages) else None

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(sender, receiver) of every direction of every cut, in one order on all ranks."""
        return tuple(edge for pipeline in self.plan.pipelines for edge in _edges(pipeline))

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

    def _owners(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        embedding = self._holders(lambda stage: stage.embedding)
        head = self._holders(lambda stage: stage.head)
        tied = self.plan.model.tie_embeddings
        yield "embedding", tuple(sorted({*embedding, *head})) if tied else embedding
        for layer in range(self.plan.model.num_layers):
            yield f"layers.{layer}", self._holders(partial(_holds_layer, layer=layer))
        yield "head", head

    def _holders(self, holds: Callable[[StagePlan], bool]) -> tuple[int, ...]:
        ranks = [r for p in self.plan.pipelines for stage in p.stages if holds(stage) for r in stage.ranks]
        return tuple(sorted(ranks))


def unit_of(parameter: str) -> str:
    """The unit that a parameter belongs to, by its global name."""
    parts = parameter.split(".")
    if parts[0] == "layers":
        return f"layers.{parts[1]}"
    return "embedding" if parts[0] == "embedding" else "head"


def _holds_layer(stage: StagePlan, *, layer: int) -> bool:
    return stage.layers[0] <= layer < stage.layers[1]


def _edges(pipeline: PipelinePlan) -> Iterator[tuple[int, int]]:
    for left, right in zip(pipeline.stages, pipeline.stages[1:], strict=False):
        a, b = left.replicas[0][0], right.replicas[0][0]
        yield a, b
        yield b, a
