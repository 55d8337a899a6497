"""Starts gradient reductions inside the last backwards of a rank program, in one order on all ranks.

A bucket's reduction may start when its last gradient is complete: inside the last backward of the stages that
hold its units or, where backwards are split, inside the last weight gradients. All ranks start their
reductions in the reverse of the model's order, in which gradients mostly become complete; a bucket that is
complete before its turn waits for it. Two ranks that share several groups need one order.

This cannot deadlock: starting does not block; a rank waits for the ends when its program has ended and all
its reductions have started; and no program waits for a reduction. So every rank of a reduction starts it, in
the same order as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextvars import copy_context
from functools import partial

import torch

from yuan_train.parallel.activity import Activity, during
from yuan_train.schedule.step import RankProgram, Step

StageParameter = tuple[int, str]
"""A stage, and the global name of a parameter that its backwards accumulate into."""


class GradReducer:
    """Starts each bucket of a rank when it is complete and it is its turn.

    `parameters` are those of this rank by stage and name, `buckets_of` gives the numbers of the buckets of
    each, in the model's order. The weight gradients of `deferred` are computed in the `backward_weight` steps
    of a program that has them. Gradients of the stages `late` are complete when their last backward step has
    ended, and not before. `start(number)` starts the reduction of a bucket and must not wait.
    """

    def __init__(
        self,
        program: RankProgram,
        parameters: Mapping[int, Mapping[str, torch.nn.Parameter]],
        buckets_of: Mapping[str, Collection[int]],
        *,
        deferred: Collection[str] = (),
        late: Collection[int] = (),
        start: Callable[[int], None],
    ) -> None:
        self.follow(program)
        self._buckets_of = buckets_of
        self._deferred = frozenset(deferred)
        self._late = frozenset(late)
        self._start = start
        self.pace: Callable[[], None] = lambda: None
        """Called before each start: a simulated card waits here until it would have come so far."""
        self._needed: list[frozenset[StageParameter]] = _by_bucket(parameters, buckets_of)
        self._missing: list[set[StageParameter]] = []
        self._next = -1
        self._step: Step | None = None
        """The closing step that is running, if one is."""
        self._context = copy_context()
        self._ended: set[int] = set()
        """Stages whose closing step has ended since the last compute step."""
        for name, parameter in {n: p for held in parameters.values() for n, p in held.items()}.items():
            # Ops that add their weights' gradients say when: at once, or later.
            parameter.on_main_gradient = partial(self.arrived, name)  # pyright: ignore
            if name not in self._deferred:
                parameter.register_post_accumulate_grad_hook(self._hook(name))

    def follow(self, program: RankProgram) -> None:
        """From the next optimizer step on, gradients are those of this program of the same stages."""
        self._closing = closing_steps(program)
        self._last = program[-1]
        self._marked = frozenset([*self._closing.values(), self._last])
        """The steps at which there is something to do, besides those after which a stage has ended."""

    def begin(self) -> None:
        """Expect every gradient of a new optimizer step."""
        assert self._next < 0, "a reduction of the step before has not started"
        self._missing = [set(needed) for needed in self._needed]
        self._next = len(self._missing) - 1

    def before_step(self, step: Step) -> None:
        """A step begins: if it is the last of its stage that completes gradients, count those that arrive."""
        if self._ended and step.is_compute:
            self._end_stages()
        if step not in self._marked:
            return
        closing = self._closing.get(step.stage) == step and step.stage not in self._late
        self._step = step if closing else None
        if self._step is not None:
            # Torch runs a card's backward in a thread of its own, where the trace would not hear of a start.
            self._context = copy_context()
        if self._step is not None and step.kind == "backward_weight":
            # What is not deferred was complete after the last backward_input.
            self._complete(lambda stage, name: stage == step.stage and name not in self._deferred)

    def after_step(self, step: Step) -> None:
        """A step of the rank program has ended: after its last one, all gradients of a stage are complete."""
        if step not in self._marked:
            return
        self._step = None
        if self._closing.get(step.stage) == step:
            self._ended.add(step.stage)
        if step == self._last:
            self._end_stages()

    def arrived(self, name: str) -> None:
        """A parameter's gradient of the running step has been accumulated."""
        if self._step is not None:
            for number in self._buckets_of[name]:
                self._missing[number].discard((self._step.stage, name))
            self._start_complete()

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        # In the last backward torch calls this once per parameter: with its gradient, or without one after an
        # op that has added it to the buffer itself.
        return lambda _: self.arrived(name)

    def _end_stages(self) -> None:
        # Not before the messages that follow the step: another stage waits for those, none for a reduction.
        if self._ended:
            self._complete(lambda stage, name: stage in self._ended)
            self._ended.clear()

    def _complete(self, condition: Callable[[int, str], bool]) -> None:
        for missing in self._missing:
            missing -= {entry for entry in missing if condition(*entry)}
        self._start_complete()

    def _start_complete(self) -> None:
        while self._next >= 0 and not self._missing[self._next]:
            self._next -= 1
            self._context.run(self._announced_start, self._next + 1)

    def _announced_start(self, number: int) -> None:
        self.pace()
        with during(Activity("start_grad_reduce", number=number)):
            self._start(number)


def closing_steps(program: RankProgram) -> dict[int, Step]:
    """By stage, the step of a rank program after which all its gradients are complete."""
    return {step.stage: step for step in program if step.kind in ("backward", "backward_weight")}


def _by_bucket(
    parameters: Mapping[int, Mapping[str, object]], buckets_of: Mapping[str, Collection[int]]
) -> list[frozenset[StageParameter]]:
    last = max((number for numbers in buckets_of.values() for number in numbers), default=-1)
    found: list[set[StageParameter]] = [set() for _ in range(1 + last)]
    for stage, held in parameters.items():
        for name in held:
            for number in buckets_of[name]:
                found[number].add((stage, name))
    return [frozenset(entries) for entries in found]
