"""The page of a run over HTTP: during the run, before its first step, and of a long one."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.commands import Refuse
from tests.support.project import make_plan, run_config, with_forecast
from yuan_train.cli.main import main
from yuan_train.config.plan_constraints import save_plan
from yuan_train.report.html import MOST_POINTS, smooth, thinned
from yuan_train.report.run_log import read_run


def line(step: int) -> str:
    values = {"step": step, "loss": 9 - step / 1e5, "step_seconds": 0.5, "tokens_per_second": 200.0}
    values |= {"grad_norm": 1.0, "stage_seconds": [0.2, 0.4], "peak_memory_bytes": [2**30, 2**30]}
    return json.dumps(values) + "\n"


@contextmanager
def watched(folder: Path) -> Iterator[str]:
    """The address of the page of a log directory."""
    words = [sys.executable, "-m", "yuan_train", "watch", str(folder), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[0]
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        return answer.read().decode()


def test_the_page_grows_with_the_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    with watched(log) as address:
        assert "Nothing to see yet" in get(address)
        (log / "metrics.jsonl").write_text("".join(map(line, range(1, 6))))
        first = get(address)
        assert '<meta http-equiv="refresh" content="10">' in first and "5 of 5" in first
        with (log / "metrics.jsonl").open("a") as file:
            file.write(line(6))
        assert "6 of 6" in get(address)
        for path, code in (("x", 404), ("../metrics.jsonl", 404)):
            with pytest.raises(urllib.error.HTTPError, match=str(code)):
                get(address + path)


def test_a_long_run_is_one_small_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(map(line, range(1, 100_001))))
    started = time.process_time()
    assert main(["watch", str(tmp_path), "--once", str(tmp_path / "page.html")]) == 0
    print(f"{time.process_time() - started:.2f} CPU s")
    assert (tmp_path / "page.html").stat().st_size < 1_500_000
    assert "100,000 of 100,000" in (tmp_path / "page.html").read_text()


def test_no_peak_of_a_curve_is_lost() -> None:
    points = [(float(i), 0.0) for i in range(50_000)]
    points[12_345], points[40_000] = (12_345.0, 9.0), (40_000.0, -7.0)
    found = thinned(points)
    assert len(found) <= MOST_POINTS and list(found) == sorted(found)
    assert (12_345.0, 9.0) in found and (40_000.0, -7.0) in found
    assert thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]
    rising = [(float(i), float(i)) for i in range(25)]
    assert [y for _, y in smooth(rising)] == [i / 2 if i < 10 else i - 4.5 for i in range(25)]


def test_which_part_of_the_cards_is_used(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two cards with half of the layers each; without waits they would take 0.2 and 0.4 s of the 0.5."""
    run = run_config(run_file)
    log = tmp_path / "log"
    log.mkdir()
    (log / "metrics.jsonl").write_text("".join(map(line, range(1, 21))))
    assert read_run(log).use_of_cards is None
    save_plan(log / "plan.yaml", with_forecast(make_plan(run, [[3, 3]])))
    used = read_run(log).use_of_cards
    assert used is not None
    # Of equal halves: 2 / 0.5 against 1 / 0.2 + 1 / 0.4. The head makes the second one larger.
    assert 0.5 < used < 0.7
    assert main(["show", str(log)]) == 0
    assert f"cards used   {used:.0%} of what they do together" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such directory; wanted the log directory of a run"),
        ([".", "--port", "99999999"], "--port 99999999: cannot be opened"),
        ([".", "--once", "x.html"], "no metrics.jsonl; wanted the log directory of a run"),
    ],
)
def test_what_cannot_be_shown(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refuse("watch", *words)
