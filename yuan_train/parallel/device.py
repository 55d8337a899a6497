"""The device on which a rank computes: a CPU or a card. All that the engine asks of CUDA, it asks here.

The host only enqueues what a card does. A card has a stream of compute, to which all belongs that is called
on its tensors, and streams of copies beside it; a mark is a point of a stream. On a CPU all has happened when
a call returns.

Between a card and its host copies run beside the compute, first in, first out; the link of a simulated card
is a thread that takes as long. Memory of the host that a card copies to and from is mapped once, registered
with CUDA, handed out in pieces (`HostSlab`). Torch's allocator of pinned memory rounds every block up to a
power of two. A slab takes what is asked for, and is shared memory, which the kernel counts apart from what a
simulated card takes.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import queue
import re
import resource
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from yuan_train.config.errors import HostMemoryError
from yuan_train.config.units import show_bytes
from yuan_train.parallel.activity import Activity, during
from yuan_train.schedule.step import Step

Copy = Callable[[], None]

MESSAGE_CTAS = 4
"""Thread blocks of an NCCL communicator of two ranks that carries messages.

Each takes an SM from the compute, and has buffers on the card; by default there are up to 32, for the rate of
NVLink. A message crosses a NIC or PCIe with fewer than four (an estimate: it was not measured on cards).
"""


class Mark:
    """A point of a stream: what was enqueued there before it. On a CPU, as here, it has happened."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def query(self) -> bool:
        """Whether the device has come to it; does not wait."""
        return True

    def wait(self) -> None:
        """Make the compute that is enqueued next wait for it. On a card the host goes on."""

    def finish(self) -> None:
        """Make the host wait for it."""

    def seconds_since(self, earlier: Any) -> float:
        """Device seconds between two timed marks of a device; both must have been waited for."""
        return self._seconds - earlier._seconds


class Stream:
    """What a card does beside its compute. On a CPU, as here, there is nothing to overlap with."""

    def run(self, work: Callable[[], None]) -> Mark:
        """Enqueue what `work` calls, after the compute that is enqueued now; its end."""
        work()
        return Mark()


@dataclass(frozen=True)
class CardMemory:
    """Bytes of a card: `reserved` by the allocator of this process, of them `allocated` for tensors."""

    total: int
    free: int
    """What no process has."""
    allocated: int
    reserved: int
    most_allocated: int
    """Since the process started, or since `reset_peak_memory`; so `most_reserved`."""
    most_reserved: int

    @property
    def foreign(self) -> int:
        """What others than the allocator hold: context, communicators, other processes."""
        return max(0, self.total - self.free - self.reserved)


@dataclass(frozen=True)
class CardFacts:
    """What tells cards apart, and what this torch can do with one."""

    name: str
    """As the driver gives it."""
    memory: int
    """Bytes, as torch reports them: less than what is sold."""
    capability: tuple[int, int]
    has_bf16: bool
    """Whether the card multiplies bf16 itself."""
    architectures: tuple[str, ...]
    """For which this torch has code: `sm_80`, or `compute_90` where the driver compiles it."""
    cuda: str | None
    """With which this torch was built; None on ROCm."""
    driver: str | None
    """The newest CUDA that the driver knows."""
    pci_address: str | None
    """As sysfs writes it; None if torch does not tell. Numbers of NVML would not do: they know nothing of
    CUDA_VISIBLE_DEVICES."""


