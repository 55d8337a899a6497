"""A run as its log directory tells it: what it trains, each step, the plan beside what was measured.

And its cards, each with its state: those of the plan, those that it leaves out, and lost ones.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from yuan_train.config.cluster import Cluster, load_cluster
from yuan_train.config.errors import ConfigError, YuanError, why_unread
from yuan_train.config.load import is_mapping, parse_document
from yuan_train.config.plan import Plan, RankPlan, StageForecast, node_of
from yuan_train.config.plan_constraints import load_plan, plans_in
from yuan_train.config.run import SuperviseConfig
from yuan_train.config.units import show_duration
from yuan_train.report.html import Curve
from yuan_train.report.lines import (
    FILE,
    Entry,
    GrowingFile,
    Line,
    Steps,
    is_step_number,
    parse_line,
    read_entries,
)

METRICS, CONFIG, SAMPLES, CLUSTER = "metrics.jsonl", "config.yaml", "samples.jsonl", "cluster.yaml"
WARM_UP_STEPS = 3
"""Medians leave these out, because the first steps also fill caches and buffers."""
SILENT_SECONDS, SILENT_STEPS = 60.0, 20.0
"""Without a new step for so long, and for so many steps' time, a run is told to be silent."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What a rank has of the plan and what was measured of it; seconds are those of computing in a step."""

    rank: int
    card: str
    type: str
    layers: str
    forecast_seconds: float | None
    seconds: float | None
    forecast_waits: float | None
    """The part of a step in which it does not compute: it waits, or exchanges or steps what it holds."""
    waits: float | None
    forecast_bytes: float | None
    peak_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """What a log directory holds."""

    directory: Path
    steps: Steps
    """Lines of metrics.jsonl of training steps, in order."""
    samples: Sequence[Line]
    """Of reinforcement learning: answers."""
    config: Line
    """config.yaml, resolved; empty where there is none."""
    config_text: str
    """The same as it is written."""
    plan: Plan | None
    """The one that the run goes on with."""
    plan_text: str
    """The same as it is written."""
    plans: Sequence[Path]
    """All, as the log directory keeps them."""
    cluster: Cluster | None
    """Of which the plan uses cards; None: not known."""
    journal: Sequence[Entry] = ()
    """Of a supervised run: what was decided, and why."""
    left_out: Sequence[str] = ()
    """What of these files is damaged, and not shown."""
    written_at: float = 0.0
    """When the newest step was written, in seconds since 1970; and when it was read."""
    read_at: float = 0.0

    @property
    def kind(self) -> str:
        """What is trained, in words."""
        objective = self._section("objective").get("kind", "language_model")
        if "reward" in self.steps.last:
            return f"reinforcement learning ({self._section('algorithm').get('name', 'grpo')})"
        if objective in ("dpo", "reward"):
            return "direct preference optimisation" if objective == "dpo" else "a reward model"
        data = self._section("data")
        answers = data.get("loss_on_answers") or data.get("loss_after_separator")
        return "supervised fine-tuning" if answers else "language modelling"

    @property
    def model(self) -> str:
        """The model's name, or nothing."""
        return str(self._section("model").get("name", ""))

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; those done, where the run file is not there."""
        steps = self._section("train").get("steps")
        return steps if type(steps) is int else self.steps.last["step"]

    def _section(self, name: str) -> Line:
        found = self.config.get(name)
        return found if is_mapping(found) else {}

    @cached_property
    def measured(self) -> Sequence[Line]:
        """The newest steps that ran under one plan, that of the last one, after its warm-up if there are
        such."""
        own: list[Line] = []
        for line in reversed(self.steps.newest):
            if line.get("forecast_step_seconds") != self.forecast_seconds:
                break
            own.append(line)
            if line.get("moved"):
                # Its step is the first one under the plan.
                break
        own.reverse()
        return own[WARM_UP_STEPS:] or own

    @cached_property
    def step_seconds(self) -> float:
        """The median of a step under that plan."""
        return statistics.median(line["step_seconds"] for line in self.measured)

    @property
    def forecast_seconds(self) -> float | None:
        """Of a step, by the plan that the last logged step ran with."""
        return self.steps.last.get("forecast_step_seconds")

    def curve(self, *keys: str) -> Curve:
        """A figure over the steps where it is there; `("evaluation", "pass_1")`: one inside another."""
        return self.steps.curve(*keys)

    @cached_property
    def ranks(self) -> tuple[RankShare, ...]:
        """Each rank of the plan, or those that were measured."""
        seconds, peaks = self._of_ranks("stage_seconds"), self._of_ranks("peak_memory_bytes")
        waits = self._waits()
        plan = self.plan if self.plan_ran or self.journal else None
        if not self.plan_ran and plan is not None:
            # The run has just moved: what was measured is another plan's.
            seconds, peaks, waits = [], [], []
        shares = _forecast_shares(plan) if plan is not None else {}
        names = {entry.rank: entry for entry in plan.ranks} if plan is not None else {}
        step = plan.forecast.step_seconds if plan is not None and plan.forecast is not None else None
        return tuple(
            RankShare(
                rank=rank,
                card=names[rank].device if rank in names else "",
                type=names[rank].type if rank in names else "",
                layers=share.layers if share else "",
                forecast_seconds=share.seconds if share else None,
                seconds=statistics.median(seconds[rank]) if rank < len(seconds) else None,
                forecast_waits=_waiting(share.seconds, step) if share else None,
                waits=statistics.median(waits[rank]) if rank < len(waits) else None,
                forecast_bytes=share.bytes if share else None,
                peak_bytes=max(peaks[rank]) if rank < len(peaks) else None,
            )
            for rank in range(max(len(seconds), len(peaks), len(shares)))
            for share in (shares.get(rank),)
        )

    @cached_property
    def plan_ran(self) -> bool:
        """Whether the plan is the one that the last steps ran under."""
        if self.plan is None:
            return False
        columns = self._of_ranks("stage_seconds")
        is_size = not columns or len(columns) == self.plan.world_size
        own, forecast = self.plan.forecast, self.forecast_seconds
        return is_size and (own is None or forecast is None or math.isclose(own.step_seconds, forecast))

    def _of_ranks(self, name: str) -> list[tuple[float, ...]]:
        """By rank, what the measured steps have of a figure."""
        columns = [line[name] for line in self.measured if line.get(name)]
        return list(zip(*(column for column in columns if len(column) == len(columns[-1])), strict=True))

    def _waits(self) -> list[tuple[float, ...]]:
        """By rank, its part of the measured steps in which it does not compute."""
        lines = [line for line in self.measured if line.get("stage_seconds")]
        own = (
            [_waiting(seconds, line["step_seconds"]) or 0.0 for seconds in line["stage_seconds"]]
            for line in lines
            if len(line["stage_seconds"]) == len(lines[-1]["stage_seconds"])
        )
        return list(zip(*own, strict=True))

    @cached_property
    def use_of_cards(self) -> float | None:
        """The part of what the cards compute together, each at its own measured rate, while none waits; None
        if that is not known."""
        seconds = {share.rank: share.seconds for share in self.ranks if share.seconds}
        return self._use(seconds, self.step_seconds)

    @cached_property
    def forecast_use_of_cards(self) -> float | None:
        """The same by the forecast."""
        own = self.plan.forecast if self.plan is not None else None
        if own is None:
            return None
        seconds = {share.rank: share.forecast_seconds for share in self.ranks if share.forecast_seconds}
        return self._use(seconds, own.step_seconds)

    def _use(self, seconds: dict[int, float], step_seconds: float) -> float | None:
        work = _work_of_ranks(self.plan) if self.plan is not None else {}
        if not {rank for rank in work if work[rank]} <= seconds.keys():
            return None
        together = sum(flops / seconds[rank] for rank, flops in work.items() if flops)
        return sum(work.values()) / step_seconds / together if together and step_seconds else None

    @property
    def state(self) -> str:
        """`goes on`, `finished`, `stopped`, `gave up`, `between two starts`, `no step for 3 minutes`."""
        last = self.journal[-1].event if self.journal else None
        if last in ("finished", "stopped", "gave_up"):
            return last.replace("_", " ")
        if last in ("fault", "waits"):
            return "between two starts"
        if self.steps.last["step"] >= self.num_steps and self.config:
            return "finished"
        silence = self.read_at - self.written_at
        is_silent = silence > max(SILENT_SECONDS, SILENT_STEPS * self.step_seconds)
        return f"no step for {show_duration(silence)}" if is_silent else "goes on"


def _waiting(seconds: float | None, step_seconds: float | None) -> float | None:
    """The part of a step in which a card does not compute."""
    return None if seconds is None or not step_seconds else max(0.0, 1.0 - seconds / step_seconds)


PACE_STEPS = 16
"""Measured steps that the pace of cards is told by."""
UNSTEADY = 0.6
"""Between its quarters, as a part of its median: a rank whose times lie as far apart has no pace yet."""


def measured_pace(plan: Plan, steps: Sequence[Line]) -> dict[int, float]:
    """By rank, how many times as long as forecast it computed in the last steps, beside the other ranks: the
    one in the middle has 1. Empty without a forecast, or before there are `PACE_STEPS` steps under the plan.

    Ranks that wait for each other inside a layer (a tensor-parallel group) are as slow as their slowest.
    """
    shares = _forecast_shares(plan)
    columns = [line["stage_seconds"] for line in steps if line.get("stage_seconds")][-PACE_STEPS:]
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


def slow_links(measured: Sequence[Line]) -> dict[str, float]:
    """By link, how many times as long as at its best a message lately takes; those from `SLOW_LINK` on, the
    slowest first. Empty before a link has been measured `LINK_MEASUREMENTS` times while it was fast.

    `measured` has seconds by link, of one step each. How long cards compute has no part in it.
    """
    found: dict[str, float] = {}
    for name in measured[-1] if measured else ():
        times: list[float] = [line[name] for line in measured if line.get(name)]
        ends = range(LINK_MEASUREMENTS, len(times) + 1)
        middles = [statistics.median(times[end - LINK_MEASUREMENTS : end]) for end in ends]
        if middles and min(times[-LINK_MEASUREMENTS:]) >= SLOW_LINK * min(middles):
            found[name] = middles[-1] / min(middles)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _work_of_ranks(plan: Plan) -> dict[int, float]:
    """By rank, the FLOP of its layers and head in a step, those of a tensor-parallel group shared equally."""
    model, length = plan.model, plan.sequence_length
    early, late = (half.forward_flops(length) for half in model.spec.sublayers(model))
    found: dict[int, float] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            (first, end), floor, ceil = stage.layers, math.floor, math.ceil
            flops = (ceil(end) - ceil(first)) * early + (floor(end) - floor(first)) * late
            flops += 2 * stage.num_layers * model.adapter_parameters + stage.head * model.head_forward_flops
            for number, replica in enumerate(stage.replicas):
                count = pipeline.micro_batches_of(stage, number)
                for rank in replica:
                    own = flops * count * pipeline.micro_batch_size / len(replica)
                    found[rank] = found.get(rank, 0.0) + own
    return found


Read = TypeVar("Read")


class RunReader:
    """Reads a log directory again and again: of its files each time only what is new."""

    def __init__(self, directory: str | Path, cluster: Cluster | None = None) -> None:
        """`cluster`: None is that of CLUSTER in the directory, or the one around it, where `up` puts it."""
        self._folder, self._given = Path(directory), cluster
        self._file, self._steps = GrowingFile(self._folder / METRICS), Steps()
        self._kept: dict[Path, tuple[tuple[int, int], Any]] = {}
        self._left_out: list[str] = []

    def read(self) -> RunLog:
        """The run as it is now. Raises ConfigError if the directory is none of a run, if no step is finished
        yet, or if the cluster that was given is another one."""
        self._left_out = []
        written_at = self._read_steps()
        config_text, config = self._once(self._folder / CONFIG, _read_config) or ("", {})
        journal, damaged = read_entries(self._folder)
        if damaged:
            self._left_out.append(_lines_left_out(FILE, damaged))
        plan_text, plan = self._plan(journal) or ("", None)
        return RunLog(
            directory=self._folder,
            steps=self._steps,
            samples=self._once(self._folder / SAMPLES, _read_samples) or (),
            config=config,
            config_text=config_text,
            plan=plan,
            plan_text=plan_text,
            plans=plans_in(self._folder),
            cluster=self._cluster(plan),
            journal=journal,
            left_out=tuple(self._left_out),
            written_at=written_at,
            read_at=time.time(),
        )

    def _read_steps(self) -> float:
        """Read on; when the file was written last. Raises ConfigError."""
        folder, path = self._folder, self._folder / METRICS
        if not path.is_file():
            there = "is a file" if folder.is_file() else "no such directory"
            what = f"has no {METRICS}" if folder.is_dir() else there
            raise ConfigError(f"{folder}: {what}; wanted the log directory of a run (log.directory)")
        try:
            lines, is_other = self._file.read()
            written_at = path.stat().st_mtime
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {why_unread(error)}") from None
        if is_other:
            self._steps = Steps()
        self._steps.add(lines)
        if not self._steps.newest:
            left = f" ({_lines_left_out(METRICS, self._steps.left_out)})" if self._steps.left_out else ""
            raise ConfigError(f"{path}: no finished step yet{left}; train first, or look again later")
        if self._steps.left_out:
            self._left_out.append(_lines_left_out(METRICS, self._steps.left_out))
        return written_at

    def _once(self, path: Path, read: Callable[[Path], Read]) -> Read | None:
        """What a file holds, read again when it has changed; None, and a note, if it is damaged."""
        try:
            stat = path.stat()
            if (kept := self._kept.get(path)) is None or kept[0] != (stat.st_size, stat.st_mtime_ns):
                kept = self._kept[path] = (stat.st_size, stat.st_mtime_ns), _tried(path, read)
        except FileNotFoundError:
            return None
        except OSError as error:
            kept = (0, 0), ConfigError(f"{path}: {why_unread(error)}")
        if isinstance(kept[1], YuanError):
            self._left_out.append(str(kept[1]).splitlines()[0])
            return None
        return kept[1]

    def _plan(self, journal: Sequence[Entry]) -> tuple[str, Plan] | None:
        """That of the journal; without one the newest under which the last step was forecast as it was."""
        named = [entry.plan for entry in journal if entry.plan]
        if named and (path := self._folder / "plans" / Path(named[-1]).name).is_file():
            return self._once(path, _read_plan)
        newest, forecast = None, self._steps.last.get("forecast_step_seconds")
        for path in reversed(plans_in(self._folder)):
            found = self._once(path, _read_plan)
            newest = newest or found
            own = found[1].forecast if found is not None else None
            if found is not None and (own is None or own.step_seconds == forecast):
                return found
        return newest

    def _cluster(self, plan: Plan | None) -> Cluster | None:
        """The one that was given, or that lies with the run and has the plan's cards."""
        if self._given is not None:
            if plan is not None and not _has_cards(self._given, plan):
                fault = "the run's plan has cards that are not in it; give the run's own"
                raise ConfigError(f"--cluster: {fault}")
            return self._given
        for path in (self._folder / CLUSTER, self._folder.absolute().parent / CLUSTER):
            found = self._once(path, load_cluster)
            if found is not None and (plan is None or _has_cards(found, plan)):
                return found
        return None


