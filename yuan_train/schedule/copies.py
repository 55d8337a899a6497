"""What leaves the card between two of its uses: copies as steps of a rank program.

A worker has two links, down and up, each first in, first out. Copies wait for the worker's own steps alone,
so a schedule that cannot deadlock stays so.

Activations leave between a forward and its backward. A stage is a chain of parts (halves of layers), and the
activations of its first parts leave:

- offload: begins to copy what a part's forward kept to the host; waits for nothing, as a send.
- evict: waits for that copy; the card's memory is free from here on.
- fetch: begins to bring it back, as a receive that is posted; the part's backward waits for it.

The program says when each activation is next needed: nothing is recorded at run time. In halves of layers,
for whole micro-batches would stall where parts do not.

Weights and gradients leave in pages of a layer, on the host but for their use. The first layers of a stage
live on the host, one page each; `slots` of them may be on the card. The stage is a chain of parts: a page
each, and last what stays on the card. A group of micro-batches passes part by part, so that one fetch serves
all of them:

- page_in: begins to copy a layer's weights up into a free slot; waits for nothing.
- gradient_up: begins to copy up what groups before have summed, so that sums are added in one order.
- gradient_down: the group's backward of the page has ended; begins to copy its sum down.
- page_out: waits for that copy, if there is one; the slot is free from here on.

A forward or backward of a part waits for its page.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from yuan_train.schedule.schedules import ProgramShape, make_schedule
from yuan_train.schedule.step import COMPUTE, COPIES, Kind, RankProgram, Step

IN_PARTS = ("forward", "backward", "backward_input")
"""Kinds of steps that run part by part; the weights' part of a split backward does not."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What a stage offloads of its activations."""

    num_parts: int
    """Of the stage."""
    num_leaving: int
    """The first ones, whose activations leave."""
    resident: int
    """How many of these, over all micro-batches, may be on the card at a time."""
    ahead: int
    """How many parts before its backward a fetch may begin."""


Offloads = Mapping[int, Offload]
"""By stage; the stages of a worker that offload anything."""

DEFAULT_AHEAD = 2


class OffloadingStage(Protocol):
    """What a plan says of a stage: see `config.plan.StagePlan`."""

    @property
    def parts(self) -> Sequence[object]: ...
    @property
    def num_leaving_parts(self) -> int: ...
    @property
    def resident_parts(self) -> int | None: ...
    @property
    def fetch_ahead(self) -> int | None: ...


def offloads_of(stages: Mapping[int, OffloadingStage]) -> Offloads:
    """What stages of a plan that passed its constraints offload; those that do not are left out."""
    return {
        s: Offload(
            num_parts=len(stage.parts),
            num_leaving=stage.num_leaving_parts,
            resident=stage.resident_parts or 1,
            ahead=stage.fetch_ahead or DEFAULT_AHEAD,
        )
        for s, stage in stages.items()
        if stage.num_leaving_parts
    }


@dataclass(frozen=True)
class PartSteps:
    """A compute step in parts, in the order in which they run, and the copies around them."""

    parts: tuple[int, ...]
    """(-1,) if its stage has no parts."""
    before: tuple[tuple[Step, ...], ...]
    """By part, the copies before it."""
    after: tuple[Step, ...]
    """Those after the last one."""


Key = tuple[int, int, int]
"""Stage, micro-batch, part: what the part's forward kept."""


def in_parts(program: RankProgram, offloads: Offloads) -> RankProgram:
    """The program with forwards and backwards in parts, on the stages that offload; a backward begins with
    the last part. The weights' part of a backward is one step."""
    steps: list[Step] = []
    for step in program:
        offload = offloads.get(step.stage)
        if offload is None or step.kind not in IN_PARTS:
            steps.append(step)
            continue
        order = range(offload.num_parts)
        parts = order if step.kind == "forward" else reversed(order)
        steps += [Step(*step[:3], part) for part in parts]
    return tuple(steps)


