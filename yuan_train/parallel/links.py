"""Roles of one job: each has a process group world of its own, and links join ranks of several roles.

A role's ranks find each other under a prefix of the launcher's store, so that everything that asks for the
rank and the size of the world (groups, executor, optimizer) gets those of the role. A link is a gloo group
beside it, over ranks of the job: for messages of the controller, and for weights to an engine. The loss of a
rank is seen by whoever waits for it; the other roles' worlds go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from yuan_train.config.errors import LostRank, TrainingError
from yuan_train.parallel.board import Board, Meeting
from yuan_train.parallel.device import Device
from yuan_train.parallel.groups import world_backend
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.transfer import Bucket, pack, unpack
from yuan_train.parallel.transport import PATIENCE, LostPeer, is_lost_connection, without_frames

BUCKETS_AHEAD = 2
"""Messages of a pair of ranks that are under way at once: one is packed while another is sent."""


@dataclass(frozen=True)
class RolePosition:
    """Where a rank of the job stands: its role, its rank there, and whose ranks the others are."""

    role: str
    rank: int
    """In the role's world."""
    job_rank: int
    role_ranks: Mapping[str, range]
    """The ranks of the job of each role."""
    store: dist.Store
    board: Board
    """Of the ranks that end together."""

    def label(self, job_rank: int) -> str:
        """A rank of the job, for people: `generation rank 1 (rank 3 of the job)`."""
        for role, ranks in self.role_ranks.items():
            if job_rank in ranks:
                return f"{role} rank {job_rank - ranks.start} (rank {job_rank} of the job)"
        return f"rank {job_rank} of the job"

    @contextmanager
    def naming_role(self) -> Iterator[None]:
        """Around what counts ranks as the role does: a TrainingError says whose ranks they are."""
        try:
            yield
        except TrainingError as error:
            first = self.role_ranks[self.role].start
            raise type(error)(f"{self.role} (its rank 0 is rank {first} of the job): {error}") from error


def join_role(
    role_ranks: Mapping[str, range],
    *,
    fates: Sequence[Sequence[int]] | None = None,
    startup_seconds: float,
) -> RolePosition:
    """Meet the ranks of all roles, with the variables that the launcher set; collective over the job.

    `fates` are the ranks of the job that end together; None: all. Raises TrainingError if some do not come
    within `startup_seconds`, and what a rank has found wrong with its files.
    """
    meeting = Meeting.of_launcher()
    job_rank, wanted = meeting.rank, sum(map(len, role_ranks.values()))
    if meeting.world_size != wanted:
        raise TrainingError(f"the plan has {wanted} ranks, but {meeting.world_size} were started")
    role = next(name for name, ranks in role_ranks.items() if job_rank in ranks)
    board = Board(meeting, f"{role} rank {job_rank - role_ranks[role].start}", seconds=startup_seconds)
    board.wait_for_all(startup_seconds)
    if fates is not None and len(fates) > 1:
        board.narrow(next(ranks for ranks in fates if job_rank in ranks))
    board.join_ring()
    store = dist.PrefixStore(f"attempt-{meeting.attempt}", board.store)
    return RolePosition(role, job_rank - role_ranks[role].start, job_rank, dict(role_ranks), store, board)


