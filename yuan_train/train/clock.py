"""The clock of the training steps: no second of the run is lost between two of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from yuan_train.parallel.device import Device
from yuan_train.parallel.grid import RankCoord
from yuan_train.parallel.groups import guard_world_collective


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


ROUNDS = 16
"""All-gathers whose bounds are intersected; the one that was delayed least decides."""


@dataclass(frozen=True)
class SharedClock:
    """Turns this rank's `time.perf_counter` into seconds that mean the same on all ranks."""

    origin_seconds: float
    """This rank's clock when the shared clock is 0."""
    error_seconds: float
    """The shared clock is off by no more than this; 0 on rank 0, whose clock it is."""
    token: int
    """The same on all ranks that share it, and on no others."""

    def of(self, seconds: float) -> float:
        """The shared clock, when this rank's clock is at `seconds`."""
        return seconds - self.origin_seconds


def share_clock(coord: RankCoord) -> SharedClock:
    """The clock that all ranks share, which starts now; collective over all ranks."""
    token = random.getrandbits(48)
    if not dist.is_initialized():
        return SharedClock(time.perf_counter(), 0.0, token)
    times = torch.zeros(ROUNDS, 2, dtype=torch.float64)
    with guard_world_collective(coord, "the comparison of the ranks' clocks"):
        for number in range(ROUNDS):
            times[number, 0] = time.perf_counter()
            _all_gather(times[number, :1])
            times[number, 1] = time.perf_counter()
        gathered = _all_gather(torch.cat([times.flatten(), torch.tensor([token], dtype=torch.float64)]))
    first = gathered[0]
    reference_R2 = first[:-1].view(ROUNDS, 2)
    offset, error = bound_offset(times, reference_R2) if coord.rank else (0.0, 0.0)
    return SharedClock(float(reference_R2[0, 0]) + offset, error, int(first[-1]))


def bound_offset(own_R2: torch.Tensor, reference_R2: torch.Tensor) -> tuple[float, float]:
    """Own clock minus the reference's, in seconds, and how far off that may be.

    Of each of R collectives, [R, 2] are its begin and end on a clock. Data of each end has reached the other
    before the collective ended there, so no collective ends on one clock before it begins on the other:
    own begin - reference end <= offset <= own end - reference begin, for every one of them.
    """
    lowest = float((own_R2[:, 0] - reference_R2[:, 1]).max())
    highest = float((own_R2[:, 1] - reference_R2[:, 0]).min())
    return (lowest + highest) / 2, (highest - lowest) / 2


def _all_gather(values: torch.Tensor) -> list[torch.Tensor]:
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    return gathered
