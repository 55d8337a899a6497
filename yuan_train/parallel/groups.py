"""Process groups: the only module that calls `new_group`.

Every rank goes through all groups in the same order, also those of which it is no member. Torch names a group
by its number, under which the members find each other; and where the members alone call it, it takes the
number of the groups that a rank has, in which ranks differ, so that they wait forever (pytorch/pytorch
#173608). Each edge and direction has a group of its own, so that no message waits
behind another, and a first small message warms it up.

A few numbers of all ranks: their sums, or all of them on rank 0, through a tree of small groups.

Gloo's all-reduce is a ring: 2 (N - 1) messages one after another, whatever their size. In a tree each group
of eight, on one node if ranks are numbered node by node, gathers at its first rank, these ranks in groups of
eight again, and so on; a sum goes back the same way. That is about 4 log8(N) messages one after another: 20
instead of 16,382 at 8,192 ranks. All ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from yuan_train.config.errors import LostRank
from yuan_train.parallel.board import Board, RolePosition, meet
from yuan_train.parallel.device import Device
from yuan_train.parallel.grid import Edge, Grid, RankCoord, Replica
from yuan_train.parallel.transport import (
    LostPeer,
    Transport,
    blame_peers,
    is_lost_connection,
    library_of,
    rooted,
    transport_of,
    wait_for_all,
    without_frames,
)

T = TypeVar("T")


def sum_over_world(groups: Groups, coord: RankCoord, totals: torch.Tensor, what: str) -> None:
    """Add up a tensor [n] on the CPU over all ranks, in place; collective over all ranks.

    Raises TrainingError, naming `what` and the ranks that may be lost.
    """
    if not dist.is_initialized():
        return
    if not groups.tree:
        with guard_world_collective(coord, what):
            dist.all_reduce(totals)
        return
    with as_training_error(coord):
        joined: list[tuple[tuple[int, ...], dist.ProcessGroup]] = []
        for ranks, group in groups.tree:
            joined.append((ranks, group))
            gathered = _gather(coord, totals, ranks, group, what)
            if gathered is None:
                break
            totals.copy_(gathered.sum(0))
        for ranks, group in reversed(joined):
            with blame_peers(what, ranks):
                group.broadcast([totals], _FROM_FIRST).wait()


def gather_on_first(
    groups: Groups, coord: RankCoord, local: torch.Tensor, what: str
) -> list[list[float]] | None:
    """The numbers [n] of all ranks, by rank, on rank 0; None elsewhere. Collective over all ranks.

    Raises TrainingError, naming `what` and the ranks that may be lost.
    """
    if not dist.is_initialized():
        return [local.tolist()]
    world_size = dist.get_world_size()
    tree = groups.tree or [(tuple(range(world_size)), None)]
    rows = local.unsqueeze(0)
    with as_training_error(coord):
        for ranks, group in tree:
            gathered = _gather(coord, rows, ranks, group, what)
            if gathered is None:
                return None
            # The last group may be short, but in the next one all send as much.
            rows = torch.zeros(len(rows) * TREE_WIDTH if groups.tree else world_size, len(local)).to(local)
            rows[: gathered.shape[0] * gathered.shape[1]] = gathered.flatten(0, 1)
    return rows[:world_size].tolist()


def _gather(
    coord: RankCoord, local: torch.Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup | None, what: str
) -> torch.Tensor | None:
    """The tensors [...] of a group's ranks on its first one, as one [ranks, ...]; None elsewhere."""
    gathered = torch.zeros(len(ranks), *local.shape, dtype=local.dtype) if coord.rank == ranks[0] else None
    parts = [] if gathered is None else [list(gathered.unbind())]
    group = group or dist.group.WORLD
    assert group is not None
    with blame_peers(what, ranks):
        group.gather(parts, [local], _ON_FIRST).wait()
    return gathered


# The groups' own methods: torch.distributed's functions of the same names find a rank's number in its group
# and check what they are given each time, which takes the host longer than all else of a sum.
_FROM_FIRST, _ON_FIRST = rooted(dist.BroadcastOptions(), 0), rooted(dist.GatherOptions(), 0)


TREE_WIDTH = 8
"""Ranks of a group of the tree in which all ranks sum; the cards of a usual node."""

RING_UP_TO = 32
"""Ranks up to which a ring is as fast as a tree."""

