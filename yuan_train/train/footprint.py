"""Measured memory of a device: of a card, the allocator's bytes or all that is taken; of a CPU, the process's
resident memory."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from yuan_train.parallel.device import Device

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
    if card is None:
        return peak_memory_bytes(device)
    outside = max(0, card.total - card.free - card.reserved)
    return card.most_reserved + outside


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
