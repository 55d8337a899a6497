"""Reads the full (unsharded) tensors of a checkpoint, one at a time; adapters are merged into matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from yuan_train.checkpoint.load import Checkpoint, load_tensors
from yuan_train.checkpoint.metadata import Reader
from yuan_train.checkpoint.names import BUFFERS, WEIGHTS
from yuan_train.checkpoint.stream import LazyTensor
from yuan_train.config.architecture import ADAPTERS
from yuan_train.config.errors import CheckpointError


class WholeTensorReader:
    """Reads full tensors of a checkpoint; keeps the last one, since its parts are read one after another."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._lora = checkpoint.model.lora
        self._entries = {
            name: entry
            for name, entry in Reader(checkpoint.path).read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The weights of global name `name` and global shape `shape`. Raises CheckpointError."""
        if self._last is None or self._last[0] != name:
            self._last = None  # Freed before the next one is allocated.
            self._last = (name, self._merged(name, self._load(f"{WEIGHTS}.{name}", shape)))
        return self._last[1]

    def _merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """W + alpha / r B A of a matrix W with adapters, in fp32 (fp64 for fp64) or wider."""
        module, _, kind = name.rpartition(".")
        names = [f"{module}.{adapter}" for adapter in ADAPTERS]
        if self._lora is None or kind != "weight" or f"{WEIGHTS}.{names[0]}" not in self._entries:
            return weight
        rank, (rows, columns) = self._lora.rank, weight.shape
        a, b = (
            self._load(f"{WEIGHTS}.{adapter}", shape)
            for adapter, shape in zip(names, ((rank, columns), (rows, rank)), strict=True)
        )
        wide = torch.promote_types(weight.dtype, torch.float32)
        return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=self._lora.scale)

    def buffers(self) -> Iterator[tuple[str, LazyTensor]]:
        """The published buffers that an import kept, by their published names."""
        for key, entry in self._entries.items():
            if key.startswith(f"{BUFFERS}."):
                shape, dtype = tuple(entry.size), entry.properties.dtype
                read = _bind(self._load, key, shape)
                yield key.removeprefix(f"{BUFFERS}."), LazyTensor(shape, dtype, read)

    def _load(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        if key not in self._entries:
            raise CheckpointError(f"{self._checkpoint.path}: {key} is missing")
        tensor = torch.empty(shape, dtype=self._entries[key].properties.dtype)
        load_tensors(self._checkpoint, {key: tensor}, no_dist=True)
        return tensor


def _bind(
    load: Callable[[str, tuple[int, ...]], torch.Tensor], key: str, shape: tuple[int, ...]
) -> Callable[[], torch.Tensor]:
    """`load` with its arguments bound now, and not when a loop variable has moved on."""
    return lambda: load(key, shape)
