"""Shards: the part of a global tensor that a rank holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from yuan_train.config.model import WHOLE_ADAPTERS


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


Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box of a tensor: `offsets` and `sizes` by dim, and where it begins in the run that it is of."""

    offsets: Sizes
    sizes: Sizes
    start: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)


def run_boxes(shape: Sizes, start: int, end: int) -> Iterator[Box]:
    """The boxes of the row-major elements [start, end) of a tensor of this shape, in order.

    The first box completes rows that `start` lies inside of, the last one begins rows that `end` lies inside
    of; between them are whole rows. `Box.start` counts from `start`.
    """
    if start >= end:
        return
    if not shape:
        yield Box((), (), 0)
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(end, row)
    if len(shape) == 1:
        yield Box((start,), (end - start,), 0)
        return
    if first == last:
        yield from _inside(shape, first, head, tail, before=0)
        return
    done = 0
    if head:
        yield from _inside(shape, first, head, row, before=0)
        done, first = row - head, first + 1
    if last > first:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), done)
        done += (last - first) * row
    if tail:
        yield from _inside(shape, last, 0, tail, before=done)


def _inside(shape: Sizes, index: int, start: int, end: int, *, before: int) -> Iterator[Box]:
    """The boxes of the elements [start, end) of row `index`."""
    for box in run_boxes(shape[1:], start, end):
        yield Box((index, *box.offsets), (1, *box.sizes), before + box.start)


def box_views(
    shard: Shard, flat: torch.Tensor, start: int = 0, *, index: int | None = None, count: int | None = None
) -> Iterator[TensorBox]:
    """The boxes, in the global tensor, of the elements [start, start + n) of a part of it, as views of a
    buffer [n] that holds them; of part `index` of `count`, or the shard's own."""
    index, count = shard.index if index is None else index, shard.count if count is None else count
    for box in global_boxes(shard, index, count, start, start + flat.numel()):
        yield TensorBox(
            box.offsets, box.sizes, flat[box.start : box.start + box.num_elements].view(box.sizes)
        )


def global_boxes(shard: Shard, index: int, count: int, start: int, end: int) -> Iterator[Box]:
    """The boxes, in the global tensor, of the elements [start, end) of part `index` of `count` of it.

    The part is laid out as `shard.part_of` gives it: its share of every block, one after the other along the
    dim that is sharded. A tensor that is not sharded is whole in every part.
    """
    if shard.rows is not None:
        for box in run_boxes(shard.local_shape, start, end):
            yield replace(box, offsets=(box.offsets[0] + shard.rows[0], *box.offsets[1:]))
        return
    if shard.dim is None:
        yield from run_boxes(shard.shape, start, end)
        return
    dim, block = shard.dim, shard.shape[shard.dim] // shard.blocks
    size = block // count
    split = (*shard.shape[:dim], shard.blocks, size, *shard.shape[dim + 1 :])
    for box in run_boxes(split, start, end):
        # Blocks are apart in the global tensor, though not in the part.
        blocks = range(box.offsets[dim], box.offsets[dim] + box.sizes[dim])
        sizes = (*box.sizes[:dim], *box.sizes[dim + 1 :])
        # A box over several blocks has all of each: one box per block, and per index of the dims before.
        outer = list(itertools.product(*(range(n) for n in box.sizes[:dim])))
        if len(blocks) == 1:
            offset = blocks[0] * block + index * size + box.offsets[dim + 1]
            yield Box((*box.offsets[:dim], offset, *box.offsets[dim + 2 :]), sizes, box.start)
            continue
        each = math.prod(sizes[dim:])
        for i, (place, b) in enumerate(itertools.product(outer, blocks)):
            offsets = tuple(o + p for o, p in zip(box.offsets[:dim], place, strict=True))
            yield Box(
                (*offsets, b * block + index * size + box.offsets[dim + 1], *box.offsets[dim + 2 :]),
                (*[1] * dim, *sizes[dim:]),
                box.start + i * each,
            )