def _has_cards(cluster: Cluster, plan: Plan) -> bool:
    """Whether all cards of a plan are a cluster's."""
    types = {card.name: card.type for card in cluster.cards}
    return all(types.get(entry.device) == entry.type for entry in plan.ranks)


def read_run(directory: str | Path) -> RunLog:
    """Read a log directory once, as `RunReader` does. Raises ConfigError."""
    return RunReader(directory, None).read()


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
            words = f"{first:g} to {end:g}" if first % 1 or end % 1 else words
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


def _tried(path: Path, read: Callable[[Path], Read]) -> Read | YuanError:
    """What a file holds, or why it cannot be used."""
    try:
        return read(path)
    except YuanError as error:
        return error
    except (OSError, UnicodeDecodeError) as error:
        return ConfigError(f"{path}: cannot be read: {why_unread(error)}")


def _read_config(path: Path) -> tuple[str, Line]:
    text = path.read_text(encoding="utf-8")
    value: Any = parse_document(text, name=str(path)).value
    return text, value if is_mapping(value) else {}


def _read_plan(path: Path) -> tuple[str, Plan]:
    plan = load_plan(path)
    return path.read_text(encoding="utf-8"), plan


def _read_samples(path: Path) -> list[Line]:
    """Answers, of lines that are whole: the last one may be being written."""
    lines = map(parse_line, path.read_bytes().split(b"\n"))
    return [line for line in lines if line is not None and is_step_number(line.get("step"))]