def with_copies(program: RankProgram, offloads: Offloads) -> RankProgram:
    """A worker's program in parts, with the copies that keep its activations within `resident` parts.

    A part whose backward follows soon after its forward stays. Raises TooFewResident if `resident` is too
    small.
    """
    found = _Placement(program, offloads).run()
    if isinstance(found, tuple):
        return found
    raise TooFewResident(program, found, offloads[found])


def copied_programs(shape: ProgramShape, stages: Sequence[OffloadingStage]) -> dict[int, RankProgram]:
    """By worker of a pipeline, its program with the copies of activations, if a stage of it offloads any.
    Raises TooFewResident if too few parts of one may stay."""
    return _copied(shape, tuple(offloads_of(dict(enumerate(stages))).items()))


@functools.lru_cache(maxsize=64)
def _copied(shape: ProgramShape, offloads: tuple[tuple[int, Offload], ...]) -> dict[int, RankProgram]:
    found: dict[int, RankProgram] = {}
    for worker, program in enumerate(make_schedule(**shape._asdict())):
        own = {stage: offload for stage, offload in offloads if worker in shape.workers[stage]}
        if own:
            found[worker] = with_copies(program, own)
    return found


class TooFewResident(ValueError):
    """A schedule holds more parts of a stage on the card at once than may be; the text says what would do.

    That takes many placements, so it is sought only when the text is read: a search meets thousands of these
    and reads none.
    """

    def __init__(self, program: RankProgram, stage: int, offload: Offload) -> None:
        super().__init__(program, stage, offload)
        self._program, self._stage, self._offload = program, stage, offload

    def __str__(self) -> str:
        stage, offload = self._stage, self._offload
        return (
            f"stage {stage}: resident_parts: {offload.resident} is too small for this schedule, which holds "
            f"more at once; set resident_parts: {_least_resident(self._program, stage, offload)} or more"
        )


def _least_resident(program: RankProgram, stage: int, offload: Offload) -> int:
    """With how many resident parts a stage's copies can be placed, by bisection: with all of them they can,
    and where they can with some they can with more."""
    forwards = sum(step.kind == "forward" and step.stage == stage for step in program)
    numbers = range(offload.resident + 1, forwards * offload.num_leaving)

    def can_be_placed(resident: int) -> bool:
        return isinstance(_Placement(program, {stage: replace(offload, resident=resident)}).run(), tuple)

    return numbers.start + bisect.bisect_left(numbers, True, key=can_be_placed)


@dataclass
class _Pool:
    """The leaving parts of a stage that are on the card."""

    here: int = 0
    pending: deque[Key] = field(default_factory=deque[Key])
    """Those whose copy to the host has begun, the oldest first."""


