"""What a run tells: one line a step for people, one JSON line for programs, TensorBoard if installed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from yuan_train.config.errors import ConfigError
from yuan_train.config.plan import Plan
from yuan_train.config.run import RunConfig

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step, seen from rank 0. Lists have one entry per rank."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    """Trained since the beginning of the run."""
    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    """Model FLOP/s over the sum of the cards' peaks; None where a card's peak is not known."""
    peak_memory_bytes: list[int]
    forecast_step_seconds: float | None
    stage_seconds: list[float]
    """Seconds of the step that each rank spent on compute."""
    validation_loss: float | None = None
    loss_scale: float | None = None
    """The one that this step's backward ran with; None where the loss is not scaled, as is the next."""
    skipped_steps: int | None = None
    """Since the beginning of the run; this step was skipped if its `grad_norm` is not a number."""


class Log:
    """metrics.jsonl, TensorBoard events and the progress line; made on rank 0 only."""

    def __init__(self, run: RunConfig, *, first_step: int, stream: TextIO | None = None) -> None:
        self._run = run
        self._stream = stream or sys.stderr
        self._file: TextIO | None = None
        self._events: Any = None
        if run.log.directory is not None:
            directory = Path(run.log.directory)
            try:
                directory.mkdir(parents=True, exist_ok=True)
                self._file = _open_after(directory / "metrics.jsonl", first_step)
            except OSError as error:
                raise ConfigError(f"log.directory: {directory} cannot be written: {error}") from None
            self._events = _event_writer(directory)

    def write(self, metrics: StepMetrics) -> None:
        """Report one step."""
        if self._file is not None:
            line = {"version": VERSION, **_finite(asdict(metrics))}
            if metrics.loss_scale is None:
                del line["loss_scale"], line["skipped_steps"]
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        if self._events is not None:
            for name in (
                "loss",
                "lr",
                "grad_norm",
                "tokens_per_second",
                "mfu",
                "validation_loss",
                "loss_scale",
            ):
                value = getattr(metrics, name)
                if value is not None:
                    self._events.add_scalar(name, value, metrics.step)
        if metrics.step % self._run.log.every == 0 or metrics.step == self._run.train.steps:
            self.say(progress_line(metrics, total_steps=self._run.train.steps))

    def say(self, text: str) -> None:
        """A line for people."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()


def progress_line(metrics: StepMetrics, *, total_steps: int) -> str:
    """`step 10/100 | loss 5.1234 | ...`, readable in a log."""
    parts = [
        f"step {metrics.step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {metrics.loss:.4f}",
        f"grad {metrics.grad_norm:.3f}",
        f"lr {metrics.lr:.2e}",
        f"{_thousands(metrics.tokens_per_second)} tok/s",
        f"MFU {metrics.mfu:.1%}" if metrics.mfu is not None else "MFU -",
        f"{metrics.step_seconds:.3f} s",
    ]
    if metrics.forecast_step_seconds is not None:
        parts[-1] += f" (forecast {metrics.forecast_step_seconds:.3f} s)"
    if metrics.loss_scale is not None:
        skipped = ", step skipped" if not math.isfinite(metrics.grad_norm) else ""
        parts.append(f"scale {metrics.loss_scale:g}{skipped}")
    if metrics.validation_loss is not None:
        parts.append(f"validation loss {metrics.validation_loss:.4f}")
    parts.append(f"ETA {_clock((total_steps - metrics.step) * metrics.step_seconds)}")
    return " | ".join(parts)


def peak_flops(plan: Plan, precision: str) -> float | None:
    """Sum of the cards' peaks in FLOP/s, or None if a card is not described."""
    total = 0.0
    for entry in plan.ranks:
        device = plan.device_type(entry.rank)
        peak = device.peak(precision) if device is not None else None  # pyright: ignore[reportArgumentType]
        if peak is None:
            return None
        total += peak
    return total


def _open_after(path: Path, first_step: int) -> TextIO:
    """Open metrics.jsonl for appending; lines from `first_step` on belong to a curve that is taken anew."""
    kept: list[str] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                continue
            if step < first_step:
                kept.append(line)
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    aside.replace(path)
    return path.open("a", encoding="utf-8")


def _event_writer(directory: Path) -> Any:
    """A TensorBoard writer, or None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory / "tensorboard"))


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinities."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _thousands(value: float) -> str:
    return f"{value / 1e3:.1f}k" if value >= 1e4 else f"{value:.0f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