def _lines_left_out(name: str, count: int) -> str:
    return f"{name}: {count:,} line{'s' * (count != 1)} damaged or of no step"


SLOW = SuperviseConfig().slow
"""From which pace on a card is told to be slow."""
NEAR = 0.02
"""Of a step: ranks that compute so much longer than another are not waited for."""
ENDS = ("stopped", "finished", "gave_up")
MILLION = 1e6


@dataclass(frozen=True, kw_only=True)
class CardRow:
    """A card, and what is known of it."""

    name: str
    node: str
    type: str
    share: RankShare | None
    """What its rank has of the plan, and what was measured of it; None: the plan leaves it out."""
    limit_bytes: float | None
    """Its memory."""
    state: str
    waits_for: int | None
    """The rank for which it waits most; None: for none, or not known."""


def card_rows(run: RunLog) -> tuple[CardRow, ...]:
    """All cards of the cluster, or else of the plan, in this order; then nodes of which no more is known."""
    shares = {share.card: share for share in run.ranks if share.card}
    own = {entry.device: entry.type for entry in run.plan.ranks} if run.plan is not None else {}
    cards = [(name, node_of(RankPlan(rank=0, device=name, type=kind)), kind) for name, kind in own.items()]
    if run.cluster is not None:
        cards = [(card.name, card.node, card.type) for card in run.cluster.cards]
    elif not cards:
        return tuple(_row(run, ("", "", ""), share, {}, {}) for share in run.ranks)
    known = {node for _, node, _ in cards}
    seen = dict.fromkeys(node for entry in run.journal for node in (*entry.nodes, *entry.waiting))
    cards += [(node, node, "") for node in seen if node not in known]
    pace, waits = _pace(run), waits_for(run)
    return tuple(_row(run, card, shares.get(card[0]), pace, waits) for card in cards)


