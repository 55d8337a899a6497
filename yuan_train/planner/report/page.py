"""The search result as one HTML page.

The page is one file without network access or scripts: inline SVG, light and dark, a pattern as well as
colours, and the plan's own text, so that plan.yaml can be recovered from the page. It stands alone because it
draws, and the terminal's report writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from yuan_train.config.cluster import Sends
from yuan_train.config.load import dump
from yuan_train.config.units import show_bytes, show_seconds
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.evaluate.plan_cost import PlanCost
from yuan_train.planner.evaluate.simulator import Simulation
from yuan_train.planner.report import terminal
from yuan_train.planner.search.candidate import Candidate
from yuan_train.planner.search.search_result import SearchResult
from yuan_train.report.html import bullets, key, svg, table, whole_page, whole_picture

SENDS: dict[Sends, str] = {
    "overlapped": "sends overlap compute",
    "blocking": "the sender waits for its messages",
}
"""How messages are sent, in words."""

MAX_DRAWN_PIPELINES = 8

_MEMORY_KEYS = {f"var(--c{i})": name for i, name in enumerate(terminal.CATEGORIES)}
_TIMELINE_KEYS = {
    "var(--f)": "forward",
    "var(--b)": "backward",
    "var(--soft)": "warm-up, drain, gradient reduction, optimizer step and weight sync",
    "url(#hatch)": "waiting for a neighbour or a message",
}
"""Fills, and what they mean."""


def plan_html(
    result: SearchResult,
    problem: PlanProblem,
    *,
    reasons: Mapping[str, Sequence[str]] | None = None,
    answer: Sequence[str] = (),
) -> str:
    """The report page; `reasons` are further sections, each a list of lines, and `answer` comes first."""
    best = result.best
    title = f"Plan for {problem.model.name} on {problem.cluster.name}"
    sections = [
        ("Summary", _summary_html(result, problem, answer)),
        ("Cluster", svg(*_cluster_drawing(result, problem))),
        ("Stages", _stages_html(best)),
        ("Memory on each card", _keys(_MEMORY_KEYS) + svg(*_memory_drawing(best.cost))),
        ("Timeline of one step", _keys(_TIMELINE_KEYS) + svg(*_timeline_drawing(best.cost))),
        *((name, bullets(lines)) for name, lines in (reasons or {}).items()),
        ("How good the plan is", bullets([*terminal.best_reasons(result), terminal.cut_words(best)])),
        ("Runners-up and what was left out", _runners_up_html(result)),
        ("Assumptions", _assumptions_html(result, problem)),
        ("plan.yaml", f'<pre id="plan">{escape(dump(best.plan))}</pre>'),
    ]
    return whole_page(title, sections)


def plan_picture(result: SearchResult, problem: PlanProblem) -> str:
    """The cards and their stages, and the timeline of one step, as one SVG file."""
    best = result.best
    title = (
        f"Plan for {problem.model.name} on {problem.cluster.name}: {show_seconds(best.step_seconds)} a step"
    )
    names = ("cards and their stages", "one step: blue forward, yellow backward, hatched waiting")
    drawn = (_cluster_drawing(result, problem), _timeline_drawing(best.cost))
    return whole_picture(
        title,
        [(name, width, height, parts) for name, (width, height, _, parts) in zip(names, drawn, strict=True)],
    )


def _summary_html(result: SearchResult, problem: PlanProblem, answer: Sequence[str]) -> str:
    lines = [
        *answer,
        terminal.describe_shape(result.best) + terminal.even_words(result).replace("     ", "; "),
    ]
    lines += [terminal.step_words(result, problem), *terminal.memory_lines(result.best.cost, problem)]
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


Drawing = tuple[int, int, str, list[str]]
"""Width, height, what it shows, and its shapes."""


def _cluster_drawing(result: SearchResult, problem: PlanProblem) -> Drawing:
    """Nodes as rows of cards; each card with the stage that it runs, idle ones dashed."""
    cluster = problem.cluster
    working = {card.name: stage for stage in result.best.cost.stages for card in stage.cards}
    rows: list[str] = []
    y = 0
    for node, group in cluster.groups.items():
        cards = [card for card in cluster.cards if card.node == node]
        cards_of_types = " + ".join(f"{n} x {name}" for name, n in Counter(group.types).items())
        words = f"{node}: {cards_of_types}"
        for where, link in (("inside", group.link), ("network", group.network)):
            if link is not None:
                words += f", {where} {link.bandwidth / 1e9:.3g} GB/s {show_seconds(link.latency)}"
        rows.append(f'<text x="0" y="{y + 12}">{escape(words)}</text>')
        for i, card in enumerate(cards):
            x, top = 130 * (i % 8), y + 18 + 42 * (i // 8)
            stage = working.get(card.name)
            label = (
                f"p{stage.pipeline} s{stage.stage}: {terminal.layer_words(stage)}" if stage else "left out"
            )
            label += f", {terminal.expert_words(stage)}" if stage and terminal.expert_words(stage) else ""
            short = label if len(label) <= 19 else label[:18] + "…"
            kind = "card" if stage else "card idle"
            rows.append(
                f'<rect class="{kind}" x="{x}" y="{top}" width="124" height="36" rx="4"/>'
                f'<text x="{x + 6}" y="{top + 15}">{escape(card.name)}</text>'
                f'<text x="{x + 6}" y="{top + 29}">{escape(short)}<title>{escape(label)}</title></text>'
            )
        y += 30 + 42 * (-(-len(cards) // 8))
    for link in cluster.links:
        words = f"{link.from_} {'<->' if link.both_ways else '->'} {link.to}: {link.bandwidth / 1e9:.3g} GB/s"
        rows.append(f'<text x="0" y="{y + 12}">{escape(words)}</text>')
        y += 16
    return 1040, y, "cards and their stages", rows


def _stages_html(best: Candidate) -> str:
    times = ("forward", "backward", "peak", "of the card's", "limited by", "source")
    rows = [
        (
            str(stage.pipeline),
            str(stage.stage),
            f"{stage.card.name} ({terminal.group_types(stage)})",
            " ".join(filter(None, (terminal.layer_words(stage), terminal.expert_words(stage)))),
            show_seconds(stage.forward_seconds),
            show_seconds(stage.backward_seconds),
            show_bytes(stage.memory.total),
            show_bytes(stage.card_bytes),
            terminal.limited_by([stage], best.cost),
            stage.source,
        )
        for stage in best.cost.stages
    ]
    return table(("pipeline", "stage", "card", "layers", *times), rows)


def _memory_drawing(cost: PlanCost) -> Drawing:
    """A bar per stage's card, stacked by category, against the card's limit; beyond it the host's part."""
    scale = 760 / max(max(s.capacity_bytes, s.memory.total) + s.host_bytes for s in cost.stages)
    shapes: list[str] = []
    for row, stage in enumerate(cost.stages):
        y, x = 22 * row, 200.0
        shapes.append(
            f'<text x="0" y="{y + 13}">{escape(stage.card.name)} ({escape(stage.card.type)})</text>'
        )
        for i, category in enumerate(terminal.CATEGORIES):
            size = getattr(stage.memory, category)
            width = size * scale
            shapes.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="16" fill="var(--c{i})">'
                f"<title>{category}: {show_bytes(size)}</title></rect>"
            )
            x += width
        limit = 200 + stage.capacity_bytes * scale
        if stage.host_bytes:
            first, width = max(x, limit) + 2, stage.host_bytes * scale
            x = first + width
            shapes.append(
                f'<rect class="host" x="{first:.2f}" y="{y + 4}" width="{width:.2f}" height="8">'
                f"<title>on the host: {show_bytes(stage.host_bytes)}</title></rect>"
            )
        shapes.append(f'<line class="limit" x1="{limit:.2f}" x2="{limit:.2f}" y1="{y - 1}" y2="{y + 17}"/>')
        shapes.append(
            f'<text x="{max(x, limit) + 6:.2f}" y="{y + 13}">{stage.memory.total / terminal.GIB:.1f} / '
            f"{stage.card_bytes / terminal.GIB:.1f} GiB"
            + (f", {stage.host_bytes / terminal.GIB:.1f} GiB on the host" if stage.host_bytes else "")
            + "</text>"
        )
    return 1080, 22 * len(cost.stages), "memory", shapes


