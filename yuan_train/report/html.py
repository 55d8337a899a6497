"""The frame of a report page, and its parts: tables, legends, drawings; light and dark, without scripts."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from operator import add, itemgetter

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
.wide{overflow-x:auto}.wide>svg{min-width:560px}.wide td,.wide th{overflow-wrap:break-word}
h1{overflow-wrap:anywhere}svg{width:100%;height:auto;display:block}
svg text{fill:var(--ink);font:11px system-ui,sans-serif}
.card{fill:var(--soft);stroke:var(--line)}.idle{stroke-dasharray:3 3}
.grid{stroke:var(--line);stroke-width:.5}
.limit{stroke:var(--ink);stroke-width:1.5}.host{fill:var(--soft);stroke:var(--ink)}.f{fill:var(--f)}.b{fill:var(--b)}.rest{fill:var(--soft)}.wait{fill:url(#hatch)}
.key{display:inline-block;margin-right:1em}.key svg{display:inline;width:14px;height:14px;vertical-align:-2px}
@media print{body{max-width:none;margin:0}section{break-inside:avoid}pre{white-space:pre-wrap}}
"""
_HATCH = (
    '<svg width="0" height="0" style="position:absolute;width:0" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="5" height="5" fill="var(--soft)"/><rect width="1.5" height="5" fill="var(--line)"/>'
    "</pattern></defs></svg>"
)


def whole_page(title: str, sections: Sequence[tuple[str, str]], *, refresh: int | None = None) -> str:
    """A page of sections, each a heading and its HTML; browsers ask for it again after `refresh` seconds."""
    body = "".join(f"<section><h2>{escape(name)}</h2>{html}</section>\n" for name, html in sections)
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">'
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"{again}<style>{_STYLE}</style></head>\n<body>{_HATCH}<h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a head of nothing is left out."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    heading = row(head, "th") if any(head) else ""
    return f'<div class="wide"><table>{heading}{"".join(row(cells, "td") for cells in rows)}</table></div>'


