"""Checkpoints in the nodes' memory (checkpoint.in_memory): found at the start, kept, dropped at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from yuan_train.checkpoint.in_memory import NodeMemory, forget_copies, remove_copies
from yuan_train.config.errors import CheckpointError
from yuan_train.config.plan import node_of
from yuan_train.config.units import show_bytes, show_seconds
from yuan_train.parallel.groups import guard_world_collective, make_save_group
from yuan_train.train.cards import machine_id
from yuan_train.train.engine import Engine
from yuan_train.train.job import Job, check_same_model
from yuan_train.train.metrics import Log
from yuan_train.train.saver import checkpoint_state
from yuan_train.train.state import Progress

logger = logging.getLogger(__name__)


def find_in_memory(job: Job) -> Job:
    """The job with the checkpoint in the memory of its nodes, if that is not older than the one on disk.

    Only with `checkpoint.resume: auto`: otherwise another run begins, which has no copies yet. Collective
    over all ranks. Raises CheckpointError, on all ranks, if it holds another model.
    """
    config, disk = job.run.checkpoint, job.checkpoint
    if config.directory is None:
        return job
    if not config.in_memory:
        if job.position.rank == 0:
            forget_copies(config.directory)
        return job
    memory = NodeMemory(config.directory, _place(job))
    anew = config.resume != "auto"
    found, notes = memory.begin(disk_step=disk.step if disk is not None else None, anew=anew)
    if job.position.rank == 0:
        for note in notes:
            logger.warning("note: %s", note)
    if found is None:
        return job
    check_same_model(found, job.run.model)
    return replace(job, checkpoint=found, start=None)


def _place(job: Job) -> tuple[str, str]:
    return node_of(job.plan.ranks[job.position.rank]), machine_id()


class Keeper:
    """Keeps a run's checkpoints in the memory of its nodes; all methods are collective over all ranks."""

    def __init__(self, job: Job, log: Log | None) -> None:
        self._log = log
        config = job.run.checkpoint
        assert config.directory is not None
        group = make_save_group(timeout_seconds=config.timeout)
        self._memory = NodeMemory(config.directory, _place(job), group=group)
        self._kept: int | None = None
        """The newest step that is kept."""
        self._is_said = False
        """Whether the log says that steps are not kept."""

    def keep(self, job: Job, engine: Engine, progress: Progress) -> None:
        """Keep the state after a step. Where that cannot be, the log says so once, and the run goes on."""
        began, coord = time.perf_counter(), engine.world.coord
        tensors, state = engine.tensors(), checkpoint_state(job, engine, progress)
        try:
            with guard_world_collective(coord, "the copies in memory"):
                size = self._memory.keep(progress.step, tensors, state)
        except CheckpointError as error:
            last = "none is" if self._kept is None else f"the last one is that of step {self._kept}"
            if not self._is_said:
                self._say(f"note: step {progress.step} is not kept in memory ({last}): {error}")
            self._is_said = True
            return
        if self._is_said:
            self._say(f"step {progress.step} is kept in memory again")
            self._is_said = False
        if self._kept is None:
            nodes, seconds = self._memory.num_nodes, show_seconds(time.perf_counter() - began)
            what = f"on each node and a neighbour of {nodes} nodes" if nodes > 1 else "on the only node"
            self._say(f"kept step {progress.step} in memory, {what}: {show_bytes(size)} here, {seconds}")
        self._kept = progress.step

    def _say(self, text: str) -> None:
        if self._log is not None:
            self._log.say(text)


@contextmanager
def keeping(job: Job, log: Log | None) -> Iterator[Keeper | None]:
    """What keeps a run's checkpoints in memory, if it does; at its proper end, when all is saved, none stays.

    Collective over all ranks.
    """
    config = job.run.checkpoint
    if not config.in_memory:
        yield None
        return
    yield Keeper(job, log)
    assert config.directory is not None
    if job.position.rank == 0:
        # Nor does what a node has that was away.
        forget_copies(config.directory)
    remove_copies(config.directory, _place(job)[0])
