"""Saves the checkpoints of a run, one at a time: synchronously, or in a thread while training goes on.

`Saver` starts a save and waits for it; `make_saver` makes the saver of a run, and `save_progress` collects
this rank's tensors and starts a save of them. `Exports` has what was saved exported by a process beside it.
`Keeper` keeps others in the memory of the nodes (`checkpoint.in_memory`), for `agreement` to find. It stands
alone because a save is under way while the loop goes on.

What a move to another plan loads is in no file (`LiveCheckpoint`). It is loaded as a checkpoint is, under any
plan, but from the ranks' own tensors, and nobody holds all of it. A rank copies what it had before. Of the
rest every element comes to it once, as a message of the nearest rank that has it, so that the bytes sent are
the fewest that fill the new parts.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from yuan_train.checkpoint.in_memory import KeptCheckpoint, NodeMemory, forget_copies, remove_copies
from yuan_train.checkpoint.load import Checkpoint, LocalShard, Tensors
from yuan_train.checkpoint.save import save_checkpoint
from yuan_train.config.errors import CheckpointError, HostMemoryError
from yuan_train.config.run import CheckpointConfig
from yuan_train.config.units import show_bytes, show_seconds
from yuan_train.parallel.device import Device, HostSlab, piece_bytes
from yuan_train.parallel.grid import RankCoord
from yuan_train.parallel.groups import gather_objects, guard_world_collective, make_save_group
from yuan_train.parallel.shard import TensorBox
from yuan_train.parallel.transfer import Move, MoveBucket, make_buckets, pack, rounds_of, unpack
from yuan_train.train.agreement import place_of
from yuan_train.train.engine import Engine, Progress
from yuan_train.train.job import Job
from yuan_train.train.metrics import Log

logger = logging.getLogger(__name__)


class Snapshots:
    """Copies of a rank's local shards in host memory, which later steps do not change.

    One is in use at a time. A card copies by itself into memory that is pinned for the first one and kept:
    to other memory the driver copies piece by piece, while the host waits for each tensor. Where no more may
    be pinned, it still does.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._room = torch.empty(0, dtype=torch.uint8)

    def take(self, shards: Mapping[str, LocalShard]) -> dict[str, LocalShard]:
        """Copy; complete on return."""
        device = self._device
        away = [box.tensor for shard in shards.values() for box in shard.boxes if self._moves(box.tensor)]
        sizes = [piece_bytes(tensor.numel(), tensor.dtype) for tensor in away]
        pieces = iter(self._pieces(sizes))

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if not self._moves(tensor):
                return tensor.clone()
            size = tensor.numel() * tensor.itemsize
            host = next(pieces)[:size].view(tensor.dtype).view(tensor.shape)
            device.start_to_host(tensor, host)
            return host

        found = {
            name: replace(shard, boxes=tuple(replace(box, tensor=copy(box.tensor)) for box in shard.boxes))
            for name, shard in shards.items()
        }
        device.finish_compute()
        return found

    def _moves(self, tensor: torch.Tensor) -> bool:
        """What is on the host already, such as offloaded state, is copied there."""
        return self._device.is_card and tensor.device == self._device.torch

    def _pieces(self, sizes: list[int]) -> tuple[torch.Tensor, ...]:
        total = sum(sizes)
        if total > self._room.numel():
            self._room = self._room[:0]
            try:
                slab = HostSlab(total, device=self._device, what="checkpoint.asynchronous")
                self._room = slab.take(total, torch.uint8)
            except HostMemoryError as error:
                logger.warning("%s. Saves are copied to memory that is not pinned, which takes longer", error)
                return torch.empty(total, dtype=torch.uint8).split(sizes)
        return self._room[:total].split(sizes)


EXPORTED = "hf-"
"""Of the name of an export, before that of its checkpoint."""


def export_command(checkpoint: Path, out: Path) -> list[str]:
    """What exports a checkpoint, with the tokenizer that is in it."""
    return [sys.executable, "-m", "yuan_train", "export-hf", str(checkpoint), "--out", str(out)]


