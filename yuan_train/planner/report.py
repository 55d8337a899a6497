"""What the search found, for a reader: a table for the terminal, one object for --json, one HTML page.

The HTML is one file without network or script: inline SVG, light and dark, patterns beside colours, and the
plan's own text, so that the page can be turned back into plan.yaml.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from yuan_train.config.load import as_plain, dump
from yuan_train.config.plan import MemoryForecast
from yuan_train.config.units import show_bytes, show_seconds
from yuan_train.planner.cost import PlanCost, Setting, StageCost
from yuan_train.planner.layout import to_blocks, to_layout
from yuan_train.planner.search import Candidate, LeftOut, SearchResult
from yuan_train.planner.simulator import Simulation

CATEGORIES = tuple(MemoryForecast.__dataclass_fields__)
GIB = 2.0**30
MAX_DRAWN_PIPELINES = 8
MAX_DRAWN_CARDS = 128


# --- words -----------------------------------------------------------------------------------------------


def plan_table(result: SearchResult, setting: Setting) -> str:
    """At most a screen of plain text: stages, step, even split, runners-up, idle cards, sources."""
    best, cost = result.best, result.best.cost
    lines = [f"Plan: {describe_shape(best)}" + _even_words(result)]
    lines += _stage_rows(best)
    lines.append(" " + step_words(result, setting))
    lines.append(f" layers {layer_list(best)}; Megatron layout {megatron_layout(best)}")
    lines += [f" {line}" for line in best_reasons(result)]
    lines += [f" why not: {line}" for line in runner_lines(result)]
    lines += [f" left out: {line}" for line in left_out_lines(result.left_out)]
    lines.append(f" {cost.source}: " + "; ".join(result.notes))
    return "\n".join(lines)


def plan_json(result: SearchResult, *, path: str | None) -> dict[str, Any]:
    """The same as plain values, for --json."""
    best = result.best
    assert best.plan.forecast is not None
    return {
        "plan": path,
        "forecast": as_plain(best.plan.forecast),
        "num_pipelines": len(best.plan.pipelines),
        "schedule": best.plan.schedule,
        "micro_batch_size": best.plan.pipelines[0].micro_batch_size,
        "num_micro_batches": best.plan.pipelines[0].num_micro_batches,
        "optimizer_sharding": best.plan.optimizer_sharding,
        "stages": [_stage_json(stage) for stage in best.cost.stages],
        "exact": result.exact,
        "stopped_by_time_limit": result.stopped,
        "gap": best.step_seconds / result.lower_bound_seconds - 1.0,
        "plans_simulated": result.num_simulated,
        "even_split": None
        if result.even_split is None
        else {"step_seconds": result.even_split.step_seconds, "fits": result.even_split.cost.fits},
        "runners_up": [
            {
                "step_seconds": c.step_seconds,
                "layers": layer_list(c),
                "why": slower_because(c.cost, best.cost),
            }
            for c in result.runners_up
        ],
        "left_out": [{"card": item.card.name, "reason": item.reason} for item in result.left_out],
        "notes": list(result.notes),
    }


def describe_shape(candidate: Candidate) -> str:
    """`2 pipelines x 3 stages, 16 micro-batches of 1, 1f1b`."""
    plan = candidate.plan
    first = plan.pipelines[0]
    stages = sorted({len(pipeline.stages) for pipeline in plan.pipelines})
    counts = sorted({pipeline.num_micro_batches for pipeline in plan.pipelines})
    words = [
        f"{_count(len(plan.pipelines), 'pipeline')} x {_range(stages, 'stage')}",
        f"{_range(counts, 'micro-batch', 'micro-batches')} of {first.micro_batch_size}",
        plan.schedule,
    ]
    widths = sorted({len(r) for p in plan.pipelines for stage in p.stages for r in stage.replicas})
    if widths != [1]:
        words.append("tensor width " + "/".join(map(str, widths)))
    if plan.optimizer_sharding:
        words.append("optimizer sharded")
    return ", ".join(words)


def _range(values: Sequence[int], word: str, plural: str | None = None) -> str:
    if len(values) == 1:
        return _count(values[0], word, plural)
    return f"{values[0]} to {values[-1]} {plural or word + 's'}"


def step_words(result: SearchResult, setting: Setting) -> str:
    """`step 1.02 s | 32.1k tok/s | MFU ... | bubble ... | ...`."""
    cost, step = result.best.cost, result.best.step_seconds
    tokens = setting.global_batch_size * setting.sequence_length
    peaks = sum(
        setting.cluster.device_type(card.type).peak(setting.precision) or 0.0
        for card in {card for stage in cost.stages for card in stage.cards}
    )
    utilisation = (
        tokens * setting.model.training_flops(setting.sequence_length) / step / peaks if peaks else 0.0
    )
    parts = [
        f"step {show_seconds(step)}",
        f"{tokens / step:,.0f} tok/s",
        f"MFU {utilisation:.0%} of the mixed peak",
        f"bubble {cost.bubble_fraction:.0%}",
        f"gradient sum {(cost.sync_seconds + cost.tied_seconds) / step:.0%}",
        f"update {cost.update_seconds / step:.0%}",
    ]
    return " | ".join(parts)


def best_reasons(result: SearchResult) -> list[str]:
    """How good the plan is known to be."""
    best = result.best
    if result.exact:
        proof = "proven fastest of the searched plans, in the simulation"
    else:
        gap = best.step_seconds / result.lower_bound_seconds - 1.0
        bound = show_seconds(result.lower_bound_seconds)
        proof = f"best found, not proven; no plan takes less than {bound} (gap {gap:.0%})"
    stopped = "; stopped by search.time_limit" if result.stopped else ""
    return [f"{proof}{stopped} ({_count(result.num_simulated, 'plan')} simulated)"]


def runner_lines(result: SearchResult) -> list[str]:
    """Each runner-up: how much slower, what it is, and what makes it slower."""
    best = result.best
    return [
        f"+{candidate.step_seconds / best.step_seconds - 1:.1%} {describe_cards(candidate)}, layers "
        f"{layer_list(candidate)}: {slower_because(candidate.cost, best.cost)}"
        for candidate in result.runners_up
    ]


def slower_because(cost: PlanCost, best: PlanCost) -> str:
    """The part of the step that grew most."""
    mine, theirs = _parts(cost), _parts(best)
    name = max(mine, key=lambda part: mine[part] - theirs[part])
    grown = mine[name] - theirs[name]
    return f"{name} +{show_seconds(grown)}" if grown > 0 else "as fast"


def left_out_lines(left_out: Sequence[LeftOut]) -> list[str]:
    """Idle cards, those with the same reason together."""
    reasons = dict.fromkeys(item.reason for item in left_out)
    lines: list[str] = []
    for reason in reasons:
        cards = [item.card for item in left_out if item.reason == reason]
        types = ", ".join(dict.fromkeys(card.type for card in cards))
        names = ", ".join(card.name for card in cards[:4]) + (", ..." if len(cards) > 4 else "")
        lines.append(f"{len(cards)} {types} ({names}): {reason}")
    return lines


def layer_list(candidate: Candidate) -> str:
    """Layers per stage, as Yuan 2.0's scripts write them."""
    return to_blocks(candidate.plan.pipelines[0])


