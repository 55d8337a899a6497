"""Writes checkpoints and safetensors files tensor by tensor, with one tensor in memory at a time."""

from __future__ import annotations

import json
import shutil
import struct
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from yuan_train.checkpoint.names import step_name, steps_in
from yuan_train.checkpoint.save import finish, make_empty_directory, root_cause
from yuan_train.config.errors import CheckpointError, YuanError

SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class LazyTensor:
    """A tensor whose shape and dtype are known, and whose values `read` reads when they are needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


class _LazyPlanner(DefaultSavePlanner):
    """Plans with empty tensors on the meta device, and reads each tensor when it is written."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        wanted = self._tensors[index.fqn]
        tensor = wanted.read()
        assert tensor.shape == wanted.shape and tensor.dtype == wanted.dtype, index.fqn
        return tensor.contiguous()


def save_streamed(
    directory: str | Path,
    *,
    tensors: Mapping[str, LazyTensor],
    state: Mapping[str, Any],
    tokenizer: Path | None = None,
) -> Path:
    """Write a checkpoint of step 0 and return its directory, which is renamed when it is complete.

    Takes the memory of the largest tensor, and what its `read` needs. For a single process.

    Raises CheckpointError if the directory already holds checkpoints or cannot be written, and what a `read`
    raises; in both cases nothing is left behind.
    """
    directory = Path(directory)
    if steps_in(directory):
        raise CheckpointError(f"{directory}: holds checkpoints already; give another --out")
    temporary, final = directory / f".{step_name(0)}.tmp", directory / step_name(0)
    meta_tensors = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    try:
        make_empty_directory(temporary)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                dict(meta_tensors),
                storage_writer=dcp.FileSystemWriter(temporary, single_file_per_rank=False),
                planner=_LazyPlanner(tensors),
                no_dist=True,
            )
        finish(temporary, final, state, tokenizer)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        cause, _ = root_cause(error)
        if isinstance(cause, YuanError):
            raise cause from None
        raise CheckpointError(f"{final}: cannot be written: {cause}; give another --out") from error
    return final


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write one safetensors file, reading each tensor when it is written. Raises OSError.

    The format: length of the header (u64), JSON header (name, dtype, shape, offsets in the data), the data.
    """
    with path.open("wb") as file:
        file.write(_safetensors_header(tensors))
        for name, wanted in tensors.items():
            tensor = wanted.read()
            assert tensor.shape == wanted.shape and tensor.dtype == wanted.dtype, name
            _write_data(file, tensor)


def _safetensors_header(tensors: Mapping[str, LazyTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    first = 0
    for name, tensor in tensors.items():
        last = first + tensor.num_bytes
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [first, last]}
        first = last
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data of a memory-mapped file
    return struct.pack("<Q", len(text)) + text


def _write_data(file: BinaryIO, tensor: torch.Tensor) -> None:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for piece in flat.split(CHUNK_BYTES):
        file.write(piece.numpy().data)


def split_into_shards(
    tensors: Iterable[tuple[str, LazyTensor]], max_bytes: int
) -> list[dict[str, LazyTensor]]:
    """Tensors, in order, in files of at most `max_bytes` each (a larger tensor gets its own file)."""
    shards: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.num_bytes
    return shards
