"""One training step of a merged trace as a picture.

A row for each rank's measured steps, what it waits for, its reductions, and the forecast, on one time axis.
It stands alone because it draws what the command has merged.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any

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
