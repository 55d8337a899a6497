"""The files and names of a checkpoint, which depend on no plan, and whether it is whole.

Tensors have global names and global shapes.

    DIR/latest                       the name of the newest complete checkpoint
    DIR/step-00000100/.metadata      torch.distributed.checkpoint: which file holds which part of a tensor
                      __R_N.distcp   the tensors
                      state.json     step, position in the data, the resolved run
                      tokenizer/     the tokenizer of the run
                      manifest.json  every file with its size; written last

Tensors are `weights.NAME` (the fp32 master; of what is frozen the weights themselves), `exp_avg.NAME` and
`exp_avg_sq.NAME`, NAME being the global name of a parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from yuan_train.config.errors import CheckpointError

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
        more = published.format(path, path.name) if (path / "config.json").is_file() else ""
        raise CheckpointError(f"{path}: there is no checkpoint here (no {STATE}, no step-* inside){more}")
    return path, _state_of(path), ()


def newest_in(directory: Path) -> Whole | None:
    """The newest complete checkpoint of a directory, with a note on every newer incomplete one.

    None if the directory has no checkpoint. `latest` is not trusted: a crash between the renaming and its
    update leaves a newer complete checkpoint.
    Raises CheckpointError if none of them is complete, or if `latest` names one that does not exist.
    """
    notes: list[str] = []
    for step in steps_in(directory):
        path = directory / step_name(step)
        try:
            return path, _state_of(path), tuple(notes)
        except CheckpointError as error:
            notes.append(f"{error}; falling back to the previous checkpoint")
    if notes:
        raise CheckpointError(f"{directory}: no checkpoint here is complete: {'; '.join(notes)}")
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
