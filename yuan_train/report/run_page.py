"""A run as lines for the terminal and as one HTML page: curves, forecast beside measured, plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from html import escape

from yuan_train.config.load import dump
from yuan_train.config.run import SuperviseConfig
from yuan_train.config.units import show_bytes, show_seconds
from yuan_train.report.html import bars, chart, smooth, table, whole_page
from yuan_train.report.run_log import CONFIG, Line, RankShare, RunLog, measured_pace, slow_links

MAX_RANKS = 16
"""Rows of ranks in the terminal; the page has four times as many."""
LAST_STEPS = 20
"""Of which the mean is taken for what the run has reached."""
GIB = 2.0**30
MAX_TEXT = 400
"""Characters of an answer on the page."""
MAX_QUOTED = 100
"""Characters of an answer on a terminal."""
SLOW, MOST_SLOW = SuperviseConfig().slow, 4
"""From which pace on a rank is told to be slow, and how many of these are named."""
MANY_TIMES = 10.0
"""So far above its forecast a time is told as a multiple: a rehearsal on processors takes thousands."""


def run_lines(run: RunLog) -> list[str]:
    """The summary of a run: what it has reached, its speed, and its ranks beside their forecast."""
    lines = [f"{name:<12} {words}" for name, words in _summary(run)]
    lines += [f"{'' if i else 'supervise':<12} {' '.join(row)}" for i, row in enumerate(_decisions(run))]
    if not run.ranks:
        return lines
    rows = [_RANK_HEAD, *(_rank_row(share) for share in run.ranks[:MAX_RANKS])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_RANK_HEAD))]
    lines.append("")
    lines += ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(run.ranks) > MAX_RANKS:
        lines.append(f"... and {len(run.ranks) - MAX_RANKS} more ranks; --out F.html shows {4 * MAX_RANKS}")
    return lines


def run_html(run: RunLog, *, refresh: int | None = None) -> str:
    """The page of a run, without scripts or other files; drawn anew by a browser after `refresh` seconds."""
    title = f"{run.model or 'A run'}: {run.kind}"
    shares = run.ranks[: 4 * MAX_RANKS]
    sections = [
        ("Summary", table(("", ""), _summary(run))),
        *_curves(run),
        ("Speed", _speed(run)),
    ]
    if shares:
        names = [" ".join(filter(None, (f"rank {share.rank}", share.type))) for share in shares]
        seconds = [(n, s.forecast_seconds, s.seconds) for n, s in zip(names, shares, strict=True)]
        memory = [(n, s.forecast_bytes, s.peak_bytes) for n, s in zip(names, shares, strict=True)]
        sections += [
            ("Stages", table(_RANK_HEAD, map(_rank_row, shares))),
            ("Seconds of computing in a step", bars(seconds, "s")),
            ("Memory at its peak", bars(memory, "GiB", scale=GIB)),
        ]
    if run.journal:
        sections.append(("Plans and their reasons", table(_DECISION_HEAD, _decisions(run))))
    if run.samples:
        sections.append(("Answers", _answers(run.samples)))
    if run.plan is not None:
        sections.append(("plan.yaml", f"<pre>{escape(dump(run.plan))}</pre>"))
    if run.config_text:
        sections.append((CONFIG, f"<pre>{escape(run.config_text)}</pre>"))
    return whole_page(title, sections, refresh=refresh)


_DECISION_HEAD = ("time", "step", "what", "why", "forecast")


def _decisions(run: RunLog) -> list[tuple[str, ...]]:
    """What was decided about a supervised run, a row each."""
    return [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time)),
            f"step {entry.step}",
            entry.event,
            entry.reason,
            "" if entry.forecast_after is None else f"{show_seconds(entry.forecast_after)} a step",
        )
        for entry in run.journal
    ]


def _summary(run: RunLog) -> list[tuple[str, str]]:
    first, last = run.steps[0], run.steps[-1]
    found = [
        ("run", f"{run.kind}{f' of {run.model}' if run.model else ''}, {run.directory}"),
        ("steps", f"{last['step']:,} of {run.num_steps:,}{_gaps(run)}"),
    ]
    if "reward" in last:
        found.append(("reward", _change(run, "reward")))
        if points := run.curve("evaluation", "pass_1"):
            found.append(("pass@1", " -> ".join(f"{y:.2f}" for _, y in _some(points))))
    else:
        found.append(("loss", _change(run, "loss")))
    for name, words in (("validation_loss", "validation"), ("accuracy", "accuracy"), ("margin", "margin")):
        if points := run.curve(name):
            found.append((words, f"{points[0][1]:.3f} -> {points[-1][1]:.3f}"))
    measured, forecast = run.step_seconds, run.forecast_seconds
    words = f"{show_seconds(measured)} (median)"
    if forecast:
        error = forecast / measured - 1.0
        side = "as forecast" if abs(error) < 0.005 else f"the forecast is {abs(error):.0%} too "
        words += f"; {show_seconds(forecast)} forecast: "
        words += side if abs(error) < 0.005 else side + ("long" if error > 0 else "short")
    found.append(("step time", words))
    speeds = [line["tokens_per_second"] for line in run.warm if line.get("tokens_per_second")]
    if speeds:
        mfu = [line["mfu"] for line in run.warm if line.get("mfu") is not None]
        used = f", MFU {statistics.median(mfu):.1%}" if mfu else ""
        found.append(("speed", f"{statistics.median(speeds):,.0f} tokens/s{used}"))
    if run.use_of_cards is not None:
        found.append(("cards used", f"{run.use_of_cards:.0%} of what they do together while none waits"))
    if slow := _slow_ranks(run):
        found.append(("slow", slow))
    if links := slow_links(run.steps):
        words = [f"{name} {times:.1f} times" for name, times in list(links.items())[:MOST_SLOW]]
        found.append(("slow links", f"{', '.join(words)} as long for a message as at its best"))
    if "generation_seconds" in last:
        share = statistics.median(line["generation_seconds"] / line["step_seconds"] for line in run.warm)
        found.append(("generation", f"{share:.0%} of a step"))
    if last.get("tokens"):
        found.append(("tokens", f"{last['tokens']:,} trained"))
    if last.get("skipped_steps"):
        found.append(("skipped", f"{last['skipped_steps']} steps, whose gradients were not finite"))
    if answers := _first_and_last(run.samples):
        found.append(("prompt", _quoted(answers[0][0].get("prompt"))))
        for name, line in zip(("first answer", "last answer"), answers[0], strict=True):
            reward = _cell(line.get("reward"))
            found.append((name, f"{_quoted(line.get('text'))}, reward {reward}, step {line.get('step')}"))
    if last["step"] > first["step"] and last["step"] < run.num_steps:
        left = show_seconds((run.num_steps - last["step"]) * measured)
        found.append(("left", f"{left} at this speed"))
    return found


def _slow_ranks(run: RunLog) -> str:
    """The ranks that lately computed longer than the others, beside the forecast."""
    pace = measured_pace(run.plan, run.steps) if run.plan is not None else {}
    slow = sorted((rank for rank in pace if pace[rank] >= SLOW), key=lambda rank: -pace[rank])
    names = {entry.rank: entry.device for entry in run.plan.ranks} if run.plan is not None else {}
    words = [f"rank {rank} ({names[rank]}) {pace[rank]:.1f} times" for rank in slow[:MOST_SLOW]]
    return f"{', '.join(words)} as long as forecast, beside the others" if words else ""


def _gaps(run: RunLog) -> str:
    first = run.steps[0]["step"]
    return f" (logged from {first:,})" if first > 1 else ""


def _change(run: RunLog, name: str) -> str:
    """`8.31 -> 2.05 (mean of the last 20 steps)`."""
    values = [y for _, y in run.curve(name)]
    last = values[-LAST_STEPS:] if len(values) > LAST_STEPS else values[-1:]
    of = f" (mean of the last {len(last)} steps)" if len(last) > 1 else ""
    return f"{values[0]:.3f} -> {statistics.fmean(last):.3f}{of}"


def _some(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most eight points, the first and the last among them."""
    if len(points) <= 8:
        return list(points)
    return [points[round(i * (len(points) - 1) / 7)] for i in range(8)]


