"""Chrome trace events, for ui.perfetto.dev: one writer for forecast and measurement.

A process of the trace is a card, a node or a rank; its threads hold spans of time. An arrow leads from a
message to what uses it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yuan_train.schedule.step import Step

Event = dict[str, Any]
"""An event of the Chrome trace format; its times are in microseconds."""


TIDS_PER_RANK = 1000
"""In the trace of a run, numbers of threads that belong to a rank: first what it measures, from 0 on."""
FORECAST_TID = 400
PROFILER_TID = 500
"""The first of torch.profiler's threads."""


def trace_path(directory: str | Path, rank: int) -> Path:
    """The trace file of a rank in a log directory."""
    return Path(directory) / "trace" / f"rank-{rank}.json"


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step, and when it ran, in seconds from the start. For a send: when its message was transmitted."""

    step: Step
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named time, from `start_seconds` to `end_seconds`."""

    name: str
    category: str
    start_seconds: float
    end_seconds: float
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_instant: bool = False
    """Shown as a mark at `start_seconds`."""
    arrow_from: str = ""
    """The name of the arrow that begins here, if one does."""
    arrow_to: str = ""
    """The name of the arrow that ends here."""


@dataclass(frozen=True, kw_only=True)
class TraceThread:
    """Spans that are shown in one row of a process; of two that overlap, one must contain the other."""

    pid: int
    tid: int
    """Unique over all processes."""
    process: str
    name: str
    spans: Sequence[Span]


@dataclass(frozen=True, kw_only=True)
class TraceTrack:
    """The timed steps of one stage, on the card or node that is shown as `process`."""

    process: str
    pipeline: int
    stage: int
    steps: Sequence[TimedStep]
    label: str = ""
    """Text shown after the stage's name, such as its layers."""


def track_threads(tracks: Iterable[TraceTrack]) -> list[TraceThread]:
    """Two threads for each track: its compute, and next to it, because they overlap, its messages.

    Receives have no span: a message is drawn at its send, and its arrow ends at the step that uses it.
    """
    tracks = list(tracks)
    pids = {name: i for i, name in enumerate(dict.fromkeys(track.process for track in tracks))}
    threads: list[TraceThread] = []
    for number, track in enumerate(tracks):
        name = f"pipeline {track.pipeline} stage {track.stage}"
        label = f"{name}: {track.label}" if track.label else name
        for i, (text, is_compute) in enumerate(((label, True), (f"{name} sends", False))):
            threads.append(
                TraceThread(
                    pid=pids[track.process],
                    tid=2 * number + i,
                    process=track.process,
                    name=text,
                    spans=[
                        step_span(timed, pipeline=track.pipeline)
                        for timed in track.steps
                        if not timed.step.kind.startswith("receive") and timed.step.is_compute == is_compute
                    ],
                )
            )
    return threads


def step_span(timed: TimedStep, *, pipeline: int, arrows: str | None = "") -> Span:
    """The span of a compute step or a send.

    Names of arrows begin with `arrows`, which tells the training steps apart; None: without arrows.
    """
    step = timed.step
    arrow = "" if arrows is None else f"{arrows}{_message(step, pipeline)}"
    return Span(
        name=f"{step.kind.replace('_', ' ')} {step.micro_batch}",
        category=step.kind,
        start_seconds=timed.start_seconds,
        end_seconds=timed.end_seconds,
        arguments={"pipeline": pipeline, "stage": step.stage, "micro_batch": step.micro_batch},
        arrow_from=arrow if step.kind.startswith("send") else "",
        arrow_to=arrow if step.kind in ("forward", "backward", "backward_input") else "",
    )


def _message(step: Step, pipeline: int) -> str:
    """The name of the message that a send sends, or that a compute step uses, if it was sent one."""
    is_activation = step.kind in ("forward", "send_activation")
    offset = 0 if step.kind.startswith("send") else -1 if is_activation else 1
    what = "activation" if is_activation else "gradient"
    return f"{what}.{pipeline}.{step.stage + offset}.{step.micro_batch}"


def nested_rows(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans in as few rows as a greedy choice finds, so that in each row they nest or do not overlap."""
    rows: list[list[Span]] = []
    open_spans: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_seconds, -span.end_seconds)):
        for row, stack in zip(rows, open_spans, strict=True):
            while stack and stack[-1].end_seconds <= span.start_seconds:
                stack.pop()
            if not stack or stack[-1].end_seconds >= span.end_seconds:
                row.append(span)
                stack.append(span)
                break
        else:
            rows.append([span])
            open_spans.append([span])
    return rows


def trace_events(threads: Iterable[TraceThread]) -> list[Event]:
    """The threads as trace events; arrows that lack an end are included."""
    threads = list(threads)
    events: list[Event] = []
    for pid, name in {thread.pid: thread.process for thread in threads}.items():
        events += [_metadata("process_name", pid, {"name": name})]
        events += [_metadata("process_sort_index", pid, {"sort_index": pid})]
    for thread in threads:
        where = {"pid": thread.pid, "tid": thread.tid}
        events.append(_metadata("thread_name", thread.pid, {"name": thread.name}) | where)
        events.append(_metadata("thread_sort_index", thread.pid, {"sort_index": thread.tid}) | where)
        for span in thread.spans:
            events += (event | where for event in _span_events(span))
    return events


def whole_arrows(events: Iterable[Event]) -> list[Event]:
    """The events without arrows that lack a begin or an end, such as one to a rank whose trace is missing."""
    events = list(events)
    ends = Counter(event["id"] for event in events if event["ph"] in "sf")
    return [event for event in events if event["ph"] not in "sf" or ends[event["id"]] == 2]


def trace_text(events: Sequence[Event], *, about: Mapping[str, Any] | None = None) -> str:
    """A trace file. `about` is stored with the events, for programs; viewers show it as its metadata."""
    document = {"displayTimeUnit": "ms", "traceEvents": events, "otherData": dict(about or {})}
    return json.dumps(document, separators=(",", ":"))


def _metadata(name: str, pid: int, arguments: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "args": dict(arguments)}


def _span_events(span: Span) -> Iterator[Event]:
    start = _microseconds(span.start_seconds)
    common: Event = {"name": span.name, "cat": span.category, "ts": start}
    if span.is_instant:
        yield common | {"ph": "i", "s": "t", "args": dict(span.arguments)}
        return
    # Rounded at both ends, so that spans that meet do not overlap.
    end = _microseconds(span.end_seconds)
    yield common | {"ph": "X", "dur": round(end - start, 3), "args": dict(span.arguments)}
    arrow: Event = {"cat": "message", "name": "message", "ts": start}
    if span.arrow_from:
        yield arrow | {"ph": "s", "id": span.arrow_from}
    if span.arrow_to:
        yield arrow | {"ph": "f", "bp": "e", "id": span.arrow_to}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
