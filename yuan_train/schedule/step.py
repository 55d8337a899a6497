"""One step of a schedule: a piece of compute, or one end of a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "forward", "backward", "send_activation", "receive_activation", "send_gradient", "receive_gradient"
]


@dataclass(frozen=True, slots=True)
class Step:
    """What `stage` does with `micro_batch`.

    A receive only opens the door: it is posted and does not wait. The compute step that needs the message
    waits for it. A send starts when the compute before it has ended, and does not wait either.
    """

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def is_compute(self) -> bool:
        return self.kind in ("forward", "backward")

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} of micro-batch {self.micro_batch} on stage {self.stage}"


Lane = tuple[Step, ...]
"""The steps of one stage, in the order in which it takes them."""

Table = tuple[Lane, ...]
"""One lane per stage: the whole schedule of a pipeline, as data."""
