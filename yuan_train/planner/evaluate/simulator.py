"""A schedule in virtual time: the same schedule that the trainer runs.

A worker takes its steps in the schedule's order, without pre-emption. A compute step starts when the worker
is free and its message has arrived. A message goes over the directed link between two workers when the
compute before it has ended and the link has finished the message before (FIFO), and occupies the link until
it arrives. `sends` says who else waits for that:

- overlapped: nobody but the compute step that needs the message.
- blocking: the sender.

Between two stages of one worker (virtual stages) there is no message.

All durations are known beforehand, so the order in which steps can be evaluated depends on the schedule
alone: it is computed once, and then a plan is a loop over numbers. `simulate` is that loop, and defines the
result; the compiled core (`native/`) runs named schedules without copies to hosts, to the same bits.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from yuan_train.config.cluster import Sends
from yuan_train.planner.evaluate.clocks import CopyClock, Groups, PageClock, PageTimes, PartTimes
from yuan_train.planner.native import pipelines
from yuan_train.schedule.pages import PagedGroups
from yuan_train.schedule.schedules import make_schedule
from yuan_train.schedule.step import (
    COMPUTE,
    Kind,
    Schedule,
    Step,
    Workers,
    num_workers,
    one_worker_each,
    worker_of,
)
from yuan_train.schedule.trace import TimedStep

PROMPT_DEPTHS = 4
"""Micro-batches by which a stage may be deeper than the next so that every message of 1F1B leaves when its
step has ended: in the virtual run of `schedule.messages` there is then no time when all workers wait.

Found by trying: with all differences up to 4 on up to 5 stages, and with thousands on up to 24, no message
left later; with differences up to 5, some did in three schedules of five."""


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

    @property
    def rows(self) -> tuple[tuple[float, ...], ...]:
        """Forwards, backwards, weight-gradient parts, activations and gradients, as the core takes them."""
        weight = self.weight_seconds or tuple(seconds / 2 for seconds in self.backward_seconds)
        sends = self.send_activation_seconds, self.send_gradient_seconds
        return (self.forward_seconds, self.backward_seconds, weight, *sends)

    def compute_seconds(self) -> dict[Kind, Sequence[float]]:
        """[P] seconds of the compute steps of each kind."""
        forward, backward, weight, *_ = self.rows
        rest = [whole - part for whole, part in zip(backward, weight, strict=True)]
        return {"forward": forward, "backward": backward, "backward_input": rest, "backward_weight": weight}


class Played(NamedTuple):
    """Operations, and the start and end of each."""

    operations: tuple[pipelines.Operation, ...]
    spans: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Simulation(pipelines.RunSeconds):
    """The forwards and backwards of one optimizer step, on one pipeline."""

    stall_seconds: tuple[float, ...]
    """Of each worker: how long it waits for copies of activations or pages, inside its compute steps."""
    play: Callable[[], Played]
    """Runs every operation, also those that the figures above did not take."""
    native: pipelines.NativeRun | None = None
    """The run of the core, if it was one: it has the last messages."""

    @functools.cached_property
    def played(self) -> Played:
        return self.play()

    @property
    def operations(self) -> tuple[pipelines.Operation, ...]:
        """The operations, in an order in which each follows what it waits for."""
        return self.played.operations

    @property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each of `operations`."""
        return self.played.spans

    def sent_after(self, seconds: float) -> list[pipelines.Sent]:
        """The messages that arrive later than that; none that take no time."""
        if self.native is not None and seconds >= self.native.sent_from:
            return self.native.sent_after(seconds)
        return [
            (start, end, operation.worker, operation.peer)
            for operation, (start, end) in zip(self.operations, self.spans, strict=True)
            if end > seconds and operation.peer >= 0 and end > start
        ]

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
    schedule: Schedule,
    times: StageTimes,
    *,
    workers: Workers | None = None,
    sends: Sends = "overlapped",
) -> Simulation:
    """Run a schedule that has passed `check_schedule` in virtual time; by default stage s is on worker s."""
    workers = workers or one_worker_each(len(schedule))
    return _run(order_operations(schedule, workers), workers, times, sends=sends)


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

    def run() -> Simulation:
        operations = _operations(schedule, workers, num_micro_batches, in_flight, group)
        return _run(operations, workers, times, sends=sends, copies=copies, pages=pages)

    if group > 1 or copies or pages:
        return run()
    depths = _prompt_depths(schedule, workers, in_flight) if sends == "overlapped" else None
    if depths:
        found = pipelines.run_rounds(depths, num_micro_batches, times.rows)
    else:
        own = pipelines.native_schedule(schedule, workers, num_micro_batches, in_flight)
        found = pipelines.run_schedule(own, times.rows, blocking=sends != "overlapped")
    seconds = {one.name: getattr(found, one.name) for one in fields(pipelines.RunSeconds)}
    stalls = (0.0,) * len(found.busy_seconds)
    return Simulation(**seconds, stall_seconds=stalls, play=lambda: run().played, native=found)


