"""Builds this rank's trainer from a job, with initial weights or those of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import torch

from yuan_train.checkpoint.load import (
    WEIGHTS,
    Checkpoint,
    LocalShard,
    holds_optimizer_state,
    load_parts,
    load_tensors,
)
from yuan_train.config.model import ModelConfig, sharding_of
from yuan_train.config.plan import Plan, StagePlan
from yuan_train.config.run import RunConfig
from yuan_train.models.transformer import Transformer, compile_blocks, initial_rows
from yuan_train.parallel.apply import InitialRows, ModelParts, RankRuntime, parallelize
from yuan_train.parallel.copies import ActivationTiers, ParameterPages
from yuan_train.parallel.device import Device, make_links
from yuan_train.parallel.executor import Executor, Stopwatch
from yuan_train.parallel.grid import Grid
from yuan_train.parallel.shard import TensorBox, box_views
from yuan_train.parallel.zero import STATES, EngineOptions
from yuan_train.train.agreement import settle_forms
from yuan_train.train.engine import ExpertLoad, Progress, routers_of
from yuan_train.train.job import Job
from yuan_train.train.stage import (
    Feed,
    Objective,
    PagedRunner,
    PairLoss,
    Passes,
    Share,
    StageRunner,
    StageSettings,
    resets_after,
    stage_needs,
)
from yuan_train.train.step import Optimizer, Trainer

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def build_engine(job: Job) -> tuple[Job, Trainer, Progress]:
    """Build our own engine; see `engine.BuildEngine`."""
    return job, *build(job)


def build(
    job: Job, *, feed: Passes | None = None, objective: Objective | None = None, trained: bool = True
) -> tuple[Trainer, Progress]:
    """This rank's trainer and the progress to start from; with the checkpoint's state if the job has one.

    `feed` has the micro-batches (None: those of the job's data), `objective` is the loss (None: the run's).
    Not `trained`: it only runs forward, and its weights are to be filled.
    Collective over all ranks. Raises CheckpointError if the checkpoint cannot be read.
    """
    run, plan, rank = job.run, job.plan, job.position.rank
    dtype = DTYPES[run.train.precision]
    compile = compile_part if run.train.compile else None
    initial = _initial(job) if trained else None
    parts = model_parts(run.model, dtype, initial=initial, compile=compile)
    options = EngineOptions(
        dtype=dtype,
        timeout_seconds=run.train.timeout,
        startup_timeout_seconds=run.train.startup_timeout,
        bucket_size=run.optimizer.bucket_size,
        reduce_dtype=torch.bfloat16 if run.optimizer.reduce_dtype == "bf16" else None,
        disk_directory=run.memory.disk_directory,
        trained=trained,
    )
    runtime = build_runtime(plan, rank, parts, job.device, options)
    resets = run.data.resets
    if feed is None:
        # What its tokenizer tells. A row of a pair is one document, whatever tokens it holds.
        resets = resets and job.tokenizer is not None and not run.objective.reads_pairs
        share = _share(job, runtime, resets=resets)
        feed = Feed(share)
    pair_loss = PairLoss(run.objective, device=job.device.torch) if run.objective.reads_pairs else None
    stopwatch = Stopwatch(job.device, simulated=runtime.grid.simulated(rank))
    runtime.reducer.catch_up = stopwatch.catch_up
    for state in runtime.states:
        state.pause = stopwatch.paused
    runners = _runners(job, runtime, feed, stopwatch, resets=resets, objective=objective or pair_loss)
    trainer = Trainer(
        runtime=runtime,
        runners=runners,
        optimizer=Optimizer(runtime.states, run.optimizer),
        stopwatch=stopwatch,
        executor=Executor(runners, runtime.bridge, stopwatch),
        feed=feed,
        expert_load=ExpertLoad(run.model, runtime, routers_of(runtime)) if run.model.num_experts else None,
        device=job.device,
        pair_loss=pair_loss,
    )
    if trained and job.checkpoint is not None:
        return trainer, restore(job.checkpoint, trainer, run)
    if trained and job.start is not None:
        # As masters of a new run.
        held = job.start.entries
        wanted = trainer.tensors("held", STATES[:1])
        load_tensors(job.start, {name: shard for name, shard in wanted.items() if name in held})
        publish(trainer)
    return trainer, Progress.initial(run)


def _runners(
    job: Job,
    runtime: RankRuntime,
    feed: Passes,
    stopwatch: Stopwatch,
    *,
    resets: bool,
    objective: Objective | None,
) -> dict[int, StageRunner]:
    """What runs each of this rank's stages: with copies of activations and pages of parameters on the host,
    where the plan has some there."""
    # Each has links of its own; a simulated card has simulated ones.
    card = job.plan.device_type(job.position.rank)
    rate = card.host_link if card is not None and card.slowdown is not None else None
    links = partial(make_links, job.device, bytes_per_second=rate, pause=stopwatch.paused)
    tiers = None
    if runtime.copies is not None:
        parameters = [parameter for part in runtime.parts.values() for parameter in part.parameters()]
        tiers = ActivationTiers(runtime.copies, runtime.offloads, parameters, links(), device=job.device)
    found: dict[int, StageRunner] = {}
    for stage, part in runtime.parts.items():
        make: Callable[..., StageRunner] = StageRunner
        if (steps := runtime.pages.get(stage)) is not None:
            pages = ParameterPages(steps.buckets, steps.paging.slots, links(), device=job.device)
            make = partial(PagedRunner, pages=pages, steps=steps)
        settings = StageSettings(
            number=stage,
            micro_batch_size=runtime.grid.pipeline(runtime.coord).micro_batch_size,
            seed=job.run.train.seed,
            resets=resets,
        )
        own = {"device": job.device, "deferred": runtime.deferred[stage]}
        found[stage] = make(cast(Transformer, part), feed, settings, **own, objective=objective, tiers=tiers)
    return found


def build_runtime(
    plan: Plan, rank: int, parts: ModelParts, device: Device, options: EngineOptions
) -> RankRuntime:
    """A rank's parts of the model, its ops of the forms that all agree on. Collective over all ranks."""
    settle_forms(Grid(plan), rank, device=device, dtype=options.dtype)
    return parallelize(plan, rank, parts, device=device, options=options)


