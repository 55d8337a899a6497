"""Messages between the stages of a pipeline: activations one way, their gradients the other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from yuan_train.config.errors import TrainingError
from yuan_train.parallel.grid import Grid, Place
from yuan_train.parallel.groups import Groups
from yuan_train.schedule.step import Step

_OFFSETS = {"send_activation": 1, "receive_activation": -1, "send_gradient": -1, "receive_gradient": 1}


@dataclass(frozen=True)
class Boundary:
    """What crosses a cut: a hidden state [B, S, H] of one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Bridge:
    """Posts and awaits the messages of one rank.

    A receive buffer lives from its posting to its use. A sent tensor is let go as soon as its arrival is
    certain without asking, or, at the latest, when `window` younger ones of its kind are under way.
    """

    def __init__(self, grid: Grid, place: Place, groups: Groups, boundary: Boundary, *, window: int) -> None:
        self._place = place
        self._groups = groups
        self._boundary = boundary
        self._window = window
        self._peers = {kind: grid.neighbour(place, offset) for kind, offset in _OFFSETS.items()}
        self._received: dict[tuple[str, int], tuple[dist.Work, torch.Tensor]] = {}
        self._sent: dict[str, deque[tuple[Step, dist.Work, torch.Tensor]]] = {
            "send_activation": deque(),
            "send_gradient": deque(),
        }

    def post(self, step: Step) -> None:
        """Open the door for a message: allocate its buffer and start to receive."""
        boundary, peer = self._boundary, self._peers[step.kind]
        assert peer is not None
        buffer = torch.empty(boundary.shape, dtype=boundary.dtype, device=boundary.device)
        work = dist.irecv(buffer, peer, group=self._groups.edges[peer, self._place.rank])
        assert work is not None
        self._received[step.kind, step.micro_batch] = (work, buffer)

    def take(self, step: Step) -> torch.Tensor:
        """Wait for a message that was posted, and hand it over.

        A gradient that has come proves that its activation had arrived, so that one is let go.
        """
        work, buffer = self._received.pop((step.kind, step.micro_batch))
        self._wait(step, work)
        if step.kind == "receive_gradient":
            self._retire("send_activation", up_to=step.micro_batch)
        return buffer

    def send(self, step: Step, tensor: torch.Tensor) -> None:
        """Start to send; does not wait for the peer unless `window` older messages are still under way."""
        peer = self._peers[step.kind]
        assert peer is not None
        under_way = self._sent[step.kind]
        while len(under_way) >= self._window:
            self._wait(*under_way.popleft()[:2])
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, peer, group=self._groups.edges[self._place.rank, peer])
        assert work is not None
        under_way.append((step, work, tensor))

    def drain(self) -> None:
        """Wait until everything sent has arrived."""
        for under_way in self._sent.values():
            while under_way:
                self._wait(*under_way.popleft()[:2])

    def _retire(self, kind: str, *, up_to: int) -> None:
        under_way = self._sent[kind]
        while under_way and under_way[0][0].micro_batch <= up_to:
            self._wait(*under_way.popleft()[:2])

    def _wait(self, step: Step, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise TrainingError(
                f"{self._place}: the {step} failed; rank {self._peers[step.kind]} is gone or stuck ({error})"
            ) from error
