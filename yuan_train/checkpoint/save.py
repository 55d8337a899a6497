"""Writing a checkpoint: aside, renamed when whole, `latest` last, then old ones dropped."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from yuan_train.checkpoint.names import (
    LATEST,
    STATE,
    TOKENIZER,
    faults_of,
    step_name,
    steps_in,
    write_manifest,
)
from yuan_train.checkpoint.parts import SavePlanner, Tensors
from yuan_train.config.errors import CheckpointError


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
    """Write the checkpoint of a step and return its place; collective over all ranks.

    `tensors` are this rank's, under global names; what several ranks hold is written once. `state` must be
    plain JSON values, the same on every rank. `keep` newest checkpoints stay (0: all).
    `group` is where the ranks meet (None: the world's); in a thread it must be one that nobody else uses.

    Raises CheckpointError, on every rank, if it cannot be written; older checkpoints are then untouched.
    """
    directory = Path(directory)
    aside, final = directory / f".{step_name(step)}.tmp", directory / step_name(step)
    try:
        _on_first_rank(lambda: make_room(aside), group)
        _write_tensors(aside, tensors, group)
        _on_first_rank(lambda: finish(aside, final, state, tokenizer), group)
    except (OSError, CheckpointException) as error:
        _drop_quietly(aside)
        raise CheckpointError(
            f"{final}: cannot be written: {_root_cause(error)}; older checkpoints are untouched. "
            "Free some space, or give another checkpoint.directory"
        ) from error
    _on_first_rank(lambda: _drop_old(directory, keep, newest=final), group)
    return final


def make_room(aside: Path) -> None:
    """An empty directory to write into."""
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _write_tensors(aside: Path, tensors: Tensors, group: dist.ProcessGroup | None) -> None:
    with warnings.catch_warnings():
        # A process alone is not an accident here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            dict(tensors),
            checkpoint_id=aside,
            planner=SavePlanner(),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )


def finish(aside: Path, final: Path, state: Mapping[str, Any], tokenizer: Path | None) -> None:
    """Complete what was written aside, and rename it; `latest` last."""
    (aside / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    if tokenizer is not None:
        (aside / TOKENIZER).mkdir()
        name = "tokenizer.json" if tokenizer.suffix == ".json" else "tokenizer.model"
        shutil.copyfile(tokenizer, aside / TOKENIZER / name)
    write_manifest(aside)
    for path in aside.rglob("*"):
        _sync(path)
    replaced = final.with_name(f".{final.name}.old")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)
    latest = final.with_name(f".{LATEST}.tmp")
    latest.write_text(final.name + "\n", encoding="utf-8")
    _sync(latest)
    latest.replace(final.with_name(LATEST))
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _drop_old(directory: Path, keep: int, *, newest: Path) -> None:
    """Drop what interrupted saves left, and all but `keep` whole checkpoints; never the one just written."""
    for leftover in (*directory.glob(".step-*.tmp"), *directory.glob(".step-*.old")):
        shutil.rmtree(leftover, ignore_errors=True)
    paths = [directory / step_name(step) for step in steps_in(directory)]
    whole = [path for path in paths if path != newest and not any(faults_of(path))]
    for path in whole[keep - 1 :] if keep else []:
        shutil.rmtree(path, ignore_errors=True)


def _drop_quietly(aside: Path) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)


def _on_first_rank(work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Do something on rank 0 while the others wait; its OSError is raised on all."""
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


def _root_cause(error: BaseException) -> str:
    """The operating system's own words, however deep they lie."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (failure, _) = next(iter(error.failures.items()))
        return f"{failure} (rank {rank})"
    return str(error)
