"""Where the optimizer state of consecutive weights lies: on the card, in host memory, on a disk.

What is not on the card is stepped by the host, in chunks: gradients come down, the host steps, weights go up,
side by side. While the host steps one chunk, the gradients of the next ones are on their way down and the
weights of those before on their way up. A chunk's gradient lies where its weights are rounded for the way up,
so that the host holds four numbers by parameter and no more.

On a disk it is a file without a name, and chunks of it in slots of host memory. While one chunk is stepped,
the next ones are read and the ones before are written, by threads, around the page cache where the file
system allows it: else the cache would be a second copy in memory. The file has no name, so nothing of it is
left when the process ends, however it ends: what lasts is in checkpoints.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from yuan_train.config import units
from yuan_train.config.errors import DiskError, TrainingError
from yuan_train.config.units import DISK_SLOTS, DISK_STATES, show_bytes, show_seconds
from yuan_train.parallel.device import (
    Device,
    HostLinks,
    HostSlab,
    InThread,
    Threads,
    Transfer,
    begin_copy,
    piece_bytes,
)
from yuan_train.parallel.gradients import FlatBucket, Slice, master_dtype
from yuan_train.parallel.transport import Ranges

PAGE = 4096
"""Bytes; direct requests begin and end at multiples of it."""
AHEAD = 2
"""Chunks that are read before they are needed."""
NUM_THREADS = 2


def file_bytes(num_elements: int, dtype: torch.dtype) -> int:
    """What elements take of a file."""
    return -(-num_elements * dtype.itemsize // PAGE) * PAGE


@dataclass(frozen=True)
class FilePiece:
    """Consecutive elements of a file, from byte `offset` on; as a tensor [n], mapped."""

    offset: int
    tensor: torch.Tensor

    def part(self, first: int, last: int) -> FilePiece:
        """The elements [first, last) of these."""
        return FilePiece(self.offset + first * self.tensor.itemsize, self.tensor[first:last])


class DiskFile:
    """`num_bytes` of a disk, zero where nothing was written.

    Raises DiskError if the directory cannot be used, or the disk has not so much.
    """

    def __init__(self, directory: str | Path, num_bytes: int) -> None:
        self.directory, self.num_bytes = Path(directory), num_bytes
        self._used = 0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._open(direct=True)
            self._reserve()
            if not self._is_coherent():
                os.close(self.descriptor)
                self._open(direct=False)
                self._reserve()
        except OSError as error:
            raise DiskError(
                f"memory.disk_directory: {self.directory}: {error.strerror or error}; give a directory on a "
                "disk that this process may write"
            ) from error

    def take(self, num_elements: int, dtype: torch.dtype) -> FilePiece:
        """The next elements of the file; never given back."""
        offset = self._used
        self._used += file_bytes(num_elements, dtype)
        assert self._used <= self.num_bytes, "the file is too small"
        flat = self._bytes[offset : offset + num_elements * dtype.itemsize]
        return FilePiece(offset, flat.view(dtype))

    def read(self, target: torch.Tensor, offset: int) -> None:
        """Fill bytes [n] from the file. Raises OSError, for a short read too."""
        buffer: Any = target.numpy()
        self._check(os.preadv(self.descriptor, [buffer], offset), target.numel(), "read")

    def write(self, source: torch.Tensor, offset: int) -> None:
        """Write bytes [n] into the file. Raises OSError, for a short write too."""
        buffer: Any = source.numpy()
        self._check(os.pwritev(self.descriptor, [buffer], offset), source.numel(), "written")

    @staticmethod
    def _check(done: int, wanted: int, what: str) -> None:
        if done != wanted:
            raise OSError(f"{done} of {wanted} bytes were {what}")

    def _open(self, *, direct: bool) -> None:
        path = self.directory / f".optimizer-{os.getpid()}-{threading.get_ident()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self.is_direct = direct and hasattr(os, "O_DIRECT")
        try:
            self.descriptor = os.open(path, flags | (os.O_DIRECT if self.is_direct else 0), 0o600)
        except OSError:
            path.unlink(missing_ok=True)
            if not self.is_direct:
                raise
            self.is_direct = False
            self.descriptor = os.open(path, flags, 0o600)
        path.unlink()

    def _reserve(self) -> None:
        """Take the room now: a full disk is told at the start, and never in the middle of a step."""
        size = max(self.num_bytes, PAGE)
        try:
            os.posix_fallocate(self.descriptor, 0, size)
        except OSError as error:
            free = shutil.disk_usage(self.directory).free
            os.close(self.descriptor)
            raise DiskError(
                f"memory.disk_directory: {self.directory}: this rank needs {show_bytes(size)} of the disk, "
                f"and {show_bytes(free)} are free ({error.strerror}); free some space, give a directory on "
                "another disk, or let stages put less there (optimizer_disk)"
            ) from error
        self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)

    def _is_coherent(self) -> bool:
        """Whether direct requests work and agree with the mapping, which checkpoints are made from."""
        if not self.is_direct:
            return True
        buffer = torch.frombuffer(mmap.mmap(-1, PAGE), dtype=torch.uint8)
        mapped = self._bytes[:PAGE]
        try:
            agree = True
            for value in (1, 2, 0):
                mapped.fill_(value + 7)
                self.read(buffer, 0)
                agree = agree and bool((buffer == value + 7).all())
                self.write(buffer.fill_(value), 0)
                agree = agree and bool((mapped == value).all())
        except OSError:
            return False
        return agree


class DiskStore:
    """Brings chunks of a file into host memory and back, in the order in which they were added, step by step.

    `dtype` is that of all elements, `chunk` the most elements of a chunk, `timeout_seconds` how long the disk
    may take for one request.
    """

    def __init__(
        self, file: DiskFile, *, dtype: torch.dtype, chunk: int, device: Device, timeout_seconds: float
    ) -> None:
        self.file, self.chunk = file, chunk
        self._timeout = timeout_seconds
        room = file_bytes(chunk, dtype) // dtype.itemsize
        slab = HostSlab(slot_bytes(chunk, dtype), device=device, what="optimizer_disk")
        self._slots = [slab.take((DISK_STATES + 1) * room, dtype).view(-1, room) for _ in range(DISK_SLOTS)]
        """[4, chunk] each: master, two moments, gradient."""
        self._free = list(range(DISK_SLOTS))
        self._pieces: list[tuple[FilePiece, ...]] = []
        """By chunk."""
        self._next = 0
        """The chunk that is read next; after the last one, the first one for the next step."""
        self._loaded = -1
        """The chunk that is stepped now."""
        self._reading: dict[int, tuple[int, InThread]] = {}
        """By chunk: its slot, and the request."""
        self._writing: deque[tuple[int, int, InThread, Transfer | None]] = deque()
        """Chunk, slot, request, and its weights' way up."""
        self._threads = Threads(NUM_THREADS, "disk")

    def add(self, pieces: tuple[FilePiece, ...]) -> int:
        """Add a chunk, whose states are these pieces of the file; its number."""
        self._pieces.append(pieces)
        return len(self._pieces) - 1

    def read_ahead(self) -> None:
        """Begin to read the next chunks, as far as slots are free; does not wait."""
        while self._writing and self._writing[0][2].ended.is_set():
            self._reclaim()
        while self._free and len(self._reading) < min(AHEAD, len(self._pieces)):
            if self._next == self._loaded or any(number == self._next for number, *_ in self._writing):
                return
            self._begin_read()

    def load(self, number: int) -> tuple[int, torch.Tensor]:
        """Wait for a chunk: its slot, and its rows [4, k]. Raises TrainingError if it cannot be read."""
        while number not in self._reading:
            assert number == self._next, "chunks are stepped in another order"
            if self._writing and (not self._free or any(chunk == number for chunk, *_ in self._writing)):
                self._reclaim()
            else:
                self._begin_read()
        slot, job = self._reading.pop(number)
        self._wait(job, "read")
        self._loaded = number
        self.read_ahead()
        return slot, self._slots[slot][:, : self._pieces[number][0].tensor.numel()]

    def store(self, number: int, slot: int, going: Transfer | None) -> None:
        """Begin to write a stepped chunk back; its slot is used again when `going` has ended too."""
        self._loaded = -1
        job = self._begin(number, slot, "write")
        self._writing.append((number, slot, job, going))

    def settle(self) -> None:
        """Wait until the file has what was stepped. Raises TrainingError if it cannot be written."""
        while self._writing:
            self._reclaim()

    def _begin_read(self) -> None:
        slot, number = self._free.pop(), self._next
        self._reading[number] = slot, self._begin(number, slot, "read")
        self._next = (number + 1) % len(self._pieces)

    def _begin(self, number: int, slot: int, what: Literal["read", "write"]) -> InThread:
        rows = [row.view(torch.uint8) for row in self._slots[slot]]
        pieces = self._pieces[number]

        def work() -> None:
            for row, piece in zip(rows, pieces, strict=False):
                part = row[: file_bytes(piece.tensor.numel(), piece.tensor.dtype)]
                (self.file.read if what == "read" else self.file.write)(part, piece.offset)

        return self._threads.begin(work)

    def _reclaim(self) -> None:
        _, slot, job, going = self._writing.popleft()
        self._wait(job, "write")
        if going is not None:
            going.finish()
        self._free.append(slot)

    def _wait(self, job: InThread, what: Literal["read", "write"]) -> None:
        where = f"optimizer state in {self.file.directory}"
        if not job.ended.wait(self._timeout):
            raise TrainingError(
                f"{where}: the disk has not answered a {what} in {show_seconds(self._timeout)} "
                "(train.timeout); look at the disk, and resume"
            )
        if job.fault is not None:
            raise TrainingError(
                f"{where}: a {what} failed: {job.fault}; look at the disk, or give another "
                "memory.disk_directory, and resume"
            ) from job.fault


