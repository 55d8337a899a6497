"""Cards without cards: ranks in one process whose operations run on virtual CUDA streams.

The hosts of all ranks run the real `Bridge` and `Executor` over `FakeTransport`s and never block, as on CUDA:
every operation is logged in the order in which its host enqueues it. `find_deadlock` then runs the logs on
virtual devices:

- a compute stream, and one stream per communicator; an operation of a communicator follows the compute that
  was enqueued before it, and a `wait` makes the compute stream wait for an operation;
- the streams share a number of hardware queues, each of which runs one operation at a time, in order; a
  message or a reduction occupies its queue until it has started on all its ranks and so ends;
- with `synchronise`, the host waits before all that it computes, posts, sends or reduces for all that it has
  enqueued before, as it may when memory is freed or a kernel is loaded;
- messages via host are gloo's: they occupy no queue, and the host waits for them.

Tensors are real. A host takes a step when the values that it needs exist, whatever the devices do; what
a host enqueues does not depend on that. Reductions are summed when all hosts have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from yuan_train.schedule.step import Step


@dataclass(eq=False)
class Op:
    """What a host enqueues, or an operation for which it waits."""

    kind: Literal["compute", "transfer", "wait", "host wait"]
    label: str
    rank: int
    stream: int = 0
    """0 is the compute stream; -1 is none: the operation is gloo's."""
    needs: tuple[Op, ...] = ()
    """Operations of this rank that must have ended before it starts."""
    partners: list[Op] = field(default_factory=list["Op"])
    """All ends of a transfer, itself included; it ends when `num_ranks` have started."""
    num_ranks: int = 1

    def __str__(self) -> str:
        return f"{self.label} on rank {self.rank}"


@dataclass
class _Wire:
    """The operations of one group, in the order in which each rank starts them."""

    ops: list[list[Op]] = field(default_factory=list[list[Op]])
    """By number of the operation, its ends."""
    started: dict[int, int] = field(default_factory=dict[int, int])
    """By rank, how many operations it has started."""
    tensors: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """Values of messages, by number."""
    posted: int = 0
    sums: dict[int, list[torch.Tensor]] = field(default_factory=dict[int, list[torch.Tensor]])


class World:
    """All ranks: what their hosts have enqueued, and the groups between them."""

    def __init__(self, num_ranks: int, *, polls: bool = False) -> None:
        """With `polls` a message counts as done when its receive has been posted; else the hosts are so far
        ahead of the devices that nothing is ever seen to be done."""
        self.logs: list[list[Op]] = [[] for _ in range(num_ranks)]
        self.faults: list[str] = []
        self.polls = polls
        self._wires: dict[object, _Wire] = {}
        self._streams: list[dict[object, int]] = [{} for _ in range(num_ranks)]

    def transport(
        self, key: object, rank: int, ranks: Sequence[int], *, via_host: bool = False
    ) -> FakeTransport:
        """The end on `rank` of the group named `key`."""
        streams = self._streams[rank]
        stream = -1 if via_host else streams.setdefault(key, 1 + len(streams))
        wire = self._wires.setdefault(key, _Wire())
        return FakeTransport(self, wire, rank, tuple(ranks), stream)

    def compute(self, rank: int, label: str) -> None:
        """Enqueue a compute step."""
        self.logs[rank].append(Op("compute", label, rank))

    def latest_compute(self, rank: int) -> tuple[Op, ...]:
        """The last operation of the compute stream, which an event would name."""
        found = (op for op in reversed(self.logs[rank]) if op.stream == 0 and op.kind != "host wait")
        return tuple(op for op, _ in zip(found, range(1), strict=False))

    def sum_reductions(self) -> None:
        """Give every rank the sums, when all hosts have ended."""
        for wire in self._wires.values():
            for tensors in wire.sums.values():
                total = torch.stack(tensors).sum(0)
                for tensor in tensors:
                    tensor.copy_(total)


class FakeTransport:
    """A transport of one rank; see `yuan_train.parallel.transport.Transport`."""

    def __init__(self, world: World, wire: _Wire, rank: int, ranks: tuple[int, ...], stream: int) -> None:
        self.world, self.wire, self.rank, self.ranks, self.stream = world, wire, rank, ranks, stream

    def post(self, shape: tuple[int, ...], dtype: torch.dtype, sender: int) -> FakeReceive:
        self.wire.posted += 1
        return FakeReceive(self, *self._start(f"the receive from rank {sender}"))

    def send(self, tensor: torch.Tensor, receiver: int) -> FakePending:
        if self.stream < 0:
            # The copy to the host must be complete before gloo reads it.
            self._host_wait(*self.world.latest_compute(self.rank))
        op, number = self._start(f"the send to rank {receiver}")
        # A copy: what the sender does with its buffer after the send has ended is its own affair.
        self.wire.tensors[number] = tensor.clone()
        return FakePending(self, op, number, tensor)

    def all_reduce(self, tensor: torch.Tensor, what: str) -> FakePending:
        op, number = self._start(what)
        self.wire.sums.setdefault(number, []).append(tensor)
        return FakePending(self, op, number, tensor)

    def _start(self, label: str) -> tuple[Op, int]:
        number = self.wire.started.get(self.rank, 0)
        self.wire.started[self.rank] = number + 1
        if len(self.wire.ops) == number:
            self.wire.ops.append([])
        needs = () if self.stream < 0 else self.world.latest_compute(self.rank)
        label = f"{label} (number {number} of this direction)"
        op = Op("transfer", label, self.rank, self.stream, needs, self.wire.ops[number], len(self.ranks))
        op.partners.append(op)
        self.world.logs[self.rank].append(op)
        return op, number

    def wait_for(self, op: Op) -> None:
        """What `Pending.wait` does."""
        if self.stream < 0:
            self._host_wait(op)
        else:
            self.world.logs[self.rank].append(Op("wait", f"the wait for {op.label}", self.rank, 0, (op,)))

    def _host_wait(self, *ops: Op) -> None:
        self.world.logs[self.rank].append(Op("host wait", "the host's wait", self.rank, 0, ops))


