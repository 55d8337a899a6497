"""The journal of a supervised run: what was decided, when, and why.

It stands alone because agents write it, and what shows a run reads it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from yuan_train.config.document import is_list
from yuan_train.config.errors import ConfigError
from yuan_train.report.steps import Line, is_number, is_step_number, parse_line

FILE = "supervise.jsonl"
Event = Literal["started", "moved", "stays", "fault", "waits", "stopped", "finished", "gave_up"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that was decided. Forecasts are seconds of a step; None where there is no such plan."""

    time: float
    """Seconds since 1970, by the clock of the machine that decided."""
    event: Event
    reason: str
    plan: str | None = None
    """The plan's file, that the run goes on with."""
    forecast_before: float | None = None
    forecast_after: float | None = None
    nodes: Sequence[str] = ()
    """Those that take part from now on."""
    waiting: Sequence[str] = ()
    """Those that are here and are not let in."""
    step: int = 0
    """The newest saved one."""
    live_seconds: float | None = None
    """Of a move in the processes that were there; None: new ones were started."""
    live_bytes: int | None = None
    """Of state, which that sent between ranks."""


class Journal:
    """Appends entries to the journal of a log directory, each as a whole line."""

    def __init__(self, directory: str | Path) -> None:
        """Raises ConfigError if the directory cannot be written."""
        self._path = Path(directory) / FILE
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("a").close()
        except OSError as error:
            raise ConfigError(f"log.directory: {directory} cannot be written: {error}") from None

    def write(self, event: Event, reason: str, **more: Any) -> Entry:
        """Append an entry, and return it. A full disk costs the line and not the run."""
        entry = Entry(time=round(time.time(), 3), event=event, reason=reason, **more)
        line = json.dumps(asdict(entry) | {"nodes": list(entry.nodes), "waiting": list(entry.waiting)})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                # After a line that a crash has cut short, this one begins anew.
                file.write(line + "\n" if self._ends_well() else "\n" + line + "\n")
        except OSError:
            pass
        return entry

    def _ends_well(self) -> bool:
        with self._path.open("rb") as file:
            if file.seek(0, 2) == 0:
                return True
            file.seek(-1, 2)
            return file.read(1) == b"\n"


def read_entries(directory: str | Path) -> tuple[list[Entry], int]:
    """The entries of a journal, and how many lines are damaged and left out. A missing file has none."""
    try:
        lines = [line for line in (Path(directory) / FILE).read_bytes().split(b"\n") if line.strip()]
    except OSError:
        return [], 0
    found = [entry for line in lines if (entry := _entry(parse_line(line))) is not None]
    return found, len(lines) - len(found)


_NAMES = frozenset(field.name for field in fields(Entry))


def _entry(line: Line | None) -> Entry | None:
    """What a line says; None if it does not say it as it should."""
    if line is None or not line.keys() <= _NAMES or not {"time", "event", "reason"} <= line.keys():
        return None
    entry, names = Entry(**line), (*_list(line.get("nodes", [])), *_list(line.get("waiting", [])))
    amounts = (entry.forecast_before, entry.forecast_after, entry.live_seconds, entry.live_bytes)
    is_right = (
        is_number(entry.time)
        and 0 <= entry.time < 2**35
        and is_step_number(entry.step)
        and all(isinstance(text, str) for text in (entry.event, entry.reason, entry.plan or "", *names))
        and all(one is None or (is_number(one) and one >= 0) for one in amounts)
    )
    return entry if is_right else None


def _list(value: object) -> Sequence[object]:
    """A list; anything else as something that no list of names holds."""
    return value if is_list(value) else (None,)
