"""What a machine does for another one: python -m yuan_train.machine.remote run | look | receive.

`run COMMAND...` runs a command that another machine started. Its standard input is the rope to the starter:
words on it are what to do, and its end is the end of the starter or of the way to it, so that nothing is left
running where nobody sees it.

`look QUESTION` says what a starter of ranks must know of a machine, as JSON. The question is JSON: `folder`
to work in, `paths` of files and folders, `names` to resolve, `port` to try, and a file in a folder that may
be shared: to make (`mark`), to look for (`seen`), to `remove`.

`receive FOLDER` writes the files of a tar stream, each whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from yuan_train import __version__
from yuan_train.config.errors import end_with_parent

HELLO, INTERRUPT, TERMINATE, END = b"hello\n", b"interrupt\n", b"terminate\n", b"end\n"
"""What the starter writes: first HELLO; then as a Ctrl-C, as a SIGTERM, and to end within END_SECONDS."""
END_SECONDS = 1.5
SAVE_SECONDS = 120.0
"""What a command has to save and exit, once the starter is gone."""


class _Agent:
    def __init__(self, command: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self.deadline: float | None = None
        self.has_starter = False

    def end(self, seconds: float) -> None:
        """Ask the command to end, and kill it when `seconds` are over."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + seconds)

    def hear(self, words: bytes) -> None:
        """Do what stands on the input; nothing there: it has ended."""
        if not words and self.has_starter:
            self.end(SAVE_SECONDS)
        for word in words.splitlines(keepends=True):
            if word == HELLO:
                self.has_starter = True
            elif word == END:
                self.end(END_SECONDS)
            elif self.child.poll() is None and word in (INTERRUPT, TERMINATE):
                self.child.send_signal(signal.SIGINT if word == INTERRUPT else signal.SIGTERM)

    def wait(self) -> int:
        """Listen until the command has ended; returns its exit code, 128 + N after signal N."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            while self.child.poll() is None:
                for _ in selector.select(0.1) if selector.get_map() else ():
                    words = os.read(0, 4096)
                    self.hear(words)
                    if not words:
                        selector.unregister(0)
                if not selector.get_map():
                    time.sleep(0.05)
                if self.deadline is not None and time.monotonic() > self.deadline:
                    self.kill()
        self.kill()
        code = self.child.wait()
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        """Kill the command and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)


def run(command: Sequence[str]) -> int:
    """Run a command until it ends, or the starter has it ended. Returns its exit code."""
    agent = _Agent(command)
    signal.signal(signal.SIGINT, lambda *_: agent.hear(INTERRUPT))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: agent.end(SAVE_SECONDS))
    return agent.wait()


WHOLE_BYTES = 64 << 20
"""Files up to here are compared by all their bytes, larger ones by size and three parts."""
PART_BYTES = 1 << 20
Print = list[Any]
"""Size in bytes, and the SHA-256 of what is compared."""


def look(question: dict[str, Any]) -> dict[str, Any]:
    """The answer to a question."""
    folder = Path(question["folder"])
    there = folder.is_dir()
    if there:
        os.chdir(folder)
    found: dict[str, Any] = {"yuan-train": __version__, "folder": there}
    found["names"] = {name: _addresses(name) for name in question.get("names", ())}
    if question.get("port") is not None:
        found["port"] = usable_port(question["port"])
    found["files"] = dict(prints(question.get("paths", ()))) if there else {}
    if question.get("mark"):
        found["mark"] = _make_mark(folder / question["mark"])
    if question.get("remove"):
        (folder / question["remove"]).unlink(missing_ok=True)
    if question.get("seen"):
        path = folder / question["seen"]
        # Listing a folder makes a network file system look again.
        found["seen"] = path.parent.is_dir() and path.name in os.listdir(path.parent)
    return found


def prints(paths: Sequence[str]) -> Iterator[tuple[str, Print]]:
    """Each file that is there, of folders all within, with its print."""
    for name in paths:
        path = Path(name)
        if path.is_dir():
            for one in sorted(path.rglob("*")):
                if one.is_file():
                    yield str(one), _print(one)
        elif path.is_file():
            yield name, _print(path)


def _print(path: Path) -> Print:
    size, found = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while part := file.read(PART_BYTES):
                found.update(part)
        else:
            for start in (0, size // 2, size - PART_BYTES):
                file.seek(start)
                found.update(file.read(PART_BYTES))
    return [size, found.hexdigest()]


def _addresses(name: str) -> list[str]:
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError):
        return []


def usable_port(wanted: int) -> int:
    """The port if it is free on this machine, else another that is."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    return wanted


def _make_mark(path: Path) -> str | None:
    """Make a file, and its folder; returns what is wrong."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        return f"{path.parent}: {error.strerror}"
    return None


def receive(stream: IO[bytes], folder: Path) -> int:
    """Write the files of the stream; names are relative to the folder, or absolute. Returns their number."""
    count = 0
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            source = archive.extractfile(member)
            assert source is not None, "the sender packs files alone"
            target = folder / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                with draft.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                draft.chmod(member.mode)
                os.utime(draft, (member.mtime, member.mtime))
                draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)
            count += 1
    return count


def main(what: str, words: Sequence[str]) -> int:
    """Do what another machine asks for; returns the exit code."""
    if what == "run":
        return run(words)
    print(
        json.dumps(look(json.loads(words[0])))
        if what == "look"
        else receive(sys.stdin.buffer, Path(words[0]))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
