"""Builds what one rank of a plan runs: its modules, flat buckets, process groups and rank program.

Experts that the ranks of a group share: each runs its own; all else is whole on each rank.

All ranks hold the same hidden state, so their routers choose alike and no choice is sent. A rank's experts
give the outputs of the tokens that chose them, and zeros elsewhere; one all-reduce adds them up. With two
experts for a token the sum has two terms, in any order the same bits: the result is that of one process.

In the backward one all-reduce adds up the gradients of the experts' input, and a small one those of the
weights [T, K] that the router gives. The router's own gradient is added after that, by each rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.config.errors import PlanError
from yuan_train.config.model import is_trained
from yuan_train.config.plan import Plan, StagePlan, expert_ranges
from yuan_train.parallel.copies import StagePages, page_slab, stage_pages
from yuan_train.parallel.device import Device, HostSlab
from yuan_train.parallel.executor import Boundary, Bridge
from yuan_train.parallel.gradients import (
    DeferredGrads,
    FlatBucket,
    FlatParameter,
    GradReducer,
    take_over_weight_grads,
)
from yuan_train.parallel.grid import Grid, RankCoord, unit_of
from yuan_train.parallel.groups import Groups, make_groups
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.tensor import (
    ShardSpec,
    apply_tensor_parallel,
    copy_to_tp,
    reduce_from_tp,
    reduce_partial,
    shard_parameters,
)
from yuan_train.parallel.zero import EngineOptions, OwnedState, make_states
from yuan_train.schedule.check import check_copies, check_schedule
from yuan_train.schedule.copies import Offloads, offloads_of, with_copies
from yuan_train.schedule.schedules import (
    arrivals_proven,
    forward_only,
    make_schedule,
    peak_in_flight,
    post_early,
)
from yuan_train.schedule.step import RankProgram, Schedule


class InitialRows(Protocol):
    """Draws the initial value of a parameter, given its global name and global shape."""

    def __call__(
        self, name: str, shape: tuple[int, ...], *, wanted: Callable[[int, int], bool]
    ) -> Iterable[tuple[int, torch.Tensor]]:
        """Its rows in blocks, as (first row, rows [n, ...]), without blocks [first, last) not `wanted`."""
        ...


@dataclass(frozen=True)
class ModelParts:
    """How a model is built, sharded and initialised: all that `parallel` knows of it, by parameter names."""

    build: Callable[[StagePlan], torch.nn.Module]
    """Builds one stage's part, on the meta device."""
    initial: InitialRows | None
    """None: nothing is drawn, because all weights are loaded next."""
    sharding: Mapping[str, str]
    """Sharding style by pattern of module names; see `shard.find_shard`."""
    row_blocks: Mapping[str, int]
    """Number of matrices stacked in a weight, by pattern of module names; 1 where no pattern matches."""
    compile: Callable[[torch.nn.Module], None] | None = None
    """Compiles a stage's part in place, except what runs between its units. None: nothing is compiled."""


@dataclass(frozen=True)
class RankRuntime:
    """What one rank runs: its coordinates, rank programs, modules, buckets, groups and bridge."""

    grid: Grid
    coord: RankCoord
    program: RankProgram
    evaluation_program: RankProgram
    parts: Mapping[int, torch.nn.Module]
    """This rank's part of the model, by stage."""
    deferred: Mapping[int, DeferredGrads]
    """By stage: the weight gradients that a split backward defers."""
    shards: Mapping[str, Shard]
    """The shard that this rank holds of each parameter, by global name."""
    states: tuple[OwnedState, ...]
    buckets: tuple[FlatBucket, ...]
    """Of what is trained."""
    frozen: tuple[FlatBucket, ...]
    """Weights that are not: all but the adapters of a model that has some."""
    reducer: GradReducer
    """Starts the gradient reductions of `states` inside the program."""
    groups: Groups
    bridge: Bridge | None
    """None in a pipeline of one stage."""
    offloads: Offloads
    """What this rank's stages offload of their activations."""
    copies: RankProgram | None
    """`program` in parts, with the copies of activations; None if nothing is offloaded."""
    pages: Mapping[int, StagePages]
    """Of this rank's stages whose parameters are in pages of the host."""


