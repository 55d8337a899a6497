"""A training run from files to the last checkpoint. Reads top to bottom: check, build, resume, step, save."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from yuan_train.checkpoint.load import (
    Checkpoint,
    find_checkpoint,
    find_latest,
    holds_optimizer_state,
    load_tensors,
)
from yuan_train.checkpoint.names import WEIGHTS
from yuan_train.checkpoint.parts import Part, snapshot
from yuan_train.checkpoint.save import save_checkpoint
from yuan_train.config.errors import CheckpointError, ConfigError, PlanError, TrainingError
from yuan_train.config.load import dump, write_text
from yuan_train.config.model import ONLY_IN_TRAINING, ModelConfig
from yuan_train.config.plan import (
    Plan,
    StagePlan,
    check_belongs,
    check_precision,
    save_plan,
    single_card_plan,
)
from yuan_train.config.run import RunConfig
from yuan_train.data.loader import Blend, open_corpora
from yuan_train.data.rules import sample_rules
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.model.sharding import ROW_BLOCKS, SHARDING
from yuan_train.model.transformer import Transformer, initial_weight
from yuan_train.parallel.apply import ModelParts, parallelize
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.groups import join, leave, make_save_group, watching
from yuan_train.parallel.zero import STATES
from yuan_train.train.footprint import keep_freed_memory, peak_memory_bytes
from yuan_train.train.metrics import Log, StepMetrics, peak_flops
from yuan_train.train.optimizer import Optimizer, learning_rate
from yuan_train.train.saver import Saver
from yuan_train.train.stage import StageRunner
from yuan_train.train.state import Progress, from_state, to_state
from yuan_train.train.step import StepResult, Trainer, train_step, validation_loss

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Position:
    """This process among those that the launcher started; alone if it started none."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def find_position() -> Position:
    """This process's, as the launcher's environment variables say. Raises ConfigError if they are none."""
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    return Position(rank, world_size, _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world_size))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise ConfigError(f"environment variable {name}: wanted a number, got {text!r}; the launcher sets it")
    return int(text)


@dataclass(frozen=True)
class Job:
    """Everything that a run needs, checked, before any process meets another."""

    run: RunConfig
    plan: Plan
    position: Position
    device: torch.device
    train: Blend
    validation: Blend | None
    tokenizer: Tokenizer | None
    checkpoint: Checkpoint | None


def prepare(run: RunConfig, plan: Plan | None, position: Position) -> Job:
    """Check all that files can tell; the same outcome on every rank. Raises YuanError."""
    plan = plan or single_card_plan(run)
    check_belongs(plan, run)
    check_precision(plan, run)
    if plan.world_size != position.world_size:
        raise PlanError(
            f"the plan has {plan.world_size} ranks, but {position.world_size} "
            f"{'process was' if position.world_size == 1 else 'processes were'} started; start one per rank "
            "(yuan-train launch), or plan for the cards that are there"
        )
    device = choose_device(run.train.device, position)
    if device.type == "cuda" and run.train.precision == "bf16":
        _check_bf16(device)
    slow = plan.device_type(position.rank)
    if device.type == "cuda" and slow is not None and slow.slowdown:
        raise PlanError(
            f"rank {position.rank} is a simulated card (slowdown); those run on a CPU: train.device=cpu"
        )
    tokenizer = Tokenizer.load(run.data.tokenizer) if run.data.tokenizer else None
    if tokenizer is not None and tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: {run.model.vocab_size} rows, but tokenizer {run.data.tokenizer} has "
            f"{tokenizer.vocab_size} pieces; use a larger vocab_size, or the model's own tokenizer"
        )
    train, validation = open_data(run, tokenizer)
    return Job(run, plan, position, device, train, validation, tokenizer, find_resume(run))


