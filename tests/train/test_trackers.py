"""`log.to`: figures in TensorBoard, Weights & Biases, MLflow and Trackio, with the packages, offline."""

import importlib
import importlib.util
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Refuse
from tests.support.project import make_project, run_config
from tests.train.test_metrics import METRICS
from yuan_train.config.errors import ConfigError
from yuan_train.train import metrics
from yuan_train.train.metrics import Log

LOSSES = [2.5, 2.25, 2.0]


def write_steps(folder: Path, tracker: str, steps: range, **overrides: str) -> Path:
    """Log some steps, the losses of which are LOSSES, and return the log directory."""
    directory = folder / "log"
    more = [f"log.{key}={value}" for key, value in overrides.items()]
    project = folder / "run.yaml"
    run = run_config(
        project if project.exists() else make_project(folder),
        f"log.directory={directory}",
        f"log.to=[{tracker}]",
        *more,
    )
    log = Log(run, first_step=steps.start, stream=io.StringIO())
    for step in steps:
        log.write(replace(METRICS, step=step, loss=LOSSES[step - 1], grad_norm=math.inf))
    log.close()
    return directory


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_every_figure_that_is_finite(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    directory = write_steps(tmp_path, "tensorboard", range(1, 4))
    reading: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == LOSSES
    tags = set(events.Tags()["scalars"])
    assert {"stage_seconds/rank_1", "peak_memory_gib/most", "forecast_step_seconds"} <= tags
    assert "grad_norm" not in tags


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_keeps_the_run_and_goes_on_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    directory = write_steps(tmp_path, "wandb", range(1, 3))
    identity = json.loads((directory / "trackers.json").read_text())["wandb"]
    write_steps(tmp_path, "wandb", range(3, 4))
    files = sorted((directory / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.stem for path in files] == [f"run-{identity}"] * 2
    steps = [item for path in files for item in history_of(path)]
    assert [item["loss"] for item in steps] == LOSSES and [item["_step"] for item in steps] == [1, 2, 3]


def history_of(path: Path) -> list[dict[str, Any]]:
    """The figures in a file of Weights & Biases'."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found: list[dict[str, Any]] = []
    for data in records_of(path.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return found


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's form: blocks of 32 KiB, in them pieces behind 7 bytes of header."""
    block, place, record = 32768, 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_the_run_and_goes_on_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("alembic")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    directory = write_steps(tmp_path, "mlflow", range(1, 3), project="ours", name="first")
    write_steps(tmp_path, "mlflow", range(3, 4), project="ours", name="first")
    client = mlflow.MlflowClient(tracking_uri=metrics._local_store(directory))
    (found,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(item.step, item.value) for item in history] == list(enumerate(LOSSES, 1))
    assert found.info.run_name == "first" and found.info.status == "FINISHED"
    assert found.data.params["train.global_batch_size"] == "8"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_keeps_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    directory = write_steps(tmp_path, "trackio", range(1, 4), project="ours")
    identity = json.loads((directory / "trackers.json").read_text())["trackio"]
    storage: Any = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    assert [item["loss"] for item in storage.get_logs("ours", identity)] == LOSSES


def test_a_missing_package_ends_the_run_before_it_begins_with_what_to_install(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    monkeypatch.setattr(metrics, "_is_installed", lambda name: name == "tensorboard")
    words = (f"log.directory={tmp_path / 'log'}", "log.to=[tensorboard,wandb,mlflow]")
    said = refuse("train", "--config", run_file, *words)
    assert "log.to: wandb, mlflow: not installed" in said and "pip install wandb mlflow" in said


def test_trackers_need_a_log_directory(run_file: Path, refuse: Refuse) -> None:
    said = refuse("train", "--config", run_file, "log.to=[wandb]")
    assert "log.to: wandb write into log.directory" in said


class Failing:
    """A tracker whose second step fails."""

    identity = None

    def __init__(self, place: metrics.Place) -> None:
        self.closed = False

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if step == 2:
            raise OSError("no route to host")

    def close(self) -> None:
        self.closed = True


def test_a_tracker_that_fails_ends_itself_and_not_the_run(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(metrics.OPENERS, "wandb", Failing)
    run = run_config(run_file, f"log.directory={tmp_path / 'log'}", "log.to=[wandb]")
    stream = io.StringIO()
    log = Log(run, first_step=1, stream=stream)
    for step in range(1, 4):
        log.write(replace(METRICS, step=step))
    log.close()
    assert (
        stream.getvalue().count("log.to: wandb failed, and gets no more of this run: no route to host") == 1
    )
    assert len((tmp_path / "log" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_tracker_that_does_not_open_is_named(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: metrics.Place) -> Failing:
        raise RuntimeError("api_key not configured")

    monkeypatch.setitem(metrics.OPENERS, "wandb", refuse)
    run = run_config(run_file, f"log.directory={tmp_path / 'log'}", "log.to=[wandb]")
    with pytest.raises(ConfigError, match="log.to: wandb: cannot be opened: api_key not configured"):
        Log(run, first_step=1)
