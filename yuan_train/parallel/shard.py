"""Shards: the part of a global tensor that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch


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

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        if self.dim is None:
            return self.shape
        assert self.shape[self.dim] % (self.blocks * self.count) == 0, "parts are equal"
        return tuple(n // self.count if d == self.dim else n for d, n in enumerate(self.shape))

    def local(self, whole: torch.Tensor) -> torch.Tensor:
        """This shard of a global tensor [shape], as a tensor [local_shape]."""
        return part_of(whole, self, self.index, self.count).reshape(self.local_shape)


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
) -> Shard:
    """The shard of a parameter, given its global name and global shape.

    `sharding` maps patterns of module names to the model's sharding styles: column, row, filter, vocabulary
    or whole. `row_blocks` maps patterns to the number of matrices stacked in a weight; 1 where none matches.
    """
    module, _, kind = name.rpartition(".")
    style = sharding_style(module, sharding)
    assert style is not None, f"no sharding style for parameter {name}"
    blocks = next((n for pattern, n in row_blocks.items() if fnmatchcase(module, pattern)), 1)
    dim = _dim(style, module, kind)
    if dim is None:
        return Shard(shape)
    return Shard(shape, dim, blocks, index, count)


def sharding_style(module: str, sharding: Mapping[str, str]) -> str | None:
    """The sharding style of a module: that of the first pattern that matches its name, or None."""
    return next((style for pattern, style in sharding.items() if fnmatchcase(module, pattern)), None)


def _dim(style: str, module: str, kind: str) -> int | None:
    if style in ("column", "vocabulary"):
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
    return whole if shard.dim is None else whole // count
