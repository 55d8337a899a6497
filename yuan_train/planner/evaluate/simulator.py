"""A schedule in virtual time: the same schedule that the trainer runs.

A worker takes its steps in the schedule's order, without pre-emption. A compute step starts when the worker
is free and its message has arrived. A message goes over the directed link between two workers when the
compute before it has ended and the link has finished the message before (FIFO), and occupies the link until
it arrives. `sends` says who else waits for that:

- overlapped: nobody but the compute step that needs the message.
- blocking: the sender.
- rendezvous: sender and receiver, each with one message at a time. It begins when both are there: the sender
  after its compute step, the receiver when it has ended the step before the one that needs the message.

Between two stages of one worker (virtual stages) there is no message.

All durations are known beforehand, so the order in which steps can be evaluated depends on the schedule
alone: it is computed once, and then one plan is a loop over numbers, and many plans are a loop over vectors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from yuan_train.config.sends import Sends
from yuan_train.planner.evaluate.copies import CopyClock, Groups, PartTimes
from yuan_train.planner.evaluate.operations import (
    Operation,
    order_one_f_one_b,
    order_operations,
    order_rendezvous,
)
from yuan_train.planner.evaluate.page_clock import PageClock, PageTimes
from yuan_train.schedule.pages import PagedGroups
from yuan_train.schedule.schedules import make_schedule
from yuan_train.schedule.step import COMPUTE, Kind, Schedule, Step, Workers, num_workers, one_worker_each
from yuan_train.schedule.trace import TimedStep

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


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
    """The weight-gradient part of the backward, for schedules that split it; half of it if empty."""
    parts: tuple[PartTimes | None, ...] = ()
    """Of stages whose activations leave the card; None for the others. Empty if there are none."""
    pages: tuple[PageTimes | None, ...] = ()
    """The same of stages whose parameters are pages of the host."""

    @property
    def num_stages(self) -> int:
        return len(self.forward_seconds)

    def compute_seconds(self, kind: Kind, stage: int) -> float:
        """Seconds of a compute step of this kind: forward, backward, backward_input or backward_weight."""
        if kind == "forward":
            return self.forward_seconds[stage]
        backward = self.backward_seconds[stage]
        if kind == "backward":
            return backward
        weight = self.weight_seconds[stage] if self.weight_seconds else backward / 2
        return weight if kind == "backward_weight" else backward - weight


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The forwards and backwards of one optimizer step, on one pipeline."""

    step_seconds: float
    """End of the last compute step."""
    stage_end_seconds: tuple[float, ...]
    """End of each stage's last compute step, over all its workers."""
    busy_seconds: tuple[float, ...]
    """Compute of each worker."""
    worker_end_seconds: tuple[float, ...]
    """End of each worker's last compute step."""
    operations: tuple[Operation, ...]
    spans: tuple[tuple[float, float], ...]
    """Start and end of each of `operations`."""
    stall_seconds: tuple[float, ...]
    """Of each worker: how long it waits for copies of activations or pages, inside its compute steps."""

    @property
    def stage_start_seconds(self) -> tuple[float, ...]:
        """Start of each stage's first forward."""
        starts = [math.inf] * len(self.stage_end_seconds)
        for operation, (start, _) in zip(self.operations, self.spans, strict=True):
            if operation.kind == "forward" and start < starts[operation.stage]:
                starts[operation.stage] = start
        return tuple(starts)

    @property
    def timed_steps(self) -> tuple[tuple[TimedStep, ...], ...]:
        """Compute and sends of each worker, in the order of its rank program."""
        timed_steps: list[list[TimedStep]] = [[] for _ in self.busy_seconds]
        for operation, (start, end) in zip(self.operations, self.spans, strict=True):
            step = Step(operation.kind, operation.stage, operation.micro_batch)
            timed_steps[operation.worker].append(TimedStep(step, start, end))
        return tuple(tuple(steps) for steps in timed_steps)

    @property
    def bubble_fraction(self) -> float:
        """Share of the workers' time without compute."""
        total = self.step_seconds * len(self.busy_seconds)
        return 1.0 - sum(self.busy_seconds) / total if total > 0 else 0.0


def simulate(
    schedule: Schedule, times: StageTimes, *, workers: Workers | None = None, sends: Sends = "overlapped"
) -> Simulation:
    """Run a schedule in virtual time; by default stage s is on worker s. The schedule must have passed
    `schedule.check.check_schedule`."""
    workers = workers or one_worker_each(len(schedule))
    order = order_rendezvous if sends == "rendezvous" else order_operations
    return _run(order(schedule, workers), workers, times, sends=sends)