def _row(
    run: RunLog,
    card: tuple[str, str, str],
    share: RankShare | None,
    pace: dict[int, float],
    waits: dict[int, int],
) -> CardRow:
    name, node, kind = card
    found = run.plan.find_type(kind) if run.plan is not None else None
    if run.cluster is not None and kind:
        found = run.cluster.device_type(kind)
    return CardRow(
        name=name,
        node=node,
        type=kind,
        share=share,
        limit_bytes=found.memory if found is not None else None,
        state=_state(run, node, share, pace),
        waits_for=waits.get(share.rank) if share is not None else None,
    )


def _state(run: RunLog, node: str, share: RankShare | None, pace: dict[int, float]) -> str:
    """`lost`, `waits to be let in`, `not used`, `slow, 2.1 times`, or the state of the run."""
    if run.journal:
        last = run.journal[-1]
        if node in last.waiting:
            return "waits to be let in"
        if node not in last.nodes:
            was_here = any(node in entry.nodes for entry in run.journal)
            return "lost" if was_here else "was never here"
    if share is None:
        return "not used"
    if run.state == "goes on":
        times = pace.get(share.rank, 1.0)
        return f"slow, {times:.1f} times" if times >= SLOW else "computes"
    return run.state


def _pace(run: RunLog) -> dict[int, float]:
    return measured_pace(run.plan, run.measured) if run.plan is not None and run.plan_ran else {}


