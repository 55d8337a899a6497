"""The flow of reinforcement learning in virtual time: what a step takes, and who waits how long.

An actor takes the steps of its program in order. A step begins when its actor is free and all that it waits
for is there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from yuan_train.schedule.flow import Actor, Flow, FlowStep, check_flow, make_flow

NUM_ROUNDS = 6
"""Batches that are measured for each that may be under way; as many before them fill the flow."""


@dataclass(frozen=True, kw_only=True)
class FlowTimes:
    """Seconds of a batch."""

    generate: tuple[float, ...]
    """Of each engine, until its last sample is there: it answers a batch at a time."""
    score: float = 0.0
    train: float
    publish: float = 0.0


@dataclass(frozen=True)
class FlowSpan:
    """A step in virtual time."""

    actor: Actor
    step: FlowStep
    start: float
    end: float


@dataclass(frozen=True)
class Play:
    """A flow in virtual time."""

    spans: tuple[FlowSpan, ...]
    step_seconds: float
    """Between two batches, once all actors are busy."""
    busy_seconds: Mapping[Actor, float]
    """Of each actor, in such a step."""

    def idle(self, actor: Actor) -> float:
        """Share of a step in which an actor does nothing."""
        return max(1.0 - self.busy_seconds[actor] / self.step_seconds, 0.0) if self.step_seconds else 0.0


def play_flow(flow: Flow, times: FlowTimes) -> Play:
    """Play a flow that has passed its checker."""
    free = dict.fromkeys(flow.programs, 0.0)
    places = dict.fromkeys(flow.programs, 0)
    there: dict[FlowStep, float] = {}
    spans: list[FlowSpan] = []
    pending = True
    while pending:
        pending = False
        for actor, program in flow.programs.items():
            while places[actor] < len(program):
                step = program[places[actor]]
                waits = flow.waits.get(step, ())
                if any(other not in there for other in waits):
                    break
                start = max([free[actor], *(there[other] for other in waits)])
                free[actor] = there[step] = end = start + _seconds(times, step)
                spans.append(FlowSpan(actor, step, start, end))
                places[actor] += 1
                pending = True
    return Play(tuple(spans), *_steady(flow, spans))


def _seconds(times: FlowTimes, step: FlowStep) -> float:
    if step.kind == "generate":
        return times.generate[step.engine]
    return {"score": times.score, "train": times.train, "publish": times.publish}[step.kind]


def _steady(flow: Flow, spans: Sequence[FlowSpan]) -> tuple[float, dict[Actor, float]]:
    """Seconds between the ends of two batches in the second half, and each actor's share of them. Waits may
    delay every staleness + 1-th batch, so that a whole number of these is measured."""
    ends = {span.step.batch: span.end for span in spans if span.step.kind == "publish"}
    last = max(ends)
    count = NUM_ROUNDS * (flow.staleness + 1)
    middle = last - count
    seconds = (ends[last] - ends[middle]) / count
    busy = dict.fromkeys(flow.programs, 0.0)
    for span in spans:
        if span.step.batch > middle:
            busy[span.actor] += (span.end - span.start) / count
    return seconds, busy


def play(times: FlowTimes, *, staleness: int, shared: bool, scores_apart: bool) -> Play:
    """A flow, checked and played: the batches that fill it, and those that are measured."""
    return play_flow(_checked(staleness, len(times.generate), shared, scores_apart), times)


@functools.lru_cache(maxsize=32)
def _checked(staleness: int, num_engines: int, shared: bool, scores_apart: bool) -> Flow:
    flow = make_flow(
        num_batches=2 * NUM_ROUNDS * (staleness + 1),
        num_engines=num_engines,
        staleness=staleness,
        shared=shared,
        scores_apart=scores_apart,
    )
    check_flow(flow)
    return flow
