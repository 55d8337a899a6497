"""The initial weights of a model: functions of the seed and of a parameter's global name and shape.

Any rank can draw any part of any parameter. A generator cannot jump, so the rows before a part are drawn too,
but in blocks that are dropped at once: no more than one block is in memory beside the part itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from yuan_train.config.architecture import Constant, Uniform
from yuan_train.config.model import ModelConfig, find_parameter

BLOCK_ELEMENTS = 1 << 22
"""Elements that are drawn at a time, 16 MiB."""

_VECTOR = 16
"""Torch draws normal numbers in vectors of this many, and more than it needs for a rest that is shorter: so
blocks are multiples of it, and the last one is never shorter."""


def initial_weight(config: ModelConfig, name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """Return the initial value of a parameter, fp32 on the CPU, from its global name and global shape.

    Each name has its own generator, so the value depends neither on the partition of the model nor on the
    order of calls. From which distribution it is drawn, the architecture says (`ParameterSpec.initial`).
    """
    weight = torch.empty(shape, dtype=torch.float32)
    for first, rows in initial_rows(config, name, shape, seed=seed):
        weight[first : first + len(rows)] = rows
    return weight


def initial_rows(
    config: ModelConfig,
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int,
    wanted: Callable[[int, int], bool] = lambda first, last: True,
) -> Iterator[tuple[int, Tensor]]:
    """Yield `initial_weight` in blocks of rows, as (first row, rows [n, ...]), in order.

    A block [first, last) of which `wanted` says no is left out; after the last wanted one nothing is drawn.
    Each expert of a stack has a generator of its own: who wants some of them draws no other.
    """
    if find_parameter(config, name).sharding == "expert":
        for expert in range(shape[0]):
            if wanted(expert, expert + 1):
                draw = _drawing(config, name, f"{seed}:{name}:{expert}")
                yield expert, draw(torch.empty((1, *shape[1:]), dtype=torch.float32))
        return
    blocks = list(_blocks(shape))
    while blocks and not wanted(*blocks[-1]):
        blocks.pop()
    draw = _drawing(config, name, f"{seed}:{name}")
    for first, last in blocks:
        rows = draw(torch.empty((last - first, *shape[1:]), dtype=torch.float32))
        if wanted(first, last):
            yield first, rows


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    row = math.prod(shape[1:])
    unit = _VECTOR // math.gcd(row, _VECTOR)
    length = max(BLOCK_ELEMENTS // row // unit, 1) * unit
    first = 0
    while first < shape[0]:
        # What would be left is less than a vector: the block takes it along.
        rest = (shape[0] - first - length) * row
        last = shape[0] if rest < _VECTOR else first + length
        yield first, last
        first = last


def _drawing(config: ModelConfig, name: str, seed: str) -> Callable[[Tensor], Tensor]:
    """Fills tensors with the next values of a parameter, in place; `seed` is of this parameter alone."""
    initial = find_parameter(config, name).initial
    if isinstance(initial, Constant):
        return lambda weight: weight.fill_(initial.value)
    digest = hashlib.sha256(seed.encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if isinstance(initial, Uniform):
        return lambda weight: weight.uniform_(-initial.bound, initial.bound, generator=generator)
    return lambda weight: weight.normal_(0.0, initial.std, generator=generator)
