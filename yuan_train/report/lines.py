"""Files of JSON lines that grow while they are read: each line is read once, and checked.

What reads a file to which a run appends, or which a crash has cut, is no matter of what is shown of it. A
page of 100,000 steps is drawn anew every ten seconds from what is new. The journal of a supervised run, which
its agents write, says what was decided, when, and why.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from pydantic_core import from_json

from yuan_train.config.errors import ConfigError
from yuan_train.config.load import is_list, is_mapping, without_garbage_collector
from yuan_train.report.html import Curve

Line = dict[str, Any]

LARGEST = 1e100
"""What is larger is no measurement: sums and squares of such numbers stay finite."""
LATEST = 2**53
"""No run has so many steps."""
KEPT = 1000
"""Newest steps that are kept whole: medians are those of these."""
BATCH = 1024
"""Lines that are plain values at a time."""
COMPARED = 256
"""Bytes before the place to which a file was read, that tell whether it is still the same."""


def is_number(value: Any) -> bool:
    """Whether a plain value is a finite number that something may have measured; no boolean is."""
    return type(value) in (float, int) and -LARGEST < value < LARGEST


def is_step_number(value: Any) -> bool:
    """Whether a plain value may be the number of a step."""
    return type(value) is int and 0 <= value < LATEST


def _is_amount(value: Any) -> bool:
    return is_number(value) and value >= 0


def _are_amounts(value: object) -> bool:
    return is_list(value) and all(map(_is_amount, value))


def _are_named(value: object) -> bool:
    """Numbers by name; what was not measured is None."""
    return is_mapping(value) and all(one is None or is_number(one) for one in value.values())


NUMBERS = (
    *("loss", "validation_loss", "accuracy", "margin", "grad_norm", "reward", "entropy_estimate", "kl"),
    *("forecast_step_seconds", "tokens_per_second", "mfu", "generation_seconds", "tokens", "skipped_steps"),
)
_CURVES = ("loss", "validation_loss", "accuracy", "margin", "grad_norm", "reward", "entropy_estimate", "kl")
_TIMES = ("step_seconds", "forecast_step_seconds")
_ROUGH = ("forecast_step_seconds", "validation_loss", "margin", "pass_1")
"""Curves that are not drawn smoothed."""
_NESTED = ("rewards", "evaluation", "answer_tokens")
_SHAPES: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(NUMBERS, is_number),
    **dict.fromkeys(("stage_seconds", "peak_memory_bytes"), _are_amounts),
    **dict.fromkeys((*_NESTED, "link_seconds"), _are_named),
}


def parse_line(text: bytes) -> Line | None:
    """The values of a line; None if it is damaged."""
    try:
        value: Any = from_json(text)
    except ValueError:
        return None
    return value if is_mapping(value) else None


def is_timed(line: Line) -> bool:
    """Whether a line tells of a step, and how long it took."""
    seconds = line.get("step_seconds")
    return is_step_number(line.get("step")) and _is_amount(seconds) and seconds != 0


def checked(line: Line) -> Line:
    """The line without values of a wrong type or size."""
    return {name: value for name, value in line.items() if name not in _SHAPES or _SHAPES[name](value)}


class GrowingFile:
    """Lines of a file since the last look at it."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._before = path, 0, b""

    def read(self) -> tuple[list[bytes], bool]:
        """The new lines, and whether they are those of another file, so that earlier ones count no more.

        A run that is resumed writes the file anew. A last line that is cut short is left for the next time.
        Raises OSError.
        """
        with self._path.open("rb") as file:
            start = max(0, self._offset - len(self._before))
            file.seek(start)
            is_other = file.read(self._offset - start) != self._before
            if is_other:
                self._offset, self._before = 0, b""
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        # No JSON object that is cut short is one.
        end = len(data) if parse_line(data[end:]) is not None else end
        self._offset += end
        self._before = (self._before + data[:end])[-COMPARED:]
        return [line for line in data[:end].split(b"\n") if line.strip()], is_other


def _steps_in(lines: Sequence[bytes]) -> list[Line]:
    """Those of finished steps; a line at a time only if one of them is something else."""
    try:
        found: list[Any] = list(map(from_json, lines))
        steps = list(map(itemgetter("step"), found))
        is_whole = set(map(type, steps)) == {int} and 0 <= min(steps) <= max(steps) < LATEST
        seconds = list(map(itemgetter("step_seconds"), found))
        is_whole = is_whole and _are_all_numbers(seconds) and min(seconds) > 0
        if is_whole and _are_all_numbers(list(map(itemgetter("loss"), found))):
            return found
    except (ValueError, TypeError, KeyError, IndexError):
        pass
    known = [line for line in map(parse_line, lines) if line is not None]
    return [line for line in known if is_timed(line) and _is_loss(line.get("loss", ""))]


def _is_loss(value: object) -> bool:
    """Whether it is one, or None: no token of the step had a loss."""
    return value is None or is_number(value)


def _are_all_numbers(values: Sequence[Any]) -> bool:
    """Whether all are floats as `is_number` wants them, told at once."""
    is_finite = set(map(type, values)) == {float} and not math.isnan(sum(values))
    return is_finite and -LARGEST < min(values) <= max(values) < LARGEST


class Steps:
    """What the lines of metrics.jsonl say: curves of all steps, and the newest steps in full."""

    def __init__(self) -> None:
        self.first: Line = {}
        self.newest: deque[Line] = deque(maxlen=KEPT)
        self.links: list[Line] = []
        """Each measurement of the links between nodes."""
        self.seconds = 0.0
        """Of all steps together."""
        self.left_out = 0
        """Lines that are damaged, or of no finished step."""
        self._curves: dict[tuple[str, ...], Curve] = {}

    @property
    def last(self) -> Line:
        """The newest step."""
        return self.newest[-1]

    def add(self, lines: Sequence[bytes]) -> None:
        """Append lines of the file."""
        with without_garbage_collector():
            for start in range(0, len(lines), BATCH):
                own = lines[start : start + BATCH]
                found = _steps_in(own)
                self.left_out += len(own) - len(found)
                if found:
                    self._add(found, kept=KEPT - (len(lines) - start - len(own)))

    def _add(self, lines: Sequence[Line], *, kept: int) -> None:
        self.first = self.first or checked(lines[0])
        self.newest += map(checked, lines[-kept:] if kept > 0 else ())
        self.seconds += math.fsum(line["step_seconds"] for line in lines)
        self.links += [own for line in lines if (own := line.get("link_seconds")) and _are_named(own)]
        for name in (*_CURVES, *_TIMES):
            self._extend((name,), lines, [line.get(name) for line in lines])
        for name in _NESTED:
            inside = [line for line in lines if is_mapping(line.get(name))]
            for key in dict.fromkeys(key for line in inside for key in line[name]):
                self._extend((name, key), inside, [line[name].get(key) for line in inside])

    def _extend(self, keys: tuple[str, ...], lines: Sequence[Line], values: Sequence[Any]) -> None:
        """Add to a curve what lines have of a figure."""
        kinds = set(map(type, values))
        if kinds == {NoneType}:
            return
        points = list(zip(map(itemgetter("step"), lines), values, strict=True))
        if not _are_all_numbers(values):
            points = [point for point in points if is_number(point[1])]
        self._curves.setdefault(keys, Curve(is_smoothed=keys[-1] not in _ROUGH)).add(points)

    def curve(self, *keys: str) -> Curve:
        """A figure over steps, where it was measured; `("evaluation", "pass_1")`: one inside another."""
        return self._curves.get(keys) or Curve()


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
