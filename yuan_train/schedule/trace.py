"""Timed steps as Chrome trace events, for ui.perfetto.dev: one writer for forecast and measurement.

A process of the trace is a card or a node, a thread is a stage. Messages stand on a thread of their own
beside their stage's, because they overlap its compute, and an arrow leads from each to the step that uses it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yuan_train.schedule.step import Step

_ARRIVALS = {"send_activation": ("forward", 1), "send_gradient": ("backward", -1)}


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step, and when it ran. For a send: when its message was on the way."""

    step: Step
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, kw_only=True)
class TraceLane:
    """What one stage did."""

    process: str
    """Card or node; lanes of the same process stand together."""
    pipeline: int
    stage: int
    steps: Sequence[TimedStep]
    label: str = ""
    """Beside the stage's name, such as its layers."""


def trace_events(lanes: Iterable[TraceLane]) -> list[dict[str, Any]]:
    """The lanes as events of the Chrome trace format; times in microseconds, as the format wants.

    Receives are not drawn: a message is drawn where it was sent.
    """
    lanes = list(lanes)
    processes = {name: i for i, name in enumerate(dict.fromkeys(lane.process for lane in lanes))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for name, pid in processes.items()
    ]
    for number, lane in enumerate(lanes):
        events += _lane_events(lane, processes[lane.process], 2 * number)
    events += _arrows(lanes, processes)
    return events


def write_trace(path: str | Path, lanes: Iterable[TraceLane]) -> None:
    """Write a trace file whole or not at all. Raises OSError if it cannot."""
    document = {"displayTimeUnit": "ms", "traceEvents": trace_events(lanes)}
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        aside.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _lane_events(lane: TraceLane, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    name = f"pipeline {lane.pipeline} stage {lane.stage}"
    label = f"{name}: {lane.label}" if lane.label else name
    for thread, text in ((tid, label), (tid + 1, f"{name} sends")):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": text}}
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": pid,
            "tid": thread,
            "args": {"sort_index": thread},
        }
    for timed in lane.steps:
        step = timed.step
        if step.kind.startswith("receive"):
            continue
        yield {
            "ph": "X",
            "name": f"{step.kind.replace('_', ' ')} {step.micro_batch}",
            "cat": step.kind,
            "pid": pid,
            "tid": tid if step.is_compute else tid + 1,
            "ts": _microseconds(timed.start_seconds),
            "dur": _microseconds(timed.end_seconds - timed.start_seconds),
            "args": {"pipeline": lane.pipeline, "stage": lane.stage, "micro_batch": step.micro_batch},
        }


def _arrows(lanes: Sequence[TraceLane], processes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """From each send to the compute step at the neighbour that works on its message."""
    compute = {
        (lane.pipeline, timed.step): (processes[lane.process], 2 * number, timed)
        for number, lane in enumerate(lanes)
        for timed in lane.steps
        if timed.step.is_compute
    }
    for number, lane in enumerate(lanes):
        for timed in lane.steps:
            step = timed.step
            if step.kind not in _ARRIVALS:
                continue
            kind, offset = _ARRIVALS[step.kind]
            used = compute.get((lane.pipeline, Step(kind, step.stage + offset, step.micro_batch)))  # type: ignore[arg-type]
            if used is None:
                continue
            pid, tid, target = used
            common = {
                "cat": "message",
                "name": step.kind.removeprefix("send_"),
                "id": f"{lane.pipeline}.{step.stage}.{step.kind}.{step.micro_batch}",
            }
            at = _microseconds(timed.start_seconds)
            yield common | {"ph": "s", "pid": processes[lane.process], "tid": 2 * number + 1, "ts": at}
            yield common | {
                "ph": "f",
                "bp": "e",
                "pid": pid,
                "tid": tid,
                "ts": _microseconds(target.start_seconds),
            }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
