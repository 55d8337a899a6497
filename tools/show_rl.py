"""python tools/show_rl.py runs/rl-tiny: the reward of a run, as lines, and as a picture in report.html."""

from __future__ import annotations

import argparse
import html
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 280, 56, 32, 16
COLOURS = ("#1f5fa8", "#b4531a", "#2e7d4f", "#7a4a9e", "#8a6d1d")
WINDOW = 10
"""Steps of the moving mean."""


def main(arguments: list[str] | None = None) -> int:
    """Write report.html, and print a summary. Returns the exit code: 2 if there is no finished step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="log directory of a run")
    directory: Path = parser.parse_args(arguments).directory
    try:
        steps = _lines(directory / "metrics.jsonl")
        if not steps or "reward" not in steps[0]:
            raise ValueError("no finished step of reinforcement learning")
    except (OSError, ValueError) as error:
        print(f"error: {directory / 'metrics.jsonl'}: {error}; run `yuan-train rl` first", file=sys.stderr)
        return 2
    samples = _lines(directory / "samples.jsonl") if (directory / "samples.jsonl").exists() else []
    summary = describe(steps)
    (directory / "report.html").write_text(report(steps, samples, summary), encoding="utf-8")
    print("\n".join([*summary, f"picture      {directory / 'report.html'}"]))
    return 0


def describe(steps: Sequence[dict[str, Any]]) -> list[str]:
    """Reward, evaluation, lengths and speed."""
    first, last = steps[0], steps[-20:]
    evaluated = [step for step in steps if step["evaluation"]]
    seconds = statistics.median(step["step_seconds"] for step in steps)
    share = statistics.median(step["generation_seconds"] / step["step_seconds"] for step in steps)
    lines = [
        f"steps        {first['step']} to {steps[-1]['step']}",
        f"reward       {first['reward']:.3f} -> {statistics.fmean(s['reward'] for s in last):.3f} "
        f"(mean of the last {len(last)})",
    ]
    if evaluated:
        shown = " -> ".join(f"{step['evaluation']['pass_1']:.2f}" for step in evaluated)
        lines.append(f"pass@1       {shown}")
    return [
        *lines,
        f"step time    {seconds:.3f} s (median), {share:.0%} of it generation",
        f"gap          {max(s['log_prob_gap']['max'] or 0 for s in steps):.1e} at most, between the "
        "log-probabilities of the draw and the trainer's",
    ]


def report(steps: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]], summary: Sequence[str]) -> str:
    """One HTML page without scripts or other files."""
    x = [step["step"] for step in steps]
    rewards = [step["reward"] for step in steps]
    names = list(steps[0]["rewards"])
    curves = {"reward": _smooth(rewards)} | {
        name: _smooth([step["rewards"][name] for step in steps]) for name in names
    }
    evaluated = [(step["step"], step["evaluation"]["pass_1"]) for step in steps if step["evaluation"]]
    others = {
        "entropy (estimate)": [step["entropy_estimate"] for step in steps],
        "answer tokens (mean)": [step["answer_tokens"]["mean"] for step in steps],
    }
    rows = "".join(
        f"<tr><td>{line['step']}</td><td>{html.escape(line['prompt'])}</td>"
        f"<td>{html.escape(line['text'])}</td><td>{line['reward']:.2f}</td></tr>"
        for line in [*samples[:4], *samples[-8:]]
    )
    pictures = [
        f"<h2>Reward</h2><p>Means of {WINDOW} steps; the dots are single steps, the rings pass@1.</p>",
        picture(x, curves, dots=rewards, rings=evaluated),
        *(f"<h2>{name}</h2>{picture(x, {name: values})}" for name, values in others.items()),
    ]
    return (
        "<!doctype html><meta charset='utf-8'><title>Reinforcement learning</title>"
        "<style>body{font:15px/1.5 system-ui;margin:2em auto;max-width:760px;color:#222}"
        "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd}"
        "pre{background:#f6f6f4;padding:1em}</style><h1>Reinforcement learning</h1>"
        f"<pre>{html.escape(chr(10).join(summary))}</pre>{''.join(pictures)}"
        "<h2>Answers</h2><table><tr><th>step<th>prompt<th>answer<th>reward</tr>"
        f"{rows}</table>\n"
    )


def picture(
    x: Sequence[int],
    curves: dict[str, list[float]],
    *,
    dots: Sequence[float] = (),
    rings: Sequence[tuple[int, float]] = (),
) -> str:
    """Curves over steps as SVG."""
    values = [*(v for curve in curves.values() for v in curve), *dots, *(v for _, v in rings)]
    low, high = min(0.0, *values), max(values) if max(values) > 0 else 1.0
    high += 0.05 * (high - low)

    def place(step: float, value: float) -> tuple[float, float]:
        across = (step - x[0]) / max(x[-1] - x[0], 1)
        up = (value - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - 8), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='100%' role='img'>"]
    for i in range(5):
        value = low + (high - low) * i / 4
        _, y = place(x[0], value)
        parts.append(
            f"<line x1='{LEFT}' x2='{WIDTH - 8}' y1='{y:.1f}' y2='{y:.1f}' stroke='#e3e3df'/>"
            f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end' font-size='12'>{value:.2g}</text>"
        )
    for step in sorted({x[0], x[len(x) // 2], x[-1]}):
        at, _ = place(step, low)
        parts.append(
            f"<text x='{at:.1f}' y='{HEIGHT - 10}' text-anchor='middle' font-size='12'>step {step}</text>"
        )
    for step, value in zip(x, dots, strict=False):
        at, y = place(step, value)
        parts.append(f"<circle cx='{at:.1f}' cy='{y:.1f}' r='1.6' fill='{COLOURS[0]}' opacity='.35'/>")
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join("{:.1f},{:.1f}".format(*place(s, v)) for s, v in zip(x, curve, strict=True))
        parts.append(
            f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'/>"
            f"<text x='{LEFT + 8}' y='{TOP + 14 + 16 * number}' font-size='13' fill='{colour}'>"
            f"{html.escape(name)}</text>"
        )
    for step, value in rings:
        at, y = place(step, value)
        parts.append(f"<circle cx='{at:.1f}' cy='{y:.1f}' r='4' fill='none' stroke='#222'/>")
    return "".join([*parts, "</svg>"])


def _smooth(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
