"""The copies of a worker in virtual time, of activations or of pages: two links, each first in, first out.

A copy begins when the step before it has ended; what needs it, and what frees the card's memory after it,
waits, and that is a stall. Copies wait for the worker's own steps alone, so that the order of operations
stays as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from yuan_train.schedule.copies import PartSteps, kept_by
from yuan_train.schedule.pages import PagedGroups
from yuan_train.schedule.step import PAGING, Kind, Step

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
