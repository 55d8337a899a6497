"""Builds what one rank of a plan runs: its modules, flat buckets, process groups and rank program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from yuan_train.config.errors import PlanError
from yuan_train.config.plan import Plan, StagePlan
from yuan_train.parallel.bridge import Boundary, Bridge
from yuan_train.parallel.deferred import DeferredWeightGrads, split_backward
from yuan_train.parallel.gradients import FlatBucket, grad_reduce_after
from yuan_train.parallel.grid import Grid, RankCoord, unit_of
from yuan_train.parallel.groups import Groups, make_groups
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.tensor import ShardSpec, apply_tensor_parallel, shard_parameters
from yuan_train.parallel.zero import OwnedState
from yuan_train.schedule.check import check_schedule, peak_in_flight
from yuan_train.schedule.messages import arrivals_proven, post_early
from yuan_train.schedule.schedules import forward_only, make_schedule
from yuan_train.schedule.step import RankProgram, Schedule, Step


@dataclass(frozen=True)
class ModelParts:
    """How a model is built, sharded and initialised: all that `parallel` knows of it, by parameter names."""

    build: Callable[[StagePlan], torch.nn.Module]
    """Builds one stage's part, on the meta device."""
    initial: Callable[[str, tuple[int, ...]], torch.Tensor]
    """The initial value of a parameter, of its global name and global shape."""
    sharding: Mapping[str, str]
    """Sharding style by pattern of module names; see `shard.find_shard`."""
    row_blocks: Mapping[str, int]
    """Number of matrices stacked in a weight, by pattern of module names; 1 where no pattern matches."""


@dataclass(frozen=True)
class RankRuntime:
    """What one rank runs: its coordinates, rank programs, modules, buckets, groups and bridge."""

    grid: Grid
    coord: RankCoord
    program: RankProgram
    evaluation_program: RankProgram
    parts: Mapping[int, torch.nn.Module]
    """This rank's part of the model, by stage."""
    deferred: Mapping[int, DeferredWeightGrads]
    """By stage: the weight gradients that a split backward defers."""
    shards: Mapping[str, Shard]
    """The shard that this rank holds of each parameter, by global name."""
    states: tuple[OwnedState, ...]
    buckets: tuple[FlatBucket, ...]
    grad_reduce_after: Mapping[Step, tuple[int, ...]]
    """The states (indices into `states`) whose gradient reductions start after a step of the program."""
    groups: Groups
    bridge: Bridge | None
    """None in a pipeline of one stage."""

    def start_grad_reduces(self, step: Step) -> None:
        """Start the gradient reductions that follow a step of the rank program; does not wait."""
        for number in self.grad_reduce_after.get(step, ()):
            self.states[number].start_grad_reduce()


def parallelize(
    plan: Plan,
    rank: int,
    parts: ModelParts,
    *,
    device: torch.device,
    dtype: torch.dtype,
    timeout_seconds: float = 600.0,
    startup_timeout_seconds: float | None = None,
) -> RankRuntime:
    """Build this rank's parts of the model, move their weights into flat buckets, create its process groups.

    `dtype` is that of the messages between stages; `timeout_seconds` is how long a rank waits for another,
    `startup_timeout_seconds` (None: the same) how long in the first use of a link or a group.
    Collective over all ranks. Raises TrainingError if a link or a group fails, PlanError for a schedule that
    cannot run.
    """
    grid = Grid(plan)
    coord = grid.coords[rank]
    groups = make_groups(
        grid,
        device=device,
        timeout_seconds=timeout_seconds,
        startup_timeout_seconds=startup_timeout_seconds,
    )
    pipeline = grid.pipeline(coord)
    spec = ShardSpec(parts.sharding, parts.row_blocks, coord.tensor_rank, len(grid.replica(coord)))
    modules, shards = _build_parts(grid, coord, parts, spec, device)
    if groups.tensor is not None:
        for module in modules.values():
            apply_tensor_parallel(module, spec, groups.tensor)
    deferred = {stage: DeferredWeightGrads() for stage in modules}
    if plan.schedule == "zero_bubble":
        for stage, module in modules.items():
            split_backward(module, deferred[stage], parts.sharding)
    parameters = {name: p for module in modules.values() for name, p in module.named_parameters()}
    buckets = _flatten(grid, rank, parameters, shards)
    stages_of = [_stages_of(bucket, modules) for bucket in buckets]
    workers = grid.workers(coord.pipeline)
    schedule = pipeline_schedule(plan, coord.pipeline)
    shape = (pipeline.micro_batch_size, plan.sequence_length, plan.model.hidden_size)
    evaluation = forward_only(workers=workers, num_micro_batches=pipeline.num_micro_batches)
    check_schedule(evaluation, workers)
    bridge = None
    program, evaluation_program = schedule[coord.worker], evaluation[coord.worker]
    if len(pipeline.stages) > 1:
        bridge = make_bridge(grid, coord, groups, Boundary(shape, dtype, device), schedule)
        program = post_early(program, workers, bridge.holds_up_nothing)
        evaluation_program = post_early(evaluation_program, workers, bridge.holds_up_nothing)
    return RankRuntime(
        grid=grid,
        coord=coord,
        program=program,
        evaluation_program=evaluation_program,
        parts=modules,
        deferred=deferred,
        shards=shards,
        states=tuple(
            _state(plan, bucket, groups, [pipeline.stages[s] for s in stages])
            for bucket, stages in zip(buckets, stages_of, strict=True)
        ),
        buckets=tuple(buckets),
        grad_reduce_after=grad_reduce_after(program, stages_of),
        groups=groups,
        bridge=bridge,
    )


