"""A schedule table in virtual time: the same table that the trainer runs.

A stage takes its steps in the table's order, without pre-emption. A compute step starts when the stage is
free and its message has arrived. A message goes over the directed link between two stages when the compute
before it has ended and the link has finished the message before (FIFO), and holds the link until it is there.
With blocking sends the sender waits for that too; the receiver is never held.

All durations are known beforehand, so the order in which steps can be evaluated is a property of the table
alone: it is found once, and then one plan is a loop over numbers, and many plans are a loop over vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from yuan_train.schedule.step import Step, Table
from yuan_train.schedule.tables import make_table
from yuan_train.schedule.trace import TimedStep

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Operation = tuple[Literal["forward", "backward", "send_activation", "send_gradient"], int, int, bool]
"""Kind, stage, micro-batch, and whether a compute step waits for a message."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch on a pipeline of P stages; sends over the P - 1 edges, each way."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    send_activation_seconds: tuple[float, ...]
    """Edge s leads from stage s to s + 1."""
    send_gradient_seconds: tuple[float, ...]
    """Edge s leads from stage s + 1 to s."""

    @property
    def num_stages(self) -> int:
        return len(self.forward_seconds)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One optimizer step's forwards and backwards."""

    step_seconds: float
    """End of the last compute step."""
    stage_end_seconds: tuple[float, ...]
    """End of each stage's last compute step."""
    busy_seconds: tuple[float, ...]
    """Each stage's compute."""
    program: tuple[Operation, ...]
    spans: tuple[tuple[float, float], ...]
    """Start and end of each operation of `program`."""

    @property
    def lanes(self) -> tuple[tuple[TimedStep, ...], ...]:
        """Compute and sends of each stage, as they happened."""
        lanes: list[list[TimedStep]] = [[] for _ in self.busy_seconds]
        for (kind, stage, micro_batch, _), (start, end) in zip(self.program, self.spans, strict=True):
            lanes[stage].append(TimedStep(Step(kind, stage, micro_batch), start, end))
        return tuple(tuple(lane) for lane in lanes)

    @property
    def bubble_fraction(self) -> float:
        """Share of stage time without compute."""
        whole = self.step_seconds * len(self.busy_seconds)
        return 1.0 - sum(self.busy_seconds) / whole if whole > 0 else 0.0


def simulate(table: Table, times: StageTimes, *, overlap: bool = True) -> Simulation:
    """Run a table in virtual time. The table must have passed `schedule.check.check_table`."""
    return _run(operations(table), times, overlap=overlap)


def simulate_schedule(
    schedule: str, times: StageTimes, *, num_micro_batches: int, overlap: bool = True
) -> Simulation:
    """The same for a named schedule."""
    program = _program(schedule, times.num_stages, num_micro_batches)
    return _run(program, times, overlap=overlap)


def simulate_many(
    schedule: str,
    *,
    num_micro_batches: int,
    forward_seconds: Floats,
    backward_seconds: Floats,
    send_activation_seconds: Floats,
    send_gradient_seconds: Floats,
    overlap: bool = True,
) -> Floats:
    """End of the last compute step of each stage, [N, P], of N pipelines of P stages that run the same
    schedule.

    The times are [N, P] and [N, P - 1]; meaning as in StageTimes.
    """
    import numpy as np

    count, stages = forward_seconds.shape
    forward, backward = forward_seconds.T.copy(), backward_seconds.T.copy()
    sends = {
        "send_activation": send_activation_seconds.T.copy(),
        "send_gradient": send_gradient_seconds.T.copy(),
    }
    free = np.zeros((stages, count))
    ends = np.zeros((stages, count))
    link_free = {kind: np.zeros((max(stages - 1, 0), count)) for kind in sends}
    arrivals: dict[tuple[str, int, int], Floats] = {}
    for kind, stage, micro_batch, waits in _program(schedule, stages, num_micro_batches):
        if kind == "forward" or kind == "backward":
            if waits:
                np.maximum(free[stage], arrivals.pop((kind, stage, micro_batch)), out=free[stage])
            free[stage] += forward[stage] if kind == "forward" else backward[stage]
            ends[stage] = free[stage]
            continue
        edge = stage if kind == "send_activation" else stage - 1
        link = link_free[kind][edge]
        np.maximum(link, free[stage], out=link)
        link += sends[kind][edge]
        onward = kind == "send_activation"
        target = stage + 1 if onward else stage - 1
        arrivals["forward" if onward else "backward", target, micro_batch] = link.copy()
        if not overlap:
            free[stage] = link
    return ends.T


def operations(table: Table) -> tuple[Operation, ...]:
    """The table's compute and sends in an order in which each follows what it waits for."""
    received = {step for lane in table for step in lane if step.kind.startswith("receive")}
    program: list[Operation] = []
    position = [0] * len(table)
    sent: set[tuple[str, int, int]] = set()
    ready = list(range(len(table)))
    while ready:
        stage = ready.pop()
        lane = table[stage]
        while position[stage] < len(lane):
            step = lane[position[stage]]
            kind, micro_batch = step.kind, step.micro_batch
            if kind == "forward" or kind == "backward":
                door: Any = "receive_activation" if kind == "forward" else "receive_gradient"
                waits = Step(door, stage, micro_batch) in received
                if waits and (kind, stage, micro_batch) not in sent:
                    break
                program.append((kind, stage, micro_batch, waits))
            elif kind == "send_activation" or kind == "send_gradient":
                program.append((kind, stage, micro_batch, False))
                target = stage + 1 if kind == "send_activation" else stage - 1
                sent.add(("forward" if kind == "send_activation" else "backward", target, micro_batch))
                if target not in ready:
                    ready.append(target)
            position[stage] += 1
    assert all(p == len(lane) for p, lane in zip(position, table, strict=True)), "the table waits for ever"
    return tuple(program)


@functools.lru_cache(maxsize=256)
def _program(schedule: str, num_stages: int, num_micro_batches: int) -> tuple[Operation, ...]:
    return operations(make_table(schedule, num_stages=num_stages, num_micro_batches=num_micro_batches))


def _run(program: Sequence[Operation], times: StageTimes, *, overlap: bool) -> Simulation:
    stages = times.num_stages
    free = [0.0] * stages
    ends = [0.0] * stages
    busy = [0.0] * stages
    links = ([0.0] * stages, [0.0] * stages)
    arrivals: dict[tuple[str, int, int], float] = {}
    spans: list[tuple[float, float]] = []
    for kind, stage, micro_batch, waits in program:
        if kind == "forward" or kind == "backward":
            start = max(free[stage], arrivals[kind, stage, micro_batch]) if waits else free[stage]
            seconds = (times.forward_seconds if kind == "forward" else times.backward_seconds)[stage]
            free[stage] = ends[stage] = end = start + seconds
            busy[stage] += seconds
        else:
            onward = kind == "send_activation"
            edge = stage if onward else stage - 1
            link = links[0 if onward else 1]
            seconds = (times.send_activation_seconds if onward else times.send_gradient_seconds)[edge]
            start = max(link[edge], free[stage])
            link[edge] = end = start + seconds
            arrivals["forward" if onward else "backward", stage + (1 if onward else -1), micro_batch] = end
            if not overlap:
                free[stage] = end
        spans.append((start, end))
    return Simulation(
        step_seconds=max(ends, default=0.0),
        stage_end_seconds=tuple(ends),
        busy_seconds=tuple(busy),
        program=tuple(program),
        spans=tuple(spans),
    )
