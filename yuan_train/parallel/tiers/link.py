"""The directions between a device and its host: copies beside the compute, first in, first out."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

from yuan_train.parallel.device import Device, Stream

Copy = Callable[[], None]


class Transfer(Protocol):
    """A copy that has begun."""

    def wait(self) -> None:
        """Make the compute that follows wait for its end: a stream on CUDA, else the host."""
        ...

    def finish(self) -> None:
        """Make the host wait for its end."""
        ...


class Link(Protocol):
    """One direction."""

    def begin(self, copy: Copy, num_bytes: int) -> Transfer:
        """Begin a copy of what the compute so far has made; does not wait for it. `copy` may be called later,
        in another thread."""
        ...


def begin_copy(link: Link, source: torch.Tensor, target: torch.Tensor) -> Transfer:
    """Begin to copy a tensor over a link, without making the host wait where the memory allows."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return link.begin(copy, source.numel() * source.itemsize)


def make_link(device: Device, *, bytes_per_second: float | None = None) -> Link:
    """One direction of a device's link. `bytes_per_second`: that of a simulated card; None: as it comes."""
    if device.is_card or bytes_per_second is None:
        return _StreamLink(device.make_stream())
    return _SlowLink(bytes_per_second)


class _StreamLink:
    """A stream of its own. Copies must be non-blocking, and of registered host memory."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def begin(self, copy: Copy, num_bytes: int) -> Transfer:
        return self._stream.run(copy)


class _InThread:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.fault: BaseException | None = None

    def wait(self) -> None:
        self.ended.wait()
        if self.fault is not None:
            raise self.fault

    finish = wait


class _SlowLink:
    """The link of a simulated card: a thread that copies, and takes as long as the card's link would."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._jobs: queue.SimpleQueue[tuple[Copy, int, _InThread]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="link").start()

    def begin(self, copy: Copy, num_bytes: int) -> Transfer:
        transfer = _InThread()
        self._jobs.put((copy, num_bytes, transfer))
        return transfer

    def _run(self) -> None:
        free = 0.0
        while True:
            copy, num_bytes, transfer = self._jobs.get()
            free = max(free, time.perf_counter()) + num_bytes / self._bytes_per_second
            try:
                copy()
            except BaseException as error:
                transfer.fault = error
            # Until the next job comes, nothing here may hold what was copied.
            del copy
            time.sleep(max(0.0, free - time.perf_counter()))
            transfer.ended.set()
