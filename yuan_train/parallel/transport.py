"""Transports: how tensors move between the ranks of a process group. One module posts, sends, waits, reduces.

Every operation returns at once, with what is pending of it. What `wait` does depends on the library:

- gloo: it blocks the host until the operation has ended, and raises if a rank of the group is lost.
- nccl: it makes the current stream wait. The host goes on and learns of nothing; a lost rank is found by
  NCCL's watchdog. `finish` blocks the host in both.

Buffers belong to the operation until then: a pending operation keeps its tensors alive until it has been
waited for or was seen to be done. On nccl that is enough even if the host runs ahead: memory that is freed
after `wait` is used again on the same stream, after the operation.

Between cards without a common library, tensors move over gloo from pinned host memory to pinned host memory.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from yuan_train.parallel.activity import Activity, during, is_observed
from yuan_train.parallel.device import Device, Mark


@dataclass(frozen=True)
class Ranges:
    """A flat tensor [n] divided among the ranks of a group: the elements of each, in the group's order."""

    sizes: tuple[int, ...]

    @cached_property
    def each(self) -> int:
        """Elements that every rank has, if all have as many but the last one, which may have more; else 0.

        An operation for all ranks then does for the leading ones, and another for the last one's rest.
        """
        first = self.sizes[0]
        return first if set(self.sizes[:-1]) <= {first} and self.sizes[-1] >= first else 0

    def of(self, index: int) -> tuple[int, int]:
        """The range [start, end) of the rank at a position of the group."""
        start = sum(self.sizes[:index])
        return start, start + self.sizes[index]


POLL_SECONDS = 1e-3
"""Between two looks at an operation for which the host waits."""
PATIENCE = timedelta(days=30)
"""How long a rank waits for one that may be at work of its own: it draws answers, scores them, or trains.
That a rank is lost is told at once, by its connection."""


# Torch 2.13 renames both methods.
_IS_NEW = hasattr(dist.ProcessGroup, "reduce_scatter_single")
_REDUCE_SCATTER = "reduce_scatter_single" if _IS_NEW else "_reduce_scatter_base"
_ALL_GATHER = "all_gather_single" if _IS_NEW else "_allgather_base"


_OWN_FAULT = re.compile(
    r"(cuda|hip|xpu) (error|failure)|call to cuda|unhandled cuda|out of memory|allocate memory", re.IGNORECASE
)
"""In the text of an error: the card or the memory of this very rank has failed, whoever reports it."""
_LOST_CONNECTION = re.compile(
    r"gloo/transport|connection|connect |timed out|timeout|broken pipe|socket", re.IGNORECASE
)
"""In the text of gloo's errors, which have no class of their own."""


_FRAMES = re.compile(r"\s*\n(?:Exception raised from |frame #|C\+\+ CapturedTraceback)")
"""Where the frames begin in the text of an error."""


class LostPeer(RuntimeError):
    """A rank of a group died or timed out; the message names the operation and the rank."""


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says that another rank is gone or stuck, and not that this one has failed by itself.

    Out of memory, a fault of a kernel and a wrong argument are RuntimeErrors too, and surface at whatever
    call is next, which mostly is one of torch.distributed. NCCL reports a fault of the own card as its own.
    """
    if isinstance(error, LostPeer):
        return True
    if _OWN_FAULT.search(str(error)):
        return False
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _LOST_CONNECTION.search(str(error)) is not None


def without_frames(error: BaseException) -> str:
    """What an error says, without the frames of C++ that torch adds to those of its store."""
    return _FRAMES.split(str(error), maxsplit=1)[0].strip()


def _raise_lost_peer(what: str, ranks: Sequence[int], error: RuntimeError) -> None:
    """Raise a RuntimeError of an operation `what` of `ranks` as a LostPeer, if it says that one is lost."""
    if isinstance(error, LostPeer) or not dist.is_initialized() or not is_lost_connection(error):
        return
    _raise_lost(what, ranks, error)


def _raise_lost(what: str, ranks: Sequence[int], error: RuntimeError) -> NoReturn:
    others = [str(rank) for rank in ranks if rank != dist.get_rank()]
    who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(others)}"
    raise LostPeer(f"{what} failed; {who} is gone or stuck ({without_frames(error)})") from error


class blame_peers:  # noqa: N801 (reads as the context manager that it is)
    """Around a collective `what` of `ranks`, told to the observers: raise an error that says that one is lost
    as a LostPeer that names the others. Any other error stays what it is."""

    __slots__ = ("_during", "_ranks", "_what")

    def __init__(self, what: str, ranks: Sequence[int]) -> None:
        self._what, self._ranks = what, ranks
        self._during: during | None = None

    def __enter__(self) -> None:
        if is_observed():
            self._during = during(Activity("collective", what=self._what, ranks=tuple(self._ranks)))
            self._during.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            _raise_lost_peer(self._what, self._ranks, error)
        if self._during is not None:
            self._during.__exit__(kind, error, trace)


def wait_for_all(ranks: Sequence[int], what: str, group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks of a group (None: the world) have come here, with PATIENCE; collective over them.

    Goes before a collective to which some come late because they alone have worked on `what`: it would fail
    after its group's timeout. Raises LostPeer.
    """
    options = dist.AllreduceOptions()
    options.timeout = PATIENCE
    group = group or dist.group.WORLD
    assert group is not None
    with during(Activity("idle", what=what, ranks=tuple(ranks))):
        try:
            group.allreduce([torch.zeros(1)], options).wait()
        except RuntimeError as error:
            _raise_lost_peer(f"the wait for {what}", ranks, error)
            raise


