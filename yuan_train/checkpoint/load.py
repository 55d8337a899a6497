"""Reading a checkpoint under any plan: strict in names and shapes, blind to who wrote which part."""

from __future__ import annotations

import enum
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from yuan_train.checkpoint.names import (
    LATEST,
    OPTIMIZER_STATES,
    STATE,
    TOKENIZER,
    WEIGHTS,
    faults_of,
    read_json,
    step_name,
    steps_in,
)
from yuan_train.checkpoint.parts import LoadPlanner, Tensors
from yuan_train.config.errors import CheckpointError, ConfigError
from yuan_train.config.load import Document, build
from yuan_train.config.model import ModelConfig, model_laws


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, found but not yet read."""

    path: Path
    state: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """What the user should know, such as a newer one that is torn."""

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def model(self) -> ModelConfig:
        """Sizes of the model inside."""
        try:
            document = Document(f"{self.path / STATE}", self.state["run"]["model"], {})
            return build(document, ModelConfig, laws=model_laws)
        except (KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{self.path}: {STATE} describes no model: {error}") from None

    @property
    def tokenizer(self) -> Path | None:
        """Directory of the tokenizer inside, if there is one."""
        path = self.path / TOKENIZER
        return path if path.is_dir() else None


def find_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`: a step's directory, or a directory of several (then the latest whole one).

    Raises CheckpointError if there is none, or none is whole; a torn one that is asked for by name is not
    replaced by another.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; give a checkpoint, or a directory of checkpoints")
    if not steps_in(path):
        if not (path / STATE).exists() and not (path / ".metadata").exists():
            raise CheckpointError(f"{path}: there is no checkpoint here (no {STATE}, no step-* inside)")
        return _open(path)
    found = find_latest(path)
    if found is None:
        raise CheckpointError(f"{path}: no checkpoint here is whole: {_faults(path)}")
    return found


def find_latest(directory: str | Path) -> Checkpoint | None:
    """The newest whole checkpoint of a directory, with a note on every newer one that is torn; or None.

    `latest` is only a hint: a crash between the renaming and the hint leaves a newer whole one.
    """
    directory = Path(directory)
    notes: list[str] = []
    for step in steps_in(directory):
        path = directory / step_name(step)
        try:
            found = _open(path)
        except CheckpointError as error:
            notes.append(f"{error}; falling back to the one before")
            continue
        return Checkpoint(found.path, found.state, tuple(notes))
    if notes:
        raise CheckpointError(f"{directory}: no checkpoint here is whole: {'; '.join(notes)}")
    if (directory / LATEST).exists():
        raise CheckpointError(f"{directory / LATEST}: names a checkpoint that is not there")
    return None


def load_tensors(checkpoint: Checkpoint, tensors: Tensors, *, alone: bool = False) -> None:
    """Read tensors by global name, in place. Collective, unless `alone`.

    Raises CheckpointError, with every difference, if a name is missing or a shape is another.
    """
    reader = Reader(checkpoint.path)
    held = _tensors_in(reader, checkpoint.path)
    wrong = [
        f"{name}: {'missing' if name not in held else f'has shape {held[name]}'}, wanted {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if held.get(name) != list(tensor.shape)
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{checkpoint.path} is of another shape: {'; '.join(wrong[:5])}{more}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                dict(tensors),
                storage_reader=reader,
                planner=LoadPlanner(),
                no_dist=alone or not dist.is_initialized(),
            )
    except (Exception, CheckpointException) as error:
        # Whatever the bytes provoke in the readers below, the answer is the same: this file is not sound.
        raise CheckpointError(f"{checkpoint.path}: cannot be read: {error}") from error


def holds_optimizer_state(checkpoint: Checkpoint) -> bool:
    """Whether it holds AdamW's averages; an imported one has weights alone."""
    names = _tensors_in(Reader(checkpoint.path), checkpoint.path)
    return any(name.startswith(f"{kind}.") for name in names for kind in OPTIMIZER_STATES)


def load_weights(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    """Fill a model, or a part of one, rounding the masters to its own precision. Not collective."""
    parameters = dict(model.named_parameters())
    held = _tensors_in(Reader(checkpoint.path), checkpoint.path)
    for name, parameter in parameters.items():
        key = f"{WEIGHTS}.{name}"
        if key not in held:
            raise CheckpointError(f"{checkpoint.path}: {key} is missing")
        master = torch.empty(parameter.shape, dtype=_dtype_of(checkpoint, key))
        load_tensors(checkpoint, {key: master}, alone=True)
        with torch.no_grad():
            parameter.copy_(master)


def describe(path: str | Path) -> dict[str, Any]:
    """What a checkpoint holds, and whether it is whole, as plain values."""
    path = Path(path)
    if steps_in(path):
        steps = {step_name(s): not list(faults_of(path / step_name(s))) for s in steps_in(path)}
        found = find_checkpoint(path)
        return describe(found.path) | {"whole_by_step": steps, "notes": list(found.notes)}
    faults = list(faults_of(path))
    if faults:
        return {"kind": "checkpoint", "path": str(path), "whole": False, "faults": faults}
    checkpoint = _open(path)
    held = _tensors_in(Reader(path), path)
    return {
        "kind": "checkpoint",
        "path": str(path),
        "whole": True,
        "faults": [],
        "step": checkpoint.step,
        "sequences": checkpoint.state.get("sequences"),
        "tokens": checkpoint.state.get("tokens"),
        "model": checkpoint.model.name,
        "parameters": checkpoint.model.parameters,
        "num_tensors": len(held),
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
    }


def _open(path: Path) -> Checkpoint:
    faults = list(faults_of(path))
    if faults:
        raise CheckpointError(f"{path} is torn: {'; '.join(faults)}")
    state = read_json(path / STATE)
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise CheckpointError(f"{path} is torn: {STATE} cannot be read")
    return Checkpoint(path, state)


def _faults(directory: Path) -> str:
    return "; ".join(
        f"{step_name(step)}: {fault}"
        for step in steps_in(directory)
        for fault in faults_of(directory / step_name(step))
    )


def _tensors_in(reader: Reader, path: Path) -> dict[str, list[int]]:
    """Global shape of every tensor, by name."""
    try:
        metadata = reader.read_metadata()
    except Exception as error:
        raise CheckpointError(f"{path}: .metadata cannot be read: {error}") from error
    entries = metadata.state_dict_metadata.items()
    return {name: list(entry.size) for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def _dtype_of(checkpoint: Checkpoint, key: str) -> torch.dtype:
    entry = Reader(checkpoint.path).read_metadata().state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry.properties.dtype


class Reader(dcp.FileSystemReader):
    """Reads `.metadata` without running code that a hostile file may hold: it is a pickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it holds no checkpoint metadata")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of torch's checkpoint metadata and no others."""

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
            # How newer Pythons write a member of an enumeration.
            value = _member
        elif module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath", "Path"):
            value = super().find_class(module, name)
        if value is None:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")
        return value


def _member(kind: object, name: str) -> enum.Enum:
    """A member of an enumeration, and nothing else that `getattr` would give."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"builtins.getattr of {kind!r} does not belong into a checkpoint")
    return kind[name]
