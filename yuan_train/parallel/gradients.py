"""Flat buffers of weights and gradients, and the gradient norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from yuan_train.config.architecture import ADAPTERS
from yuan_train.parallel.grid import Bucket
from yuan_train.parallel.shard import Shard, num_elements, part_of
from yuan_train.parallel.tiers.slab import HostSlab

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of masters and gradients for weights of `dtype`: fp32 for bf16 and fp16, else the same."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


@dataclass(frozen=True)
class Piece:
    """The position of a parameter in a flat buffer: elements [start, start + length)."""

    name: str
    shard: Shard
    start: int
    length: int


@dataclass(frozen=True)
class Slice:
    """One of the equal parts of a bucket; owners of different widths reduce gradients slice by slice.

    Laid out like the bucket: matrices, sharded vectors, replicated vectors; of adapters sharded matrices come
    before replicated ones. What is replicated is in every slice, and counts only in slice 0.
    """

    index: int
    """Number of the slice in the bucket."""
    local_index: int
    """Number among the slices that this rank holds."""
    group: tuple[int, ...]
    """The ranks that hold it, one of each owner."""
    pieces: tuple[Piece, ...]
    num_matrix_elements: int
    num_sharded_elements: int

    @property
    def num_elements(self) -> int:
        """Elements of the slice, replicated parameters included."""
        last = self.pieces[-1]
        return last.start + last.length

    @property
    def num_counted_elements(self) -> int:
        """The leading elements that count in this slice; what is replicated counts in slice 0 only."""
        return self.num_elements if self.index == 0 else self.num_sharded_elements


class FlatBucket:
    """The parameters of one bucket that a rank holds, end to end in flat buffers.

    `gradient` [n] holds the gradient summed over micro-batches, in fp32 (fp64 for fp64 models); `weights` [n]
    holds the model's weights in their own precision. The parameters become views of `weights`, and autograd
    accumulates into `gradient`.

    A bucket of a range of experts holds rows of one parameter that other buckets hold too: `shards` says
    which, and its buffers are parts of `whole`, the buffers of the parameter.
    """

    def __init__(
        self,
        bucket: Bucket,
        parameters: Mapping[str, torch.nn.Parameter],
        shards: Mapping[str, Shard],
        *,
        rank: int,
        whole: FlatParameter | None = None,
        slab: HostSlab | None = None,
    ) -> None:
        """`slab`: the bucket is a page of the host, whose buffers are pieces of it."""
        self.bucket = bucket
        """The units, and who holds them."""
        self.rank = rank
        self.is_paged = slab is not None
        self.num_slices = bucket.num_slices
        self.owners_are_alike = len({len(owner) for owner in bucket.owners}) == 1
        """Whether all owners have the same tensor-parallel width, so that each holds a single slice."""
        self.is_first_owner = rank in bucket.owners[0]
        """Whether this rank belongs to the first owner, which writes what owners of different widths hold."""
        order = {name: _order(name, p, shards[name]) for name, p in parameters.items()}
        self.parameters = dict(sorted(parameters.items(), key=lambda item: order[item[0]]))
        self.shards = {name: shards[name] for name in self.parameters}
        sizes = {name: math.prod(shard.local_shape) for name, shard in self.shards.items()}
        self.pieces = tuple(_pieces(self.shards, sizes))
        self._piece_of = {piece.name: piece for piece in self.pieces}
        first = next(iter(self.parameters.values()))
        total = sum(sizes.values())
        self.is_low_precision = first.dtype in _LOW_PRECISION
        self.slices = tuple(_slices(bucket, self.shards, rank))
        if whole is not None:
            self.weights, self.gradient = whole.rows_of(next(iter(self.shards.values())))
            return
        if slab is not None:
            self.weights = slab.take(total, first.dtype)
            self.gradient = slab.take(total, master_dtype(first.dtype))
        else:
            self.weights = torch.empty(total, dtype=first.dtype, device=first.device)
            self.gradient = torch.zeros(total, dtype=master_dtype(first.dtype), device=first.device)
        for name, parameter in self.parameters.items():
            _move(parameter, self.view(self.weights, name), self.view(self.gradient, name))

    def drop_gradient(self) -> None:
        """The parameters are not trained: free what is there for their gradients."""
        self.gradient = self.gradient.new_empty(0)
        for parameter in self.parameters.values():
            parameter.grad = None
            parameter.main_gradient = self.gradient  # pyright: ignore[reportAttributeAccessIssue]

    def freeze(self) -> None:
        """The parameters are never trained: no gradient passes to them."""
        self.drop_gradient()
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)
            # The head then computes no gradient of its matrix.
            del parameter.main_gradient  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def num_matrix_elements(self) -> int:
        """Elements of the matrices, which come before the vectors."""
        return sum(piece.length for piece in self.pieces if len(piece.shard.shape) >= 2)

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The view of a flat buffer [n] that belongs to a parameter, in the parameter's local shape."""
        piece = self._piece_of[name]
        return flat[piece.start : piece.start + piece.length].view(piece.shard.local_shape)

    def pack(self, flat: torch.Tensor, part: Slice) -> torch.Tensor:
        """A contiguous copy of a slice of a flat buffer [n]; the buffer itself if it is a single slice."""
        if len(self.slices) == 1:
            return flat
        packed = flat.new_empty(part.num_elements)
        for piece in part.pieces:
            target = packed[piece.start : piece.start + piece.length]
            source = self.slice_view(flat, piece.name, part)
            target.view(source.shape).copy_(source)
        return packed

    def unpack(self, packed: torch.Tensor, part: Slice, flat: torch.Tensor) -> None:
        """Copy a packed slice back into a flat buffer [n]; nothing to do if it is the buffer itself."""
        if packed.data_ptr() == flat.data_ptr():
            return
        for piece in part.pieces:
            target = self.slice_view(flat, piece.name, part)
            target.copy_(packed[piece.start : piece.start + piece.length].view(target.shape))

    def slice_view(self, flat: torch.Tensor, name: str, part: Slice) -> torch.Tensor:
        """The view of a flat buffer [n] that a slice has of a parameter; blocks in a dim apart."""
        return part_of(self.view(flat, name), self.shards[name], part.local_index, len(self.slices))