def slot_bytes(chunk: int, dtype: torch.dtype) -> int:
    """Host memory of all slots."""
    return DISK_SLOTS * (DISK_STATES + 1) * file_bytes(chunk, dtype)


CHUNK = 1 << 22
"""Elements of a chunk; a multiple of what any processor steps at a time, so that chunks change no bit."""


@dataclass(frozen=True)
class HostPlace:
    """Where offloaded state goes: memory of the host, a disk, and the links to it."""

    slab: HostSlab
    links: HostLinks
    disk: DiskStore | None = None


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


@dataclass
class DiskChunk(HostChunk):
    """A chunk whose buffers are those of a slot from its read to its write, and else those of the file."""

    store: DiskStore = field(kw_only=True, repr=False)
    pieces: tuple[FilePiece, ...] = field(kw_only=True, repr=False)
    _slot: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._number = self.store.add(self.pieces)

    def start_gradient(self, reduced: torch.Tensor) -> None:
        """Remember where the reduced gradient of the layout, [n] on the card, is; begin to read."""
        self._source = self._of(reduced)
        self.store.read_ahead()

    def finish_gradient(self) -> None:
        """Block the host until state and gradient are there, and the step may begin."""
        source = self._source
        assert source is not None, "no gradient was reduced"
        self._slot, rows = self.store.load(self._number)
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
        self.store.store(self._number, self._slot, self._going)
        self._slot = None
        self.master, self.exp_avg, self.exp_avg_sq = (piece.tensor for piece in self.pieces)
        self.gradient = self.gradient[:0]

    def settle(self) -> None:
        """Wait until the file has what was stepped."""
        self.store.settle()


