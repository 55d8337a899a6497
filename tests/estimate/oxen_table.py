"""Twenty measured cells of GRPO on an H100 of 80 GB, against which the estimate for TRL is held.

Cited, not measured here: Oxen.ai, "GRPO VRAM Requirements For the GPU Poor" (2025), with TRL 0.14; its code
is Oxen-AI/GRPO-With-Cargo-Feedback. The article names sizes; an image of it names Llama-3.2-1B, the others
are taken for the models of these sizes. No number of ours comes from it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from yuan_train.estimate.memory import MemoryCase, Method, Samples, memory_of
from yuan_train.estimate.shape import PUBLISHED_SHAPES

OXEN_SAMPLES = Samples(group=4, prompt=256, new=786)
OXEN_MODELS = ("Qwen2.5-0.5B", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen2.5-14B")

_MEASURED_GB: dict[Method, tuple[int | None, ...]] = {
    "full": (25, 38, 58, None, None),
    "adam8": (16, 26, 52, None, None),
    "adam8+recompute": (15, 24, 41, 72, None),
    "lora": (13, 16, 32, 58, 69),
}
"""GB of 1e9 bytes by model; None: out of memory."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the table: ours, and the article's beside it."""

    case: MemoryCase
    measured_bytes: int | None
    """None: out of memory."""

    @property
    def right(self) -> bool:
        """Whether fit or not is foretold."""
        return self.case.fits == (self.measured_bytes is not None)

    @property
    def error(self) -> float | None:
        """How far ours is off, in parts of what was measured."""
        if self.measured_bytes is None:
            return None
        return memory_of(self.case).peak / self.measured_bytes - 1


def oxen_table(card: str) -> list[Cell]:
    """The cells, row by row; `card` decides what fits."""
    return [
        Cell(
            case=MemoryCase(model=PUBLISHED_SHAPES[model], method=method, samples=OXEN_SAMPLES, card=card),
            measured_bytes=None if gigabytes is None else gigabytes * 10**9,
        )
        for method, row in _MEASURED_GB.items()
        for model, gigabytes in zip(OXEN_MODELS, row, strict=True)
    ]


def mean_error(cells: list[Cell]) -> float:
    """Mean of the absolute errors of the cells that have a measured number."""
    return statistics.fmean(abs(cell.error) for cell in cells if cell.error is not None)
