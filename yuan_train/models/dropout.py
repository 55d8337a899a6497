"""Hidden dropout whose masks do not depend on the partition of the model: they are hashed, not drawn.

Whether an element is kept is a function of the seed, the position of its sample in the run's data (which
follows from step and index in the batch), the layer, the site, and the element's index in the sample. Only
integer arithmetic is used, so that CPUs and GPUs agree. The backward hashes the masks again: none is saved.

B = sequences, S = tokens of a sequence, H = hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
"""(shift, factor) of skeeto/hash-prospector's triple32, which mixes 32 bits without a measurable bias."""

_LAST_SHIFT = 14
_LOW = 0xFFFFFFFF

Keys = tuple[int, int, int]
"""32-bit keys of the hash, one per round."""

SITES = ("attention", "feed_forward")
"""The sites of a layer: its two branches."""


Tokens = tuple[int, int]
"""Which tokens of a micro-batch a hidden state is: its first one, counted through all samples, and how many a
sample has."""


@dataclass(frozen=True)
class DropoutSeed:
    """Seed of the masks of one micro-batch; layer and site complete it."""

    seed: int
    first_sample: int
    """Position of the micro-batch's first sample in the run's data."""

    def keys(self, sample: int, layer: int, site: str) -> Keys:
        """Return the hash keys of one layer and site for the micro-batch's sample number `sample`."""
        return hash_keys(f"{self.seed}:{self.first_sample + sample}:{layer}:{site}")


def hash_keys(text: str) -> Keys:
    """The keys of `hashes` that follow from a text."""
    digest = hashlib.sha256(text.encode()).digest()
    return (
        int.from_bytes(digest[:4], "little"),
        int.from_bytes(digest[4:8], "little"),
        int.from_bytes(digest[8:12], "little"),
    )


@dataclass(frozen=True)
class LayerDropout:
    """The dropout of one layer in one micro-batch."""

    rate: float
    dropout_seed: DropoutSeed
    layer: int
    """Global number of the layer."""

    def __call__(self, x: Tensor, site: str, tokens: Tokens) -> Tensor:
        """`hidden_dropout` of this layer."""
        rate, seed = self.rate, self.dropout_seed
        return hidden_dropout(x, site, rate=rate, dropout_seed=seed, layer=self.layer, tokens=tokens)

    def key_tensors(self, x_BSH: Tensor) -> dict[str, Tensor]:
        """By site, the hash keys of x's samples: int64 [rounds, B, 1] on x's device."""
        samples = range(x_BSH.shape[0])
        keys = [[self.dropout_seed.keys(i, self.layer, site) for i in samples] for site in SITES]
        # One copy to the device for both sites.
        keys_3B1 = torch.tensor(keys).permute(0, 2, 1).unsqueeze(-1).to(x_BSH.device, non_blocking=True)
        return dict(zip(SITES, keys_3B1, strict=True))


def hidden_dropout(
    x: Tensor, site: str, *, rate: float, dropout_seed: DropoutSeed, layer: int, tokens: Tokens
) -> Tensor:
    """Return x [..., H] with a fraction `rate` of its elements zeroed, and the others divided by 1 - rate.

    `layer` is the global number of the layer, `site` a name that is unique within it.
    """
    first, length = tokens
    samples = range(first // length, -(-(first + x.shape[:-1].numel()) // length))
    keys = {sample: dropout_seed.keys(sample, layer, site) for sample in samples}
    return _Dropout.apply(x, rate, keys, tokens)  # pyright: ignore[reportReturnType]


def traceable_dropout(x_BSH: Tensor, rate: float, keys_3B1: Tensor) -> Tensor:
    """`hidden_dropout` for torch.compile, with the keys of `LayerDropout.key_tensors`.

    Python numbers that change with the sample would be compiled anew; whole tensors cost nothing, because the
    compiler fuses all passes and, for the backward too, keeps no hash.
    """
    hashes_BN = hashes(x_BSH[0].numel(), keys_3B1, device=x_BSH.device)
    kept_BSH = (hashes_BN >= _threshold(rate)).view_as(x_BSH)
    return x_BSH * kept_BSH * (1 / (1 - rate))


def hashes(count: int, keys: Keys | Tensor, *, first: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Return int64 [count]: hashes of first .. first + count - 1 under `keys`, uniform over [0, 2^32).

    Of `keys` int64 [rounds, B, 1] it returns those of B samples, [B, count].
    """
    assert first + count <= 1 << 32, "the hash takes 32-bit element indices"
    x = torch.arange(first, first + count, device=device)
    for (shift, factor), key in zip(_ROUNDS, keys, strict=True):
        x = x ^ key if isinstance(key, Tensor) and x.dim() == 1 else x.bitwise_xor_(key)
        x.bitwise_xor_(x >> shift)
        # The factor as a signed 32-bit number: the product has the same low bits, and fits 64 bits.
        x.mul_(factor - (1 << 32) if factor >> 31 else factor).bitwise_and_(_LOW)
    return x.bitwise_xor_(x >> _LAST_SHIFT)


def _drop(x: Tensor, rate: float, keys: Mapping[int, Keys], tokens: Tokens) -> Tensor:
    """Apply the masks sample by sample: the hashes, 8 bytes per element, exist for one sample at a time."""
    dropped = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows_TH, out_TH, hidden = x.flatten(0, -2), dropped.view(-1, x.shape[-1]), x.shape[-1]
    first, length = tokens
    for sample, key in keys.items():
        start = sample * length - first
        own = slice(max(start, 0), start + length)
        rows, skipped = rows_TH[own], max(-start, 0) * hidden
        kept = hashes(rows.numel(), key, first=skipped, device=x.device) >= _threshold(rate)
        torch.mul(rows, kept.view_as(rows), out=out_TH[own])
    return dropped.mul_(1 / (1 - rate))


def _threshold(rate: float) -> int:
    """The smallest hash whose element is kept."""
    return round(rate * (1 << 32))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, keys: Mapping[int, Keys], tokens: Tokens) -> Tensor:
        ctx.arguments = rate, keys, tokens
        return _drop(x, *ctx.arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _drop(gradients[0], *ctx.arguments), None, None, None
