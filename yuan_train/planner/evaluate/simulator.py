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

A worker copies activations, or pages, over two links, each first in, first out. A copy begins when the step
before it has ended; what needs it, and what frees the card's memory after it, waits, and that is a stall.
Copies wait for the worker's own steps alone, so that the order of operations stays as it is.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from yuan_train.config.cluster import Sends
from yuan_train.config.plan import Plan
from yuan_train.planner.native import core
from yuan_train.schedule.copies import PagedGroups, PartSteps, kept_by
from yuan_train.schedule.schedules import ProgramShape, make_schedule
from yuan_train.schedule.step import (
    COMPUTE,
    PAGING,
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
step has ended: in the virtual run of `with_messages` there is then no time when all workers wait.

Found by trying: with all differences up to 4 on up to 5 stages, and with thousands on up to 24, no message
left later; with differences up to 5, some did in three schedules of five."""


Groups = Mapping[Step, PartSteps]
"""The compute steps of a worker in parts, with their copies: `schedule.copies.group_copies`."""


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """Seconds of a micro-batch on the parts of a stage: compute of each, and a copy of those that leave."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    copy_seconds: tuple[float, ...]
    """One way."""


@dataclass(frozen=True, kw_only=True)
class PageTimes:
    """Seconds of a micro-batch on the parts of a stage: its pages, and last what stays on the card."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...]
    """By page, to copy its weights up."""
    gradient_seconds: tuple[float, ...]
    """By page, to copy its gradient, one way."""


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

    operations: tuple[core.Operation, ...]
    spans: tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Simulation(core.RunSeconds):
    """The forwards and backwards of one optimizer step, on one pipeline."""

    stall_seconds: tuple[float, ...]
    """Of each worker: how long it waits for copies of activations or pages, inside its compute steps."""
    play: Callable[[], Played]
    """Runs every operation, also those that the figures above did not take."""
    native: core.NativeRun | None = None
    """The run of the core, if it was one: it has the last messages."""

    @functools.cached_property
    def played(self) -> Played:
        return self.play()

    @property
    def operations(self) -> tuple[core.Operation, ...]:
        """The operations, in an order in which each follows what it waits for."""
        return self.played.operations

    @property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each of `operations`."""
        return self.played.spans

    def sent_after(self, seconds: float) -> list[core.Sent]:
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
    schedule: Schedule, times: StageTimes, *, workers: Workers | None = None, sends: Sends = "overlapped"
) -> Simulation:
    """Run a schedule that has passed `check_schedule` in virtual time; by default stage s is on worker s."""
    workers = workers or one_worker_each(len(schedule))
    return _run(order_operations(schedule, workers), workers, times, sends=sends)


def program_shape(plan: Plan, p: int) -> ProgramShape:
    """What makes the programs of pipeline p of a plan."""
    own = plan.pipelines[p]
    depths = own.depths(plan.schedule)
    return ProgramShape(plan.schedule, own.workers, own.num_micro_batches, depths, own.page_group)


def simulate_schedule(
    shape: ProgramShape,
    times: StageTimes,
    *,
    sends: Sends = "overlapped",
    copies: Mapping[int, Groups] | None = None,
    pages: Mapping[int, PagedGroups] | None = None,
) -> Simulation:
    """The same for a named schedule. `copies`, by worker, of those with stages that offload activations,
    whose `times` then have parts; `pages`, by worker, of those with pages of the host."""

    def run() -> Simulation:
        return _run(_operations(shape), shape.workers, times, sends=sends, copies=copies, pages=pages)

    if shape.group > 1 or copies or pages:
        return run()
    depths = _prompt_depths(shape) if sends == "overlapped" else None
    if depths:
        found = core.run_rounds(depths, shape.num_micro_batches, times.rows)
    else:
        own = core.native_schedule(*shape[:4])
        found = core.run_schedule(own, times.rows, blocking=sends != "overlapped")
    seconds = {one.name: getattr(found, one.name) for one in fields(core.RunSeconds)}
    stalls = (0.0,) * len(found.busy_seconds)
    return Simulation(**seconds, stall_seconds=stalls, play=lambda: run().played, native=found)


@functools.lru_cache(maxsize=64)
def _operations(shape: ProgramShape) -> tuple[core.Operation, ...]:
    if shape.group == 1:
        return core.native_schedule(*shape[:4]).operations()
    return order_operations(make_schedule(**shape._asdict()), shape.workers)