def _curves(run: RunLog) -> list[tuple[str, str]]:
    """Pictures of what is learned: the loss, or the reward and what goes with it."""
    found: list[tuple[str, str]] = []
    if rewards := run.curve("reward"):
        names = list(run.steps[-1].get("rewards") or ())
        curves = {"reward": smooth(rewards)}
        if len(names) > 1:
            curves |= {name: smooth(run.curve("rewards", name)) for name in names}
        rings = {"pass@1 of the evaluation": run.curve("evaluation", "pass_1")}
        found.append(("Reward", chart("reward by step", curves, dots=rewards, rings=rings)))
        for name, keys in (
            ("Entropy (estimate)", ("entropy_estimate",)),
            ("Tokens of an answer", ("answer_tokens", "mean")),
            ("Divergence from the reference", ("kl",)),
        ):
            if points := run.curve(*keys):
                found.append((name, chart(name, {"mean of 10 steps": smooth(points)}, dots=points)))
        return found
    losses = run.curve("loss")
    rings = {"validation": run.curve("validation_loss")}
    found.append(
        ("Loss", chart("loss by step", {"mean of 10 steps": smooth(losses)}, dots=losses, rings=rings))
    )
    if points := run.curve("accuracy"):
        found.append(
            ("Accuracy of pairs", chart("accuracy", {"mean of 10 steps": smooth(points)}, dots=points))
        )
    norms = run.curve("grad_norm")
    if norms:
        found.append(
            ("Gradient norm", chart("gradient norm", {"mean of 10 steps": smooth(norms)}, dots=norms))
        )
    return found


def _speed(run: RunLog) -> str:
    points = run.curve("step_seconds")
    curves = {"measured, mean of 10 steps": smooth(points)}
    if forecast := run.curve("forecast_step_seconds"):
        curves["forecast"] = forecast
    return "<p>Seconds of a step.</p>" + chart("seconds of a step", curves, dots=points)


_RANK_HEAD = ("rank", "card", "layers", "computes, forecast", "measured", "memory, forecast", "measured")


def _rank_row(share: RankShare) -> tuple[str, ...]:
    ratio = ""
    if share.seconds and share.forecast_seconds:
        times = share.seconds / share.forecast_seconds
        ratio = f" ({times:,.0f} times)" if times >= MANY_TIMES else f" ({times - 1.0:+.0%})"
    return (
        str(share.rank),
        f"{share.type} {share.card}".strip() or "-",
        share.layers or "-",
        "-" if share.forecast_seconds is None else show_seconds(share.forecast_seconds),
        "-" if share.seconds is None else show_seconds(share.seconds) + ratio,
        "-" if share.forecast_bytes is None else show_bytes(share.forecast_bytes),
        "-" if share.peak_bytes is None else show_bytes(share.peak_bytes),
    )


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
