"""Finds and reads checkpoints, under any plan: names and shapes must match, the saved sharding need not.

A checkpoint's files and names depend on no plan. Tensors have global names and global shapes.

    DIR/latest                       the name of the newest complete checkpoint
    DIR/step-00000100/.metadata      torch.distributed.checkpoint: which file holds which part of a tensor
                      __R_N.distcp   the tensors
                      state.json     step, position in the data, the resolved run
                      tokenizer/     the tokenizer of the run
                      manifest.json  every file with its size; written last

Tensors are `weights.NAME` (the fp32 master; of what is frozen the weights themselves), `exp_avg.NAME` and
`exp_avg_sq.NAME`, NAME being the global name of a parameter.

A rank's local shard knows which boxes of a global tensor it holds. A box that several ranks hold is written
once, and tensors can be loaded under another sharding than they were saved under.
"""

from __future__ import annotations

import enum
import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType

from yuan_train.config.errors import CheckpointError, ConfigError
from yuan_train.config.load import Document, build
from yuan_train.config.model import ADAPTERS, ONLY_IN_TRAINING, ModelConfig, validate_model
from yuan_train.config.run import RunConfig
from yuan_train.parallel.shard import TensorBox

MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
TOKENIZER = "tokenizer"
VERSION = 1

WEIGHTS = "weights"
OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq")
BUFFERS = "buffers"
"""Prefix, like `weights`, of published buffers: they can be computed, and are kept for an export."""
_STEP = re.compile(r"step-(\d{8,})")

Whole = tuple[Path, Mapping[str, Any], tuple[str, ...]]
"""Of a complete checkpoint: directory, state, and notes for the user, such as that a newer one is not."""


def step_name(step: int) -> str:
    """Name of the directory of a step: `step-00000100`."""
    return f"step-{step:08d}"


def steps_in(directory: Path) -> list[int]:
    """Steps that have a directory, newest first; their checkpoints may be incomplete."""
    if not directory.is_dir():
        return []
    found = (_STEP.fullmatch(child.name) for child in directory.iterdir() if child.is_dir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def write_manifest(directory: Path) -> None:
    """Write the manifest: every file of a checkpoint with its size. To be written last."""
    files = {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    (directory / MANIFEST).write_text(json.dumps({"version": VERSION, "files": files}, indent=1))


def faults_of(directory: Path) -> Iterator[str]:
    """Yield the reasons why a checkpoint is incomplete; nothing if it is complete."""
    manifest = read_json(directory / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or STATE not in files or ".metadata" not in files:
        yield f"{MANIFEST} is missing or torn"
        return
    if manifest.get("version") != VERSION:
        yield f"{MANIFEST} has version {manifest.get('version')}, this release reads {VERSION}"
        return
    for name, size in files.items():
        path = directory / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size} bytes, the manifest says {size}"


def whole_at(path: Path) -> Whole:
    """The checkpoint at `path`: a step's directory, or a directory of them (then the newest complete one).

    Raises CheckpointError if there is none, or none is complete.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such directory; give a checkpoint, or a directory of checkpoints")
    if steps_in(path) and (found := newest_in(path)) is not None:
        return found
    if not (path / STATE).exists() and not (path / ".metadata").exists():
        published = "; a Hugging Face folder is read with: yuan-train import-hf {0} --out runs/{1}"
        words = map(quote, (str(path), path.name))
        more = published.format(*words) if (path / "config.json").is_file() else ""
        raise CheckpointError(f"{path}: there is no checkpoint here (no {STATE}, no step-* inside){more}")
    return path, _state_of(path), ()


def newest_in(directory: Path) -> Whole | None:
    """The newest complete checkpoint of a directory, with a note on every newer incomplete one.

    None if the directory has no checkpoint. `latest` is not trusted: a crash between the renaming and its
    update leaves a newer complete checkpoint.
    Raises CheckpointError if none of them is complete, or if `latest` names one that does not exist.
    """
    torn: list[str] = []
    for step in steps_in(directory):
        path = directory / step_name(step)
        try:
            return path, _state_of(path), tuple(f"{one}; falling back to the previous one" for one in torn)
        except CheckpointError as error:
            torn.append(str(error))
    if torn:
        raise CheckpointError(f"{directory}: no checkpoint here is complete: {'; '.join(torn)}")
    if (directory / LATEST).exists():
        raise CheckpointError(f"{directory / LATEST}: names a checkpoint that does not exist")
    return None


def _state_of(path: Path) -> Mapping[str, Any]:
    """What a step's checkpoint holds beside tensors. Raises CheckpointError if it is torn."""
    faults = list(faults_of(path))
    if faults:
        raise CheckpointError(f"{path} is torn: {'; '.join(faults)}")
    state = read_json(path / STATE)
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise CheckpointError(f"{path} is torn: {STATE} cannot be read")
    return state


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it is missing or not valid JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


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
    return Checkpoint(*whole_at(Path(path)))


def find_checkpoints(run: RunConfig, *, anew: bool = False) -> tuple[Checkpoint | None, Checkpoint | None]:
    """The checkpoint to resume from; or else the one whose weights the run begins with, if it names one.

    `anew`: as if there was none to resume from. Raises CheckpointError if it is incomplete or holds another
    model.
    """
    resume, directory = "never" if anew else run.checkpoint.resume, run.checkpoint.directory
    found: Whole | None = None
    if resume == "auto" and directory is not None:
        found = newest_in(Path(directory))
    elif resume not in ("auto", "never"):
        found = whole_at(Path(resume))
    start = run.start.checkpoint
    is_start = found is None
    if found is None and start is not None:
        found = whole_at(Path(start))
    if found is None:
        return None, None
    checkpoint = Checkpoint(*found)
    check_same_model(checkpoint, run.model, as_start=is_start)
    return (None, checkpoint) if is_start else (checkpoint, None)


def check_same_model(checkpoint: Checkpoint, model: ModelConfig, *, as_start: bool = False) -> None:
    """Raise CheckpointError, listing every difference, unless the checkpoint holds this model.

    `as_start`: a reward model may begin with the body of a language model, and adapters with a base model.
    """
    saved = checkpoint.model
    if as_start and model.output == "value":
        saved = replace(saved, output="value")
    if as_start and saved.lora is None:
        saved = replace(saved, lora=model.lora)
    differences = [
        f"{key} {getattr(saved, key)!r} there, {getattr(model, key)!r} here"
        for key in ModelConfig.__dataclass_fields__
        if key not in ("name", "max_sequence_length", "init_std", *ONLY_IN_TRAINING)
        # What has no bias yet begins with zeros; what has one, chooses by it.
        and not (key == "balance" and saved.balance != "bias")
        and getattr(saved, key) != getattr(model, key)
    ]
    if differences:
        advice = (
            "Leave model: out, and it is that of start.checkpoint; or start from another checkpoint"
            if as_start
            else "Use the model it was trained with, or another checkpoint.directory"
        )
        raise CheckpointError(
            f"{checkpoint.path} holds another model: {'; '.join(differences)}. {advice}"
            + ("; export-hf and import-hf merge adapters (lora)" if saved.lora != model.lora else "")
        )


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
    return any(name.startswith(f"{kind}.") for name in checkpoint.entries for kind in OPTIMIZER_STATES)


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
    checkpoint = find_checkpoint(path)
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


class LoadPlanner(DefaultLoadPlanner):
    """Looks up the box of a local shard to fill."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default traverses the values and would not keep a local shard as it is.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

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
