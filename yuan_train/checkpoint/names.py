"""What a checkpoint holds and how it is called: global names, global shapes, no plan.

    DIR/latest                       the name of the newest whole checkpoint
    DIR/step-00000100/.metadata      torch.distributed.checkpoint: where each tensor lies
                      __R_N.distcp   the tensors
                      state.json     step, position in the data, the resolved run
                      tokenizer/     the tokenizer that the run used
                      manifest.json  every file with its size; written last

Tensors are `weights.NAME` (the fp32 master), `exp_avg.NAME` and `exp_avg_sq.NAME`, NAME being the global name
of a parameter.
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
_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """Name of the directory of a step: `step-00000100`."""
    return f"step-{step:08d}"


def steps_in(directory: Path) -> list[int]:
    """Steps that have a directory, newest first; nothing is said of their wholeness."""
    if not directory.is_dir():
        return []
    found = (_STEP.fullmatch(child.name) for child in directory.iterdir() if child.is_dir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def write_manifest(directory: Path) -> None:
    """List every file of a checkpoint with its size; the last thing written into it."""
    files = {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    (directory / MANIFEST).write_text(json.dumps({"version": VERSION, "files": files}, indent=1))


def faults_of(directory: Path) -> Iterator[str]:
    """Yield why a checkpoint is not whole; nothing if it is."""
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
    """The content of a JSON file, or None if it is missing or torn."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
