"""The metrics of a run: a progress line, a line of metrics.jsonl per step, and figures for trackers.

TensorBoard, Weights & Biases, MLflow and Trackio are optional packages, imported where they are used, behind
one protocol. A run that is resumed goes on in the tracker's own run, whose identity is kept in the log
directory (`trackers.json`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

from yuan_train.config.devices import GIB
from yuan_train.config.errors import ConfigError, TrainingError
from yuan_train.config.load import as_plain
from yuan_train.config.plan import Plan
from yuan_train.config.run import LogConfig, RunConfig, TrackerName

VERSION = 1
MAX_RANKS = 64
"""Ranks of which trackers get each one's figures; of more the largest alone."""
CURVES = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "mfu",
    "validation_loss",
    "loss_scale",
    "accuracy",
    "margin",
)

LEFT_OUT = (
    ("loss_scale", "skipped_steps"),
    ("accuracy", "margin"),
    ("expert_tokens",),
    ("link_seconds",),
    ("moved",),
    ("stage_seconds", "peak_memory_bytes"),
)
"""Not in the file where the first of them is None."""


@dataclass(frozen=True)
class Moved:
    """A move to another plan in the processes that were there."""

    plan: str
    """Its digest."""
    seconds: float
    """From the end of one step until the next could begin."""
    bytes: int
    """Of state, sent between ranks."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step, seen from rank 0. Lists have one entry per rank, or are None: not logged."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    """Trained on since the start of the run."""
    step_seconds: float
    """From the end of the step before until all ranks' devices have finished this one: optimizer and weight
    sync are in it; validation and saving are not."""
    tokens_per_second: float
    mfu: float | None
    """Model FLOP/s over the sum of the cards' peak FLOP/s; None if a card's peak is unknown."""
    peak_memory_bytes: list[int] | None
    """By rank, as the forecast counts them; see `device.peak_footprint_bytes`."""
    forecast_step_seconds: float | None
    stage_seconds: list[float] | None
    """Seconds of compute of each rank in the step, without the reading of its data."""
    expert_tokens: list[list[int]] | None = None
    """Tokens that each expert of each layer was given, since the line before that has them; None, and not
    in the file, without experts."""
    link_seconds: dict[str, float] | None = None
    """Seconds that half a MiB takes over each link between nodes, `a -> b`, measured after the step; None,
    and not in the file, if it was not."""
    moved: Moved | None = None
    """Before this step, to the plan that it ran with; None, and not in the file, in all other steps."""
    validation_loss: float | None = None
    loss_scale: float | None = None
    """Loss scale of this step's backward; None, like `skipped_steps`, if the loss is not scaled."""
    skipped_steps: int | None = None
    """Since the start of the run. This step was skipped if its `grad_norm` is not finite."""
    accuracy: float | None = None
    """Of preference pairs: the share in which the chosen answer is ahead; None, like `margin`, and not in the
    file, without pairs."""
    margin: float | None = None
    """By how much it is ahead on average: in scores, or for DPO in implicit rewards beta (l - f)."""

    @property
    def highlights(self) -> tuple[str, ...]:
        """What a progress line shows first."""
        loss = f"loss {self.loss:.4f}"
        return (loss,) if self.accuracy is None else (loss, f"accuracy {self.accuracy:.2f}")

    @property
    def figures(self) -> dict[str, float]:
        """What trackers draw, by name; what was not measured is left out. Of ranks: GiB, and seconds."""
        found = {name: getattr(self, name) for name in CURVES}
        found |= {"step_seconds": self.step_seconds, "forecast_step_seconds": self.forecast_step_seconds}
        for name, of_ranks, scale in (
            ("peak_memory_gib", self.peak_memory_bytes, 1 / GIB),
            ("stage_seconds", self.stage_seconds, 1.0),
        ):
            if of_ranks:
                found[f"{name}/most"] = max(of_ranks) * scale
                each = of_ranks if len(of_ranks) <= MAX_RANKS else ()
                found |= {f"{name}/rank_{rank}": value * scale for rank, value in enumerate(each)}
        return {name: value for name, value in found.items() if value is not None}


