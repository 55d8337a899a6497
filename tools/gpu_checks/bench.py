"""What the checks of tools/gpu_day.py share: the device, the folder, notes, seconds and bytes.

A check is a function `(bench) -> (ok, figure)`. What it notes on the way is kept, whatever it raises later.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
Verdict = tuple[bool | None, str]
"""Whether a check holds (None: it cannot be had here), and its figure in words."""


@dataclass(frozen=True)
class Bench:
    """Where a check runs."""

    device: torch.device
    folder: Path
    """For what is kept of it; the folders of other checks are beside it."""
    scratch: Path
    """For what is not."""
    without: str = ""
    """A negative control; see `tests.support.ranks.disabled`."""

    @property
    def on_card(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, card: T, cpu: T) -> T:
        """A size for a card, and the tiny one for a CPU."""
        return card if self.on_card else cpu

    def note(self, **facts: Any) -> None:
        """Keep facts for the check's `detail`."""
        with (self.folder / "notes.jsonl").open("a") as file:
            file.write(json.dumps(facts, default=str) + "\n")

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_card:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object], repeats: int = 5) -> float:
        """Median seconds of a call, after a first one."""
        call()
        taken: list[float] = []
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        """The most bytes of the card that a call takes besides what is taken before; None on a CPU."""
        if not self.on_card:
            call()
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def megabytes(count: float | None) -> str:
    """Bytes in words."""
    return "bytes need a card" if count is None else f"{count / 1e6:,.0f} MB"
