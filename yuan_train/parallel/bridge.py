"""Messages between the stages of a pipeline: activations one way, their gradients the other.

Between stages of unlike tensor-parallel width the first rank of one group sends to the first of the other,
which hands the message on inside its group: one copy over the slow link, fan-out on the fast one. Between
cards that share no library the message goes over gloo, from host memory to host memory (`library` of a device
type).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from yuan_train.config.errors import TrainingError
from yuan_train.parallel.grid import Edge, Grid, Place
from yuan_train.parallel.groups import Groups, meeting
from yuan_train.schedule.step import Kind, Step

_OFFSETS: dict[Kind, int] = {
    "send_activation": 1,
    "receive_activation": -1,
    "send_gradient": -1,
    "receive_gradient": 1,
}


@dataclass(frozen=True)
class Boundary:
    """What crosses a cut: a hidden state [B, S, H] of one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Bridge:
    """Posts and awaits the messages of one rank.

    A receive buffer lives from its posting to its use. A sent activation is let go when its gradient has
    come, which proves that it had arrived; a sent gradient at the latest when `window` younger ones of its
    edge are under way, by when the table's in-flight depth has made its receiver take it.
    """

    def __init__(self, grid: Grid, place: Place, groups: Groups, boundary: Boundary, *, window: int) -> None:
        self._grid = grid
        self._place = place
        self._groups = groups
        self._boundary = boundary
        self._window = window
        self._leads = place.position == 0
        self._received: dict[Step, tuple[dist.Work | None, torch.Tensor]] = {}
        self._sent: dict[Edge, deque[tuple[Step, dist.Work, torch.Tensor]]] = {}

    def post(self, step: Step) -> None:
        """Open the door for a message: allocate its buffer and start to receive."""
        boundary, edge = self._boundary, self._edge(step)
        if self._leads and self._staged(edge):
            buffer = _host_buffer(boundary.shape, boundary.dtype, card=boundary.device)
        else:
            buffer = torch.empty(boundary.shape, dtype=boundary.dtype, device=boundary.device)
        work = dist.irecv(buffer, edge.sender, group=self._groups.edges[edge]) if self._leads else None
        self._received[step] = (work, buffer)

    def take(self, step: Step) -> torch.Tensor:
        """Wait for a message that was posted, and hand it over."""
        work, buffer = self._received.pop(step)
        if work is not None:
            self._wait(step, work)
            if self._staged(self._edge(step)):
                buffer = buffer.to(self._boundary.device, copy=True)
        replica = self._grid.replica(self._place)
        if len(replica) > 1:
            with meeting(f"handing on the {step}", replica):
                dist.broadcast(buffer, replica[0], group=self._groups.tensor)
        if step.kind == "receive_gradient":
            self._retire(Step("send_activation", step.stage, step.micro_batch))
        return buffer

    def send(self, step: Step, tensor: torch.Tensor) -> None:
        """Start to send; does not wait for the peer unless `window` older messages are still under way."""
        if not self._leads:
            return
        edge = self._edge(step)
        under_way = self._sent.setdefault(edge, deque())
        while len(under_way) >= self._window:
            self._wait(*under_way.popleft()[:2])
        tensor = tensor.detach().contiguous()
        if self._staged(edge):
            tensor = _host_copy(tensor)
        work = dist.isend(tensor, edge.receiver, group=self._groups.edges[edge])
        assert work is not None
        under_way.append((step, work, tensor))

    def drain(self) -> None:
        """Wait until everything sent has arrived."""
        for under_way in self._sent.values():
            while under_way:
                self._wait(*under_way.popleft()[:2])

    def _retire(self, proven: Step) -> None:
        """Let go of an activation whose gradient has come, and of those sent before it on its edge."""
        under_way = self._sent.get(self._edge(proven))
        while self._leads and under_way and under_way[0][0].micro_batch <= proven.micro_batch:
            self._wait(*under_way.popleft()[:2])

    def _staged(self, edge: Edge) -> bool:
        return self._grid.staged[edge]

    def _edge(self, step: Step) -> Edge:
        peer_stage = step.stage + _OFFSETS[step.kind]
        peer = self._grid.peer(self._place, peer_stage, step.micro_batch)
        mine = self._grid.replica(self._place)[0]
        onward = step.kind.endswith("activation")
        if step.kind.startswith("send"):
            return Edge(self._place.pipeline, step.stage, onward, mine, peer)
        return Edge(self._place.pipeline, peer_stage, onward, peer, mine)

    def _wait(self, step: Step, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            peer = self._grid.peer(self._place, step.stage + _OFFSETS[step.kind], step.micro_batch)
            raise TrainingError(
                f"{self._place}: the {step} failed; rank {peer} is gone or stuck ({error})"
            ) from error


def _host_buffer(shape: tuple[int, ...], dtype: torch.dtype, *, card: torch.device) -> torch.Tensor:
    """In host memory, pinned if a card copies to and from it."""
    return torch.empty(shape, dtype=dtype, pin_memory=card.type == "cuda")


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, whole when this returns, for gloo reads it at once."""
    return _host_buffer(tuple(tensor.shape), tensor.dtype, card=tensor.device).copy_(tensor)
