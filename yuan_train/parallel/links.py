"""Links join ranks of several roles of a job, each of which has a process group world of its own.

A link is a gloo group beside these worlds, over ranks of the job: for messages of the controller, and for
weights to an engine. The loss of a rank is seen by whoever waits for it; the other roles' worlds go on.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.parallel.board import RolePosition
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.transfer import (
    WHOLE,
    MoveBucket,
    decode,
    encode,
    message_sizes,
    pack,
    rounds_of,
    unpack,
    view_of,
)
from yuan_train.parallel.transport import PATIENCE, LostPeer, is_lost_connection, without_frames

BUCKETS_AHEAD = 2
"""Messages of a pair of ranks that are under way at once: one is packed while another is sent."""


class RankLink:
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
        self.job_rank = position.job_rank
        self._index = {rank: index for index, rank in enumerate(ranks)}
        with self._naming(None, "the start"):
            gloo = dist.ProcessGroupGloo(
                dist.PrefixStore(f"link {name}", position.store),
                self._index[self.job_rank],
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
            others = [rank for rank in self._index if rank != self.job_rank]
            who = " or ".join(map(self._position.label, others if peer is None else [peer]))
            raise LostPeer(
                f"{what} of link {self._name!r} failed; {who} is gone or stuck ({without_frames(error)})"
            ) from error


class Outlet:
    """What this rank sends of its weights to some ranks, again and again, each time as they are then."""

    def __init__(
        self, buckets: Sequence[MoveBucket], *, link: RankLink, dtype: torch.dtype, by_difference: bool
    ) -> None:
        """Of `buckets` those that this rank is the source of, in `dtype`. `by_difference`: keep on the host
        what was sent, and send the elements whose bits have changed since."""
        self._rounds = rounds_of([bucket for bucket in buckets if bucket.source == link.job_rank])
        self._link = link
        self._dtype = dtype
        self._by_difference = by_difference
        self._sent: dict[tuple[int, int], torch.Tensor] = {}
        """By round and target."""

    def post(
        self, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]
    ) -> tuple[int, list[Callable[[], None]]]:
        """Start to send all, from copies on the host; `tensors` are this rank's parts by global name.

        Returns the bytes, and what waits until they are taken, by `take_weights` on the targets: the tensors
        may change meanwhile. Raises LostPeer.
        """
        total, waits, view = 0, list[Callable[[], None]](), view_of(tensors, shards)
        for number, messages in enumerate(self._rounds):
            for bucket in messages:
                flat = pack(bucket, view, dtype=self._dtype).cpu()
                count, message = encode(flat, self._sent.get((number, bucket.target)))
                if self._by_difference:
                    self._sent[number, bucket.target] = flat
                waits += [self._link.send(x, bucket.target) for x in (torch.tensor([count]), message)]
                total += message.nbytes
        return total, waits


def take_weights(
    buckets: Sequence[MoveBucket],
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard],
    *,
    link: RankLink,
    dtype: torch.dtype,
) -> None:
    """Fill this rank's parts with what the sources of those buckets that it is the target of have posted, of
    the same buckets in the same order. A few messages a source are under way at once. Raises LostPeer."""
    arriving: deque[Callable[[], None]] = deque()
    view = view_of(tensors, shards)

    def fill(bucket: MoveBucket, count: int, flat: Tensor, message: Tensor, wait: Callable[[], None]) -> None:
        wait()
        if count != WHOLE:
            decode(count, flat, message)
        unpack(bucket, flat, view)

    for messages in rounds_of([bucket for bucket in buckets if bucket.target == link.job_rank]):
        counts = [torch.empty(1, dtype=torch.int64) for _ in messages]
        announced = [link.receive(n, bucket.source) for n, bucket in zip(counts, messages, strict=True)]
        for bucket, number, wait in zip(messages, counts, announced, strict=True):
            wait()
            count = int(number)
            if count == WHOLE:
                flat = torch.empty(bucket.num_elements, dtype=dtype)
                message = flat.view(torch.uint8)
            else:
                # What was sent before is what is here: nobody else writes these parts.
                flat = pack(bucket, view, dtype=dtype).cpu()
                message = torch.empty(sum(message_sizes(count, flat)), dtype=torch.uint8)
            came = link.receive(message, bucket.source)
            arriving.append(functools.partial(fill, bucket, count, flat, message, came))
        while len(arriving) > (BUCKETS_AHEAD - 1) * len(messages):
            arriving.popleft()()
    while arriving:
        arriving.popleft()()
