"""Curves over steps as SVG: round ticks, no clipped labels, the legend beside the picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape

from yuan_train.report.html import key, svg

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 260, 64, 24, 12, 34
WINDOW = 10
"""Steps of the moving mean."""


def chart(
    label: str, curves: Mapping[str, Points], *, dots: Points = (), rings: Mapping[str, Points] | None = None
) -> str:
    """A picture of curves over steps. `dots` are single measurements behind them, `rings` rare ones."""
    rings = {name: points for name, points in (rings or {}).items() if points}
    every = [*dots, *(p for points in (*curves.values(), *rings.values()) for p in points)]
    if not every:
        return "<p>nothing was measured</p>"
    ticks_y = round_ticks(min(y for _, y in every), max(y for _, y in every))
    low, high = min(x for x, _ in every), max(x for x, _ in every)
    ticks_x = [tick for tick in round_ticks(low, high, most=8, whole=True) if low <= tick <= high] or [low]

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - low) / (high - low or 1), (y - ticks_y[0]) / (ticks_y[-1] - ticks_y[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    parts: list[str] = []
    for tick in ticks_y:
        _, y = place(low, tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>'
        )
    for tick in ticks_x:
        x, _ = place(tick, ticks_y[0])
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{number(tick)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">step</text>')
    for point in dots:
        x, y = place(*point)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.5" fill="var(--c0)" opacity=".35"/>')
    for i, points in enumerate(curves.values()):
        line = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="var(--c{_colour(i)})" stroke-width="2"/>'
        )
    for points in rings.values():
        for point in points:
            x, y = place(*point)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="var(--ink)"/>')
    legend = "".join(key(f"var(--c{_colour(i)})", name) for i, name in enumerate(curves))
    legend += "".join(f'<span class="key">o {escape(name)}</span>' for name in rings)
    return f"<p>{legend}</p>{svg(WIDTH, HEIGHT, label, parts)}"


def bars(rows: Sequence[tuple[str, float | None, float | None]], show: str, *, scale: float = 1.0) -> str:
    """Pairs of bars, forecast over measured; `show` is the unit, of which a value has `scale` each."""
    most = max((value or 0.0 for _, *pair in rows for value in pair), default=0.0) or 1.0
    parts: list[str] = []
    for i, (name, forecast, measured) in enumerate(rows):
        y = 34 * i
        parts.append(f'<text x="0" y="{y + 18}">{escape(name)}</text>')
        for j, (value, fill) in enumerate(((forecast, "var(--c1)"), (measured, "var(--c0)"))):
            if value is not None:
                width = 430 * value / most
                parts.append(
                    f'<rect x="200" y="{y + 3 + 13 * j}" width="{width:.1f}" height="11" fill="{fill}"/>'
                    f'<text x="{206 + width:.1f}" y="{y + 12 + 13 * j}">{value / scale:.3g} {show}</text>'
                )
    keys = key("var(--c1)", "forecast") + key("var(--c0)", "measured")
    label = "forecast and measured, by rank"
    return f"<p>{keys}</p>{svg(WIDTH, 34 * len(rows), label, parts)}"


def smooth(points: Points) -> Points:
    """Means of the last WINDOW points."""
    values = [y for _, y in points]
    return [(x, statistics.fmean(values[max(0, i - WINDOW + 1) : i + 1])) for i, (x, _) in enumerate(points)]


def round_ticks(low: float, high: float, *, most: int = 6, whole: bool = False) -> list[float]:
    """Round numbers in equal distances around [low, high], at most about so many."""
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-12):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """`12k`, `0.25`."""
    if abs(value) >= 1e4:
        return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k"
    return f"{round(value, 10):g}"


def _colour(i: int) -> int:
    """Colours that differ enough side by side."""
    return (0, 3, 2, 4, 5, 1)[i % 6]