def slow_ranks(run: RunLog) -> dict[int, float]:
    """By rank, how many times as long as forecast it computes beside the others; the slowest first."""
    slow = {rank: times for rank, times in _pace(run).items() if times >= SLOW}
    return dict(sorted(slow.items(), key=lambda item: -item[1]))


def waits_for(run: RunLog) -> dict[int, int]:
    """By rank, the one for which it waits most: the one of its pipeline that computes longest in a step, or
    if that is itself, the one of all pipelines, for whose gradients the others wait at the end of a step.

    This is told from how long each computes, since a wait has no name of its own.
    """
    seconds = {share.rank: share.seconds for share in run.ranks if share.seconds}
    if run.plan is None or not seconds:
        return {}
    found: dict[int, int] = {}
    longest = max(seconds, key=seconds.__getitem__)
    for pipeline in run.plan.pipelines:
        own = pipeline.ranks & seconds.keys()
        slowest = max(own, key=seconds.__getitem__, default=longest)
        for rank in own:
            for other in (slowest, longest):
                if seconds[other] - seconds[rank] > NEAR * run.step_seconds:
                    found[rank] = other
                    break
    return found


@dataclass(frozen=True, kw_only=True)
class Paid:
    """The rent of a run, in the currency of the cluster file."""

    per_hour: float
    """Of the nodes that take part now, all their cards."""
    per_million: float | None
    """Tokens, as measured."""
    forecast_per_million: float | None
    so_far: float | None
    """None: a node of an earlier plan has no price."""