def choose_device(wanted: str, position: Position) -> torch.device:
    """The card of this process. Raises ConfigError if `cuda` is asked for and not there."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ConfigError("train.device: cuda is asked for, but torch finds no card; use cpu or auto")
    if wanted == "cpu" or not there:
        return torch.device("cpu")
    if position.local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"this machine has {torch.cuda.device_count()} cards, but {position.local_world_size} processes; "
            "start one per card"
        )
    torch.cuda.set_device(position.local_rank)
    return torch.device("cuda", position.local_rank)


def _check_bf16(device: torch.device) -> None:
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"train.precision: bf16, but {torch.cuda.get_device_name(device)} has no bf16 units; "
            "set train.precision: fp16"
        )


def open_data(run: RunConfig, tokenizer: Tokenizer | None) -> tuple[Blend, Blend | None]:
    """Training and validation samples. Raises DataError."""
    data = run.data
    sources = [(source.prefix, source.weight) for source in data.train]
    length, seed, vocab = data.sequence_length, run.train.seed, run.model.vocab_size
    rules = sample_rules(data, tokenizer)
    train = open_corpora(
        sources, sequence_length=length, seed=seed, vocab_size=vocab, split=data.split, rules=rules
    )
    if data.split is not None:
        return train, open_corpora(
            sources,
            sequence_length=length,
            seed=seed,
            vocab_size=vocab,
            split=data.split,
            part="validation",
            rules=rules,
        )
    if not data.validation:
        return train, None
    held_out = [(source.prefix, source.weight) for source in data.validation]
    return train, open_corpora(
        held_out, sequence_length=length, seed=seed, vocab_size=vocab, part="validation", rules=rules
    )


def find_resume(run: RunConfig) -> Checkpoint | None:
    """The checkpoint to continue from, if any. Raises CheckpointError if it is torn or of another model."""
    config = run.checkpoint
    if config.resume == "never" or (config.resume == "auto" and config.directory is None):
        return None
    if config.resume == "auto":
        assert config.directory is not None
        found = find_latest(config.directory)
    else:
        found = find_checkpoint(config.resume)
    if found is not None:
        check_same_model(found, run.model)
    return found


def check_same_model(checkpoint: Checkpoint, model: ModelConfig) -> None:
    """Raise CheckpointError, with every difference, unless the checkpoint holds this model."""
    saved = checkpoint.model
    wrong = [
        f"{key} {getattr(saved, key)!r} there, {getattr(model, key)!r} here"
        for key in ModelConfig.__dataclass_fields__
        if key not in ("name", "max_sequence_length", "init_std", *ONLY_IN_TRAINING)
        and getattr(saved, key) != getattr(model, key)
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.path} holds another model: {'; '.join(wrong)}. "
            "Give the model it was trained with, or another checkpoint.directory"
        )


def train(job: Job) -> None:
    """Run a job to its last step, or until SIGTERM; collective over all ranks. Raises YuanError."""
    if job.position.world_size > 1:
        join(device=job.device, timeout_seconds=job.run.train.timeout)
    keep_freed_memory(job.device)
    try:
        trainer, progress = build(job)
        with (
            _heed_sigterm() as asked,
            _open_log(job, progress) as log,
            _make_saver(job, trainer, log) as saver,
        ):
            _run_steps(job, trainer, progress, log, saver, asked)
    finally:
        leave()


def build(job: Job) -> tuple[Trainer, Progress]:
    """This rank's parts of the model, with new weights or those of the checkpoint."""
    run, plan, rank = job.run, job.plan, job.position.rank
    dtype = DTYPES[run.train.precision]
    parts = ModelParts(
        build=partial(_build_part, run.model, dtype),
        initial=partial(initial_weight, run.model, seed=run.train.seed),
        sharding=SHARDING,
        row_blocks=ROW_BLOCKS,
    )
    worker = parallelize(plan, rank, parts, device=job.device, dtype=dtype, timeout_seconds=run.train.timeout)
    device_type = plan.device_type(rank)
    slowdown = (device_type.slowdown if device_type is not None else None) or 1.0
    eod_id = job.tokenizer.eod_id if job.tokenizer is not None else None
    pipeline = worker.grid.pipeline(worker.place)
    trainer = Trainer(
        worker=worker,
        runners={
            stage: StageRunner(
                cast(Transformer, part),
                pipeline,
                run.data,
                seed=run.train.seed,
                eod_id=eod_id,
                device=job.device,
                queue=worker.queues[stage],
            )
            for stage, part in worker.parts.items()
        },
        optimizer=Optimizer(worker.states, run.optimizer),
        stopwatch=Stopwatch(job.device, slowdown=slowdown),
        device=job.device,
    )
    if job.checkpoint is None:
        return trainer, Progress.of_new(run)
    return trainer, _restore(job.checkpoint, trainer, run)