class Pending:
    """Operations of torch.distributed that were started together, and the tensors that they read or write."""

    __slots__ = ("_polls", "_ranks", "_tensors", "_what", "_works")

    def __init__(
        self,
        works: Sequence[dist.Work],
        tensors: tuple[torch.Tensor, ...],
        ranks: Sequence[int],
        what: str,
        polls: bool,
    ) -> None:
        self._works, self._tensors, self._ranks = works, tensors, ranks
        self._what, self._polls = what, polls

    def wait(self) -> None:
        """Wait until the operations have ended: on gloo the host waits, on nccl the current stream.

        Raises LostPeer, on gloo, if a rank of the group is lost.
        """
        if self._works:
            with blame_peers(self._what, self._ranks):
                for work in self._works:
                    work.wait()
        self._works, self._tensors = (), ()

    def join(self, other: Pending) -> Pending:
        """Both as one."""
        self._works, self._tensors = (*self._works, *other._works), (*self._tensors, *other._tensors)
        return self

    def is_done(self) -> bool:
        """Whether the operations are known to have ended; never blocks.

        gloo tells it of collectives, but of a message only when it has been waited for.
        """
        for work in self._works:
            if not work.is_completed():
                return False
        # At no cost by now; it also raises what a failed operation has to say.
        self.wait()
        return True

    def finish(self, seconds: float) -> None:
        """Block the host until they have ended. Raises LostPeer if they have not after `seconds`."""
        if not self._polls:
            # gloo's own wait ends with the group's timeout.
            self.wait()
        end = time.monotonic() + seconds
        while not self.is_done():
            if time.monotonic() > end:
                _raise_lost(self._what, self._ranks, RuntimeError(f"no answer within {seconds:g} s"))
            time.sleep(POLL_SECONDS)


class _Message(Pending):
    """A message under way. Who sends or takes it tells the observers, and says of which micro-batch it is, so
    it does nothing more: there are many."""

    __slots__ = ()

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            _raise_lost_peer(self._what, self._ranks, error)
            raise
        self._works, self._tensors = (), ()


class PendingReceive:
    """A posted receive, here of a message that arrives where it is used."""

    __slots__ = ("_buffer", "_pending")

    def __init__(self, pending: _Message, buffer: torch.Tensor) -> None:
        self._pending, self._buffer = pending, buffer

    def take(self) -> torch.Tensor:
        """Wait as `Pending.wait` does, and return the message, on the device. To be called once."""
        self._pending.wait()
        return self._buffer

    def finish(self, seconds: float) -> None:
        """As `Pending.finish`."""
        self._pending.finish(seconds)


