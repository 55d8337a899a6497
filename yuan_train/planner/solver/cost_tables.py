"""What a stage of an instance costs over [first unit, end unit), by kind of slot and micro-batches in flight.

1F1B (Narayanan et al., 2021) holds min(stages to the end, m) micro-batches in flight, so a table belongs to
a distance from the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from yuan_train.planner.solver.instance import SPLIT_SCHEDULES, Cut, Floats, Instance, Integers
from yuan_train.planner.solver.overlap import exposed_grad_reduce, exposed_weight_sync, with_halves
from yuan_train.planner.solver.ranges import prefix_sums, range_maxima, range_sums
from yuan_train.schedule.schedules import MESSAGES_PER_EDGE, in_flight


class CostTables:
    """Stage costs over [first, end) by slot and micro-batches in flight, each computed on first use."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.kind_of = _kinds(instance)
        self.kinds = np.unique(self.kind_of).tolist()
        self.number_of = np.searchsorted(self.kinds, self.kind_of)
        """[D]: index of each slot's kind in `kinds`."""
        self._rings, self.ring_of = _distinct_rings(instance, self.kind_of)
        """`ring_of` [D]: index of what a slot's kind and its reductions together cost."""
        self._seconds: dict[int, tuple[Floats, Integers]] = {}
        self._prefix: dict[str, Floats] = {}
        self._bytes: dict[int, tuple[Floats, Floats]] = {}
        self._work: dict[int, Floats] = {}
        units = instance.num_units
        first, end = np.meshgrid(np.arange(units + 1), np.arange(units + 1), indexing="ij")
        self._has_next = (end < units).astype(float)
        self._num_edges = (first > 0) + self._has_next
        num_working = np.concatenate(([0], instance.has_work.cumsum()))
        self._empty = num_working[end] <= num_working[first]
        self._whole_model = (first == 0) & (end == units)

    def stage(self, slot: int, in_flight: int) -> tuple[Floats, Integers]:
        """(seconds [U+1, U+1], choice [U+1, U+1]) of one micro-batch; inf where the stage is empty or exceeds
        the memory.

        The choice of recompute is the fastest that fits; among equals, the first.
        """
        seconds, choices = self.stages(in_flight)
        number = self.number_of[slot]
        return seconds[number], choices[number]

    def stages(self, in_flight: int) -> tuple[Floats, Integers]:
        """The same for every kind of slot: [K, U+1, U+1] each, indexed as in `number_of`."""
        if in_flight not in self._seconds:
            rows: list[Floats] = []
            picks: list[Integers] = []
            for kind in self.kinds:
                fits = self.needed_bytes(kind, in_flight) <= self.instance.capacity_bytes[kind]
                seconds = np.where(fits, self.work(kind), np.inf)
                seconds[:, self._empty] = np.inf
                picks.append(seconds.argmin(axis=0))
                rows.append(seconds.min(axis=0))
            self._seconds[in_flight] = (np.stack(rows), np.stack(picks).astype(np.int8))
        return self._seconds[in_flight]

    def needed_bytes(self, slot: int, in_flight: int) -> Floats:
        """Bytes that a stage needs in addition to the reserve, [C, U+1, U+1]; inf for an empty stage."""
        x, kind = self.instance, int(self.kind_of[slot])
        if kind not in self._bytes:
            held = range_sums(x.resident_bytes[:, slot]) + range_maxima(x.transient_bytes[:, slot])
            if x.hosts is not None:
                state = range_sums(x.hosts.state_bytes[slot][None])[0]
                state -= x.hosts.whole_model_saving_bytes[slot] * self._whole_model
                held -= np.minimum(state, x.hosts.capacity_bytes[slot])
            self._bytes[kind] = (held, range_sums(x.activation_bytes[:, slot]))
        held, each = self._bytes[kind]
        needed = held + in_flight * each
        needed += x.boundary_bytes[slot] * (self._has_next * in_flight + self._num_edges * MESSAGES_PER_EDGE)
        needed -= x.whole_model_saving_bytes[slot] * self._whole_model
        needed[:, self._empty] = np.inf
        return needed

    def work(self, slot: int) -> Floats:
        """Forward and backward seconds, [C, U+1, U+1], whether the stage fits or not."""
        x, kind = self.instance, int(self.kind_of[slot])
        if kind not in self._work:
            units = range_sums(x.forward_seconds[:, slot] + x.backward_seconds[:, slot])
            start = x.forward_start_seconds[:, slot] + x.backward_start_seconds[:, slot]
            self._work[kind] = units + start[:, None, None]
        return self._work[kind]

    def periods(self, order: Sequence[int]) -> Floats:
        """All possible seconds per micro-batch of a stage on these slots, ascending."""
        rates: list[Floats] = []
        for kind in sorted({int(self.kind_of[slot]) for slot in order}):
            work = self.work(kind)[:, ~self._empty] / self.instance.replicas[kind]
            rates.append(work.ravel())
        values = np.concatenate(rates)
        scale = float(values.max()) or 1.0
        # Differences of prefix sums carry rounding errors in the last digits. Equal values are merged, and
        # each is raised slightly, so that a limit excludes no stage of exactly that time.
        return np.unique(np.round(values / scale, 11)) * (scale * (1 + 1e-10)) + scale * 1e-11

    def prefix(self, name: str) -> Floats:
        """Sums of the instance's field `name` up to each unit: [..., U + 1]."""
        if name not in self._prefix:
            values: Floats = getattr(self.instance, name)
            self._prefix[name] = prefix_sums(values)
        return self._prefix[name]

    def in_flight(self, stage: int, num_stages: int) -> int:
        """Micro-batches in flight on a stage where all stages have one replica; see `schedule.in_flight`."""
        return in_flight(
            self.instance.schedule,
            stage=stage,
            num_stages=num_stages,
            num_micro_batches=self.instance.num_micro_batches,
        )

    def in_flights(self, order: Sequence[int]) -> list[int]:
        """Micro-batches in flight on each stage of an order."""
        replicas = self.instance.replicas[list(order)].tolist()
        m = self.instance.num_micro_batches
        return [
            in_flight(
                self.instance.schedule,
                stage=s,
                num_stages=len(replicas),
                num_micro_batches=m,
                replicas=replicas,
            )
            for s in range(len(replicas))
        ]

    @cached_property
    def exposed_grad_reduce(self) -> Floats:
        """[C, R, U+1, U+1]: seconds of a stage's reductions after its last backward, by `ring_of`."""
        x = self.instance
        backward = x.weight_seconds if x.schedule in SPLIT_SCHEDULES else x.backward_seconds
        table = exposed_grad_reduce
        if x.halves is not None:
            table = with_halves(table, x.halves, x.halves.seconds)
        return self._exposed(table, backward, x.grad_reduce_seconds, x.grad_reduce_start_seconds)

    @cached_property
    def exposed_weight_sync(self) -> Floats:
        """[C, R, U+1, U+1]: seconds by which a stage's weights come back later than its first forward needs
        them, if that starts at once; by `ring_of`."""
        x = self.instance
        # A layer's forward waits for the weights of both halves.
        table = exposed_weight_sync if x.halves is None else with_halves(exposed_weight_sync, x.halves, 0.0)
        return self._exposed(table, x.forward_seconds, x.weight_sync_seconds, x.weight_sync_start_seconds)

    def _exposed(
        self,
        table: Callable[[Floats, Floats, Floats, Integers], Floats],
        compute: Floats,
        seconds: Floats,
        latency: Floats,
    ) -> Floats:
        choices, _, units = compute.shape
        if not seconds.any():
            return np.broadcast_to(0.0, (choices, len(self._rings), units + 1, units + 1))
        first = self._rings
        return table(compute[:, first], seconds[first], latency[first], self.instance.bucket_starts)

    def stage_seconds(self, order: Sequence[int]) -> list[Floats]:
        """Seconds of one micro-batch on each stage of an order, [U+1, U+1] each; see `stage`."""
        return [self.stage(slot, n)[0] for slot, n in zip(order, self.in_flights(order), strict=True)]

    def edge_seconds(self, order: Sequence[int]) -> tuple[list[Floats], list[Floats]]:
        """Seconds of an activation and of a gradient over each edge, [U+1] each by the unit after the cut."""
        x = self.instance
        size = np.concatenate(([0], x.message_of))
        forward_sends = [x.message_seconds[size, a, b] for a, b in zip(order, order[1:], strict=False)]
        backward_sends = [x.message_seconds[size, b, a] for a, b in zip(order, order[1:], strict=False)]
        return forward_sends, backward_sends


