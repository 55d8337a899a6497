"""Runs a schedule on devices, and carries its messages.

The other interpreter is `planner/evaluate/simulator.py`, in virtual time.

Messages are point to point between the stages of a pipeline: activations forward, gradients backward. A rank
posts each receive ahead of its use, waits for it when a compute step needs the message, sends without
waiting, and keeps a sent tensor until it has arrived. How tensors move is the transport's (`transport.py`).

Between stages of different tensor-parallel widths the first rank of one group sends to the first rank of the
other, which broadcasts the message inside its group: one copy over the slow link, fan-out over the fast one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from yuan_kernels import ops

from yuan_train.config.devices import REAL, Simulated
from yuan_train.config.errors import LostRank
from yuan_train.parallel.activity import Activity, during
from yuan_train.parallel.device import Device, Mark
from yuan_train.parallel.gradients import blocks_of
from yuan_train.parallel.grid import Edge, Grid, RankCoord
from yuan_train.parallel.groups import Groups
from yuan_train.parallel.transport import (
    Pending,
    PendingReceive,
    Transport,
    is_lost_connection,
    without_frames,
)
from yuan_train.schedule.step import RECEIVE_OF, SEND_OF, Kind, RankProgram, Step, receive_of, send_of


class StageWork(Protocol):
    """The compute of one stage on one micro-batch: all that the executor knows of the model."""

    def load(self, micro_batch: int) -> None:
        """Read what the forward of a micro-batch needs besides the message; the host's work, not compute."""
        ...

    def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
        """The hidden state for the next stage [B, S, H], or on the last stage the loss (a scalar).

        `hidden_BSH` comes from the previous stage; None on the first stage.
        """
        ...

    def splitting(self, micro_batch: int, split: bool) -> AbstractContextManager[object]:
        """Around a backward: if `split`, its weight gradients are deferred until `backward_weight`."""
        ...

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the weight gradients that a split backward deferred."""
        ...


@runtime_checkable
class GroupWork(Protocol):
    """A stage that takes several micro-batches together, when the last of them has arrived."""

    def hold(self, kind: Kind, micro_batch: int, tensor: torch.Tensor | None, *, training: bool) -> bool:
        """Keep what the forward or backward of a member takes: its message; None at the model's ends.

        Returns whether it is the last of its group."""
        ...

    def run_group(self, kind: Kind, micro_batch: int, *, training: bool) -> dict[int, torch.Tensor | None]:
        """Run the group that a micro-batch ends; by member, what `StageWork.forward` returns, or the gradient
        of what it takes (None on the first stage)."""
        ...


WARM_UP_PIECES = 16
"""Pieces of a kind of work after which a simulated card takes as long for each as their median says."""


class Stopwatch:
    """Measures the seconds that a device spends on compute.

    A simulated card sleeps after each piece of work, until this has lasted `slowdown` times the processor
    time that it used. Other work on the machine changes that time, in caches and in what two threads of a
    core share. So once WARM_UP_PIECES of a kind are done, each that follows lasts `slowdown` times their
    median; or, from the first on, as long as the card's type says of any piece. One whose work alone takes
    longer lasts as long as that, and is told of by `tell_overruns`.
    """

    def __init__(self, device: Device, *, simulated: Simulated = REAL) -> None:
        self._device, self._simulated = device, simulated
        self._paces = _Paces(simulated)
        self._kind: tuple[Hashable, ...] = ()
        """Of the piece of work that is running; empty: of no kind, so that it has no pace."""
        self._lasted = self._used = 0.0
        """Wall and processor seconds of the piece of work that is running, before it was resumed."""
        self._seconds = 0.0
        self._since: tuple[float, float] | None = None
        """Wall and processor seconds at the start of the piece of work that is running, or resumed."""
        self._pieces: list[tuple[Mark, Mark]] = []
        self._begun: Mark | None = None
        """Where a piece of work that is running on a card began, or was resumed."""

    def running(self, *kind: Hashable) -> AbstractContextManager[None]:
        """Around a piece of work: count its seconds. Pieces do not nest; one that raises is not counted.

        `kind`: what pieces of as much work have in common. Those without are as long as each of them is.
        """
        self._kind = kind
        # Nothing is made, for there are two with each micro-batch.
        return self

    def is_of(self, *kind: Hashable) -> None:
        """Inside a piece of work that has a kind: what else tells it from others of that."""
        self._kind += kind

    def __enter__(self) -> None:
        if self._device.is_card:
            self._begun = self._device.mark(timed=True)
        else:
            self._lasted = self._used = 0.0
            self._since = self._now()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            return
        if self._begun is not None:
            self._cut(self._begun)
            self._begun = None
        else:
            self._count(ends=True)
            self._since = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around a wait inside a piece of work: its seconds are not counted."""
        if self._begun is not None:
            # The stream stands between the two marks, whatever the host does.
            self._cut(self._begun)
            yield
            self._begun = self._device.mark(timed=True)
        elif self._since is not None:
            self._count()
            yield
            self._since = self._now()
        else:
            yield

    def _cut(self, begun: Mark) -> None:
        self._pieces.append((begun, self._device.mark(timed=True)))

    def catch_up(self) -> None:
        """Inside a piece of work of a simulated card: wait until a card of its speed would have come so far.
        Without this, what the work starts half-way would start too early."""
        if self._simulated.is_simulated and self._since is not None:
            self._count()
            self._since = self._now()

    def _now(self) -> tuple[float, float]:
        """Wall seconds, and the thread's processor seconds if a simulated card needs them: a system call."""
        return time.perf_counter(), time.thread_time() if self._simulated.is_simulated else 0.0

    def _count(self, *, ends: bool = False) -> None:
        """`ends`: with the piece of work, which else goes on."""
        assert self._since is not None
        start, start_processor = self._since
        if self._simulated.is_simulated:
            self._used += time.thread_time() - start_processor
            lasted = self._lasted + time.perf_counter() - start
            due = self._paces.seconds(self._kind, self._used, lasted=lasted if ends else None)
            time.sleep(max(0.0, due - lasted))
        seconds = time.perf_counter() - start
        self._lasted += seconds
        self._seconds += seconds

    def tell_overruns(self) -> None:
        """Say, at the end of a run, which part of the work took longer than its pace since the last call."""
        if (said := self._paces.overruns()) is not None:
            print(f"note: {said}", file=sys.stderr)

    def read(self) -> float:
        """Seconds counted since the last call; waits for the device."""
        if self._pieces:
            self._pieces[-1][1].finish()
            self._seconds += sum(end.seconds_since(start) for start, end in self._pieces)
            self._pieces.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _Paces:
    """How long a simulated card takes for the pieces of its work, by kind."""

    def __init__(self, simulated: Simulated) -> None:
        self._simulated = simulated
        self._warm_up: dict[tuple[Hashable, ...], list[float]] = {}
        """Processor seconds of each kind's first pieces."""
        self._frozen: dict[tuple[Hashable, ...], float] = {}
        self._paced = self._over = 0
        """Pieces since overruns were told of that had a pace, and those that took longer."""
        self._over_seconds = self._most_over = 0.0
        """By which they did, in all and at most."""

    def seconds(self, kind: tuple[Hashable, ...], used: float, *, lasted: float | None) -> float:
        """That a piece of work, of so many processor seconds, is to last; of one that goes on, so far.

        `lasted`: its wall seconds, if it ends; None: it goes on.
        """
        slowed = self._simulated.slowdown * used
        pace = self._simulated.piece_seconds or self._frozen.get(kind)
        if lasted is None:
            return slowed if pace is None else min(slowed, pace)
        if pace is not None:
            self._paced += 1
            if lasted > pace:
                self._over += 1
                self._over_seconds += lasted - pace
                self._most_over = max(self._most_over, lasted - pace)
            return pace
        if kind:
            first = self._warm_up.setdefault(kind, [])
            first.append(used)
            if len(first) == WARM_UP_PIECES:
                self._frozen[kind] = self._simulated.slowdown * statistics.median(self._warm_up.pop(kind))
        return slowed

    def overruns(self) -> str | None:
        """What is to be said of them since the last call; None if there are none."""
        said = None
        if self._over:
            said = (
                f"of {self._paced:,} pieces of this simulated card's work {self._over:,} took longer than "
                f"its pace, by {self._over_seconds:.3f} s in all and {self._most_over:.3f} s at most; a "
                "slower one would keep its pace"
            )
        self._paced, self._over, self._over_seconds, self._most_over = 0, 0, 0.0, 0.0
        return said


