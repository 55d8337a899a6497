"""Host memory of a device, which copies to and from it.

Memory that a card copies to and from is mapped once, registered with CUDA, handed out in pieces. Torch's
allocator of pinned memory rounds every block up to a power of two. A slab takes what is asked for, and is
shared memory, which the kernel counts apart from what a simulated card takes.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch

from yuan_train.config.errors import HostMemoryError
from yuan_train.config.units import show_bytes
from yuan_train.parallel.device import Device

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