class Log:
    """Writes metrics.jsonl and progress lines, and sends figures to trackers; on rank 0 only."""

    def __init__(self, run: RunConfig, *, first_step: int, stream: TextIO | None = None) -> None:
        """Lines go to `stream` (None: stderr); metrics of `first_step` and later steps are replaced.

        Raises ConfigError if the log directory cannot be written, or a tracker of `log.to` does not open.
        """
        self._run = run
        self._stream = stream or sys.stderr
        self._file: TextIO | None = None
        self._trackers: dict[TrackerName, Tracker] = {}
        self._losses: list[float] = []
        """Since the last progress line, which shows their mean: single batches go up and down."""
        if run.log.directory is not None:
            directory = Path(run.log.directory)
            try:
                directory.mkdir(parents=True, exist_ok=True)
                self._file = open_after(directory / "metrics.jsonl", first_step)
            except OSError as error:
                raise ConfigError(f"log.directory: {directory} cannot be written: {error}") from None
        try:
            self._trackers = open_trackers(run, resumed=first_step > 1)
        except ConfigError:
            self.close()
            raise

    def write(self, metrics: StepMetrics) -> None:
        """Write the metrics of one step, and a progress line if it `is_logged`.

        Raises TrainingError if the file cannot take them.
        """
        if self._file is not None:
            line: dict[str, Any] = {"version": VERSION}
            for name, value in asdict(metrics).items():
                # JSON has neither NaN nor infinities.
                line[name] = None if isinstance(value, float) and not math.isfinite(value) else value
            for name in (n for names in LEFT_OUT if getattr(metrics, names[0]) is None for n in names):
                del line[name]
            write_lines(self._file, [json.dumps(line) + "\n"])
        for note in write_trackers(self._trackers, metrics.step, metrics.figures):
            self.say(note)
        self._losses.append(metrics.loss)
        if is_logged(metrics.step, self._run):
            mean = statistics.fmean(self._losses)
            self.say(progress_line(replace(metrics, loss=mean), total_steps=self._run.train.steps))
            self._losses.clear()

    def say(self, text: str) -> None:
        """Print a line for the user."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Close the files and the trackers."""
        if self._file is not None:
            close_quietly(self._file)
        close_trackers(self._trackers)


def is_logged(step: int, run: RunConfig) -> bool:
    """Whether a step has a progress line: each `log.every`-th, and the last."""
    return step % run.log.every == 0 or step == run.train.steps


