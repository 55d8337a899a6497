"""Bytes that a card really holds: the allocator's on CUDA, the process's resident memory on a CPU."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import sys
from pathlib import Path

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt."""
_LARGEST_KEPT = 32 << 20
"""Bytes: larger blocks glibc takes from the system each time, whatever it is told."""

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes held since the start, or since `begin_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():
        return _resident("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def can_follow(device: torch.device) -> bool:
    """Whether `held_bytes` and `begin_peak` work here: on CUDA and on Linux."""
    return device.type == "cuda" or (STATUS.exists() and CLEAR.exists())


def held_bytes(device: torch.device) -> int:
    """Bytes held now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident("VmRSS")


def begin_peak(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        CLEAR.write_text("5")


def keep_freed_memory(device: torch.device) -> None:
    """Let the allocator of a CPU keep what is freed for the next micro-batch, instead of returning it to the
    system, which has to clear every page anew: a tenth of a small layer's time. Only glibc has the switch."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if device.type == "cpu" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, -1)


def give_back_memory(device: torch.device) -> None:
    """Return what is free to the card or the system, as far as the allocator can."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None, f"{STATUS} has no {field}"
    return int(found[1]) * 1024
