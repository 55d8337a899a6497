"""Who waits for a message between two stages."""

from __future__ import annotations

from typing import Literal

Sends = Literal["overlapped", "blocking", "rendezvous"]
"""`overlapped`: only the compute step that needs the message. `blocking`: its sender, until it has arrived.
`rendezvous`: sender and receiver, who take one message after the other."""
