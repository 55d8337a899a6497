"""Chunks of optimizer state on a disk: read, stepped on the host and written back, side by side.

Their gradient stays on the card until they have been read: only chunks in flight take host memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from yuan_train.config import disk
from yuan_train.parallel.tiers.disk import DiskStore, FilePiece
from yuan_train.parallel.tiers.host_state import HostChunk, HostLinks


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

        def copy() -> None:
            self.gradient.copy_(source, non_blocking=True)

        self.links.down.begin(copy, source.numel() * source.itemsize).finish()
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
        master, exp_avg, exp_avg_sq = (piece.tensor for piece in pieces)
        chunks.append(
            DiskChunk(
                layout=layout,
                start=start + first,
                master=master,
                gradient=master.new_empty(0),
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
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
    return min(disk.DISK_CHUNK, -(-num_elements // page) * page)
