"""Point-to-point messages between the stages of a pipeline: activations forward, gradients backward.

A rank posts each receive ahead of its use, waits for it when a compute step needs the message, sends without
waiting, and keeps a sent tensor until it has arrived. How tensors move is the transport's (`transport.py`).

Between stages of different tensor-parallel widths the first rank of one group sends to the first rank of the
other, which broadcasts the message inside its group: one copy over the slow link, fan-out over the fast one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from yuan_train.config.errors import LostRank
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
from yuan_train.schedule.step import RECEIVE_OF, Step, receive_of, send_of


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
        `schedule.messages.arrivals_proven` finds them."""
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