@dataclass(frozen=True)
class OptimizerShard:
    """Consecutive elements that this rank steps: flat buffers [k], k = end - start, matrices first.

    They are [start, end) of a slice of a bucket; of the bucket, if the state is not sharded. On the host,
    `chunks` are copied and stepped one after another. On a disk, masters and moments are those of the file,
    mapped, for checkpoints; `gradient` is empty.
    """

    start: int
    end: int
    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    num_matrix_elements: int
    chunks: tuple[HostChunk, ...] = ()

    @property
    def on_host(self) -> bool:
        """Whether the host steps them."""
        return bool(self.chunks)


@dataclass(frozen=True)
class Away:
    """What a rank does not keep on its card of its state of a bucket."""

    share: float = 0.0
    """Fraction of the state that the host steps."""
    on_disk: float = 0.0
    """Fraction of that which lies on the disk."""

    def cuts(self, n: int, num_matrix_elements: int) -> tuple[int, int]:
        """How many of `n` elements are on the card; and on the card or in host memory."""
        on_card = _split(n, num_matrix_elements, self.share)
        return on_card, max(on_card, _split(n, num_matrix_elements, self.share * self.on_disk))


HERE = Away()
"""All of it is on the card."""

NUM_BUFFERS = 4
"""Master, gradient and AdamW's two moments."""

