"""SIGTERM stops a run after the current step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_sigterm() -> Iterator[list[bool]]:
    """While inside, SIGTERM only sets element 0 of the yielded list; the run stops after the current step."""
    stop_requested = [False]

    def request_stop(signum: int, frame: object) -> None:
        stop_requested[0] = True

    previous = signal.signal(signal.SIGTERM, request_stop)
    try:
        yield stop_requested
    finally:
        signal.signal(signal.SIGTERM, previous)
