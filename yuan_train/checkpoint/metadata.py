"""The metadata of a checkpoint, read without running code that a hostile file may hold."""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta


class Reader(dcp.FileSystemReader):
    """Reads `.metadata`, which is a pickle, without running code that a hostile file may contain.

    It is read once: a reader is for one checkpoint, which does not change.
    """

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            with (Path(self.path) / ".metadata").open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError("it holds no checkpoint metadata")
            if metadata.storage_meta is None:
                metadata.storage_meta = StorageMeta()
            self._metadata = metadata
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Accepts the classes of torch's checkpoint metadata and no others."""

    def find_class(self, module: str, name: str) -> Any:
        value = None
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
            value = super().find_class(module, name)
            if not isinstance(value, type):
                value = None
        elif module == "torch":
            value = getattr(torch, name, None)
            if value is not torch.Size and not isinstance(value, torch.dtype):
                value = None
        elif (module, name) == ("torch.serialization", "_get_layout"):
            value = super().find_class(module, name)
        elif (module, name) == ("builtins", "getattr"):
            # Newer Pythons pickle a member of an enumeration as a call of getattr.
            value = _enum_member
        elif module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath", "Path"):
            value = super().find_class(module, name)
        if value is None:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint")
        return value


def _enum_member(kind: object, name: str) -> enum.Enum:
    """A member of an enumeration; no other use of `getattr` is accepted. Raises UnpicklingError."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"builtins.getattr of {kind!r} does not belong in a checkpoint")
    return kind[name]
