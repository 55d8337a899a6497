"""Dropout whose masks do not depend on the cut of the model: they are hashed from names, not drawn in a row.

Whether an element stays follows from the seed, the position of its sample in the run's data (a step and a
place in its batch), the layer, the site, and the element's place in the sample. Integers only, so that a CPU
and a GPU agree. The masks are hashed again in the backward: nothing is kept of them.

B = sequences, S = tokens of a sequence, H = hidden size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
"""(shift, factor) of skeeto/hash-prospector's triple32, which mixes 32 bits without a measurable bias."""

_LAST_SHIFT = 14
_LOW = 0xFFFFFFFF

Keys = tuple[int, int, int]


@dataclass(frozen=True)
class Draw:
    """What the masks of a micro-batch follow from, besides layer and site."""

    seed: int
    first_sample: int
    """Position of its first sample in the run's data."""

    def keys(self, sample: int, layer: int, site: str) -> Keys:
        """Three 32-bit numbers for a sample of the micro-batch at one place of the model."""
        text = f"{self.seed}:{self.first_sample + sample}:{layer}:{site}"
        digest = hashlib.sha256(text.encode()).digest()
        return (
            int.from_bytes(digest[:4], "little"),
            int.from_bytes(digest[4:8], "little"),
            int.from_bytes(digest[8:12], "little"),
        )


def drop_hidden(x_BSH: Tensor, site: str, *, rate: float, draw: Draw, layer: int) -> Tensor:
    """Return x with a share `rate` of its elements 0 and the others divided by 1 - rate."""
    keys = tuple(draw.keys(sample, layer, site) for sample in range(x_BSH.shape[0]))
    return _Dropout.apply(x_BSH, rate, keys)  # pyright: ignore[reportReturnType]


def hashes(count: int, keys: Keys, *, device: torch.device | str = "cpu") -> Tensor:
    """Return int64 [count], evenly spread over [0, 2^32): a hash of each place in a sample under `keys`."""
    assert count <= 1 << 32, "places have 32 bits"
    x = torch.arange(count, device=device)
    for (shift, factor), key in zip(_ROUNDS, keys, strict=True):
        x.bitwise_xor_(key)
        x.bitwise_xor_(x >> shift)
        # Of a factor of 32 bits its signed form: the same low bits, and no product leaves 64 bits.
        x.mul_(factor - (1 << 32) if factor >> 31 else factor).bitwise_and_(_LOW)
    return x.bitwise_xor_(x >> _LAST_SHIFT)


def _drop(x_BSH: Tensor, rate: float, keys: tuple[Keys, ...]) -> Tensor:
    """Sample by sample: the hashes, 8 bytes an element, exist for one at a time."""
    dropped_BSH = torch.empty_like(x_BSH, memory_format=torch.contiguous_format)
    least = round(rate * (1 << 32))
    for sample, out, key in zip(x_BSH, dropped_BSH, keys, strict=True):
        torch.mul(
            sample, (hashes(sample.numel(), key, device=x_BSH.device) >= least).view_as(sample), out=out
        )
    return dropped_BSH.mul_(1 / (1 - rate))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, rate: float, keys: tuple[Keys, ...]) -> Tensor:
        ctx.rate, ctx.keys = rate, keys
        return _drop(x_BSH, rate, keys)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _drop(gradients[0], ctx.rate, ctx.keys), None, None
