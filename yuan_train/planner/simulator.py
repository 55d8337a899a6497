"""A schedule table in virtual time: the same table that the trainer runs.

A worker takes its steps in the table's order, without pre-emption. A compute step starts when the worker is
free and its message has arrived. A message goes over the directed link between two workers when the compute
before it has ended and the link has finished the message before (FIFO), and holds the link until it is there.
With blocking sends the sender waits for that too; the receiver is never held. Between two stages of one
worker (virtual stages) there is no message.

All durations are known beforehand, so the order in which steps can be evaluated is a property of the table
alone: it is found once, and then one plan is a loop over numbers, and many plans are a loop over vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from yuan_train.schedule.step import (
    COMPUTE,
    Kind,
    Step,
    Table,
    Workers,
    num_workers,
    one_worker_each,
    worker_of,
)
from yuan_train.schedule.tables import make_table
from yuan_train.schedule.trace import TimedStep

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


class Operation(NamedTuple):
    """A step as the simulation takes it: compute, or the sending of a message."""

    kind: Kind
    stage: int
    micro_batch: int
    worker: int
    peer: int
    """Who gets the message; -1 for compute."""
    waits: bool
    """Whether a compute step waits for a message."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch on a pipeline of P stages; sends over the P - 1 edges, each way."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    send_activation_seconds: tuple[float, ...]
    """Edge s leads from stage s to s + 1."""
    send_gradient_seconds: tuple[float, ...]
    """Edge s leads from stage s + 1 to s."""
    weight_seconds: tuple[float, ...] = ()
    """What of the backward is the weights' part, where a schedule splits it; by default half."""

    @property
    def num_stages(self) -> int:
        return len(self.forward_seconds)

    def compute_seconds(self, kind: Kind, stage: int) -> float:
        """Seconds of a compute step."""
        if kind == "forward":
            return self.forward_seconds[stage]
        whole = self.backward_seconds[stage]
        if kind == "backward":
            return whole
        weight = self.weight_seconds[stage] if self.weight_seconds else whole / 2
        return weight if kind == "backward_weight" else whole - weight


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One optimizer step's forwards and backwards."""

    step_seconds: float
    """End of the last compute step."""
    stage_end_seconds: tuple[float, ...]
    """End of each stage's last compute step, of all its workers."""
    busy_seconds: tuple[float, ...]
    """Each worker's compute."""
    worker_end_seconds: tuple[float, ...]
    program: tuple[Operation, ...]
    spans: tuple[tuple[float, float], ...]
    """Start and end of each operation of `program`."""

    @property
    def lanes(self) -> tuple[tuple[TimedStep, ...], ...]:
        """Compute and sends of each worker, as they happened."""
        lanes: list[list[TimedStep]] = [[] for _ in self.busy_seconds]
        for operation, (start, end) in zip(self.program, self.spans, strict=True):
            step = Step(operation.kind, operation.stage, operation.micro_batch)
            lanes[operation.worker].append(TimedStep(step, start, end))
        return tuple(tuple(lane) for lane in lanes)

    @property
    def bubble_fraction(self) -> float:
        """Share of the workers' time without compute."""
        whole = self.step_seconds * len(self.busy_seconds)
        return 1.0 - sum(self.busy_seconds) / whole if whole > 0 else 0.0


def simulate(
    table: Table, times: StageTimes, *, workers: Workers | None = None, overlap: bool = True
) -> Simulation:
    """Run a table in virtual time. The table must have passed `schedule.check.check_table`."""
    workers = workers or one_worker_each(len(table))
    return _run(operations(table, workers), workers, times, overlap=overlap)


def simulate_schedule(
    schedule: str,
    times: StageTimes,
    *,
    num_micro_batches: int,
    workers: Workers | None = None,
    in_flight: tuple[int, ...] | None = None,
    overlap: bool = True,
) -> Simulation:
    """The same for a named schedule; 1f1b with `in_flight` micro-batches on each stage, if given."""
    workers = workers or one_worker_each(times.num_stages)
    program = _program(schedule, workers, num_micro_batches, in_flight)
    return _run(program, workers, times, overlap=overlap)


