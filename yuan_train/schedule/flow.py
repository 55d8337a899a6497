"""Steps of reinforcement learning as data: who generates, scores, trains and publishes what, and after what.

Batch k is the tickets [k * prompts, (k + 1) * prompts); version v are the weights after v batches. The
planner plays a flow in virtual time (`play`): an actor takes its steps in order, each when it is free and all
that the step waits for is there. A run does not walk one: its controller issues tickets up to `newest_batch`,
from which the flow's waits follow as well. They are what bounds staleness: an engine begins batch k when it
has version k - staleness, so that no sample is ever thrown away for its age.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


def group_units(
    owners: Sequence[Hashable], parameters: Sequence[float], *, bucket_size: int
) -> tuple[range, ...]:
    """The buckets of a model's units, in the model's order, each as a range of unit numbers.

    A bucket is a run of adjacent units with the same owners. Gradients become complete from the last unit to
    the first, so a run is divided from its end: a bucket takes units as long as it has at most `bucket_size`
    parameters. A larger unit is a bucket of its own, or two; see `is_halved`. `owners` and `parameters`
    (elements; 0 for a unit that holds none) are by unit.
    """
    buckets: list[range] = []
    end = len(owners)
    size = 0.0
    for unit in reversed(range(len(owners))):
        size += parameters[unit]
        starts_run = unit == 0 or owners[unit - 1] != owners[unit]
        if starts_run or size + parameters[unit - 1] > bucket_size:
            buckets.append(range(unit, end))
            end, size = unit, 0.0
    return tuple(reversed(buckets))


def is_halved(parameters: float, *, num_owners: int, bucket_size: int) -> bool:
    """Whether the halves of a layer of so many parameters are buckets of their own.

    In the backward the gradients of its feed-forward are complete before those of its attention, and hide
    behind them: of the first layer, whose reduction comes last, less is left when the backward has ended.
    """
    return num_owners > 1 and parameters > bucket_size


NUM_ROUNDS = 6
"""Batches that are measured for each that may be under way; as many before them fill the flow."""
FlowKind = Literal["generate", "score", "train", "publish"]
Actor = str
"""`policy`, `scoring`, or an engine: `engine 0`."""


class FlowStep(NamedTuple):
    """What an actor does for a batch."""

    kind: FlowKind
    batch: int
    engine: int = -1
    """Of generate: which engine; the others concern all."""

    def __str__(self) -> str:
        return f"{self.kind} {self.batch}" + (f" of engine {self.engine}" if self.engine >= 0 else "")


@dataclass(frozen=True)
class Flow:
    """The steps of some batches: the program of each actor in order, and what each step waits for."""

    programs: Mapping[Actor, tuple[FlowStep, ...]]
    waits: Mapping[FlowStep, tuple[FlowStep, ...]]
    """Steps of other actors, or of earlier batches; those before it in its own program go without saying."""
    staleness: int
    num_engines: int


def newest_batch(version: int, staleness: int) -> int:
    """The last batch that engines may begin with weights of `version`, or wait to begin with later ones."""
    return version + staleness


def make_flow(
    *, num_batches: int, num_engines: int, staleness: int, shared: bool = False, scores_apart: bool = False
) -> Flow:
    """The flow of `num_batches` batches; with staleness 0 all roles take turns.

    `shared`: the policy's ranks generate, all pipelines at once, so that they are one engine.
    `scores_apart`: a reward model on cards of its own scores.
    """
    assert not (shared and (staleness or num_engines > 1)), "shared cards do one thing at a time"
    engines = ["policy"] * num_engines if shared else [f"engine {e}" for e in range(num_engines)]
    programs: dict[Actor, list[FlowStep]] = {"policy": []}
    waits: dict[FlowStep, tuple[FlowStep, ...]] = {}
    for k in range(num_batches):
        version = next(v for v in range(k + 1) if newest_batch(v, staleness) >= k)
        generated = tuple(FlowStep("generate", k, e) for e in range(num_engines))
        for step, engine in zip(generated, engines, strict=True):
            programs.setdefault(engine, []).append(step)
            # Version 0 is there; version v is published after batch v - 1.
            waits[step] = (FlowStep("publish", version - 1),) if version else ()
        score, train, publish = (FlowStep(kind, k) for kind in ("score", "train", "publish"))
        programs.setdefault("scoring" if scores_apart else "policy", []).append(score)
        programs["policy"] += [train, publish]
        waits |= {score: generated, train: (score,), publish: (train,)}
    return Flow({name: tuple(steps) for name, steps in programs.items()}, waits, staleness, num_engines)


def check_flow(flow: Flow) -> None:
    """Raise ValueError, listing every fault, unless the flow is complete, bounds staleness and cannot hang.

    Complete: every batch is generated by each engine, scored, trained on and published once, each after the
    one before. It cannot hang: it runs to its end if every actor takes its steps in order and blocks until
    what a step waits for has ended. Staleness: in whatever time the steps take, an engine that begins batch k
    has version k - staleness or a later one.
    """
    faults = list(_step_faults(flow)) or list(_order_faults(flow, _all_before(flow)))
    if faults:
        raise ValueError("\n".join(faults))


def _step_faults(flow: Flow) -> Iterator[str]:
    steps = [step for program in flow.programs.values() for step in program]
    known = set(steps)
    if len(known) < len(steps):
        yield "a step appears twice"
    num_batches = 1 + max((step.batch for step in steps), default=-1)
    for k in range(num_batches):
        wanted = [FlowStep("generate", k, e) for e in range(flow.num_engines)]
        wanted += [FlowStep(kind, k) for kind in ("score", "train", "publish")]
        for step in wanted:
            if step not in known:
                yield f"nobody does {step}"
    for step, others in flow.waits.items():
        for other in others:
            if other not in known:
                yield f"{step} waits for {other}, which nobody does"


def _in_order(flow: Flow) -> Iterator[tuple[Actor, FlowStep]]:
    """All steps, each after those that it waits for. Raises ValueError if the flow hangs."""
    done: set[FlowStep] = set()
    places = dict.fromkeys(flow.programs, 0)
    moved = True
    while moved:
        moved = False
        for actor, program in flow.programs.items():
            while places[actor] < len(program) and done.issuperset(
                flow.waits.get(program[places[actor]], ())
            ):
                yield actor, program[places[actor]]
                done.add(program[places[actor]])
                places[actor] += 1
                moved = True
    stuck = [
        f"{actor} at {program[places[actor]]}"
        for actor, program in flow.programs.items()
        if places[actor] < len(program)
    ]
    if stuck:
        raise ValueError(f"nobody goes on: {', '.join(stuck)}")


def _all_before(flow: Flow) -> dict[FlowStep, frozenset[FlowStep]]:
    """The steps that have ended in any case when a step begins. Raises ValueError if the flow hangs."""
    before: dict[FlowStep, frozenset[FlowStep]] = {}
    last: dict[Actor, tuple[FlowStep, ...]] = {}
    for actor, step in _in_order(flow):
        direct = (*flow.waits.get(step, ()), *last.get(actor, ()))
        before[step] = frozenset(direct).union(*(before[other] for other in direct))
        last[actor] = (step,)
    return before


def _order_faults(flow: Flow, before: Mapping[FlowStep, frozenset[FlowStep]]) -> Iterator[str]:
    for step, done in before.items():
        k = step.batch
        wanted: list[FlowStep] = []
        if step.kind == "generate" and k > flow.staleness:
            wanted = [FlowStep("publish", k - flow.staleness - 1)]
        elif step.kind == "score":
            wanted = [FlowStep("generate", k, e) for e in range(flow.num_engines)]
        elif step.kind == "train":
            wanted = [FlowStep("score", k), *([FlowStep("train", k - 1)] if k else [])]
        elif step.kind == "publish":
            wanted = [FlowStep("train", k)]
        for other in wanted:
            if other not in done:
                yield f"{step} may begin before {other} has ended"


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
    flow = _checked(staleness, len(times.generate), shared, scores_apart)
    free = dict.fromkeys(flow.programs, 0.0)
    there: dict[FlowStep, float] = {}
    spans: list[FlowSpan] = []
    for actor, step in _in_order(flow):
        start = max([free[actor], *(there[other] for other in flow.waits.get(step, ()))])
        free[actor] = there[step] = end = start + _seconds(times, step)
        spans.append(FlowSpan(actor, step, start, end))
    return Play(tuple(spans), *_steady(flow, spans))


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