class FlatParameter:
    """The buffers of a parameter of experts that several buckets share: of each, consecutive rows."""

    def __init__(self, parameter: torch.nn.Parameter, shard: Shard) -> None:
        """`shard` is what this rank holds of it."""
        assert shard.rows is not None
        self._first = shard.rows[0]
        self._weights = torch.empty_like(parameter, requires_grad=False)
        self._gradient = torch.zeros_like(self._weights, dtype=master_dtype(parameter.dtype))
        _move(parameter, self._weights, self._gradient)

    def rows_of(self, shard: Shard) -> tuple[torch.Tensor, torch.Tensor]:
        """The flat weights [n] and gradient [n] of the rows of `shard`."""
        assert shard.rows is not None
        rows = slice(shard.rows[0] - self._first, shard.rows[1] - self._first)
        return self._weights[rows].flatten(), self._gradient[rows].flatten()


def _move(parameter: torch.nn.Parameter, weights: torch.Tensor, gradient: torch.Tensor) -> None:
    """Make a parameter live in a buffer, and autograd accumulate into another, in the master's precision."""
    with torch.no_grad():
        weights.copy_(parameter)
    parameter.data = weights
    # The head adds its gradient here in the forward, linears and filters in their backward.
    parameter.main_gradient = gradient  # pyright: ignore[reportAttributeAccessIssue]
    parameter.on_main_gradient = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    if parameter.dtype not in _LOW_PRECISION:
        parameter.grad = gradient
        return

    def add(p: torch.Tensor) -> None:
        if p.grad is None:
            # torch calls this without a gradient too: for the head, and in a split backward's first part.
            return
        # Where it is now: that of a page moves.
        p.main_gradient.add_(p.grad)  # pyright: ignore[reportAttributeAccessIssue]
        p.grad = None

    parameter.register_post_accumulate_grad_hook(add)


def _order(name: str, parameter: torch.nn.Parameter, shard: Shard) -> int:
    """Sort key: matrices, replicated adapters, sharded vectors, replicated vectors."""
    if parameter.dim() >= 2:
        return 1 if _is_replicated(shard) and _is_adapter(name) else 0
    return 3 if _is_replicated(shard) else 2


def _is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in ADAPTERS


def _is_replicated(shard: Shard) -> bool:
    """Whether every rank of the tensor-parallel group holds the full tensor."""
    return shard.dim is None


def _pieces(shards: Mapping[str, Shard], lengths: Mapping[str, int]) -> Iterator[Piece]:
    start = 0
    for name, shard in shards.items():
        yield Piece(name, shard, start, lengths[name])
        start += lengths[name]


def _slices(bucket: Bucket, shards: Mapping[str, Shard], rank: int) -> Iterator[Slice]:
    indices = bucket.slices_of(rank)
    lengths = {name: num_elements(shard, bucket.num_slices) for name, shard in shards.items()}
    pieces = tuple(_pieces(shards, lengths))
    num_matrix = sum(piece.length for piece in pieces if len(piece.shard.shape) >= 2)
    counted = [
        not _is_replicated(piece.shard) or (len(piece.shard.shape) >= 2 and not _is_adapter(piece.name))
        for piece in pieces
    ]
    assert counted == sorted(counted, reverse=True), "what counts in every slice comes first"
    sharded = sum(piece.length for piece, counts in zip(pieces, counted, strict=True) if counts)
    for local_index, index in enumerate(indices):
        yield Slice(index, local_index, bucket.slice_group(index), pieces, num_matrix, sharded)


def squared_norm(buckets: list[FlatBucket], *, device: torch.device) -> torch.Tensor:
    """This rank's term of the squared global gradient norm: a scalar, fp64, on `device`.

    Each slice counts on the first rank that holds it, and a replicated vector in slice 0 only.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for bucket in buckets:
        for part in bucket.slices:
            if part.group[0] == bucket.rank:
                counted = bucket.pack(bucket.gradient, part)[: part.num_counted_elements]
                total += sum_of_squares(counted)
    return total


BLOCK = 1 << 16
CARD_BLOCK = 1 << 22
"""Elements that are summed at a time, on a CPU and on a card: torch makes a copy of its input in 8 bytes
each, which stays in a core's cache, or takes 32 MB of a card with few launches."""


def blocks_of(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A flat buffer [n] in blocks to be summed one after another; a single empty one if n is 0."""
    return flat.split(BLOCK if flat.device.type == "cpu" else CARD_BLOCK)


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """The sum of squares of a flat buffer [n], in fp64, which copies a block of it at a time."""
    norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks_of(flat)]
    return (norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))) ** 2
