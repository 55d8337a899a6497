"""The copies of a worker in virtual time: two links, down and up, each first in, first out.

An offload begins when the step before it has ended; an evict and a backward wait for their copies, and that
is a stall. Copies wait for the worker's own steps alone, so that the order of operations stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from yuan_train.schedule.copies import Key, PartSteps, kept_by
from yuan_train.schedule.step import Kind, Step

Groups = Mapping[Step, PartSteps]
"""The compute steps of a worker in parts, with their copies: `schedule.copies.group_copies`."""


@dataclass(frozen=True, kw_only=True)
class PartTimes:
    """Seconds of a micro-batch on the parts of a stage: compute of each, and a copy of those that leave."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    copy_seconds: tuple[float, ...]
    """One way."""


class CopyClock:
    """One worker's links."""

    def __init__(self, groups: Groups, times: Mapping[int, PartTimes]) -> None:
        """`times`: by stage, of those that offload."""
        self._groups = groups
        self._times = times
        self._down_free = self._up_free = 0.0
        self._down: dict[Key, float] = {}
        """Ends of copies, by what they copy; so the next."""
        self._up: dict[Key, float] = {}
        self.stall_seconds = 0.0

    def run(self, kind: Kind, stage: int, micro_batch: int, start: float, seconds: float) -> float:
        """End of a compute step that starts at a time and computes for so long."""
        group = self._groups[Step(kind, stage, micro_batch)]
        now = start
        for part, before in zip(group.parts, group.before, strict=True):
            for copy in before:
                now = self._copy(copy, now)
            if part >= 0 and kind != "forward":
                now = self._wait(self._up, (stage, micro_batch, part), now)
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
            return self._wait(self._down, key, now)
        seconds = self._times[step.stage].copy_seconds[step.part]
        if step.kind == "offload":
            self._down[key] = self._down_free = max(self._down_free, now) + seconds
        else:
            self._up[key] = self._up_free = max(self._up_free, now) + seconds
        return now

    def _wait(self, ends: dict[Key, float], key: Key, now: float) -> float:
        end = ends.pop(key, now)
        self.stall_seconds += max(0.0, end - now)
        return max(now, end)
