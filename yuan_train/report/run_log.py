"""A run as its log directory tells it: what it trains, each step, the plan beside what was measured."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from yuan_train.config.document import is_mapping, parse_document
from yuan_train.config.errors import ConfigError, YuanError, why_unread
from yuan_train.config.plan import Plan, StageForecast
from yuan_train.config.plan_constraints import load_plan, plans_in

FILE = "supervise.jsonl"
Event = Literal["started", "moved", "stays", "fault", "waits", "stopped", "finished", "gave_up"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that was decided. Forecasts are seconds of a step; None where there is no such plan."""

    time: float
    """Seconds since 1970, by the clock of the machine that decided."""
    event: Event
    reason: str
    plan: str | None = None
    """The plan's file, that the run goes on with."""
    forecast_before: float | None = None
    forecast_after: float | None = None
    nodes: Sequence[str] = ()
    """Those that take part from now on."""
    step: int = 0
    """The newest saved one."""


_KINDS = {
    "time": (int, float),
    "event": str,
    "reason": str,
    "plan": (str, NoneType),
    "forecast_before": (int, float, NoneType),
    "forecast_after": (int, float, NoneType),
    "nodes": list,
    "step": int,
}


class Journal:
    """Appends entries to the journal of a log directory, each as a whole line."""

    def __init__(self, directory: str | Path) -> None:
        """Raises ConfigError if the directory cannot be written."""
        self._path = Path(directory) / FILE
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("a").close()
        except OSError as error:
            raise ConfigError(f"log.directory: {directory} cannot be written: {error}") from None

    def write(self, event: Event, reason: str, **more: Any) -> Entry:
        """Append an entry, and return it. A full disk costs the line and not the run."""
        entry = Entry(time=round(time.time(), 3), event=event, reason=reason, **more)
        line = json.dumps(asdict(entry) | {"nodes": list(entry.nodes)})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                # After a line that a crash has cut short, this one begins anew.
                file.write(line + "\n" if self._ends_well() else "\n" + line + "\n")
        except OSError:
            pass
        return entry

    def _ends_well(self) -> bool:
        with self._path.open("rb") as file:
            if file.seek(0, 2) == 0:
                return True
            file.seek(-1, 2)
            return file.read(1) == b"\n"