@functools.lru_cache(maxsize=64)
def _operations(
    schedule: str,
    workers: Workers,
    num_micro_batches: int,
    in_flight: tuple[int, ...] | None,
    group: int,
) -> tuple[pipelines.Operation, ...]:
    if group == 1:
        return pipelines.native_schedule(schedule, workers, num_micro_batches, in_flight).operations()
    programs = make_schedule(
        schedule, workers=workers, num_micro_batches=num_micro_batches, in_flight=in_flight, group=group
    )
    return order_operations(programs, workers)


def order_operations(schedule: Schedule, workers: Workers | None = None) -> tuple[pipelines.Operation, ...]:
    """The schedule's compute and sends, in an order in which each follows what it waits for."""
    workers = workers or one_worker_each(len(schedule))
    operations: list[pipelines.Operation] = []
    position = [0] * len(schedule)
    sent: set[tuple[bool, int, int]] = set()
    awaited: set[tuple[bool, int, int]] = set()
    ready = list(range(len(schedule)))
    while ready:
        worker = ready.pop()
        steps = schedule[worker]
        while position[worker] < len(steps):
            step = steps[position[worker]]
            kind, stage, micro_batch = step.kind, step.stage, step.micro_batch
            if kind == "receive_activation" or kind == "receive_gradient":
                awaited.add((kind == "receive_activation", stage, micro_batch))
            elif kind in COMPUTE:
                key = (kind == "forward", stage, micro_batch)
                # The weight-gradient part of a backward waits for no message: the input part received it.
                waits = kind != "backward_weight" and key in awaited
                if waits and key not in sent:
                    break
                operations.append(pipelines.Operation(kind, stage, micro_batch, worker, -1, waits))
            else:
                is_activation = kind == "send_activation"
                target = stage + 1 if is_activation else stage - 1
                peer = worker_of(workers, target, micro_batch)
                operations.append(pipelines.Operation(kind, stage, micro_batch, worker, peer, False))
                sent.add((is_activation, target, micro_batch))
                if peer not in ready:
                    ready.append(peer)
            position[worker] += 1
    assert all(p == len(steps) for p, steps in zip(position, schedule, strict=True)), "deadlock"
    return tuple(operations)


def _prompt_depths(
    schedule: str, workers: Workers, in_flight: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """The depths of 1F1B with a worker for each stage, if every message leaves when its step has ended; None
    if it may be another schedule. Where a stage is much deeper than the next one, some leave later."""
    count = len(workers)
    if schedule != "1f1b" or workers != one_worker_each(count):
        return None
    depths = in_flight or tuple(range(count, 0, -1))
    return depths if all(0 <= a - b <= PROMPT_DEPTHS for a, b in itertools.pairwise(depths)) else None


def _run(
    operations: Sequence[pipelines.Operation],
    workers: Workers,
    times: StageTimes,
    *,
    sends: Sends,
    copies: Mapping[int, Groups] | None = None,
    pages: Mapping[int, PagedGroups] | None = None,
) -> Simulation:
    clocks = _clocks(workers, times, copies or {}, pages or {})
    count = num_workers(workers)
    free, busy, last = [0.0] * count, [0.0] * count, [0.0] * count
    ends, starts = [0.0] * len(workers), [math.inf] * len(workers)
    compute = times.compute_seconds()
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
            starts[stage] = start if start < starts[stage] else starts[stage]
            busy[worker] += seconds
        else:
            link_free = links.get((worker, peer), 0.0)
            start = link_free if link_free > start else start
            is_activation = kind == "send_activation"
            end = start + (activation_seconds[stage] if is_activation else gradient_seconds[stage])
            links[worker, peer] = end
            arrivals[is_activation, stage + 1 if is_activation else stage - 1, micro_batch] = end
            if sends != "overlapped":
                free[worker] = end
        spans.append((start, end))
    stalls = {worker: clock.stall_seconds for worker, clock in clocks.items()}
    return Simulation(
        stage_end_seconds=tuple(ends),
        busy_seconds=tuple(busy),
        worker_end_seconds=tuple(last),
        stage_start_seconds=tuple(starts),
        stall_seconds=tuple(stalls.get(worker, 0.0) for worker in range(count)),
        play=lambda: Played(tuple(operations), tuple(spans)),
    )


def _clocks(
    workers: Workers, times: StageTimes, copies: Mapping[int, Groups], pages: Mapping[int, PagedGroups]
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
