"""What a command is doing, on a terminal: a line that is drawn over itself, and gone at the end.

Where the output is no terminal (a file, a pipe, a test) nothing is written.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

WIDTH = 24
"""Characters of a bar."""
PERIOD = 0.25
"""Seconds between two drawings."""


class Bar:
    """How much of a number of pieces of work is done; `step` says that one more is."""

    def __init__(self, what: str, total: int | None, stream: TextIO) -> None:
        """Without a total, only the seconds are counted."""
        self._what, self._total, self._stream = what, total, stream
        self._begun = time.monotonic()
        self._done = 0

    def step(self, what: str | None = None) -> None:
        """One piece more; `what` is being done now."""
        self._done += 1
        self._what = what or self._what

    def line(self) -> str:
        """As it is drawn."""
        seconds = f"{time.monotonic() - self._begun:.0f} s"
        if self._total is None:
            return f"{self._what} ... {seconds}"
        full = WIDTH * min(self._done, self._total) // max(self._total, 1)
        bar = "#" * full + "-" * (WIDTH - full)
        return f"[{bar}] {min(self._done, self._total)}/{self._total}  {self._what}  {seconds}"

    def draw(self) -> None:
        """Over what was drawn before."""
        self._stream.write(f"\r\x1b[K{self.line()[:100]}")
        self._stream.flush()

    def clear(self) -> None:
        """Leave an empty line."""
        self._stream.write("\r\x1b[K")
        self._stream.flush()


@contextmanager
def working(what: str, total: int | None = None, stream: TextIO | None = None) -> Generator[Bar]:
    """Draw a bar (None: seconds alone) on `stream`, or stderr, while the block runs."""
    out: TextIO = sys.stderr if stream is None else stream
    bar = Bar(what, total, out)
    if not out.isatty():
        yield bar
        return
    ended = threading.Event()

    def draw() -> None:
        while not ended.wait(PERIOD):
            bar.draw()

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        yield bar
    finally:
        ended.set()
        thread.join()
        bar.clear()
