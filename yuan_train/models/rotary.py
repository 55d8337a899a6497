"""Rotary embedding: frequencies, their published scalings, and the tables of a micro-batch.

All of it in fp32, or fp64 where the model is fp64: bf16 has 8 significant bits, so positions above 256 would
share their angles. Yuan 2.0-M32 was trained with frequencies rounded to bf16, and its published class rounds
positions, angles and tables too; `ModelConfig.rotary_form` asks for either.

B = sequences, S = tokens of a sequence, D = size of a head, R = its rotated dims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from yuan_kernels import ops

from yuan_train.config.model import ModelConfig, RopeScaling


@dataclass(frozen=True)
class RotaryTables:
    """Cosines and sines [B or 1, S, R/2] of the angles of a micro-batch's tokens."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x_BSND: Tensor) -> Tensor:
        """Return the rotary embedding of queries or keys [B, S, N, D]."""
        return ops.rotary(x_BSND, self.cos, self.sin)

    def rotate_both(self, query_BSND: Tensor, key_BSMD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary embedding of both; of single tokens in one call, which is what costs there."""
        if query_BSND.shape[1] > 1:
            return self.rotate(query_BSND), self.rotate(key_BSMD)
        both = self.rotate(torch.cat((query_BSND, key_BSMD), dim=2))
        return both[:, :, : query_BSND.shape[2]], both[:, :, query_BSND.shape[2] :]


Frequencies = tuple[Tensor, float]
"""Those of `rotary_frequencies`, with the factor of the tables."""


def rotary_tables(
    config: ModelConfig,
    positions: Tensor,
    *,
    length: int,
    dtype: torch.dtype,
    kept: dict[torch.dtype, Frequencies] | None = None,
) -> RotaryTables:
    """Return the tables of positions int64 [B or 1, S]: angle = position * frequency.

    `length` is the longest sequence so far, which `dynamic` scaling depends on. `kept`: where a caller keeps
    frequencies, by precision, from one call to the next.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = None if kept is None else kept.get(wide)
    if found is None:
        found = rotary_frequencies(config, length=length, device=positions.device, dtype=wide)
        is_dynamic = config.rope_scaling is not None and config.rope_scaling.rope_type == "dynamic"
        if kept is not None and not is_dynamic:
            kept[wide] = found
    frequencies, factor = found
    if config.rotary_form != "exact":
        frequencies = frequencies.bfloat16()
    narrow = torch.bfloat16 if config.rotary_form == "bf16" else wide
    angles = positions.to(narrow).unsqueeze(-1) * frequencies.to(narrow)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    return RotaryTables(cos, sin) if factor == 1.0 else RotaryTables(cos * factor, sin * factor)


def rotary_frequencies(
    config: ModelConfig, *, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """Return the frequencies [R/2], base^(-2i/R) (Su et al. 2021) before scaling, and a factor of the tables.

    The scalings are those that transformers names (modeling_rope_utils.py).
    """
    scaling, base, dim = config.rope_scaling, config.rope_base, config.rotary_size
    original = scaling.original_max_position_embeddings if scaling is not None else 0
    original = original or config.max_sequence_length
    if scaling is not None and scaling.rope_type == "dynamic" and length > original:
        stretch = scaling.factor * length / original - (scaling.factor - 1)
        base *= stretch ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, device=device, dtype=dtype) / dim
    frequencies = 1.0 / base**exponents
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies, 1.0
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling, original), 1.0
    return _yarn(frequencies, scaling, original, base)


def _llama3(frequencies: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones stay, between them it is interpolated."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = original * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: RopeScaling, original: int, base: float) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3): a ramp over the dims between `beta_fast` and `beta_slow` turns."""
    dim = 2 * len(frequencies)

    def dim_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(dim_of(scaling.beta_fast)), 0)
    last = min(math.ceil(dim_of(scaling.beta_slow)), dim - 1)
    indices = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
    width = last - first or 0.001
    stretched = ((indices - first) / width).clamp(0.0, 1.0)
    scaled = stretched * frequencies / scaling.factor + (1 - stretched) * frequencies
    return scaled, scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