def megatron_layout(candidate: Candidate) -> str:
    """The cut of pipeline 0 as Megatron-LM writes it."""
    return to_layout(candidate.plan.pipelines[0])


def describe_cards(candidate: Candidate) -> str:
    """`4 A100-80G > 2 T4`, per pipeline and in the order of the stages."""
    own = [stage for stage in candidate.cost.stages if stage.pipeline == 0]
    types = [card.type for stage in own for card in stage.cards]
    runs = " > ".join(f"{len(list(group))} {name}" for name, group in itertools.groupby(types))
    pipelines = len(candidate.plan.pipelines)
    return f"{pipelines} x ({runs})" if pipelines > 1 else runs


def limited_by(stage: StageCost, cost: PlanCost) -> str:
    """What keeps the stage from taking another layer."""
    slowest = max(s.forward_seconds + s.backward_seconds for s in cost.stages)
    words: list[str] = []
    if stage.forward_seconds + stage.backward_seconds >= slowest * (1 - 1e-9):
        words.append("time, the slowest")
    if stage.memory.total + stage.one_more_layer_bytes > stage.capacity_bytes:
        words.append("MEMORY")
    return " and ".join(words) or "-"


def _even_words(result: SearchResult) -> str:
    even = result.even_split
    if even is None:
        return "     even split: more cards than layers"
    ratio = even.step_seconds / result.best.step_seconds
    return f"     even split: {ratio:.2f}x the time" + ("" if even.cost.fits else ", and it does not fit")