class Device:
    """Where a rank computes: here the host itself, a CPU."""

    torch = torch.device("cpu")
    """Where its tensors are."""
    is_card = False
    """Whether it works behind the host's back, in memory of its own."""
    library: Literal["gloo", "nccl"] = "gloo"
    """What moves tensors between devices of this kind."""

    def message_options(self, timeout: timedelta) -> Any:
        """The `pg_options` of a process group of `library` that carries messages beside the compute; None:
        its own."""
        return None

    def use(self) -> None:
        """Let what this thread enqueues belong to this device. A thread that has not would make a context on
        the first card, whichever its process uses."""

    def mark(self, *, timed: bool = False) -> Mark:
        """A mark at the end of the compute that is enqueued now; `timed` ones can be subtracted."""
        return Mark(time.perf_counter() if timed else 0.0)

    def make_stream(self) -> Stream:
        """A stream beside the compute, first in, first out."""
        return Stream()

    def finish_compute(self) -> None:
        """Make the host wait for the compute that is enqueued, and not for copies beside it."""

    def finish(self) -> None:
        """Make the host wait for all that is enqueued."""

    def now(self) -> float:
        """Seconds of the host's clock."""
        return time.perf_counter()

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in host memory that the device copies from and to without making the host wait."""
        return torch.empty(shape, dtype=dtype)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host in such memory: itself, if it is."""
        return tensor

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of the host to the device, for the compute that is enqueued next."""
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the device in host memory; the host waits for all compute that is enqueued."""
        return tensor

    def start_to_host(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Start to copy a tensor of the device to the host, after the compute that is enqueued; the host may
        read the copy after `finish_compute`."""
        host.copy_(tensor)

    def register(self, pages: torch.Tensor, what: str) -> None:
        """Make whole pages [n] of the host such memory, until the process ends. Raises HostMemoryError, which
        names `what` they are for, if there may not be so much."""

    def memory(self) -> CardMemory | None:
        """Of a card; None on a CPU, whose memory the system counts."""
        return None

    def largest_free_block(self) -> int:
        """Bytes of the largest piece that the allocator has and no tensor holds; 0 on a CPU. Slow."""
        return 0

    def reset_peak_memory(self) -> None:
        """Start the peaks of `memory` anew."""

    def empty_cache(self) -> None:
        """Return what the allocator has and no tensor holds."""

    def facts(self) -> CardFacts | None:
        """Of a card; None on a CPU."""
        return None


CPU = Device()


class _CudaMark(Mark):
    __slots__ = ("_event",)

    def __init__(self, *, timed: bool = False) -> None:
        """On the current stream of this thread."""
        self._event = torch.cuda.Event(enable_timing=timed)
        self._event.record()

    def query(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Any) -> float:
        return earlier._event.elapsed_time(self._event) / 1e3


class _CudaStream(Stream):
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> Mark:
        # Taken here: inside the context below the current stream is the link's own.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
            return _CudaMark()


class CudaDevice(Device):
    """A card of CUDA or ROCm, by the number that torch gives it; see `Device`."""

    is_card = True
    library: Literal["gloo", "nccl"] = "nccl"

    def __init__(self, number: int) -> None:
        self.torch = torch.device("cuda", number)

    def message_options(self, timeout: timedelta) -> Any:
        nccl: Any = dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue]
        # A message that waits for free SMs behind the compute would hold up another card.
        options = nccl.Options(is_high_priority_stream=True)
        options.config.max_ctas = MESSAGE_CTAS
        # Torch warns if it differs from that of the group.
        options._timeout = timeout
        return options

    def use(self) -> None:
        torch.cuda.set_device(self.torch)
        # The first call of a backward's thread is cuBLAS's, which makes what it misses.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA")

    def mark(self, *, timed: bool = False) -> Mark:
        return _CudaMark(timed=timed)

    def make_stream(self) -> Stream:
        return _CudaStream(self.torch)

    def finish_compute(self) -> None:
        torch.cuda.current_stream(self.torch).synchronize()

    def finish(self) -> None:
        torch.cuda.synchronize(self.torch)

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def start_to_host(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        host.copy_(tensor, non_blocking=True)

    def register(self, pages: torch.Tensor, what: str) -> None:
        runtime: Any = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(pages.data_ptr(), pages.numel(), 0))
        if status != 0:
            raise HostMemoryError(
                f"{what}: CUDA cannot pin {show_bytes(pages.numel())} of host memory (error {status}); raise "
                "the limit of locked memory (`ulimit -l unlimited`; `yuan-train doctor` shows it)"
            )

    def memory(self) -> CardMemory | None:
        free, total = torch.cuda.mem_get_info(self.torch)
        return CardMemory(
            total=total,
            free=free,
            allocated=torch.cuda.memory_allocated(self.torch),
            reserved=torch.cuda.memory_reserved(self.torch),
            most_allocated=torch.cuda.max_memory_allocated(self.torch),
            most_reserved=torch.cuda.max_memory_reserved(self.torch),
        )

    def largest_free_block(self) -> int:
        segments: Any = torch.cuda.memory_snapshot()
        own = [segment for segment in segments if segment["device"] == self.torch.index]
        blocks = [block for segment in own for block in segment["blocks"]]
        return max((block["size"] for block in blocks if block["state"] == "inactive"), default=0)

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def facts(self) -> CardFacts | None:
        return self._facts

    @cached_property
    def _facts(self) -> CardFacts:
        card: Any = torch.cuda.get_device_properties(self.torch)
        capability = (int(card.major), int(card.minor))
        on_rocm = torch.version.hip is not None
        address = None
        if hasattr(card, "pci_domain_id"):
            address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
        return CardFacts(
            name=card.name,
            memory=card.total_memory,
            capability=capability,
            has_bf16=on_rocm or capability >= (8, 0),
            architectures=tuple(torch.cuda.get_arch_list()),
            cuda=torch.version.cuda,
            driver=None if on_rocm else cuda_of_driver(),
            pci_address=address,
        )


def name_and_memory(device: torch.device) -> tuple[str, int] | None:
    """What torch calls a card, and its bytes; None of a processor."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory


def visible_cards() -> list[Device]:
    """The cards that torch finds, by number; makes no context on them."""
    if not torch.cuda.is_available():
        # A driver that is too old for torch still counts its cards.
        return []
    return [CudaDevice(number) for number in range(torch.cuda.device_count())]


def cuda_of_driver() -> str | None:
    """The newest CUDA that the driver knows: `12.4`."""
    read = getattr(torch._C, "_cuda_getDriverVersion", None)  # pyright: ignore[reportPrivateUsage]
    version = int(read()) if read is not None else 0
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


class Transfer(Protocol):
    """A copy that has begun."""

    def wait(self) -> None:
        """Make the compute that follows wait for its end: a stream on CUDA, else the host."""
        ...

    def finish(self) -> None:
        """Make the host wait for its end."""
        ...


class HostLink(Protocol):
    """One direction between a card and its host."""

    def begin(self, copy: Copy, num_bytes: int) -> Transfer:
        """Begin a copy of what the compute so far has made; does not wait for it. `copy` may be called later,
        in another thread."""
        ...


def begin_copy(link: HostLink, source: torch.Tensor, target: torch.Tensor) -> Transfer:
    """Begin to copy a tensor over a link, without making the host wait where the memory allows."""
    return begin_copies(link, [(source, target)])


def begin_copies(link: HostLink, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
    """The same of several, each with its target, as one copy."""

    def copy() -> None:
        for source, target in pairs:
            target.copy_(source, non_blocking=True)

    return link.begin(copy, sum(source.numel() * source.itemsize for source, _ in pairs))


@dataclass(frozen=True)
class HostLinks:
    """The two directions between a card and its host."""

    down: HostLink
    up: HostLink
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


def make_link(device: Device, *, bytes_per_second: float | None = None) -> HostLink:
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


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt."""
_LARGEST_KEPT = 32 << 20
"""Bytes: the largest M_MMAP_THRESHOLD that glibc accepts; it maps larger blocks from the system each time."""

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory_bytes(device: Device) -> int:
    """Peak bytes held since the process started, or since `reset_peak_memory`; on CUDA by tensors."""
    if (card := device.memory()) is not None:
        return card.most_allocated
    if STATUS.exists():
        return _resident("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_footprint_bytes(device: Device) -> int:
    """Peak bytes taken of a device since the process started, in the terms of a plan's memory forecast.

    On CUDA that is more than tensors: the allocator's blocks at their peak, with what fragmentation wastes,
    and what is outside of it now (context, kernels, communicators), which the forecast calls `reserved`. The
    driver does not say whose that is, so other processes on the card count too. On a CPU as
    `peak_memory_bytes`.
    """
    card = device.memory()
    return peak_memory_bytes(device) if card is None else card.most_reserved + card.foreign


def can_track_memory(device: Device) -> bool:
    """Whether `held_bytes` and `reset_peak_memory` work here: on CUDA, and on Linux."""
    return device.is_card or (STATUS.exists() and CLEAR.exists())


def held_bytes(device: Device) -> int:
    """Bytes held now."""
    card = device.memory()
    return _resident("VmRSS") if card is None else card.allocated


def reset_peak_memory(device: Device) -> None:
    """Start a new peak from what is held now."""
    if device.is_card:
        device.reset_peak_memory()
    else:
        CLEAR.write_text("5")


def keep_freed_memory(device: Device) -> None:
    """Let the CPU allocator keep freed memory for the next micro-batch. Nothing on CUDA, or without glibc.

    Returned to the system, every page would have to be cleared again: a tenth of a small layer's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if not device.is_card else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, -1)


@contextmanager
def long_lived_objects() -> Iterator[None]:
    """Take all objects of the process as lasting, so that a collection looks through the new ones alone.

    A process with torch has hundreds of thousands: each collection takes a tenth of a second over them.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release_free_memory(device: Device) -> None:
    """Return free memory to the card or the system, as far as the allocator can."""
    gc.collect()
    if device.is_card:
        device.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None, f"{STATUS} has no {field}"
    return int(found[1]) * 1024
