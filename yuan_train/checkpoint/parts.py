"""A rank's part of a global tensor, as torch.distributed.checkpoint stores and fills it.

Each part says which boxes of the global tensor it holds; what several ranks hold is written once, and what
was cut one way is read back cut any other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType

from yuan_train.parallel.shard import Shard


@dataclass(frozen=True, eq=False)
class Part:
    """The local tensor of a shard. The double-underscored methods are what the library asks for."""

    tensor: torch.Tensor
    shard: Shard

    @property
    def shape(self) -> torch.Size:
        """Of the global tensor."""
        return torch.Size(self.shard.shape)

    def size(self) -> torch.Size:
        return self.shape

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.tensor),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes, _ in self.shard.boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offsets, sizes, start in self.shard.boxes():
            if index.offset is None or tuple(index.offset) == offsets:
                if self.shard.dim is None:
                    return self.tensor
                return self.tensor.narrow(self.shard.dim, start, sizes[self.shard.dim])
        raise ValueError(f"{index.fqn}: no box begins at {index.offset}")


Tensors = Mapping[str, torch.Tensor | Part]


def snapshot(parts: Mapping[str, Part]) -> dict[str, Part]:
    """The same parts in host memory of their own, which no later step changes."""
    return {name: replace(part, tensor=part.tensor.to("cpu", copy=True)) for name, part in parts.items()}


class SavePlanner(DefaultSavePlanner):
    """Finds the box of a part that is to be written."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, Part) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Finds the box of a part that is to be filled."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default walks through the values and would make something else of a part.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        # The default takes names that this rank does not hold for a sign of an old file format.
        assert self.state_dict is not None and self.metadata is not None
        return create_default_local_load_plan(self.state_dict, self.metadata)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, Part) else super().lookup_tensor(index)
