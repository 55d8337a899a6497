"""Optimizer state of a rank on a disk: a file without a name, and chunks of it in slots of host memory.

While one chunk is stepped, the next ones are read and the ones before are written, by threads, around the
page cache where the file system allows it: else the cache would be a second copy in memory. The file has no
name, so nothing of it is left when the process ends, however it ends: what lasts is in checkpoints.
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from yuan_train.config.errors import DiskError, TrainingError
from yuan_train.config.units import DISK_SLOTS, DISK_STATES, show_bytes, show_seconds
from yuan_train.parallel.device import Device, HostSlab, InThread, Threads, Transfer

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
        self,
        file: DiskFile,
        *,
        dtype: torch.dtype,
        chunk: int,
        device: Device,
        timeout_seconds: float,
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
