"""Runs a schedule on devices. The other interpreter is `planner/evaluate/simulator.py`, in virtual time."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from yuan_kernels import ops

from yuan_train.config.devices import REAL, Simulated
from yuan_train.parallel.activity import Activity, during
from yuan_train.parallel.bridge import Bridge
from yuan_train.parallel.device import Device, Mark
from yuan_train.schedule.step import RECEIVE_OF, SEND_OF, Kind, RankProgram, Step, receive_of


class StageWork(Protocol):
    """The compute of one stage on one micro-batch: all that the executor knows of the model."""

    def load(self, micro_batch: int) -> None:
        """Read what the forward of a micro-batch needs besides the message; the host's work, not compute."""
        ...

    def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
        """The hidden state for the next stage [B, S, H], or on the last stage the loss (a scalar).

        `hidden_BSH` comes from the previous stage; None on the first stage.
        """
        ...

    def splitting(self, micro_batch: int, split: bool) -> AbstractContextManager[object]:
        """Around a backward: if `split`, its weight gradients are deferred until `backward_weight`."""
        ...

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the weight gradients that a split backward deferred."""
        ...


@runtime_checkable
class GroupWork(Protocol):
    """A stage that takes several micro-batches together, when the last of them has arrived."""

    def hold(self, kind: Kind, micro_batch: int, tensor: torch.Tensor | None, *, training: bool) -> bool:
        """Keep what the forward or backward of a member takes: its message; None at the model's ends.

        Returns whether it is the last of its group."""
        ...

    def run_group(self, kind: Kind, micro_batch: int, *, training: bool) -> dict[int, torch.Tensor | None]:
        """Run the group that a micro-batch ends; by member, what `StageWork.forward` returns, or the gradient
        of what it takes (None on the first stage)."""
        ...


WARM_UP_PIECES = 16
"""Pieces of a kind of work after which a simulated card takes as long for each as their median says."""


class Stopwatch:
    """Measures the seconds that a device spends on compute.

    A simulated card sleeps after each piece of work, until this has lasted `slowdown` times the processor
    time that it used. Other work on the machine changes that time, in caches and in what two threads of a
    core share. So once WARM_UP_PIECES of a kind are done, each that follows lasts `slowdown` times their
    median; or, from the first on, as long as the card's type says of any piece. One whose work alone takes
    longer lasts as long as that, and is told of by `tell_overruns`.
    """

    def __init__(self, device: Device, *, simulated: Simulated = REAL) -> None:
        self._device, self._simulated = device, simulated
        self._paces = _Paces(simulated)
        self._kind: tuple[Hashable, ...] = ()
        """Of the piece of work that is running; empty: of no kind, so that it has no pace."""
        self._lasted = self._used = 0.0
        """Wall and processor seconds of the piece of work that is running, before it was resumed."""
        self._seconds = 0.0
        self._since: tuple[float, float] | None = None
        """Wall and processor seconds at the start of the piece of work that is running, or resumed."""
        self._pieces: list[tuple[Mark, Mark]] = []
        self._begun: Mark | None = None
        """Where a piece of work that is running on a card began, or was resumed."""

    def running(self, *kind: Hashable) -> AbstractContextManager[None]:
        """Around a piece of work: count its seconds. Pieces do not nest; one that raises is not counted.

        `kind`: what pieces of as much work have in common. Those without are as long as each of them is.
        """
        self._kind = kind
        # Nothing is made, for there are two with each micro-batch.
        return self

    def is_of(self, *kind: Hashable) -> None:
        """Inside a piece of work that has a kind: what else tells it from others of that."""
        self._kind += kind

    def __enter__(self) -> None:
        if self._device.is_card:
            self._begun = self._device.mark(timed=True)
        else:
            self._lasted = self._used = 0.0
            self._since = self._now()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            return
        if self._begun is not None:
            self._cut(self._begun)
            self._begun = None
        else:
            self._count(ends=True)
            self._since = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around a wait inside a piece of work: its seconds are not counted."""
        if self._begun is not None:
            # The stream stands between the two marks, whatever the host does.
            self._cut(self._begun)
            yield
            self._begun = self._device.mark(timed=True)
        elif self._since is not None:
            self._count()
            yield
            self._since = self._now()
        else:
            yield

    def _cut(self, begun: Mark) -> None:
        self._pieces.append((begun, self._device.mark(timed=True)))

    def catch_up(self) -> None:
        """Inside a piece of work of a simulated card: wait until a card of its speed would have come so far.
        Without this, what the work starts half-way would start too early."""
        if self._simulated.is_simulated and self._since is not None:
            self._count()
            self._since = self._now()

    def _now(self) -> tuple[float, float]:
        """Wall seconds, and the thread's processor seconds if a simulated card needs them: a system call."""
        return time.perf_counter(), time.thread_time() if self._simulated.is_simulated else 0.0

    def _count(self, *, ends: bool = False) -> None:
        """`ends`: with the piece of work, which else goes on."""
        assert self._since is not None
        start, start_processor = self._since
        if self._simulated.is_simulated:
            self._used += time.thread_time() - start_processor
            lasted = self._lasted + time.perf_counter() - start
            due = self._paces.seconds(self._kind, self._used, lasted=lasted if ends else None)
            time.sleep(max(0.0, due - lasted))
        seconds = time.perf_counter() - start
        self._lasted += seconds
        self._seconds += seconds

    def tell_overruns(self) -> None:
        """Say, at the end of a run, which part of the work took longer than its pace since the last call."""
        if (said := self._paces.overruns()) is not None:
            print(f"note: {said}", file=sys.stderr)

    def read(self) -> float:
        """Seconds counted since the last call; waits for the device."""
        if self._pieces:
            self._pieces[-1][1].finish()
            self._seconds += sum(end.seconds_since(start) for start, end in self._pieces)
            self._pieces.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _Paces:
    """How long a simulated card takes for the pieces of its work, by kind."""

    def __init__(self, simulated: Simulated) -> None:
        self._simulated = simulated
        self._warm_up: dict[tuple[Hashable, ...], list[float]] = {}
        """Processor seconds of each kind's first pieces."""
        self._frozen: dict[tuple[Hashable, ...], float] = {}
        self._paced = self._over = 0
        """Pieces since overruns were told of that had a pace, and those that took longer."""
        self._over_seconds = self._most_over = 0.0
        """By which they did, in all and at most."""

    def seconds(self, kind: tuple[Hashable, ...], used: float, *, lasted: float | None) -> float:
        """That a piece of work, of so many processor seconds, is to last; of one that goes on, so far.

        `lasted`: its wall seconds, if it ends; None: it goes on.
        """
        slowed = self._simulated.slowdown * used
        pace = self._simulated.piece_seconds or self._frozen.get(kind)
        if lasted is None:
            return slowed if pace is None else min(slowed, pace)
        if pace is not None:
            self._paced += 1
            if lasted > pace:
                self._over += 1
                self._over_seconds += lasted - pace
                self._most_over = max(self._most_over, lasted - pace)
            return pace
        if kind:
            first = self._warm_up.setdefault(kind, [])
            first.append(used)
            if len(first) == WARM_UP_PIECES:
                self._frozen[kind] = self._simulated.slowdown * statistics.median(self._warm_up.pop(kind))
        return slowed

    def overruns(self) -> str | None:
        """What is to be said of them since the last call; None if there are none."""
        said = None
        if self._over:
            said = (
                f"of {self._paced:,} pieces of this simulated card's work {self._over:,} took longer than "
                f"its pace, by {self._over_seconds:.3f} s in all and {self._most_over:.3f} s at most; a "
                "slower one would keep its pace"
            )
        self._paced, self._over, self._over_seconds, self._most_over = 0, 0, 0.0, 0.0
        return said