def take_apart(runtime: RankRuntime, keeping: Iterable[Tensor]) -> None:
    """Destroy the groups, and free the memory of weights, gradients and optimizer state, whoever refers to it
    still, but for those buffers of which there are views in `keeping`. Nothing may be under way on any rank;
    not collective."""
    runtime.reducer.close()
    runtime.groups.close()
    kept = {tensor.untyped_storage().data_ptr() for tensor in keeping}
    buckets = (*runtime.buckets, *runtime.frozen)
    shards = (shard for state in runtime.states for shard in state.shards)
    buffers = [buffer for bucket in buckets for buffer in (bucket.weights, bucket.gradient)]
    buffers += [b for s in shards for b in (s.master, s.gradient, s.exp_avg, s.exp_avg_sq)]
    for storage in (buffer.untyped_storage() for buffer in buffers):
        if storage.data_ptr() not in kept:
            storage.resize_(0)


def parallelize(
    plan: Plan, rank: int, parts: ModelParts, *, device: Device, options: EngineOptions
) -> RankRuntime:
    """Build this rank's parts of the model, move their weights into flat buckets, create its process groups.

    Collective over all ranks. Raises TrainingError if a link or a group fails, PlanError for a schedule that
    cannot run, HostMemoryError and DiskError if these have not enough room.
    """
    grid = Grid(plan, options.bucket_size)
    coord = grid.coords[rank]
    first_use = options.startup_timeout_seconds
    groups = make_groups(
        grid, device=device, timeout_seconds=options.timeout_seconds, startup_timeout_seconds=first_use
    )
    width, splits = len(grid.replica(coord)), plan.sequence_parallel
    spec = ShardSpec(parts.sharding, parts.row_blocks, coord.tensor_rank, width, splits_tokens=splits)
    modules, shards = _build_parts(grid, coord, parts, spec, device.torch)
    deferred = _add_collectives(grid, coord, modules, spec, groups)
    added = [
        take_over_weight_grads(m, deferred[s], parts.sharding, parts.compile) for s, m in modules.items()
    ]
    buckets, frozen = _flatten_parts(grid, rank, modules, shards, device, trained=options.trained)
    states = _make_states(grid, coord, modules, buckets, groups, options, device) if options.trained else ()
    hidden = grid.pipeline(coord).micro_batch_size, plan.sequence_length, plan.model.hidden_size
    boundary = Boundary(hidden, options.dtype, device.torch)
    program, evaluation, bridge = _make_programs(grid, coord, groups, boundary)
    pages = stage_pages(grid, coord, (program, evaluation), buckets)
    buckets_of = _buckets_of(buckets)
    reducer = GradReducer(
        program,
        {s: {n: p for n, p in part.named_parameters() if n in buckets_of} for s, part in modules.items()},
        buckets_of,
        deferred=set().union(*added),
        late=pages.keys(),
        start=_start_reduction(grid, coord, buckets, states, spec, groups),
    )
    offloads = offloads_of({s: grid.pipeline(coord).stages[s] for s in coord.stages})
    return RankRuntime(
        grid=grid,
        coord=coord,
        program=program,
        evaluation_program=evaluation,
        parts=modules,
        deferred=deferred,
        shards=shards,
        states=states,
        buckets=tuple(buckets),
        frozen=tuple(frozen),
        reducer=reducer,
        groups=groups,
        bridge=bridge,
        offloads=offloads,
        copies=_copies_of(program, offloads) if offloads else None,
        pages=pages,
    )


def _buckets_of(buckets: Sequence[FlatBucket]) -> dict[str, list[int]]:
    """The numbers of the buckets that have a part of each parameter, by name."""
    found: dict[str, list[int]] = {}
    for number, bucket in enumerate(buckets):
        for name in bucket.parameters:
            found.setdefault(name, []).append(number)
    return found


def _add_collectives(
    grid: Grid, coord: RankCoord, modules: Mapping[int, torch.nn.Module], spec: ShardSpec, groups: Groups
) -> dict[int, DeferredGrads]:
    """Add the collectives of this rank's group to its parts: of shared experts, or of tensor parallelism.

    Returns where each part's weight gradients wait: under tensor parallelism also beside those collectives.
    """
    deferred = {number: DeferredGrads() for number in modules}
    if groups.tensor is None:
        return deferred
    for number, module in modules.items():
        ranges = expert_ranges(grid.plan.model, grid.pipeline(coord).stages[number])
        if ranges is not None:
            apply_expert_parallel(module, groups.tensor, first_expert=ranges[coord.tensor_rank][0])
        else:
            deferred[number] = DeferredGrads(reduces_inputs=True)
            apply_tensor_parallel(module, spec, groups.tensor, meanwhile=deferred[number].run_queued)
    return deferred