@dataclass(frozen=True, slots=True)
class _Task:
    """A step of a rank program, with all that depends on the program alone: it runs again in every batch."""

    step: Step
    activity: Activity
    arrival: Step | None = None
    """Of a forward or backward: the receive of what it takes."""
    loading: Activity | None = None
    """Of a forward."""
    waiting: Activity | None = None
    """If what it takes is a message; else it is the result of another stage of this worker, or nothing."""
    departure: Step | None = None
    """What takes its result: a send or, for another stage of this worker, the receive of a message."""


class Executor:
    """Runs the rank program of one worker.

    Only outputs are kept, by stage and micro-batch, from a forward to its backward; so memory follows the
    in-flight depth of the schedule and not the number of micro-batches.
    """

    def __init__(self, works: Mapping[int, StageWork], bridge: Bridge | None, stopwatch: Stopwatch) -> None:
        self._works = works
        self._in_groups = {stage: work for stage, work in works.items() if isinstance(work, GroupWork)}
        self._bridge, self._stopwatch = bridge, stopwatch
        self._tasks: dict[int, tuple[RankProgram, tuple[_Task, ...]]] = {}
        """Of the programs so far, by identity."""
        self._kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._results: dict[Step, torch.Tensor] = {}
        """Results by the step that would take them: a send, or, for another stage of this worker, the receive
        that a message would need."""

    def run(
        self,
        program: RankProgram,
        *,
        before_step: Callable[[Step], None] | None = None,
        after_step: Callable[[Step], None] | None = None,
    ) -> None:
        """Run every step of a rank program, and call `before_step` and `after_step` around each; gradients
        accumulate.

        A program without backwards (evaluation) keeps no outputs. Raises TrainingError or LostPeer if a peer
        is lost.
        """
        for step in self.steps(program, after_step):
            if before_step is not None:
                before_step(step)

    def steps(self, program: RankProgram, after_step: Callable[[Step], None] | None = None) -> Iterator[Step]:
        """As `run`, but yield every step just before running it."""
        training = any(step.kind in ("backward", "backward_input") for step in program)
        if id(program) not in self._tasks:
            all_steps = frozenset(program)
            self._tasks[id(program)] = program, tuple(_task(step, all_steps) for step in program)
        for task in self._tasks[id(program)][1]:
            yield task.step
            self._run(task, training=training)
            if after_step is not None:
                after_step(task.step)
        if self._bridge is not None:
            with during(Activity("drain")):
                self._bridge.drain()
        assert not self._kept and not self._results

    @ops.variable_held()
    def _run(self, task: _Task, *, training: bool) -> None:
        step = task.step
        if self._in_groups and step.stage in self._in_groups and step.is_compute:
            self._member(task, self._in_groups[step.stage], training=training)
        elif step.kind == "forward":
            self._forward(task, training=training)
        elif step.kind in ("backward", "backward_input"):
            self._backward(task)
        elif step.kind == "backward_weight":
            with during(task.activity), self._stopwatch.running(step.kind, step.stage):
                self._works[step.stage].backward_weight(step.micro_batch)
        elif step.kind in ("receive_activation", "receive_gradient"):
            with during(task.activity):
                self._need_bridge().post(step)
        else:
            with during(task.activity):
                self._need_bridge().send(step, self._results.pop(step))

    def _forward(self, task: _Task, *, training: bool) -> None:
        kind, stage, micro_batch, _ = task.step
        assert task.loading is not None and task.departure is not None
        # Before the wait for the message, which a copy to the card would else stand behind.
        with during(task.loading):
            self._works[stage].load(micro_batch)
        hidden_BSH = self._take_input(task)
        if hidden_BSH is not None and training:
            hidden_BSH.requires_grad_()
        running = self._stopwatch.running(kind, stage, training)
        with _grad_enabled(training), during(task.activity), running:
            output = self._works[stage].forward(micro_batch, hidden_BSH)
        if training:
            self._kept[stage, micro_batch] = (hidden_BSH, output)
        if output.dim() > 0:
            self._put_result(task.departure, output)

    def _member(self, task: _Task, work: GroupWork, *, training: bool) -> None:
        """A forward or backward of a member of a group: what it takes is kept; the last one runs them all."""
        kind, stage, micro_batch, _ = task.step
        assert task.departure is not None
        if task.loading is not None:
            with during(task.loading):
                self._works[stage].load(micro_batch)
        if not work.hold(kind, micro_batch, self._take_input(task), training=training):
            return
        with during(task.activity), self._stopwatch.running(kind, stage, training):
            results = work.run_group(kind, micro_batch, training=training)
            self._stopwatch.is_of(len(results))
        for member, result in results.items():
            if result is not None and result.dim() > 0:
                self._put_result(task.departure._replace(micro_batch=member), result)

    def _backward(self, task: _Task) -> None:
        kind, stage, micro_batch, _ = task.step
        assert task.departure is not None
        gradient_BSH = self._take_input(task)
        hidden_BSH, output = self._kept.pop((stage, micro_batch))
        splitting = self._works[stage].splitting(micro_batch, kind == "backward_input")
        with during(task.activity), self._stopwatch.running(kind, stage), splitting:
            torch.autograd.backward(output, gradient_BSH)
        if hidden_BSH is not None:
            assert hidden_BSH.grad is not None
            self._put_result(task.departure, hidden_BSH.grad)

    def _take_input(self, task: _Task) -> torch.Tensor | None:
        """The message, or the result of another stage of this worker; None at the model's ends."""
        assert task.arrival is not None
        if task.waiting is None:
            return self._results.pop(task.arrival, None)
        with during(task.waiting):
            return self._need_bridge().take(task.arrival)

    def _put_result(self, departure: Step, tensor: torch.Tensor) -> None:
        self._results[departure] = tensor if departure.kind in RECEIVE_OF else tensor.detach()

    def _need_bridge(self) -> Bridge:
        assert self._bridge is not None, "a rank program with messages needs a bridge"
        return self._bridge