def simulate_many(
    schedule: str,
    *,
    num_micro_batches: int,
    forward_seconds: Floats,
    backward_seconds: Floats,
    send_activation_seconds: Floats,
    send_gradient_seconds: Floats,
    weight_seconds: Floats | None = None,
    workers: Workers | None = None,
    in_flight: tuple[int, ...] | None = None,
    overlap: bool = True,
) -> Floats:
    """End of the last compute step of each stage, [N, P], of N pipelines of P stages that run the same
    schedule on as many workers.

    The times are [N, P] and [N, P - 1]; meaning as in StageTimes.
    """
    import numpy as np

    count, stages = forward_seconds.shape
    workers = workers or one_worker_each(stages)
    backward = backward_seconds.T.copy()
    weight = backward / 2 if weight_seconds is None else weight_seconds.T.copy()
    compute = {
        "forward": list(forward_seconds.T.copy()),
        "backward": list(backward),
        "backward_input": list(backward - weight),
        "backward_weight": list(weight),
    }
    sends = {
        "send_activation": list(send_activation_seconds.T.copy()),
        "send_gradient": list(send_gradient_seconds.T.copy()),
    }
    free = [np.zeros(count) for _ in range(num_workers(workers))]
    ends = [np.zeros(count) for _ in range(stages)]
    link_free: dict[tuple[int, int], Floats] = {}
    arrivals: dict[tuple[bool, int, int], Floats] = {}
    for kind, stage, micro_batch, worker, peer, waits in _program(
        schedule, workers, num_micro_batches, in_flight
    ):
        mine = free[worker]
        if peer < 0:
            if waits:
                np.maximum(mine, arrivals.pop((kind == "forward", stage, micro_batch)), out=mine)
            mine += compute[kind][stage]
            # What a worker does last on a stage is a backward.
            if kind != "forward":
                np.maximum(ends[stage], mine, out=ends[stage])
            continue
        onward = kind == "send_activation"
        link = link_free.get((worker, peer))
        there = mine.copy() if link is None else np.maximum(link, mine)
        there += sends[kind][stage if onward else stage - 1]
        link_free[worker, peer] = there
        arrivals[onward, stage + 1 if onward else stage - 1, micro_batch] = there
        if not overlap:
            mine[:] = there
    return np.stack(ends, axis=1)


def operations(table: Table, workers: Workers | None = None) -> tuple[Operation, ...]:
    """The table's compute and sends in an order in which each follows what it waits for."""
    workers = workers or one_worker_each(len(table))
    program: list[Operation] = []
    position = [0] * len(table)
    sent: set[tuple[bool, int, int]] = set()
    awaited: set[tuple[bool, int, int]] = set()
    ready = list(range(len(table)))
    while ready:
        worker = ready.pop()
        lane = table[worker]
        while position[worker] < len(lane):
            step = lane[position[worker]]
            kind, stage, micro_batch = step.kind, step.stage, step.micro_batch
            if kind == "receive_activation" or kind == "receive_gradient":
                awaited.add((kind == "receive_activation", stage, micro_batch))
            elif kind in COMPUTE:
                key = (kind == "forward", stage, micro_batch)
                # The weights' part of a backward waits for no message, its input part has taken it.
                waits = kind != "backward_weight" and key in awaited
                if waits and key not in sent:
                    break
                program.append(Operation(kind, stage, micro_batch, worker, -1, waits))
            else:
                onward = kind == "send_activation"
                target = stage + 1 if onward else stage - 1
                peer = worker_of(workers, target, micro_batch)
                program.append(Operation(kind, stage, micro_batch, worker, peer, False))
                sent.add((onward, target, micro_batch))
                if peer not in ready:
                    ready.append(peer)
            position[worker] += 1
    assert all(p == len(lane) for p, lane in zip(position, table, strict=True)), "the table waits for ever"
    return tuple(program)


@functools.lru_cache(maxsize=64)
def _program(
    schedule: str, workers: Workers, num_micro_batches: int, in_flight: tuple[int, ...] | None
) -> tuple[Operation, ...]:
    table = make_table(schedule, workers=workers, num_micro_batches=num_micro_batches, in_flight=in_flight)
    return operations(table, workers)


def _run(program: Sequence[Operation], workers: Workers, times: StageTimes, *, overlap: bool) -> Simulation:
    count, stages = num_workers(workers), range(len(workers))
    free, busy, last = [0.0] * count, [0.0] * count, [0.0] * count
    ends = [0.0] * len(workers)
    compute = {kind: [times.compute_seconds(kind, stage) for stage in stages] for kind in COMPUTE}
    onward_seconds, back_seconds = times.send_activation_seconds, (0.0, *times.send_gradient_seconds)
    links: dict[tuple[int, int], float] = {}
    arrivals: dict[tuple[bool, int, int], float] = {}
    spans: list[tuple[float, float]] = []
    for kind, stage, micro_batch, worker, peer, waits in program:
        start = free[worker]
        if peer < 0:
            if waits:
                arrived = arrivals[kind == "forward", stage, micro_batch]
                start = arrived if arrived > start else start
            seconds = compute[kind][stage]
            free[worker] = last[worker] = end = start + seconds
            ends[stage] = end if end > ends[stage] else ends[stage]
            busy[worker] += seconds
        else:
            taken = links.get((worker, peer), 0.0)
            start = taken if taken > start else start
            onward = kind == "send_activation"
            end = start + (onward_seconds[stage] if onward else back_seconds[stage])
            links[worker, peer] = end
            arrivals[onward, stage + 1 if onward else stage - 1, micro_batch] = end
            if not overlap:
                free[worker] = end
        spans.append((start, end))
    return Simulation(
        step_seconds=max(ends, default=0.0),
        stage_end_seconds=tuple(ends),
        busy_seconds=tuple(busy),
        worker_end_seconds=tuple(last),
        program=tuple(program),
        spans=tuple(spans),
    )
