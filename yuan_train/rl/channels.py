"""Messages between the controller and the leaders of engines: Python values over a link.

A message is a header of 8 numbers and a body. Sends do not block; messages from one rank to another arrive in
the order in which they were sent. What was sent is kept until the other end says, in a message of its own,
that it has read it.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from yuan_train.parallel.links import Link

HEADER = 8
"""Numbers of a header: the version of this format, the bytes of the body, how many messages its sender has
read from this link's other end; the others are 0."""
VERSION = 1


class Channel:
    """Both directions between this rank and another one of a link."""

    def __init__(self, link: Link, peer: int) -> None:
        self._link = link
        self._peer = peer
        self._sends: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        """Header and body of each message that is not known to be read."""
        self._num_read = self._num_let_go = 0

    def send(self, value: Any) -> None:
        """Start to send a value; it is kept until `receive` learns that it was read."""
        body = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        header = torch.zeros(HEADER, dtype=torch.int64)
        header[0], header[1], header[2] = VERSION, len(body), self._num_read
        self._sends.append((self._link.send(header, self._peer), self._link.send(body, self._peer)))

    def receive(self) -> Any:
        """The next value from there, however long it takes to come; lets go of the messages that were read
        there before it was sent. Raises LostPeer, naming the rank's role, if it is gone."""
        header = torch.zeros(HEADER, dtype=torch.int64)
        self._link.receive(header, self._peer)()
        assert int(header[0]) == VERSION, "both ends are of one release"
        body = torch.empty(int(header[1]), dtype=torch.uint8)
        self._link.receive(body, self._peer)()
        self._num_read += 1
        self._let_go(int(header[2]) - self._num_let_go)
        return pickle.loads(body.numpy().tobytes())

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        self._let_go(len(self._sends))

    def _let_go(self, count: int) -> None:
        """Wait for the oldest sends, which is short for those that were read."""
        for _ in range(count):
            for wait in self._sends.popleft():
                wait()
        self._num_let_go += count