def simulate_schedule(
    schedule: str,
    times: StageTimes,
    *,
    num_micro_batches: int,
    workers: Workers | None = None,
    in_flight: tuple[int, ...] | None = None,
    sends: Sends = "overlapped",
    copies: Mapping[int, Groups] | None = None,
    group: int = 1,
    pages: Mapping[int, PagedGroups] | None = None,
) -> Simulation:
    """The same for a named schedule; `in_flight`, if given, is the depth of each stage under 1f1b. `copies`,
    by worker, of those with stages that offload activations, whose `times` then have parts. With `group`, so
    many micro-batches pass each stage together; `pages`, by worker, of those with pages of the host."""
    workers = workers or one_worker_each(times.num_stages)
    operations = _operations(schedule, workers, num_micro_batches, in_flight, sends == "rendezvous", group)
    return _run(operations, workers, times, sends=sends, copies=copies, pages=pages)


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
    sends: Sends = "overlapped",
) -> Floats:
    """End of the last compute step of each stage, in seconds, [N, P], of N pipelines of P stages that run the
    same schedule on equally many workers.

    The times are those of StageTimes for all pipelines: compute [N, P], sends [N, P - 1].
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
    messages = {
        "send_activation": list(send_activation_seconds.T.copy()),
        "send_gradient": list(send_gradient_seconds.T.copy()),
    }
    free = [np.zeros(count) for _ in range(num_workers(workers))]
    ends = [np.zeros(count) for _ in range(stages)]
    link_free: dict[tuple[int, int], Floats] = {}
    arrivals: dict[tuple[bool, int, int], Floats] = {}
    for kind, stage, micro_batch, worker, peer, waits in _operations(
        schedule, workers, num_micro_batches, in_flight, sends == "rendezvous"
    ):
        now = free[worker]
        if peer < 0:
            if waits:
                np.maximum(now, arrivals.pop((kind == "forward", stage, micro_batch)), out=now)
            now += compute[kind][stage]
            # A worker's last step on a stage is a backward.
            if kind != "forward":
                np.maximum(ends[stage], now, out=ends[stage])
            continue
        is_activation = kind == "send_activation"
        link = link_free.get((worker, peer))
        arrival = now.copy() if link is None else np.maximum(link, now)
        if waits:
            np.maximum(arrival, free[peer], out=arrival)
        arrival += messages[kind][stage if is_activation else stage - 1]
        link_free[worker, peer] = arrival
        arrivals[is_activation, stage + 1 if is_activation else stage - 1, micro_batch] = arrival
        if sends != "overlapped":
            now[:] = arrival
        if waits:
            free[peer][:] = arrival
    return np.stack(ends, axis=1)


@functools.lru_cache(maxsize=64)
def _operations(
    schedule: str,
    workers: Workers,
    num_micro_batches: int,
    in_flight: tuple[int, ...] | None,
    rendezvous: bool,
    group: int = 1,
) -> tuple[Operation, ...]:
    count = len(workers)
    plain = workers == one_worker_each(count) and in_flight in (None, tuple(range(count, 0, -1)))
    if schedule == "1f1b" and plain and group == 1 and not rendezvous:
        return order_one_f_one_b(count, num_micro_batches)
    programs = make_schedule(
        schedule, workers=workers, num_micro_batches=num_micro_batches, in_flight=in_flight, group=group
    )
    return (order_rendezvous if rendezvous else order_operations)(programs, workers)


def _run(
    operations: Sequence[Operation],
    workers: Workers,
    times: StageTimes,
    *,
    sends: Sends,
    copies: Mapping[int, Groups] | None = None,
    pages: Mapping[int, PagedGroups] | None = None,
) -> Simulation:
    clocks = _clocks(workers, times, copies or {}, pages or {})
    count, stages = num_workers(workers), range(len(workers))
    free, busy, last = [0.0] * count, [0.0] * count, [0.0] * count
    ends = [0.0] * len(workers)
    compute = {kind: [times.compute_seconds(kind, stage) for stage in stages] for kind in COMPUTE}
    activation_seconds, gradient_seconds = times.send_activation_seconds, (0.0, *times.send_gradient_seconds)
    links: dict[tuple[int, int], float] = {}
    arrivals: dict[tuple[bool, int, int], float] = {}
    spans: list[tuple[float, float]] = []
    for kind, stage, micro_batch, worker, peer, waits in operations:
        start = free[worker]
        if peer < 0:
            if waits:
                arrived = arrivals[kind == "forward", stage, micro_batch]
                start = arrived if arrived > start else start
            seconds = compute[kind][stage]
            end = start + seconds
            if worker in clocks:
                end = clocks[worker].run(kind, stage, micro_batch, start, seconds)
            free[worker] = last[worker] = end
            ends[stage] = end if end > ends[stage] else ends[stage]
            busy[worker] += seconds
        else:
            link_free = links.get((worker, peer), 0.0)
            start = link_free if link_free > start else start
            if waits and free[peer] > start:
                start = free[peer]
            is_activation = kind == "send_activation"
            end = start + (activation_seconds[stage] if is_activation else gradient_seconds[stage])
            links[worker, peer] = end
            arrivals[is_activation, stage + 1 if is_activation else stage - 1, micro_batch] = end
            if sends != "overlapped":
                free[worker] = end
            if waits:
                free[peer] = end
        spans.append((start, end))
    return Simulation(
        step_seconds=max(ends, default=0.0),
        stage_end_seconds=tuple(ends),
        busy_seconds=tuple(busy),
        worker_end_seconds=tuple(last),
        operations=tuple(operations),
        spans=tuple(spans),
        stall_seconds=tuple(
            clocks[worker].stall_seconds if worker in clocks else 0.0 for worker in range(count)
        ),
    )


def _clocks(
    workers: Workers,
    times: StageTimes,
    copies: Mapping[int, Groups],
    pages: Mapping[int, PagedGroups],
) -> dict[int, CopyClock | PageClock]:
    """The links of the workers that copy anything."""
    parts = {stage: part for stage, part in enumerate(times.parts) if part is not None}
    clocks: dict[int, CopyClock | PageClock] = {
        worker: CopyClock(groups, parts) for worker, groups in copies.items()
    }
    for stage, own in enumerate(times.pages):
        if own is not None:
            (worker,) = workers[stage]
            clocks[worker] = PageClock(pages[worker], own)
    return clocks
