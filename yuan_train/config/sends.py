"""Who waits for a message between two stages."""

from __future__ import annotations

from typing import Literal

Sends = Literal["overlapped", "blocking"]
"""`overlapped`: only the compute step that needs the message. `blocking`: its sender too."""
