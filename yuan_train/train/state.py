"""The progress of a run: everything a checkpoint holds besides the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from yuan_train.config.load import as_plain
from yuan_train.config.run import LossScaleConfig, RunConfig


@dataclass(frozen=True)
class LossScaler:
    """The current loss scale, and the number of consecutive steps without overflow since it was set."""

    scale: float
    good_steps: int = 0

    def after(self, config: LossScaleConfig, *, skipped: bool) -> LossScaler:
        """The scaler after one more step.

        A skipped step halves the scale, down to the minimum; `growth_interval` good steps in a row double it.
        """
        if skipped:
            return LossScaler(max(self.scale / 2, config.minimum))
        if self.good_steps + 1 == config.growth_interval:
            return LossScaler(self.scale * 2)
        return LossScaler(self.scale, self.good_steps + 1)


@dataclass(frozen=True)
class Progress:
    """Steps done, and the samples they consumed. A skipped step counts, and consumes its samples.

    There is no generator state: every random number is a function of the seed and a name or a position.
    """

    step: int = 0
    sequences: int = 0
    tokens: int = 0
    skipped: int = 0
    """Steps that were skipped because their gradients overflowed."""
    scaler: LossScaler | None = None
    """None if the loss is not scaled."""

    @staticmethod
    def initial(run: RunConfig) -> Progress:
        """The progress of a new run, before its first step."""
        return Progress(scaler=_new_scaler(run))

    def advance(self, run: RunConfig, *, skipped: bool = False, tokens: int | None = None) -> Progress:
        """The progress after one more step; `tokens` were read in it (None: whole sequences)."""
        batch, config = run.train.global_batch_size, run.train.scaling
        if tokens is None:
            tokens = batch * run.data.sequence_length
        scaler = self.scaler.after(config, skipped=skipped) if self.scaler and config else None
        return Progress(
            step=self.step + 1,
            sequences=self.sequences + batch,
            tokens=self.tokens + tokens,
            skipped=self.skipped + skipped,
            scaler=scaler,
        )


def to_state(progress: Progress, run: RunConfig) -> dict[str, Any]:
    """The content of a checkpoint's state.json: plain JSON values."""
    return {"version": 1, **asdict(progress), "run": as_plain(run)}


def from_state(state: Mapping[str, Any], run: RunConfig) -> Progress:
    """The progress in a checkpoint's state.json. The scaler is a new one if the saved run did not scale."""
    scaler, saved = _new_scaler(run), state.get("scaler")
    if scaler is not None and saved is not None:
        scaler = LossScaler(saved["scale"], saved["good_steps"])
    return Progress(
        step=state["step"],
        sequences=state["sequences"],
        tokens=state["tokens"],
        skipped=state.get("skipped", 0),
        scaler=scaler,
    )


def _new_scaler(run: RunConfig) -> LossScaler | None:
    return LossScaler(run.train.scaling.initial) if run.train.scaling else None