def make_cut(tables: CostTables, order: Sequence[int], bounds: Sequence[int], step_seconds: float) -> Cut:
    """The cut with the fastest choice of recompute that fits on each stage."""
    choices = (
        int(tables.stage(slot, n)[1][bounds[s], bounds[s + 1]])
        for s, (slot, n) in enumerate(zip(order, tables.in_flights(order), strict=True))
    )
    return Cut(
        order=tuple(int(slot) for slot in order),
        bounds=tuple(int(b) for b in bounds),
        choices=tuple(choices),
        step_seconds=float(step_seconds),
    )


def _kinds(instance: Instance) -> Integers:
    """[D]: for each slot, the first slot with the same costs and memory."""
    rows = [
        (
            *(
                values[:, d].tobytes()
                for values in (
                    instance.forward_seconds,
                    instance.backward_seconds,
                    instance.forward_start_seconds,
                    instance.backward_start_seconds,
                    instance.resident_bytes,
                    instance.activation_bytes,
                    instance.transient_bytes,
                )
            ),
            float(instance.capacity_bytes[d]),
            float(instance.whole_model_saving_bytes[d]),
            float(instance.boundary_bytes[d]),
            int(instance.replicas[d]),
            *(() if instance.hosts is None else (float(instance.hosts.capacity_bytes[d]),)),
        )
        for d in range(instance.num_slots)
    ]
    first: dict[object, int] = {}
    return np.array([first.setdefault(row, d) for d, row in enumerate(rows)], dtype=np.int64)


def _distinct_rings(instance: Instance, kind_of: Integers) -> tuple[list[int], Integers]:
    """(first slots of each kind with the same reductions, index of each slot's among them [D])."""
    numbers: dict[object, int] = {}
    first: list[int] = []
    ring_of: list[int] = []
    for d, kind in enumerate(kind_of.tolist()):
        reduce = instance.grad_reduce_seconds[d].tobytes(), float(instance.grad_reduce_start_seconds[d])
        sync = instance.weight_sync_seconds[d].tobytes(), float(instance.weight_sync_start_seconds[d])
        ring = numbers.setdefault((kind, reduce, sync), len(first))
        if ring == len(first):
            first.append(d)
        ring_of.append(ring)
    return first, np.array(ring_of, dtype=np.int64)
