"""Trace files: the rules of the format, and an arrow from each message to the step that uses it."""

import json
from collections import Counter
from itertools import pairwise

from tests.planner.by_hand import stage_times
from yuan_train.planner.evaluate.simulator import simulate_schedule
from yuan_train.schedule.schedules import ProgramShape
from yuan_train.schedule.step import Step, one_worker_each
from yuan_train.schedule.trace import (
    Span,
    TimedStep,
    TraceTrack,
    nested_rows,
    trace_events,
    trace_text,
    track_threads,
    whole_arrows,
)


def tracks():
    times = stage_times((1.0, 2.0), (2.0, 4.0), (0.5,))
    simulation = simulate_schedule(ProgramShape("1f1b", one_worker_each(2), 3), times)
    return [
        TraceTrack(process=f"card {s}", pipeline=0, stage=s, steps=steps, label=f"layers {s}")
        for s, steps in enumerate(simulation.timed_steps)
    ]


def events_of(tracks):
    return whole_arrows(trace_events(track_threads(tracks)))


def test_a_trace_file_has_the_events_that_perfetto_reads():
    document = json.loads(trace_text(events_of(tracks()), about={"rank": 1}))
    assert document["otherData"] == {"rank": 1}
    assert {event["ph"] for event in document["traceEvents"]} == {"M", "X", "s", "f"}
    names = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert names == {"card 0", "card 1"}


def test_every_step_appears_once_and_none_overlap_on_a_thread():
    boxes = [event for event in events_of(tracks()) if event["ph"] == "X"]
    # 2 stages * 3 micro-batches * (forward, backward), and 3 messages each way.
    wanted = {"forward": 6, "backward": 6, "send_activation": 3, "send_gradient": 3}
    assert Counter(box["cat"] for box in boxes) == wanted
    for thread in {(box["pid"], box["tid"]) for box in boxes}:
        own = sorted((b["ts"], b["ts"] + b["dur"]) for b in boxes if (b["pid"], b["tid"]) == thread)
        assert all(a[1] <= b[0] for a, b in pairwise(own))


def test_arrows_lead_to_the_step_that_uses_the_message():
    events = events_of(tracks())
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 6
    assert all(starts[key]["ts"] < ends[key]["ts"] for key in starts)
    assert all(starts[key]["pid"] != ends[key]["pid"] for key in starts)


def test_times_are_microseconds():
    track = TraceTrack(process="p", pipeline=1, stage=0, steps=[TimedStep(Step("forward", 0, 0), 0.25, 0.5)])
    (box,) = [event for event in events_of([track]) if event["ph"] == "X"]
    assert (box["ts"], box["dur"]) == (250_000, 250_000)
    assert box["args"] == {"pipeline": 1, "stage": 0, "micro_batch": 0}


def test_a_message_without_a_receiver_has_no_arrow():
    track = TraceTrack(
        process="p", pipeline=0, stage=0, steps=[TimedStep(Step("send_activation", 0, 0), 0, 1)]
    )
    assert not [event for event in events_of([track]) if event["ph"] in "sf"]


def test_spans_that_overlap_go_to_rows_of_their_own():
    def span(start, end):
        return Span(name="", category="", start_seconds=start, end_seconds=end)

    nested, disjoint, crossing = span(1, 2), span(4, 5), span(3, 6)
    whole = span(0, 4)
    rows = nested_rows([crossing, disjoint, nested, whole])
    assert rows == [[whole, nested, disjoint], [crossing]]