def _build_part(model: ModelConfig, dtype: torch.dtype, stage: StagePlan) -> Transformer:
    return Transformer(
        model,
        layers=stage.layers,
        embedding=stage.embedding,
        head=stage.head,
        recompute=stage.recompute,
        recompute_layers=stage.recompute_layers,
        device="meta",
        dtype=dtype,
    )


def _restore(checkpoint: Checkpoint, trainer: Trainer, run: RunConfig) -> Progress:
    """Fill weights and optimizer state; collective."""
    gathered = [state.gather() for state in trainer.worker.states]
    kinds = STATES if holds_optimizer_state(checkpoint) else STATES[:1]
    wanted = [{kind: tensors[kind] for kind in kinds} for tensors in gathered]
    load_tensors(checkpoint, _named_parts(trainer, wanted))
    for state, tensors in zip(trainer.worker.states, gathered, strict=True):
        state.load(tensors)
    progress = from_state(checkpoint.state, run)
    trainer.optimizer.set_step(progress.step - progress.skipped)
    return progress


def _named_parts(trainer: Trainer, gathered: list[dict[str, dict[str, torch.Tensor]]]) -> dict[str, Part]:
    """What a checkpoint stores and fills, by global name: the masters are its weights."""
    return {
        f"{WEIGHTS if kind == 'master' else kind}.{name}": Part(tensor, trainer.worker.shards[name])
        for tensors in gathered
        for kind, named in tensors.items()
        for name, tensor in named.items()
    }


def _run_steps(
    job: Job, trainer: Trainer, progress: Progress, log: Log | None, saver: Saver, asked: list[bool]
) -> None:
    run = job.run
    if log is not None and progress.step >= run.train.steps:
        log.say(f"nothing left to train: train.steps is {run.train.steps}, and {progress.step} are done")
    while progress.step < run.train.steps:
        began = time.perf_counter()
        lr = learning_rate(progress.step, run.optimizer, decay_steps=run.decay_steps)
        result = _step(job, trainer, progress, lr, stop=asked[0] or saver.failed(), saved=saver.saved)
        seconds = time.perf_counter() - began
        scale = progress.scaler.scale if progress.scaler else None
        progress = progress.advance(run, skipped=result.skipped)
        metrics = _measure(job, trainer, progress, result, lr, seconds, loss_scale=scale)
        if log is not None:
            log.write(metrics)
        if run.checkpoint.every and progress.step % run.checkpoint.every == 0:
            _save(job, trainer, progress, saver)
        if result.stop:
            saver.wait()  # It may be a failed save that asked.
            if log is not None:
                log.say(f"stopped by SIGTERM after step {progress.step}")
            break
    if saver.begun != progress.step:
        _save(job, trainer, progress, saver)


def _make_saver(job: Job, trainer: Trainer, log: Log | None) -> Saver:
    """What saves this run's checkpoints; collective if that goes to the background."""
    background = job.run.checkpoint.asynchronous and job.run.checkpoint.directory is not None
    return Saver(
        trainer.worker.place,
        saved=_saved_step(job),
        say=log.say if log is not None else lambda text: None,
        device=job.device if background else None,
        group=make_save_group(timeout_seconds=job.run.train.timeout) if background else None,
    )


def _saved_step(job: Job) -> int | None:
    """The step that this run's own directory holds already."""
    directory = job.run.checkpoint.directory
    if job.checkpoint is None or directory is None:
        return None
    return job.checkpoint.step if job.checkpoint.path.parent.resolve() == Path(directory).resolve() else None


def _step(
    job: Job, trainer: Trainer, progress: Progress, lr: float, *, stop: bool, saved: int | None
) -> StepResult:
    scaling, scaler = job.run.train.scaling, progress.scaler
    try:
        return train_step(
            trainer,
            job.train,
            first_sample=progress.sequences,
            lr=lr,
            clip=job.run.optimizer.clip_grad_norm,
            stop=stop,
            scale=scaler.scale if scaler else 1.0,
            may_skip=scaling is not None and scaler is not None and scaler.scale > scaling.minimum,
        )
    except TrainingError as error:
        good = (
            f"the last good checkpoint is that of step {saved}"
            if saved is not None
            else "no checkpoint is saved yet"
        )
        raise TrainingError(f"step {progress.step + 1}: {error}; {good}") from error