def _stage_rows(best: Candidate) -> list[str]:
    """One row per stage of pipeline 0; the other pipelines' cards stand beside."""
    cost = best.cost
    stages = len(best.plan.pipelines[0].stages)
    rows = [("stage", "cards", "layers", "fwd+bwd", "busy", "memory of capacity, GiB", "limited by")]
    for s in range(stages):
        same = [stage for stage in cost.stages if stage.stage == s]
        worst = max(same, key=lambda stage: (stage.memory.total / stage.capacity_bytes, -stage.pipeline))
        seconds = max(stage.forward_seconds + stage.backward_seconds for stage in same)
        busy = _stage_busy(cost, s) / cost.step_seconds
        rows.append(
            (
                str(s),
                _cards_words(same),
                layer_words(worst),
                show_seconds(seconds),
                "#" * round(10 * busy) + "." * (10 - round(10 * busy)) + f" {busy:.0%}",
                f"{worst.memory.total / GIB:.1f} / {worst.capacity_bytes / GIB:.1f}",
                limited_by(worst, cost),
            )
        )
    if len(rows) > 17:
        rows = [*rows[:9], ("...", f"{len(rows) - 17} more", "", "", "", "", ""), *rows[-8:]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        (" " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def _stage_busy(cost: PlanCost, s: int) -> float:
    """Busy seconds of the busiest worker of a stage of pipeline 0, in all its stages."""
    return max(cost.simulations[0].busy_seconds[worker] for worker in cost.workers[0][s])


def layer_words(stage: StageCost) -> str:
    """`0-9 +emb`, `none +head`; `recompute` where all layers run twice, `recompute 3` where three do, and
    `selective` for `recompute` where only parts of them do."""
    first, end = stage.layers
    words = [f"{first}-{end - 1}" if end > first + 1 else str(first) if end > first else "none"]
    words += ["+emb"] * stage.embedding + ["+head"] * stage.head
    if stage.num_recomputed:
        words += ["selective" if stage.recompute == "selective" else "recompute"]
        words += [str(stage.num_recomputed)] * (stage.num_recomputed < end - first)
    return " ".join(words)


def _cards_words(stages: Sequence[StageCost]) -> str:
    first = stages[0]
    words = f"{first.card.type} {first.card.name}"
    words += f" tensor {len(first.replicas[0])}" * (len(first.replicas[0]) > 1)
    words += f" replicas {len(first.replicas)}" * (len(first.replicas) > 1)
    return words + (f" x{len(stages)}" if len(stages) > 1 else "")


def _parts(cost: PlanCost) -> dict[str, float]:
    work = max(busy for simulation in cost.simulations for busy in simulation.busy_seconds)
    return {
        "slowest stage": work,
        "filling, draining and waiting": cost.compute_seconds - work,
        "gradient sum": cost.sync_seconds + cost.tied_seconds,
        "optimizer step": cost.update_seconds,
    }


def _stage_json(stage: StageCost) -> dict[str, Any]:
    return {
        "pipeline": stage.pipeline,
        "stage": stage.stage,
        "card": stage.card.name,
        "cards": [[card.name for card in replica] for replica in stage.replicas],
        "type": stage.card.type,
        "layers": list(stage.layers),
        "recompute": stage.recompute,
        "recomputed_layers": stage.num_recomputed,
        "in_flight": stage.in_flight,
        "forward_seconds": stage.forward_seconds,
        "backward_seconds": stage.backward_seconds,
        "peak_memory_bytes": stage.memory.total,
        "capacity_bytes": stage.capacity_bytes,
        "source": stage.source,
    }


def _count(number: int, word: str, plural: str | None = None) -> str:
    return f"{number} {word if number == 1 else plural or word + 's'}"


# --- HTML ------------------------------------------------------------------------------------------------

_STYLE = """
:root{--ink:#1b1f24;--paper:#fff;--soft:#eef1f4;--line:#c5ccd3;
--c0:#3566a8;--c1:#7d9fd0;--c2:#1f8a70;--c3:#e0a030;--c4:#a05195;--c5:#d45087;--c6:#8a939c;--f:#3566a8;--b:#e0a030}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--paper:#15181c;--soft:#23282e;--line:#475059;
--c0:#6c9be0;--c1:#3f5f8f;--c2:#45b899;--c3:#e6b455;--c4:#c382ba;--c5:#e07ba5;--c6:#6b747d;--f:#6c9be0;--b:#e6b455}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
max-width:1080px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.25em .6em;border-bottom:1px solid var(--line)}
td.n{font-variant-numeric:tabular-nums}pre{background:var(--soft);padding:1em;overflow:auto;font-size:12px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--ink);font:11px system-ui,sans-serif}
.card{fill:var(--soft);stroke:var(--line)}.idle{stroke-dasharray:3 3}
.grid{stroke:var(--line);stroke-width:.5}
.limit{stroke:var(--ink);stroke-width:1.5}.f{fill:var(--f)}.b{fill:var(--b)}.rest{fill:var(--soft)}.wait{fill:url(#hatch)}
.key{display:inline-block;margin-right:1em}.key svg{display:inline;width:14px;height:14px;vertical-align:-2px}
@media print{body{max-width:none;margin:0}section{break-inside:avoid}pre{white-space:pre-wrap}}
"""
_HATCH = (
    '<svg width="0" height="0" style="position:absolute;width:0" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="5" height="5" fill="var(--soft)"/><rect width="1.5" height="5" fill="var(--line)"/>'
    "</pattern></defs></svg>"
)


def plan_html(result: SearchResult, setting: Setting) -> str:
    """The report page."""
    best = result.best
    title = f"Plan for {setting.model.name} on {setting.cluster.name}"
    sections = [
        ("Summary", _summary_html(result, setting)),
        ("Cluster", _cluster_svg(result, setting)),
        ("Stages", _stages_html(best)),
        ("Memory on each card", _memory_svg(best.cost)),
        ("Timeline of one step", _timeline_svg(best.cost)),
        ("Runners-up and what was left out", _why_not_html(result)),
        ("Assumptions", _assumptions_html(result, setting)),
        ("plan.yaml", f'<pre id="plan">{escape(dump(best.plan))}</pre>'),
    ]
    body = "".join(f"<section><h2>{escape(name)}</h2>{html}</section>\n" for name, html in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<style>{_STYLE}</style></head>\n<body>{_HATCH}<h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def _summary_html(result: SearchResult, setting: Setting) -> str:
    lines = [describe_shape(result.best) + _even_words(result).replace("     ", "; ")]
    lines += [step_words(result, setting), *best_reasons(result)]
    lines.append(
        f"Layers per stage {layer_list(result.best)}; Megatron layout {megatron_layout(result.best)}"
    )
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _cluster_svg(result: SearchResult, setting: Setting) -> str:
    """Nodes as rows of cards; each card with the stage that it works on, idle ones dashed."""
    cluster, working = (
        setting.cluster,
        {card.name: stage for stage in result.best.cost.stages for card in stage.cards},
    )
    rows: list[str] = []
    y = 0
    for node, group in cluster.groups.items():
        cards = [card for card in cluster.cards if card.node == node]
        words = f"{node}: {len(cards)} x {group.device}"
        if group.link:
            words += f", inside {group.link.bandwidth / 1e9:.3g} GB/s {show_seconds(group.link.latency)}"
        if group.network:
            words += (
                f", network {group.network.bandwidth / 1e9:.3g} GB/s {show_seconds(group.network.latency)}"
            )
        rows.append(f'<text x="0" y="{y + 12}">{escape(words)}</text>')
        for i, card in enumerate(cards):
            x, top = 130 * (i % 8), y + 18 + 42 * (i // 8)
            stage = working.get(card.name)
            label = f"p{stage.pipeline} s{stage.stage}: {layer_words(stage)}" if stage else "left out"
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
    return _svg(1040, y, "cards and their stages", rows)


def _stages_html(best: Candidate) -> str:
    head = (
        "pipeline",
        "stage",
        "card",
        "layers",
        "forward",
        "backward",
        "peak",
        "capacity",
        "limited by",
        "source",
    )
    rows = [
        (
            str(stage.pipeline),
            str(stage.stage),
            f"{stage.card.name} ({stage.card.type})",
            layer_words(stage),
            show_seconds(stage.forward_seconds),
            show_seconds(stage.backward_seconds),
            show_bytes(stage.memory.total),
            show_bytes(stage.capacity_bytes),
            limited_by(stage, best.cost),
            stage.source,
        )
        for stage in best.cost.stages
    ]
    return _table(head, rows)


def _memory_svg(cost: PlanCost) -> str:
    """A bar per card, stacked by category, against its own limit; all on one scale."""
    scale = 760 / max(max(s.capacity_bytes, s.memory.total) for s in cost.stages)
    shapes: list[str] = []
    for row, stage in enumerate(cost.stages):
        y, x = 22 * row, 200.0
        shapes.append(
            f'<text x="0" y="{y + 13}">{escape(stage.card.name)} ({escape(stage.card.type)})</text>'
        )
        for i, category in enumerate(CATEGORIES):
            size = getattr(stage.memory, category)
            width = size * scale
            shapes.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="16" fill="var(--c{i})">'
                f"<title>{category}: {show_bytes(size)}</title></rect>"
            )
            x += width
        limit = 200 + stage.capacity_bytes * scale
        shapes.append(f'<line class="limit" x1="{limit:.2f}" x2="{limit:.2f}" y1="{y - 1}" y2="{y + 17}"/>')
        shapes.append(
            f'<text x="{max(x, limit) + 6:.2f}" y="{y + 13}">{stage.memory.total / GIB:.1f} / '
            f"{stage.capacity_bytes / GIB:.1f} GiB</text>"
        )
    keys = "".join(_key(f"var(--c{i})", name) for i, name in enumerate(CATEGORIES))
    return f"<p>{keys}<span class=key>| limit</span></p>" + _svg(
        1080, 22 * len(cost.stages), "memory", shapes
    )


def _timeline_svg(cost: PlanCost) -> str:
    """Lanes to scale: forward, backward, and the time between in grey, by reason."""
    step, width = cost.step_seconds, 880.0
    scale = width / step
    shapes: list[str] = []
    y = 0
    for p, simulation in enumerate(cost.simulations):
        if p >= MAX_DRAWN_PIPELINES:
            shapes.append(f'<text x="0" y="{y + 13}">and {len(cost.simulations) - p} more pipelines</text>')
            y += 22
            break
        own = {s: stage for s, stage in enumerate(q for q in cost.stages if q.pipeline == p)}
        for worker, shape in enumerate(_lanes(simulation, step, scale)):
            mine = [s for s, row in enumerate(cost.workers[p]) if worker in row]
            first = own[mine[0]]
            card = first.replicas[cost.workers[p][mine[0]].index(worker)][0]
            label = f"p{p} s{','.join(map(str, mine))} {card.name}"
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
    keys = (
        _key("var(--f)", "forward")
        + _key("var(--b)", "backward")
        + _key("var(--soft)", "warm-up, drain, gradient sum and update")
        + _key("url(#hatch)", "waiting for a neighbour or a message")
    )
    return f"<p>{keys}</p>" + _svg(1060, y + 20, "one step", [*shapes, axis])


def _lanes(simulation: Simulation, step_seconds: float, scale: float) -> list[str]:
    """One SVG group's inside per worker: a rest bar, the waits, then forwards and backwards as two paths."""
    num_stages = len(simulation.busy_seconds)
    boxes: list[dict[str, list[tuple[float, float]]]] = [
        {"f": [], "b": [], "wait": []} for _ in range(num_stages)
    ]
    before: list[float | None] = [None] * num_stages
    for operation, (start, end) in zip(simulation.program, simulation.spans, strict=True):
        if operation.peer >= 0:
            continue
        worker = operation.worker
        last = before[worker]
        if last is not None and start > last:
            boxes[worker]["wait"].append((last, start))
        boxes[worker][operation.kind[0]].append((start, end))
        before[worker] = end
    result: list[str] = []
    for lane in boxes:
        text = f'<rect class="rest" width="{step_seconds * scale:.2f}" height="16"/>'
        for name in ("wait", "f", "b"):
            path = "".join(
                f"M{a * scale:.2f} 0h{(b - a) * scale:.2f}v16h{(a - b) * scale:.2f}z" for a, b in lane[name]
            )
            text += f'<path class="{name}" d="{path}"/>'
        result.append(text)
    return result


def _why_not_html(result: SearchResult) -> str:
    items = [*runner_lines(result), *(f"left out: {line}" for line in left_out_lines(result.left_out))]
    even = result.even_split
    if even is not None:
        items.append(
            f"even split over the cluster's order, layers {layer_list(even)}: "
            f"{show_seconds(even.step_seconds)}" + ("" if even.cost.fits else ", does not fit the memory")
        )
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _assumptions_html(result: SearchResult, setting: Setting) -> str:
    items = [
        *result.notes,
        f"precision {setting.precision}, sequence length {setting.sequence_length}, global batch "
        f"{setting.global_batch_size} sequences",
        "sends overlap compute" if setting.overlap else "the sender waits for its messages",
        "messages: latency + bytes / bandwidth, first in first out on each link; equal pipelines share a "
        "node's network card",
    ]
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"


def _key(fill: str, name: str) -> str:
    return (
        f'<span class="key"><svg viewBox="0 0 14 14" aria-hidden="true">'
        f'<rect width="14" height="14" fill="{fill}"/>'
        f"</svg> {escape(name)}</span>"
    )


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {max(height, 1)}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )
