"""Merges the trace files that the ranks of a run have written into one for ui.perfetto.dev: what each rank
measured, and the forecast of their plan for the same training steps, on one time axis. Have a run write them
with train.trace='{first_step: 10, steps: 2}'; docs/tracing.md says how to read the result.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from yuan_train.cli.main import file_to_write
from yuan_train.config.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from yuan_train.config.plan import Plan
    from yuan_train.schedule.trace import Event, Span, TimedStep, TraceThread


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("directory", metavar="RUN", help="log directory of the run (log.directory)")
    add("--out", type=file_to_write, metavar="F.json", required=True, help="trace file to write")
    add("--draw", type=file_to_write, metavar="F.svg", help="also draw one training step as a picture")
    add("--step", type=int, metavar="N", help="the step to draw; the last traced one if not given")


def run(arguments: argparse.Namespace) -> int:
    """Merge, print a line per rank, write. Raises ConfigError or PlanError."""
    from yuan_train.config.load import write_text
    from yuan_train.schedule.trace import trace_events, trace_text, whole_arrows

    if arguments.step is not None and not arguments.draw:
        raise ConfigError("--step is the step to draw: name the picture too, --draw F.svg")
    plan, traces = read_traces(Path(arguments.directory))
    events = [event for trace in traces for event in trace.events]
    if plan.forecast is None or not plan.forecast.stages:
        print("the plan has no forecast of its stages: the trace has none either", file=sys.stderr)
    else:
        events += trace_events(forecast_threads(plan, [trace.steps for trace in traces]))
    write_text(arguments.out, trace_text(whole_arrows(events)))
    if arguments.draw:
        _draw(arguments.draw, events, traces[0].steps, arguments.step)
    for line in _summary(plan, traces):
        print(line)
    error = max(trace.clock_error_seconds for trace in traces)
    print(
        f"written: {arguments.out} (open it at ui.perfetto.dev); the ranks' clocks agree within "
        f"{error * 1e6:.0f} us",
        file=sys.stderr,
    )
    return 0


def _draw(path: str, events: Sequence[Event], steps: Mapping[int, object], step: int | None) -> None:
    """Write the picture of a step. Raises ConfigError if it was not traced."""
    from yuan_train.config.load import write_text

    step = max(steps) if step is None else step
    if step not in steps:
        raise ConfigError(f"--step {step}: not traced (has: {', '.join(map(str, sorted(steps)))})")
    write_text(path, draw_step(events, step=step))


@dataclass(frozen=True)
class RankTrace:
    """The trace file of a rank."""

    events: list[Event]
    token: int
    """The same in all files of one run."""
    world_size: int
    clock_error_seconds: float
    plan: str | None
    """Digest of the plan that ran; None in files of earlier releases."""

    @property
    def steps(self) -> dict[int, tuple[float, float]]:
        """Begin and end of each traced training step, in seconds."""
        return {
            event["args"]["step"]: (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            for event in self.events
            if event["ph"] == "X" and event["cat"] == "training_step"
        }

    def seconds_in(self, *categories: str) -> float:
        """Seconds in all spans of some categories, per training step."""
        spans = [event for event in self.events if event["ph"] == "X" and event["cat"] in categories]
        return sum(event["dur"] for event in spans) / 1e6 / len(self.steps)


def read_traces(directory: Path) -> tuple[Plan, list[RankTrace]]:
    """The plan of a run, and the trace of each of its ranks. Raises ConfigError or PlanError."""
    from yuan_train.schedule.trace import trace_path

    plan, plan_file = _plan_of(directory)
    paths = [trace_path(directory, rank) for rank in range(plan.world_size)]
    missing = [rank for rank, path in enumerate(paths) if not path.is_file()]
    if len(missing) == len(paths):
        raise ConfigError(
            f"{paths[0].parent}: the run has written no trace files; set "
            "train.trace='{first_step: 10, steps: 2}' and train past these steps"
        )
    if missing:
        raise ConfigError(
            f"{paths[0].parent}: no trace file of ranks {', '.join(map(str, missing))} (of {len(paths)}); "
            "each rank writes its own, on its node: copy rank-N.json from there"
        )
    traces = [_read_trace(path) for path in paths]
    for path, trace in zip(paths, traces, strict=True):
        if trace.world_size != plan.world_size:
            raise ConfigError(
                f"{path}: of a run of {trace.world_size} ranks, but {plan_file.name} has {plan.world_size}; "
                "the files belong to different runs: delete them, and trace again"
            )
        if trace.token != traces[0].token or trace.steps.keys() != traces[0].steps.keys():
            raise ConfigError(
                f"{path}: written by another run than {paths[0].name}, so their clocks are not comparable; "
                "copy all files of one run, or trace again"
            )
    return plan, traces


def _plan_of(directory: Path) -> tuple[Plan, Path]:
    """The plan that was traced, of those that a run has had, and its file. Raises ConfigError, PlanError."""
    from yuan_train.config.plan_constraints import load_plan, plan_digest, plans_in
    from yuan_train.schedule.trace import trace_path

    files = plans_in(directory)
    if not files:
        raise ConfigError(
            f"{directory}: wanted the log directory of a run (log.directory), which holds plan.yaml; "
            f"{'it has none' if directory.is_dir() else 'there is no such directory'}"
        )
    # Rank 0 is of every run; others may have been left by a run of more ranks.
    first = trace_path(directory, 0)
    traced = _read_trace(first).plan if first.is_file() else None
    if traced is None:
        return load_plan(files[0]), files[0]
    for file in files:
        with contextlib.suppress(PlanError):
            plan = load_plan(file)
            if plan_digest(plan) == traced:
                return plan, file
    names = ", ".join(file.name for file in files)
    raise ConfigError(
        f"{first}: written under a plan that is not here (here: {names}); copy the plan of that run's log "
        "directory, or trace again"
    )


def _read_trace(path: Path) -> RankTrace:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        about = document["otherData"]
        trace = RankTrace(
            document["traceEvents"],
            about["token"],
            about["world_size"],
            about["clock_error_seconds"],
            about.get("plan"),
        )
        if not trace.steps:
            raise ValueError("it has no training step")
        return trace
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: wanted a trace file that a rank has written, but it cannot be read as one "
            f"({type(error).__name__}: {error}); trace again"
        ) from None


def forecast_threads(
    plan: Plan, steps_of_ranks: Sequence[Mapping[int, tuple[float, float]]]
) -> list[TraceThread]:
    """The forecast of the traced training steps, of each rank; a second thread where two steps overlap.

    Each starts when the first rank has started it. Times are those of `yuan-train simulate`: compute of the
    plan's forecast, free messages; the forecast's whole step, with reductions and optimizer, is around them.
    """
    from yuan_train.cli.simulate import simulate_forecast
    from yuan_train.parallel.grid import Grid
    from yuan_train.schedule.trace import FORECAST_TID, TIDS_PER_RANK, TraceThread

    simulations = simulate_forecast(plan)
    grid = Grid(plan)
    starts = {step: min(steps[step][0] for steps in steps_of_ranks) for step in steps_of_ranks[0]}
    threads: list[TraceThread] = []
    for coord in grid.coords:
        rows: list[list[Span]] = []
        for step, start in starts.items():
            timed_steps = simulations[coord.pipeline].timed_steps[coord.worker]
            spans = list(_forecast_spans(plan, timed_steps, coord.pipeline, step, start))
            row = next((row for row in rows if all(span.end_seconds <= start for span in row)), None)
            if row is None:
                rows.append(spans)
            else:
                row += spans
        threads += (
            TraceThread(
                pid=coord.rank,
                tid=coord.rank * TIDS_PER_RANK + FORECAST_TID + number,
                process=grid.label(coord),
                name="forecast" if number == 0 else f"forecast {number + 1}",
                spans=row,
            )
            for number, row in enumerate(rows)
        )
    return threads


def _forecast_spans(
    plan: Plan, timed_steps: Sequence[TimedStep], pipeline: int, training_step: int, start: float
) -> Iterator[Span]:
    from yuan_train.schedule.trace import Span, TimedStep, step_span

    assert plan.forecast is not None
    compute = [timed for timed in timed_steps if timed.step.is_compute]
    end = max([plan.forecast.step_seconds, *(timed.end_seconds for timed in compute)])
    yield Span(
        name=f"step {training_step}",
        category="forecast",
        start_seconds=start,
        end_seconds=start + end,
        arguments={"step": training_step},
    )
    for timed in compute:
        moved = TimedStep(timed.step, start + timed.start_seconds, start + timed.end_seconds)
        yield step_span(moved, pipeline=pipeline, arrows=None)


def _summary(plan: Plan, traces: Sequence[RankTrace]) -> Iterator[str]:
    """For each rank, where its time goes, in a mean traced step."""
    from yuan_train.config.units import show_seconds
    from yuan_train.parallel.grid import Grid

    for coord, trace in zip(Grid(plan).coords, traces, strict=True):
        step = sum(end - start for start, end in trace.steps.values()) / len(trace.steps)
        compute = trace.seconds_in("forward", "backward", "backward_input", "backward_weight")
        parts = {
            "compute": compute,
            "waits for messages": trace.seconds_in("wait"),
            "waits for reductions": trace.seconds_in("finish_grad_reduce"),
            "optimizer and weight sync": trace.seconds_in("optimizer", "weight_sync"),
        }
        if stalls := trace.seconds_in("wait_copy"):
            parts["waits for copies"] = stalls
        shares = ", ".join(f"{name} {seconds / step:.0%}" for name, seconds in parts.items())
        yield f" {coord}: step {show_seconds(step)}: {shares}"


WIDTH, LEFT, RIGHT, ROW, GAP = 1000.0, 80.0, 20.0, 15, 8
COLOURS = {
    "forward": "#4c78a8",
    "backward": "#54a24b",
    "backward_input": "#54a24b",
    "backward_weight": "#b6d7a8",
    "load": "#bab0ac",
    "optimizer": "#b279a2",
    "wait": "#e45756",
    "finish_grad_reduce": "#e45756",
    "collective": "#ff9da6",
    "grad_reduce": "#f2cf5b",
    "weight_sync": "#eeca3b",
}
"""By category; other spans are not drawn. Red is time in which a rank waits."""
ROWS = ("measured", "messages", "reductions", "forecast")


def draw_step(events: Sequence[dict[str, Any]], *, step: int) -> str:
    """The picture of a training step that the trace has, as SVG."""
    outer = [
        event
        for event in events
        if event["ph"] == "X" and event["name"] == f"step {step}" and event["args"].get("step") == step
    ]
    start = min(event["ts"] for event in outer)
    end = max(event["ts"] + event["dur"] for event in outer)
    scale = (WIDTH - LEFT - RIGHT) / (end - start)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {e["tid"]: (e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    shapes: list[str] = []
    top = 4.0
    for pid, name in sorted(names.items()):
        shapes.append(f'<text x="0" y="{top + 11}" class="rank">{html.escape(name)}</text>')
        top += ROW + 1
        for row in ROWS:
            tids = {tid for tid, (owner, text) in threads.items() if (owner, text.split()[0]) == (pid, row)}
            if row == "forecast":
                # Those of two steps may overlap.
                tids &= {event["tid"] for event in outer}
            own = [e for e in events if e["ph"] == "X" and e["tid"] in tids and e["cat"] in COLOURS]
            # Not those of the next step, which may begin before the forecast of this one ends.
            category = "forecast" if row == "forecast" else "training_step"
            whole = [e for e in outer if e["pid"] == pid and e["cat"] == category]
            own = [e for e in own if any(w["ts"] <= e["ts"] < w["ts"] + w["dur"] for w in whole)]
            if not own:
                continue
            shapes.append(f'<text x="8" y="{top + 11}">{row}</text>')
            shapes += _boxes(own, start=start, scale=scale, top=top)
            top += ROW + 2
        top += GAP
    axis = _axis((end - start) / 1e3, scale * 1e3, top)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {top + 22:g}" '
        'font-family="sans-serif" font-size="10">\n'
        "<style>.rank{font-weight:bold} rect{stroke:#fff;stroke-width:.4}</style>\n"
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join([*shapes, *axis]) + "\n</svg>\n"
    )


def _boxes(events: list[dict[str, Any]], *, start: float, scale: float, top: float) -> Iterator[str]:
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        x, width = LEFT + (event["ts"] - start) * scale, event["dur"] * scale
        # Of an inner span the outer one stays visible as a frame.
        inset = 3 if event["cat"] in ("finish_grad_reduce", "collective") else 0
        yield (
            f'<rect x="{x:.1f}" y="{top + inset:g}" width="{max(width, 0.4):.1f}" height="{ROW - 2 * inset}" '
            f'fill="{COLOURS[event["cat"]]}"><title>{html.escape(event["name"])}: {event["dur"] / 1e3:.2f} ms'
            "</title></rect>"
        )
        if event["cat"] in ("forward", "backward", "backward_input") and width > 9:
            text = event["args"]["micro_batch"]
            middle = f'x="{x + width / 2:.1f}" y="{top + 11}" text-anchor="middle"'
            yield f'<text {middle} fill="white">{text}</text>'


def _axis(milliseconds: float, pixels: float, top: float) -> Iterator[str]:
    """Marks at round times, about ten of them."""
    unit = 10.0 ** len(str(int(milliseconds / 10)).lstrip("0"))
    every = next(e for e in (unit / 10, unit / 5, unit / 2, unit) if milliseconds / e <= 12)
    for number in range(int(milliseconds / every) + 1):
        x = LEFT + number * every * pixels
        yield f'<path d="M{x:.1f} 0V{top:g}" stroke="#0002"/>'
        yield f'<text x="{x:.1f}" y="{top + 12:g}" text-anchor="middle">{number * every:g} ms</text>'
