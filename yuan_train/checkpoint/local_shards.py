"""A rank's local tensor of a global tensor, as torch.distributed.checkpoint stores and fills it.

A local shard knows which boxes of the global tensor it holds. A box that several ranks hold is written once,
and tensors can be loaded under another sharding than they were saved under.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType

from yuan_train.parallel.shard import TensorBox


@dataclass(frozen=True, eq=False)
class LocalShard:
    """What a rank holds of a global tensor [shape]: boxes, in any number.

    The double-underscored methods are the interface that torch.distributed.checkpoint calls.
    """

    shape: torch.Size
    boxes: tuple[TensorBox, ...]

    def size(self) -> torch.Size:
        """Shape of the global tensor, as `torch.Tensor.size`."""
        return self.shape

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.boxes[0].tensor),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        # For a load, a replicated vector may be held twice, in two slices: the number tells them apart. For a
        # save, offsets are unique, and numbers count the boxes of all ranks.
        numbered = self.boxes[index.index : index.index + 1] if index.index is not None else ()
        for box in (*numbered, *self.boxes):
            if index.offset is None or tuple(index.offset) == box.offsets:
                return box.tensor
        raise ValueError(f"{index.fqn}: no box begins at {index.offset}")


Tensors = Mapping[str, torch.Tensor | LocalShard]


class SavePlanner(DefaultSavePlanner):
    """Looks up the box of a local shard to write."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return (
            value.__get_tensor_shard__(index)
            if isinstance(value, LocalShard)
            else super().lookup_object(index)
        )


class LoadPlanner(DefaultLoadPlanner):
    """Looks up the box of a local shard to fill."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default traverses the values and would not keep a local shard as it is.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        # The default takes names that this rank does not hold as a sign of an old file format.
        assert self.state_dict is not None and self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value = self.state_dict[index.fqn]
        return (
            value.__get_tensor_shard__(index)
            if isinstance(value, LocalShard)
            else super().lookup_tensor(index)
        )


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