def enter_role(position: RolePosition, *, device: Device, timeout_seconds: float) -> None:
    """Initialise torch.distributed with the ranks of a role, all of which have come; collective over them.

    A role of one rank is a single process, without process groups. Raises LostRank if they do not connect.
    """
    ranks = position.role_ranks[position.role]
    if len(ranks) == 1:
        return
    try:
        dist.init_process_group(
            world_backend(device),
            store=dist.PrefixStore(position.role, position.store),
            rank=position.rank,
            world_size=len(ranks),
            timeout=timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        raise LostRank(f"the ranks of a role could not connect: {without_frames(error)}") from error


class Link:
    """A gloo group over some ranks of the job, whatever their roles; tensors are in host memory.

    Messages from one rank to another arrive in the order in which they were sent. Whoever waits for one does
    so with PATIENCE: the other end may be at work of its own.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], position: RolePosition, *, timeout_seconds: float
    ) -> None:
        """`timeout_seconds`: in which all its ranks come to make it. Raises LostPeer."""
        self._name = name
        self._position = position
        self._index = {rank: index for index, rank in enumerate(ranks)}
        with self._naming(None, "the start"):
            gloo = dist.ProcessGroupGloo(
                dist.PrefixStore(f"link {name}", position.store),
                self._index[position.job_rank],
                len(ranks),
                timedelta(seconds=timeout_seconds),
            )
        # Torch's types do not say that it is one.
        self._group = cast(dist.ProcessGroup, gloo)

    def send(self, tensor: torch.Tensor, receiver: int) -> Callable[[], None]:
        """Start to send a contiguous tensor to a rank of the job; what is returned waits until it is gone.

        It raises LostPeer if the receiver is lost.
        """
        with self._naming(receiver, "a message"):
            work = self._group.send([tensor], self._index[receiver], 0)
        return self._wait(work, tensor, receiver)

    def receive(self, tensor: torch.Tensor, sender: int) -> Callable[[], None]:
        """Start to receive into a tensor; what is returned waits until it has arrived."""
        with self._naming(sender, "a message"):
            work = self._group.recv([tensor], self._index[sender], 0)
        return self._wait(work, tensor, sender)

    def _wait(self, work: dist.Work, tensor: torch.Tensor, peer: int) -> Callable[[], None]:
        def wait(held: torch.Tensor = tensor) -> None:
            with self._naming(peer, "a message"):
                work.wait(PATIENCE)

        return wait

    @contextmanager
    def _naming(self, peer: int | None, what: str) -> Iterator[None]:
        """Raise a lost connection as a LostPeer that names the link, and the other rank by role."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            others = [rank for rank in self._index if rank != self._position.job_rank]
            who = " or ".join(map(self._position.label, others if peer is None else [peer]))
            raise LostPeer(
                f"{what} of link {self._name!r} failed; {who} is gone or stuck ({without_frames(error)})"
            ) from error


def move_weights(
    buckets: Sequence[Bucket],
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard],
    *,
    link: Link,
    job_rank: int,
    dtype: torch.dtype,
) -> int:
    """Send the buckets that this rank is the source of; fill its tensors from those it is the target of.

    Collective over the ranks that the buckets name, whose order of buckets is the same; `tensors` are this
    rank's parts by global name, `dtype` what is sent. Returns the bytes that this rank sent. A few messages a
    pair are under way at once, all pairs at the same time. Raises LostPeer.
    """
    sent = 0
    waiting: deque[Callable[[], None]] = deque()
    arriving: deque[tuple[Bucket, torch.Tensor, Callable[[], None]]] = deque()
    rounds = _rounds([b for b in buckets if job_rank in (b.source, b.target)])
    for number, messages in enumerate(rounds):
        for bucket in messages:
            if bucket.target == job_rank:
                buffer = torch.empty(bucket.num_elements, dtype=dtype)
                arriving.append((bucket, buffer, link.receive(buffer, bucket.source)))
        for bucket in messages:
            if bucket.source == job_rank:
                flat = pack(bucket, tensors, shards, dtype=dtype).cpu()
                waiting.append(link.send(flat, bucket.target))
                sent += flat.nbytes
        ahead = sum(len(later) for later in rounds[max(number + 2 - BUCKETS_AHEAD, 0) : number + 1])
        while len(waiting) + len(arriving) > ahead:
            _finish_one(waiting, arriving, tensors, shards)
    while waiting or arriving:
        _finish_one(waiting, arriving, tensors, shards)
    return sent


def post_weights(
    buckets: Sequence[Bucket],
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard],
    *,
    link: Link,
    job_rank: int,
    dtype: torch.dtype,
) -> tuple[int, list[Callable[[], None]]]:
    """Start to send what of the buckets this rank is the source of, all at once, from copies on the host.

    Returns the bytes, and what waits until they are taken: the tensors may change meanwhile. The targets call
    `move_weights`.
    """
    sent, waits = 0, list[Callable[[], None]]()
    for messages in _rounds([bucket for bucket in buckets if bucket.source == job_rank]):
        for bucket in messages:
            flat = pack(bucket, tensors, shards, dtype=dtype).cpu()
            waits.append(link.send(flat, bucket.target))
            sent += flat.nbytes
    return sent, waits


def _rounds(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """The first bucket of each pair of ranks, then the second of each, and so on."""
    rounds: list[list[Bucket]] = []
    counts: dict[tuple[int, int], int] = {}
    for bucket in buckets:
        number = counts.get((bucket.source, bucket.target), 0)
        counts[bucket.source, bucket.target] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(bucket)
    return rounds


def _finish_one(
    waiting: deque[Callable[[], None]],
    arriving: deque[tuple[Bucket, torch.Tensor, Callable[[], None]]],
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard],
) -> None:
    """Wait for the oldest message; a receive first, for what arrives must be unpacked."""
    if arriving:
        bucket, buffer, wait = arriving.popleft()
        wait()
        unpack(bucket, buffer, tensors, shards)
    else:
        waiting.popleft()()
