"""Optimizer state on the host, in chunks: gradients come down, the host steps, weights go up, side by side.

While the host steps one chunk, the gradients of the next ones are on their way down and the weights of those
before on their way up. A chunk's gradient lies where its weights are rounded for the way up, so that the host
holds four numbers by parameter and no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from yuan_train.config import units
from yuan_train.parallel.device import Device
from yuan_train.parallel.tiers.disk import DiskStore, FilePiece
from yuan_train.parallel.tiers.slab import HostSlab, Link, Transfer, begin_copy, make_link

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


@dataclass
class DiskChunk(HostChunk):
    """A chunk whose buffers are those of a slot from its read to its write, and else those of the file."""

    store: DiskStore = field(kw_only=True, repr=False)
    number: int = field(kw_only=True)
    pieces: tuple[FilePiece, ...] = field(kw_only=True, repr=False)
    _slot: int | None = field(default=None, repr=False)

    def start_gradient(self, reduced: torch.Tensor) -> None:
        """Remember where the reduced gradient of the layout, [n] on the card, is; begin to read."""
        self._source = self._of(reduced)
        self.store.read_ahead()

    def finish_gradient(self) -> None:
        """Block the host until state and gradient are there, and the step may begin."""
        source = self._source
        assert source is not None, "no gradient was reduced"
        self._slot, rows = self.store.load(self.number)
        self.master, self.exp_avg, self.exp_avg_sq, self.gradient = rows
        begin_copy(self.links.down, source, self.gradient).finish()
        self._source = None
        self.finish_weights()

    def start_weights(self, weights: torch.Tensor) -> None:
        """As that of a chunk in host memory; and begin to write the stepped state back.

        If nothing was stepped, as after loading a checkpoint, the weights are set from the file.
        """
        if self._slot is None:
            if self._going is None:
                self._of(weights).copy_(self.master)
            return
        super().start_weights(weights)
        self.store.store(self.number, self._slot, self._going)
        self._slot = None
        self.master, self.exp_avg, self.exp_avg_sq = (piece.tensor for piece in self.pieces)
        self.gradient = self.gradient[:0]

    def settle(self) -> None:
        """Wait until the file has what was stepped."""
        self.store.settle()


def disk_chunks(
    states: tuple[FilePiece, ...],
    store: DiskStore,
    links: HostLinks,
    *,
    layout: int,
    start: int,
    decays: bool,
) -> tuple[DiskChunk, ...]:
    """The chunks of a shard, whose master and moments are `states`; added to the store."""
    chunks: list[DiskChunk] = []
    n = states[0].tensor.numel()
    for first in range(0, n, store.chunk):
        last = min(first + store.chunk, n)
        pieces = tuple(
            replace(
                state, offset=state.offset + first * state.tensor.itemsize, tensor=state.tensor[first:last]
            )
            for state in states
        )
        master, *averages = (piece.tensor for piece in pieces)
        chunks.append(
            DiskChunk(
                layout,
                start + first,
                master,
                master.new_empty(0),
                *averages,
                decays=decays,
                links=links,
                store=store,
                number=store.add(pieces),
                pieces=pieces,
            )
        )
    return tuple(chunks)


def chunk_elements(num_elements: int) -> int:
    """Elements of a chunk, of so many on the disk: a multiple of a page's, in whatever precision."""
    page = 1024
    return min(units.DISK_CHUNK, -(-num_elements // page) * page)
