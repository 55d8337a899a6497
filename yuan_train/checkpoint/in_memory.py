"""Checkpoints in the memory of the nodes: a node has the files of its own ranks, and those of a neighbour's.

    /dev/shm/yuan-train-USER-RUN/NODE/            RUN: a digest of checkpoint.directory's path
        step-00000015-0a1b2c3d4e5f6071/           a whole one; behind the step, the digest of its manifest
            manifest.json                         start, step, state; every file with its size and SHA-256
            .metadata, __R_N.distcp               as on disk, but only what this node and its neighbour wrote
        .draft/                                   the one that is being written

The files are those of a checkpoint on disk, so that they load under any plan. A node reads its own folder and
no other one: what it lacks comes from another node's ranks over gloo, a piece at a time (`deliver`); what has
arrived is known by its hash. The files outlive the ranks, which are others after a fault.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from yuan_train.checkpoint.load import MANIFEST, VERSION, Checkpoint, LoadPlanner, Reader, Tensors, step_name
from yuan_train.checkpoint.save import make_empty_directory, root_cause, write_tensors
from yuan_train.config.errors import CheckpointError, TrainingError

T = TypeVar("T")

MEMORY = Path("/dev/shm")
"""Where Linux has files in memory."""
METADATA = ".metadata"
DRAFT = ".draft"
STARTS = "in-memory.ids"
"""In checkpoint.directory: the names of the starts whose copies may be used, that of the newest first.

