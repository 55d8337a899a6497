"""A rank's local tensor of a global tensor, as torch.distributed.checkpoint stores and fills it.

A local shard knows which boxes of the global tensor it holds. A box that several ranks hold is written once,
and tensors can be loaded under another sharding than they were saved under.
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
class LocalShard:
    """A rank's local tensor of a global tensor, and its `Shard` layout.

    The double-underscored methods are the interface that torch.distributed.checkpoint calls.
    """

    tensor: torch.Tensor
    shard: Shard

    @property
    def shape(self) -> torch.Size:
        """Shape of the global tensor."""
        return torch.Size(self.shard.shape)

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


Tensors = Mapping[str, torch.Tensor | LocalShard]


def snapshot(shards: Mapping[str, LocalShard]) -> dict[str, LocalShard]:
    """Copies of local shards in host memory, which later steps do not change."""
    return {name: replace(shard, tensor=shard.tensor.to("cpu", copy=True)) for name, shard in shards.items()}


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
