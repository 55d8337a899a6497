"""The least seconds of a stage by kind, layers and micro-batches in flight: what time and memory allow.

A table is of one micro-batch size and one manner to share the optimizer's state; most tables are asked for
few stages, so the seconds are computed when they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from yuan_train.planner.costs.away import most_away
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.search.shapes import Options
from yuan_train.planner.search.stage_parts import Floats, Integers, Kind, StageParts

ROUNDING = 1 + 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTable:
    """Least seconds of stages, of one micro-batch size, whose optimizer state is shared in one manner."""

    parts: StageParts
    free: tuple[Floats, ...]
    """[4, V, X] of each way: bytes for micro-batches in flight."""
    most_in_flight: int

    @property
    def layers(self) -> Floats:
        """[X]: see `StageParts`."""
        return self.parts.layers

    @cached_property
    def least_seconds(self) -> Floats:
        """[4, N, X]: of a forward and a backward with one micro-batch in flight, by role, kind and entry of
        `layers`; inf where none fits."""
        roles, _, entries = self.parts.optimizer.shape
        seconds = self._seconds(slice(None), slice(None), slice(None), np.ones(1))[..., 0]
        return seconds[:, self.parts.variants].min(axis=2).reshape(roles, -1, entries)

    def seconds(self, role: int, kinds: Integers, entries: Integers) -> Floats:
        """[M, K]: the same of some stages, for 1 to K = `most_in_flight` micro-batches in flight."""
        in_flight = np.arange(1, self.most_in_flight + 1, dtype=np.float64)
        variants = self.parts.variants[kinds]
        found = [self._seconds(role, variants[:, e], entries, in_flight) for e in range(variants.shape[1])]
        return np.min(found, axis=0)

    def _seconds(
        self,
        role: int | slice,
        variants: Integers | slice,
        entries: Integers | slice,
        in_flight: Floats,
    ) -> Floats:
        """[..., K]"""
        blocks, halves = self.parts.blocks[entries][..., None], self.parts.halves[entries][..., None]
        found: list[Floats] = []
        for way, all_free in zip(self.parts.ways, self.free, strict=True):
            base, kept, free = (
                each[role, variants, entries][..., None] for each in (way.base, way.kept, all_free)
            )
            if not way.saved.any():
                fits = in_flight * kept <= free + abs(free) * 1e-9
                found.append(np.where(fits, base, np.inf))
                continue
            # As few recomputed layers as fit; what is half a layer may not count as one.
            shape = (-1, 1, 1) if isinstance(variants, slice) else (-1, 1)
            saved, added = (each[variants].reshape(shape) for each in (way.saved, way.added))
            over = np.maximum(in_flight * kept - free * ROUNDING, 0.0)
            count = np.ceil(over / np.maximum(in_flight * saved, 1e-300) - 1e-9)
            fits = (count <= blocks) & (free >= 0)
            found.append(np.where(fits, base + added * np.maximum(count - halves, 0.0), np.inf))
        return np.min(found, axis=0)


def stage_table(
    costs: Costs,
    kinds: Sequence[Kind],
    options: Options,
    parts: StageParts,
    *,
    owner_share: float,
    host_seconds: float,
    most_in_flight: int,
) -> StageTable:
    """The table of a micro-batch size: an owner of the optimizer's state holds at least `owner_share` of it,
    divided by the stage's replicas; hosts may step for so long."""
    shares, rooms = np.ones(parts.optimizer.shape[1]), np.zeros(parts.optimizer.shape[1])
    for kind, variants in zip(kinds, parts.variants, strict=True):
        shares[variants] = owner_share / kind.most if any(options.sharded) else 1.0
        if options.offload:
            rooms[variants] = _host_room(costs, kind, host_seconds, on_disk=options.offload_disk)
    optimizer = shares[:, None] * parts.optimizer
    held = optimizer - np.minimum(optimizer, rooms[:, None])
    return StageTable(
        parts=parts, free=tuple(way.free - held for way in parts.ways), most_in_flight=most_in_flight
    )


def _host_room(costs: Costs, kind: Kind, host_seconds: float, *, on_disk: bool) -> float:
    """Bytes of optimizer state that a card of a kind may have stepped by its host in so many seconds."""
    precision = costs.problem.precision
    rooms = (most_away(costs, replica[0], host_seconds, on_disk=on_disk) for replica in kind.examples)
    return max(rooms) * STATE_BYTES[precision].optimizer