def make_bridge(
    grid: Grid, coord: RankCoord, groups: Groups, boundary: Boundary, schedule: Schedule
) -> Bridge:
    """The bridge of a rank that runs its program of a pipeline's schedule."""
    return Bridge(
        grid,
        coord,
        groups,
        boundary,
        proofs=arrivals_proven(schedule, grid.workers(coord.pipeline), coord.worker),
        window=1 + max(peak_in_flight(program) for program in schedule),
    )


def pipeline_schedule(plan: Plan, pipeline: int) -> Schedule:
    """The schedule of one pipeline. Raises PlanError, listing every fault, if it cannot run."""
    workers = Grid(plan).workers(pipeline)
    part = plan.pipelines[pipeline]
    schedule = make_schedule(
        plan.schedule,
        workers=workers,
        num_micro_batches=part.num_micro_batches,
        in_flight=part.depths(plan.schedule),
    )
    try:
        check_schedule(schedule, workers)
    except ValueError as error:
        fault = f"pipelines[{pipeline}]: schedule {plan.schedule} cannot run: {error}"
        raise PlanError(f"{fault}; plan again, or with another schedule") from error
    return schedule


def _build_parts(
    grid: Grid, coord: RankCoord, parts: ModelParts, spec: ShardSpec, device: torch.device
) -> tuple[dict[int, torch.nn.Module], dict[str, Shard]]:
    """This rank's part of the model for each of its stages, sharded and initialised."""
    modules: dict[int, torch.nn.Module] = {}
    shards: dict[str, Shard] = {}
    for number in coord.stages:
        module = parts.build(grid.pipeline(coord).stages[number])
        found = shard_parameters(module, spec, device=device)
        for name, parameter in module.named_parameters():
            with torch.no_grad():
                parameter.copy_(found[name].local(parts.initial(name, found[name].shape)))
        _tie(module, modules)
        shards |= found
        modules[number] = module
    return modules, shards


def _tie(module: torch.nn.Module, others: Mapping[int, torch.nn.Module]) -> None:
    """Share the tied embedding between the stages of one rank that both hold it."""
    for other in others.values():
        if "embedding" in module._modules and "embedding" in other._modules:
            module._modules["embedding"].weight = other._modules["embedding"].weight  # pyright: ignore


def _stages_of(bucket: FlatBucket, modules: Mapping[int, torch.nn.Module]) -> frozenset[int]:
    """The stages of this rank whose backwards accumulate into a bucket's gradient."""
    return frozenset(
        stage
        for stage, module in modules.items()
        if any(name in bucket.parameters for name, _ in module.named_parameters())
    )


def _state(plan: Plan, bucket: FlatBucket, groups: Groups, stages: Iterable[StagePlan]) -> OwnedState:
    """The optimizer state of a bucket that `stages` of this rank hold."""
    offload = max(stage.optimizer_offload for stage in stages)
    if plan.optimizer_sharding:
        return OwnedState(bucket, groups, plan.optimizer_shares, offload=offload)
    return OwnedState(bucket, groups, None, offload=offload)


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
