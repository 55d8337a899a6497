"""A command on each of several machines, at once: their output line by line, and one end for all."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from yuan_train.config.errors import INTERRUPTED
from yuan_train.machine.agent import END, HELLO, INTERRUPT, TERMINATE
from yuan_train.machine.hosts import RemoteHost

OWN_END_SECONDS = 4.0
"""In which the others may end by themselves once one has failed, and say what they saw."""
KILL_SECONDS = 2.0
"""How much later the ways to machines that still run are cut."""
NOT_REACHED = 255
"""With which ssh ends where it has not reached a machine, or has lost it."""
_OWN_CODES = (1, 2, 3, INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one machine does."""

    host: RemoteHost
    script: str
    """A line of shell, which ends in `exec` of an agent."""
    is_spare: bool = False
    """Whether the others may go on if it fails."""


@dataclass
class _Way:
    """The process that reaches a machine."""

    task: Task
    process: subprocess.Popen[bytes]
    readers: list[threading.Thread] = field(default_factory=list[threading.Thread])

    @property
    def name(self) -> str:
        return self.task.host.address

    def say(self, word: bytes) -> None:
        """Write to the agent there."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(word)
            self.process.stdin.flush()


class _Printer:
    """Writes whole lines of all machines to this process's streams, each behind its machine's name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._width = max(map(len, names))

    def read(self, name: str, source: IO[bytes], target: IO[str]) -> None:
        with source:
            for line in iter(source.readline, b""):
                text = line.decode(errors="replace").rstrip("\r\n")
                with self._lock, suppress(OSError, ValueError):
                    target.write(f"{name:<{self._width}} | {text}\n")
                    target.flush()


def run_together(tasks: Sequence[Task]) -> int:
    """Run all tasks until all have ended; returns 0, or the exit code of the machine at fault.

    When one fails the others are ended, within 10 s. Ctrl-C and SIGTERM go to all;
    a second Ctrl-C ends them at once.
    """
    ways: list[_Way] = []
    printer = _Printer(task.host.address for task in tasks)
    previous = signal.signal(signal.SIGTERM, lambda *_: _tell(ways, TERMINATE))
    try:
        for task in tasks:
            ways.append(_start(task, printer))
        try:
            culprit = _wait(ways)
        except KeyboardInterrupt:
            _interrupt(ways)
            raise
        _cut(ways)
        return 0 if culprit is None else _report(culprit)
    finally:
        _cut(ways)
        signal.signal(signal.SIGTERM, previous)


def _start(task: Task, printer: _Printer) -> _Way:
    process = subprocess.Popen(
        task.host.command(task.script),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A terminal's Ctrl-C is for this process alone, which tells it to the agents.
        start_new_session=True,
    )
    way = _Way(task, process)
    way.say(HELLO)
    for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        reader = threading.Thread(target=printer.read, args=(way.name, source, target), daemon=True)
        reader.start()
        way.readers.append(reader)
    return way


def _tell(ways: Sequence[_Way], word: bytes) -> None:
    for way in ways:
        if way.process.poll() is None:
            way.say(word)


def _wait(ways: Sequence[_Way]) -> _Way | None:
    """Wait for all; returns the machine at fault, after the others are ended."""
    spared: list[_Way] = []
    failed: list[_Way] = []
    deadline, is_told = float("inf"), False
    while any(way.process.poll() is None for way in ways):
        for way in ways:
            if not way.process.poll() or way in (*failed, *spared):
                continue
            if way.task.is_spare:
                spared.append(way)
                print(f"note: {_why(way)}; the others go on without it", file=sys.stderr)
                continue
            if not failed:
                deadline = time.monotonic() + OWN_END_SECONDS
            failed.append(way)
        if time.monotonic() > deadline:
            if is_told:
                break
            _tell(ways, END)
            deadline, is_told = time.monotonic() + KILL_SECONDS, True
        time.sleep(0.05)
    codes = [way for way in ways if way.process.poll() and way not in (*failed, *spared)]
    failed += [way for way in codes if not is_told or way.process.poll() in (2, 3)]
    if not failed and spared and len(spared) == len(ways):
        failed = spared
    # One that says why has the word; else who was first.
    return min(failed, key=_blame_order) if failed else None


def _blame_order(way: _Way) -> int:
    """Bad input first, then what was killed or lost; the others fail because of these."""
    code = way.process.poll() or 0
    return 0 if code in (2, 3) else 1 if code not in _OWN_CODES else 2


def _why(way: _Way) -> str:
    code = way.process.poll() or 0
    if code == NOT_REACHED:
        return f"{way.name} was not reached, or its connection broke (exit code {code})"
    number = -code if code < 0 else code - 128
    if number in set(signal.valid_signals()) and code != INTERRUPTED:
        return f"{way.name} was killed by {signal.Signals(number).name}"
    return f"{way.name} failed (exit code {code})"


def _report(way: _Way) -> int:
    code = way.process.poll() or 0
    print(f"error: {_why(way)}; what it said is above, and the others were ended", file=sys.stderr)
    return code if code in _OWN_CODES else 1


def _interrupt(ways: Sequence[_Way]) -> None:
    """Have all end as after a Ctrl-C of their own; another one ends the wait."""
    _tell(ways, INTERRUPT)
    deadline = time.monotonic() + 2 * OWN_END_SECONDS
    while any(way.process.poll() is None for way in ways) and time.monotonic() < deadline:
        time.sleep(0.05)


def _cut(ways: Sequence[_Way]) -> None:
    """End what still runs: first by a word, then by cutting the way to it."""
    _tell(ways, END)
    deadline = time.monotonic() + KILL_SECONDS
    while any(way.process.poll() is None for way in ways) and time.monotonic() < deadline:
        time.sleep(0.05)
    for way in ways:
        if way.process.poll() is None:
            way.process.kill()
        way.process.wait()
        for reader in way.readers:
            reader.join(timeout=1.0)
        assert way.process.stdin is not None
        with suppress(OSError):
            way.process.stdin.close()
