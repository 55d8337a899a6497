"""Optimizer state on the host, in chunks: gradients come down, the host steps, weights go up, side by side.

While the host steps one chunk, the gradients of the next ones are on their way down and the weights of those
before on their way up. A chunk's gradient lies where its weights are rounded for the way up, so that the host
holds four numbers by parameter and no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from yuan_train.parallel.device import Device
from yuan_train.parallel.tiers.disk import DiskStore
from yuan_train.parallel.tiers.link import Link, Transfer, begin_copy, make_link
from yuan_train.parallel.tiers.slab import HostSlab

CHUNK = 1 << 22
"""Elements of a chunk; a multiple of what any processor steps at a time, so that chunks change no bit."""


@dataclass(frozen=True)
class HostLinks:
    """The two directions between a card and its host."""

    down: Link
    up: Link


@dataclass(frozen=True)
class HostPlace:
    """Where offloaded state goes: memory of the host, a disk, and the links to it."""

    slab: HostSlab
    links: HostLinks
    disk: DiskStore | None = None


def make_host_place(num_bytes: int, *, device: Device, disk: DiskStore | None = None) -> HostPlace:
    """The host memory for so much offloaded state of a rank, beside what is on its disk.

    Raises HostMemoryError if the host has not so much.
    """
    slab = HostSlab(num_bytes, device=device, what="optimizer_offload")
    links = HostLinks(down=make_link(device), up=make_link(device))
    return HostPlace(slab, links, disk)


@dataclass
class HostChunk:
    """Consecutive elements of an optimizer shard on the host: flat buffers [k], of matrices or of none."""

    layout: int
    """Number of the slice in its bucket, if the state is sharded; else 0."""
    start: int
    """Of the first element, in that layout."""
    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    decays: bool
    links: HostLinks
    _source: torch.Tensor | None = field(default=None, repr=False)
    """On the card, what comes down: its memory must not be used again before the copy has ended."""
    _coming: Transfer | None = field(default=None, repr=False)
    _going: Transfer | None = field(default=None, repr=False)

    def start_gradient(self, reduced: torch.Tensor) -> None:
        """Begin to copy the gradient down from the reduced one of the layout, [n] on the card."""
        source = self._of(reduced)
        # A step that was skipped has not waited.
        self._finish_coming()
        # Of a chunk that no forward has used since: on their way up from the buffer that is filled now.
        self.finish_weights()
        self._source = source
        self._coming = begin_copy(self.links.down, source, self.gradient)

    def finish_gradient(self) -> None:
        """Block the host until the gradient is there, and the step may begin."""
        self._finish_coming()
        if self._going is not None:
            # The host writes next what is on its way up; a wait of the card's stream would not hold it back.
            self._going.finish()
            self._going = None

    def start_weights(self, weights: torch.Tensor) -> None:
        """Begin to copy the stepped weights up to those of the layout, [n] on the card; the gradient is lost.

        If the copy has begun since `finish_weights`, nothing is left to do.
        """
        if self._going is not None:
            return
        target, source = self._of(weights), self.master
        if target.dtype != source.dtype:
            source = self.gradient.view(target.dtype)[: target.numel()]
            source.copy_(self.master)
        self._going = begin_copy(self.links.up, source, target)

    @property
    def is_going(self) -> bool:
        """Whether weights are on their way up that nothing has waited for."""
        return self._going is not None

    def finish_weights(self) -> None:
        """Make the compute wait until the weights are there."""
        if self._going is not None:
            self._going.wait()
            self._going = None

    def settle(self) -> None:
        """Wait until the buffers have what was stepped: at once, in host memory."""

    def _finish_coming(self) -> None:
        if self._coming is not None:
            self._coming.finish()
            self._coming = self._source = None

    def _of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.master.numel()]


def chunk_ranges(num_elements: int, num_matrix_elements: int) -> Iterator[tuple[int, int, bool]]:
    """The chunks of a shard: (first, last, whether weights decay); matrices come before vectors."""
    for first, last, decays in ((0, num_matrix_elements, True), (num_matrix_elements, num_elements, False)):
        for start in range(first, last, CHUNK):
            yield start, min(start + CHUNK, last), decays