def _start_reduction(
    grid: Grid,
    coord: RankCoord,
    buckets: Sequence[FlatBucket],
    states: Sequence[OwnedState],
    spec: ShardSpec,
    groups: Groups,
) -> Callable[[int], None]:
    """Starts the reduction of a bucket, by number, when all its gradients are there."""
    shares = grid.plan.divides_experts
    # What ranks that share experts hold in common, the first of them adds; see `Grid.buckets`.
    adds_zeros = shares and coord.tensor_rank > 0

    def start(number: int) -> None:
        bucket = buckets[number]
        # Ranks that share experts apply a norm to all heads, each of them.
        if groups.tensor is not None and not shares:
            reduce_partial(bucket, spec, groups.tensor)
        if adds_zeros and not any(shard.rows for shard in bucket.shards.values()):
            bucket.gradient.zero_()
        # What was reduced meanwhile begins to go down to the host, where the host steps it.
        for state in states[number + 1 :]:
            state.take_if_reduced()
        states[number].start_grad_reduce()

    return start


def _make_programs(
    grid: Grid, coord: RankCoord, groups: Groups, boundary: Boundary | None
) -> tuple[RankProgram, RankProgram, Bridge | None]:
    """This rank's programs for training and evaluation, and the bridge of a pipeline of several stages."""
    pipeline, workers = grid.pipeline(coord), grid.workers(coord.pipeline)
    schedule = pipeline_schedule(grid.plan, coord.pipeline)
    evaluation = forward_only(
        workers=workers, num_micro_batches=pipeline.num_micro_batches, group=pipeline.page_group
    )
    check_schedule(evaluation, workers)
    programs = schedule[coord.worker], evaluation[coord.worker]
    if len(pipeline.stages) == 1:
        return *programs, None
    assert boundary is not None
    bridge = make_bridge(grid, coord, groups, boundary, schedule)
    program, evaluation_program = (post_early(p, workers, bridge.holds_up_nothing) for p in programs)
    return program, evaluation_program, bridge


def make_lane(runtime: RankRuntime, micro_batches: Sequence[int]) -> RankRuntime:
    """The runtime with programs of so many micro-batches of each pipeline: for a batch of fewer rows.

    `runtime.reducer` follows one program at a time. Raises PlanError for a schedule that cannot run.
    """
    plan = runtime.grid.plan
    pipelines = tuple(
        replace(pipeline, num_micro_batches=count)
        for pipeline, count in zip(plan.pipelines, micro_batches, strict=True)
    )
    rows = sum(pipeline.num_sequences for pipeline in pipelines)
    grid = Grid(replace(plan, pipelines=pipelines, global_batch_size=rows))
    # Every rank checks every pipeline, so that all of them raise or none does.
    for number in range(len(pipelines)):
        pipeline_schedule(grid.plan, number)
    boundary = runtime.bridge.boundary if runtime.bridge is not None else None
    program, evaluation, bridge = _make_programs(grid, runtime.coord, runtime.groups, boundary)
    return replace(runtime, program=program, evaluation_program=evaluation, bridge=bridge)


def make_forward_lane(
    runtime: RankRuntime, num_micro_batches: int, boundary: Boundary
) -> tuple[RankProgram, Bridge | None]:
    """A program that forwards so many micro-batches through this rank's pipeline, and its bridge."""
    grid, coord = runtime.grid, runtime.coord
    workers = grid.workers(coord.pipeline)
    schedule = forward_only(workers=workers, num_micro_batches=num_micro_batches)
    check_schedule(schedule, workers)
    program = schedule[coord.worker]
    if len(workers) == 1:
        return program, None
    bridge = make_bridge(grid, coord, runtime.groups, boundary, schedule)
    return post_early(program, workers, bridge.holds_up_nothing), bridge


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
    shape = Grid(plan).shape(pipeline)
    schedule = make_schedule(**shape._asdict())
    try:
        check_schedule(schedule, shape.workers)
    except ValueError as error:
        fault = f"pipelines[{pipeline}]: schedule {plan.schedule} cannot run: {error}"
        raise PlanError(f"{fault}; plan again, or with another schedule") from error
    return schedule


