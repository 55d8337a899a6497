"""The clock of the training steps: no second of the run is lost between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from yuan_train.parallel.device import Device


class StepClock:
    """Seconds of each training step, from the end of the last synchronisation to the end of this one.

    A card works behind the host's back: the optimizer step is only enqueued when the host has done with a
    step, and weights may be on their way until the next forward waits for them. One clock that runs on, and
    is read when the device has finished its compute, loses none of this between two steps.
    """

    def __init__(
        self, synchronise: Callable[[], None], *, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """`synchronise` waits until the device has finished all that was enqueued; `now` is in seconds."""
        self._synchronise = synchronise
        self._now = now
        synchronise()
        self._since = now()

    def lap(self) -> float:
        """Seconds since the clock was made or since the last lap, pauses left out; waits for the device."""
        self._synchronise()
        end = self._now()
        seconds, self._since = end - self._since, end
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what belongs to no step, such as validation; waits for the device before and after."""
        self._synchronise()
        start = self._now()
        yield
        self._synchronise()
        self._since += self._now() - start


def device_clock(device: Device) -> StepClock:
    """The clock of a device; a CPU has finished when the host has."""
    # Of the compute alone: weights on their way must not hold up the next step's first layers.
    return StepClock(device.finish_compute, now=device.now)