class Transport:
    """What the ranks of one group do together, over gloo or nccl; `ranks` and roots are ranks of the world.

    Operations of a group happen in the order in which they are started, which must be the same on its ranks.
    `what` names an operation in errors.
    """

    library: str
    """The backend of the process group."""
    open_receives_hold_up_nothing: bool
    """Whether the device goes on while a receive waits for its sender; on nccl it is a running kernel."""
    _polls: bool
    """Whether messages under way can be asked if they have arrived."""
    _coalesces: bool
    """Whether equal ranges take one reduce-scatter or all-gather instead of an operation per rank. Not on
    gloo: there a reduce-scatter sends what an all-reduce does, and an all-gather copies all its tensors."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], *, device: Device) -> None:
        self._group = group
        self._ranks = tuple(ranks)
        self._index = {rank: index for index, rank in enumerate(sorted(ranks))}
        """Of each rank, its number in the group, by which the group's own methods know it.

        Torch.distributed's functions of the same names find it, and check what they are given, each time. No
        method waits, by its default options.
        """
        self._device = device

    def post(self, shape: tuple[int, ...], dtype: torch.dtype, sender: int) -> PendingReceive:
        """Allocate a buffer and start to receive into it."""
        buffer = torch.empty(shape, dtype=dtype, device=self._device.torch)
        return PendingReceive(self._receive(buffer, sender), buffer)

    def send(self, tensor: torch.Tensor, receiver: int) -> Pending:
        """Start to send a contiguous tensor, which must not change until then."""
        work = self._group.send([tensor], self._index[receiver], 0)
        return _Message((work,), (tensor,), self._ranks, self._names[receiver][0], self._polls)

    def close(self) -> None:
        """Destroy the group; nothing may be under way."""
        # Of a group of others this rank has a placeholder, which torch leaves alone.
        dist.destroy_process_group(self._group)

    def all_reduce(self, tensor: torch.Tensor, what: str) -> Pending:
        """Start to sum a tensor over the group, in place."""
        with blame_peers(what, self._ranks):
            work = self._group.allreduce([tensor])
        return self._pending(work, (tensor,), what)

    def broadcast(self, tensor: torch.Tensor, root: int, what: str) -> Pending:
        """Start to copy a tensor from `root` to the others."""
        with blame_peers(what, self._ranks):
            work = self._group.broadcast([tensor], self._broadcast_options[self._index[root]])
        return self._pending(work, (tensor,), what)

    def reduce_ranges(self, tensor: torch.Tensor, ranges: Ranges, what: str) -> Pending:
        """Start to sum a tensor [n] over the group, each range in place on its rank; elsewhere it may be
        overwritten."""
        if not (ranges.each and self._coalesces):
            return self._each(tensor, ranges, self._reduce_options, self._group.reduce, what)
        part, equal, rest = self._equal_parts(tensor, ranges)
        with blame_peers(what, self._ranks):
            works = [getattr(self._group, _REDUCE_SCATTER)(part, equal)]
            if rest.numel():
                works.append(self._group.reduce([rest], self._reduce_options[-1]))
        return self._pending(works, (part, tensor), what)

    def gather_ranges(self, tensor: torch.Tensor, ranges: Ranges, what: str) -> Pending:
        """Start to copy each range of a tensor [n] from its rank to the others."""
        if not (ranges.each and self._coalesces):
            return self._each(tensor, ranges, self._broadcast_options, self._group.broadcast, what)
        part, equal, rest = self._equal_parts(tensor, ranges)
        with blame_peers(what, self._ranks):
            works = [getattr(self._group, _ALL_GATHER)(equal, part)]
            if rest.numel():
                works.append(self._group.broadcast([rest], self._broadcast_options[-1]))
        return self._pending(works, (tensor, part), what)

    def _equal_parts(
        self, tensor: torch.Tensor, ranges: Ranges
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a tensor [n]: this rank's part of what all have equally, all of that, and the rest."""
        each, index = ranges.each, self._index[dist.get_rank()]
        equal, rest = tensor.tensor_split([each * len(self._ranks)])
        return equal[each * index : each * (index + 1)], equal, rest

    def _each(
        self,
        tensor: torch.Tensor,
        ranges: Ranges,
        options: Sequence[Any],
        start: Callable[[list[torch.Tensor], Any], dist.Work],
        what: str,
    ) -> Pending:
        """An operation for each range that is not empty, whose rank is its root.

        There may be hundreds: so these are the group's own methods, and each has its options ready.
        """
        parts = zip(tensor.split(ranges.sizes), ranges.sizes, options, strict=True)
        with blame_peers(what, self._ranks):
            works = [start([part], option) for part, size, option in parts if size]
        return self._pending(works, (tensor,), what)

    @cached_property
    def _reduce_options(self) -> list[dist.ReduceOptions]:
        return [rooted(dist.ReduceOptions(), index) for index in range(len(self._ranks))]

    @cached_property
    def _broadcast_options(self) -> list[dist.BroadcastOptions]:
        return [rooted(dist.BroadcastOptions(), index) for index in range(len(self._ranks))]

    def _receive(self, buffer: torch.Tensor, sender: int) -> _Message:
        work = self._group.recv([buffer], self._index[sender], 0)
        return _Message((work,), (buffer,), self._ranks, self._names[sender][1], self._polls)

    @cached_property
    def _names(self) -> dict[int, tuple[str, str]]:
        """By rank, of a message to it and of one from it."""
        return {
            rank: (f"the message to rank {rank}", f"the message from rank {rank}") for rank in self._ranks
        }

    def _pending(
        self, work: dist.Work | Sequence[dist.Work] | None, tensors: tuple[torch.Tensor, ...], what: str
    ) -> Pending:
        works = () if work is None else (work,) if isinstance(work, dist.Work) else work
        return Pending(works, tensors, self._ranks, what, self._polls)


