"""Pages are opened in a real browser, as wide as a phone and as a desk: nothing runs out of them."""

import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.test_show import long_log, pages
from tests.support.logs import write_run
from tools import make_pictures
from yuan_train.cli.main import main

ROOT = Path(__file__).parents[2]
WIDE = (
    "onload = () => document.body.dataset.wide = [...document.querySelectorAll('iframe')]"
    ".map(f => f.contentDocument.documentElement).map(e => e.scrollWidth - e.clientWidth).join(' ')"
)


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in make_pictures.BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium")
    return found


INSIDE = """onload = () => {
  const svg = document.querySelector('iframe').contentDocument.querySelector('svg[aria-label^="plans over"]');
  const all = svg.getBoundingClientRect();
  const parts = [...svg.querySelectorAll('rect, text')].map(e => e.getBoundingClientRect());
  document.body.dataset.found = parts.map(e => +(
    e.left >= all.left && e.right <= all.right && e.top >= all.top && e.bottom <= all.bottom)).join(' ');
}"""
"""For each part of the picture whether it lies inside of it."""


def check(browser: str, page: Path, folder: Path) -> None:
    """Photograph a page, and measure how far it runs out of a phone and of a desk."""
    assert make_pictures.main(["--screens", f"page={page}", "--out", str(folder)]) == 0
    picture = (folder / "screen-page.png").read_bytes()
    assert picture[:4] == b"\x89PNG" and len(picture) > 5_000, "an empty page takes less"
    assert struct.unpack(">II", picture[16:24])[0] > 1_000
    wide = told(browser, page, folder, (390, 1280), WIDE)
    assert wide == "0 0", f"{page.name} is wider than its window by {wide}"


def told(browser: str, page: Path, folder: Path, widths: Sequence[int], script: str) -> str:
    """What a script says of a page in frames of some widths."""
    frames = "".join(f'<iframe src="{page.as_uri()}" width="{width}"></iframe>' for width in widths)
    sheet = folder / "sheet.html"
    sheet.write_text(f"<meta charset=utf-8>{frames}<script>{script}</script>")
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    words += ["--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    shown = subprocess.run([*words, sheet.as_uri()], capture_output=True, text=True, timeout=600)
    match = re.search(r'data-\w+="([^"]*)"', shown.stdout)
    assert match is not None, shown.stderr[-500:]
    return match[1]


def test_the_page_of_a_plan(browser: str, tmp_path: Path) -> None:
    words = ["--cluster", "laptop", "--model", "tiny", "data.sequence_length=128", "train.precision=fp32"]
    assert main(["plan", *words, "--report", str(tmp_path / "plan.html")]) == 0
    check(browser, tmp_path / "plan.html", tmp_path)


def test_the_page_of_a_run_that_lost_a_node(browser: str, tmp_path: Path) -> None:
    """Also its picture of plans over time: a lane of three nodes, four stretches, three marks."""
    log, page = write_run(tmp_path), tmp_path / "run.html"
    assert main(["watch", str(log), "--once", str(page)]) == 0
    check(browser, page, tmp_path)
    inside = told(browser, page, tmp_path, (1280,), INSIDE).split()
    assert inside == ["1"] * (3 + 4 + 3 + 1), "nodes, stretches, marks, and how long it was"


@pytest.mark.slow
def test_the_pages_of_all_kinds_of_runs(browser: str, tmp_path: Path) -> None:
    for page in pages(long_log(tmp_path), tmp_path).values():
        check(browser, page, tmp_path)


def test_the_site(browser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first page, and the one with the widest tables."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    site = tmp_path / "site"
    subprocess.run(["mkdocs", "build", "--quiet", "--site-dir", str(site)], cwd=ROOT, check=True)
    for name in ("index.html", "reference.html"):
        check(browser, site / name, tmp_path)


def test_curves_and_a_page_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both curves are drawn whole, the second dashed; without a browser it is said."""
    for name in ("a", "b"):
        lines = (f'{{"step": {i}, "loss": {9 - i + (name == "b") / 8}}}\n' for i in range(1, 5))
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    curves = [f"{tmp_path / 'a'}=one process", f"{tmp_path / 'b'}=three cards"]
    assert make_pictures.main(["--curves", *curves, "--out", str(tmp_path)]) == 0
    picture = (tmp_path / "losses.svg").read_text()
    assert picture.count("<polyline") == 2 and picture.count('stroke-dasharray="') == 1
    assert "one process (thick), three cards (dashed)" in picture and "at most 0.1 apart" in picture
    assert re.search(r'viewBox="-12 0 744 \d+"', picture)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert make_pictures.main(["--screens", "page=x.html", "--out", str(tmp_path)]) == 2
