"""python -m yuan_train.machine.look QUESTION: what a starter of ranks must know of a machine, as JSON.

The question is JSON: `folder` to work in, `paths` of files and folders, `names` to resolve, `port` to try,
and a file in a folder that may be shared: to make (`mark`), to look for (`seen`), to `remove`.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from yuan_train import __version__

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
        found["seen"] = _sees(folder / question["seen"])
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


def _sees(path: Path) -> bool:
    # Listing a folder makes a network file system look again.
    return path.parent.is_dir() and path.name in os.listdir(path.parent)


if __name__ == "__main__":
    print(json.dumps(look(json.loads(sys.argv[1]))))