def rooted(options: Any, index: int) -> Any:
    """Options of an operation that does not block, with the rank at a position of the group as its root."""
    options.rootRank, options.asyncOp = index, True
    return options


class GlooTransport(Transport):
    """gloo, from and to host memory; for collectives gloo itself copies from and to a card."""

    library = "gloo"
    open_receives_hold_up_nothing = True
    _polls = False
    _coalesces = False

    def reduce_ranges(self, tensor: torch.Tensor, ranges: Ranges, what: str) -> Pending:
        # Two reductions of a half wait for each other's parts: an all-reduce takes 3/4 of their time.
        if len(self._ranks) == 2:
            return self.all_reduce(tensor, what)
        return super().reduce_ranges(tensor, ranges, what)


class NcclTransport(Transport):
    """nccl or rccl, from card to card."""

    library = "nccl"
    open_receives_hold_up_nothing = False
    _polls = True
    _coalesces = True


class HostStagedTransport(GlooTransport):
    """Messages between cards that share no library but gloo; its collectives are gloo's."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], *, device: Device) -> None:
        super().__init__(group, ranks, device=device)
        self._uploads: deque[tuple[Mark, torch.Tensor]] = deque()
        """Buffers from which the card copies, until it has; the mark tells."""

    def post(self, shape: tuple[int, ...], dtype: torch.dtype, sender: int) -> PendingReceive:
        buffer = self._device.host_empty(shape, dtype)
        return _PendingUpload(self._receive(buffer, sender), buffer, self)

    def send(self, tensor: torch.Tensor, receiver: int) -> Pending:
        return super().send(_host_copy(tensor, self._device), receiver)

    def upload(self, buffer: torch.Tensor) -> torch.Tensor:
        """A copy on the card, made by the current stream; the host does not wait for it."""
        while self._uploads and self._uploads[0][0].query():
            self._uploads.popleft()
        copy = self._device.upload(buffer)
        if self._device.is_card:
            self._uploads.append((self._device.mark(), buffer))
        return copy


class _PendingUpload(PendingReceive):
    """A posted receive into host memory, from which the message is copied to the card."""

    def __init__(self, pending: _Message, buffer: torch.Tensor, transport: HostStagedTransport) -> None:
        super().__init__(pending, buffer)
        self._transport = transport

    def take(self) -> torch.Tensor:
        return self._transport.upload(super().take())


def transport_of(
    group: dist.ProcessGroup, ranks: Sequence[int], *, device: Device, via_host: bool
) -> Transport:
    """The transport of a process group; `via_host`: its cards share no library but gloo."""
    return _kind_of(device, via_host=via_host)(group, ranks, device=device)


def library_of(device: Device, *, via_host: bool) -> str:
    """The backend that a process group needs for `transport_of`."""
    return _kind_of(device, via_host=via_host).library


def _kind_of(device: Device, *, via_host: bool) -> type[Transport]:
    if device.library == "nccl" and not via_host:
        return NcclTransport
    # gloo sends nothing from a card.
    return HostStagedTransport if via_host or device.is_card else GlooTransport


def _host_copy(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    """A copy in host memory, complete on return, because gloo reads it at once."""
    return device.host_empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)