_VECTOR = 64
"""Elements; a multiple of what any processor steps at a time. AdamW rounds the remainder after the last full
vector differently, so splitting at another element would change bits."""


def _split(n: int, num_matrix_elements: int, share: float) -> int:
    """How many of `n` elements are before the last `share` of them."""
    split = n - round(n * share)
    if split < n:
        split -= (split if split < num_matrix_elements else split - num_matrix_elements) % _VECTOR
    return split


def owner_ranges(part: Slice, shares: Sequence[float]) -> Ranges:
    """The range of a slice that each rank of its group holds, in proportion to its share.

    Equal shares of what does not divide are equal but for the last one. Borders are multiples of 64 elements
    where the slice is not small: 128 bytes in 16 bits, of which NCCL moves whole vectors.
    """
    weights, n = [shares[rank] for rank in part.group], part.num_elements
    count, total = len(weights), sum(weights)
    if len(set(weights)) == 1:
        each = n // count
        if n % count:
            each -= each % _VECTOR if each >= _VECTOR else 0
        return Ranges((*[each] * (count - 1), n - each * (count - 1)))
    unit = _VECTOR if n >= _VECTOR * count else 1
    done, start = 0.0, 0
    sizes: list[int] = []
    for number, weight in enumerate(weights):
        done += weight
        end = n if number == count - 1 else round(n * done / total / unit) * unit
        sizes.append(end - start)
        start = end
    return Ranges(tuple(sizes))


@dataclass(frozen=True)
class Owned:
    """Elements [start, end) of a slice of a bucket, or of the bucket itself, that a rank steps."""

    part: FlatBucket | Slice
    start: int
    end: int

    @property
    def num_matrix_elements(self) -> int:
        """How many of them are of matrices: the first ones."""
        return min(max(self.part.num_matrix_elements - self.start, 0), self.end - self.start)


def owned_by(bucket: FlatBucket, shares: Sequence[float] | None) -> list[Owned]:
    """What this rank steps of a bucket: all of it, or with `shares` of each slice a range."""
    if shares is None:
        return [Owned(bucket, 0, bucket.weights.numel())]
    ranges = [owner_ranges(part, shares).of(part.group.index(bucket.rank)) for part in bucket.slices]
    return [Owned(part, *own) for part, own in zip(bucket.slices, ranges, strict=True)]


def away_bytes(bucket: FlatBucket, shares: Sequence[float] | None, away: Away) -> tuple[int, int]:
    """Bytes that this rank's state of a bucket takes of a slab of the host, and of the rank's file."""
    dtype = bucket.gradient.dtype
    host = disk = 0
    for own in owned_by(bucket, shares):
        n, num_matrix = own.end - own.start, own.num_matrix_elements
        on_card, in_memory = away.cuts(n, num_matrix)
        host += NUM_BUFFERS * piece_bytes(in_memory - on_card, dtype)
        disk += sum(
            DISK_STATES * file_bytes(last - first, dtype)
            for first, last, _ in chunk_ranges(in_memory, n, num_matrix)
        )
    return host, disk


def page_state_bytes(bucket: FlatBucket) -> int:
    """What the state of a bucket that is a page takes of a slab, beside its weights and gradient."""
    dtype = master_dtype(bucket.weights.dtype)
    return (2 + bucket.is_low_precision) * piece_bytes(bucket.weights.numel(), dtype)


