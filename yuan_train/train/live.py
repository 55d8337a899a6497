"""A run's state where it is: in the memory of its ranks, to be taken over by other parts of them.

It is loaded as a checkpoint is, under any plan, but from the ranks' own tensors: nothing is written, and
nobody holds all of it. A rank copies what it had before. Of the rest every element comes to it once, as a
message of the nearest rank that has it, so that the bytes sent are the fewest that fill the new parts: those
that a rank is to hold and did not.

Apart from `move.py`, which knows engines and plans: here are tensors by name, and who holds what of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from yuan_train.checkpoint.load import Checkpoint
from yuan_train.checkpoint.local_shards import LocalShard, Tensors
from yuan_train.config.errors import CheckpointError
from yuan_train.parallel.groups import gather_objects
from yuan_train.parallel.shard import TensorBox
from yuan_train.parallel.transfer import Bucket, Move, make_buckets, pack, rounds_of, unpack


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

    def _start(self, bucket: Bucket, dtype: torch.dtype) -> tuple[torch.Tensor, dist.Work]:
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