def bullets(items: Iterable[str]) -> str:
    """A list of texts."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def key(fill: str, name: str) -> str:
    """An entry of a legend: a patch of colour and its meaning."""
    return (
        f'<span class="key"><svg viewBox="0 0 14 14" aria-hidden="true">'
        f'<rect width="14" height="14" fill="{fill}"/>'
        f"</svg> {escape(name)}</span>"
    )


def whole_picture(title: str, drawings: Sequence[tuple[str, int, int, Sequence[str]]]) -> str:
    """One SVG file of drawings below each other, each with a heading, width, height and parts."""
    width, top, body = (
        max((width for _, width, _, _ in drawings), default=1),
        34,
        [f'<text class="h" y="20">{escape(title)}</text>'],
    )
    for heading, _, height, parts in drawings:
        body.append(f'<text class="h2" y="{top + 14}">{escape(heading)}</text>')
        body.append(f'<g transform="translate(0 {top + 26})">{"".join(parts)}</g>')
        top += height + 44
    hatch = _HATCH[_HATCH.index("<defs>") : _HATCH.index("</svg>")]
    more = (
        ".h{font-size:16px}.h2{font-weight:bold}svg{font:11px system-ui,sans-serif;background:var(--paper)}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 0 {width + 24} {top}" role="img" '
        f'aria-label="{escape(title)}"><style>{_STYLE}{more}</style>{hatch}'
        f'<rect x="-12" width="{width + 24}" height="{top}" fill="var(--paper)"/>{"".join(body)}</svg>\n'
    )


def svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    """A drawing, as wide as the page; on a narrow one it is scrolled by itself, so that it can be read."""
    return (
        f'<div class="wide"><svg viewBox="0 0 {width} {max(height, 1)}" role="img" '
        f'aria-label="{escape(label)}">' + "".join(parts) + "</svg></div>"
    )


Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 260, 64, 24, 12, 34
MOST_POINTS = 2000
"""Of a curve: more than there are pixels."""
WINDOW = 10
"""Steps of the moving mean."""
LAST_POINTS = 20
"""Of a curve that are kept beside it: what the end of a run is told by."""


def chart(
    label: str,
    curves: Mapping[str, Points],
    *,
    dots: Points = (),
    rings: Mapping[str, Points] | None = None,
    marks: Mapping[float, str] | None = None,
) -> str:
    """A picture of curves over steps. `dots` are single measurements behind them, `rings` rare ones; `marks`
    stand at steps at which something has changed."""
    rings = {name: points for name, points in (rings or {}).items() if points}
    curves, dots = {name: thinned(points) for name, points in curves.items()}, thinned(dots)
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
    parts += [
        _mark(place(step, 0.0)[0], words) for step, words in (marks or {}).items() if low <= step <= high
    ]
    for point in dots:
        x, y = place(*point)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.5" fill="var(--c0)" opacity=".35"/>')
    for i, points in enumerate(curves.values()):
        line = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="var(--c{colour(i)})" stroke-width="2"/>')
    for points in rings.values():
        for point in points:
            x, y = place(*point)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="var(--ink)"/>')
    legend = "".join(key(f"var(--c{colour(i)})", name) for i, name in enumerate(curves))
    legend += "".join(f'<span class="key">o {escape(name)}</span>' for name in rings)
    return f"<p>{legend}</p>{svg(WIDTH, HEIGHT, label, parts)}"


def _mark(x: float, words: str) -> str:
    """A line from the top to the bottom of a chart, with a word at its head."""
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--ink)" '
        f'stroke-dasharray="2 4"/><text x="{x + 3:.1f}" y="{TOP + 8}">{escape(words)}</text>'
    )


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
    first = [(x, statistics.fmean(values[: i + 1])) for i, (x, _) in enumerate(points[: WINDOW - 1])]
    # Sums of ten are those of eight and of two: four passes over a long curve in place of ten.
    twos = list(map(add, values, values[1:]))
    fours = list(map(add, twos, twos[2:]))
    eights = map(add, fours, fours[4:])
    means = (total / WINDOW for total in map(add, eights, twos[8:]))
    return [*first, *zip((x for x, _ in points[WINDOW - 1 :]), means, strict=True)]


def thinned(points: Points) -> Points:
    """Of more than MOST_POINTS the highest and the lowest of each few, so that no peak is lost."""
    count = -(-2 * len(points) // MOST_POINTS)
    if len(points) <= MOST_POINTS:
        return points
    return [p for i in range(0, len(points), count) for p in _extremes(points[i : i + count])]


class Curve:
    """A figure over steps that is added to: as few points as `thinned` leaves, and their moving mean.

    A run that goes on for ever takes the same memory, and the same time to draw.
    """

    def __init__(self, *, is_smoothed: bool = True) -> None:
        """Without smoothing there are no means."""
        self.first: float | None = None
        self.last: Points = ()
        """The newest LAST_POINTS."""
        self._points, self._means = _Few(), _Few()
        self._is_smoothed = is_smoothed

    def add(self, points: Points) -> None:
        """Append points, which come in order."""
        if points and self.first is None:
            self.first = points[0][1]
        before = self.last[1 - WINDOW :]
        if self._is_smoothed:
            self._means.add(smooth([*before, *points])[len(before) :])
        self._points.add(points)
        self.last = [*self.last, *points[-LAST_POINTS:]][-LAST_POINTS:]

    @property
    def points(self) -> Points:
        """All of them while they are few; the highest and the lowest of each few otherwise."""
        return self._points.points

    @property
    def means(self) -> Points:
        """The same of the means of WINDOW points."""
        return self._means.points


class _Few:
    """Points in groups of one size, of each of which the lowest and the highest are kept."""

    def __init__(self) -> None:
        self._size = 1
        self._groups: list[Points] = []
        self._rest: Points = ()

    def add(self, points: Points) -> None:
        rest = [*self._rest, *points]
        while (len(self._groups) + len(rest) // self._size) * min(self._size, 2) > MOST_POINTS:
            pairs = itertools.zip_longest(self._groups[::2], self._groups[1::2], fillvalue=())
            self._groups, self._size = [_extremes([*one, *other]) for one, other in pairs], 2 * self._size
        whole = len(rest) // self._size * self._size
        self._groups += [_extremes(rest[i : i + self._size]) for i in range(0, whole, self._size)]
        self._rest = rest[whole:]

    @property
    def points(self) -> Points:
        return [point for group in (*self._groups, _extremes(self._rest)) for point in group]


def _extremes(points: Points) -> Points:
    """The lowest and the highest, in order."""
    if len(points) < 2:
        return points
    low, high = min(points, key=itemgetter(1)), max(points, key=itemgetter(1))
    return [low] if low is high else [low, high] if low < high else [high, low]


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


def colour(i: int) -> int:
    """Which of the colours the i-th thing has: those differ enough side by side."""
    return (0, 3, 2, 4, 5, 1)[i % 6]