def read_journal(directory: str | Path) -> list[Entry]:
    """The entries of a journal; lines that are damaged are left out, and a missing file has none."""
    entries: list[Entry] = []
    try:
        lines = (Path(directory) / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        with suppress(ValueError, TypeError):
            entry = Entry(**json.loads(line))
            if all(isinstance(getattr(entry, name), kinds) for name, kinds in _KINDS.items()):
                entries.append(entry)
    return entries


METRICS, CONFIG, SAMPLES = "metrics.jsonl", "config.yaml", "samples.jsonl"
WARM_UP_STEPS = 3
"""Medians leave these out, because the first steps also fill caches and buffers."""

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What a rank has of the plan and what was measured of it; seconds are those of computing in a step."""

    rank: int
    card: str
    type: str
    layers: str
    forecast_seconds: float | None
    seconds: float | None
    forecast_bytes: float | None
    peak_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """What a log directory holds."""

    directory: Path
    steps: Sequence[Line]
    """Lines of metrics.jsonl of training steps, in order."""
    samples: Sequence[Line]
    """Of reinforcement learning: answers."""
    config: Line
    """config.yaml, resolved; empty where there is none."""
    config_text: str
    """The same as it is written."""
    plan: Plan | None
    """The newest."""
    journal: Sequence[Entry] = ()
    """Of a supervised run: what was decided, and why."""

    @property
    def kind(self) -> str:
        """What is trained, in words."""
        objective = self.config.get("objective", {}).get("kind", "language_model")
        if "reward" in self.steps[-1]:
            return f"reinforcement learning ({self.config.get('algorithm', {}).get('name', 'grpo')})"
        if objective != "language_model":
            return {"dpo": "direct preference optimisation", "reward": "a reward model"}[objective]
        data = self.config.get("data", {})
        answers = data.get("loss_on_answers") or data.get("loss_after_separator")
        return "supervised fine-tuning" if answers else "language modelling"

    @property
    def model(self) -> str:
        """The model's name, or nothing."""
        return str(self.config.get("model", {}).get("name", ""))

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; those done, where the run file is not there."""
        return int(self.config.get("train", {}).get("steps", self.steps[-1]["step"]))

    @cached_property
    def step_seconds(self) -> float:
        """The median of a step."""
        return statistics.median(line["step_seconds"] for line in self.warm)

    @property
    def warm(self) -> Sequence[Line]:
        """The steps after the warm-up, or all if there are no others."""
        return self.steps[WARM_UP_STEPS:] or self.steps

    @property
    def forecast_seconds(self) -> float | None:
        """Of a step, by the plan that the last logged step ran with."""
        return self.steps[-1].get("forecast_step_seconds")

    def curve(self, *keys: str) -> list[tuple[int, float]]:
        """Step and value of a figure where it is there; `("evaluation", "pass_1")`: one inside another."""
        found: list[tuple[int, float]] = []
        for line in self.steps:
            value: Any = line
            for key in keys:
                value = value.get(key) if is_mapping(value) else None
            if isinstance(value, int | float):
                found.append((line["step"], float(value)))
        return found

    @cached_property
    def ranks(self) -> tuple[RankShare, ...]:
        """Each rank of the plan, or those that were measured."""
        measured = [line for line in self.warm if line.get("stage_seconds")]
        measured = [
            line for line in measured if len(line["stage_seconds"]) == len(measured[-1]["stage_seconds"])
        ]
        seconds = [
            statistics.median(own) for own in zip(*(m["stage_seconds"] for m in measured), strict=True)
        ]
        peaks = [max(own) for own in zip(*(m["peak_memory_bytes"] for m in measured), strict=True)]
        shares = _forecast_shares(self.plan) if self.plan is not None else {}
        if self.plan is not None and measured and len(seconds) != self.plan.world_size:
            # Measured under another plan than the newest.
            shares = {}
        names = {entry.rank: entry for entry in self.plan.ranks} if shares and self.plan is not None else {}
        return tuple(
            RankShare(
                rank=rank,
                card=names[rank].device if rank in names else "",
                type=names[rank].type if rank in names else "",
                layers=shares[rank].layers if rank in shares else "",
                forecast_seconds=shares[rank].seconds if rank in shares else None,
                seconds=seconds[rank] if rank < len(seconds) else None,
                forecast_bytes=shares[rank].bytes if rank in shares else None,
                peak_bytes=peaks[rank] if rank < len(peaks) else None,
            )
            for rank in range(max(len(seconds), len(shares)))
        )

    @cached_property
    def use_of_cards(self) -> float | None:
        """The part of what the cards compute together, each at its own measured rate, while none waits; None
        if that is not known."""
        if self.plan is None:
            return None
        work = _work_of_ranks(self.plan)
        seconds = {share.rank: share.seconds for share in self.ranks if share.seconds}
        if not work.keys() <= seconds.keys() | {rank for rank in work if not work[rank]}:
            return None
        together = sum(flops / seconds[rank] for rank, flops in work.items() if flops)
        return sum(work.values()) / self.step_seconds / together if together else None


PACE_STEPS = 16
"""Steps that the pace of cards is measured over."""
UNSTEADY = 0.6
"""Between its quarters, as a part of its median: a rank whose times lie as far apart has no pace yet."""


def measured_pace(plan: Plan, steps: Sequence[Line]) -> dict[int, float]:
    """By rank, how many times as long as forecast it computed in the last steps, beside the other ranks: the
    one in the middle has 1. Empty without a forecast, or before there are `PACE_STEPS` steps under the plan.

    Ranks that wait for each other inside a layer (a tensor-parallel group) are as slow as their slowest.
    """
    shares = _forecast_shares(plan)
    columns = [line["stage_seconds"] for line in steps[-PACE_STEPS:] if line.get("stage_seconds")]
    if len(columns) < PACE_STEPS or any(len(column) != plan.world_size for column in columns):
        return {}
    times: dict[int, float] = {}
    for rank, seconds in enumerate(zip(*columns, strict=True)):
        low, middle, high = statistics.quantiles(seconds, n=4)
        share = shares.get(rank)
        if share is not None and share.seconds and middle and (high - low) / middle < UNSTEADY:
            times[rank] = middle / share.seconds
    common = statistics.median_low(times.values()) if times else 1.0
    return {rank: own / common for rank, own in times.items()}


LINK_MEASUREMENTS = 3
"""Of a link in a row: their middle is its time, and all must be slow for it to be told. A full queue or a
busy neighbour delays single ones."""
SLOW_LINK = 3.0
"""How many times as long as at its best a message takes over a link that is told to be slow."""


def slow_links(steps: Sequence[Line]) -> dict[str, float]:
    """By link, how many times as long as at its best a message lately takes; those from `SLOW_LINK` on, the
    slowest first. Empty before a link has been measured `LINK_MEASUREMENTS` times while it was fast.

    How long cards compute has no part in it.
    """
    measured = [line["link_seconds"] for line in steps if is_mapping(line.get("link_seconds"))]
    found: dict[str, float] = {}
    for name in measured[-1] if measured else ():
        times: list[float] = [line[name] for line in measured if line.get(name)]
        middles = [
            statistics.median(times[end - LINK_MEASUREMENTS : end])
            for end in range(LINK_MEASUREMENTS, len(times) + 1)
        ]
        if middles and min(times[-LINK_MEASUREMENTS:]) >= SLOW_LINK * min(middles):
            found[name] = middles[-1] / min(middles)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _work_of_ranks(plan: Plan) -> dict[int, float]:
    """By rank, the FLOP of its layers and head in a step, those of a tensor-parallel group shared equally."""
    layer, head = plan.model.layer_forward_flops(plan.sequence_length), plan.model.head_forward_flops
    found: dict[int, float] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            flops = stage.num_layers * layer + stage.head * head
            for number, replica in enumerate(stage.replicas):
                count = pipeline.micro_batches_of(stage, number)
                for rank in replica:
                    own = flops * count * pipeline.micro_batch_size / len(replica)
                    found[rank] = found.get(rank, 0.0) + own
    return found


def read_run(directory: str | Path) -> RunLog:
    """Read a log directory. Raises ConfigError if it is none, or if no step is finished yet."""
    folder = Path(directory)
    path = folder / METRICS
    if not path.is_file():
        there = "is a file" if folder.is_file() else "no such directory"
        what = f"has no {METRICS}" if folder.is_dir() else there
        raise ConfigError(f"{folder}: {what}; wanted the log directory of a run (log.directory)")
    steps = [line for line in _read_lines(path) if _is_step(line)]
    if not steps:
        raise ConfigError(f"{path}: no finished step yet; train first, or look again later")
    samples = _read_lines(folder / SAMPLES) if (folder / SAMPLES).is_file() else []
    text = (folder / CONFIG).read_text(encoding="utf-8") if (folder / CONFIG).is_file() else ""
    config: Any = parse_document(text, name=str(folder / CONFIG)).value
    return RunLog(
        directory=folder,
        steps=steps,
        samples=samples,
        config=config if is_mapping(config) else {},
        config_text=text,
        plan=_newest_plan(folder),
        journal=read_journal(folder),
    )


def is_log_directory(path: Path) -> bool:
    """Whether a run has logged there."""
    return (path / METRICS).is_file()


@dataclass(frozen=True)
class _Share:
    layers: str
    seconds: float | None
    bytes: float | None


def _forecast_shares(plan: Plan) -> dict[int, _Share]:
    """By rank: its layers, and the forecast seconds and bytes of its stages in a step."""
    stages: dict[tuple[int, int], StageForecast] = {}
    if plan.forecast is not None:
        stages = {(item.pipeline, item.stage): item for item in plan.forecast.stages}
    found: dict[int, _Share] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            first, end = stage.layers
            words = f"{first:g}-{end - 1:g}" if end - first > 1 else f"{first:g}" if end > first else "none"
            words += " +emb" * stage.embedding + " +head" * stage.head
            forecast = stages.get((p, s))
            for number, replica in enumerate(stage.replicas):
                count = pipeline.micro_batches_of(stage, number)
                seconds = (forecast.forward_seconds + forecast.backward_seconds) * count if forecast else None
                for rank in replica:
                    before = found.get(rank)
                    if before is None:
                        found[rank] = _Share(words, seconds, forecast.peak_memory_bytes if forecast else None)
                        continue
                    # Virtual stages: a card's time adds up; its memory is told once, for all of them.
                    both = None if seconds is None or before.seconds is None else before.seconds + seconds
                    found[rank] = _Share(f"{before.layers}, {words}", both, before.bytes)
    return found


def _newest_plan(folder: Path) -> Plan | None:
    files = plans_in(folder)
    try:
        return load_plan(files[-1]) if files else None
    except YuanError:
        # Of an earlier release, or written by hand since.
        return None


def _is_step(line: Line) -> bool:
    return all(isinstance(line.get(key), int | float) for key in ("step", "loss", "step_seconds"))


def _read_lines(path: Path) -> list[Line]:
    """The lines of a file that are whole: the last one may be being written. Raises ConfigError."""
    found: list[Line] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {why_unread(error)}") from None
    for line in text.splitlines():
        try:
            value: Any = json.loads(line)
        except ValueError:
            continue
        if is_mapping(value):
            found.append(value)
    return found