def _timeline_drawing(cost: PlanCost) -> Drawing:
    """A row per worker, to scale: forward, backward, and the time between in grey, by reason."""
    step, width = cost.step_seconds, 880.0
    scale = width / step
    shapes: list[str] = []
    y = 0
    for p, simulation in enumerate(cost.simulations):
        if p >= MAX_DRAWN_PIPELINES:
            shapes.append(f'<text x="0" y="{y + 13}">and {len(cost.simulations) - p} more pipelines</text>')
            y += 22
            break
        stage_costs = {s: stage for s, stage in enumerate(q for q in cost.stages if q.pipeline == p)}
        for worker, shape in enumerate(_timeline_rows(simulation, step, scale)):
            worker_stages = [s for s, row in enumerate(cost.workers[p]) if worker in row]
            first = stage_costs[worker_stages[0]]
            card = first.replicas[cost.workers[p][worker_stages[0]].index(worker)][0]
            label = f"p{p} s{','.join(map(str, worker_stages))} {card.name}"
            shapes.append(
                f'<text x="0" y="{y + 13}">{escape(label)}</text>'
                f'<g transform="translate(150 {y})">{shape}</g>'
            )
            y += 22
        y += 6
    axis = "".join(
        f'<line class="grid" x1="{150 + width * i / 8:.1f}" x2="{150 + width * i / 8:.1f}" y1="0" y2="{y}"/>'
        f'<text x="{150 + width * i / 8:.0f}" y="{y + 12}" text-anchor="middle">'
        f"{show_seconds(step * i / 8)}</text>"
        for i in range(9)
    )
    return 1060, y + 20, "one step", [*shapes, axis]


