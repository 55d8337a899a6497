"""Moves a run to another plan between two steps, in the processes that it has.

A supervisor writes the plan and sends SIGUSR1, which is heard as SIGTERM is: at the end of a step all ranks
learn of it together. They agree on the plan, or that it takes a restart, for which they save and end. A move
is a save and a load, without the files: what a checkpoint holds goes from the old parts to the new ones. It
is loaded as a checkpoint is, under any plan, but from the ranks' own tensors, and nobody holds all of it. A
rank copies what it had before. Of the rest every element comes to it once, as a message of the nearest rank
that has it, so that the bytes sent are the fewest that fill the new parts.

A device never holds two sets of anything: gradients and weights in 16 bits are freed before the new ones are
made, and a card's state waits in host memory meanwhile. On a processor, whose memory that is, the old masters
and moments stay beside the new ones until these are filled. It stands alone because few runs ever move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from yuan_train.checkpoint.load import Checkpoint
from yuan_train.checkpoint.local_shards import LocalShard, Tensors
from yuan_train.config.errors import NOT_IN_PLACE, CheckpointError, YuanError
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
from yuan_train.parallel.shard import TensorBox
from yuan_train.parallel.tiers.slab import available_bytes
from yuan_train.parallel.transfer import Move, MoveBucket, make_buckets, pack, rounds_of, unpack
from yuan_train.train.build import build
from yuan_train.train.cards import machine_id
from yuan_train.train.ending import StopRequest
from yuan_train.train.engine import Engine, Progress
from yuan_train.train.job import Job, wait_for_steps
from yuan_train.train.memory import can_track_memory, release_free_memory, reset_peak_memory
from yuan_train.train.saver import checkpoint_state
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


class _Region(NamedTuple):
    """A box of a global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def common(self, other: _Region) -> _Region | None:
        """What both have; None: nothing."""
        firsts = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        sizes = tuple(end - first for first, end in zip(firsts, ends, strict=True))
        return _Region(firsts, sizes) if all(size > 0 for size in sizes) else None

    def without(self, other: _Region) -> Iterator[_Region]:
        """What the other has not, in boxes."""
        part = self.common(other)
        if part is None:
            yield self
            return
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (first, size) in enumerate(zip(*part, strict=True)):
            before, after = first - offsets[dim], offsets[dim] + sizes[dim] - first - size
            for start, count in ((offsets[dim], before), (first + size, after)):
                if count:
                    yield _Region(
                        (*offsets[:dim], start, *offsets[dim + 1 :]), (*sizes[:dim], count, *sizes[dim + 1 :])
                    )
            offsets[dim], sizes[dim] = first, size


