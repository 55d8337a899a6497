"""python tools/make_pictures.py: draws the pictures of docs/gallery.md, of the README and of the pages.

    python tools/make_pictures.py                           plans, as docs/pictures/plan-NAME.svg
    python tools/make_pictures.py --curves RUN=NAME ...     losses of runs (log directories) in one picture
    python tools/make_pictures.py --screens NAME=PAGE ...   pages or addresses, in Chromium: screen-NAME.png
    python tools/make_pictures.py --lost-node               the page of a run that loses a node, made anew

A page is shown as wide as a phone and as wide as a desk, side by side. Every plan is made anew from the
catalogue's estimates, so the pictures are those of the planner as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.project import read_metrics
from tests.support.supervised import (
    entries,
    group_of,
    make_supervised,
    steps_done,
    supervised,
    wait_until,
    words,
)
from yuan_train.cli.main import main as command
from yuan_train.report.html import chart, whole_picture

PICTURES = Path(__file__).parents[1] / "docs/pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
SCREEN_WIDTHS, SCREEN_HEIGHT = (390, 1280), 844
PRICES = (0.8, 0.5, 0.3)
"""Of a card for an hour, by node of the run that loses one."""
MORE_STEPS = 60
"""That it makes before, and after."""
PLANS = {
    "laptop": ("tiny", 128, 64, ["train.precision=fp32"]),
    "workstation": ("llama3.2-3b", 4096, 64, []),
    "rtx-mix": ("qwen2.5-1.5b", 2048, 64, []),
    "a800-a100": ("yuan2-51b", 4096, 256, []),
}
"""By cluster: model, tokens of a sequence, sequences of a step, and what the run has otherwise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, and print what was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"plans to draw, of {', '.join(PLANS)}; all")
    parser.add_argument("--curves", nargs="+", metavar="RUN=NAME", help="draw the losses of runs instead")
    parser.add_argument("--screens", nargs="+", metavar="NAME=PAGE", help="photograph pages instead")
    parser.add_argument("--lost-node", action="store_true", help="train on three nodes, and photograph that")
    parser.add_argument("--out", type=Path, default=PICTURES, metavar="DIR", help="default: docs/pictures")
    given = parser.parse_args(arguments)
    given.out.mkdir(exist_ok=True)
    if given.screens:
        return _screens([word.partition("=") for word in given.screens], given.out)
    if given.lost_node:
        return _lost_node(given.out.resolve())
    if given.curves:
        (given.out / "losses.svg").write_text(_curves([word.partition("=") for word in given.curves]))
        return 0
    for name in given.names or PLANS:
        model, tokens, batch, run = PLANS[name]
        run = [f"data.sequence_length={tokens}", f"train.global_batch_size={batch}", *run]
        out = str(given.out / f"plan-{name}.svg")
        if code := command(["plan", "--cluster", name, "--model", model, "--report", out, *run]):
            return code
    return 0


def _lost_node(out: Path) -> int:
    """Train on three nodes of this machine, measure them, train again, kill one; photograph the page after
    some more steps. It takes some minutes."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        project, measured, folder = (Path(name, part) for part in ("project", "measured", "run"))
        for path in (project, measured, folder):
            path.mkdir()
        make_supervised(project, {"gpu-a": 2, "gpu-b": 1, "gpu-c": 1})
        cluster = yaml.safe_load((project / "cluster.yaml").read_text())
        for node, price in zip(cluster["nodes"], PRICES, strict=True):
            node["price"] = price
        (project / "cluster.yaml").write_text(yaml.safe_dump(cluster))
        with supervised(project, measured, *words(100_000)):
            _wait_for(measured, nodes=3, steps=MORE_STEPS)
        if command(["profile", "--of-run", str(measured / "log"), "--out", "profile.json"]):
            return 2
        with supervised(project, folder, "--profile", "profile.json", *words(100_000), "checkpoint.every=20"):
            _wait_for(folder, nodes=3, steps=MORE_STEPS)
            (folder / "down-gpu-c").touch()
            os.killpg(group_of("gpu-c", folder), signal.SIGKILL)
            _wait_for(folder, nodes=2, steps=MORE_STEPS)
            if command(["watch", "run/log", "--once", "page.html"]):
                return 2
        return _screens([("watch", "=", "page.html")], out, height=2 * SCREEN_HEIGHT)


def _wait_for(folder: Path, *, nodes: int, steps: int) -> None:
    """Until so many nodes have made so many steps together."""
    wait_until(lambda: bool(entries(folder)) and len(entries(folder)[-1].nodes) == nodes, folder)
    first = steps_done(folder)
    wait_until(lambda: steps_done(folder) >= first + steps, folder)


def _curves(runs: Sequence[tuple[str, str, str]]) -> str:
    """The losses of runs, and how far they are from the first one's at most."""
    lines = {name: read_metrics(Path(run)) for run, _, name in runs}
    losses = {name: [(line["step"], line["loss"]) for line in own] for name, own in lines.items()}
    first, *others = [dict(points) for points in losses.values()]
    apart = max((abs(first[x] - y) for other in others for x, y in other.items() if x in first), default=0.0)
    # The picture stands behind those of the legend; later curves are dashed, or they would hide the first.
    _, _, page = chart("losses", losses).rpartition("<svg ")
    found = re.search(r'viewBox="0 0 (\d+) (\d+)"[^>]*>(.*)</svg>', page, re.DOTALL)
    assert found is not None
    drawn, *dashed = found[3].split('stroke-width="2"')
    drawn = 'stroke-width="2" stroke-dasharray="6 6"'.join(
        [f'{drawn}stroke-width="5"{dashed[0]}', *dashed[1:]]
    )
    title = f"The loss under {len(losses)} plans, at most {apart:.1g} apart"
    names = f"{next(iter(losses))} (thick), {', '.join(list(losses)[1:])} (dashed)"
    return whole_picture(title, [(names, int(found[1]), int(found[2]), [drawn])])


def _screens(pages: Sequence[tuple[str, str, str]], out: Path, *, height: int = SCREEN_HEIGHT) -> int:
    """Photograph pages; 2 where there is no Chromium, or it draws nothing."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print(f"error: no browser; wanted one of {', '.join(BROWSERS)}", file=sys.stderr)
        return 2
    for name, _, page in pages:
        address = page if "://" in page else Path(page).resolve().as_uri()
        picture = (out / f"screen-{name}.png").resolve()
        if not _screen(browser, address, picture, height):
            print(f"error: {page}: {browser} draws nothing of it", file=sys.stderr)
            return 2
    return 0


def _screen(browser: str, address: str, picture: Path, high: int) -> bool:
    """A page in two frames: the window of a browser is never as narrow as a phone."""
    frames = "".join(
        f'<iframe src="{escape(address)}" width="{width}" height="{high}"></iframe>'
        for width in SCREEN_WIDTHS
    )
    style = "body{margin:10px;background:#888;white-space:nowrap}iframe{border:0;margin-right:10px}"
    style += "iframe{background:#fff}"
    width, height = sum(SCREEN_WIDTHS) + 50, high + 20
    with tempfile.TemporaryDirectory() as folder:
        sheet = Path(folder, "sheet.html")
        sheet.write_text(f"<meta charset=utf-8><style>{style}</style>{frames}")
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        words += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=5000"]
        words += ["--force-device-scale-factor=0.6", f"--window-size={width},{height}"]
        subprocess.run([*words, f"--screenshot={picture}", sheet.as_uri()], capture_output=True, timeout=120)
    return picture.is_file()


if __name__ == "__main__":
    sys.exit(main())
