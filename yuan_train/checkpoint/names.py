"""The files and names of a checkpoint, which depend on no plan: tensors have global names and global shapes.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it is missing or not valid JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