def _measure(
    job: Job,
    trainer: Trainer,
    progress: Progress,
    result: StepResult,
    lr: float,
    seconds: float,
    *,
    loss_scale: float | None,
) -> StepMetrics:
    """Numbers of the step; collective, for each rank tells its own. Validates when it is time."""
    run, plan = job.run, job.plan
    mine = torch.tensor([trainer.stopwatch.read(), peak_memory_bytes(job.device)], dtype=torch.float64)
    all_ranks = [mine]
    if dist.is_initialized():
        all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        with watching(trainer.worker.place, "the exchange of measurements"):
            dist.all_gather(all_ranks, mine)
    validation = None
    if job.validation is not None and run.validation.every and progress.step % run.validation.every == 0:
        validation = validation_loss(trainer, job.validation, num_batches=run.validation.batches)
        trainer.stopwatch.read()
    tokens = run.train.global_batch_size * run.data.sequence_length
    peak = peak_flops(plan, run.train.precision)
    flops = tokens * run.model.training_flops(run.data.sequence_length)
    return StepMetrics(
        step=progress.step,
        loss=result.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        tokens=progress.tokens,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        mfu=flops / seconds / peak if peak else None,
        peak_memory_bytes=[int(rank[1]) for rank in all_ranks],
        forecast_step_seconds=plan.forecast.step_seconds if plan.forecast else None,
        stage_seconds=[float(rank[0]) for rank in all_ranks],
        validation_loss=validation,
        loss_scale=loss_scale,
        skipped_steps=progress.skipped if loss_scale is not None else None,
    )


def _save(job: Job, trainer: Trainer, progress: Progress, saver: Saver) -> None:
    """Save a checkpoint, where the run asks for any, or begin to; collective."""
    if job.run.checkpoint.directory is None:
        return
    saver.wait()
    worker = trainer.worker
    everywhere = [state.gather() for state in worker.states]
    gathered = [
        tensors for tensors, bucket in zip(everywhere, worker.buckets, strict=True) if bucket.is_first_owner
    ]
    tensors = _named_parts(trainer, gathered)
    save = partial(
        save_checkpoint,
        job.run.checkpoint.directory,
        step=progress.step,
        tensors=snapshot(tensors) if saver.in_background else tensors,
        state=to_state(progress, job.run),
        tokenizer=job.tokenizer.path if job.tokenizer is not None else None,
        keep=job.run.checkpoint.keep,
        group=saver.group,
    )
    saver.begin(progress.step, save)


def _say_start(job: Job, progress: Progress, log: Log) -> None:
    """Tell where the run starts, and keep the resolved config and the plan beside its log."""
    run, plan = job.run, job.plan
    if job.checkpoint is not None:
        for note in job.checkpoint.notes:
            log.say(f"note: {note}")
        alone = "" if holds_optimizer_state(job.checkpoint) else " (weights alone: the optimizer begins anew)"
        log.say(f"resumed from {job.checkpoint.path} after step {progress.step}{alone}")
    cut = " | ".join(
        ",".join(str(stage.num_layers) for stage in pipeline.stages) for pipeline in plan.pipelines
    )
    log.say(
        f"{run.model.name}: {run.model.parameters:,} parameters, {plan.world_size} ranks, "
        f"layers per stage {cut}, {run.train.precision} on {job.device.type}"
    )
    if run.log.directory is not None:
        write_text(Path(run.log.directory) / "config.yaml", dump(run))
        save_plan(Path(run.log.directory) / "plan.yaml", plan)


@contextmanager
def _open_log(job: Job, progress: Progress) -> Iterator[Log | None]:
    """The log of the run, on rank 0."""
    if job.position.rank > 0:
        yield None
        return
    log = Log(job.run, first_step=progress.step + 1)
    try:
        _say_start(job, progress, log)
        yield log
    finally:
        log.close()


@contextmanager
def _heed_sigterm() -> Iterator[list[bool]]:
    """While inside, SIGTERM only leaves a mark; the run ends after the step under way."""
    asked = [False]

    def mark(signum: int, frame: object) -> None:
        asked[0] = True

    before = signal.signal(signal.SIGTERM, mark)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
