"""Messages between the controller and the leaders of engines: Python values over a link.

A message is a header of 8 numbers and a body. Sends do not block; messages from one rank to another arrive in
the order in which they were sent.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from yuan_train.parallel.links import Link

HEADER = 8
"""Numbers of a header: the version of this format, the bytes of the body; the others are 0."""
VERSION = 1


class Channel:
    """Both directions between this rank and another one of a link."""

    def __init__(self, link: Link, peer: int) -> None:
        self._link = link
        self._peer = peer
        self._sends: deque[Callable[[], None]] = deque()

    def send(self, value: Any) -> None:
        """Start to send a value; what of the sends before is known to have arrived is let go."""
        body = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        header = torch.zeros(HEADER, dtype=torch.int64)
        header[0], header[1] = VERSION, len(body)
        self._sends.append(self._link.send(header, self._peer))
        self._sends.append(self._link.send(body, self._peer))

    def receive(self) -> Any:
        """The next value from there. Raises LostPeer, naming the rank's role, if it is gone.

        Whoever answers has read what it answers to: earlier sends are finished then.
        """
        header = torch.zeros(HEADER, dtype=torch.int64)
        self._link.receive(header, self._peer)()
        assert int(header[0]) == VERSION, "both ends are of one release"
        body = torch.empty(int(header[1]), dtype=torch.uint8)
        self._link.receive(body, self._peer)()
        return pickle.loads(body.numpy().tobytes())

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        while self._sends:
            self._sends.popleft()()
