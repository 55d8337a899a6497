"""Plans and their reasons over time: a lane for each node, in which a colour is a plan; and the same in rows.

It stands alone as a drawing of its own, like `trace_picture`.
"""

from __future__ import annotations

import time
from html import escape
from pathlib import Path

from yuan_train.config.units import show_duration, show_seconds
from yuan_train.report.cards import entry_spans
from yuan_train.report.html import key, svg
from yuan_train.report.journal import Entry
from yuan_train.report.run_log import RunLog

WIDTH, LEFT, LANE, MOST_LANES, MOST_NUMBERS = 720, 90, 24, 24, 40
COLOURS = 6
"""Of plans, after which they begin again."""
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
    scale = (WIDTH - LEFT) / ((last - first) or 1.0)
    plans = list(dict.fromkeys(plan_name(entry) for entry in run.journal if entry.plan))
    lanes = {node: 18 + LANE * i for i, node in enumerate(nodes[:MOST_LANES])}
    parts = [f'<text x="0" y="{y + 14}">{escape(node[:14])}</text>' for node, y in lanes.items()]
    current = ""
    for entry, start, end in spans:
        current = plan_name(entry) if entry.plan else "" if entry.event in BETWEEN else current
        x, width = LEFT + (start - first) * scale, max((end - start) * scale, 0.5)
        for node, y in lanes.items():
            fill = _fill(entry, node, current, plans)
            if fill:
                title = f"{node}: {current or entry.event}, {show_duration(end - start)}"
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 6}" fill="{fill}">'
                    f"<title>{escape(title)}</title></rect>"
                )
    height = 18 + LANE * len(lanes)
    parts += _marks(run, first, scale, height)
    parts.append(
        f'<text x="{WIDTH}" y="{height + 12}" text-anchor="end">{show_duration(last - first)}</text>'
    )
    keys = "".join(key(_colour(plans, plan), plan) for plan in plans[-COLOURS:])
    keys += key("url(#hatch)", "here, and waits")
    more = f"<p>and {len(nodes) - MOST_LANES} more nodes</p>" if len(nodes) > MOST_LANES else ""
    return f"<p>{keys}</p>{svg(WIDTH, height + 18, 'plans over time, by node', parts)}{more}"


def _fill(entry: Entry, node: str, plan: str, plans: list[str]) -> str:
    """The colour of a node's lane after an entry; none while the node is not here."""
    if node in entry.nodes and plan:
        return _colour(plans, plan)
    return "url(#hatch)" if node in (*entry.nodes, *entry.waiting) else ""


def _colour(plans: list[str], plan: str) -> str:
    return f"var(--c{plans.index(plan) % COLOURS})"


def _marks(run: RunLog, first: float, scale: float, height: int) -> list[str]:
    """A line for each entry, with its number while there are few."""
    found: list[str] = []
    right = -100.0
    for i, entry in enumerate(run.journal, start=1):
        x = min(max(LEFT + (entry.time - first) * scale, LEFT), WIDTH)
        found.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height}" stroke="var(--ink)" stroke-width=".7"/>'
        )
        if len(run.journal) <= MOST_NUMBERS and x > right + 10:
            found.append(f'<text x="{x:.1f}" y="10" text-anchor="middle">{i}</text>')
            right = x
    return found