def progress_line(metrics: StepMetrics, *, total_steps: int) -> str:
    """The progress line of a step: `step 10/100 | loss 5.1234 | ...`."""
    rate = metrics.tokens_per_second
    parts = [
        f"step {metrics.step:>{len(str(total_steps))}}/{total_steps}",
        *metrics.highlights,
        f"grad {metrics.grad_norm:.3f}",
        f"lr {metrics.lr:.2e}",
        f"{rate / 1e3:.1f}k tok/s" if rate >= 1e4 else f"{rate:.0f} tok/s",
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
    """Sum of the cards' peak FLOP/s in a precision; None if a card's peak is unknown."""
    total = 0.0
    for name, count in plan.cards_by_type.items():
        device = plan.find_type(name)
        peak = device.peak(precision) if device is not None else None  # pyright: ignore[reportArgumentType]
        if peak is None:
            return None
        total += count * peak
    return total


def open_after(path: Path, first_step: int) -> TextIO:
    """Open a file of JSON lines for appending, without those from `first_step` on: they come again."""
    kept: list[bytes] = []
    if path.exists():
        for line in path.read_bytes().split(b"\n"):
            # What is damaged is of no use, and no reason not to train.
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                if json.loads(line)["step"] < first_step:
                    kept.append(line + b"\n")
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(path)
    return path.open("a", encoding="utf-8")


def write_lines(file: TextIO, lines: Sequence[str]) -> None:
    """Write whole lines, at once. Raises TrainingError, naming the file, if the disk is full.

    What of them is written nevertheless is left out by `open_after` when the run is resumed.
    """
    try:
        file.write("".join(lines))
        file.flush()
    except OSError as error:
        raise TrainingError(
            f"{file.name}: cannot be written: {error}. Free some space, and start the run again: it goes on "
            "from its newest checkpoint"
        ) from error


def close_quietly(file: TextIO) -> None:
    """Close a file; one that was full has been reported, and has nothing more to say."""
    with contextlib.suppress(OSError):
        file.close()


def _clock(seconds: float) -> str:
    """`1:00`, `2:03:04`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


IDENTITIES = "trackers.json"
PACKAGES: dict[TrackerName, str] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
"""What to install for each, and to import."""
MLFLOW_BATCH = 100
"""Parameters that MLflow takes at a time, and the most characters of one."""
MLFLOW_LENGTH = 500


class Tracker(Protocol):
    """Takes the figures of steps. What it raises ends its use, and not the run's."""

    identity: str | None
    """By which a resumed run finds its own; None: by its place."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """The figures of a step; all of them are finite."""
        ...

    def close(self) -> None:
        """The run has ended; what has been written is kept."""
        ...


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a tracker is opened with."""

    directory: Path
    """The log directory, which exists."""
    project: str
    name: str
    config: Mapping[str, Any]
    """The resolved run file, as plain values."""
    identity: str | None
    """Of the tracker's run that goes on; None: a new one begins."""


class TensorBoard:
    """Event files in the folder `tensorboard`."""

    def __init__(self, place: Place) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.identity: str | None = None
        self._writer: Any = SummaryWriter(str(place.directory / "tensorboard"))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases: on its servers, or with WANDB_MODE=offline in the folder `wandb`."""

    def __init__(self, place: Place) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=place.project,
            name=place.name,
            dir=str(place.directory),
            config=dict(place.config),
            id=place.identity,
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
        self.identity: str | None = self._run.id

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow: on the server of MLFLOW_TRACKING_URI, or else in the file `mlflow.db`."""

    def __init__(self, place: Place) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._new_metric: Any = importlib.import_module("mlflow.entities").Metric
        where = os.environ.get("MLFLOW_TRACKING_URI") or _local_store(place.directory)
        self._client: Any = mlflow.MlflowClient(tracking_uri=where)
        if place.identity is not None:
            self.identity: str | None = place.identity
            self._client.update_run(place.identity, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(place.project)
        experiment = found.experiment_id if found else self._client.create_experiment(place.project)
        self.identity = self._client.create_run(experiment, run_name=place.name).info.run_id
        new_parameter: Any = importlib.import_module("mlflow.entities").Param
        settings = [(key, value[:MLFLOW_LENGTH]) for key, value in _flat(place.config)]
        for first in range(0, len(settings), MLFLOW_BATCH):
            part = [new_parameter(key, value) for key, value in settings[first : first + MLFLOW_BATCH]]
            self._client.log_batch(self.identity, params=part)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._new_metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self.identity, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.identity)


class Trackio:
    """Trackio: in its own folder (TRACKIO_DIR), which `trackio show` reads."""

    def __init__(self, place: Place) -> None:
        trackio: Any = importlib.import_module("trackio")
        self.identity: str | None = place.identity or f"{place.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._run: Any = trackio.init(
            project=place.project, name=self.identity, config=dict(place.config), resume="allow", embed=False
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


OPENERS: dict[TrackerName, Callable[[Place], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def check_trackers(log: LogConfig) -> None:
    """Raise ConfigError, with what to install, if a package that `log.to` names is missing here."""
    missing: list[TrackerName] = [name for name in log.to or () if not _is_installed(name)]
    if missing:
        packages = " ".join(PACKAGES[name] for name in missing)
        raise ConfigError(
            f"log.to: {', '.join(missing)}: not installed on the machine of rank 0; wanted the package: "
            f"pip install {packages}; or leave it out"
        )


def open_trackers(run: RunConfig, *, resumed: bool) -> dict[TrackerName, Tracker]:
    """The trackers of `log.to`; if that is None, TensorBoard where it is installed.

    A resumed run goes on in the trackers' own runs. Raises ConfigError, which names the tracker, if one does
    not open.
    """
    log = run.log
    if log.directory is None:
        return {}
    directory = Path(log.directory)
    names = log.to
    if names is None:
        names = ("tensorboard",) if _is_installed("tensorboard") else ()
    identities = _read_identities(directory) if resumed else {}
    found: dict[TrackerName, Tracker] = {}
    for name in names:
        place = Place(
            directory=directory,
            project=log.project,
            name=log.name or directory.resolve().name,
            config=as_plain(run),
            identity=identities.get(name),
        )
        try:
            found[name] = OPENERS[name](place)
        except Exception as error:
            close_trackers(found)
            raise ConfigError(f"log.to: {name}: cannot be opened: {' '.join(str(error).split())}") from error
    kept = {name: tracker.identity for name, tracker in found.items() if tracker.identity is not None}
    if kept:
        (directory / IDENTITIES).write_text(json.dumps(kept) + "\n", encoding="utf-8")
    return found


def write_trackers(
    trackers: dict[TrackerName, Tracker], step: int, figures: Mapping[str, float]
) -> list[str]:
    """Send the figures of a step; what is not finite is left out. A tracker that fails is not used again.

    Returns what to say of those that failed.
    """
    finite = {name: value for name, value in figures.items() if math.isfinite(value)}
    said: list[str] = []
    for name, tracker in list(trackers.items()):
        try:
            tracker.write(step, finite)
        except Exception as error:
            del trackers[name]
            with suppress(Exception):
                tracker.close()
            reason = " ".join(str(error).split()) or type(error).__name__
            said.append(f"note: log.to: {name} failed, and gets no more of this run: {reason}")
    return said


def close_trackers(trackers: Mapping[TrackerName, Tracker]) -> None:
    """Close all; one that cannot has nothing more to say: metrics.jsonl has everything."""
    for tracker in trackers.values():
        with suppress(Exception):
            tracker.close()


def _is_installed(name: TrackerName) -> bool:
    return importlib.util.find_spec(PACKAGES[name]) is not None


def _local_store(directory: Path) -> str:
    """An MLflow store in the log directory: one file, as recent MLflow takes no folders of files."""
    return f"sqlite:///{directory.resolve() / 'mlflow.db'}"


def _read_identities(directory: Path) -> dict[str, str]:
    try:
        return dict(json.loads((directory / IDENTITIES).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Keys with points, and values as text."""
    found: list[tuple[str, str]] = []
    for key, value in values.items():
        inner = value if isinstance(value, dict) else None
        found += _flat(inner, f"{prefix}{key}.") if inner else [(f"{prefix}{key}", str(value))]
    return found
