"""Process groups: the only caller of `new_group`.

Every rank creates every group, in one order: partial creation hangs when ranks own different numbers of
groups (pytorch/pytorch #173608). Each edge and direction has a group of its own, so that no message waits
behind another, and a first small message warms it up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from yuan_train.config.errors import TrainingError
from yuan_train.parallel.grid import Edge, Grid, Place, Replica


@dataclass(frozen=True)
class Groups:
    """The groups of a plan, by what they are for; empty in a process alone."""

    edges: Mapping[Edge, dist.ProcessGroup]
    owners: Mapping[tuple[int, ...], dist.ProcessGroup]
    """By the ranks that hold the same slices of the same units."""
    tensor: dist.ProcessGroup | None = None
    """This rank's tensor-parallel group, if it shares its stage."""


def join(*, device: torch.device, timeout_seconds: float) -> None:
    """Meet the other ranks that the launcher started. Raises TrainingError if they do not come.

    After a restart the launcher's store still holds the dead attempt's addresses, so each attempt works
    under a prefix of its own.
    """
    timeout = timedelta(seconds=timeout_seconds)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            # Over all ranks there are only numbers to exchange, and not all cards may share a library.
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"attempt-{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise TrainingError(f"the ranks could not meet within {timeout_seconds:g} s: {error}") from error


class LostPeer(RuntimeError):
    """A rank of a group is gone, or did not come in time: what waited, and for whom."""


@contextmanager
def meeting(what: str, ranks: Sequence[int]) -> Iterator[None]:
    """Around an operation of `ranks`: say what it was, and who may be missing. Raises LostPeer."""
    try:
        yield
    except LostPeer:
        raise
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        others = [str(rank) for rank in ranks if rank != dist.get_rank()]
        who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(others)}"
        raise LostPeer(f"{what} failed; {who} is gone or stuck ({error})") from error


@contextmanager
def naming(place: Place) -> Iterator[None]:
    """Say at which place a peer was lost. Raises TrainingError."""
    try:
        yield
    except LostPeer as error:
        raise TrainingError(f"{place}: {error}") from error


@contextmanager
def watching(place: Place, what: str) -> Iterator[None]:
    """Around an operation of all ranks. Raises TrainingError."""
    ranks = range(dist.get_world_size()) if dist.is_initialized() else ()
    with naming(place), meeting(what, ranks):
        yield


def leave() -> None:
    """Part from the other ranks, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def make_groups(grid: Grid, *, device: torch.device, timeout_seconds: float) -> Groups:
    """Create and warm up the groups of a plan; collective over all ranks.

    Waiting for longer than `timeout_seconds` in any of them is an error. Ranks whose cards share no library
    get gloo: what it sums it takes from a card by itself, and what goes over an edge the bridge brings to
    the host.
    """
    if not dist.is_initialized():
        return Groups({}, {})

    def new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        direct = device.type == "cuda" and not grid.plan.staged(ranks)
        timeout = timedelta(seconds=timeout_seconds)
        return _new_group(ranks, timeout=timeout, backend="nccl" if direct else "gloo")

    edges = {edge: new_group((edge.sender, edge.receiver)) for edge in grid.edges}
    shared = dict.fromkeys(
        bucket.slice_group(i)
        for bucket in grid.buckets
        for i in range(bucket.num_slices)
        if len(bucket.owners) > 1
    )
    owners = {ranks: new_group(ranks) for ranks in shared}
    wide: list[Replica] = [
        replica for p in range(len(grid.plan.pipelines)) for replica in grid.replicas(p) if len(replica) > 1
    ]
    tensor: dict[Replica, dist.ProcessGroup] = {replica: new_group(replica) for replica in wide}
    mine = grid.replica(grid.places[dist.get_rank()])
    groups = Groups(edges, owners, tensor.get(mine))
    _warm_up(grid, groups, device)
    return groups


def make_tensor_groups(
    teams: Sequence[tuple[int, ...]], *, timeout_seconds: float
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for each team of ranks; collective over all ranks."""
    return {ranks: _new_group(ranks, timeout=timedelta(seconds=timeout_seconds)) for ranks in teams}


def make_save_group(*, timeout_seconds: float) -> dist.ProcessGroup | None:
    """A group of all ranks for saves in the background, whose messages must not mix with training's.

    Collective over all ranks; None in a process alone.
    """
    if not dist.is_initialized():
        return None
    timeout = timedelta(seconds=timeout_seconds)
    return _new_group(tuple(range(dist.get_world_size())), timeout=timeout, backend="gloo")


def _new_group(
    ranks: tuple[int, ...], *, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    # A group does not inherit the time-out of the world. Outside a group torch returns a stand-in.
    return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout=timeout, backend=backend))


def _warm_up(grid: Grid, groups: Groups, device: torch.device) -> None:
    """Use each group once, in one order; a peer that is not there is named."""
    rank = dist.get_rank()
    for edge, group in groups.edges.items():
        sender, receiver = edge.sender, edge.receiver
        token = torch.zeros(1, device="cpu" if grid.plan.staged((sender, receiver)) else device)
        try:
            if rank == sender:
                dist.send(token, receiver, group=group)
            elif rank == receiver:
                dist.recv(token, sender, group=group)
        except RuntimeError as error:
            raise TrainingError(
                f"rank {rank}: the link from rank {sender} to rank {receiver} failed: {error}"
            ) from error
    token = torch.zeros(1, device=device)
    for ranks, group in groups.owners.items():
        if rank in ranks:
            try:
                dist.all_reduce(token, group=group)
            except RuntimeError as error:
                raise TrainingError(
                    f"rank {rank}: the gradient group of ranks {list(ranks)} failed: {error}"
                ) from error
    if groups.tensor is not None:
        dist.all_reduce(token, group=groups.tensor)
