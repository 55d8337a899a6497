"""The copies of a worker's pages in virtual time: two links, down and up, each first in, first out."""

from __future__ import annotations

from dataclasses import dataclass

from yuan_train.schedule.pages import PagedGroup, PagedGroups
from yuan_train.schedule.step import PAGING, Kind, Step


@dataclass(frozen=True, kw_only=True)
class PageTimes:
    """Seconds of a micro-batch on the parts of a stage: its pages, and last what stays on the card."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    weight_seconds: tuple[float, ...]
    """By page, to copy its weights up."""
    gradient_seconds: tuple[float, ...]
    """By page, to copy its gradient, one way."""


class PageClock:
    """One worker's links, in virtual time: down and up, each first in, first out.

    A member of a group that is not the last takes no time: the last runs them all.
    """

    def __init__(self, groups: PagedGroups, times: PageTimes) -> None:
        self._groups = groups
        self._times = times
        self._down_free = self._up_free = 0.0
        self._down: dict[int, float] = {}
        """Ends of copies by page, and the same for those up."""
        self._up: dict[int, float] = {}
        self.stall_seconds = 0.0

    def run(self, kind: Kind, stage: int, micro_batch: int, start: float, seconds: float) -> float:
        """End of a member's step that starts at a time, when the members before it are there."""
        group = self._groups.get((kind, micro_batch))
        return start if group is None else self._run_group(group, start)

    def _run_group(self, group: PagedGroup, now: float) -> float:
        times = self._times
        for step in group.steps:
            if step.kind in PAGING:
                now = self._copy(step, now)
                continue
            now = self._wait(self._up, step.part, now)
            own = times.forward_seconds if step.kind == "forward" else times.backward_seconds
            now += own[step.part]
        return now

    def _copy(self, step: Step, now: float) -> float:
        page = step.part
        if step.kind == "page_out":
            return self._wait(self._down, page, now)
        if step.kind == "gradient_down":
            self._down_free = max(self._down_free, now) + self._times.gradient_seconds[page]
            self._down[page] = self._down_free
            return now
        weights = step.kind == "page_in"
        own = self._times.weight_seconds if weights else self._times.gradient_seconds
        self._up[page] = self._up_free = max(self._up_free, now) + own[page]
        return now

    def _wait(self, ends: dict[int, float], page: int, now: float) -> float:
        end = ends.pop(page, now)
        self.stall_seconds += max(0.0, end - now)
        return max(now, end)
