"""Ranges of flat buffers as boxes of global tensors: what a checkpoint stores and fills without a gather.

An owner's range of a bucket is a run of elements, so of each parameter it holds a run of its row-major
elements. Such a run is a few boxes (at most 2k - 1 of a tensor of k dims), each of them contiguous in the
flat buffer too, so that it can be written and read in place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from yuan_train.parallel.shard import Shard

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