class Exports:
    """Has checkpoints exported, on rank 0, by one process at a time; one that fails costs a warning alone."""

    def __init__(self, config: CheckpointConfig, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._out = Path()
        self._num_saved = 0
        """Checkpoints since that which is exported, itself too."""

    def make_room(self, step: int) -> None:
        """Before a checkpoint is saved: wait for an export that is in its way, in any thread.

        That is one whose checkpoint it will have removed, or before its own. Not forever, for others wait.
        """
        process, keep = self._process, self._config.keep
        if process is None or not (self._is_due(step) or 0 < keep <= self._num_saved):
            return
        try:
            process.wait(self._config.timeout / 2)
        except subprocess.TimeoutExpired:
            process.kill()

    def export(self, step: int, checkpoint: Path) -> None:
        """Take note of a checkpoint that was saved, and start to export it if its step is one of those."""
        self._num_saved += 1
        self.look()
        if not self._is_due(step) or self._process is not None:
            return
        self._out = checkpoint.with_name(f"{EXPORTED}{checkpoint.name}")
        self._num_saved = 1
        # Of the same step before the run went back; it may have been another run then.
        shutil.rmtree(self._out, ignore_errors=True)
        try:
            self._errors = tempfile.TemporaryFile()
            self._process = subprocess.Popen(
                export_command(checkpoint, self._out),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                # Ctrl-C is for the trainer, which says what becomes of it.
                start_new_session=True,
            )
        except OSError as error:
            self._close()
            self._warn(error)

    def look(self) -> None:
        """Say what has become of an export that has ended; does not wait."""
        if self._process is None or self._errors is None or (code := self._process.poll()) is None:
            return
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        self._close()
        if code:
            why = lines[-1].removeprefix("error: ") if lines else f"exit code {code}"
            self._warn(why)
            return
        self._say(f"exported {self._out}")
        found = sorted(self._out.parent.glob(f"{EXPORTED}step-*"), key=lambda path: (len(path.name), path))
        for path in found[: -self._config.keep] if self._config.keep else ():
            shutil.rmtree(path, ignore_errors=True)

    def finish(self) -> None:
        """Wait for the export that is under way."""
        if self._process is not None:
            self._process.wait()
            self.look()

    def drop(self) -> None:
        """End the export that is under way, and begin no other: the run is to end soon."""
        self._config = replace(self._config, export=0)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._close()
            shutil.rmtree(self._out.with_name(f".{self._out.name}.tmp"), ignore_errors=True)
            self._say(f"the export to {self._out} was given up")

    def _close(self) -> None:
        if self._errors is not None:
            self._errors.close()
        self._errors = self._process = None

    def _warn(self, why: object) -> None:
        logger.warning("warning: %s was not exported: %s; the run goes on", self._out, why)

    def _is_due(self, step: int) -> bool:
        return self._config.export > 0 and step % self._config.export == 0


class Saver:
    """Starts saves and waits for them; every rank does both at the same points of the run.

    A save fails on all ranks, but they notice it at different times. So a failure only requests a stop
    (`failed`), which the ranks agree on in a step; it is raised where all of them wait.
    """

    def __init__(
        self,
        coord: RankCoord,
        *,
        saved: int | None,
        say: Callable[[str], None],
        device: Device | None = None,
        group: dist.ProcessGroup | None = None,
        exports: Exports | None = None,
    ) -> None:
        """`saved` is the step of the newest checkpoint, if any; `say` logs a line.

        With `device`, this rank's device, saves run in the background; `group` must then be a process group
        that nothing else uses. `exports`: on rank 0, of a run that exports what it saves.
        """
        self.started = self.saved = saved
        """Step of the newest save that was started, and of the newest that is complete."""
        self.group = group
        self.coord = coord
        """Of this rank under the plan that runs."""
        self._say = say
        self._thread = None if device is None else ThreadPoolExecutor(1, "save", device.use)
        self.snapshots = None if device is None else Snapshots(device)
        """What saves in the background write; None if they run here."""
        self._pending: Future[Path] | None = None
        self.exports = exports

    def start(self, step: int, save: Callable[[], Path]) -> None:
        """Run `save`, which returns the checkpoint's path, here or in the thread.

        The save before must have been waited for. Raises CheckpointError if a synchronous save fails.
        """
        assert self._pending is None
        self.started = step
        if self._thread is not None:
            self._pending = self._thread.submit(save)
        else:
            with guard_world_collective(self.coord, "the save"):
                path = save()
            self._finish(path)

    def failed(self) -> bool:
        """Whether the pending save has failed; logs one that has succeeded. Does not wait."""
        if self.exports is not None:
            self.exports.look()
        if self._pending is None or not self._pending.done():
            return False
        if self._pending.exception() is not None:
            return True
        self.wait()
        return False

    def wait(self) -> None:
        """Wait for the pending save, if any. Raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with guard_world_collective(self.coord, "the background save"):
                path = pending.result()
            self._finish(path)

    def _finish(self, path: Path) -> None:
        self.saved = self.started
        self._say(f"saved {path}")
        if self.exports is not None and self.saved is not None:
            self.exports.export(self.saved, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the pending save. If the run itself ends with an error, a failed save is only logged."""
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            logger.error("error: %s", failure)
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self.exports is not None:
                self.exports.finish() if error is None else self.exports.drop()


def make_saver(job: Job, engine: Engine, log: Log | None) -> Saver:
    """The saver of a run; collective over all ranks if the run saves at all."""
    config = job.run.checkpoint
    saves = config.directory is not None
    background = config.asynchronous and saves
    return Saver(
        engine.world.coord,
        saved=_saved_step(job),
        say=log.say if log is not None else lambda text: None,
        device=job.device if background else None,
        # Of its own also in the foreground: the slowest disk may take longer than a step ever does.
        group=make_save_group(timeout_seconds=config.timeout) if saves else None,
        exports=Exports(config, log.say) if config.export and log is not None else None,
    )


def _saved_step(job: Job) -> int | None:
    """Step of the newest checkpoint in the run's own directory, if the run resumed from it or from memory."""
    directory = job.run.checkpoint.directory
    if job.checkpoint is None or directory is None:
        return None
    if isinstance(job.checkpoint, KeptCheckpoint):
        return job.checkpoint.disk_step
    return job.checkpoint.step if job.checkpoint.path.parent.resolve() == Path(directory).resolve() else None


def save_progress(job: Job, engine: Engine, progress: Progress, saver: Saver) -> None:
    """Save a checkpoint, or start to, if the run has a checkpoint directory; collective over all ranks.

    Raises CheckpointError if this save, or the one before it, fails.
    """
    if job.run.checkpoint.directory is None:
        return
    saver.wait()
    tensors = engine.tensors()
    save = partial(
        save_checkpoint,
        job.run.checkpoint.directory,
        step=progress.step,
        tensors=saver.snapshots.take(tensors) if saver.snapshots is not None else tensors,
        state=checkpoint_state(job, engine, progress),
        tokenizer=job.tokenizer.path if job.tokenizer is not None else None,
        keep=job.run.checkpoint.keep,
        group=saver.group,
    )

    def save_next() -> Path:
        if saver.exports is not None:
            saver.exports.make_room(progress.step)
        return save()

    saver.start(progress.step, save_next)


def checkpoint_state(job: Job, engine: Engine, progress: Progress) -> dict[str, Any]:
    """What a checkpoint holds beside the tensors: plain JSON values."""
    kept = {"kept_step": engine.kept_step, "corpora": job.train.fingerprints}
    return {**progress.state(job.run), **engine.state(), **kept}


class Keeper:
    """Keeps a run's checkpoints in the memory of its nodes; all methods are collective over all ranks."""

    def __init__(self, job: Job, log: Log | None) -> None:
        self._log = log
        config = job.run.checkpoint
        assert config.directory is not None
        group = make_save_group(timeout_seconds=config.timeout)
        self._memory = NodeMemory(config.directory, place_of(job), group=group)
        self._kept: int | None = None
        """The newest step that is kept."""
        self._is_said = False
        """Whether the log says that steps are not kept."""

    def keep(self, job: Job, engine: Engine, progress: Progress) -> None:
        """Keep the state after a step. Where that cannot be, the log says so once, and the run goes on."""
        began, coord = time.perf_counter(), engine.world.coord
        tensors, state = engine.tensors(), checkpoint_state(job, engine, progress)
        try:
            with guard_world_collective(coord, "the copies in memory"):
                size = self._memory.keep(progress.step, tensors, state)
        except CheckpointError as error:
            last = "none is" if self._kept is None else f"the last one is that of step {self._kept}"
            if not self._is_said:
                self._say(f"note: step {progress.step} is not kept in memory ({last}): {error}")
            self._is_said = True
            return
        if self._is_said:
            self._say(f"step {progress.step} is kept in memory again")
            self._is_said = False
        if self._kept is None:
            nodes, seconds = self._memory.num_nodes, show_seconds(time.perf_counter() - began)
            what = f"on each node and a neighbour of {nodes} nodes" if nodes > 1 else "on the only node"
            self._say(f"kept step {progress.step} in memory, {what}: {show_bytes(size)} here, {seconds}")
        self._kept = progress.step

    def _say(self, text: str) -> None:
        if self._log is not None:
            self._log.say(text)


@contextmanager
def keeping(job: Job, log: Log | None) -> Iterator[Keeper | None]:
    """What keeps a run's checkpoints in memory, if it does; at its proper end, when all is saved, none stays.

    Collective over all ranks.
    """
    config = job.run.checkpoint
    if not config.in_memory:
        yield None
        return
    yield Keeper(job, log)
    assert config.directory is not None
    if job.position.rank == 0:
        # Nor does what a node has that was away.
        forget_copies(config.directory)
    remove_copies(config.directory, place_of(job)[0])


class _Region(NamedTuple):
    """A box of a global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def common(self, other: _Region) -> _Region | None:
        """What both have; None: nothing."""
        firsts = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        sizes = tuple(end - first for first, end in zip(firsts, ends, strict=True))
        return _Region(firsts, sizes) if all(size > 0 for size in sizes) else None

    def without(self, other: _Region) -> Iterator[_Region]:
        """What the other has not, in boxes."""
        part = self.common(other)
        if part is None:
            yield self
            return
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (first, size) in enumerate(zip(*part, strict=True)):
            before, after = first - offsets[dim], offsets[dim] + sizes[dim] - first - size
            for start, count in ((offsets[dim], before), (first + size, after)):
                if count:
                    yield _Region(
                        (*offsets[:dim], start, *offsets[dim + 1 :]), (*sizes[:dim], count, *sizes[dim + 1 :])
                    )
            offsets[dim], sizes[dim] = first, size


def _region(box: TensorBox) -> _Region:
    return _Region(box.offsets, box.sizes)


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others of a tensor of which it holds something."""

    shape: torch.Size
    dtype: torch.dtype
    regions: tuple[_Region, ...]


class RanksMemory:
    """The state that the ranks hold, as it was when this was made; its methods are collective over them.

    `num_bytes`: what this rank has been sent.
    """

    def __init__(self, held: Mapping[str, LocalShard], place: str) -> None:
        """`held`: this rank's, by global name, on the host; not to change. `place`: its node."""
        self._held = held
        self.num_bytes = 0
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        mine = {
            key: _Told(shard.shape, shard.boxes[0].tensor.dtype, tuple(map(_region, shard.boxes)))
            for key, shard in held.items()
        }
        told = gather_objects((place, mine))
        # Its own first, then those of its node, then the next ones: so that not all ask the same rank.
        order = sorted(
            range(len(told)),
            key=lambda rank: (rank != self._rank, told[rank][0] != place, (rank - self._rank) % len(told)),
        )
        self._holders: dict[str, list[tuple[int, _Told]]] = defaultdict(list)
        for rank in order:
            for key, entry in told[rank][1].items():
                self._holders[key].append((rank, entry))

    @property
    def entries(self) -> dict[str, TensorStorageMetadata]:
        """What the ranks hold, as the metadata of a checkpoint say it."""
        return {
            key: TensorStorageMetadata(TensorProperties(dtype=own[0][1].dtype), own[0][1].shape, [])
            for key, own in self._holders.items()
        }

    @torch.no_grad()
    def fill(self, tensors: Tensors) -> None:
        """Fill this rank's new parts. Raises CheckpointError if no rank holds something of them."""
        wanted = {key: _as_shard(value) for key, value in tensors.items()}
        own, coming = list[Move](), list[Move]()
        for key, shard in wanted.items():
            for move in self._moves(key, shard):
                (own if move.source == self._rank else coming).append(move)
        for move in own:
            _view(wanted, move).copy_(_view(self._held, move))
        self._exchange([move for asked in gather_objects(coming) for move in asked], wanted)
        for shard in wanted.values():
            _repeat(shard)

    def _moves(self, key: str, shard: LocalShard) -> Iterator[Move]:
        """What fills a tensor's boxes, every element of it once; from this rank what it has."""
        done: list[_Region] = []
        for region in map(_region, shard.boxes):
            rest = _without_all([region], done)
            done.append(region)
            for rank, entry in self._holders[key]:
                for held in entry.regions:
                    found = [(part, common) for part in rest if (common := part.common(held)) is not None]
                    for _, common in found:
                        yield Move(key, rank, self._rank, *common)
                    rest = _without_all(rest, [held]) if found else rest
            if rest:
                raise CheckpointError(f"{key}: no rank holds {rest[0]}")

    def _exchange(self, table: Sequence[Move], wanted: Mapping[str, LocalShard]) -> None:
        """Send and receive this rank's part of all moves: of each pair of ranks one message at a time."""
        mine = [move for move in table if self._rank in (move.source, move.target)]
        dtype_of = {key: own[0][1].dtype for key, own in self._holders.items()}
        for dtype in sorted({dtype_of[move.name] for move in mine}, key=str):
            of_type = [move for move in mine if dtype_of[move.name] == dtype]
            for messages in rounds_of(make_buckets(of_type, itemsize=dtype.itemsize)):
                flats = [self._start(bucket, dtype) for bucket in messages]
                for (flat, work), bucket in zip(flats, messages, strict=True):
                    work.wait()
                    if bucket.target == self._rank:
                        unpack(bucket, flat, lambda move: _view(wanted, move))
                        self.num_bytes += flat.nbytes

    def _start(self, bucket: MoveBucket, dtype: torch.dtype) -> tuple[torch.Tensor, dist.Work]:
        if bucket.source == self._rank:
            flat = pack(bucket, lambda move: _view(self._held, move), dtype=dtype)
            work = dist.isend(flat, bucket.target)
        else:
            flat = torch.empty(bucket.num_elements, dtype=dtype)
            work = dist.irecv(flat, bucket.source)
        assert work is not None
        return flat, work


@dataclass(frozen=True)
class LiveCheckpoint(Checkpoint):
    """A checkpoint of what the ranks hold: its tensors are in their memory, its path is of no file."""

    memory: RanksMemory = field(kw_only=True)

    @cached_property
    def entries(self) -> Mapping[str, TensorStorageMetadata]:
        return self.memory.entries

    def fill(self, tensors: Tensors, *, no_dist: bool = False) -> None:
        assert not no_dist, "all ranks fill theirs together"
        self.memory.fill(tensors)


def _without_all(regions: Sequence[_Region], parts: Sequence[_Region]) -> list[_Region]:
    """The rest of some boxes without others."""
    rest = list(regions)
    for part in parts:
        rest = [piece for region in rest for piece in region.without(part)]
    return rest


def _as_shard(value: torch.Tensor | LocalShard) -> LocalShard:
    if isinstance(value, LocalShard):
        return value
    return LocalShard(value.shape, (TensorBox((0,) * value.dim(), tuple(value.shape), value),))


def _view(shards: Mapping[str, LocalShard], move: Move) -> torch.Tensor:
    """Where a rank holds what a move carries: in the first box that has all of it."""
    region = _Region(move.offsets, move.sizes)
    return next(_part(b, region) for b in shards[move.name].boxes if _region(b).common(region) == region)


def _part(box: TensorBox, region: _Region) -> torch.Tensor:
    """The view of a region of a box."""
    firsts = (o - b for o, b in zip(region.offsets, box.offsets, strict=True))
    return box.tensor[tuple(slice(at, at + n) for at, n in zip(firsts, region.sizes, strict=True))]


def _repeat(shard: LocalShard) -> None:
    """Copy what a box has that one before it has too: a vector is whole in each of a rank's slices."""
    for number, box in enumerate(shard.boxes):
        for before in shard.boxes[:number]:
            if (common := _region(box).common(_region(before))) is not None:
                _part(box, common).copy_(_part(before, common))