def chunk_ranges(
    first: int, last: int, num_matrix_elements: int, size: int = sys.maxsize
) -> Iterator[tuple[int, int, bool]]:
    """The elements [first, last) of weights in chunks of at most `size`, matrices before vectors: (first,
    last, whether weights decay)."""
    border = min(max(num_matrix_elements, first), last)
    for begin, end, decays in ((first, border, True), (border, last, False)):
        for start in range(begin, end, size):
            yield start, min(start + size, end), decays


def make_shards(
    weights: torch.Tensor,
    gradient: torch.Tensor | None,
    owned: Owned,
    *,
    layout: int,
    away: Away,
    host: HostPlace | None,
    slab: HostSlab | None,
) -> list[OptimizerShard]:
    """The shards of the weights [n] that are `owned`: on the card, then in host memory and on the disk.

    Without `gradient` [n] the weights are a copy, and each shard gets a gradient buffer of its own. Else what
    is on the card and in full precision is its own master. Of weights that lie on the host, the first part is
    on the host too, in pieces of `slab`, and is stepped there.
    """
    n, dtype = weights.numel(), master_dtype(weights.dtype)
    start, num_matrix_elements = owned.start, owned.num_matrix_elements
    split, in_memory = away.cuts(n, num_matrix_elements)
    shards: list[OptimizerShard] = []
    if split or not n:
        own = weights[:split]

        def zeros() -> torch.Tensor:
            return own.new_zeros(split, dtype=dtype) if slab is None else slab.take(split, dtype)

        master = zeros().copy_(own) if gradient is None or dtype != own.dtype else own
        shards.append(
            OptimizerShard(
                start=start,
                end=start + split,
                master=master,
                gradient=torch.zeros_like(master) if gradient is None else gradient[:split],
                exp_avg=zeros(),
                exp_avg_sq=zeros(),
                num_matrix_elements=min(num_matrix_elements, split),
            )
        )
    if split < n:
        assert host is not None
        if split < in_memory:
            num_matrix = min(max(num_matrix_elements - split, 0), in_memory - split)
            own = weights[split:in_memory].to(dtype)
            shards.append(_away_shard(own, host, layout, start + split, num_matrix))
        for first, last, decays in chunk_ranges(in_memory, n, num_matrix_elements):
            own, num_matrix = weights[first:last].to(dtype), (last - first) * decays
            shards.append(_away_shard(own, host, layout, start + first, num_matrix, store=host.disk))
    return shards


def _away_shard(
    weights: torch.Tensor,
    host: HostPlace,
    layout: int,
    start: int,
    num_matrix_elements: int,
    *,
    store: DiskStore | None = None,
) -> OptimizerShard:
    """The shard of weights [k], in the master's precision, in host memory; or with `store` on the disk."""
    n, dtype = weights.numel(), weights.dtype
    pieces: list[FilePiece] = []
    if store is None:
        master, gradient, exp_avg, exp_avg_sq = (host.slab.take(n, dtype) for _ in range(NUM_BUFFERS))
    else:
        pieces = [store.file.take(n, dtype) for _ in range(DISK_STATES)]
        gradient = weights.new_empty(0)
        master, exp_avg, exp_avg_sq = (piece.tensor for piece in pieces)
    master.copy_(weights)
    chunks: list[HostChunk] = []
    for first, last, decays in chunk_ranges(0, n, num_matrix_elements, store.chunk if store else CHUNK):
        make: Callable[..., HostChunk] = HostChunk
        if store is not None:
            parts = tuple(piece.part(first, last) for piece in pieces)
            make = partial(DiskChunk, store=store, pieces=parts)
        own = [buffer[first:last] for buffer in (master, gradient, exp_avg, exp_avg_sq)]
        chunks.append(make(layout, start + first, *own, decays=decays, links=host.links))
    buffers = master, gradient, exp_avg, exp_avg_sq
    return OptimizerShard(start, start + n, *buffers, num_matrix_elements, tuple(chunks))


def chunk_elements(num_elements: int) -> int:
    """Elements of a chunk, of so many on the disk: a multiple of a page's, in whatever precision."""
    page = 1024
    return min(units.DISK_CHUNK, -(-num_elements // page) * page)
