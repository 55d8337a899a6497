"""Plans and their reasons over time: a lane for each node, in which a colour is a plan; and the same in rows.

It stands alone as a drawing of its own, like `trace_picture`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape
from pathlib import Path

from yuan_train.config.units import show_duration, show_seconds
from yuan_train.report.cards import entry_spans
from yuan_train.report.html import colour, key, svg
from yuan_train.report.journal import Entry
from yuan_train.report.run_log import RunLog

WIDTH, LEFT, RIGHT, LANE = 720, 90, 708, 24
MOST_LANES, MOST_NUMBERS = 24, 40
COLOURS = 6
"""Of plans, after which they begin again: so many are in the legend."""
BETWEEN = ("fault", "waits")
"""Entries after which no plan runs."""


def plan_name(entry: Entry) -> str:
    """`plan-2`, of an entry that has a plan."""
    return Path(entry.plan or "").stem


def decision_rows(run: RunLog) -> list[tuple[str, ...]]:
    """What was decided about a supervised run, a row each."""
    first = run.journal[0].time if run.journal else 0.0
    return [
        (
            str(i),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time)),
            f"+{show_duration(max(0.0, entry.time - first))}",
            f"step {entry.step}",
            entry.event,
            plan_name(entry) if entry.plan else "",
            entry.reason,
            _forecast(entry),
        )
        for i, entry in enumerate(run.journal, start=1)
    ]


DECISION_HEAD = ("", "time", "after", "step", "what", "plan", "why", "forecast")


def _forecast(entry: Entry) -> str:
    if entry.forecast_after is None:
        return ""
    after = f"{show_seconds(entry.forecast_after)} a step"
    return after if entry.forecast_before is None else f"{show_seconds(entry.forecast_before)} -> {after}"


def timeline(run: RunLog) -> str:
    """The picture of a supervised run's journal, with its numbers of rows; nothing without one."""
    spans = entry_spans(run)
    if not spans:
        return ""
    nodes = list(dict.fromkeys(node for entry in run.journal for node in (*entry.nodes, *entry.waiting)))
    if run.cluster is not None:
        nodes = [node for node in run.cluster.groups if node in nodes] or nodes
    first, last = run.journal[0].time, max(end for *_, end in spans)
    scale = (RIGHT - LEFT) / ((last - first) or 1.0)
    plans = list(dict.fromkeys(plan_name(entry) for entry in run.journal if entry.plan))
    lanes = {node: 18 + LANE * i for i, node in enumerate(nodes[:MOST_LANES])}
    parts = [f'<text x="0" y="{y + 14}">{escape(node[:14])}</text>' for node, y in lanes.items()]
    for node, start, end, plan in _stretches(run, lanes):
        x, width = LEFT + (start - first) * scale, max((end - start) * scale, 0.5)
        fill = f"var(--c{colour(plans.index(plan))})" if plan else "url(#hatch)"
        title = f"{node}: {plan or 'waits'}, {show_duration(end - start)}"
        parts.append(
            f'<rect x="{x:.1f}" y="{lanes[node]}" width="{width:.1f}" height="{LANE - 6}" fill="{fill}">'
            f"<title>{escape(title)}</title></rect>"
        )
    height = 18 + LANE * len(lanes)
    parts += _marks(run, first, scale, height)
    parts.append(
        f'<text x="{RIGHT}" y="{height + 12}" text-anchor="end">{show_duration(last - first)}</text>'
    )
    named = list(enumerate(plans))[-COLOURS:]
    keys = "".join(key(f"var(--c{colour(i)})", plan) for i, plan in named)
    keys += key("url(#hatch)", "here, and waits")
    more = f"<p>and {len(nodes) - MOST_LANES} more nodes</p>" if len(nodes) > MOST_LANES else ""
    return f"<p>{keys}</p>{svg(WIDTH, height + 18, 'plans over time, by node', parts)}{more}"


def _stretches(run: RunLog, nodes: Iterable[str]) -> list[tuple[str, float, float, str]]:
    """How long each node ran a plan without a break, or was here and waited, which is the plan of no name."""
    found: list[tuple[str, float, float, str]] = []
    newest: dict[str, int] = {}
    current = ""
    for entry, start, end in entry_spans(run):
        current = plan_name(entry) if entry.plan else "" if entry.event in BETWEEN else current
        for node in nodes:
            plan = current if node in entry.nodes else ""
            before = found[newest[node]] if node in newest else None
            if node not in (*entry.nodes, *entry.waiting):
                newest.pop(node, None)
            elif before is not None and before[3] == plan:
                found[newest[node]] = (node, before[1], end, plan)
            else:
                newest[node] = len(found)
                found.append((node, start, end, plan))
    return found


def _marks(run: RunLog, first: float, scale: float, height: int) -> list[str]:
    """A line for each entry, with its number; where there are many, for those with a plan alone."""
    found: list[str] = []
    right, are_few = -100.0, len(run.journal) <= MOST_NUMBERS
    for i, entry in enumerate(run.journal, start=1):
        if not are_few and entry.plan is None:
            continue
        x = min(max(LEFT + (entry.time - first) * scale, LEFT), RIGHT)
        found.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height}" stroke="var(--ink)" stroke-width=".7"/>'
        )
        if x > right + 8 * len(str(i)):
            found.append(f'<text x="{x:.1f}" y="10" text-anchor="middle">{i}</text>')
            right = x
    return found
