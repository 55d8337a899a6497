"""The directions between a device and its host: copies beside the compute, first in, first out."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

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


def make_link(device: torch.device, *, bytes_per_second: float | None = None) -> Link:
    """One direction of a device's link. `bytes_per_second`: that of a simulated card; None: as it comes."""
    if device.type == "cuda":
        return _StreamLink(device)
    return _DirectLink() if bytes_per_second is None else _SlowLink(bytes_per_second)


class _Done:
    """A copy that has ended."""

    def wait(self) -> None:
        return

    def finish(self) -> None:
        return


class _DirectLink:
    """From memory to memory there is nothing to overlap with: the copy runs at once."""

    def begin(self, copy: Copy, num_bytes: int) -> Transfer:
        copy()
        return _Done()


class _OnStream:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()


class _StreamLink:
    """A stream of its own. Copies must be non-blocking, and of registered host memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def begin(self, copy: Copy, num_bytes: int) -> Transfer:
        # Taken here: inside the context below the current stream is the link's own.
        compute = torch.cuda.current_stream()
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            copy()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _OnStream(event)


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
