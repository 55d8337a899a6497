"""Finds and reads checkpoints, under any plan: names and shapes must match, the saved sharding need not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from yuan_train.checkpoint.local_shards import LoadPlanner, LocalShard, Reader, Tensors
from yuan_train.checkpoint.names import (
    BUFFERS,
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
from yuan_train.checkpoint.stream import LazyTensor
from yuan_train.config.architecture import ADAPTERS
from yuan_train.config.document import Document
from yuan_train.config.errors import CheckpointError, ConfigError
from yuan_train.config.load import build
from yuan_train.config.model import ModelConfig, validate_model


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose tensors are not read yet."""

    path: Path
    state: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """Notes for the user, such as that a newer checkpoint is incomplete."""

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return int(self.state["step"])

    @property
    def model(self) -> ModelConfig:
        """The model it holds. Raises CheckpointError if its state does not describe one."""
        try:
            document = Document(f"{self.path / STATE}", self.state["run"]["model"], {})
            return build(document, ModelConfig, validate=validate_model)
        except (KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{self.path}: {STATE} describes no model: {error}") from None

    @property
    def resets(self) -> dict[str, bool]:
        """What its model was trained to reset at document ends."""
        data = self.state.get("run", {}).get("data", {})
        defaults = {"reset_position_ids": True, "reset_attention": False, "reset_filter": False}
        return {key: data.get(key, default) for key, default in defaults.items()}

    @property
    def tokenizer(self) -> Path | None:
        """Directory of the tokenizer in it; None if it has none."""
        path = self.path / TOKENIZER
        return path if path.is_dir() else None

    @cached_property
    def entries(self) -> Mapping[str, TensorStorageMetadata]:
        """What it holds of tensors, by global name. Raises CheckpointError."""
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:
            raise CheckpointError(f"{self.path}: .metadata cannot be read: {error}") from error
        held = metadata.state_dict_metadata.items()
        return {name: entry for name, entry in held if isinstance(entry, TensorStorageMetadata)}

    def fill(self, tensors: Tensors, *, no_dist: bool = False) -> None:
        """Fill tensors that it holds, by global name, in place; collective over all ranks unless `no_dist`.

        Raises CheckpointError if they cannot be read.
        """
        if not no_dist:
            self._bring(tensors)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(
                    dict(tensors),
                    storage_reader=self._reader,
                    planner=LoadPlanner(),
                    no_dist=no_dist or not dist.is_initialized(),
                )
        except (Exception, CheckpointException) as error:
            # Corrupt bytes can make torch's readers raise anything; all of it means an unreadable file.
            raise CheckpointError(f"{self.path}: cannot be read: {error}") from error

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.path)

    def _bring(self, tensors: Tensors) -> None:
        """See that all from which tensors are filled lies at `path`; collective over all ranks."""