@dataclass(frozen=True, slots=True)
class _Task:
    """A step of a rank program, with all that depends on the program alone: it runs again in every batch."""

    step: Step
    activity: Activity
    arrival: Step | None = None
    """Of a forward or backward: the receive of what it takes."""
    loading: Activity | None = None
    """Of a forward."""
    waiting: Activity | None = None
    """If what it takes is a message; else it is the result of another stage of this worker, or nothing."""
    departure: Step | None = None
    """What takes its result: a send or, for another stage of this worker, the receive of a message."""


class Executor:
    """Runs the rank program of one worker.

    Only outputs are kept, by stage and micro-batch, from a forward to its backward; so memory follows the
    in-flight depth of the schedule and not the number of micro-batches.
    """

    def __init__(self, works: Mapping[int, StageWork], bridge: Bridge | None, stopwatch: Stopwatch) -> None:
        self._works = works
        self._in_groups = {stage: work for stage, work in works.items() if isinstance(work, GroupWork)}
        self._bridge, self._stopwatch = bridge, stopwatch
        self._tasks: dict[int, tuple[RankProgram, tuple[_Task, ...]]] = {}
        """Of the programs so far, by identity."""
        self._kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._results: dict[Step, torch.Tensor] = {}
        """Results by the step that would take them: a send, or, for another stage of this worker, the receive
        that a message would need."""

    def run(
        self,
        program: RankProgram,
        *,
        before_step: Callable[[Step], None] | None = None,
        after_step: Callable[[Step], None] | None = None,
    ) -> None:
        """Run every step of a rank program, and call `before_step` and `after_step` around each; gradients
        accumulate.

        A program without backwards (evaluation) keeps no outputs. Raises TrainingError or LostPeer if a peer
        is lost.
        """
        for step in self.steps(program, after_step):
            if before_step is not None:
                before_step(step)

    def steps(self, program: RankProgram, after_step: Callable[[Step], None] | None = None) -> Iterator[Step]:
        """As `run`, but yield every step just before running it."""
        training = any(step.kind in ("backward", "backward_input") for step in program)
        if id(program) not in self._tasks:
            all_steps = frozenset(program)
            self._tasks[id(program)] = program, tuple(_task(step, all_steps) for step in program)
        for task in self._tasks[id(program)][1]:
            yield task.step
            self._run(task, training=training)
            if after_step is not None:
                after_step(task.step)
        if self._bridge is not None:
            with during(Activity("drain")):
                self._bridge.drain()
        assert not self._kept and not self._results

    @ops.variable_held()
    def _run(self, task: _Task, *, training: bool) -> None:
        step = task.step
        if self._in_groups and step.stage in self._in_groups and step.is_compute:
            self._member(task, self._in_groups[step.stage], training=training)
        elif step.kind == "forward":
            self._forward(task, training=training)
        elif step.kind in ("backward", "backward_input"):
            self._backward(task)
        elif step.kind == "backward_weight":
            with during(task.activity), self._stopwatch.running(step.kind, step.stage):
                self._works[step.stage].backward_weight(step.micro_batch)
        elif step.kind in ("receive_activation", "receive_gradient"):
            with during(task.activity):
                self._need_bridge().post(step)
        else:
            with during(task.activity):
                self._need_bridge().send(step, self._results.pop(step))

    def _forward(self, task: _Task, *, training: bool) -> None:
        kind, stage, micro_batch, _ = task.step
        assert task.loading is not None and task.departure is not None
        # Before the wait for the message, which a copy to the card would else stand behind.
        with during(task.loading):
            self._works[stage].load(micro_batch)
        hidden_BSH = self._take_input(task)
        if hidden_BSH is not None and training:
            hidden_BSH.requires_grad_()
        running = self._stopwatch.running(kind, stage, training)
        with _grad_enabled(training), during(task.activity), running:
            output = self._works[stage].forward(micro_batch, hidden_BSH)
        if training:
            self._kept[stage, micro_batch] = (hidden_BSH, output)
        if output.dim() > 0:
            self._put_result(task.departure, output)

    def _member(self, task: _Task, work: GroupWork, *, training: bool) -> None:
        """A forward or backward of a member of a group: what it takes is kept; the last one runs them all."""
        kind, stage, micro_batch, _ = task.step
        assert task.departure is not None
        if task.loading is not None:
            with during(task.loading):
                self._works[stage].load(micro_batch)
        if not work.hold(kind, micro_batch, self._take_input(task), training=training):
            return
        with during(task.activity), self._stopwatch.running(kind, stage, training):
            results = work.run_group(kind, micro_batch, training=training)
            self._stopwatch.is_of(len(results))
        for member, result in results.items():
            if result is not None and result.dim() > 0:
                self._put_result(task.departure._replace(micro_batch=member), result)

    def _backward(self, task: _Task) -> None:
        kind, stage, micro_batch, _ = task.step
        assert task.departure is not None
        gradient_BSH = self._take_input(task)
        hidden_BSH, output = self._kept.pop((stage, micro_batch))
        splitting = self._works[stage].splitting(micro_batch, kind == "backward_input")
        with during(task.activity), self._stopwatch.running(kind, stage), splitting:
            torch.autograd.backward(output, gradient_BSH)
        if hidden_BSH is not None:
            assert hidden_BSH.grad is not None
            self._put_result(task.departure, hidden_BSH.grad)

    def _take_input(self, task: _Task) -> torch.Tensor | None:
        """The message, or the result of another stage of this worker; None at the model's ends."""
        assert task.arrival is not None
        if task.waiting is None:
            return self._results.pop(task.arrival, None)
        with during(task.waiting):
            return self._need_bridge().take(task.arrival)

    def _put_result(self, departure: Step, tensor: torch.Tensor) -> None:
        self._results[departure] = tensor if departure.kind in RECEIVE_OF else tensor.detach()

    def _need_bridge(self) -> Bridge:
        assert self._bridge is not None, "a rank program with messages needs a bridge"
        return self._bridge


def _grad_enabled(wanted: bool) -> AbstractContextManager[object]:
    """As `torch.set_grad_enabled`, which takes microseconds also where it changes nothing."""
    return _UNCHANGED if torch.is_grad_enabled() == wanted else torch.set_grad_enabled(wanted)


_UNCHANGED = nullcontext()


def _task(step: Step, program: frozenset[Step]) -> _Task:
    """The task of one step of a rank program."""
    kind, stage, micro_batch, _ = step
    if kind in RECEIVE_OF:
        return _Task(step, Activity("send", step))
    if kind in SEND_OF:
        return _Task(step, Activity("post", step))
    if kind == "backward_weight":
        return _Task(step, Activity("compute", step))
    is_forward = kind == "forward"
    arrival = Step("receive_activation" if is_forward else "receive_gradient", stage, micro_batch)
    departure = Step("send_activation" if is_forward else "send_gradient", stage, micro_batch)
    return _Task(
        step,
        Activity("compute", step),
        arrival=arrival,
        loading=Activity("load", step) if is_forward else None,
        waiting=Activity("wait", arrival) if arrival in program else None,
        departure=departure if departure in program else receive_of(departure),
    )
