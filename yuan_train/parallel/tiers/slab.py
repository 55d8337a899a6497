"""Host memory of a device, and the copies between them: beside the compute, first in, first out.

Memory that a card copies to and from is mapped once, registered with CUDA, handed out in pieces. Torch's
allocator of pinned memory rounds every block up to a power of two. A slab takes what is asked for, and is
shared memory, which the kernel counts apart from what a simulated card takes.
"""

from __future__ import annotations

import math
import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from yuan_train.config.errors import HostMemoryError
from yuan_train.config.units import show_bytes
from yuan_train.parallel.activity import Activity, during
from yuan_train.parallel.device import Device, Stream
from yuan_train.schedule.step import Step

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
    return begin_copies(link, [(source, target)])


def begin_copies(link: Link, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
    """The same of several, each with its target, as one copy."""

    def copy() -> None:
        for source, target in pairs:
            target.copy_(source, non_blocking=True)

    return link.begin(copy, sum(source.numel() * source.itemsize for source, _ in pairs))


@dataclass(frozen=True)
class HostLinks:
    """The two directions between a card and its host."""

    down: Link
    up: Link
    pause: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered while the host waits for a copy, whose time is none of the compute."""

    def wait(self, step: Step, transfer: Transfer) -> None:
        """Wait for a copy that is, or is needed by, a step of a rank program."""
        with during(Activity("wait_copy", step)), self.pause():
            transfer.wait()


def make_links(
    device: Device,
    *,
    bytes_per_second: float | None = None,
    pause: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> HostLinks:
    """Both directions of a device's link, as `make_link` makes one."""
    down, up = (make_link(device, bytes_per_second=bytes_per_second) for _ in range(2))
    return HostLinks(down, up, pause)


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


class InThread:
    """Work that a thread does: a `Transfer`."""

    def __init__(self, work: Copy) -> None:
        self._work: Copy | None = work
        self.ended = threading.Event()
        self.fault: BaseException | None = None

    def run(self) -> None:
        """In the thread; what was worked on is then held no longer."""
        assert self._work is not None
        try:
            self._work()
        except BaseException as error:
            self.fault = error
        self._work = None
        self.ended.set()

    def wait(self) -> None:
        self.ended.wait()
        if self.fault is not None:
            raise self.fault

    finish = wait


class Threads:
    """Threads that take work in the order in which it is given."""

    def __init__(self, number: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[InThread] = queue.SimpleQueue()
        for _ in range(number):
            threading.Thread(target=self._run, daemon=True, name=name).start()

    def begin(self, work: Copy) -> InThread:
        """Let a thread do it; does not wait."""
        job = InThread(work)
        self._jobs.put(job)
        return job

    def _run(self) -> None:
        while True:
            self._jobs.get().run()


class _SlowLink:
    """The link of a simulated card: a thread that copies, and takes as long as the card's link would."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free = 0.0
        """When it has carried what it was given."""
        self._thread = Threads(1, "link")

    def begin(self, copy: Copy, num_bytes: int) -> Transfer:
        def work() -> None:
            self._free = max(self._free, time.perf_counter()) + num_bytes / self._bytes_per_second
            copy()
            time.sleep(max(0.0, self._free - time.perf_counter()))

        return self._thread.begin(work)


ALIGNMENT = 64
"""Bytes; where a piece begins, a vector of any processor begins."""
MAX_SHARE = 0.8
"""Of the available memory, what a slab may take; the rest is for the page cache and the data loader."""


class HostSlab:
    """`num_bytes` of host memory for a device; they stay as long as a piece of them does.

    Raises HostMemoryError if that is more than MAX_SHARE of what is available, or CUDA may not pin so much.
    """

    def __init__(self, num_bytes: int, *, device: Device, what: str) -> None:
        """`what` names the use, in errors."""
        available = available_bytes()
        if num_bytes > MAX_SHARE * available:
            raise HostMemoryError(
                f"{what}: needs {show_bytes(num_bytes)} of host memory, and {show_bytes(available)} are "
                f"available, of which at most {MAX_SHARE:.0%} are taken; let stages put less on the host, or "
                "run fewer ranks on this machine"
            )
        # Its pages are taken at once, on the NUMA node of this process: the next slab sees them gone.
        populated = getattr(mmap, "MAP_POPULATE", 0)
        pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | populated)
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self._used = 0
        self.num_bytes = num_bytes
        if num_bytes:
            # Copies then run beside the compute.
            device.register(self._bytes, what)

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """The next piece, [num_elements] of `dtype`, zero where nothing was written; never given back."""
        start, size = self._used, num_elements * dtype.itemsize
        assert start + size <= self.num_bytes, "the slab is too small"
        self._used += piece_bytes(num_elements, dtype)
        return self._bytes[start : start + size].view(dtype)


def piece_bytes(num_elements: int, dtype: torch.dtype) -> int:
    """What a piece takes of a slab."""
    return -(-num_elements * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def available_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> float:
    """Host memory that may still be taken here: what the kernel says, and the limit of the control group (v2)
    if that is less; inf where neither is told."""
    found = math.inf
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        if "MemAvailable" in lines:
            found = 1024.0 * int(lines["MemAvailable"].split()[0])
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and (most := limit.read_text(encoding="ascii").strip()) != "max":
        found = min(found, max(0.0, float(most) - float(used.read_text(encoding="ascii"))))
    return found
