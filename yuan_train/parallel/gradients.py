"""Weights and gradients in flat buffers, when gradients are summed over owners, and their global norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from yuan_train.parallel.grid import Bucket
from yuan_train.parallel.shard import Shard, num_elements, part_of
from yuan_train.schedule.step import Lane, Step

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of masters and gradients under weights of a precision."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


@dataclass(frozen=True)
class Piece:
    """Where a parameter lies in a flat buffer."""

    name: str
    shard: Shard
    start: int
    length: int


@dataclass(frozen=True)
class Slice:
    """One of the equal parts into which a bucket is cut, so that owners of unlike width can meet.

    Laid out as the bucket: matrices, cut vectors, whole vectors. A whole vector is in every slice, and counts
    in the first alone.
    """

    index: int
    local_index: int
    group: tuple[int, ...]
    """The ranks that hold it."""
    pieces: tuple[Piece, ...]
    num_matrix_elements: int
    num_cut_elements: int

    @property
    def num_elements(self) -> int:
        last = self.pieces[-1]
        return last.start + last.length

    @property
    def num_counted_elements(self) -> int:
        """Elements that no other slice has."""
        return self.num_elements if self.index == 0 else self.num_cut_elements


class FlatBucket:
    """The parameters of one bucket, laid end to end.

    `gradient` [n] holds the gradient summed over micro-batches in fp32 (fp64 for fp64 models); `weights` [n]
    the model's weights in their own precision.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Mapping[str, torch.nn.Parameter],
        shards: Mapping[str, Shard],
        *,
        rank: int,
    ) -> None:
        self.rank = rank
        self.is_first_owner = rank in bucket.owners[0]
        """Whether this rank is of the owner that writes the bucket into checkpoints: owners of unlike width
        hold overlapping parts."""
        order = {name: _order(p, shards[name]) for name, p in parameters.items()}
        self.parameters = dict(sorted(parameters.items(), key=lambda item: order[item[0]]))
        self.shards = {name: shards[name] for name in self.parameters}
        self.pieces = tuple(_pieces(self.shards, {n: p.numel() for n, p in self.parameters.items()}))
        self._piece_of = {piece.name: piece for piece in self.pieces}
        first = next(iter(self.parameters.values()))
        total = sum(parameter.numel() for parameter in self.parameters.values())
        self.is_low_precision = first.dtype in _LOW_PRECISION
        self.weights = torch.empty(total, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros(total, dtype=master_dtype(first.dtype), device=first.device)
        self.slices = tuple(_slices(bucket, self.shards, rank))
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                view = self.view(self.weights, name)
                view.copy_(parameter)
                parameter.data = view
                self._gather_gradient(name, parameter)

    @property
    def num_matrix_elements(self) -> int:
        """Elements of the matrices, which stand first; vectors follow."""
        return sum(piece.length for piece in self.pieces if len(piece.shard.shape) >= 2)

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The part of a flat buffer [n] that belongs to a parameter, in the parameter's local shape."""
        piece = self._piece_of[name]
        return flat[piece.start : piece.start + piece.length].view(piece.shard.local_shape)

    def pack(self, flat: torch.Tensor, part: Slice) -> torch.Tensor:
        """A slice of a flat buffer [n], end to end; the buffer itself if the slice is all of it."""
        if len(self.slices) == 1:
            return flat
        packed = flat.new_empty(part.num_elements)
        for piece in part.pieces:
            target = packed[piece.start : piece.start + piece.length]
            source = self._slice_view(flat, piece.name, part)
            target.view(source.shape).copy_(source)
        return packed

    def unpack(self, packed: torch.Tensor, part: Slice, flat: torch.Tensor) -> None:
        """Put a slice back into a flat buffer [n]."""
        if packed.data_ptr() == flat.data_ptr():
            return
        for piece in part.pieces:
            target = self._slice_view(flat, piece.name, part)
            target.copy_(packed[piece.start : piece.start + piece.length].view(target.shape))

    def _slice_view(self, flat: torch.Tensor, name: str, part: Slice) -> torch.Tensor:
        return part_of(self.view(flat, name), self.shards[name], part.local_index, len(self.slices))

    def _gather_gradient(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Let autograd add into the flat buffer, in the master's precision."""
        view = self.view(self.gradient, name)
        # The head's gradient is made in the forward, and added here without a backward.
        parameter.main_gradient = view  # pyright: ignore[reportAttributeAccessIssue]
        if not self.is_low_precision:
            parameter.grad = view
            return

        def add(p: torch.Tensor) -> None:
            if p.grad is None:
                # torch tells as well of a backward that brings none: the head's, or a split one's first part.
                return
            view.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(add)


def _order(parameter: torch.nn.Parameter, shard: Shard) -> int:
    """Matrices, cut vectors, whole vectors."""
    return 0 if parameter.dim() >= 2 else 1 if not _everywhere(shard) else 2


def _everywhere(shard: Shard) -> bool:
    """Whether a tensor is whole on every rank, however wide its group."""
    return shard.dim is None


def _pieces(shards: Mapping[str, Shard], lengths: Mapping[str, int]) -> Iterator[Piece]:
    start = 0
    for name, shard in shards.items():
        yield Piece(name, shard, start, lengths[name])
        start += lengths[name]


def _slices(bucket: Bucket, shards: Mapping[str, Shard], rank: int) -> Iterator[Slice]:
    mine = bucket.slices_of(rank)
    lengths = {name: num_elements(shard, bucket.num_slices) for name, shard in shards.items()}
    pieces = tuple(_pieces(shards, lengths))
    matrices = sum(piece.length for piece in pieces if len(piece.shard.shape) >= 2)
    cut = sum(piece.length for piece in pieces if len(piece.shard.shape) >= 2 or not _everywhere(piece.shard))
    for local_index, index in enumerate(mine):
        yield Slice(index, local_index, bucket.slice_group(index), pieces, matrices, cut)


def sums_after(lane: Lane, stages_of: Sequence[frozenset[int]]) -> dict[Step, tuple[int, ...]]:
    """After which step of a lane the gradient sum of which buckets begins, the rest of the lane still to run.

    `stages_of` are the stages that hold each bucket of a rank, in the model's order. A sum may begin when the
    last backward of those stages has ended. All ranks begin their sums in one order, for two ranks may share
    several groups: against the model's, in which backwards mostly end. A sum that is ready before its turn
    waits for it.

    Nothing can wait for ever: a beginning does not block; ends are awaited when the lane is done and all sums
    are begun; and no lane waits for a sum. So every rank of a sum begins it, in the same order as the others.
    """
    last = {step.stage: position for position, step in enumerate(lane) if step.kind.startswith("backward")}
    found: dict[Step, tuple[int, ...]] = {}
    turn = 0
    for number in reversed(range(len(stages_of))):
        turn = max(turn, *(last[stage] for stage in stages_of[number]))
        # Another stage waits for the messages behind a backward; nobody waits for the sum as yet.
        while turn + 1 < len(lane) and not lane[turn + 1].is_compute:
            turn += 1
        found[lane[turn]] = (*found.get(lane[turn], ()), number)
    return found


def squared_norm(buckets: list[FlatBucket], *, device: torch.device) -> torch.Tensor:
    """This rank's share of the squared global gradient norm, fp64.

    Each slice counts at the first rank that holds it, and a vector that is whole everywhere in slice 0.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for bucket in buckets:
        for part in bucket.slices:
            if part.group[0] == bucket.rank:
                counted = bucket.pack(bucket.gradient, part)[: part.num_counted_elements]
                total += sum_of_squares(counted)
    return total


NORM_BLOCK = 1 << 16
"""Elements whose squares are summed at a time: on a CPU torch makes an fp64 copy of all that it is given."""


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Squares of a flat buffer [n] summed in fp64, with no more than a block beside it."""
    if flat.device.type == "cuda" or flat.numel() <= NORM_BLOCK:
        return torch.linalg.vector_norm(flat, dtype=torch.float64) ** 2
    blocks = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in flat.split(NORM_BLOCK)]
    return torch.linalg.vector_norm(torch.stack(blocks)) ** 2