def order_operations(schedule: Schedule, workers: Workers) -> tuple[core.Operation, ...]:
    """The schedule's compute and sends, in an order in which each follows what it waits for."""
    operations: list[core.Operation] = []
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
                operations.append(core.Operation(kind, stage, micro_batch, worker, -1, waits))
            else:
                is_activation = kind == "send_activation"
                target = stage + 1 if is_activation else stage - 1
                peer = worker_of(workers, target, micro_batch)
                operations.append(core.Operation(kind, stage, micro_batch, worker, peer, False))
                sent.add((is_activation, target, micro_batch))
                if peer not in ready:
                    ready.append(peer)
            position[worker] += 1
    assert all(p == len(steps) for p, steps in zip(position, schedule, strict=True)), "deadlock"
    return tuple(operations)


def _prompt_depths(shape: ProgramShape) -> tuple[int, ...] | None:
    """The depths of 1F1B with a worker for each stage, if every message leaves when its step has ended; None
    if it may be another schedule. Where a stage is much deeper than the next one, some leave later."""
    count = len(shape.workers)
    if shape.schedule != "1f1b" or shape.workers != one_worker_each(count):
        return None
    depths = shape.in_flight or tuple(range(count, 0, -1))
    return depths if all(0 <= a - b <= PROMPT_DEPTHS for a, b in itertools.pairwise(depths)) else None


def _run(
    operations: Sequence[core.Operation],
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


# --- copies -----------------------------------------------------------------------------------------------


class _Link:
    """One direction."""

    def __init__(self) -> None:
        self._free = 0.0
        self._ends: dict[Hashable, float] = {}
        """Of copies, by what they copy."""
        self.stall_seconds = 0.0

    def copy(self, key: Hashable, now: float, seconds: float) -> None:
        self._ends[key] = self._free = max(self._free, now) + seconds

    def wait(self, key: Hashable, now: float) -> float:
        """When a copy has ended, if there is one."""
        end = self._ends.pop(key, now)
        self.stall_seconds += max(0.0, end - now)
        return max(now, end)


class _Links:
    """One worker's links."""

    def __init__(self) -> None:
        self.down, self.up = _Link(), _Link()

    @property
    def stall_seconds(self) -> float:
        """Of the worker, in its compute steps."""
        return self.down.stall_seconds + self.up.stall_seconds


class CopyClock(_Links):
    """Of activations."""

    def __init__(self, groups: Groups, times: Mapping[int, PartTimes]) -> None:
        """`times`: by stage, of those that offload."""
        super().__init__()
        self._groups, self._times = groups, times

    def run(self, kind: Kind, stage: int, micro_batch: int, start: float, seconds: float) -> float:
        """End of a compute step that starts at a time and computes for so long, part by part."""
        group = self._groups[Step(kind, stage, micro_batch)]
        now = start
        for part, before in zip(group.parts, group.before, strict=True):
            for copy in before:
                now = self._copy(copy, now)
            if part >= 0 and kind != "forward":
                now = self.up.wait((stage, micro_batch, part), now)
            now += seconds * self._share(kind, stage, part)
        for copy in group.after:
            now = self._copy(copy, now)
        return now

    def _share(self, kind: Kind, stage: int, part: int) -> float:
        """What a part takes of a step."""
        if part < 0:
            return 1.0
        times = self._times[stage]
        own = times.forward_seconds if kind == "forward" else times.backward_seconds
        return own[part] / sum(own)

    def _copy(self, step: Step, now: float) -> float:
        key = kept_by(step)
        if step.kind == "evict":
            return self.down.wait(key, now)
        link = self.down if step.kind == "offload" else self.up
        link.copy(key, now, self._times[step.stage].copy_seconds[step.part])
        return now


class PageClock(_Links):
    """Of pages. A member of a group that is not the last takes no time: the last runs them all."""

    def __init__(self, groups: PagedGroups, times: PageTimes) -> None:
        super().__init__()
        self._groups, self._times = groups, times

    def run(self, kind: Kind, stage: int, micro_batch: int, start: float, seconds: float) -> float:
        """End of a member's step that starts at a time, when the members before it are there."""
        group, now = self._groups.get((kind, micro_batch)), start
        for step in () if group is None else group.steps:
            if step.kind in PAGING:
                now = self._copy(step, now)
                continue
            own = self._times.forward_seconds if step.kind == "forward" else self._times.backward_seconds
            now = self.up.wait(step.part, now) + own[step.part]
        return now

    def _copy(self, step: Step, now: float) -> float:
        if step.kind == "page_out":
            return self.down.wait(step.part, now)
        own = self._times.weight_seconds if step.kind == "page_in" else self._times.gradient_seconds
        link = self.down if step.kind == "gradient_down" else self.up
        link.copy(step.part, now, own[step.part])
        return now
