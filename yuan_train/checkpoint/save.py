"""Writes a checkpoint: into a temporary directory, renamed when complete; then `latest`, then old ones go.

Or tensor by tensor, with one in memory at a time: checkpoints (`save_streamed`) and safetensors files.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from yuan_train.checkpoint.load import (
    LATEST,
    STATE,
    TOKENIZER,
    LazyTensor,
    LocalShard,
    Reader,
    Tensors,
    faults_of,
    step_name,
    steps_in,
    write_manifest,
)
from yuan_train.config.errors import CheckpointError, YuanError

SEEN = ".seen-by-all-"
"""Begins the name of a file by which ranks know that they share a directory."""


def save_checkpoint(
    directory: str | Path,
    *,
    step: int,
    tensors: Tensors,
    state: Mapping[str, Any],
    tokenizer: Path | None = None,
    keep: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the checkpoint of a step and return its directory; collective over all ranks.

    `tensors` are this rank's, by global name; a box that several ranks hold is written once. `state` must be
    plain JSON values, the same on every rank. `tokenizer` is a file to copy into the checkpoint. The `keep`
    newest complete checkpoints stay (0: all), and that of the state's `kept_step`. `group` has all ranks
    (None: the default group); in a thread it must be a group that nothing else uses.

    Raises CheckpointError, on every rank, if it cannot be written; older checkpoints are then untouched.
    """
    directory = Path(directory)
    temporary, final = directory / f".{step_name(step)}.tmp", directory / step_name(step)
    try:
        _on_rank_zero(lambda: make_empty_directory(temporary), group)
        write_tensors(temporary, tensors, group)
        _on_rank_zero(lambda: finish(temporary, final, state, tokenizer), group)
    except (OSError, CheckpointException) as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        cause, rank = root_cause(error)
        where = "" if rank is None else f" (rank {rank})"
        raise CheckpointError(
            f"{final}: cannot be written: {cause}{where}; older checkpoints are untouched. "
            "Free some space, or give another checkpoint.directory"
        ) from error
    _on_rank_zero(lambda: _remove_old(directory, keep, newest=final, best=state.get("kept_step")), group)
    return final


def make_empty_directory(temporary: Path) -> None:
    """Create a directory, removing what an interrupted write left there."""
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def write_tensors(temporary: Path, tensors: Tensors, group: dist.ProcessGroup | None) -> None:
    """Write the tensors of all ranks, each rank its own file; collective over `group`.

    The directory may be another one on each node; rank 0 writes `.metadata`. Raises CheckpointException.
    """
    with warnings.catch_warnings():
        # A single process without torch.distributed is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            dict(tensors),
            checkpoint_id=temporary,
            planner=SavePlanner(),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )


def finish(temporary: Path, final: Path, state: Mapping[str, Any], tokenizer: Path | None) -> None:
    """Add state, tokenizer and manifest to a temporary directory, rename it to `final`, and set `latest`."""
    (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    if tokenizer is not None:
        (temporary / TOKENIZER).mkdir()
        copy_tokenizer(tokenizer, temporary / TOKENIZER)
    check_tensor_files(temporary)
    write_manifest(temporary)
    for path in temporary.rglob("*"):
        _fsync(path)
    replaced = final.with_name(f".{final.name}.old")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    latest = final.with_name(f".{LATEST}.tmp")
    latest.write_text(final.name + "\n", encoding="utf-8")
    _fsync(latest)
    latest.replace(final.with_name(LATEST))
    _fsync(final.parent)


def check_tensor_files(directory: Path) -> None:
    """Raise OSError unless every file that `.metadata` names is there, as long as its tensors need.

    A rank that writes to another disk, under the same path, reports success all the same.
    """
    ends: dict[str, int] = {}
    for entry in Reader(directory).read_metadata().storage_data.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in ends.items():
        path = directory / name
        if not path.is_file():
            raise OSError(
                f"{name}, which a rank has written, is not there: do all nodes share checkpoint.directory?"
            )
        if path.stat().st_size < end:
            raise OSError(f"{name} has {path.stat().st_size} bytes, but its tensors need {end}")


TOKENIZER_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
)
"""Files beside a tokenizer that say how it is used; they go where it goes."""


def copy_tokenizer(tokenizer: Path, folder: Path, *, companions: bool = True) -> str:
    """Copy a tokenizer's file into a folder under its standard name, and return that name.

    With `companions`, also the files beside it that say how it is used.
    """
    name = "tokenizer.json" if tokenizer.suffix == ".json" else "tokenizer.model"
    shutil.copyfile(tokenizer, folder / name)
    for companion in TOKENIZER_COMPANIONS if companions else ():
        path = tokenizer.with_name(companion)
        if path.is_file():
            shutil.copyfile(path, folder / companion)
            _remove_auto_map(folder / companion)
    return name


def _remove_auto_map(path: Path) -> None:
    """Remove the name of code that a JSON file wants to be run with: that code is not copied."""
    if path.suffix != ".json" or b'"auto_map"' not in path.read_bytes():
        return
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise OSError(f"{path.name} cannot be read: {error}") from None
    if isinstance(value, dict) and value.pop("auto_map", None) is not None:
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _fsync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_old(directory: Path, keep: int, *, newest: Path, best: int | None) -> None:
    """Remove all but the `keep` newest complete checkpoints (0: none).

    `newest` was just written, and always stays, as does that of step `best`.
    """
    others = (directory / step_name(step) for step in steps_in(directory))
    complete = [path for path in others if path != newest and not any(faults_of(path))]
    for path in complete[keep - 1 :] if keep else ():
        if best is None or path.name != step_name(best):
            # Else half of one would stay for ever where the process is killed meanwhile.
            with suppress(OSError):
                path.rename(path.with_name(f".{path.name}.old"))
    remove_leftovers(directory)


def remove_leftovers(directory: Path) -> None:
    """Remove what a run was writing into a directory of checkpoints when it was killed."""
    for leftover in (*directory.glob(".step-*.tmp"), *directory.glob(".step-*.old")):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in (*directory.glob(f"{SEEN}*"), directory / f".{LATEST}.tmp"):
        with suppress(OSError):
            leftover.unlink(missing_ok=True)


def _on_rank_zero(work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Run `work` on rank 0 while the others wait; its OSError is raised on all ranks."""
    if not dist.is_initialized():
        work()
        return
    outcome: list[OSError | None] = [None]
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as error:
            outcome = [OSError(*error.args)]
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[0] is not None:
        raise outcome[0]


def root_cause(error: BaseException) -> tuple[BaseException, int | None]:
    """The error behind a CheckpointException of torch, which wraps it, and its rank if torch gives it."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = next(iter(error.failures.items()))
        return failure, rank
    return error, None


SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
CHUNK_BYTES = 1 << 26


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
    made = [path for path in (directory, *directory.parents) if not path.exists()]
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
        for path in made:
            with suppress(OSError):  # What is not empty is another's by now.
                path.rmdir()
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
            for piece in tensor.contiguous().view(-1).view(torch.uint8).split(CHUNK_BYTES):
                file.write(piece.numpy().data)


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
