"""Signals: heard while something runs, and sent by Linux when a process's parent dies.

Its own module: machine and train share no floor but this one.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import FrameType

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal a process gets when its parent dies."""
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


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """In a process that is being started: get a signal if the starting one is killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
