"""`supervise.jsonl`: what a supervised run has seen and decided, and why."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from yuan_train.config.errors import ConfigError

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
    step: int = 0
    """The newest saved one."""


_KINDS = {
    "time": (int, float),
    "event": str,
    "reason": str,
    "plan": (str, NoneType),
    "forecast_before": (int, float, NoneType),
    "forecast_after": (int, float, NoneType),
    "nodes": list,
    "step": int,
}


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
        line = json.dumps(asdict(entry) | {"nodes": list(entry.nodes)})
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


def read_journal(directory: str | Path) -> list[Entry]:
    """The entries of a journal; lines that are damaged are left out, and a missing file has none."""
    entries: list[Entry] = []
    try:
        lines = (Path(directory) / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        with suppress(ValueError, TypeError):
            entry = Entry(**json.loads(line))
            if all(isinstance(getattr(entry, name), kinds) for name, kinds in _KINDS.items()):
                entries.append(entry)
    return entries
