"""Host memory for what comes and goes: ranges of bytes, taken and given back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from yuan_train.parallel.device import Device
from yuan_train.parallel.tiers.slab import HostSlab

PAGE = 4096
SMALLEST_BLOCK = 1 << 20
"""Bytes by which the pool grows, at least."""


@dataclass(frozen=True)
class HostRange:
    """Bytes [start, start + flat.numel()) of a block of the pool."""

    block: int
    start: int
    flat: torch.Tensor


class HostPool:
    """Grows by a slab when nothing fits, and never shrinks: after a step it has all that it needs, and no
    more than what was ever taken at once, as long as sizes come back."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._blocks: list[torch.Tensor] = []
        self._free: list[tuple[int, int, int]] = []
        """(block, start, length), sorted; neighbours are merged."""
        self.num_bytes = 0

    def take(self, num_bytes: int) -> HostRange:
        """A range of that many bytes. Raises HostMemoryError if the host has no more."""
        size = -(-num_bytes // PAGE) * PAGE
        # The tightest: what is larger is for what is larger.
        fitting = [(length, i) for i, (_, _, length) in enumerate(self._free) if length >= size]
        _, at = min(fitting, default=(0, None))
        if at is None:
            self._grow(size)
            return self.take(num_bytes)
        block, start, length = self._free.pop(at)
        if length > size:
            self._free.insert(at, (block, start + size, length - size))
        return HostRange(block, start, self._blocks[block][start : start + num_bytes])

    def give(self, taken: HostRange) -> None:
        """Give a range back."""
        size = -(-taken.flat.numel() // PAGE) * PAGE
        self._free.append((taken.block, taken.start, size))
        self._free.sort()
        merged: list[tuple[int, int, int]] = []
        for block, start, length in self._free:
            if merged and merged[-1][0] == block and sum(merged[-1][1:]) == start:
                block, start, length = block, merged[-1][1], merged.pop()[2] + length
            merged.append((block, start, length))
        self._free = merged

    def _grow(self, num_bytes: int) -> None:
        more = max(num_bytes, SMALLEST_BLOCK)
        slab = HostSlab(more, device=self.device, what="activation_offload")
        self._blocks.append(slab.take(more, torch.uint8))
        self._free.append((len(self._blocks) - 1, 0, more))
        self.num_bytes += more
