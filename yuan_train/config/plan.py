"""The plan: which cards hold which layers, and what that should cost. Every law of a plan is checked here.

A plan and the schedule table made from it are all that planner and trainer share. A person can write one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen

from yuan_train.config.cluster import Cluster
from yuan_train.config.devices import CATALOGUE, DeviceType
from yuan_train.config.errors import ConfigError, PlanError, Problem
from yuan_train.config.load import build, dump, read_document, write_text
from yuan_train.config.model import ONLY_IN_TRAINING, ModelConfig, model_laws
from yuan_train.config.run import Recompute, RunConfig, Schedule

Count = Annotated[int, Gt(0)]
Index = Annotated[int, Ge(0)]


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One process on one card."""

    rank: Index
    device: str
    type: str


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Layers [first, last) of the model on one or more replicas."""

    replicas: Annotated[tuple[Annotated[tuple[Index, ...], MinLen(1)], ...], MinLen(1)]
    """Each a tensor-parallel group, its ranks in order; micro-batch m runs on replica m mod n."""
    layers: tuple[Index, Index]
    embedding: bool = False
    head: bool = False
    recompute: Recompute = "none"
    recompute_layers: Count | None = None
    """How many of the layers, the first ones, are recomputed; None: all, unless `recompute` is none."""
    optimizer_share: Annotated[float, Gt(0), Le(1e6)] = 1.0
    """With optimizer_sharding: how much of the optimizer state the stage holds, against the other owners
    of the same layers (3 beside 1: three quarters)."""
    in_flight: Count | None = None
    """Micro-batches that the stage, all its replicas together, may hold at once under 1f1b; None: as many as
    there are replicas from it to the pipeline's end. A stage before a slow link gains from more."""
    optimizer_offload: Annotated[float, Ge(0), Le(1)] = 0.0
    """Fraction of the optimizer state that each of the stage's ranks keeps on its host, and steps there."""

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]

    @property
    def num_recomputed(self) -> int:
        """Layers that are recomputed: the stage's first ones."""
        if self.recompute == "none":
            return 0
        return self.num_layers if self.recompute_layers is None else self.recompute_layers

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the stage, replica by replica."""
        return tuple(rank for replica in self.replicas for rank in replica)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """One data-parallel share of the batch, and the stages that work on it."""

    micro_batch_size: Count
    num_micro_batches: Count
    stages: Annotated[tuple[StagePlan, ...], MinLen(1)]

    @property
    def num_sequences(self) -> int:
        """Sequences of a step that this pipeline takes."""
        return self.micro_batch_size * self.num_micro_batches

    def depths(self, schedule: Schedule) -> tuple[int, ...] | None:
        """Micro-batches that each stage may hold at once under 1f1b; None where the schedule decides."""
        if schedule != "1f1b":
            return None
        counts = [len(stage.replicas) for stage in self.stages]
        return tuple(stage.in_flight or sum(counts[s:]) for s, stage in enumerate(self.stages))


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Bytes on each card of a stage, by category."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    reserved: float

    @property
    def total(self) -> float:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.buffers
            + self.reserved
        )


@dataclass(frozen=True, kw_only=True)
class StageForecast:
    """What a stage should take: seconds of one micro-batch, and bytes on each of its cards at the peak."""

    pipeline: Index
    stage: Index
    forward_seconds: float
    backward_seconds: float
    peak_memory_bytes: float
    memory: MemoryForecast


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a step should take."""

    step_seconds: float
    tokens_per_second: float
    bubble_fraction: float
    lower_bound_seconds: float
    source: Literal["measured", "estimated"]
    stages: tuple[StageForecast, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An uneven cut of a model over unlike cards."""

    version: int = 1
    cluster: str = ""
    model: ModelConfig
    sequence_length: Count
    global_batch_size: Count
    schedule: Schedule = "1f1b"
    optimizer_sharding: bool = False
    ranks: Annotated[tuple[RankPlan, ...], MinLen(1)]
    pipelines: Annotated[tuple[PipelinePlan, ...], MinLen(1)]
    device_types: dict[str, DeviceType] = field(default_factory=dict[str, DeviceType])
    """The cards of this plan that are not in the catalogue."""
    forecast: Forecast | None = None

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def optimizer_shares(self) -> tuple[float, ...]:
        """Each rank's `optimizer_share`."""
        shares = {
            rank: stage.optimizer_share
            for pipeline in self.pipelines
            for stage in pipeline.stages
            for rank in stage.ranks
        }
        return tuple(shares[rank] for rank in range(self.world_size))

    def device_type(self, rank: int) -> DeviceType | None:
        """The card of a rank; None if a hand-written plan names one that nobody described."""
        name = next(entry.type for entry in self.ranks if entry.rank == rank)
        return self.device_types.get(name) or CATALOGUE.get(name)

    def staged(self, ranks: Iterable[int]) -> bool:
        """Whether the cards of these ranks share no library, so that they talk through host memory."""
        cards = [self.device_type(rank) for rank in ranks]
        libraries = {card.library if card is not None else "nccl" for card in cards}
        return len(libraries) > 1 or libraries == {"none"}


def plan_laws(plan: Plan) -> Iterator[Problem]:
    """Yield every law that a plan breaks, whoever wrote it."""
    if plan.version != 1:
        yield Problem(("version",), f"wanted 1, got {plan.version}; plan again with this release")
    for problem in model_laws(plan.model):
        yield replace(problem, path=("model", *problem.path))
    yield from _batch_laws(plan)
    yield from _rank_laws(plan)
    for p, pipeline in enumerate(plan.pipelines):
        laws = (
            _layer_laws(pipeline, plan.model),
            _recompute_laws(pipeline),
            _depth_laws(pipeline, plan.schedule),
            _replica_laws(pipeline, plan),
            _share_laws(pipeline, plan),
        )
        for problem in itertools.chain(*laws):
            yield replace(problem, path=("pipelines", p, *problem.path))


def _batch_laws(plan: Plan) -> Iterator[Problem]:
    total = sum(pipeline.num_sequences for pipeline in plan.pipelines)
    if total != plan.global_batch_size:
        yield Problem(
            ("global_batch_size",),
            f"{plan.global_batch_size}, but the pipelines take {total} sequences "
            "(micro_batch_size * num_micro_batches, summed); they must be equal",
        )
    if plan.sequence_length > plan.model.max_sequence_length:
        yield Problem(
            ("sequence_length",),
            f"{plan.sequence_length} tokens, but the model allows {plan.model.max_sequence_length}",
        )


def _rank_laws(plan: Plan) -> Iterator[Problem]:
    for i, entry in enumerate(plan.ranks):
        if entry.rank != i:
            yield Problem(
                ("ranks", i, "rank"), f"wanted {i}, got {entry.rank}; ranks stand in order, each once, from 0"
            )
    for device, times in Counter(entry.device for entry in plan.ranks).items():
        if times > 1:
            yield Problem(("ranks",), f"card {device!r} is named {times} times; one rank per card")
    virtual = plan.schedule in ("interleaved_1f1b", "zero_bubble")
    where: dict[int, tuple[int, int]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            path = ("pipelines", p, "stages", s, "replicas")
            for rank in stage.ranks:
                if rank >= plan.world_size:
                    yield Problem(path, f"there is no rank {rank}; ranks has {plan.world_size}, from 0")
            for rank in sorted(rank for rank, times in Counter(stage.ranks).items() if times > 1):
                yield Problem(path, f"rank {rank} is named twice in this stage; a rank works in one replica")
            for rank in sorted(set(stage.ranks) & set(where)):
                first = where[rank]
                if first[0] != p:
                    there = f"it works in pipeline {first[0]} already"
                    yield Problem(path, f"rank {rank} is named twice: {there}")
                elif virtual and not _same_replica(pipeline, first[1], s, rank):
                    yield Problem(
                        path,
                        f"rank {rank} works in stage {first[1]} in another group; virtual stages of a rank "
                        "must have the same replica, rank for rank",
                    )
                elif not virtual:
                    yield Problem(
                        path,
                        f"rank {rank} is named twice: stage {first[1]} has it already, and schedule "
                        f"{plan.schedule} gives a rank one stage",
                    )
            where |= dict.fromkeys(stage.ranks, (p, s))
    for rank in range(plan.world_size):
        if rank not in where:
            yield Problem(("ranks", rank), f"rank {rank} works in no stage; leave it out or give it one")


def _same_replica(pipeline: PipelinePlan, a: int, b: int, rank: int) -> bool:
    groups = [next(r for r in pipeline.stages[s].replicas if rank in r) for s in (a, b)]
    return groups[0] == groups[1]


def _layer_laws(pipeline: PipelinePlan, model: ModelConfig) -> Iterator[Problem]:
    """Every layer exactly once and in order; embedding first, head last."""
    last = len(pipeline.stages) - 1
    expected = 0
    for s, stage in enumerate(pipeline.stages):
        first, end = stage.layers
        path = ("stages", s, "layers")
        if end < first:
            yield Problem(path, f"[{first}, {end}] ends before it begins; layers are [first, end)")
            continue
        if first < expected:
            yield Problem(path, f"layer {first} is held twice; this stage must begin at layer {expected}")
        elif first > expected:
            dropped = f"layer {expected}" if first == expected + 1 else f"layers {expected} to {first - 1}"
            what_to_do = f"this stage must begin at layer {expected}"
            yield Problem(path, f"{dropped} dropped: no stage holds it; {what_to_do}")
        expected = end
        if stage.embedding != (s == 0):
            word = "the first stage must hold the embedding" if s == 0 else "only the first stage may hold it"
            yield Problem(("stages", s, "embedding"), f"{word}; set embedding: {str(s == 0).lower()}")
        if stage.head != (s == last):
            word = "the last stage must hold the head" if s == last else "only the last stage may hold it"
            yield Problem(("stages", s, "head"), f"{word}; set head: {str(s == last).lower()}")
    if expected != model.num_layers:
        yield Problem(
            ("stages", last, "layers"),
            f"the stages hold layers up to {expected}, but the model has {model.num_layers}; "
            f"the last stage must end at {model.num_layers}",
        )


def _recompute_laws(pipeline: PipelinePlan) -> Iterator[Problem]:
    for s, stage in enumerate(pipeline.stages):
        count, path = stage.recompute_layers, ("stages", s, "recompute_layers")
        if count is None:
            continue
        if stage.recompute == "none":
            yield Problem(path, f"{count} layers, but recompute is none; set recompute, or leave the key out")
        elif count > stage.num_layers:
            yield Problem(
                path,
                f"{count} layers, but the stage holds {stage.num_layers}; leave the key out to recompute all",
            )


def _depth_laws(pipeline: PipelinePlan, schedule: Schedule) -> Iterator[Problem]:
    """A stage that holds fewer than the next would wait for a gradient that the next cannot make yet. The
    replica with the fewest counts: each holds K // n of a stage's K at least."""
    depths = pipeline.depths(schedule)
    for s, stage in enumerate(pipeline.stages):
        path = ("stages", s, "in_flight")
        if depths is None:
            if stage.in_flight is not None:
                yield Problem(
                    path, f"{stage.in_flight}, but schedule {schedule} decides by itself; leave it out"
                )
        elif depths[s] < len(stage.replicas):
            yield Problem(path, f"{depths[s]}, but each of {len(stage.replicas)} replicas must hold one")
        elif s + 1 < len(depths) and depths[s] // len(stage.replicas) * len(stage.replicas) < depths[s + 1]:
            enough = -(-depths[s + 1] // len(stage.replicas)) * len(stage.replicas)
            yield Problem(
                path,
                f"stage {s} holds {depths[s]} micro-batches and stage {s + 1} holds {depths[s + 1]}; "
                f"set in_flight: {enough} or more here",
            )


def shared_sizes(model: ModelConfig) -> dict[str, int]:
    """What a tensor-parallel group shares, and how much of it; each must divide by the group's width."""
    shared = {
        "heads": model.num_attention_heads,
        "feed-forward columns": model.ffn_hidden_size,
        "vocabulary rows": model.vocab_size,
    }
    if model.attention == "localized_filter":
        shared["filter channels"] = model.hidden_size // 2
    return shared


def _replica_laws(pipeline: PipelinePlan, plan: Plan) -> Iterator[Problem]:
    shared = shared_sizes(plan.model)
    known = {entry.rank for entry in plan.ranks}
    for s, stage in enumerate(pipeline.stages):
        for i, replica in enumerate(stage.replicas):
            if len(replica) > 1 and known >= set(replica) and plan.staged(replica):
                names = " and ".join(sorted({entry.type for entry in plan.ranks if entry.rank in replica}))
                yield Problem(
                    ("stages", s, "replicas", i),
                    f"{names} cards share no library, as a tensor-parallel group must; group cards of a kind",
                )
        lengths = {len(replica) for replica in stage.replicas}
        if len(lengths) > 1:
            unlike = f"replicas of unlike widths {sorted(lengths)}"
            yield Problem(("stages", s, "replicas"), f"{unlike}; make them equal")
        for i, replica in enumerate(stage.replicas):
            for what, number in shared.items():
                if number % len(replica):
                    widths = range(1, 2 * len(replica))
                    fitting = [str(w) for w in widths if all(n % w == 0 for n in shared.values())]
                    use = f"use {' or '.join(fitting)} ranks"
                    yield Problem(
                        ("stages", s, "replicas", i),
                        f"{len(replica)} ranks cannot share {number} {what}; {use}",
                    )
                    break
        if len(stage.replicas) > pipeline.num_micro_batches:
            yield Problem(
                ("stages", s, "replicas"),
                f"{len(stage.replicas)} replicas for {pipeline.num_micro_batches} micro-batches; "
                "some would idle; use fewer",
            )


def _share_laws(pipeline: PipelinePlan, plan: Plan) -> Iterator[Problem]:
    first: dict[int, int] = {}
    for s, stage in enumerate(pipeline.stages):
        path, share = ("stages", s, "optimizer_share"), stage.optimizer_share
        if share != 1 and not plan.optimizer_sharding:
            nothing = "but optimizer_sharding is false: nothing is shared"
            yield Problem(path, f"{share:g}, {nothing}; set optimizer_sharding: true, or leave this out")
        for rank in stage.ranks:
            # All stages of a rank lie in one card's memory.
            before = first.setdefault(rank, s)
            other = pipeline.stages[before].optimizer_share
            if other != share:
                there = f"rank {rank} has {other:g} in stage {before}"
                yield Problem(path, f"{share:g}, but {there}; give all stages of a rank the same")
                break


def load_plan(path: str | Path) -> Plan:
    """Read a plan. Raises PlanError with every law that it breaks."""
    try:
        document = read_document(path)
    except ConfigError as error:
        raise PlanError(str(error)) from None
    return build(document, Plan, laws=plan_laws, error=PlanError)


def save_plan(path: str | Path, plan: Plan) -> None:
    """Write a plan whole or not at all. Raises ConfigError if it cannot."""
    write_text(path, dump(plan))


def check_belongs(plan: Plan, run: RunConfig) -> None:
    """Raise PlanError, with every difference, unless the plan was made for this run."""
    pairs = {
        f"model.{key}": (getattr(plan.model, key), getattr(run.model, key))
        for key in ModelConfig.__dataclass_fields__
        if key not in ("name", *ONLY_IN_TRAINING)
    }
    pairs["sequence_length"] = (plan.sequence_length, run.data.sequence_length)
    pairs["global_batch_size"] = (plan.global_batch_size, run.train.global_batch_size)
    wrong = [
        f"{key}: the plan was made for {planned!r}, the run has {wanted!r}"
        for key, (planned, wanted) in pairs.items()
        if planned != wanted
    ]
    if wrong:
        raise PlanError("\n".join(f"the plan belongs to another run: {line}; plan again" for line in wrong))


def check_precision(plan: Plan, run: RunConfig) -> None:
    """Raise ConfigError if a card of the plan lacks the run's precision; one that nobody described has it."""
    precision = run.train.precision
    cards = {entry: plan.device_type(entry.rank) for entry in plan.ranks}
    lacking = [entry for entry, card in cards.items() if card is not None and card.peak(precision) is None]
    if lacking:
        others = all(card is None or card.fp16 is not None for card in cards.values())
        way_out = "fp16" if precision == "bf16" and others else "fp32"
        names = ", ".join(f"{entry.device} ({entry.type})" for entry in lacking)
        raise ConfigError(
            f"train.precision: {precision}, but the plan works on {names} without {precision} units; "
            f"set train.precision: {way_out}, or plan again: the planner leaves such cards out"
        )


def single_card_plan(run: RunConfig) -> Plan:
    """The plan of one process alone: the whole model on one card."""
    stage = StagePlan(replicas=((0,),), layers=(0, run.model.num_layers), embedding=True, head=True)
    size = run.train.micro_batch_size
    pipeline = PipelinePlan(
        micro_batch_size=size, num_micro_batches=run.train.global_batch_size // size, stages=(stage,)
    )
    return Plan(
        model=run.model,
        sequence_length=run.data.sequence_length,
        global_batch_size=run.train.global_batch_size,
        ranks=(RankPlan(rank=0, device="this machine", type="unknown"),),
        pipelines=(pipeline,),
    )


def own_device_types(cluster: Cluster, names: set[str]) -> dict[str, DeviceType]:
    """The described types among `names`, for a plan to carry."""
    return {name: cluster.device_types[name] for name in sorted(names) if name in cluster.device_types}