def rent(run: RunLog, tokens_per_second: float | None) -> Paid | None:
    """What the run costs; None without prices for all nodes that take part.

    Of a supervised run the time is that of the journal, waits and starts included, up to the newest step. Of
    others it is that of the steps alone, under the newest plan's cards.
    """
    if run.cluster is None or run.plan is None:
        return None
    nodes = run.journal[-1].nodes if run.journal else {node_of(entry) for entry in run.plan.ranks}
    per_hour = run.cluster.nodes_price(nodes)
    if not per_hour:
        return None
    if run.journal:
        spans = [(run.cluster.nodes_price(e.nodes), end - start) for e, start, end in entry_spans(run)]
    else:
        spans = [(per_hour, run.steps.seconds)]
    paid = [None if price is None else price * seconds / 3600 for price, seconds in spans]
    forecast = run.plan.forecast.tokens_per_second if run.plan.forecast is not None else None
    return Paid(
        per_hour=per_hour,
        per_million=_per_million(per_hour, tokens_per_second),
        forecast_per_million=_per_million(per_hour, forecast),
        so_far=None if None in paid else sum(own or 0.0 for own in paid),
    )


def _per_million(per_hour: float, tokens_per_second: float | None) -> float | None:
    return per_hour / 3600 * MILLION / tokens_per_second if tokens_per_second else None


def entry_spans(run: RunLog) -> list[tuple[Entry, float, float]]:
    """Each entry of the journal after which the run went on, and from when to when it was the newest."""
    ends = [entry.time for entry in run.journal[1:]] + [max(run.written_at, run.journal[-1].time)]
    both = zip(run.journal, ends, strict=True)
    return [(entry, entry.time, max(end, entry.time)) for entry, end in both if entry.event not in ENDS]
