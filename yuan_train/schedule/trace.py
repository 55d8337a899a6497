"""Timed steps as Chrome trace events, for ui.perfetto.dev: one writer for forecast and measurement.

A process of the trace is a card or a node, a thread is a stage. The messages of a stage have a thread of
their own next to it, because they overlap its compute; an arrow leads from each message to the step that
uses it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yuan_train.schedule.step import Step

_USED_BY = {"send_activation": ("forward", 1), "send_gradient": ("backward", -1)}


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step, and when it ran, in seconds from the start. For a send: when its message was transmitted."""

    step: Step
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, kw_only=True)
class TraceTrack:
    """The timed steps of one stage."""

    process: str
    """Card or node; the tracks of a process are shown together."""
    pipeline: int
    stage: int
    steps: Sequence[TimedStep]
    label: str = ""
    """Text shown after the stage's name, such as its layers."""


def trace_events(tracks: Iterable[TraceTrack]) -> list[dict[str, Any]]:
    """The tracks as events of the Chrome trace format; times in microseconds, as the format requires.

    Receives have no event: a message is drawn at its send.
    """
    tracks = list(tracks)
    processes = {name: i for i, name in enumerate(dict.fromkeys(track.process for track in tracks))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        for name, pid in processes.items()
    ]
    for number, track in enumerate(tracks):
        events += _track_events(track, processes[track.process], 2 * number)
    events += _arrows(tracks, processes)
    return events


def write_trace(path: str | Path, tracks: Iterable[TraceTrack]) -> None:
    """Write a trace file atomically: under a temporary name, then renamed. Raises OSError if it cannot."""
    document = {"displayTimeUnit": "ms", "traceEvents": trace_events(tracks)}
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _track_events(track: TraceTrack, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    name = f"pipeline {track.pipeline} stage {track.stage}"
    label = f"{name}: {track.label}" if track.label else name
    for thread, text in ((tid, label), (tid + 1, f"{name} sends")):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": text}}
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": pid,
            "tid": thread,
            "args": {"sort_index": thread},
        }
    for timed in track.steps:
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
            "args": {"pipeline": track.pipeline, "stage": track.stage, "micro_batch": step.micro_batch},
        }


def _arrows(tracks: Sequence[TraceTrack], processes: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Flow events from each send to the neighbour's compute step that uses its message."""
    compute = {
        (track.pipeline, timed.step): (processes[track.process], 2 * number, timed)
        for number, track in enumerate(tracks)
        for timed in track.steps
        if timed.step.is_compute
    }
    for number, track in enumerate(tracks):
        for timed in track.steps:
            step = timed.step
            if step.kind not in _USED_BY:
                continue
            kind, offset = _USED_BY[step.kind]
            used = compute.get((track.pipeline, Step(kind, step.stage + offset, step.micro_batch)))  # type: ignore[arg-type]
            if used is None:
                continue
            pid, tid, target = used
            common = {
                "cat": "message",
                "name": step.kind.removeprefix("send_"),
                "id": f"{track.pipeline}.{step.stage}.{step.kind}.{step.micro_batch}",
            }
            at = _microseconds(timed.start_seconds)
            yield common | {"ph": "s", "pid": processes[track.process], "tid": 2 * number + 1, "ts": at}
            yield common | {
                "ph": "f",
                "bp": "e",
                "pid": pid,
                "tid": tid,
                "ts": _microseconds(target.start_seconds),
            }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
