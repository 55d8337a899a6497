"""Shards: the part of a global tensor that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from yuan_train.config.architecture import WHOLE_ADAPTERS


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` equal parts of a global tensor along `dim`; the whole tensor if `dim` is None.

    A tensor of several `blocks`, matrices stacked along `dim`, is sharded block by block: each part has its
    share of every block.
    """

    shape: tuple[int, ...]
    """Shape of the global tensor."""
    dim: int | None = None
    blocks: int = 1
    index: int = 0
    count: int = 1
    rows: tuple[int, int] | None = None
    """Of parts that are not equal: the rows [first, last) of this one, along dim 0."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        if self.rows is not None:
            return (self.rows[1] - self.rows[0], *self.shape[1:])
        if self.dim is None:
            return self.shape
        assert self.shape[self.dim] % (self.blocks * self.count) == 0, "parts are equal"
        return tuple(n // self.count if d == self.dim else n for d, n in enumerate(self.shape))

    def holds_rows(self, first: int, last: int) -> bool:
        """Whether this shard holds a part of rows [first, last) of the global tensor."""
        return self.dim != 0 or any(True for _ in self._row_ranges(first, last))

    def fill_rows(self, local: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        """Copy what this shard holds of rows [first, first + n) of the global tensor into `local`.

        `local` is [local_shape], `rows` [n, ...]; it is converted to the dtype and device of `local`.
        """
        last = first + len(rows)
        if self.dim == 0:
            for start, end, at in self._row_ranges(first, last):
                local[at : at + end - start] = rows[start - first : end - first]
            return
        part = local[first:last]
        part.copy_(part_of(rows, self, self.index, self.count).reshape(part.shape))

    def _row_ranges(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """What it holds of rows [first, last): global rows [start, end), and the local row of `start`."""
        if self.rows is not None:
            start, end = max(first, self.rows[0]), min(last, self.rows[1])
            if start < end:
                yield start, end, start - self.rows[0]
            return
        size = self.shape[0] // (self.blocks * self.count)
        for block in range(self.blocks):
            begin = (block * self.count + self.index) * size
            start, end = max(first, begin), min(last, begin + size)
            if start < end:
                yield start, end, block * size + start - begin


@dataclass(frozen=True, eq=False)
class TensorBox:
    """A box of a global tensor, and the local tensor [sizes] that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor


def part_of(tensor: torch.Tensor, shard: Shard, index: int, count: int) -> torch.Tensor:
    """The view of part `index` of `count` of a tensor with the layout of `shard`, blocks in a separate dim.

    If `shard` is not sharded, every part is the whole tensor.
    """
    if shard.dim is None:
        return tensor
    size = tensor.shape[shard.dim] // (shard.blocks * count)
    return tensor.unflatten(shard.dim, (shard.blocks, count, size)).select(shard.dim + 1, index)


def find_shard(
    name: str,
    shape: tuple[int, ...],
    sharding: Mapping[str, str],
    row_blocks: Mapping[str, int],
    *,
    index: int,
    count: int,
    experts: tuple[int, int] | None = None,
) -> Shard:
    """The shard of a parameter, given its global name and global shape.

    With `experts`, the range of experts of a rank, those are divided, and all else is whole.

    `sharding` maps patterns of module names to the model's sharding styles: column, row, filter, vocabulary,
    expert, head_norm or whole. Adapters are sharded with their matrix [out, in]: of a column the rows of B
    [out, rank], of a row the columns of A [rank, in]; the other one is whole. `row_blocks` maps patterns to
    the number of matrices stacked in a weight; 1 where none matches.
    """
    module, _, kind = name.rpartition(".")
    style = sharding_style(module, sharding)
    assert style is not None, f"no sharding style for parameter {name}"
    if experts is not None:
        return Shard(shape, 0, rows=experts) if style == "expert" else Shard(shape)
    blocks = next((n for pattern, n in row_blocks.items() if fnmatchcase(module, pattern)), 1)
    dim = _dim(style, module, kind)
    if dim is None:
        return Shard(shape)
    return Shard(shape, dim, blocks, index, count)


def sharding_style(module: str, sharding: Mapping[str, str]) -> str | None:
    """The sharding style of a module: that of the first pattern that matches its name, or None."""
    return next((style for pattern, style in sharding.items() if fnmatchcase(module, pattern)), None)


def _dim(style: str, module: str, kind: str) -> int | None:
    # Of adapters the one is whole that neither reads a part of the input nor makes one of the output.
    if (style, kind) in WHOLE_ADAPTERS:
        return None
    if style in ("column", "vocabulary", "expert"):
        return 0
    if style == "row":
        return 1
    if style == "filter":
        # The channels are conv1's outputs and conv2's inputs; conv2's bias is added after the all-reduce.
        if module.endswith("conv1"):
            return 0
        return 1 if kind == "weight" else None
    return None


def num_elements(shard: Shard, count: int) -> int:
    """Elements of one of `count` parts of the global tensor; all of them if it is not sharded."""
    whole = math.prod(shard.shape)
    if shard.rows is not None:
        assert count == 1, "experts have one owner in each group"
        return math.prod(shard.local_shape)
    return whole if shard.dim is None else whole // count
