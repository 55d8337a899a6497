"""Questions to machines over ssh or srun, and files to and from them."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from yuan_train.config.errors import INTERRUPTED, ConfigError
from yuan_train.config.signals import hearing
from yuan_train.machine.agent import END, HELLO, INTERRUPT, TERMINATE
from yuan_train.machine.hosts import RemoteHost

T = TypeVar("T")
Facts = dict[str, Any]

LOOK_SECONDS = 120.0
"""In which a machine answers; prints of large files take a while."""


def ask_json(command: Sequence[str], seconds: float) -> Facts | str:
    """The object that a command prints as its last line that is one, or why there is none."""
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=seconds, check=False,
        )  # fmt: skip
    except OSError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:g} s"
    # A login may print its greeting before.
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode == 0 and lines:
        try:
            return json.loads(lines[-1])
        except ValueError:
            return f"its answer is not JSON: {lines[-1][:200]}"
    said = [line.strip() for line in (ran.stderr or ran.stdout).splitlines() if line.strip()]
    return f"{said[-1] if said else 'it said nothing'} (exit code {ran.returncode})"


def look_at(hosts: Sequence[RemoteHost], question: Mapping[str, Any]) -> dict[str, Facts]:
    """What `machine/look.py` finds on each host, by its address. Raises ConfigError unless all answer."""
    words = shlex.join([sys.executable, "-m", "yuan_train.machine.look", json.dumps(question)])
    found = on_each(hosts, lambda host: ask_json(host.command(words), LOOK_SECONDS))
    lost = [f"{name}: {why}" for name, why in found.items() if isinstance(why, str)]
    if lost:
        raise ConfigError(
            f"no answer of {len(lost)} of {len(hosts)} machines, and nothing was started:\n"
            + "\n".join(lost)
            + f"\neach needs a login without a password and yuan-train at the path of here ({sys.executable})"
        )
    return {name: facts for name, facts in found.items() if not isinstance(facts, str)}


def on_each(hosts: Sequence[RemoteHost], call: Callable[[RemoteHost], T]) -> dict[str, T]:
    """What a call gives for each host, all at once, by address."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return dict(zip([host.address for host in hosts], pool.map(call, hosts), strict=True))


def send(host: RemoteHost, folder: Path, names: Sequence[str]) -> None:
    """Copy files to a host, under the names that they have here. Raises ConfigError unless all arrive."""
    script = shlex.join([sys.executable, "-m", "yuan_train.machine.receive", str(folder)])
    with subprocess.Popen(
        host.command(script), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        with suppress(BrokenPipeError), tarfile.open(fileobj=process.stdin, mode="w|") as archive:
            for name in names:
                with open(name, "rb") as file:
                    member = archive.gettarinfo(arcname=name, fileobj=file)
                    # tarfile takes the slash from absolute names; the other end wants them as they are.
                    member.name = name
                    archive.addfile(member, file)
        output, said = process.communicate()
    if process.returncode or output.split()[-1:] != [str(len(names)).encode()]:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit code {process.returncode}"
        raise ConfigError(f"{host.address}: {len(names)} files were to be copied there: {why}")


def fetch(host: RemoteHost, path: Path) -> bytes:
    """The bytes of a file on a host. Raises ConfigError."""
    ran = subprocess.run(
        host.command(f"cat {shlex.quote(str(path))}"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if ran.returncode:
        said = ran.stderr.decode(errors="replace").strip() or f"exit code {ran.returncode}"
        raise ConfigError(f"{host.address}: {path} could not be fetched: {said}")
    return ran.stdout


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
    with hearing({signal.SIGTERM: lambda *_: _tell(ways, TERMINATE)}):
        try:
            for task in tasks:
                ways.append(_start(task, printer))
            culprit = _wait(ways)
        except KeyboardInterrupt:
            _interrupt(ways)
            raise
        finally:
            _cut(ways)
        return 0 if culprit is None else _report(culprit)


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