class FakePending:
    """An operation under way; to drop it before it has been waited for is a fault."""

    def __init__(self, transport: FakeTransport, op: Op, number: int, tensor: torch.Tensor) -> None:
        self.transport, self.op, self.number, self.tensor = transport, op, number, tensor
        self.ended = False

    def wait(self) -> None:
        self.transport.wait_for(self.op)
        self.ended = True

    def is_done(self) -> bool:
        if self.transport.world.polls and self.number < self.transport.wire.posted:
            self.ended = True
        return self.ended

    def __del__(self) -> None:
        if not self.ended:
            self.transport.world.faults.append(f"{self.op} was dropped while under way")


class FakeReceive:
    """A posted receive."""

    def __init__(self, transport: FakeTransport, op: Op, number: int) -> None:
        self.transport, self.op, self.number = transport, op, number

    @property
    def is_sent(self) -> bool:
        """Whether the value exists."""
        return self.number in self.transport.wire.tensors

    def take(self) -> torch.Tensor:
        self.transport.wait_for(self.op)
        return self.transport.wire.tensors.pop(self.number)


def run_hosts(programs: Mapping[int, Iterator[Step]], is_ready: Mapping[int, object]) -> None:
    """Run the hosts in turns, each as far as the values that it needs exist.

    `programs` yield a step just before taking it, and `is_ready`, by rank, says of a step whether its values
    exist.
    """
    pending = {rank: next(program, None) for rank, program in programs.items()}
    while any(step is not None for step in pending.values()):
        advanced = False
        for rank, program in programs.items():
            while (step := pending[rank]) is not None and is_ready[rank](step):  # pyright: ignore
                pending[rank] = next(program, None)
                advanced = True
        assert advanced, f"no host can go on: {pending}"


# --- the virtual devices ---------------------------------------------------------------------------------


def find_deadlock(world: World, *, num_queues: int, synchronise: bool = False) -> str | None:
    """Run the logs on devices with so many hardware queues each; the cycle of waits, or None if all ends."""
    machine = _Machine(world.logs, num_queues, synchronise)
    machine.run()
    return machine.cycle()


class _Machine:
    def __init__(self, logs: Sequence[Sequence[Op]], num_queues: int, synchronise: bool) -> None:
        self._logs, self._num_queues, self._synchronise = logs, num_queues, synchronise
        self._enqueued = [0] * len(logs)
        self._open: list[dict[Op, None]] = [{} for _ in logs]
        """By rank, what its host has enqueued and has not ended, in order."""
        self._queues = [[list[Op]() for _ in range(num_queues)] for _ in logs]
        self._started: set[Op] = set()
        self._ended: set[Op] = set()

    def run(self) -> None:
        """Until nothing can go on."""
        advanced = True
        while advanced:
            advanced = False
            for rank in range(len(self._logs)):
                advanced |= self._enqueue(rank)
                for queue in self._queues[rank]:
                    while queue and self._start(queue[0]):
                        queue.pop(0)
                        advanced = True

    def cycle(self) -> str | None:
        """The cycle of waits in which the run is stuck."""
        path = [op for log in self._logs for op in log if op not in self._ended][:1]
        if not path:
            return None
        while (awaited := self._waits_for(path[-1])) not in path:
            path.append(awaited)
        cycle = path[path.index(awaited) :]
        return "; ".join(f"{op} waits for {self._waits_for(op)}" for op in cycle)

    def _host_blocks_on(self, rank: int) -> Op | None:
        """What the host waits for before it enqueues its next operation."""
        op = self._logs[rank][self._enqueued[rank]]
        if op.kind == "host wait":
            return next((need for need in op.needs if need not in self._ended), None)
        if op.kind in ("compute", "transfer") and self._synchronise:
            return next(iter(self._open[rank]), None)
        return None

    def _enqueue(self, rank: int) -> bool:
        log, before = self._logs[rank], self._enqueued[rank]
        while self._enqueued[rank] < len(log) and self._host_blocks_on(rank) is None:
            op = log[self._enqueued[rank]]
            self._enqueued[rank] += 1
            if op.kind == "host wait":
                self._ended.add(op)
                continue
            self._open[rank][op] = None
            if op.stream < 0:
                self._start(op)
            else:
                self._queues[rank][op.stream % self._num_queues].append(op)
        return self._enqueued[rank] > before

    def _start(self, op: Op) -> bool:
        """Start an operation at the head of its queue if it can; whether it has ended."""
        if op not in self._ended and all(need in self._ended for need in op.needs):
            self._started.add(op)
            ends = [end for end in op.partners or [op] if end in self._started]
            if len(ends) == op.num_ranks:
                for end in ends:
                    self._ended.add(end)
                    self._open[end.rank].pop(end, None)
        return op in self._ended

    def _waits_for(self, op: Op) -> Op:
        """One operation without which this one cannot end."""
        log = self._logs[op.rank]
        position = log.index(op)
        if position >= self._enqueued[op.rank]:
            blocking = self._host_blocks_on(op.rank)
            host = log[self._enqueued[op.rank]]
            assert blocking is not None
            return blocking if host is op else host
        need = next((need for need in op.needs if need not in self._ended), None)
        if need is not None:
            return need
        if op not in self._started:
            return self._queues[op.rank][op.stream % self._num_queues][0]
        missing = [end for end in op.partners if end not in self._started]
        assert missing, f"{op} is never started on its other ranks"
        return missing[0]
