"""Moves a run to another plan between two steps, in the processes that it has.

A supervisor writes the plan and sends SIGUSR1, which is heard as SIGTERM is: at the end of a step all ranks
learn of it together. They agree on the plan, or that it takes a restart, for which they save and end. A move
is a save and a load, without the files: what a checkpoint holds goes from the old parts to the new ones
(`live.py`).

A device never holds two sets of anything: gradients and weights in 16 bits are freed before the new ones are
made, and a card's state waits in host memory meanwhile. On a processor, whose memory that is, the old masters
and moments stay beside the new ones until these are filled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from yuan_train.checkpoint.local_shards import LocalShard
from yuan_train.config.errors import NOT_IN_PLACE, YuanError
from yuan_train.config.express import check_engine
from yuan_train.config.plan import Plan, node_of
from yuan_train.config.plan_constraints import (
    check_plan_of_run,
    check_precision,
    load_plan,
    restart_reason,
)
from yuan_train.config.units import show_bytes
from yuan_train.parallel.apply import take_apart
from yuan_train.parallel.device import Device
from yuan_train.parallel.groups import gather_objects, guard_world_collective, share_object, sum_over_world
from yuan_train.parallel.tiers.slab import available_bytes
from yuan_train.train.build import build
from yuan_train.train.cards import machine_id
from yuan_train.train.ending import StopRequest
from yuan_train.train.engine import Engine
from yuan_train.train.job import Job, wait_for_steps
from yuan_train.train.live import LiveCheckpoint, RanksMemory
from yuan_train.train.memory import can_track_memory, release_free_memory, reset_peak_memory
from yuan_train.train.saver import checkpoint_state
from yuan_train.train.state import Progress
from yuan_train.train.step import Trainer

HOST_SHARE = 0.8
"""Of the host memory that is free, what the state of a node's cards may take while it waits there."""


def agree_on_plan(job: Job, engine: Engine, asked: StopRequest, *, is_last: bool) -> Plan | str:
    """After a step at whose end some rank wants to stop: the plan with which all go on, which may be the one
    that they have; or, in words, why the run ends here. Collective over all ranks.

    `is_last`: there is no other step.
    """
    with guard_world_collective(engine.world.coord, "the agreement on another plan"):
        told = gather_objects((asked.heard(), asked.take_move()))
        movers = [(rank, path) for rank, (_, path) in enumerate(told) if path is not None]
        if any(is_end for is_end, _ in told) or not movers:
            return "stopped by SIGTERM"
        if is_last:
            return "all is done"
        first, path = movers[0]
        plan = share_object(_read(path) if job.position.rank == first else "", source=first)
        if isinstance(plan, Plan) and plan != job.plan:
            plan = _obstacle(job, engine, plan) or plan
    return plan if isinstance(plan, Plan) else f"{NOT_IN_PLACE}{plan}; saved for a restart"


def _read(path: Path) -> Plan | str:
    """The plan of a file, or what is wrong with it."""
    try:
        return load_plan(path)
    except YuanError as error:
        return str(error)


def _obstacle(job: Job, engine: Engine, plan: Plan) -> str | None:
    """Why the ranks cannot go on under a plan as they are; None: they can. The same on all ranks."""
    if not isinstance(engine, Trainer):
        return "another engine than ours trains"
    reason = restart_reason(job.plan, plan, job.run)
    if reason is not None:
        return reason
    try:
        check_plan_of_run(plan, job.run)
        check_precision(plan, job.run)
        check_engine(plan, job.run)
    except YuanError as error:
        return str(error)
    if wait_for_steps(job.run, plan) != job.run:
        return "its steps take longer than ranks wait for each other (train.timeout)"
    return _lacking_room(job, engine)


def _lacking_room(job: Job, trainer: Trainer) -> str | None:
    """Where the hosts have not enough memory for the state of their cards; collective over all ranks."""
    wanted = 0
    if job.device.is_card:
        wanted = sum(box.tensor.nbytes for s in trainer.tensors("held").values() for box in s.boxes)
    totals, free, names = defaultdict[str, int](int), dict[str, float](), dict[str, str]()
    node = node_of(job.plan.ranks[job.position.rank])
    for machine, name, size, available in gather_objects((machine_id(), node, wanted, available_bytes())):
        totals[machine] += size
        free[machine] = min(available, free.get(machine, available))
        names.setdefault(machine, name)
    for machine, size in totals.items():
        if size > HOST_SHARE * free[machine]:
            return (
                f"the state of the cards of {names[machine]}, {show_bytes(size)}, does not fit its host's "
                f"memory, of which {show_bytes(free[machine])} are free"
            )
    return None


def move_to(plan: Plan, job: Job, engine: Engine, progress: Progress) -> tuple[Job, Trainer, Progress, int]:
    """Go on under a plan on which all ranks have agreed: the job, the engine and its progress, and the bytes
    of state that were sent between ranks. Collective over all ranks; the old engine can do nothing any more.

    Raises TrainingError if a rank is lost.
    """
    with guard_world_collective(engine.world.coord, "the move to another plan"):
        memory, state = _take_apart(job, cast(Trainer, engine), progress)
        checkpoint = LiveCheckpoint(Path("the memory of the ranks"), state, memory=memory)
        trainer, progress = build(replace(job, plan=plan, checkpoint=checkpoint))
    sent = torch.tensor([float(memory.num_bytes)], dtype=torch.float64)
    sum_over_world(
        trainer.runtime.groups, trainer.runtime.coord, sent, "the sum of the bytes that were moved"
    )
    del memory, checkpoint
    if can_track_memory(job.device):
        reset_peak_memory(job.device)
    return replace(job, plan=plan), trainer, progress, int(sent)


def _take_apart(job: Job, trainer: Trainer, progress: Progress) -> tuple[RanksMemory, dict[str, Any]]:
    """What a checkpoint would hold of an engine, of which nothing else stays."""
    state = checkpoint_state(job, trainer, progress)
    trainer.finish()
    held = _on_host(trainer.tensors("held"), job.device)
    # Once all have told what they hold, nobody waits for anything of the groups.
    memory = RanksMemory(held, node_of(job.plan.ranks[job.position.rank]))
    take_apart(trainer.runtime, [box.tensor for shard in held.values() for box in shard.boxes])
    release_free_memory(job.device)
    return memory, state


def _on_host(shards: Mapping[str, LocalShard], device: Device) -> Mapping[str, LocalShard]:
    """What a rank holds, in host memory: of a card a copy."""
    if not device.is_card:
        return shards
    return {
        key: replace(
            shard, boxes=tuple(replace(box, tensor=device.to_host(box.tensor)) for box in shard.boxes)
        )
        for key, shard in shards.items()
    }