COMMUNICATOR_SECONDS = 600.0
"""Within which the ranks of a communicator meet that is made to measure what it takes."""


@dataclass(frozen=True)
class Groups:
    """The process groups of a plan, by purpose; empty in a single process."""

    edges: Mapping[Edge, Transport]
    """Of two ranks each, for point-to-point messages: those of this rank's tensor-parallel group, whose first
    rank is the member."""
    owners: Mapping[tuple[int, ...], Transport]
    """For gradient reductions and weight sync, by the ranks that hold the same slices of the same units:
    those of which this rank is a member."""
    tensor: dist.ProcessGroup | None = None
    """This rank's tensor-parallel group; None if it is one rank wide."""
    replica: Transport | None = None
    """The group of `tensor` as a transport."""
    tree: Sequence[tuple[tuple[int, ...], dist.ProcessGroup]] = ()
    """For `sum_over_world`: this rank's group and, as far as it is the first of each, those above. Empty on
    few ranks, which sum in a ring."""

    def close(self) -> None:
        """Destroy them: another plan has others. Nothing may be under way, on any rank; not collective."""
        for transport in (*self.edges.values(), *self.owners.values()):
            transport.close()
        for group in (*(group for _, group in self.tree), *([] if self.tensor is None else [self.tensor])):
            dist.destroy_process_group(group)


def init_distributed(*, device: Device, timeout_seconds: float) -> None:
    """`meet` the ranks that the launcher started, and `enter_world` with them."""
    enter_world(meet(timeout_seconds), device=device, timeout_seconds=timeout_seconds)


def enter_world(board: Board, *, device: Device, timeout_seconds: float) -> None:
    """Initialise torch.distributed with the ranks of a board, all of which have come.

    After a restart the launcher's store still holds the addresses of the failed attempt, so each attempt uses
    a prefix of its own. `timeout_seconds` is how long a rank waits in an operation of all ranks. Raises
    LostRank if the ranks do not connect.
    """
    meeting = board.meeting
    store = dist.PrefixStore(f"attempt-{meeting.attempt}", board.store)
    connect("the ranks", store, meeting.rank, meeting.world_size, device, timeout_seconds)


def enter_role(position: RolePosition, *, device: Device, timeout_seconds: float) -> None:
    """Initialise torch.distributed with the ranks of a role, all of which have come; collective over them.

    A role of one rank is a single process, without process groups. Raises LostRank if they do not connect.
    """
    ranks = position.role_ranks[position.role]
    if len(ranks) == 1:
        return
    store = dist.PrefixStore(position.role, position.store)
    connect("the ranks of a role", store, position.rank, len(ranks), device, timeout_seconds)


