"""The frame of a report page, and its parts: tables, legends, drawings; light and dark, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

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


def whole_page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """A page of sections, each a heading and its HTML."""
    body = "".join(f"<section><h2>{escape(name)}</h2>{html}</section>\n" for name, html in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<style>{_STYLE}</style></head>\n<body>{_HATCH}<h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a head of nothing is left out."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    heading = row(head, "th") if any(head) else ""
    return f'<div class="wide"><table>{heading}{"".join(row(cells, "td") for cells in rows)}</table></div>'


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