def _region(box: TensorBox) -> _Region:
    return _Region(box.offsets, box.sizes)


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others of a tensor of which it holds something."""

    shape: torch.Size
    dtype: torch.dtype
    regions: tuple[_Region, ...]


class RanksMemory:
    """The state that the ranks hold, as it was when this was made; its methods are collective over them.

    `num_bytes`: what this rank has been sent.
    """

    def __init__(self, held: Mapping[str, LocalShard], place: str) -> None:
        """`held`: this rank's, by global name, on the host; not to change. `place`: its node."""
        self._held = held
        self.num_bytes = 0
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        mine = {
            key: _Told(shard.shape, shard.boxes[0].tensor.dtype, tuple(map(_region, shard.boxes)))
            for key, shard in held.items()
        }
        told = gather_objects((place, mine))
        # Its own first, then those of its node, then the next ones: so that not all ask the same rank.
        order = sorted(
            range(len(told)),
            key=lambda rank: (rank != self._rank, told[rank][0] != place, (rank - self._rank) % len(told)),
        )
        self._holders: dict[str, list[tuple[int, _Told]]] = defaultdict(list)
        for rank in order:
            for key, entry in told[rank][1].items():
                self._holders[key].append((rank, entry))

    @property
    def entries(self) -> dict[str, TensorStorageMetadata]:
        """What the ranks hold, as the metadata of a checkpoint say it."""
        return {
            key: TensorStorageMetadata(TensorProperties(dtype=own[0][1].dtype), own[0][1].shape, [])
            for key, own in self._holders.items()
        }

    @torch.no_grad()
    def fill(self, tensors: Tensors) -> None:
        """Fill this rank's new parts. Raises CheckpointError if no rank holds something of them."""
        wanted = {key: _as_shard(value) for key, value in tensors.items()}
        own, coming = list[Move](), list[Move]()
        for key, shard in wanted.items():
            for move in self._moves(key, shard):
                (own if move.source == self._rank else coming).append(move)
        for move in own:
            _view(wanted, move).copy_(_view(self._held, move))
        self._exchange([move for asked in gather_objects(coming) for move in asked], wanted)
        for shard in wanted.values():
            _repeat(shard)

    def _moves(self, key: str, shard: LocalShard) -> Iterator[Move]:
        """What fills a tensor's boxes, every element of it once; from this rank what it has."""
        done: list[_Region] = []
        for region in map(_region, shard.boxes):
            rest = _without_all([region], done)
            done.append(region)
            for rank, entry in self._holders[key]:
                for held in entry.regions:
                    found = [(part, common) for part in rest if (common := part.common(held)) is not None]
                    for _, common in found:
                        yield Move(key, rank, self._rank, *common)
                    rest = _without_all(rest, [held]) if found else rest
            if rest:
                raise CheckpointError(f"{key}: no rank holds {rest[0]}")

    def _exchange(self, table: Sequence[Move], wanted: Mapping[str, LocalShard]) -> None:
        """Send and receive this rank's part of all moves: of each pair of ranks one message at a time."""
        mine = [move for move in table if self._rank in (move.source, move.target)]
        dtype_of = {key: own[0][1].dtype for key, own in self._holders.items()}
        for dtype in sorted({dtype_of[move.name] for move in mine}, key=str):
            of_type = [move for move in mine if dtype_of[move.name] == dtype]
            for messages in rounds_of(make_buckets(of_type, itemsize=dtype.itemsize)):
                flats = [self._start(bucket, dtype) for bucket in messages]
                for (flat, work), bucket in zip(flats, messages, strict=True):
                    work.wait()
                    if bucket.target == self._rank:
                        unpack(bucket, flat, lambda move: _view(wanted, move))
                        self.num_bytes += flat.nbytes

    def _start(self, bucket: MoveBucket, dtype: torch.dtype) -> tuple[torch.Tensor, dist.Work]:
        if bucket.source == self._rank:
            flat = pack(bucket, lambda move: _view(self._held, move), dtype=dtype)
            work = dist.isend(flat, bucket.target)
        else:
            flat = torch.empty(bucket.num_elements, dtype=dtype)
            work = dist.irecv(flat, bucket.source)
        assert work is not None
        return flat, work


@dataclass(frozen=True)
class LiveCheckpoint(Checkpoint):
    """A checkpoint of what the ranks hold: its tensors are in their memory, its path is of no file."""

    memory: RanksMemory = field(kw_only=True)

    @cached_property
    def entries(self) -> Mapping[str, TensorStorageMetadata]:
        return self.memory.entries

    def fill(self, tensors: Tensors, *, no_dist: bool = False) -> None:
        assert not no_dist, "all ranks fill theirs together"
        self.memory.fill(tensors)


def _without_all(regions: Sequence[_Region], parts: Sequence[_Region]) -> list[_Region]:
    """The rest of some boxes without others."""
    rest = list(regions)
    for part in parts:
        rest = [piece for region in rest for piece in region.without(part)]
    return rest


def _as_shard(value: torch.Tensor | LocalShard) -> LocalShard:
    if isinstance(value, LocalShard):
        return value
    return LocalShard(value.shape, (TensorBox((0,) * value.dim(), tuple(value.shape), value),))


def _view(shards: Mapping[str, LocalShard], move: Move) -> torch.Tensor:
    """Where a rank holds what a move carries: in the first box that has all of it."""
    region = _Region(move.offsets, move.sizes)
    return next(_part(b, region) for b in shards[move.name].boxes if _region(b).common(region) == region)


def _part(box: TensorBox, region: _Region) -> torch.Tensor:
    """The view of a region of a box."""
    firsts = (o - b for o, b in zip(region.offsets, box.offsets, strict=True))
    return box.tensor[tuple(slice(at, at + n) for at, n in zip(firsts, region.sizes, strict=True))]


def _repeat(shard: LocalShard) -> None:
    """Copy what a box has that one before it has too: a vector is whole in each of a rank's slices."""
    for number, box in enumerate(shard.boxes):
        for before in shard.boxes[:number]:
            if (common := _region(box).common(_region(before))) is not None:
                _part(box, common).copy_(_part(before, common))
