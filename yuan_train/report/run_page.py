"""A run as lines for the terminal and as one HTML page: curves, forecast beside measured, plan."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from yuan_train.config.units import show_bytes, show_duration, show_seconds
from yuan_train.report.html import (
    LAST_POINTS,
    Curve,
    Points,
    bars,
    chart,
    colour,
    key,
    svg,
    table,
    whole_page,
)
from yuan_train.report.lines import Entry, Line
from yuan_train.report.run_log import (
    CONFIG,
    CardRow,
    Paid,
    RankShare,
    RunLog,
    card_rows,
    entry_spans,
    rent,
    slow_links,
    slow_ranks,
)

MAX_RANKS = 16
"""Rows of ranks in the terminal; the page has four times as many."""
MAX_DECISIONS = 12
"""Of the journal in the terminal, the newest; the page has a hundred times as many."""
GIB = 2.0**30
MAX_TEXT = 400
"""Characters of an answer on the page."""
MAX_QUOTED = 100
"""Characters of an answer on a terminal."""
MOST_SLOW = 4
"""Of slow ranks and links, how many are named."""
TOO_LONG = 1e15
"""From here on a number is shown by its size."""
MANY_TIMES = 10.0
"""So far above its forecast a time is told as a multiple: a rehearsal on processors takes thousands."""


def run_lines(run: RunLog) -> list[str]:
    """The summary of a run: what it has reached, its speed, its cards beside their forecast, and what was
    decided of it."""
    lines = [f"{name:<12} {words}" for name, words in _summary(run)]
    cards = card_rows(run)
    if cards:
        lines += ["", *_aligned([CARD_HEAD, *map(_card_row, cards[:MAX_RANKS])])]
    if len(cards) > MAX_RANKS:
        lines.append(f"... and {len(cards) - MAX_RANKS} more cards; --out F.html shows {4 * MAX_RANKS}")
    decisions = decision_rows(run)
    if decisions:
        lines += ["", *_aligned([DECISION_HEAD, *decisions[-MAX_DECISIONS:]])]
    if len(decisions) > MAX_DECISIONS:
        lines.append(f"... and {len(decisions) - MAX_DECISIONS} before")
    return lines


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def run_html(run: RunLog, *, refresh: int | None = None) -> str:
    """The page of a run, without scripts or other files; drawn anew by a browser after `refresh` seconds."""
    title = f"{run.model or 'A run'}: {run.kind}"
    shares = run.ranks[: 4 * MAX_RANKS]
    sections = [("Summary", table(("", ""), _summary(run)))]
    if cards := card_rows(run):
        sections.append(("Cards", table(CARD_HEAD, map(_card_row, cards[: 4 * MAX_RANKS]))))
    if run.journal:
        rows = decision_rows(run)[-100 * MAX_DECISIONS :]
        sections.append(("Plans and their reasons", timeline(run) + table(DECISION_HEAD, rows)))
    sections += [*_curves(run), ("Speed", _speed(run))]
    if shares:
        names = [" ".join(filter(None, (f"rank {share.rank}", share.type))) for share in shares]
        seconds = [(n, s.forecast_seconds, s.seconds) for n, s in zip(names, shares, strict=True)]
        memory = [(n, s.forecast_bytes, s.peak_bytes) for n, s in zip(names, shares, strict=True)]
        sections.append(("Seconds of computing in a step", bars(seconds, "s")))
        sections.append(("Memory at its peak", bars(memory, "GiB", scale=GIB)))
    if run.samples:
        sections.append(("Answers", _answers(run.samples)))
    if run.plan is not None:
        sections.append(("plan.yaml", f"<pre>{escape(run.plan_text)}</pre>"))
    if run.config_text:
        sections.append((CONFIG, f"<pre>{escape(run.config_text)}</pre>"))
    return whole_page(title, sections, refresh=refresh)


def _summary(run: RunLog) -> list[tuple[str, str]]:
    last = run.steps.last
    state = "" if run.state == "goes on" else f"; {run.state}"
    found = [
        ("run", f"{run.kind}{f' of {run.model}' if run.model else ''}, {run.directory}"),
        ("steps", f"{last['step']:,} of {run.num_steps:,}{_gaps(run)}{state}"),
        *_reached(run),
        *_speeds(run),
    ]
    if slow := slow_ranks(run):
        names = {entry.rank: entry.device for entry in run.plan.ranks} if run.plan is not None else {}
        words = [f"rank {rank} ({names[rank]}) {times:.1f} times" for rank, times in _some_of(slow)]
        found.append(("slow", f"{', '.join(words)} as long as forecast, beside the others"))
    if links := slow_links(run.steps.links):
        words = [f"{name} {times:.1f} times" for name, times in _some_of(links)]
        found.append(("slow links", f"{', '.join(words)} as long for a message as at its best"))
    if last.get("tokens"):
        found.append(("tokens", f"{last['tokens']:,} trained"))
    if last.get("skipped_steps"):
        found.append(("skipped", f"{last['skipped_steps']} steps, which left the weights as they were"))
    if answers := _first_and_last(run.samples):
        found.append(("prompt", _quoted(answers[0][0].get("prompt"))))
        for name, line in zip(("first answer", "last answer"), answers[0], strict=True):
            reward = _cell(line.get("reward"))
            found.append((name, f"{_quoted(line.get('text'))}, reward {reward}, step {line.get('step')}"))
    if run.steps.first["step"] < last["step"] < run.num_steps:
        left = show_duration((run.num_steps - last["step"]) * run.step_seconds)
        found.append(("left", f"{left} at this speed"))
    found += [("left out", words) for words in run.left_out]
    return found


def _some_of(times: Mapping[Any, float]) -> list[tuple[Any, float]]:
    return list(times.items())[:MOST_SLOW]


def _reached(run: RunLog) -> Iterator[tuple[str, str]]:
    """What is learned."""
    if "reward" in run.steps.last:
        yield "reward", _change(run.curve("reward"))
        if points := run.curve("evaluation", "pass_1").points:
            yield "pass@1", " -> ".join(f"{y:.2f}" for _, y in _some(points))
    elif (losses := run.curve("loss")).first is not None:
        yield "loss", _change(losses)
    for name, words in (("validation_loss", "validation"), ("accuracy", "accuracy"), ("margin", "margin")):
        curve = run.curve(name)
        if curve.first is not None:
            yield words, f"{_figure(curve.first)} -> {_figure(curve.last[-1][1])}"


def _speeds(run: RunLog) -> Iterator[tuple[str, str]]:
    """How long a step takes, how much of the cards is used, and what it costs; under the newest plan."""
    measured, forecast = run.step_seconds, run.forecast_seconds
    words = f"{show_seconds(measured)} (median)"
    if forecast and forecast > 0:
        error = forecast / measured - 1.0
        side = "as forecast" if abs(error) < 0.005 else f"the forecast is {_percent(abs(error))} too "
        words += f"; {show_seconds(forecast)} forecast: "
        words += side if abs(error) < 0.005 else side + ("long" if error > 0 else "short")
    yield "step time", words
    speed = _median(run, "tokens_per_second")
    if speed is not None:
        mfu = _median(run, "mfu")
        yield "speed", f"{_figure(speed, 0)} tokens/s{'' if mfu is None else f', MFU {mfu:.1%}'}"
    if run.use_of_cards is not None:
        by_plan = run.forecast_use_of_cards
        words = "" if by_plan is None else f" ({by_plan:.0%} by the forecast)"
        yield "cards used", f"{run.use_of_cards:.0%} of what they do together while none waits{words}"
    if waits := _who_waits(run):
        yield "waits", waits
    if paid := rent(run, speed):
        yield "rent", _rent_words(paid, is_of_steps=not run.journal)
    generation = _median(run, "generation_seconds")
    if generation is not None:
        yield "generation", f"{_percent(generation / measured)} of a step"


def _median(run: RunLog, name: str) -> float | None:
    values = [line[name] for line in run.measured if line.get(name) is not None]
    return statistics.median(values) if values else None


def _who_waits(run: RunLog) -> str:
    """`31% of the cards' time, most for rank 2 (b/0), which computes 94% of a step`."""
    waits = [share.waits for share in run.ranks if share.waits is not None]
    if len(waits) < 2:
        return ""
    busiest = min(
        (share for share in run.ranks if share.waits is not None), key=lambda share: share.waits or 0.0
    )
    forecast = [share.forecast_waits for share in run.ranks if share.forecast_waits is not None]
    by_plan = f" ({statistics.fmean(forecast):.0%} by the forecast)" if forecast else ""
    name = f"rank {busiest.rank}{f' ({busiest.card})' if busiest.card else ''}"
    return (
        f"{statistics.fmean(waits):.0%} of the cards' time{by_plan}; {name} computes longest, "
        f"{1 - (busiest.waits or 0.0):.0%} of a step"
    )


def _rent_words(paid: Paid, *, is_of_steps: bool) -> str:
    words = [f"{paid.per_hour:.6g} an hour"]
    if paid.per_million is not None:
        forecast = paid.forecast_per_million
        by_plan = "" if forecast is None else f" ({forecast:.3g} by the forecast)"
        words.append(f"{paid.per_million:.3g} for a million tokens{by_plan}")
    if paid.so_far is not None:
        words.append(f"{paid.so_far:,.2f} so far{', for its steps alone' if is_of_steps else ''}")
    return "; ".join(words)


def _percent(part: float) -> str:
    """A part as a percentage, as a multiple where it is a large one."""
    return f"{part:.0%}" if part < MANY_TIMES else f"{_figure(part, 0)} times"


def _figure(value: float, digits: int = 3) -> str:
    """With so many digits behind the point; of a number that would fill a line its size alone."""
    return f"{value:,.{digits}f}" if abs(value) < TOO_LONG else f"{value:.3g}"


def _gaps(run: RunLog) -> str:
    first = run.steps.first["step"]
    return f" (logged from {first:,})" if first > 1 else ""


def _change(curve: Curve) -> str:
    """`8.31 -> 2.05 (mean of the last 20 steps)`."""
    values = [y for _, y in curve.last]
    last = values if len(curve.points) > LAST_POINTS else values[-1:]
    of = f" (mean of the last {len(last)} steps)" if len(last) > 1 else ""
    return f"{_figure(curve.first or 0.0)} -> {_figure(statistics.fmean(last))}{of}"


def _some(points: Points) -> Points:
    """At most eight points, the first and the last among them."""
    if len(points) <= 8:
        return points
    return [points[round(i * (len(points) - 1) / 7)] for i in range(8)]


def _curves(run: RunLog) -> Iterator[tuple[str, str]]:
    """Pictures of what is learned: the loss, or the reward and what goes with it."""
    if "reward" not in run.steps.last:
        losses = run.curve("loss")
        rings = {"validation": run.curve("validation_loss").points}
        curves = {"mean of 10 steps": losses.means}
        marks = plan_marks(run)
        yield "Loss", chart("loss by step", curves, dots=losses.points, rings=rings, marks=marks)
        more = (("Accuracy of pairs", ("accuracy",)), ("Gradient norm", ("grad_norm",)))
    else:
        rewards = run.curve("reward")
        curves = {"reward": rewards.means}
        names = list(run.steps.last.get("rewards") or ())
        if len(names) > 1:
            curves |= {name: run.curve("rewards", name).means for name in names}
        rings = {"pass@1 of the evaluation": run.curve("evaluation", "pass_1").points}
        yield "Reward", chart("reward by step", curves, dots=rewards.points, rings=rings)
        more = (
            ("Entropy (estimate)", ("entropy_estimate",)),
            ("Tokens of an answer", ("answer_tokens", "mean")),
            ("Divergence from the reference", ("kl",)),
        )
    for name, keys in more:
        curve = run.curve(*keys)
        if curve.points:
            yield name, chart(name.lower(), {"mean of 10 steps": curve.means}, dots=curve.points)


def _speed(run: RunLog) -> str:
    seconds, forecast = run.curve("step_seconds"), run.curve("forecast_step_seconds").points
    curves = {"measured, mean of 10 steps": seconds.means} | ({"forecast": forecast} if forecast else {})
    picture = chart("seconds of a step", curves, dots=seconds.points, marks=plan_marks(run))
    return "<p>Seconds of a step.</p>" + picture


def plan_marks(run: RunLog) -> dict[float, str]:
    """The steps from which on other plans ran, with their names; nothing where there was one plan."""
    if run.journal:
        entries = [entry for entry in run.journal if entry.plan]
        changes = [b for a, b in itertools.pairwise(entries) if b.plan != a.plan]
        return {entry.step: plan_name(entry) for entry in changes[-MAX_RANKS:]}
    # `plan.step-120`, of the step from which on it ran.
    names = [path.stem for path in run.plans[1:]]
    return {float(name.split("-")[1].partition(".")[0]): name for name in names[-MAX_RANKS:]}


CARD_HEAD = (
    *("rank", "card", "layers", "computes, forecast", "measured", "waits, forecast", "measured", "for rank"),
    *("memory, forecast", "measured", "state"),
)


def _card_row(card: CardRow) -> tuple[str, ...]:
    share = card.share
    kind = f"{card.type} {card.name}".strip() or "-"
    if share is None:
        limit = "-" if card.limit_bytes is None else f"of {show_bytes(card.limit_bytes)}"
        return ("-", kind, *("-",) * (len(CARD_HEAD) - 4), limit, card.state)
    of = "" if card.limit_bytes is None else f" of {show_bytes(card.limit_bytes)}"
    return (
        str(share.rank),
        kind,
        share.layers or "-",
        _shown(share.forecast_seconds, show_seconds),
        _shown(share.seconds, show_seconds) + _ratio(share),
        _shown(share.forecast_waits, "{:.0%}".format),
        _shown(share.waits, "{:.0%}".format),
        "-" if card.waits_for is None else str(card.waits_for),
        _shown(share.forecast_bytes, show_bytes),
        _shown(share.peak_bytes, show_bytes) + (of if share.peak_bytes is not None else ""),
        card.state,
    )


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _ratio(share: RankShare) -> str:
    """How far a card's measured seconds are from its forecast."""
    if not share.seconds or not share.forecast_seconds:
        return ""
    times = share.seconds / share.forecast_seconds
    return f" ({_figure(times, 0)} times)" if times >= MANY_TIMES else f" ({times - 1.0:+.0%})"


