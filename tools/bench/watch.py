"""The page of a long run: how long its first drawing takes, and one after ten more steps.

The lines are those of a real run on three simulated cards, with other numbers: a loss that falls, times that
vary by a tenth, and one spike of the gradient's norm, which must be in the page's picture.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tools.bench.harness import MISSED, ROOT, Row, case
from yuan_train.report.run_log import RunReader
from yuan_train.report.run_page import run_html

REAL = {
    "version": 1,
    "step": 80,
    "loss": 3.6442174315452576,
    "lr": 0.0003,
    "grad_norm": 0.8503380832803104,
    "tokens": 15360,
    "step_seconds": 0.29584450800030027,
    "tokens_per_second": 648.9895698851544,
    "mfu": 0.0015368073014880455,
    "peak_memory_bytes": [333385728, 332365824, 331993088],
    "forecast_step_seconds": 0.004066843733333334,
    "stage_seconds": [0.2678449859995453, 0.2625964320031926, 0.19916539000041666],
    "link_seconds": {"a - b": 0.01631466699836892},
    "validation_loss": None,
}
OF_RANKS = ("peak_memory_bytes", "stage_seconds")
LINKS_EVERY = 10
SPIKE = 4321.5
MOST_SECONDS = 2.0
LONG = 100_000


@case(
    "watch/long",
    formats={"steps": ",", "MB": ".1f", "first CPU s": ".2f", "again CPU ms": ".0f", "page kB": ".0f"},
    costs={"first CPU s": 0.5, "again CPU ms": 0.5},
    steps=(1_000, LONG),
    log_every=(10, 1),
)
def long_run(steps: int, log_every: int) -> Row:
    """`watch --once` of a log in a process of its own; then a page that is drawn again ten steps later."""
    with tempfile.TemporaryDirectory() as name:
        log, page = Path(name, "log"), Path(name, "page.html")
        log.mkdir()
        lines = made_lines(steps + 10, log_every)
        with (log / "metrics.jsonl").open("w") as file:
            file.writelines(next(lines) for _ in range(steps))
        first = _cpu_seconds([sys.executable, "-m", "yuan_train", "watch", str(log), "--once", str(page)])
        reader = RunReader(log)
        has_spike = any(y == SPIKE for _, y in reader.read().curve("grad_norm").points)
        with (log / "metrics.jsonl").open("a") as file:
            file.writelines(lines)
        started = time.process_time()
        text = run_html(reader.read())
        again = time.process_time() - started
        size = (log / "metrics.jsonl").stat().st_size
    missed = [] if first < MOST_SECONDS else [f"{steps} steps took {first:.1f} s"]
    missed += [] if has_spike else ["the spike is not in the picture"]
    row: Row = {"steps": steps, "log_every": log_every, "MB": size / 1e6, "first CPU s": first}
    row |= {"again CPU ms": 1000 * again, "page kB": len(text) / 1e3}
    return row | ({MISSED: "; ".join(missed)} if missed else {})


def made_lines(steps: int, log_every: int) -> Iterator[str]:
    """Lines of metrics.jsonl as `REAL`, with what is measured of ranks in each `log_every`-th."""
    chance = random.Random(0)
    for step in range(1, steps + 1):
        line = dict(REAL) | {"step": step, "loss": 8.0 * step**-0.15 + chance.gauss(0.0, 0.05)}
        line |= {"tokens": 192 * step, "grad_norm": SPIKE if step == steps // 3 else chance.uniform(0.5, 1.0)}
        for key in ("step_seconds", "tokens_per_second", "mfu"):
            line[key] = REAL[key] * chance.uniform(0.9, 1.1)
        if step % log_every:
            for key in OF_RANKS:
                del line[key]
        else:
            line["stage_seconds"] = [own * chance.uniform(0.9, 1.1) for own in REAL["stage_seconds"]]
        if step % LINKS_EVERY:
            del line["link_seconds"]
        yield json.dumps(line) + "\n"


def _cpu_seconds(words: list[str]) -> float:
    """CPU seconds of a command."""
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, cwd=ROOT)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}")
    return used.ru_utime + used.ru_stime
