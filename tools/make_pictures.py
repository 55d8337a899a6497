"""python tools/make_pictures.py: draws the pictures of docs/gallery.md; with --curves those of the README.

    python tools/make_pictures.py                           plans, as docs/pictures/plan-NAME.svg
    python tools/make_pictures.py --curves RUN=NAME ...     losses of runs (log directories) in one picture

Every plan is made anew from the catalogue's estimates, so the pictures are those of the planner as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from yuan_train.cli.main import main as command
from yuan_train.report.chart import chart
from yuan_train.report.html import whole_picture

PICTURES = Path(__file__).parents[1] / "docs/pictures"
PLANS = {
    "laptop": (
        "laptop",
        "tiny",
        ["data.sequence_length=128", "train.global_batch_size=64", "train.precision=fp32"],
    ),
    "workstation": (
        "workstation",
        "llama3.2-3b",
        ["data.sequence_length=4096", "train.global_batch_size=64"],
    ),
    "rtx-mix": ("rtx-mix", "qwen2.5-1.5b", ["data.sequence_length=2048", "train.global_batch_size=64"]),
    "a800-a100": ("a800-a100", "yuan2-51b", ["data.sequence_length=4096", "train.global_batch_size=256"]),
}
"""By name of the picture: cluster, model, and what the run has otherwise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, and print what was written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"plans to draw, of {', '.join(PLANS)}; all")
    parser.add_argument("--curves", nargs="+", metavar="RUN=NAME", help="draw the losses of runs instead")
    given = parser.parse_args(arguments)
    PICTURES.mkdir(exist_ok=True)
    if given.curves:
        (PICTURES / "losses.svg").write_text(_curves([word.partition("=") for word in given.curves]))
        return 0
    for name in given.names or PLANS:
        cluster, model, run = PLANS[name]
        out = PICTURES / f"plan-{name}.svg"
        code = command(["plan", "--cluster", cluster, "--model", model, "--report", str(out), *run])
        if code:
            return code
    return 0


def _curves(runs: Sequence[tuple[str, str, str]]) -> str:
    """The losses of runs, and how far they are from the first one's at most."""
    losses = {name: _losses(Path(run)) for run, _, name in runs}
    first, *others = [dict(points) for points in losses.values()]
    apart = max((abs(first[x] - y) for other in others for x, y in other.items() if x in first), default=0.0)
    page = chart("losses", {name: points for name, points in losses.items()})
    found = re.search(r'viewBox="0 0 (\d+) (\d+)"[^>]*>(.*)</svg>', page, re.DOTALL)
    assert found is not None
    title = f"The loss under {len(losses)} plans: {', '.join(losses)}; at most {apart:.1g} apart"
    return whole_picture(title, [("loss by step", int(found[1]), int(found[2]), [found[3]])])


def _losses(run: Path) -> list[tuple[float, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


if __name__ == "__main__":
    sys.exit(main())