def _answers(samples: Sequence[Line]) -> str:
    """The first and the last answer to the same prompt, where there are both; then the last ones."""
    shown = [line for both in _first_and_last(samples)[:3] for line in both]
    shown += [line for line in samples[-8:] if line not in shown]
    head = ("step", "prompt", "answer", "reward")
    return table(
        head, ([_cell(line.get(name)) for name in ("step", "prompt", "text", "reward")] for line in shown)
    )


def _first_and_last(samples: Sequence[Line]) -> list[tuple[Line, Line]]:
    """Answers to the same prompt of two steps, those that lie farthest apart first."""
    first: dict[str, Line] = {}
    last: dict[str, Line] = {}
    for line in samples:
        prompt = str(line.get("prompt"))
        first.setdefault(prompt, line)
        last[prompt] = line
    found = [(first[prompt], last[prompt]) for prompt in first if first[prompt] is not last[prompt]]
    found = [both for both in found if both[0].get("step") != both[1].get("step")]
    found.sort(key=lambda both: both[0].get("step", 0) - both[1].get("step", 0))
    return found


def _quoted(text: object) -> str:
    """On one line, cut where it is long."""
    shown = repr(str(text))
    return shown if len(shown) <= MAX_QUOTED else f"{shown[: MAX_QUOTED - 3]}..."


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    text = str(value)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


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