def _timeline_rows(simulation: Simulation, step_seconds: float, scale: float) -> list[str]:
    """The SVG shapes of each worker's row: a background bar, then a path of waits, forwards, backwards."""
    boxes: list[dict[str, list[str]]] = [{"wait": [], "f": [], "b": []} for _ in simulation.busy_seconds]
    ends: dict[int, float] = {}
    for operation, (start, end) in zip(simulation.operations, simulation.spans, strict=True):
        if operation.peer >= 0:
            continue
        worker = operation.worker
        spans = {"wait": (ends.get(worker, start), start), operation.kind[0]: (start, end)}
        for name, (a, b) in spans.items():
            if name != "wait" or b > a:
                box = f"M{a * scale:.2f} 0h{(b - a) * scale:.2f}v16h{(a - b) * scale:.2f}z"
                boxes[worker][name].append(box)
        ends[worker] = end
    rest = f'<rect class="rest" width="{step_seconds * scale:.2f}" height="16"/>'
    return [
        rest + "".join(f'<path class="{name}" d="{"".join(own)}"/>' for name, own in row.items())
        for row in boxes
    ]


def _runners_up_html(result: SearchResult) -> str:
    items = [
        *terminal.runner_lines(result),
        *(f"left out: {line}" for line in terminal.left_out_lines(result.left_out)),
    ]
    even = result.even_split
    if even is not None:
        items.append(
            f"even split over the cluster's order, layers {terminal.layer_list(even)}: "
            f"{show_seconds(even.step_seconds)}" + ("" if even.cost.fits else ", does not fit the memory")
        )
    return bullets(items)


def _keys(meanings: Mapping[str, str]) -> str:
    limit = "<span class=key>| limit</span>" if meanings is _MEMORY_KEYS else ""
    return f"<p>{''.join(key(fill, name) for fill, name in meanings.items())}{limit}</p>"


def _assumptions_html(result: SearchResult, problem: PlanProblem) -> str:
    items = [
        *result.notes,
        f"precision {problem.precision}, sequence length {problem.sequence_length}, global batch "
        f"{problem.global_batch_size} sequences",
        SENDS[problem.send_mode],
        "messages: latency + bytes / bandwidth, first in first out on each link; equal pipelines share a "
        "node's NIC, and so do all rings of the gradient reductions that are under way at the same time",
    ]
    return bullets(items)
