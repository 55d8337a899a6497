"""Where the figures of a run are sent beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow, Trackio.

Each is an optional package, imported where it is used, behind one protocol. A run that is resumed goes on in
the tracker's own run, whose identity is kept in the log directory (`trackers.json`).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from yuan_train.config.errors import ConfigError
from yuan_train.config.load import as_plain
from yuan_train.config.run import LogConfig, RunConfig, TrackerName

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
            project=place.project,
            name=self.identity,
            config=dict(place.config),
            resume="allow",
            embed=False,
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