def connect(
    who: str, store: dist.Store, rank: int, world_size: int, device: Device, timeout_seconds: float
) -> None:
    """Initialise torch.distributed with ranks that meet in a store. Raises LostRank, naming `who` they are,
    if they do not connect."""
    timeout = timedelta(seconds=timeout_seconds)
    try:
        dist.init_process_group(
            world_backend(device), store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        if not is_lost_connection(error):
            raise
        raise LostRank(f"{who} could not connect: {without_frames(error)}") from error


def world_backend(device: Device) -> str:
    """Our ranks exchange only numbers in the world group, and their cards may have different backends."""
    return "cpu:gloo,cuda:nccl" if device.library == "nccl" else "gloo"


@contextmanager
def as_training_error(coord: RankCoord) -> Iterator[None]:
    """Raise a LostPeer as a LostRank that names this rank's coordinates."""
    try:
        yield
    except LostPeer as error:
        raise LostRank(f"{coord}: {error}") from error


@contextmanager
def guard_world_collective(coord: RankCoord, what: str) -> Iterator[None]:
    """Around an operation `what` of all ranks: raise a lost connection as a LostRank that names them."""
    ranks = range(dist.get_world_size()) if dist.is_initialized() else ()
    with as_training_error(coord), blame_peers(what, ranks):
        yield


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each rank of a group has, None: of the world; collective over them."""
    if not dist.is_initialized():
        return [value]
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, value, group=group)
    return told


def share_object(value: T, *, source: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """What rank `source` of the world has, on all ranks of a group, None: of the world; collective."""
    if not dist.is_initialized():
        return value
    told: list[Any] = [value]
    dist.broadcast_object_list(told, src=source, group=group)
    return told[0]


def wait_for_world(coord: RankCoord, what: str) -> None:
    """Wait until all ranks have come here, however long their work on `what` takes; collective over them.

    Raises LostRank.
    """
    if dist.is_initialized():
        with as_training_error(coord):
            wait_for_all(range(dist.get_world_size()), what)


def shutdown() -> None:
    """Destroy the process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def one_communicator(device: Device, kinds: Sequence[str]) -> Iterator[None]:
    """Inside, a card has the buffers of one communicator: with all ranks of its kind, or alone.

    `kinds` are the backends of the ranks' cards, by rank, and "" where messages go over gloo, which has no
    buffers on cards. Collective over all ranks.
    """
    alone = not dist.is_initialized()
    if alone and kinds[0]:
        dist.init_process_group(world_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    own, group = 0 if alone else dist.get_rank(), None
    for kind in dict.fromkeys(filter(None, kinds)):
        ranks = tuple(rank for rank, other in enumerate(kinds) if other == kind)
        made = _new_group(ranks, COMMUNICATOR_SECONDS, backend=device.library)
        group = made if own in ranks else group
    try:
        if group is not None:
            # NCCL makes it at its first use.
            dist.all_reduce(torch.zeros(1, device=device.torch), group=group)
            device.finish()
        yield
    finally:
        if alone and dist.is_initialized():
            dist.destroy_process_group()
        elif group is not None:
            dist.destroy_process_group(group)


def enter_world_as(rank: int, *, device: Device, timeout_seconds: float) -> None:
    """Leave the group of all ranks, and enter it again as another rank; alone, if there is none.

    Collective over all ranks, which must give different numbers. The store in which they met serves again.
    """
    store, world_size = dist.HashStore(), 1
    if dist.is_initialized():
        differs = torch.tensor(float(rank != dist.get_rank()))
        dist.all_reduce(differs, dist.ReduceOp.MAX)
        if not differs:
            return
        met_in = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        store, world_size = dist.PrefixStore("entered-again", met_in), dist.get_world_size()
        dist.destroy_process_group()
    connect("the ranks", store, rank if world_size > 1 else 0, world_size, device, timeout_seconds)


def make_world_groups(*, timeout_seconds: float) -> Groups:
    """The groups for sums over all ranks, without any others; collective over all ranks."""
    return Groups({}, {}, tree=_make_tree(timeout_seconds=timeout_seconds))


def make_groups(
    grid: Grid, *, device: Device, timeout_seconds: float, startup_timeout_seconds: float | None = None
) -> Groups:
    """Create and warm up the groups of a plan; collective over all ranks.

    An operation of a group that waits longer than `timeout_seconds` fails, a first one that does not end in
    `startup_timeout_seconds` (None: the same) too. Ranks whose cards have no common backend get gloo. Raises
    TrainingError, naming the ranks, if a group does not work.

    On cards each group is an NCCL communicator with buffers of its own on the card; a rank has two for each
    worker that it exchanges messages with in a cut, one for each group of owners, and one for its
    tensor-parallel group. What they take is not measured here; it counts in the card's `reserved` bytes.
    """
    if not dist.is_initialized():
        return Groups({}, {})

    rank = dist.get_rank()

    def new_group(ranks: tuple[int, ...], *, of_messages: bool = False) -> dist.ProcessGroup:
        via_host = rank in ranks and grid.plan.via_host(ranks)
        return _group_of(ranks, device, timeout_seconds, via_host=via_host, of_messages=of_messages)

    def transport(ranks: tuple[int, ...], group: dist.ProcessGroup) -> Transport:
        return transport_of(group, ranks, device=device, via_host=grid.plan.via_host(ranks))

    own = grid.replica(grid.coords[rank])
    edges: dict[Edge, Transport] = {}
    for edge in grid.edges:
        ranks = (edge.sender, edge.receiver)
        group = new_group(ranks, of_messages=True)
        if own[0] in ranks:
            edges[edge] = transport(ranks, group)
    shared = dict.fromkeys(
        bucket.slice_group(i)
        for bucket in grid.buckets
        for i in range(bucket.num_slices)
        if len(bucket.owners) > 1
    )
    owners: dict[tuple[int, ...], Transport] = {}
    for ranks in shared:
        group = new_group(ranks)
        if rank in ranks:
            owners[ranks] = transport(ranks, group)
    wide: list[Replica] = [
        replica for p in range(len(grid.plan.pipelines)) for replica in grid.replicas(p) if len(replica) > 1
    ]
    tensor: dict[Replica, dist.ProcessGroup] = {replica: new_group(replica) for replica in wide}
    tree = _make_tree(timeout_seconds=timeout_seconds)
    groups = Groups(
        edges,
        owners,
        tensor.get(own),
        tree=tree,
        replica=transport(own, tensor[own]) if own in tensor else None,
    )
    _warm_up(groups, device, timeout_seconds if startup_timeout_seconds is None else startup_timeout_seconds)
    return groups


def _make_tree(*, timeout_seconds: float) -> list[tuple[tuple[int, ...], dist.ProcessGroup]]:
    """The groups of `Groups.tree` of this rank; collective over all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size <= RING_UP_TO:
        return []
    found: list[tuple[tuple[int, ...], dist.ProcessGroup]] = []
    stride = 1
    while stride < world_size:
        for first in range(0, world_size, stride * TREE_WIDTH):
            ranks = tuple(range(first, min(first + stride * TREE_WIDTH, world_size), stride))
            if len(ranks) > 1:
                group = _new_group(ranks, timeout_seconds, backend="gloo")
                if rank in ranks:
                    found.append((ranks, group))
        stride *= TREE_WIDTH
    return found


def make_tensor_groups(
    rank_groups: Sequence[tuple[int, ...]], *, timeout_seconds: float
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for each tuple of ranks; collective over all ranks."""
    return {ranks: _new_group(ranks, timeout_seconds) for ranks in rank_groups}


def make_pair(ranks: tuple[int, int], *, device: Device, via_host: bool, timeout_seconds: float) -> Transport:
    """A group of two ranks, to be freed by them; collective over all ranks."""
    # As an edge of a plan, whose rate it measures.
    group = _group_of(ranks, device, timeout_seconds, via_host=via_host, of_messages=True)
    return transport_of(group, ranks, device=device, via_host=via_host)


def _group_of(
    ranks: tuple[int, ...], device: Device, seconds: float, *, via_host: bool, of_messages: bool
) -> dist.ProcessGroup:
    """A group of the library that the transport of these ranks needs."""
    library = library_of(device, via_host=via_host)
    is_own = of_messages and library == device.library
    options = device.message_options(timedelta(seconds=seconds)) if is_own else None
    return _new_group(ranks, seconds, backend=library, options=options)


def make_save_group(*, timeout_seconds: float) -> dist.ProcessGroup | None:
    """A gloo group of all ranks for asynchronous saves, whose messages must not mix with those of training.

    Collective over all ranks; None in a single process.
    """
    if not dist.is_initialized():
        return None
    return _new_group(tuple(range(dist.get_world_size())), timeout_seconds, backend="gloo")


def _new_group(
    ranks: tuple[int, ...], seconds: float, *, backend: str | None = None, options: Any = None
) -> dist.ProcessGroup:
    """A group, of which a rank outside gets a placeholder. All ranks go through it."""
    # A group does not inherit the timeout of the world.
    timeout = timedelta(seconds=seconds)
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options)
    return cast(dist.ProcessGroup, group)


def _warm_up(groups: Groups, device: Device, seconds: float) -> None:
    """Use each group once, in the same order on all ranks. Raises TrainingError, naming the peer.

    The host waits for the end of each: on nccl, a link that does not work would only be noticed in step 1.
    """
    rank = dist.get_rank()
    token = torch.zeros(1, device=device.torch)
    for edge, transport in groups.edges.items():
        with _naming(rank, f"the link from rank {edge.sender} to rank {edge.receiver}"):
            if rank == edge.sender:
                transport.send(token, edge.receiver).finish(seconds)
            elif rank == edge.receiver:
                transport.post((1,), token.dtype, edge.sender).finish(seconds)
    for ranks, transport in groups.owners.items():
        with _naming(rank, f"the gradient group of ranks {list(ranks)}"):
            transport.all_reduce(token, "the first use of the gradient group").finish(seconds)
    if groups.replica is not None:
        with _naming(rank, "the tensor-parallel group"):
            groups.replica.all_reduce(token, "the first use of the tensor-parallel group").finish(seconds)


@contextmanager
def _naming(rank: int, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise LostRank(f"rank {rank}: {what} failed: {without_frames(error)}") from error
