"""Rank programs by list scheduling: whenever a worker is free, it takes the most urgent step that is ready.

Used by the schedules that have no closed form for unequal numbers of virtual stages. Durations are fixed:
forward 1 unit, backward 2, or 1 and 1 when it is split. So the rank programs follow from the plan alone.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from yuan_train.schedule.step import Kind, RankProgram, Step, Workers, num_workers, worker_of

_DURATIONS: dict[Kind, int] = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}


@dataclass(frozen=True)
class Limits:
    """Memory limits and priorities of the list scheduler."""

    caps: tuple[int, ...]
    """Per worker: the most activations of virtual stages that it may hold at once."""
    split: bool
    """Whether the backward is split into `backward_input` and `backward_weight`."""
    group: int | None
    """Forwards run in groups of this many micro-batches, stage by stage; None: the deepest stage first."""


def list_schedule(workers: Workers, num_micro_batches: int, limits: Limits) -> tuple[RankProgram, ...]:
    """The compute steps of every worker, in order, without messages."""
    return _ListScheduler(workers, num_micro_batches, limits).run()


class _ListScheduler:
    """One run: when each worker is free, which steps are ready, how many activations it holds."""

    def __init__(self, workers: Workers, num_micro_batches: int, limits: Limits) -> None:
        self._workers = workers
        self._limits = limits
        count = num_workers(workers)
        self._caps = list(limits.caps)
        self._num_alive = [0] * count
        self._programs: list[list[Step]] = [[] for _ in range(count)]
        self._free_at = [0] * count
        self._ready_backwards: list[list[tuple[tuple[int, ...], Step]]] = [[] for _ in range(count)]
        self._ready_forwards: list[list[tuple[tuple[int, ...], Step]]] = [[] for _ in range(count)]
        self._ready_weights: list[list[tuple[tuple[int, ...], Step]]] = [[] for _ in range(count)]
        self._completions: list[tuple[int, int, Step]] = []
        self._num_completions = 0
        self._num_remaining = num_micro_batches * len(workers) * (3 if limits.split else 2)
        for m in range(num_micro_batches):
            self._make_ready(Step("forward", 0, m))

    def run(self) -> tuple[RankProgram, ...]:
        """Advance the clock from completion to completion until every step is taken."""
        now = 0
        while self._num_remaining:
            for worker in range(len(self._programs)):
                if self._free_at[worker] <= now:
                    self._take(worker, now)
            if not self._completions:
                self._raise_caps()
                continue
            now = self._completions[0][0]
            while self._completions and self._completions[0][0] == now:
                self._complete(heapq.heappop(self._completions)[2])
        return tuple(tuple(program) for program in self._programs)

    def _take(self, worker: int, now: int) -> None:
        if self._ready_backwards[worker]:
            _, step = heapq.heappop(self._ready_backwards[worker])
        elif self._ready_forwards[worker] and self._num_alive[worker] < self._caps[worker]:
            _, step = heapq.heappop(self._ready_forwards[worker])
            self._num_alive[worker] += 1
        elif self._ready_weights[worker]:
            _, step = heapq.heappop(self._ready_weights[worker])
        else:
            return
        self._programs[worker].append(step)
        self._free_at[worker] = now + _DURATIONS[step.kind]
        self._num_completions += 1
        heapq.heappush(self._completions, (self._free_at[worker], self._num_completions, step))
        self._num_remaining -= 1

    def _complete(self, step: Step) -> None:
        """Make the steps ready that depend on `step`, and release what it held."""
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
            self._num_alive[worker_of(self._workers, step.stage, step.micro_batch)] -= 1

    def _make_ready(self, step: Step) -> None:
        worker = worker_of(self._workers, step.stage, step.micro_batch)
        m, stage = step.micro_batch, step.stage
        if step.kind == "forward":
            group = self._limits.group
            priority = (-stage, m) if group is None else (m // group, stage, m)
            heapq.heappush(self._ready_forwards[worker], (priority, step))
        elif step.kind == "backward_weight":
            heapq.heappush(self._ready_weights[worker], ((m, -stage), step))
        else:
            group = self._limits.group
            priority = (m, -stage) if group is None else (m // group, -stage, m)
            heapq.heappush(self._ready_backwards[worker], (priority, step))

    def _raise_caps(self) -> None:
        """Every worker is blocked by its cap: raise the caps of those with a ready forward by one."""
        for worker, forwards in enumerate(self._ready_forwards):
            if forwards:
                self._caps[worker] += 1