A node that was away may come back with copies of steps from which the run has not gone on; and whoever
removes what is in the directory begins another run.
"""
_NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{16})")
MAX_LISTED = 3


def run_folder(directory: str | Path) -> Path:
    """Where the nodes of a run have their folders, each on its own host; by its `checkpoint.directory`."""
    digest = hashlib.sha256(str(Path(directory).resolve()).encode()).hexdigest()[:16]
    return MEMORY / f"yuan-train-{os.getuid()}-{digest}"


def remove_copies(directory: str | Path, node: str) -> None:
    """Remove what a node has in its memory of a run. Errors are ignored."""
    folder = run_folder(directory)
    shutil.rmtree(folder / quote(node, safe=""), ignore_errors=True)
    with suppress(OSError):
        # The last one of a machine.
        folder.rmdir()


def forget_copies(directory: str | Path) -> None:
    """Have no copies used that were made for a directory: the run goes on without. Errors are ignored."""
    with suppress(OSError):
        (Path(directory) / STARTS).unlink(missing_ok=True)


def _read_starts(directory: Path) -> tuple[str, ...]:
    """The content of `STARTS`. Raises OSError."""
    path = directory / STARTS
    return tuple(path.read_text(encoding="utf-8").split()) if path.exists() else ()


def _write_starts(directory: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Replace the content of `STARTS`, and return it. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f".{STARTS}.tmp"
    draft.write_text("\n".join(names) + "\n", encoding="utf-8")
    draft.replace(directory / STARTS)
    return tuple(names)


@dataclass(frozen=True)
class _Manifest:
    """What `manifest.json` says; the same on all nodes."""

    text: str
    start: str
    """Name of the start of the run that has kept it."""
    step: int
    state: Mapping[str, Any]
    files: Mapping[str, tuple[int, str]]
    """Bytes and SHA-256 of every file of the checkpoint, on whatever node."""

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{step_name(self.step)}-{hashlib.sha256(self.text.encode()).hexdigest()[:16]}"

    @staticmethod
    def parse(text: str) -> _Manifest:
        """Raises ValueError or KeyError."""
        values = json.loads(text)
        if values["version"] != VERSION:
            raise ValueError(f"version {values['version']}")
        files = {name: (int(size), str(digest)) for name, (size, digest) in values["files"].items()}
        return _Manifest(text, values["start"], int(values["step"]), values["state"], files)


@dataclass(frozen=True)
class KeptCheckpoint(Checkpoint):
    """A checkpoint in the memory of the nodes, of which a node has only some files.

    Its path is that of this rank's node; there is no other one on which all of it lies.
    """

    disk_step: int | None = field(default=None, kw_only=True)
    """The newest step on disk; None: there is none."""
    fetch: Callable[[Path, Tensors], None] = field(kw_only=True)

    def _bring(self, tensors: Tensors) -> None:
        self.fetch(self.path, tensors)


class NodeMemory:
    """This rank's node and its neighbours, as stores of copies; all methods are collective over all ranks.

    The neighbour of a node is the next one in the order of their first ranks; of a single node there is none.
    """

    def __init__(
        self, directory: str | Path, place: tuple[str, str], *, group: dist.ProcessGroup | None = None
    ) -> None:
        """`place`: this rank's node, by the plan, and what no other machine has. `group` has all ranks (None:
        the default group).

        Raises CheckpointError, on all ranks, where a node has no file system in memory.
        """
        self.folder = run_folder(directory) / quote(place[0], safe="")
        self._directory = Path(directory)
        self._group, self._place = group, place
        self._learn_places()
        self._together(_check_memory)
        self._starts: tuple[str, ...] = self._tell(0, partial(_read_starts, self._directory))

    @property
    def num_nodes(self) -> int:
        """Nodes that have ranks."""
        return len(self._places)

    def _learn_places(self) -> None:
        """Which ranks are on which node; ranks may have been numbered anew."""
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._places: dict[tuple[str, str], list[int]] = {}
        for rank, place in enumerate(self._gather(self._place)):
            self._places.setdefault(place, []).append(rank)
        own = self._places[self._place]
        self._local = own.index(self._rank), len(own)
        self._is_first = self._local[0] == 0

    # --- keeping -----------------------------------------------------------------------------------------

    def keep(self, step: int, tensors: Tensors, state: Mapping[str, Any]) -> int:
        """Keep the checkpoint of a step on this node and its neighbour, and drop the one before; the bytes
        that this node has of it.

        Raises CheckpointError, on all ranks, where it cannot be; the one before is then untouched.
        """
        draft = self.folder / DRAFT
        try:
            self._together(partial(self._first, self._make_draft, draft))
            write_tensors(draft, tensors, self._group)
            written = self._together(partial(self._written, draft))
            manifest, metadata = self._tell(0, partial(self._describe, draft, step, state, written))
            faults = deliver(self._to_neighbours(written), draft, group=self._group)
            self._together(partial(self._complete, draft, manifest.text, metadata, faults))
            final = self.folder / manifest.name
            self._together(partial(self._first, draft.rename, final))
        except (CheckpointException, CheckpointError) as error:
            cause, rank = root_cause(error)
            self._first(shutil.rmtree, draft, True)
            raise CheckpointError(f"{cause}{'' if rank is None else f' (rank {rank})'}") from error
        self._first(self._drop_others, final)
        if len(self._starts) > 1:
            # What was kept before this start is not needed any more.
            self._starts = self._tell(0, partial(_write_starts, self._directory, self._starts[:1]))
        return sum(path.stat().st_size for path in final.iterdir()) if self._is_first else 0

    def _make_draft(self, draft: Path) -> None:
        """An empty one, which nobody else can write to or has made."""
        folder = self.folder.parent
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise OSError(f"{folder} is another user's")
        make_empty_directory(draft)

    def _written(self, draft: Path) -> dict[str, tuple[int, str]]:
        """What this rank has written: bytes and digest of each file."""
        mine = sorted(draft.glob(f"__{self._rank}_*.distcp"))
        return {path.name: (path.stat().st_size, file_digest(path)) for path in mine}

    def _describe(
        self, draft: Path, step: int, state: Mapping[str, Any], written: Sequence[dict[str, tuple[int, str]]]
    ) -> tuple[_Manifest, bytes]:
        """The manifest, and torch's metadata, which rank 0 has written."""
        metadata = (draft / METADATA).read_bytes()
        files = {name: entry for own in written for name, entry in own.items()}
        files[METADATA] = len(metadata), hashlib.sha256(metadata).hexdigest()
        plain = {"version": VERSION, "start": self._starts[0], "step": step, "state": state, "files": files}
        return _Manifest.parse(json.dumps(plain, indent=1)), metadata

    def _to_neighbours(self, written: Sequence[dict[str, tuple[int, str]]]) -> list[Delivery]:
        """Every rank's files, to a rank of the next node if there is one."""
        places = list(self._places.values())
        if len(places) == 1:
            return []
        return [
            Delivery(name, size, digest, source, others[i % len(others)])
            for own, others in zip(places, [*places[1:], places[0]], strict=True)
            for i, source in enumerate(own)
            for name, (size, digest) in written[source].items()
        ]

    def _complete(self, draft: Path, manifest: str, metadata: bytes, faults: Sequence[str]) -> None:
        """Add what every node has. Raises OSError, also for what has gone wrong before."""
        if faults:
            raise OSError("; ".join(faults[:MAX_LISTED]))
        if self._is_first:
            (draft / METADATA).write_bytes(metadata)
            (draft / MANIFEST).write_text(manifest, encoding="utf-8")

    def _drop_others(self, final: Path) -> None:
        for path in self.folder.iterdir():
            if path != final:
                shutil.rmtree(path, ignore_errors=True)

    # --- finding -----------------------------------------------------------------------------------------

    def begin(self, *, disk_step: int | None, anew: bool = False) -> tuple[KeptCheckpoint | None, list[str]]:
        """Begin a start of the run: with the newest whole checkpoint in the memory of the nodes that are
        here, if it is not older than that on disk; and notes on what could not be used, alike on all ranks.

        `anew`: what is here is another run's. Raises CheckpointError.
        """
        notes: list[str] = []
        self._starts = () if anew else self._starts
        found = self._find(disk_step, notes)
        # Until this start has kept something, that is still the newest: a node may come back with it.
        starts = (uuid.uuid4().hex, *self._starts)
        self._starts = self._tell(0, partial(_write_starts, self._directory, starts))
        return found, notes

    def _find(self, disk_step: int | None, notes: list[str]) -> KeptCheckpoint | None:
        listed = self._together(self._listed)
        owners: dict[str, int] = {}
        for rank, (names, faults) in enumerate(listed):
            notes += faults
            for name in names:
                owners.setdefault(name, rank)
        steps = {name: int(name.split("-")[1]) for name in owners}
        for name in sorted(owners, key=lambda name: (steps[name], name), reverse=True):
            if disk_step is not None and steps[name] < disk_step:
                break
            manifest = self._tell(owners[name], partial(self._manifest, name))
            sound = self._sound(manifest, notes)
            missing = [file for file in manifest.files if not any(file in held for held in sound.values())]
            try:
                if not missing:
                    return self._found(manifest, sound, disk_step)
                more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
                why = f"no whole copy of {', '.join(missing[:MAX_LISTED])}{more}"
            except CheckpointError as error:
                # A host without room, which all ranks have heard of.
                why = str(error)
            notes.append(f"step {manifest.step} cannot be had from the memory of {self._named()}: {why}")
        return None

    def _named(self) -> str:
        return ", ".join(node for node, _ in self._places)

    def _listed(self) -> tuple[list[str], list[str]]:
        """Of this node's, told by its first rank: names of those that may be used, and notes of torn ones.

        All others are removed, and what was being written.
        """
        names, notes = list[str](), list[str]()
        if not self._is_first or not self.folder.is_dir():
            return names, notes
        for path in sorted(self.folder.iterdir()):
            try:
                if _NAME.fullmatch(path.name) and self._manifest(path.name).start in self._starts:
                    names.append(path.name)
                else:
                    shutil.rmtree(path, ignore_errors=True)
            except OSError:
                notes.append(f"{path.name} in the memory of {self._place[0]} has no whole manifest")
        return names, notes

    def _manifest(self, name: str) -> _Manifest:
        """That of this node's checkpoint of a name. Raises OSError unless it is as it was written."""
        try:
            found = _Manifest.parse((self.folder / name / MANIFEST).read_text(encoding="utf-8"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OSError(f"{name}: {MANIFEST} is torn: {error}") from None
        if found.name != name:
            raise OSError(f"{name}: {MANIFEST} is altered")
        return found

    def _sound(self, manifest: _Manifest, notes: list[str]) -> dict[tuple[str, str], set[str]]:
        """By node, the files of a checkpoint that it has as they were written; notes of the others."""
        told = self._together(partial(self._checked, manifest))
        sound: dict[tuple[str, str], set[str]] = {}
        for place, ranks in self._places.items():
            sound[place] = {name for rank in ranks for name in told[rank][0]}
            altered = sorted(name for rank in ranks for name in told[rank][1])
            if altered:
                notes.append(
                    f"of step {manifest.step} in the memory of {place[0]}, {', '.join(altered[:MAX_LISTED])} "
                    "has other bytes than were written, and is not used"
                )
        return sound

    def _checked(self, manifest: _Manifest) -> tuple[list[str], list[str]]:
        """Of this rank's share of its node's files: those that are whole, and those that are not."""
        sound, altered = list[str](), list[str]()
        number, count = self._local
        for name in sorted(manifest.files)[number::count]:
            path = self.folder / manifest.name / name
            if path.is_file():
                (sound if file_digest(path) == manifest.files[name][1] else altered).append(name)
        return sound, altered

    def _found(
        self, manifest: _Manifest, sound: Mapping[tuple[str, str], set[str]], disk_step: int | None
    ) -> KeptCheckpoint:
        """The checkpoint, of which every node gets what is small."""
        path = self.folder / manifest.name
        source = next(self._places[place][0] for place, names in sound.items() if METADATA in names)
        metadata = self._tell(source, (path / METADATA).read_bytes)
        self._together(partial(self._first, self._add_head, path, manifest.text, metadata))
        on_disk = "there is none on disk" if disk_step is None else f"that on disk is of step {disk_step}"
        return KeptCheckpoint(
            path,
            manifest.state,
            (f"the newest checkpoint is in the memory of {self._named()}; {on_disk}",),
            disk_step=disk_step,
            fetch=partial(self._fetch, manifest, sound),
        )

    def _add_head(self, path: Path, manifest: str, metadata: bytes) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / METADATA).write_bytes(metadata)
        (path / MANIFEST).write_text(manifest, encoding="utf-8")

    def _fetch(
        self, manifest: _Manifest, sound: Mapping[tuple[str, str], set[str]], path: Path, tensors: Tensors
    ) -> None:
        """Have this rank's node hold the files from which tensors are filled; collective.

        Raises TrainingError, on all ranks, if one does not arrive; the copies are then dropped.
        """
        self._learn_places()
        wanted = self._gather(_files_of(path, tensors))
        deliveries: list[Delivery] = []
        for place, ranks in self._places.items():
            lacking = sorted(set[str]().union(*(wanted[rank] for rank in ranks)) - sound[place])
            for i, name in enumerate(lacking):
                source = next(own for other, own in self._places.items() if name in sound[other])
                size, digest = manifest.files[name]
                pair = source[i % len(source)], ranks[i % len(ranks)]
                deliveries.append(Delivery(name, size, digest, *pair))
        faults = deliver(deliveries, path, group=self._group)
        told = [fault for own in self._gather(faults) for fault in own]
        if told:
            self._first(shutil.rmtree, self.folder, True)
            raise TrainingError(
                f"step {manifest.step} cannot be had from the memory of the nodes: {told[0]}; these copies "
                "are dropped: start again, and the run goes on from the newest checkpoint on disk"
            )

    # --- all ranks ---------------------------------------------------------------------------------------

    def _first(self, work: Callable[..., object], *arguments: Any) -> None:
        """Do something once on each node."""
        if self._is_first:
            work(*arguments)

    def _gather(self, value: T) -> list[T]:
        """What each rank has."""
        if not dist.is_initialized():
            return [value]
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, value, group=self._group)
        return told

    def _try(self, work: Callable[[], Any]) -> tuple[Any, str | None]:
        """What this rank finds, or its fault: an OSError."""
        try:
            return work(), None
        except OSError as error:
            return None, f"{self._place[0]}: {error}"

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Do something on all ranks, and return what each has found; all wait for all.

        Raises CheckpointError, on all ranks, for an OSError of any.
        """
        told = self._gather(self._try(work))
        _raise_first(fault for _, fault in told)
        return [value for value, _ in told]

    def _tell(self, rank: int, work: Callable[[], T]) -> T:
        """What one rank finds, on all. Raises CheckpointError, on all ranks, for an OSError."""
        told: list[Any] = [self._try(work) if self._rank == rank else None]
        if dist.is_initialized():
            dist.broadcast_object_list(told, src=rank, group=self._group)
        found, fault = told[0]
        _raise_first([fault])
        return found


def _check_memory() -> None:
    if not MEMORY.is_dir():
        raise OSError(
            f"checkpoint.in_memory: {MEMORY}, where Linux has files in memory, is not here; set it to 0"
        )


def _raise_first(faults: Iterator[str | None] | Sequence[str | None]) -> None:
    fault = next((fault for fault in faults if fault is not None), None)
    if fault is not None:
        raise CheckpointError(fault)


def _files_of(path: Path, tensors: Tensors) -> set[str]:
    """The files of a checkpoint in which what fills tensors stands."""
    metadata = Reader(path).read_metadata()
    planner = LoadPlanner()
    planner.set_up_planner(dict(tensors), metadata)
    places: Mapping[MetadataIndex, Any] = metadata.storage_data
    return {places[item.storage_index].relative_path for item in planner.create_local_plan().items}


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
