"""Checks of a large tensor that take little memory: it is read in pieces."""

from __future__ import annotations

import hashlib

import torch

from yuan_train.checkpoint.stream import LazyTensor

CHECKED_ELEMENTS = 1 << 24
"""Elements (or bytes) of a piece."""


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return all(bool(torch.isfinite(piece).all()) for piece in tensor.reshape(-1).split(CHECKED_ELEMENTS))


def digest(tensor: LazyTensor) -> tuple[str, str]:
    """Dtype and SHA-256 of the values: to compare two large tensors with only one in memory at a time."""
    checksum = hashlib.sha256()
    for piece in tensor.read().contiguous().view(-1).view(torch.uint8).split(CHECKED_ELEMENTS):
        checksum.update(piece.numpy().data)
    return str(tensor.dtype), checksum.hexdigest()