def model_parts(
    model: ModelConfig,
    dtype: torch.dtype,
    *,
    initial: InitialRows | None = None,
    compile: Callable[[torch.nn.Module], None] | None = None,
) -> ModelParts:
    """How a model is built, sharded and initialised. Without `initial` nothing is drawn."""
    return ModelParts(partial(build_part, model, dtype), initial, *sharding_of(model), compile=compile)


def _share(job: Job, runtime: RankRuntime, *, resets: bool) -> Share:
    """What this rank reads of each batch: what its stages need, of the micro-batches that it runs."""
    needs = {
        stage: stage_needs(cast(Transformer, part), resets=resets) for stage, part in runtime.parts.items()
    }
    forwards = [step for step in runtime.evaluation_program if step.kind == "forward"]
    return Share(
        first_sequence=runtime.grid.first_sequence(runtime.coord),
        micro_batch_size=runtime.grid.pipeline(runtime.coord).micro_batch_size,
        takers=Counter(step.micro_batch for step in forwards if any(needs[step.stage])),
        with_tokens=any(tokens for tokens, _ in needs.values()),
        with_targets=frozenset(step.micro_batch for step in forwards if needs[step.stage][1]),
        resets=resets_after(job.run.data, job.tokenizer.eod_id if job.tokenizer and resets else None),
        device=job.device,
    )


def _initial(job: Job) -> InitialRows | None:
    """Draws what no checkpoint fills; None if one fills everything."""
    if job.checkpoint is not None:
        return None
    draw = partial(initial_rows, job.run.model, seed=job.run.train.seed)
    if job.start is None:
        return draw
    held = job.start.entries

    def draw_missing(
        name: str, shape: tuple[int, ...], *, wanted: Callable[[int, int], bool]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        return iter(()) if f"{WEIGHTS}.{name}" in held else draw(name, shape, wanted=wanted)

    return draw_missing


def load_runtime(checkpoint: Checkpoint, runtime: RankRuntime) -> None:
    """Fill this rank's parts of a model that only runs forward; not collective. Raises CheckpointError."""

    def shard_of(name: str, master: torch.Tensor) -> LocalShard:
        shard = runtime.shards[name]
        return LocalShard(torch.Size(shard.shape), tuple(box_views(shard, master)))

    load_parts(checkpoint, own_weights(runtime), shard_of)
    for part in runtime.parts.values():
        # Biases of routers, which every rank has whole.
        for name, buffer in part.named_buffers():
            whole = LocalShard(buffer.shape, (TensorBox((0,), tuple(buffer.shape), buffer),))
            load_tensors(checkpoint, {f"{WEIGHTS}.{name}": whole}, no_dist=True)


def own_weights(runtime: RankRuntime) -> dict[str, torch.Tensor]:
    """This rank's part of each parameter, by global name."""
    parts = runtime.parts.values()
    return {name: p.detach() for part in parts for name, p in part.named_parameters() if p.numel()}


def publish(trainer: Trainer) -> None:
    """Make the weights of the masters on all ranks. Collective."""
    for state in trainer.runtime.states:
        state.start_weight_sync()
        state.finish_weight_sync()


def build_part(model: ModelConfig, dtype: torch.dtype, stage: StagePlan) -> Transformer:
    """One stage's part of the model, on the meta device."""
    with torch.device("meta"):
        return Transformer(
            model,
            layers=stage.layers,
            embedding=stage.embedding,
            head=stage.head,
            recompute=stage.recompute,
            recompute_layers=stage.recompute_layers,
            dtype=dtype,
        )


def compile_part(part: torch.nn.Module) -> None:
    """Compile the blocks of a stage's part of the model."""
    compile_blocks(cast(Transformer, part))


def restore(checkpoint: Checkpoint, trainer: Trainer, run: RunConfig) -> Progress:
    """Fill weights and optimizer state from a checkpoint; collective over all ranks."""
    progress = Progress.from_state(checkpoint.state, run)
    trainer.optimizer.set_step(progress.step - progress.skipped)
    kinds = STATES if holds_optimizer_state(checkpoint) else STATES[:1]
    tensors = trainer.tensors("held", kinds)
    if checkpoint.model.balance != "bias":
        tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith(".router.bias")}
    load_tensors(checkpoint, tensors)
    publish(trainer)
    return progress
