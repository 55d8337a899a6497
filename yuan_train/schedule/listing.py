"""Lanes by list scheduling: time passes in units, and a free worker takes the most urgent step that is ready.

It serves the schedules that have no closed form for unequal numbers of virtual stages. Durations are units
(forward 1, backward 2, or 1 and 1 when it is split), so that the lanes follow from the plan alone.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from yuan_train.schedule.step import Kind, Lane, Step, Workers, num_workers, worker_of

_SECONDS: dict[Kind, int] = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}


@dataclass(frozen=True)
class Limits:
    """What bounds and orders the listing."""

    caps: tuple[int, ...]
    """Per worker: most activations of a virtual stage alive at once."""
    split: bool
    """Whether the backward is split into input and weight."""
    group: int | None
    """Forwards go in groups of so many micro-batches, stage by stage; None: the deepest stage first."""


def list_schedule(workers: Workers, num_micro_batches: int, limits: Limits) -> tuple[Lane, ...]:
    """The compute lanes of every worker."""
    return _Listing(workers, num_micro_batches, limits).run()


class _Listing:
    """The state of one listing: who is free when, what is ready, how much is alive."""

    def __init__(self, workers: Workers, num_micro_batches: int, limits: Limits) -> None:
        self._workers = workers
        self._limits = limits
        count = num_workers(workers)
        self._caps = list(limits.caps)
        self._alive = [0] * count
        self._lanes: list[list[Step]] = [[] for _ in range(count)]
        self._free = [0] * count
        self._urgent: list[list[tuple[tuple[int, ...], Step]]] = [[] for _ in range(count)]
        self._forwards: list[list[tuple[tuple[int, ...], Step]]] = [[] for _ in range(count)]
        self._weights: list[list[tuple[tuple[int, ...], Step]]] = [[] for _ in range(count)]
        self._ends: list[tuple[int, int, Step]] = []
        self._num_ends = 0
        self._left = num_micro_batches * len(workers) * (3 if limits.split else 2)
        for m in range(num_micro_batches):
            self._make_ready(Step("forward", 0, m))

    def run(self) -> tuple[Lane, ...]:
        """Let time pass until every step is taken."""
        now = 0
        while self._left:
            for worker in range(len(self._lanes)):
                if self._free[worker] <= now:
                    self._take(worker, now)
            if not self._ends:
                self._loosen()
                continue
            now = self._ends[0][0]
            while self._ends and self._ends[0][0] == now:
                self._finish(heapq.heappop(self._ends)[2])
        return tuple(tuple(lane) for lane in self._lanes)

    def _take(self, worker: int, now: int) -> None:
        if self._urgent[worker]:
            _, step = heapq.heappop(self._urgent[worker])
        elif self._forwards[worker] and self._alive[worker] < self._caps[worker]:
            _, step = heapq.heappop(self._forwards[worker])
            self._alive[worker] += 1
        elif self._weights[worker]:
            _, step = heapq.heappop(self._weights[worker])
        else:
            return
        self._lanes[worker].append(step)
        self._free[worker] = now + _SECONDS[step.kind]
        self._num_ends += 1
        heapq.heappush(self._ends, (self._free[worker], self._num_ends, step))
        self._left -= 1

    def _finish(self, step: Step) -> None:
        """Make ready what waited for a step."""
        last = len(self._workers) - 1
        backward: Kind = "backward_input" if self._limits.split else "backward"
        if step.kind == "forward":
            following = (
                Step(backward, last, step.micro_batch)
                if step.stage == last
                else Step("forward", step.stage + 1, step.micro_batch)
            )
            self._make_ready(following)
            return
        if step.kind in ("backward", "backward_input") and step.stage > 0:
            self._make_ready(Step(backward, step.stage - 1, step.micro_batch))
        if step.kind == "backward_input":
            self._make_ready(Step("backward_weight", step.stage, step.micro_batch))
        else:
            self._alive[worker_of(self._workers, step.stage, step.micro_batch)] -= 1

    def _make_ready(self, step: Step) -> None:
        worker = worker_of(self._workers, step.stage, step.micro_batch)
        m, stage = step.micro_batch, step.stage
        if step.kind == "forward":
            group = self._limits.group
            urgency = (-stage, m) if group is None else (m // group, stage, m)
            heapq.heappush(self._forwards[worker], (urgency, step))
        elif step.kind == "backward_weight":
            heapq.heappush(self._weights[worker], ((m, -stage), step))
        else:
            group = self._limits.group
            urgency = (m, -stage) if group is None else (m // group, -stage, m)
            heapq.heappush(self._urgent[worker], (urgency, step))

    def _loosen(self) -> None:
        """Everything waits for room: give the workers that hold a ready forward one place more."""
        for worker, forwards in enumerate(self._forwards):
            if forwards:
                self._caps[worker] += 1