class _Placement:
    """Places the copies of one worker, in one pass over its program."""

    def __init__(self, program: RankProgram, offloads: Offloads) -> None:
        self._offloads = offloads
        self._steps = in_parts(program, offloads)
        compute = [step for step in self._steps if step.kind in COMPUTE]
        self._position = {step: i for i, step in enumerate(compute)}
        self._backward = {kept_by(s): i for i, s in enumerate(compute) if s.kind in IN_PARTS[1:]}
        self._split = any(step.kind == "backward_weight" for step in compute)
        self._pools = {stage: _Pool() for stage in offloads}
        self._due = self._fetches()
        self._out: list[Step] = []

    def run(self) -> RankProgram | int:
        """The program with copies; or the stage whose parts do not fit."""
        for step in self._steps:
            if step.kind in COMPUTE:
                for key in self._due.get(self._position[step], ()):
                    if not self._fetch(key):
                        return key[0]
            leaves = step.kind == "forward" and self._leaves(step)
            if leaves and not self._make_room(step.stage):
                return step.stage
            self._out.append(step)
            if leaves and self._is_long(kept_by(step)):
                self._out.append(Step("offload", *kept_by(step)))
                self._pools[step.stage].pending.append(kept_by(step))
            self._drop(step)
        evicted = {kept_by(step) for step in self._out if step.kind == "evict"}
        # A copy of what stays after all would be for nothing.
        return tuple(s for s in self._out if s.kind != "offload" or kept_by(s) in evicted)

    def _fetches(self) -> dict[int, list[Key]]:
        """By compute position: what is fetched before it, in the order of need."""
        due: dict[int, list[Key]] = {}
        keys = sorted(
            (self._backward[kept_by(step)], step)
            for step in self._position
            if step.kind == "forward" and self._leaves(step) and self._is_long(kept_by(step))
        )
        for needed, step in keys:
            earliest = max(self._position[step] + 1, needed - self._offloads[step.stage].ahead)
            due.setdefault(earliest, []).append(kept_by(step))
        return due

    def _leaves(self, step: Step) -> bool:
        offload = self._offloads.get(step.stage)
        return offload is not None and step.part < offload.num_leaving

    def _is_long(self, key: Key) -> bool:
        """Whether a part's backward is so far from its forward that a copy each way has time."""
        forward = self._position[Step("forward", *key)]
        return self._backward[key] - forward > 2 * self._offloads[key[0]].ahead + 2

    def _fetch(self, key: Key) -> bool:
        pool = self._pools[key[0]]
        if key in pool.pending:
            # Still on the card: it stays.
            pool.pending.remove(key)
            return True
        if not self._make_room(key[0]):
            return False
        self._out.append(Step("fetch", *key))
        return True

    def _make_room(self, stage: int) -> bool:
        pool = self._pools[stage]
        while pool.here >= self._offloads[stage].resident:
            if not pool.pending:
                return False
            key = pool.pending.popleft()
            self._out.append(Step("evict", *key))
            pool.here -= 1
        pool.here += 1
        return True

    def _drop(self, step: Step) -> None:
        """What a backward has used is gone; split, its weights' part still needs all parts."""
        offload = self._offloads.get(step.stage)
        if offload is None:
            return
        if step.kind == "backward_weight":
            self._pools[step.stage].here -= offload.num_leaving
        elif step.kind == "backward" and self._leaves(step):
            self._pools[step.stage].here -= 1


def kept_by(step: Step) -> Key:
    """What a step in parts, or a copy, is about."""
    return step.stage, step.micro_batch, step.part


def group_copies(program: RankProgram) -> dict[Step, PartSteps]:
    """By compute step of the program without parts and copies: its parts, and the copies around them.

    A copy belongs to the next part, or to the step before it if no compute follows at once.
    """
    groups: dict[Step, list[tuple[int, tuple[Step, ...]]]] = {}
    copies: list[Step] = []
    whole = None
    for step in program:
        if step.kind in COPIES:
            copies.append(step)
        elif step.kind in COMPUTE:
            whole = Step(*step[:3])
            groups.setdefault(whole, []).append((step.part, tuple(copies)))
            copies.clear()
    return {
        step: PartSteps(*zip(*found, strict=True), after=tuple(copies) if step == whole else ())
        for step, found in groups.items()
    }


def kept_bytes(program: RankProgram, held: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """(most bytes on the card at once, most on the host) of what leaves, if part p's forward on stage s keeps
    held[s][p] bytes. `program` is in parts, with copies."""
    here = away = most_here = most_away = 0.0
    split = any(step.kind == "backward_weight" for step in program)
    on_host: dict[Key, float] = {}
    for step in program:
        parts = held.get(step.stage, ())
        size = parts[step.part] if 0 <= step.part < len(parts) else 0.0
        if step.kind in ("forward", "fetch"):
            here += size
        elif step.kind == "evict" or (step.kind == "backward" and not split):
            here -= size
        elif step.kind == "backward_weight":
            here -= sum(parts)
        if step.kind == "offload":
            on_host[kept_by(step)] = size
            away += size
        elif step.kind in IN_PARTS[1:]:
            away -= on_host.pop(kept_by(step), 0.0)
        most_here, most_away = max(most_here, here), max(most_away, away)
    return most_here, most_away


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
    return _PagePlacement(program, paging).run()


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


class _PagePlacement:
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
