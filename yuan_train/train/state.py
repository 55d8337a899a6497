"""Where a run stands: all that a checkpoint needs beside the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from yuan_train.config.load import as_plain
from yuan_train.config.run import RunConfig


@dataclass(frozen=True)
class Progress:
    """Steps done, and how far into the data they reach.

    There is no generator state: what is random is drawn from the seed and a name or a position.
    """

    step: int = 0
    sequences: int = 0
    tokens: int = 0

    def advance(self, run: RunConfig) -> Progress:
        """One optimizer step further."""
        batch = run.train.global_batch_size
        return Progress(self.step + 1, self.sequences + batch, self.tokens + batch * run.data.sequence_length)


def to_state(progress: Progress, run: RunConfig) -> dict[str, Any]:
    """Plain values for a checkpoint's state.json."""
    return {"version": 1, **asdict(progress), "run": as_plain(run)}


def from_state(state: Mapping[str, Any]) -> Progress:
    """The progress that a checkpoint's state.json tells of."""
    return Progress(step=state["step"], sequences=state["sequences"], tokens=state["tokens"])
