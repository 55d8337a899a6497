"""Point-to-point messages between the stages of a pipeline: activations forward, gradients backward.

A rank posts each receive ahead of its use (`irecv`), waits for it when a compute step needs the message,
sends without blocking (`isend`), and keeps a send buffer until a later message proves that it has arrived.

Between stages of different tensor-parallel widths the first rank of one group sends to the first rank of the
other, which broadcasts the message inside its group: one copy over the slow link, fan-out over the fast one.
Between cards without a common backend (`backend` of a device type) the message goes via host: over gloo, from
host memory to host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from yuan_train.config.errors import TrainingError
from yuan_train.parallel.grid import Edge, Grid, RankCoord
from yuan_train.parallel.groups import Groups, blame_peers
from yuan_train.schedule.step import Kind, Step

_OFFSETS: dict[Kind, int] = {
    "send_activation": 1,
    "receive_activation": -1,
    "send_gradient": -1,
    "receive_gradient": 1,
}


@dataclass(frozen=True)
class Boundary:
    """The shape, dtype and device of a message: the hidden state [B, S, H] of one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Bridge:
    """Sends and receives the messages of one rank.

    A receive buffer lives from its posting to its use. A sent activation is freed when its gradient arrives,
    which proves that the activation has. A sent gradient is freed at the latest when `window` later messages
    of its edge are under way: by then, the schedule's in-flight depth has made its receiver take it.
    """

    def __init__(
        self, grid: Grid, coord: RankCoord, groups: Groups, boundary: Boundary, *, window: int
    ) -> None:
        self._grid = grid
        self._coord = coord
        self._groups = groups
        self._boundary = boundary
        self._window = window
        self._is_leader = coord.tensor_rank == 0
        self._received: dict[Step, tuple[dist.Work | None, torch.Tensor]] = {}
        self._sent: dict[Edge, deque[tuple[Step, dist.Work, torch.Tensor]]] = {}

    def post(self, step: Step) -> None:
        """Allocate the buffer of a message and start to receive it; does not wait."""
        boundary, edge = self._boundary, self._edge(step)
        if self._is_leader and self._is_via_host(edge):
            buffer = _host_buffer(boundary.shape, boundary.dtype, card=boundary.device)
        else:
            buffer = torch.empty(boundary.shape, dtype=boundary.dtype, device=boundary.device)
        work = None
        if self._is_leader:
            with self._blaming_peer(step):
                work = dist.irecv(buffer, edge.sender, group=self._groups.edges[edge])
        self._received[step] = (work, buffer)

    def take(self, step: Step) -> torch.Tensor:
        """Wait for the message of a posted receive, and return it [B, S, H].

        In a tensor-parallel group the first rank broadcasts it to the others; collective over the group. A
        gradient frees the send buffer of its activation. Raises TrainingError if the sender is lost, LostPeer
        if a rank of the group is.
        """
        work, buffer = self._received.pop(step)
        if work is not None:
            self._wait(step, work)
            if self._is_via_host(self._edge(step)):
                buffer = buffer.to(self._boundary.device, copy=True)
        replica = self._grid.replica(self._coord)
        if len(replica) > 1:
            with blame_peers(f"the broadcast after the {step}", replica):
                dist.broadcast(buffer, replica[0], group=self._groups.tensor)
        if step.kind == "receive_gradient":
            self._retire(Step("send_activation", step.stage, step.micro_batch))
        return buffer

    def send(self, step: Step, tensor: torch.Tensor) -> None:
        """Start to send a tensor [B, S, H]; waits only if `window` older messages of the edge are under way.

        Only the first rank of a tensor-parallel group sends. Raises TrainingError if the receiver is lost.
        """
        if not self._is_leader:
            return
        edge = self._edge(step)
        under_way = self._sent.setdefault(edge, deque())
        while len(under_way) >= self._window:
            self._wait(*under_way.popleft()[:2])
        tensor = tensor.detach().contiguous()
        if self._is_via_host(edge):
            tensor = _host_copy(tensor)
        with self._blaming_peer(step):
            work = dist.isend(tensor, edge.receiver, group=self._groups.edges[edge])
        assert work is not None
        under_way.append((step, work, tensor))

    def drain(self) -> None:
        """Wait until every send has completed, and free the buffers.

        Raises TrainingError if a receiver is lost.
        """
        for under_way in self._sent.values():
            while under_way:
                self._wait(*under_way.popleft()[:2])

    def _retire(self, proven: Step) -> None:
        """Free an activation whose gradient has arrived, and those sent before it on its edge."""
        under_way = self._sent.get(self._edge(proven))
        while self._is_leader and under_way and under_way[0][0].micro_batch <= proven.micro_batch:
            self._wait(*under_way.popleft()[:2])

    def _is_via_host(self, edge: Edge) -> bool:
        return self._grid.via_host[edge]

    def _edge(self, step: Step) -> Edge:
        """The edge of a send or a receive of this rank."""
        peer_stage = step.stage + _OFFSETS[step.kind]
        peer = self._grid.peer(self._coord, peer_stage, step.micro_batch)
        own = self._grid.replica(self._coord)[0]
        is_activation = step.kind.endswith("activation")
        if step.kind.startswith("send"):
            return Edge(self._coord.pipeline, step.stage, is_activation, own, peer)
        return Edge(self._coord.pipeline, peer_stage, is_activation, peer, own)

    def _wait(self, step: Step, work: dist.Work) -> None:
        """Wait for one end of a message. Raises TrainingError, naming the peer, if it fails."""
        with self._blaming_peer(step):
            work.wait()

    @contextmanager
    def _blaming_peer(self, step: Step) -> Iterator[None]:
        """Around one end of a message: a lost peer may show when it is posted or when it is awaited."""
        try:
            yield
        except RuntimeError as error:
            peer = self._grid.peer(self._coord, step.stage + _OFFSETS[step.kind], step.micro_batch)
            raise TrainingError(
                f"{self._coord}: the {step} failed; rank {peer} is gone or stuck ({error})"
            ) from error


def _host_buffer(shape: tuple[int, ...], dtype: torch.dtype, *, card: torch.device) -> torch.Tensor:
    """A buffer in host memory, pinned if a card copies to and from it."""
    return torch.empty(shape, dtype=dtype, pin_memory=card.type == "cuda")


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, complete on return, because gloo reads it at once."""
    return _host_buffer(tuple(tensor.shape), tensor.dtype, card=tensor.device).copy_(tensor)
