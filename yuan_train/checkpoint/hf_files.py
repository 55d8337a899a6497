"""Opens the files of a Hugging Face model: its tensors by name, each read only when it is needed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from yuan_train.checkpoint.names import STATE, steps_in
from yuan_train.checkpoint.stream import LazyTensor
from yuan_train.config.errors import CheckpointError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")


def check_is_published(folder: Path) -> None:
    """Raise CheckpointError for a file of a published model, and for a checkpoint of ours."""
    if folder.is_file():
        raise CheckpointError(f"{folder}: is a file; give the folder that has it: {folder.parent}")
    if folder.is_dir() and ((folder / STATE).is_file() or steps_in(folder)):
        raise CheckpointError(f"{folder}: is a checkpoint already, and needs no import")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; wanted a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}; wanted a JSON object")
    return value


def find_tokenizer_file(folder: Path) -> Path | None:
    """The tokenizer's file in a folder; None if there is none."""
    return next((folder / name for name in TOKENIZER_FILES if (folder / name).is_file()), None)


def open_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Every tensor of a folder by its published name: safetensors, else PyTorch `.bin`; one file or shards.

    Raises CheckpointError for missing and truncated files, and if the index and the files differ in names.
    """
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index, single_file = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
        open_file = open_safetensors if suffix == "safetensors" else _open_pickled
        if index.exists():
            return _open_indexed(folder, index, open_file)
        if single_file.exists():
            return open_file(single_file)
    raise CheckpointError(
        f"{folder}: no weights: wanted model.safetensors or pytorch_model.bin, or the index of their shards"
    )


def _open_indexed(
    folder: Path, index: Path, open_file: Callable[[Path], dict[str, LazyTensor]]
) -> dict[str, LazyTensor]:
    """Every tensor of the shards that an index names."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map; wanted the file of every tensor")
    found: dict[str, LazyTensor] = {}
    for name in dict.fromkeys(weight_map.values()):
        # A path to another folder is not a shard of this model.
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is not the name of a file in this folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: the shard is missing; {index.name} names it")
        tensors = open_file(folder / name)
        indexed = {tensor for tensor, file in weight_map.items() if file == name}
        if unmatched := sorted(indexed ^ set(tensors)):
            where = "in the index only" if unmatched[0] in indexed else "in the file only"
            raise CheckpointError(f"{folder / name}: {unmatched[0]} is {where}; index and shard must agree")
        found |= tensors
    return found


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Every tensor of a safetensors file, by name. Raises CheckpointError."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a mapping
            headers = {name: (tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: torn, or no safetensors file: {error}") from None
    return {
        name: LazyTensor(shape, _SAFETENSORS.get(dtype, torch.uint8), _safetensors_reader(path, name))
        for name, (shape, dtype) in headers.items()
    }


_SAFETENSORS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def _safetensors_reader(path: Path, name: str) -> Callable[[], torch.Tensor]:
    """A function that reads one tensor of a safetensors file."""

    def read() -> torch.Tensor:
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from None

    return read


def _open_pickled(path: Path) -> dict[str, LazyTensor]:
    loaded = load_pickled(path)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: holds {type(loaded).__name__}; wanted tensors by name")
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.is_sparse:
            raise CheckpointError(f"{path}: {name!r} is {type(tensor).__name__}; wanted tensors by name")

    def reader(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor.detach()

    # The file is memory-mapped: each tensor is read from disk when it is used.
    return {name: LazyTensor(tuple(t.shape), t.dtype, reader(t)) for name, t in loaded.items()}


def load_pickled(path: Path) -> Any:
    """The content of a `torch.save` file, read by torch's restricted unpickler: tensors and plain values.

    Raises CheckpointError for a file that is truncated, or whose pickle needs anything else to be called.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                # The format from before PyTorch 1.6 cannot be memory-mapped.
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Hostile bytes can raise anything, but no code of theirs was called.
        cause = str(error).split("\n")[0][:200]
        raise CheckpointError(
            f"{path}: torn, or holds more than tensors (nothing in it was run): {cause}"
        ) from None
