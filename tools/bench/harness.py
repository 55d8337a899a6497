"""python -m tools.bench [NAME [KEY=VALUE ...]] [--record] [--docs FILE ...]: run a case, print its table.

A case is a function that returns a row, `{column: value}`, or several; `@case` names it and lists the values
of its arguments, of which all combinations are measured; `KEY=VALUE` gives others (YAML: `cards=[64,256]`).
Each combination has a process of its own, on one thread, so that neither memory nor caches carry over.

`--record` appends the rows to tools/bench/results/NAME.jsonl with machine, commit and date. What is slower
than the newest record of the same machine by more than the case's noise is marked. `--docs` writes the newest
record of each case between `<!-- bench: NAME -->` and `<!-- end -->`, so that no figure there is typed by
hand. The exit code is 1 if a row has missed its bar. Without a name, the cases are listed.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from yuan_train.config.errors import YuanError
from yuan_train.profile.units import machine_name

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
MISSED = "missed"
"""The column of a row that has missed its bar, which says how; in no table."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is measured, and how its rows are shown and compared."""

    measure: Callable[..., Row | Iterable[Row]]
    grid: Mapping[str, Sequence[Any]]
    formats: Mapping[str, str]
    costs: Mapping[str, float]
    """Columns of which less is better, with the noise of each, relative."""


CASES: dict[str, Case] = {}


def case(
    name: str, /, *, formats: Mapping[str, str] = {}, costs: Mapping[str, float] = {}, **grid: Sequence[Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a case, measured once for each combination of its arguments."""

    def register(measure: Callable[..., Any]) -> Callable[..., Any]:
        CASES[name] = Case(measure, grid, formats, costs)
        return measure

    return register


@contextmanager
def cost(row: Row) -> Iterator[None]:
    """Add processor seconds and the process's peak memory to a row."""
    started = time.process_time()
    yield
    row["CPU s"] = time.process_time() - started
    row["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def table(name: str, rows: Sequence[Row], before: Mapping[str, Any] | None = None) -> str:
    """Markdown; what is slower than the record `before` is marked."""
    one = CASES[name]
    formats = {"CPU s": ".1f", "peak MiB": ".0f", **one.formats}
    old = {_key(one, row): row for row in before["rows"]} if before else {}
    columns = list(dict.fromkeys(column for row in rows for column in row if column != MISSED))

    def cell(row: Row, column: str) -> str:
        value = row.get(column)
        # A plan in one line has what divides a table's columns.
        shown = "" if value is None else format(value, formats.get(column, "")).replace("|", r"\|")
        last = old.get(_key(one, row), {}).get(column)
        worse = value / last - 1 if column in one.costs and value is not None and last else 0.0
        return f"**{shown}, {worse:+.0%}**" if worse > one.costs.get(column, 0.0) else shown

    lines = [f"| {' | '.join(columns)} |", "|" + "--:|" * len(columns)]
    lines += [f"| {' | '.join(cell(row, column) for column in columns)} |" for row in rows]
    return "\n".join(lines)


def _key(one: Case, row: Row) -> str:
    """What a row is a measurement of: its arguments and words."""
    named = {k: v for k, v in row.items() if k in one.grid or (isinstance(v, str) and k != MISSED)}
    return json.dumps(named, sort_keys=True)


def newest(name: str, machine: str | None = None) -> dict[str, Any] | None:
    """The last record of a case, of this machine if one is given."""
    path = _record_path(name)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = [line for line in lines if machine in (None, line["machine"])]
    return found[-1] if found else None


def record(name: str, rows: Sequence[Row]) -> None:
    """Append the rows to the case's file."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    stamp = {"machine": machine_name(), "commit": commit, "date": f"{datetime.date.today()}"}
    RESULTS.mkdir(exist_ok=True)
    with _record_path(name).open("a") as file:
        file.write(json.dumps({**stamp, "rows": rows}) + "\n")


def _record_path(name: str) -> Path:
    return RESULTS / f"{name.replace('/', '-')}.jsonl"


def write_docs(path: Path) -> None:
    """Write the newest record of each marked case into a page. Raises SystemExit if there is none."""

    def written(match: re.Match[str]) -> str:
        last = newest(match[1])
        if last is None:
            raise SystemExit(f"{path}: {match[1]} has no record; run it with --record")
        words = f"{last['machine']}, {last['date']}, commit {last['commit']}."
        return f"<!-- bench: {match[1]} -->\n{table(match[1], last['rows'])}\n\n{words}\n<!-- end -->"

    pattern = r"<!-- bench: (\S+) -->.*?<!-- end -->"
    path.write_text(re.sub(pattern, written, path.read_text(), flags=re.DOTALL))


def measure_apart(name: str, arguments: Mapping[str, Any]) -> list[Row]:
    """The rows of one combination, measured in a process of its own. Raises SystemExit if it fails."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tools.bench", name, "--one", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | threads, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{name} {dict(arguments)}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_here(name: str, arguments: Mapping[str, Any]) -> list[Row]:
    """The rows of one combination, measured in this process."""
    found = CASES[name].measure(**arguments)
    return [cast(Row, found)] if isinstance(found, dict) else list(found)


def combinations(name: str, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The arguments to measure. Raises SystemExit for a key that the case has not."""
    grid = dict(CASES[name].grid)
    for word in words:
        key, _, value = word.partition("=")
        if key not in grid:
            raise SystemExit(f"{name} has no {key!r}; wanted {', '.join(grid) or 'no arguments'}")
        given = yaml.safe_load(value)
        grid[key] = given if isinstance(given, list) else [given]
    yield from (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))


def main(words: Sequence[str] | None = None) -> int:
    """Run a case; 1 if a row has missed its bar."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__, formatter_class=form)
    parser.add_argument("name", nargs="?", choices=sorted(CASES), metavar="NAME")
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--docs", nargs="*", type=Path, default=[], metavar="FILE")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(words)
    if options.name is None:
        for path in options.docs:
            write_docs(path)
        for name in sorted(CASES) if not options.docs else ():
            print(f"{name}: {(CASES[name].measure.__doc__ or '').strip()}")
        return 0
    if options.one is not None:
        try:
            print(json.dumps(measure_here(options.name, options.one)))
        except YuanError as error:
            raise SystemExit(f"error: {error}") from None
        return 0
    rows: list[Row] = []
    for arguments in combinations(options.name, options.arguments):
        rows += measure_apart(options.name, arguments)
    print(f"{machine_name()}\n\n{table(options.name, rows, newest(options.name, machine_name()))}")
    missed = [row[MISSED] for row in rows if row.get(MISSED)]
    print("".join(f"missed: {fault}\n" for fault in missed), end="")
    if options.record:
        record(options.name, rows)
    for path in options.docs:
        write_docs(path)
    return int(bool(missed))
