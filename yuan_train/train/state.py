"""Where a run stands: all that a checkpoint needs beside the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from yuan_train.config.load import as_plain
from yuan_train.config.run import LossScaleConfig, RunConfig


@dataclass(frozen=True)
class Scaler:
    """The loss scale now, and the steps in a row that it has stood without overflow."""

    scale: float
    good_steps: int = 0

    def after(self, config: LossScaleConfig, *, skipped: bool) -> Scaler:
        """Halved by a step that was skipped, doubled after enough good ones."""
        if skipped:
            return Scaler(max(self.scale / 2, config.minimum))
        if self.good_steps + 1 == config.growth_steps:
            return Scaler(self.scale * 2)
        return Scaler(self.scale, self.good_steps + 1)


@dataclass(frozen=True)
class Progress:
    """Steps done, and how far into the data they reach. A skipped step used up its samples, and did no more.

    There is no generator state: what is random is drawn from the seed and a name or a position.
    """

    step: int = 0
    sequences: int = 0
    tokens: int = 0
    skipped: int = 0
    """Of the steps, those whose gradients overflowed."""
    scaler: Scaler | None = None
    """None where the loss is not scaled."""

    @staticmethod
    def of_new(run: RunConfig) -> Progress:
        """Before the first step."""
        return Progress(scaler=_new_scaler(run))

    def advance(self, run: RunConfig, *, skipped: bool = False) -> Progress:
        """One step further."""
        batch, config = run.train.global_batch_size, run.train.scaling
        scaler = self.scaler.after(config, skipped=skipped) if self.scaler and config else None
        return Progress(
            step=self.step + 1,
            sequences=self.sequences + batch,
            tokens=self.tokens + batch * run.data.sequence_length,
            skipped=self.skipped + skipped,
            scaler=scaler,
        )


def to_state(progress: Progress, run: RunConfig) -> dict[str, Any]:
    """Plain values for a checkpoint's state.json."""
    return {"version": 1, **asdict(progress), "run": as_plain(run)}


def from_state(state: Mapping[str, Any], run: RunConfig) -> Progress:
    """The progress that a checkpoint's state.json tells of; a run that only now scales has a new scaler."""
    scaler, saved = _new_scaler(run), state.get("scaler")
    if scaler is not None and saved is not None:
        scaler = Scaler(saved["scale"], saved["good_steps"])
    return Progress(
        step=state["step"],
        sequences=state["sequences"],
        tokens=state["tokens"],
        skipped=state.get("skipped", 0),
        scaler=scaler,
    )


def _new_scaler(run: RunConfig) -> Scaler | None:
    return Scaler(run.train.scaling.initial) if run.train.scaling else None
