"""DPO's reference: the policy at step 0, as two log-probabilities a pair, kept beside the log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from yuan_train.config.errors import CheckpointError, YuanError
from yuan_train.config.load import write_text
from yuan_train.data.pairs import Pairs
from yuan_train.train.agreement import raise_together
from yuan_train.train.job import Job
from yuan_train.train.state import Progress

NUMBERS = "reference.npy"
"""fp64 [pairs, 2], in the order of the file of pairs: of the chosen and of the rejected answer."""
FACTS = "reference.json"


def find_reference(
    job: Job, progress: Progress, pairs: Pairs, score: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, str | None]:
    """The reference of a run on pairs, and what there is to say of it; collective over all ranks.

    At step 0 `score`, a forward pass over all pairs, makes it; later it is read. Raises CheckpointError if
    the log directory has none, or one of other pairs.
    """
    directory = None if job.run.log.directory is None else Path(job.run.log.directory)
    if progress.step:
        return _read_together(directory, pairs), None
    found = score()
    fault: YuanError | None = None
    if directory is not None and job.position.rank == 0:
        try:
            _write(directory, found, pairs)
        except OSError as error:
            fault = CheckpointError(f"{directory / NUMBERS}: cannot be written: {error}")
    raise_together(fault)
    return found, f"reference: log-probabilities of {len(pairs)} pairs under the weights at step 0"


def _write(directory: Path, reference: torch.Tensor, pairs: Pairs) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{NUMBERS}.tmp"
    with temporary.open("wb") as file:
        np.save(file, reference.view(-1, 2).numpy())
    temporary.replace(directory / NUMBERS)
    write_text(directory / FACTS, json.dumps({"version": 1, "pairs": pairs.fingerprints}) + "\n")


def _read_together(directory: Path | None, pairs: Pairs) -> torch.Tensor:
    """Rank 0 reads, all get it."""
    reference = torch.zeros(2 * len(pairs), dtype=torch.float64)
    fault: YuanError | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            reference.copy_(_read(directory, pairs))
        except CheckpointError as error:
            fault = error
    raise_together(fault)
    if dist.is_initialized():
        dist.broadcast(reference, 0)
    return reference


def _read(directory: Path | None, pairs: Pairs) -> torch.Tensor:
    what_to_do = (
        "a DPO run is resumed with the log.directory that it began with; to begin a new one from trained "
        "weights give them as start.checkpoint"
    )
    if directory is None:
        raise CheckpointError(f"log.directory: none, so no {NUMBERS} to resume with; {what_to_do}")
    path = directory / NUMBERS
    try:
        numbers: Any = np.load(path, allow_pickle=False)
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; {what_to_do}") from None
    if not isinstance(facts, dict) or facts.get("pairs") != pairs.fingerprints:
        raise CheckpointError(
            f"{path}: is of other pairs than data.pairs; give the file that the run began with"
        )
    if numbers.shape != (len(pairs), 2) or not np.isfinite(numbers).all():
        raise CheckpointError(f"{path}: holds {numbers.shape}; wanted {(len(pairs), 2)} finite numbers")
    return torch.from_numpy(numbers.astype(np.float64)).flatten()
