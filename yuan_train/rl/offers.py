"""Tickets that engines draw themselves, in flight: whoever has free slots takes the next one that is offered.

Every engine is offered all tickets, in one order, as far as the bound on staleness allows. Which engine has
which is decided by a counter in the launcher's store, so that a slow engine takes fewer and no batch waits
for it. The controller is not asked: it trains meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from yuan_train.rl.engines import Channel, Inbox
from yuan_train.rl.generator import Drawing
from yuan_train.rl.tickets import Ticket

_COUNTER = "tickets drawn"


def _name(serial: int) -> str:
    """Of what the store knows of a ticket: the engine that has drawn it."""
    return f"ticket drawn {serial}"


class Offers:
    """On the controller: the order of what is offered."""

    def __init__(self, store: dist.Store, num_engines: int) -> None:
        self._store = store
        self._num_engines = num_engines
        self._count = 0
        self._serials: dict[int | str, int] = {}

    def make(self, tickets: Sequence[Ticket]) -> list[tuple[int, Ticket]]:
        """The tickets with their places in the order, behind all before."""
        offered = list(enumerate(tickets, start=self._count))
        self._count += len(offered)
        self._serials |= {ticket.number: serial for serial, ticket in offered}
        return offered

    def lost(self, unanswered: Iterable[int | str], left: Sequence[int]) -> list[int | str]:
        """Those of the unanswered tickets that an engine has drawn which is not left, or that nobody is known
        to have drawn though their turn is past: at worst two engines answer one."""
        if len(left) == self._num_engines:
            return []
        drawn = self._store.add(_COUNTER, 0)
        return [
            n for n in unanswered if self._serials[n] < drawn and self._owner(self._serials[n]) not in left
        ]

    def _owner(self, serial: int) -> int | None:
        return int(self._store.get(_name(serial))) if self._store.check([_name(serial)]) else None


class Desk:
    """On an engine's leader: the controller's messages as they come, and the tickets that it draws."""

    def __init__(self, channel: Channel, store: dist.Store, engine: int) -> None:
        self._store = store
        self._engine = engine
        self._inbox = Inbox()
        self._inbox.open(0, channel)
        self._offered: dict[int, tuple[Ticket, Drawing]] = {}
        self._drawn: int | None = None
        """The place of the ticket that is this engine's next one, which may not be offered yet."""

    def has_news(self, num_free: int) -> bool:
        """Whether `orders` would give some now."""
        return not self._inbox.is_empty or (num_free > 0 and self._draw())

    def orders(self, num_free: int, *, wait: bool) -> list[Sequence[Any]]:
        """What the engine is to do now, in order: ("weights", version), ("answer", ticket, drawing) for as
        many tickets as fill the free slots, or ("stop",). `wait`: until there is something.

        Raises what ended the connection to the controller.
        """
        found: list[Sequence[Any]] = []
        while True:
            while not self._inbox.is_empty or (wait and not found and not self._draw()):
                _, message = self._inbox.take()
                if isinstance(message, Exception):
                    raise message
                if message[0] == "offer":
                    _, offered, drawing = message
                    self._offered |= {serial: (ticket, drawing) for serial, ticket in offered}
                    continue
                found.append(message)
                if message[0] == "stop":
                    return found
            while num_free > 0 and self._draw():
                assert self._drawn is not None
                ticket, drawing = self._offered.pop(self._drawn)
                self._drawn = None
                num_free -= ticket.count
                found.append(("answer", ticket, drawing))
            if found or not wait:
                return found

    def _draw(self) -> bool:
        """Whether a ticket is this engine's next one; those before it are others'."""
        if self._drawn is None and self._offered:
            self._drawn = self._store.add(_COUNTER, 1) - 1
            self._store.set(_name(self._drawn), str(self._engine))
            for serial in [serial for serial in self._offered if serial < self._drawn]:
                del self._offered[serial]
        return self._drawn in self._offered
