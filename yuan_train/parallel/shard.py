"""Which part of a global tensor a rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` equal parts of a global tensor along `dim`; the whole tensor if `dim` is None.

    A tensor of several `blocks`, matrices one above the other along `dim`, is cut block by block: each part
    has its share of every block.
    """

    shape: tuple[int, ...]
    """Of the global tensor."""
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
        """The part of a global tensor."""
        return part_of(whole, self, self.index, self.count).reshape(self.local_shape)

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """(offsets in the global tensor, sizes, offset along `dim` in the part): one box per block."""
        if self.dim is None:
            yield (0,) * len(self.shape), self.shape, 0
            return
        size = self.shape[self.dim] // (self.blocks * self.count)
        for block in range(self.blocks):
            start = block * self.shape[self.dim] // self.blocks + self.index * size
            offsets = tuple(start if d == self.dim else 0 for d in range(len(self.shape)))
            sizes = tuple(size if d == self.dim else n for d, n in enumerate(self.shape))
            yield offsets, sizes, block * size


def part_of(tensor: torch.Tensor, shard: Shard, index: int, count: int) -> torch.Tensor:
    """View of part `index` of `count` of a tensor that is laid out as `shard` says, blocks apart.

    A whole tensor is in every part.
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
    """The shard of a parameter by its global name, from the model's own words of what may be cut.

    `sharding` maps patterns of module names to column, row, filter, vocabulary or whole.
    """
    module, _, kind = name.rpartition(".")
    word = sharding_word(module, sharding)
    assert word is not None, f"the model does not say how {name} may be cut"
    blocks = next((n for pattern, n in row_blocks.items() if fnmatchcase(module, pattern)), 1)
    dim = _dim(word, module, kind)
    if dim is None:
        return Shard(shape)
    return Shard(shape, dim, blocks, index, count)


def sharding_word(module: str, sharding: Mapping[str, str]) -> str | None:
    """The model's word for a module, or None."""
    return next((word for pattern, word in sharding.items() if fnmatchcase(module, pattern)), None)


def _dim(word: str, module: str, kind: str) -> int | None:
    if word in ("column", "vocabulary"):
        return 0
    if word == "row":
        return 1
    if word == "filter":
        # The channels are conv1's outputs and conv2's inputs; conv2's bias is added after the sum.
        if module.endswith("conv1"):
            return 0
        return 1 if kind == "weight" else None
    return None


def num_elements(shard: Shard, count: int) -> int:
    """Elements of one of `count` parts of the global tensor."""
    whole = math.prod(shard.shape)
    return whole if shard.dim is None else whole // count
