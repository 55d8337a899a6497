"""Weights and gradients in pages of a layer, on the host but for their use: copies as steps of a program.

The first layers of a stage live on the host, one page each; `slots` of them may be on the card. The stage is
a chain of parts: a page each, and last what stays on the card. A group of micro-batches passes part by part,
so that one fetch serves all of them:

- page_in: begins to copy a layer's weights up into a free slot; waits for nothing.
- gradient_up: begins to copy up what groups before have summed, so that sums are added in one order.
- gradient_down: the group's backward of the page has ended; begins to copy its sum down.
- page_out: waits for that copy, if there is one; the slot is free from here on.

A forward or backward of a part waits for its page. A worker has two links, down and up, each first in, first
out. Copies wait for the worker's own steps alone, so a schedule that cannot deadlock stays so.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from yuan_train.schedule.step import COMPUTE, Kind, RankProgram, Step


@dataclass(frozen=True, kw_only=True)
class Paging:
    """What a stage keeps in pages."""

    num_pages: int
    """Layers, the stage's first ones; part number `num_pages` is the rest of the stage."""
    slots: int
    """How many pages may be on the card at a time, those on their way included."""
    group: int
    """Micro-batches that pass together."""

    @property
    def ahead(self) -> int:
        """How many pages before its use one is fetched: one slot is in use, one is leaving."""
        return max(self.slots - 2, min(1, self.slots - 1))


class PagedStage(Protocol):
    """What a plan says of a stage: see `config.plan.StagePlan`."""

    @property
    def parameter_offload(self) -> int: ...
    @property
    def page_slots(self) -> int | None: ...


def paging_of(stage: PagedStage, *, group: int) -> Paging | None:
    """The pages of a stage of a plan that passed its constraints; None if all its weights stay."""
    if not stage.parameter_offload:
        return None
    return Paging(num_pages=stage.parameter_offload, slots=stage.page_slots or 1, group=group)


@dataclass(frozen=True)
class PagedGroup:
    """What a worker does when the last member of a group has arrived."""

    micro_batches: tuple[int, ...]
    steps: tuple[Step, ...]
    """Forwards or backwards in parts, and the copies around them."""


PagedGroups = Mapping[tuple[Kind, int], PagedGroup]
"""By kind of compute and last micro-batch of the group."""


def with_pages(program: RankProgram, paging: Paging) -> RankProgram:
    """The compute of a worker of one stage in parts, group by group, with the copies of its pages."""
    return _Placement(program, paging).run()


def by_group(program: RankProgram) -> PagedGroups:
    """The groups of a program with pages. Copies belong to the compute after them; a gradient on its way
    down, and what ends the program, to that before."""
    groups: list[list[Step]] = []
    waiting: list[Step] = []
    last: Step | None = None
    for step in program:
        waiting.append(step)
        if step.kind in COMPUTE:
            if last is None or _begins_group(step, last):
                groups.append([])
            last = step
        elif step.kind != "gradient_down":
            continue
        groups[-1] += waiting
        waiting.clear()
    groups[-1] += waiting
    found: dict[tuple[Kind, int], PagedGroup] = {}
    for steps in groups:
        compute = [step for step in steps if step.kind in COMPUTE]
        members = tuple(dict.fromkeys(step.micro_batch for step in compute))
        found[compute[0].kind, members[-1]] = PagedGroup(members, tuple(steps))
    return found


def _begins_group(step: Step, last: Step) -> bool:
    """Whether a step of a part is the first of its group: the one before was of the other kind, or had come
    to the group's last part."""
    if step.kind != last.kind:
        return True
    return step.part < last.part if step.kind == "forward" else step.part > last.part


@dataclass(frozen=True)
class _Visit:
    """A group passes a page."""

    kind: Kind
    page: int


class _Placement:
    """Places the copies of one worker, in one pass over its program."""

    def __init__(self, program: RankProgram, paging: Paging) -> None:
        self._paging = paging
        compute = [step for step in program if step.kind in COMPUTE]
        self._groups = [
            tuple(steps)
            for _, steps in itertools.groupby(compute, lambda s: (s.kind, s.micro_batch // paging.group))
        ]
        self._visits = [
            _Visit(steps[0].kind, page)
            for steps in self._groups
            for page in self._order(steps[0].kind)
            if page < paging.num_pages
        ]
        self._here: set[int] = set()
        """Pages in slots or on their way up."""
        self._leaving: list[int] = []
        """Pages whose gradients are on their way down, the oldest first."""
        self._summed: set[int] = set()
        """Pages that have a sum on the host."""
        self._arrived = 0
        """Visits whose pages have been fetched."""
        self._out: list[Step] = []

    def run(self) -> RankProgram:
        number = 0
        for steps in self._groups:
            template = steps[0]
            for part in self._order(template.kind):
                if part < self._paging.num_pages:
                    self._arrive(number, template, number)
                    for later in range(number + 1, number + 1 + self._paging.ahead):
                        if not self._arrive(later, template, number):
                            break
                self._out += [step._replace(part=part) for step in steps]
                if part < self._paging.num_pages:
                    self._leave(number, template)
                    number += 1
        for page in self._leaving:
            self._out.append(self._groups[-1][0]._replace(kind="page_out", part=page))
        return tuple(self._out)

    def _order(self, kind: Kind) -> range:
        parts = range(self._paging.num_pages + 1)
        return parts if kind == "forward" else parts[::-1]

    def _arrive(self, number: int, template: Step, current: int) -> bool:
        """Fetch the page of a visit, if it has not been; False if it cannot be yet and need not."""
        must = number == current
        if number < self._arrived:
            return True
        if number >= len(self._visits):
            return False
        visit = self._visits[number]
        if _Visit("backward", visit.page) in self._visits[current:number]:
            # It goes down before.
            return False
        if visit.page in self._leaving:
            if not must:
                return False
            self._free(visit.page, template)
        if visit.page not in self._here:
            if len(self._here) + len(self._leaving) >= self._paging.slots:
                if not self._leaving:
                    assert not must, "no slot is free for the page in use"
                    return False
                self._free(self._leaving[0], template)
            self._here.add(visit.page)
            self._out.append(template._replace(kind="page_in", part=visit.page))
        if visit.kind == "backward" and visit.page in self._summed:
            self._out.append(template._replace(kind="gradient_up", part=visit.page))
        self._arrived = number + 1
        return True

    def _leave(self, number: int, template: Step) -> None:
        visit = self._visits[number]
        if visit.kind == "backward":
            self._summed.add(visit.page)
            self._here.remove(visit.page)
            self._leaving.append(visit.page)
            self._out.append(template._replace(kind="gradient_down", part=visit.page))
            return
        window = self._visits[number + 1 : number + 1 + max(1, self._paging.ahead)]
        if all(later.page != visit.page for later in window):
            self._here.remove(visit.page)
            self._out.append(template._replace(kind="page_out", part=visit.page))

    def _free(self, page: int, template: Step) -> None:
        self._leaving.remove(page)
        self._out.append(template._replace(kind="page_out", part=page))
