"""megatron-core's timers, which its schedules start and stop around each forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from yuan_train.parallel.executor import Stopwatch

_COMPUTE = ("forward-compute", "backward-compute")


class Timers:
    """Lets our stopwatch run while megatron-core computes, so that simulated cards are slow here too."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._running: AbstractContextManager[None] | None = None
        self._compute, self._other = _Compute(self), _Other()

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """What is called `start` and `stop` on."""
        return self._compute if name in _COMPUTE else self._other

    def start(self) -> None:
        """Compute begins."""
        self._running = self._stopwatch.running()
        self._running.__enter__()

    def stop(self) -> None:
        """Compute ends."""
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no compute, in the middle of it."""
        was_running = self._running is not None
        self.stop()
        yield
        if was_running:
            self.start()


class _Compute:
    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def start(self, barrier: bool = False) -> None:
        self._timers.start()

    def stop(self, barrier: bool = False) -> None:
        self._timers.stop()


class _Other:
    def start(self, barrier: bool = False) -> None:
        """Of a part that we do not measure."""

    def stop(self, barrier: bool = False) -> None:
        """See `start`."""