def find_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`: a step's directory, or a directory of them (then the newest complete one).

    Raises CheckpointError if there is none, or none is complete; if `path` is a step's directory, no other is
    taken in its place.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; give a checkpoint, or a directory of checkpoints")
    if not steps_in(path):
        if not (path / STATE).exists() and not (path / ".metadata").exists():
            published = "; a Hugging Face folder is read with: yuan-train import-hf {0} --out runs/{1}"
            more = published.format(path, path.name) if (path / "config.json").is_file() else ""
            raise CheckpointError(f"{path}: there is no checkpoint here (no {STATE}, no step-* inside){more}")
        return _open(path)
    found = find_latest(path)
    if found is None:
        raise CheckpointError(f"{path}: no checkpoint here is complete: {_all_faults(path)}")
    return found


def find_latest(directory: str | Path) -> Checkpoint | None:
    """The newest complete checkpoint of a directory, with a note on every newer incomplete one.

    None if the directory has no checkpoint. `latest` is not trusted: a crash between the renaming and its
    update leaves a newer complete checkpoint.
    Raises CheckpointError if none of them is complete, or if `latest` names one that does not exist.
    """
    directory = Path(directory)
    notes: list[str] = []
    for step in steps_in(directory):
        path = directory / step_name(step)
        try:
            found = _open(path)
        except CheckpointError as error:
            notes.append(f"{error}; falling back to the previous checkpoint")
            continue
        return Checkpoint(found.path, found.state, tuple(notes))
    if notes:
        raise CheckpointError(f"{directory}: no checkpoint here is complete: {'; '.join(notes)}")
    if (directory / LATEST).exists():
        raise CheckpointError(f"{directory / LATEST}: names a checkpoint that does not exist")
    return None


def load_tensors(checkpoint: Checkpoint, tensors: Tensors, *, no_dist: bool = False) -> None:
    """Read tensors by global name, in place; collective over all ranks unless `no_dist`.

    Raises CheckpointError, with the first differences, if a name is missing or a global shape differs.
    """
    held = checkpoint.entries
    wrong = [
        f"{name}: {f'has shape {list(held[name].size)}' if name in held else 'missing'}, wanted "
        f"{list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name not in held or held[name].size != tensor.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {'; '.join(wrong[:5])}{more}")
    checkpoint.fill(tensors, no_dist=no_dist)


def holds_optimizer_state(checkpoint: Checkpoint) -> bool:
    """Whether it holds AdamW's averages; an imported one has weights only."""
    names = tensor_names(checkpoint)
    return any(name.startswith(f"{kind}.") for name in names for kind in OPTIMIZER_STATES)


def tensor_names(checkpoint: Checkpoint) -> frozenset[str]:
    """The global names of all tensors. Raises CheckpointError."""
    return frozenset(checkpoint.entries)


def load_weights(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    """Fill a model, or a stage's part, with the masters in the model's precision. Not collective.

    Raises CheckpointError if a name is missing or a shape differs.
    """
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    load_parts(checkpoint, parameters, lambda name, master: master.view(parameters[name].shape))


def load_parts(
    checkpoint: Checkpoint,
    parts: Mapping[str, torch.Tensor],
    shard_of: Callable[[str, torch.Tensor], torch.Tensor | LocalShard],
) -> None:
    """Fill a rank's parts of parameters, by global name, with the masters in their precision. Not collective.

    `shard_of` says of which boxes a part's master, flat [n], is made. Raises CheckpointError if a name is
    missing or a global shape differs.
    """
    for name, part in parts.items():
        key = f"{WEIGHTS}.{name}"
        master = torch.empty(part.numel(), dtype=_dtype_of(checkpoint, key))
        # One by one: a model in another precision needs no second copy of itself.
        load_tensors(checkpoint, {key: shard_of(name, master)}, no_dist=True)
        with torch.no_grad():
            part.copy_(master.view(part.shape))


def describe(path: str | Path) -> dict[str, Any]:
    """What a checkpoint (or a directory of them) holds, and whether it is complete, as plain JSON values."""
    path = Path(path)
    if steps_in(path):
        steps = {step_name(s): not list(faults_of(path / step_name(s))) for s in steps_in(path)}
        found = find_checkpoint(path)
        return describe(found.path) | {"whole_by_step": steps, "notes": list(found.notes)}
    faults = list(faults_of(path))
    if faults:
        return {"kind": "checkpoint", "path": str(path), "whole": False, "faults": faults}
    checkpoint = _open(path)
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
        "num_tensors": len(checkpoint.entries),
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
    }


def _open(path: Path) -> Checkpoint:
    """The checkpoint in a step's directory. Raises CheckpointError if it is incomplete."""
    faults = list(faults_of(path))
    if faults:
        raise CheckpointError(f"{path} is torn: {'; '.join(faults)}")
    state = read_json(path / STATE)
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise CheckpointError(f"{path} is torn: {STATE} cannot be read")
    return Checkpoint(path, state)


def _all_faults(directory: Path) -> str:
    """Why each checkpoint of a directory is incomplete."""
    return "; ".join(
        f"{step_name(step)}: {fault}"
        for step in steps_in(directory)
        for fault in faults_of(directory / step_name(step))
    )


def _dtype_of(checkpoint: Checkpoint, key: str) -> torch.dtype:
    """Raises CheckpointError if it does not hold that."""
    if key not in checkpoint.entries:
        raise CheckpointError(f"{checkpoint.path}: {key} is missing")
    return checkpoint.entries[key].properties.dtype


def merged_adapters(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, scale: float) -> torch.Tensor:
    """W + scale B A of a matrix [out, in] with adapters [rank, in] and [out, rank], in fp32 (fp64 for fp64)
    or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale)


class WholeTensorReader:
    """Reads full tensors of a checkpoint; keeps the last one, since its parts are read one after another."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._lora = checkpoint.model.lora
        self._entries = checkpoint.entries
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
        return merged_adapters(weight, a, b, scale=self._lora.scale)

    def stored(self) -> Iterator[tuple[str, LazyTensor]]:
        """Weights and buffers as they are stored, by their names in the checkpoint; no optimizer state."""
        for key, entry in self._entries.items():
            if key.startswith((f"{WEIGHTS}.", f"{BUFFERS}.")):
                shape = tuple(entry.size)
                yield key, LazyTensor(shape, entry.properties.dtype, partial(self._load, key, shape))

    def buffers(self) -> Iterator[tuple[str, LazyTensor]]:
        """The published buffers that an import kept, by their published names."""
        for key, tensor in self.stored():
            if key.startswith(f"{BUFFERS}."):
                yield key.removeprefix(f"{BUFFERS}."), tensor

    def _load(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=_dtype_of(self._checkpoint, key))
        load_tensors(self._checkpoint, {key: tensor}, no_dist=True)
        return tensor
