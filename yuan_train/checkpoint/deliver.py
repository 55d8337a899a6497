"""Sends files between ranks over gloo, a piece at a time; what has arrived is known by its hash."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

PIECE_BYTES = 1 << 24


@dataclass(frozen=True)
class Delivery:
    """A file of the source rank's folder that the target rank is to have in its own."""

    name: str
    num_bytes: int
    digest: str
    """SHA-256 of its bytes."""
    source: int
    target: int

    def size_from(self, first: int) -> int:
        """Bytes of the piece that begins at byte `first`."""
        return min(PIECE_BYTES, self.num_bytes - first)


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def deliver(
    deliveries: Sequence[Delivery], folder: Path, *, group: dist.ProcessGroup | None
) -> tuple[str, ...]:
    """Send and receive this rank's of all deliveries; `folder` has its files. Returns what has gone wrong.

    To be called by all ranks, with the same deliveries; their pieces go side by side, and a rank holds one
    piece of each of its own. A file stands under its name once it is whole; one that cannot be read or
    written, or has other bytes than its digest says, does not hold up the others.
    """
    if not deliveries:
        return ()
    rank = dist.get_rank()
    ends: list[_Outgoing | _Incoming] = []
    with ExitStack() as stack:
        # A message is found by its tag, so that each delivery has its own.
        for tag, one in enumerate(deliveries):
            if rank in (one.source, one.target):
                kind = _Outgoing if one.source == rank else _Incoming
                ends.append(kind(one, folder, tag=tag, stack=stack))
        for first in range(0, max((end.delivery.num_bytes for end in ends), default=0), PIECE_BYTES):
            busy = [end for end in ends if first < end.delivery.num_bytes]
            for work in [end.start(first, group) for end in busy]:
                work.wait()
            for end in busy:
                end.take()
    for end in ends:
        end.close()
    return tuple(end.fault for end in ends if end.fault is not None)


class _Outgoing:
    """The end at the source."""

    def __init__(self, delivery: Delivery, folder: Path, *, tag: int, stack: ExitStack) -> None:
        self.delivery, self._tag = delivery, tag
        self.fault: str | None = None
        self._file: io.BufferedReader | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        try:
            self._file = stack.enter_context((folder / delivery.name).open("rb"))
        except OSError as error:
            self.fault = f"{delivery.name} cannot be read: {error}"

    def start(self, first: int, group: dist.ProcessGroup | None) -> dist.Work:
        """Begin to send the piece at byte `first`."""
        # What cannot be read is sent as zeros, which the other end finds by the digest.
        piece = bytearray(self.delivery.size_from(first))
        try:
            if self._file is not None:
                self._file.readinto(piece)
        except OSError as error:
            self.fault = f"{self.delivery.name} cannot be read: {error}"
        self._buffer = torch.frombuffer(piece, dtype=torch.uint8)
        work = dist.isend(self._buffer, self.delivery.target, group=group, tag=self._tag)
        assert work is not None
        return work

    def take(self) -> None:
        """The piece has been sent."""

    def close(self) -> None:
        """All pieces have been sent."""


class _Incoming:
    """The end at the target."""

    def __init__(self, delivery: Delivery, folder: Path, *, tag: int, stack: ExitStack) -> None:
        self.delivery, self._tag = delivery, tag
        self.fault: str | None = None
        self._draft = folder / f"{delivery.name}.part"
        self._hash = hashlib.sha256()
        self._file: io.FileIO | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        try:
            self._file = stack.enter_context(self._draft.open("wb", buffering=0))
        except OSError as error:
            self.fault = f"{delivery.name} cannot be written: {error}"

    def start(self, first: int, group: dist.ProcessGroup | None) -> dist.Work:
        """Begin to receive the piece at byte `first`."""
        self._buffer = torch.empty(self.delivery.size_from(first), dtype=torch.uint8)
        work = dist.irecv(self._buffer, self.delivery.source, group=group, tag=self._tag)
        assert work is not None
        return work

    def take(self) -> None:
        """The piece is here: write it."""
        rest = self._buffer.numpy().data
        self._hash.update(rest)
        try:
            while self._file is not None and self.fault is None and len(rest):
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.fault = f"{self.delivery.name} cannot be written: {error}"

    def close(self) -> None:
        """All pieces are here: the file has its name if it is whole."""
        if self.fault is None and self._hash.hexdigest() != self.delivery.digest:
            self.fault = f"{self.delivery.name} of rank {self.delivery.source} has arrived with other bytes"
        try:
            if self.fault is None:
                self._draft.replace(self._draft.with_suffix(""))
            else:
                self._draft.unlink(missing_ok=True)
        except OSError as error:
            self.fault = self.fault or f"{self.delivery.name} cannot be written: {error}"