def _copies_of(program: RankProgram, offloads: Offloads) -> RankProgram:
    """A rank program in parts, with copies."""
    copies = with_copies(program, offloads)
    check_copies(copies, offloads)
    return copies


def _build_parts(
    grid: Grid, coord: RankCoord, parts: ModelParts, spec: ShardSpec, device: torch.device
) -> tuple[dict[int, torch.nn.Module], dict[str, Shard]]:
    """This rank's part of the model for each of its stages, sharded and initialised."""
    modules: dict[int, torch.nn.Module] = {}
    shards: dict[str, Shard] = {}
    for number in coord.stages:
        stage = grid.pipeline(coord).stages[number]
        module = parts.build(stage)
        experts = _experts_of(grid.plan, stage, coord.tensor_rank)
        own_spec = replace(spec, experts=experts)
        found = shard_parameters(module, own_spec, device=device, on_host=grid.paged_units)
        if parts.initial is not None:
            for name, parameter in module.named_parameters():
                init_shard(name, parameter, found[name], parts.initial)
        for other in modules.values():
            # The stages of one rank that both hold the tied embedding share it.
            if "embedding" in module._modules and "embedding" in other._modules:
                module._modules["embedding"].weight = other._modules["embedding"].weight  # pyright: ignore
        shards |= found
        modules[number] = module
    return modules, shards


def _experts_of(plan: Plan, stage: StagePlan, tensor_rank: int) -> tuple[int, int] | None:
    """The experts of each layer that a rank of a stage holds; None if no ranks of the plan share any.

    A rank that shares with none has all: its shards are then like those of the ranks that it reduces with.
    """
    if not plan.divides_experts:
        return None
    ranges = expert_ranges(plan.model, stage)
    return (0, plan.model.num_experts) if ranges is None else ranges[tensor_rank]


@torch.no_grad()
def init_shard(name: str, parameter: torch.Tensor, shard: Shard, initial: InitialRows) -> None:
    """Fill this rank's shard of a parameter with its initial values."""
    for first, rows in initial(name, shard.shape, wanted=shard.holds_rows):
        shard.fill_rows(parameter, first, rows)


def _await_weights(
    module: torch.nn.Module, states: Sequence[OwnedState], buckets_of: Mapping[str, Collection[int]]
) -> None:
    """Make the forward of each unit of a stage's part wait until its stepped weights are there."""
    names = [name for name, _ in module.named_parameters() if name in buckets_of]
    needed = {(path, number) for name in names for path in _entries(name) for number in buckets_of[name]}
    modules = dict(module.named_modules())
    for path, number in sorted(needed):
        # A part without an embedding lookup may hold a tied embedding: its head uses it.
        if path in modules:
            finish = states[number].finish_weight_sync
            modules[path].register_forward_pre_hook(lambda *_, finish=finish: finish())


def _entries(parameter: str) -> tuple[str, ...]:
    """The modules that run first, of those that use a parameter."""
    unit = unit_of(parameter)
    return {"head": ("final_norm",), "embedding": ("embedding", "final_norm")}.get(unit, (unit,))


def _flatten_parts(
    grid: Grid,
    rank: int,
    modules: Mapping[int, torch.nn.Module],
    shards: Mapping[str, Shard],
    device: Device,
    *,
    trained: bool,
) -> tuple[list[FlatBucket], list[FlatBucket]]:
    """A rank's buckets of what is trained, and of what is frozen: all but adapters, if a model has some."""
    # A rank may hold none of a layer's experts: their weights are empty.
    held = {n: p for module in modules.values() for n, p in module.named_parameters() if p.numel()}
    slab = page_slab(held, shards, grid.paged_units, device)
    learning = {name for name in held if is_trained(grid.plan.model, name)}
    base = {name: p for name, p in held.items() if name not in learning}
    frozen = _flatten(grid, rank, base, shards, slab, trained=False)
    for bucket in frozen:
        bucket.freeze()
    adapted = {name: p for name, p in held.items() if name in learning}
    return _flatten(grid, rank, adapted, shards, slab, trained=trained), frozen


