"""Signals, heard while something runs. Its own module: machine and train share no floor but this one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextmanager
def hearing(handlers: Mapping[signal.Signals, Handler]) -> Generator[None]:
    """Inside, these handlers take the signals; behind it, who took them before. Of the main thread only."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: whoever took it is not Python's, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