def _grad_enabled(wanted: bool) -> AbstractContextManager[object]:
    """As `torch.set_grad_enabled`, which takes microseconds also where it changes nothing."""
    return _UNCHANGED if torch.is_grad_enabled() == wanted else torch.set_grad_enabled(wanted)


_UNCHANGED = nullcontext()


def _task(step: Step, program: frozenset[Step]) -> _Task:
    """The task of one step of a rank program."""
    kind, stage, micro_batch, _ = step
    if kind in RECEIVE_OF:
        return _Task(step, Activity("send", step))
    if kind in SEND_OF:
        return _Task(step, Activity("post", step))
    if kind == "backward_weight":
        return _Task(step, Activity("compute", step))
    is_forward = kind == "forward"
    arrival = Step("receive_activation" if is_forward else "receive_gradient", stage, micro_batch)
    departure = Step("send_activation" if is_forward else "send_gradient", stage, micro_batch)
    return _Task(
        step,
        Activity("compute", step),
        arrival=arrival,
        loading=Activity("load", step) if is_forward else None,
        waiting=Activity("wait", arrival) if arrival in program else None,
        departure=departure if departure in program else receive_of(departure),
    )


# --- messages -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boundary:
    """The shape, dtype and device of a message: the hidden state [B, S, H] of one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Route(NamedTuple):
    """The way of a message. Found once: to hash an edge takes longer than all else that a step looks up."""

    edge: Edge
    transport: Transport
    under_way: deque[tuple[Step, Pending]]
    """The messages of the edge that this rank has sent, and that may not have arrived."""


class Bridge:
    """Sends and receives the messages of one rank.

    A receive buffer lives from its posting to its use. A sent tensor is let go when it is known to have
    arrived: a message that its receiver sent later proves it (`proofs`), or the transport says so when asked,
    at every send and take. At the latest it goes when `window` later messages of its edge are under way.
    """

    def __init__(
        self,
        grid: Grid,
        coord: RankCoord,
        groups: Groups,
        boundary: Boundary,
        *,
        proofs: Mapping[Step, tuple[Step, ...]],
        window: int,
    ) -> None:
        """`proofs`: the sends that have arrived when a message is taken, as
        `schedule.schedules.arrivals_proven` finds them."""
        self._grid, self._coord, self._groups = grid, coord, groups
        self._boundary, self._proofs, self._window = boundary, proofs, window
        self._is_leader = coord.tensor_rank == 0
        self._leader = grid.replica(coord)[0]
        """The rank of this rank's tensor-parallel group that sends and receives."""
        self._routes: dict[Step, _Route] = {}
        """Those of the sends and receives so far, which every training step repeats."""
        self._broadcast_names: dict[Step, str] = {}
        self._received: dict[Step, PendingReceive] = {}
        self._received_sums: dict[Step, PendingReceive] = {}
        self.checks = False
        """Whether a checksum follows each message, and what comes is compared with it; the same on all ranks,
        and to be changed while nothing is under way."""
        self.faults: list[str] = []
        """What was found of messages, until someone takes it."""
        self._sent: dict[Edge, deque[tuple[Step, Pending]]] = {}

    def holds_up_nothing(self, receive: Step) -> bool:
        """Whether this rank's device goes on while a posted receive waits for its sender."""
        transport = self._groups.edges.get(self._edge(receive))
        return transport is not None and transport.open_receives_hold_up_nothing

    @property
    def boundary(self) -> Boundary:
        """What its messages are now."""
        return self._boundary

    def resize(self, shape: tuple[int, ...]) -> None:
        """From the next lane on messages have this shape; nothing may be under way."""
        assert not self._received and not any(self._sent.values())
        self._boundary = replace(self._boundary, shape=shape)

    def post(self, step: Step) -> None:
        """Allocate the buffer of a message and start to receive it; does not wait."""
        if self._is_leader:
            route, boundary = self._route(step), self._boundary
            try:
                self._received[step] = route.transport.post(boundary.shape, boundary.dtype, route.edge.sender)
                if self.checks:
                    self._received_sums[step] = route.transport.post((2,), torch.int64, route.edge.sender)
            except RuntimeError as error:
                self._blame_peer(step, error)
                raise

    def take(self, step: Step) -> torch.Tensor:
        """Wait for the message of a posted receive, and return it [B, S, H].

        In a tensor-parallel group the first rank broadcasts it to the others; collective over the group.
        Raises LostRank if the sender is lost, LostPeer if a rank of the group is.
        """
        buffer = self._take(self._received, step, self._boundary.shape, self._boundary.dtype)
        if self.checks:
            self._compare(step, buffer)
        if self._is_leader:
            for proven in self._proofs.get(step, ()):
                self._retire(proven)
            self._let_go()
        return buffer

    def _take(
        self, posted: dict[Step, PendingReceive], step: Step, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Wait for a posted receive of this shape; what came, on all ranks of the tensor-parallel group."""
        if self._is_leader:
            try:
                buffer = posted.pop(step).take()
            except RuntimeError as error:
                self._blame_peer(step, error)
                raise
        else:
            buffer = torch.empty(shape, dtype=dtype, device=self._boundary.device)
        if self._groups.replica is not None:
            if (what := self._broadcast_names.get(step)) is None:
                what = self._broadcast_names[step] = f"the broadcast after the {step}"
            self._groups.replica.broadcast(buffer, self._leader, what).wait()
        return buffer

    def send(self, step: Step, tensor: torch.Tensor) -> None:
        """Start to send a tensor [B, S, H]; waits only if `window` older messages of the edge are under way.

        Only the first rank of a tensor-parallel group sends. Raises LostRank if the receiver is lost.
        """
        if not self._is_leader:
            return
        self._let_go()
        edge, transport, under_way = self._route(step)
        while len(under_way) >= self._window:
            self._wait(*under_way.popleft())
        message = tensor.detach().contiguous() if tensor.requires_grad else tensor.contiguous()
        try:
            pending = transport.send(message, edge.receiver)
            if self.checks:
                pending = pending.join(transport.send(checksum(message), edge.receiver))
            under_way.append((step, pending))
        except RuntimeError as error:
            self._blame_peer(step, error)
            raise

    def _compare(self, step: Step, message: torch.Tensor) -> None:
        """Note it if a message has another checksum than its sender gave it; in a tensor-parallel group every
        rank compares what the broadcast gave it."""
        sums = self._take(self._received_sums, step, (2,), torch.int64)
        if not torch.equal(checksum(message), sums):
            peer = self._grid.peer(self._coord, self._peer_stage(step), step.micro_batch)
            self.faults.append(
                f"{self._grid.label(self._coord)}: the message of its {step} has other bits than "
                f"rank {peer} sent"
            )

    def drain(self) -> None:
        """Wait until every send has completed, and free the buffers.

        Raises LostRank if a receiver is lost.
        """
        for under_way in self._sent.values():
            while under_way:
                self._wait(*under_way.popleft())

    def _let_go(self) -> None:
        """Let go what the transports know to have arrived; does not wait."""
        for under_way in self._sent.values():
            while under_way:
                step, pending = under_way[0]
                try:
                    if not pending.is_done():
                        break
                except RuntimeError as error:
                    self._blame_peer(step, error)
                    raise
                under_way.popleft()

    def _retire(self, proven: Step) -> None:
        """Let go a send that has arrived, and those before it on its edge."""
        under_way = self._route(proven).under_way
        if not under_way or (under_way[0][0] != proven and all(step != proven for step, _ in under_way)):
            return
        last = None
        while last != proven:
            # Waits for nothing: the operation is over when the message that proves it is there.
            last, pending = under_way.popleft()
            self._wait(last, pending)

    def _route(self, step: Step) -> _Route:
        """Of a send or a receive of this rank."""
        route = self._routes.get(step)
        if route is None:
            edge = self._edge(step)
            under_way = self._sent.setdefault(edge, deque()) if step.kind in RECEIVE_OF else deque()
            route = self._routes[step] = _Route(edge, self._groups.edges[edge], under_way)
        return route

    def _edge(self, step: Step) -> Edge:
        """The edge of a send or a receive of this rank."""
        peer_stage = self._peer_stage(step)
        peer = self._grid.peer(self._coord, peer_stage, step.micro_batch)
        own = self._leader
        is_activation = step.kind.endswith("activation")
        if step.kind in RECEIVE_OF:
            return Edge(self._coord.pipeline, step.stage, is_activation, own, peer)
        return Edge(self._coord.pipeline, peer_stage, is_activation, peer, own)

    @staticmethod
    def _peer_stage(step: Step) -> int:
        return (receive_of(step) if step.kind in RECEIVE_OF else send_of(step)).stage

    def _wait(self, step: Step, pending: Pending) -> None:
        """Wait for a send. Raises LostRank, naming the peer, if that is lost."""
        try:
            pending.wait()
        except RuntimeError as error:
            self._blame_peer(step, error)
            raise

    def _blame_peer(self, step: Step, error: RuntimeError) -> None:
        """Raise LostRank if an error says so: a lost peer may show when a message is posted or awaited."""
        if not is_lost_connection(error):
            return
        peer = self._grid.peer(self._coord, self._peer_stage(step), step.micro_batch)
        reason = without_frames(error.__cause__ or error)
        raise LostRank(
            f"{self._coord}: the {step} failed; rank {peer} is gone or stuck ({reason})"
        ) from error


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, the integers that its bits are."""


def checksum(weights: torch.Tensor) -> torch.Tensor:
    """Sum and sum of squares, modulo 2^64, of the bits of weights as integers: int64 [2], on their device.

    Whatever their order; it takes a block at a time.
    """
    flat = weights.detach().reshape(-1)
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for block in blocks_of(flat.view(_BITS[flat.element_size()])):
        wide = block.long()
        total += torch.stack([wide.sum(), (wide * wide).sum()])
    return total


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a shape and a dtype have the same bits."""
    bits = _BITS[one.element_size()]
    return torch.equal(one.detach().contiguous().view(bits), other.detach().contiguous().view(bits))