def _make_states(
    grid: Grid,
    coord: RankCoord,
    modules: Mapping[int, torch.nn.Module],
    buckets: Sequence[FlatBucket],
    groups: Groups,
    options: EngineOptions,
    device: Device,
) -> tuple[OwnedState, ...]:
    """The optimizer state of a rank's buckets; the forward of a unit waits for the weights it steps."""
    names = {stage: {name for name, _ in module.named_parameters()} for stage, module in modules.items()}
    own = grid.pipeline(coord).stages
    stages = [
        [own[s] for s, held in names.items() if not held.isdisjoint(bucket.parameters)] for bucket in buckets
    ]
    states = make_states(grid.plan, buckets, groups, stages, options, device)
    buckets_of = _buckets_of(buckets)
    for module in modules.values():
        _await_weights(module, states, buckets_of)
    return states


def _flatten(
    grid: Grid,
    rank: int,
    parameters: dict[str, torch.nn.Parameter],
    shards: Mapping[str, Shard],
    slab: HostSlab | None,
    *,
    trained: bool,
) -> list[FlatBucket]:
    """The buckets of a rank; pages in `slab`. Not `trained`: without gradients."""
    flat: list[FlatBucket] = []
    whole: dict[str, FlatParameter] = {}
    divided, apart = grid.layers_in_halves, grid.plan.divides_experts
    for bucket in grid.buckets:
        held = {n: p for n, p in parameters.items() if unit_of(n, divided, apart=apart) in bucket.units}
        if not held or not bucket.slices_of(rank):
            continue
        if bucket.experts is None:
            paged = not grid.paged_units.isdisjoint(bucket.units)
            flat.append(FlatBucket(bucket, held, shards, rank=rank, slab=slab if paged else None))
            if not trained:
                # One by one: no two buckets' gradients are in memory at once.
                flat[-1].drop_gradient()
            continue
        for name, parameter in held.items():
            # One parameter a bucket: its rows lie together, those of two parameters do not.
            if name not in whole:
                whole[name] = FlatParameter(parameter, shards[name])
            own = {name: replace(shards[name], rows=bucket.experts)}
            flat.append(FlatBucket(bucket, {name: parameter}, own, rank=rank, whole=whole[name]))
    assert {name for bucket in flat for name in bucket.parameters} == parameters.keys()
    return flat


def apply_expert_parallel(model: Any, group: dist.ProcessGroup, *, first_expert: int) -> None:
    """Add the collectives of a group to the experts of a model, of which this rank holds a range."""
    for module in model.modules():
        if hasattr(module, "first_expert"):
            module.first_expert = first_expert
            module.forward = _shared(module, module.forward, group)


def remove_experts(model: Any) -> None:
    """Let a model run as on a rank that holds no experts, without a group: they add zeros."""
    for module in model.modules():
        if hasattr(module, "first_expert"):
            module.forward = lambda u_TH, choice, weights_TK, *policy: _Nothing.apply(u_TH, weights_TK)


def _shared(module: Any, own: Callable[..., Tensor], group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def forward(u_TH: Tensor, choice: Any, weights_TK: Tensor, *policy: Any) -> Tensor:
        u_TH, weights_TK = copy_to_tp(u_TH, group), copy_to_tp(weights_TK, group)
        if module.up.weight.shape[0]:
            part_TH = own(u_TH, choice, weights_TK, *policy)
        else:
            part_TH: Tensor = _Nothing.apply(u_TH, weights_TK)  # pyright: ignore[reportAssignmentType]
        return reduce_from_tp(part_TH, group)

    return forward


class _Nothing(torch.autograd.Function):
    """What a rank without experts adds: zeros, whose gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, u_TH: Tensor, weights_TK: Tensor) -> Tensor:
        ctx.shapes = u_TH.shape, weights_TK.shape
        ctx.dtypes = u_TH.dtype, weights_TK.dtype
        return torch.zeros_like(u_TH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        du, dweights = (
            gradients[0].new_zeros(shape, dtype=dtype)
            for shape, dtype in zip(ctx.shapes, ctx.dtypes, strict=True)
        )
        return du, dweights
