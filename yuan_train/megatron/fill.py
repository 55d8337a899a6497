"""Fills the engine with initial weights, or with those and the optimizer state of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from yuan_train.checkpoint.load import holds_optimizer_state, load_tensors, tensor_names
from yuan_train.checkpoint.names import WEIGHTS
from yuan_train.megatron.state import KINDS, Held, as_shards, publish, set_steps
from yuan_train.models.initial import initial_rows
from yuan_train.train.job import Job
from yuan_train.train.state import Progress, from_state


def fill(job: Job, optimizer: Any, held: list[Held]) -> Progress:
    """Fill masters and moments, publish the weights, and return the progress to start from; collective.

    Raises CheckpointError if a checkpoint cannot be read.
    """
    if job.checkpoint is not None:
        kinds = KINDS if holds_optimizer_state(job.checkpoint) else KINDS[:1]
        load_tensors(job.checkpoint, as_shards(held, kinds))
        progress = from_state(job.checkpoint.state, job.run)
        set_steps(optimizer, progress.step - progress.skipped)
        publish(optimizer)
        return progress
    given = frozenset[str]() if job.start is None else tensor_names(job.start)
    for one in held:
        if f"{WEIGHTS}.{one.named.name}" not in given:
            _draw(job, one)
    if job.start is not None:
        shards = as_shards(held, KINDS[:1])
        load_tensors(job.start, _only(shards, given))
    publish(optimizer)
    return Progress.initial(job.run)


def _only(shards: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: shard for name, shard in shards.items() if name in names}


@torch.no_grad()
def _draw(job: Job, held: Held) -> None:
    """Draw a parameter, one at a time, and keep this rank's run of it."""
    shard = held.named.shard
    whole = torch.empty(shard.local_shape, dtype=torch.float32)
    rows = initial_rows(
        job.run.model, held.named.name, shard.shape, seed=job.run.train.seed, wanted=shard.holds_rows
    )
    for first, block in rows:
        shard.fill_rows(whole, first, block)
    held.tensors[WEIGHTS].copy_(whole.view(-1)[held.start : held.end])
