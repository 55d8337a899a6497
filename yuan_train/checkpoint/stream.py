"""Checkpoints and safetensors files written tensor by tensor: no more than one is in memory at a time."""

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

from yuan_train.checkpoint import save as saving
from yuan_train.checkpoint.names import TOKENIZER, step_name, steps_in
from yuan_train.config.errors import CheckpointError, YuanError

SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is somewhere else: its shape and type are known, its values are read when asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class _LazyPlanner(DefaultSavePlanner):
    """Plans with tensors that hold nothing, and reads each one at the moment it is written."""

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
    """Write a checkpoint of step 0 and return its place: aside, then renamed, as `save_checkpoint` does.

    Memory: the largest tensor, and what its `read` needs. For one process alone.

    Raises CheckpointError if the directory holds checkpoints already or cannot be written. What `read` raises
    passes through, and nothing is left behind.
    """
    directory = Path(directory)
    if steps_in(directory):
        raise CheckpointError(f"{directory}: holds checkpoints already; give an --out of its own")
    aside, final = directory / f".{step_name(0)}.tmp", directory / step_name(0)
    empty = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    try:
        saving.make_room(aside)
        if tokenizer is not None:
            (aside / TOKENIZER).mkdir()
            name = "tokenizer.json" if tokenizer.suffix == ".json" else "tokenizer.model"
            shutil.copyfile(tokenizer, aside / TOKENIZER / name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                dict(empty),
                storage_writer=dcp.FileSystemWriter(aside, single_file_per_rank=False),
                planner=_LazyPlanner(tensors),
                no_dist=True,
            )
        saving.finish(aside, final, state, None)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(aside, ignore_errors=True)
        cause = _cause_of(error)
        if isinstance(cause, YuanError):
            raise cause from None
        raise CheckpointError(f"{final}: cannot be written: {cause}; give another --out") from error
    return final


def _cause_of(error: BaseException) -> BaseException:
    """What went wrong inside torch's writer, which wraps it."""
    if isinstance(error, CheckpointException) and error.failures:
        failure, _ = next(iter(error.failures.values()))
        return failure
    return error


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write one safetensors file, each tensor read when its turn comes.

    The form: u64 length of the header, JSON header (name, type, shape, place in the data), the data. Raises
    OSError.
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
    text += b" " * (-len(text) % 8)  # so that the data is aligned in a mapped file
    return struct.pack("<Q", len(text)) + text


def _write_data(file: BinaryIO, tensor: torch.Tensor) -> None:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for piece in flat.split(CHUNK_BYTES):
        file.write(piece.numpy().data)


def shards_of(tensors: Iterable[tuple[str, LazyTensor]], max_bytes: int) -> list[dict[str, LazyTensor]]:
    """Tensors in order, cut into runs of at most `max_bytes` (a larger tensor has a file of its own)."""
    shards: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.num_bytes
    return shards
