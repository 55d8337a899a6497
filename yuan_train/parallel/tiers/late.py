"""The host's update of a step, made while the next step computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class LateUpdate:
    """A thread that makes one update at a time."""

    def __init__(self) -> None:
        self._updates: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._ended.set()
        self._fault: BaseException | None = None
        threading.Thread(target=self._run, daemon=True, name="late update").start()

    def begin(self, update: Callable[[], None]) -> None:
        """Begin an update; the one before must have been waited for."""
        assert self._ended.is_set()
        self._ended.clear()
        self._updates.put(update)

    def wait(self) -> None:
        """Wait for the update, and raise what it has raised; nothing to do if there is none."""
        self._ended.wait()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _run(self) -> None:
        while True:
            update = self._updates.get()
            try:
                update()
            except BaseException as error:
                self._fault = error
            del update
            self._ended.set()
