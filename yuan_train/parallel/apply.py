"""From a plan and the parts of a model to something that can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from yuan_train.config.plan import Plan, StagePlan
from yuan_train.parallel.bridge import Boundary, Bridge
from yuan_train.parallel.gradients import FlatBucket, sums_after
from yuan_train.parallel.grid import Grid, Place, unit_of
from yuan_train.parallel.groups import Groups, make_groups
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.split import WeightQueue, split_backward
from yuan_train.parallel.tensor import Cutting, cut_parameters, join_group
from yuan_train.parallel.zero import BucketState, SharedState, WholeState
from yuan_train.schedule.check import check_table, peak_in_flight
from yuan_train.schedule.step import Lane, Step, Table
from yuan_train.schedule.tables import forward_only, make_table


@dataclass(frozen=True)
class ModelParts:
    """How a model is built, cut and filled; the runtime knows it by names alone."""

    build: Callable[[StagePlan], torch.nn.Module]
    """One stage's part, on the meta device."""
    initial: Callable[[str, tuple[int, ...]], torch.Tensor]
    """First value of a parameter by global name and shape."""
    sharding: Mapping[str, str]
    row_blocks: Mapping[str, int]


@dataclass(frozen=True)
class Worker:
    """One rank of a plan, ready to work: its place, its lane, its weights and its neighbours."""

    grid: Grid
    place: Place
    lane: Lane
    evaluation_lane: Lane
    parts: Mapping[int, torch.nn.Module]
    """By stage."""
    queues: Mapping[int, WeightQueue]
    """By stage: weight gradients put off, where the schedule splits the backward."""
    shards: Mapping[str, Shard]
    """What this rank holds of each parameter, by global name."""
    states: tuple[BucketState, ...]
    buckets: tuple[FlatBucket, ...]
    sums: Mapping[Step, tuple[int, ...]]
    """After which step of the lane the gradient sum of which states begins."""
    groups: Groups
    bridge: Bridge | None

    def begin_sums(self, taken: Step) -> None:
        """Begin the gradient sums whose turn a step of the lane was."""
        for number in self.sums.get(taken, ()):
            self.states[number].begin_sum()


def parallelize(
    plan: Plan,
    rank: int,
    parts: ModelParts,
    *,
    device: torch.device,
    dtype: torch.dtype,
    timeout_seconds: float = 600.0,
) -> Worker:
    """Build this rank's parts of the model, lay their weights flat, and join its neighbours.

    `dtype` is what crosses the cuts; `timeout_seconds` how long a rank waits for another. Collective over all
    ranks.
    """
    grid = Grid(plan)
    place = grid.places[rank]
    groups = make_groups(grid, device=device, timeout_seconds=timeout_seconds)
    pipeline = grid.pipeline(place)
    cutting = Cutting(parts.sharding, parts.row_blocks, place.position, len(grid.replica(place)))
    modules, shards = _build_parts(grid, place, parts, cutting, device)
    if groups.tensor is not None:
        for module in modules.values():
            join_group(module, cutting, groups.tensor)
    queues = {stage: WeightQueue() for stage in modules}
    if plan.schedule == "zero_bubble":
        for stage, module in modules.items():
            split_backward(module, queues[stage], parts.sharding)
    parameters = {name: p for module in modules.values() for name, p in module.named_parameters()}
    buckets = _flatten(grid, rank, parameters, shards)
    stages_of = [_stages_of(bucket, modules) for bucket in buckets]
    workers = grid.workers(place.pipeline)
    table = pipeline_table(plan, place.pipeline)
    shape = (pipeline.micro_batch_size, plan.sequence_length, plan.model.hidden_size)
    window = 1 + max(peak_in_flight(lane) for lane in table)
    return Worker(
        grid=grid,
        place=place,
        lane=table[place.worker],
        evaluation_lane=forward_only(workers=workers, num_micro_batches=pipeline.num_micro_batches)[
            place.worker
        ],
        parts=modules,
        queues=queues,
        shards=shards,
        states=tuple(
            _state(plan, bucket, groups, [pipeline.stages[s] for s in stages])
            for bucket, stages in zip(buckets, stages_of, strict=True)
        ),
        buckets=tuple(buckets),
        sums=sums_after(table[place.worker], stages_of),
        groups=groups,
        bridge=Bridge(grid, place, groups, Boundary(shape, dtype, device), window=window)
        if len(pipeline.stages) > 1
        else None,
    )


def pipeline_table(plan: Plan, pipeline: int) -> Table:
    """The checked schedule table of one pipeline."""
    workers = Grid(plan).workers(pipeline)
    part = plan.pipelines[pipeline]
    table = make_table(
        plan.schedule,
        workers=workers,
        num_micro_batches=part.num_micro_batches,
        in_flight=part.depths(plan.schedule),
    )
    check_table(table, workers, window=1 + max(peak_in_flight(lane) for lane in table))
    return table


def _build_parts(
    grid: Grid, place: Place, parts: ModelParts, cutting: Cutting, device: torch.device
) -> tuple[dict[int, torch.nn.Module], dict[str, Shard]]:
    """This rank's part of the model for each of its stages, cut and filled."""
    modules: dict[int, torch.nn.Module] = {}
    shards: dict[str, Shard] = {}
    for number in place.stages:
        module = parts.build(grid.pipeline(place).stages[number])
        found = cut_parameters(module, cutting, device=device)
        for name, parameter in module.named_parameters():
            with torch.no_grad():
                parameter.copy_(found[name].local(parts.initial(name, found[name].shape)))
        _tie(module, modules)
        shards |= found
        modules[number] = module
    return modules, shards


def _tie(module: torch.nn.Module, others: Mapping[int, torch.nn.Module]) -> None:
    """Let two stages of one rank that both hold the tied embedding share it."""
    for other in others.values():
        if "embedding" in module._modules and "embedding" in other._modules:
            module._modules["embedding"].weight = other._modules["embedding"].weight  # pyright: ignore


def _stages_of(bucket: FlatBucket, modules: Mapping[int, torch.nn.Module]) -> frozenset[int]:
    """The stages of this rank whose backwards add to a bucket's gradient."""
    return frozenset(
        stage
        for stage, module in modules.items()
        if any(name in bucket.parameters for name, _ in module.named_parameters())
    )


def _state(plan: Plan, bucket: FlatBucket, groups: Groups, stages: Iterable[StagePlan]) -> BucketState:
    """The optimizer state of a bucket that `stages` of this rank hold."""
    offload = max(stage.optimizer_offload for stage in stages)
    if plan.optimizer_sharding:
        return SharedState(bucket, groups, plan.optimizer_shares, offload=offload)
    return WholeState(bucket, groups, offload=offload)


def _flatten(
    grid: Grid, rank: int, parameters: dict[str, torch.nn.Parameter], shards: Mapping[str, Shard]
) -> list[FlatBucket]:
    flat: list[FlatBucket] = []
    for bucket in grid.buckets:
        held = {name: p for name, p in parameters.items() if unit_of(name) in bucket.units}
        if held and bucket.slices_of(rank):
            flat.append(FlatBucket(bucket, held, shards, rank=rank))
    assert sum(len(bucket.parameters) for bucket in flat) == len(parameters)
    return flat
