"""A training run of one rank, from the first step to the last checkpoint.

Reads top to bottom: connect and build, open the log, step, measure, save.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from yuan_train.checkpoint.load import holds_optimizer_state
from yuan_train.config.dump import as_plain, dump, write_text
from yuan_train.config.errors import TrainingError
from yuan_train.config.plan import Plan, unlike_owners
from yuan_train.config.plan_constraints import keep_plan
from yuan_train.config.run import RunConfig
from yuan_train.parallel.groups import as_training_error, enter_world, meet
from yuan_train.parallel.world_sum import gather_on_first
from yuan_train.train.agreement import (
    check_cards,
    check_same_directory,
    check_same_job,
    find_resume_together,
)
from yuan_train.train.clock import StepClock, device_clock
from yuan_train.train.ending import ending_together
from yuan_train.train.footprint import keep_freed_memory, peak_footprint_bytes
from yuan_train.train.job import Job
from yuan_train.train.metrics import Log, StepMetrics, is_logged, peak_flops
from yuan_train.train.optimizer import learning_rate
from yuan_train.train.out_of_memory import explaining_memory
from yuan_train.train.saver import Saver, make_saver, save_progress
from yuan_train.train.state import Progress
from yuan_train.train.step import StepResult
from yuan_train.train.stepper import BuildStepper, Stepper, build_stepper
from yuan_train.train.trace import Tracer
from yuan_train.train.watch import watching


def train(job: Job, build: BuildStepper = build_stepper) -> None:
    """Run a job to its last step, or until SIGTERM; collective over all ranks. Raises YuanError.

    `build` builds the engine.
    """
    board = None
    if job.position.world_size > 1:
        board = meet(job.run.train.startup_timeout, place=job.plan.ranks[job.position.rank].device)
    keep_freed_memory(job.device)
    explaining = partial(explaining_memory, job.plan, job.position.rank, job.device)
    with ending_together(board, job.device) as ending, explaining():
        if board is not None:
            enter_world(board, device=job.device, timeout_seconds=job.run.train.timeout)
        check_same_job(job)
        check_cards(job)
        if job.run.checkpoint.directory is not None:
            check_same_directory(job.run.checkpoint.directory)
        job = find_resume_together(job)
        job, stepper, progress = build(job)
        with (
            stepper.reading(),
            stop_on_sigterm() as stop_requested,
            open_log(job, progress) as log,
            make_saver(job, stepper, log) as saver,
            watching(
                stepper.world.grid,
                stepper.world.coord,
                job.device,
                timeout_seconds=job.run.train.timeout,
                last_good=lambda: last_good(saver.saved),
            ),
            ending.telling(),
            explaining(),
        ):
            note = stepper.prepare(job, progress)
            if log is not None and note is not None:
                log.say(note)
            _run_steps(job, stepper, progress, log, saver, stop_requested)


@contextmanager
def open_log(job: Job, progress: Progress) -> Iterator[Log | None]:
    """The log of the run; None on every rank but 0."""
    if job.position.rank > 0:
        yield None
        return
    log = Log(job.run, first_step=progress.step + 1)
    try:
        _log_start(job, progress, log)
        yield log
    finally:
        log.close()


def _log_start(job: Job, progress: Progress, log: Log) -> None:
    """Log what the run starts from, and save the resolved config and the plan in the log directory."""
    run, plan = job.run, job.plan
    if job.checkpoint is not None:
        for note in job.checkpoint.notes:
            log.say(f"note: {note}")
        weights_only = "" if holds_optimizer_state(job.checkpoint) else " (weights only; new optimizer state)"
        log.say(f"resumed from {job.checkpoint.path} after step {progress.step}{weights_only}")
        if progress.step and _blend_differs(job):
            log.say(
                "note: data.train has other corpora or weights than when the checkpoint was saved: samples "
                "are assigned to steps anew, so some may be read twice and others not at all"
            )
    if job.start is not None:
        log.say(f"begins with the weights of {job.start.path}")
    layers = " | ".join(
        ",".join(str(stage.num_layers) for stage in pipeline.stages) for pipeline in plan.pipelines
    )
    trained = "" if run.model.lora is None else f" ({sum(run.model.trained_unit_parameters):,} trained)"
    log.say(
        f"{run.model.name}: {run.model.parameters:,} parameters{trained}, {plan.world_size} ranks, "
        f"layers per stage {layers}, {run.train.precision} on {job.device.torch.type}"
    )
    if (unlike := unlike_owners(plan)) is not None:
        log.say(_drift_note(plan, *unlike))
    if run.log.directory is not None:
        write_text(Path(run.log.directory) / "config.yaml", dump(run))
        kept = keep_plan(run.log.directory, plan, step=progress.step)
        if kept.name != "plan.yaml":
            log.say(f"note: {kept.parent / 'plan.yaml'} is another plan, and stays; this one is in {kept}")


def _drift_note(plan: Plan, rank: int, other: int) -> str:
    """What to say of two ranks that step the same weights by unlike arithmetic."""
    types = {entry.rank: entry.type for entry in plan.ranks}
    ways = (
        "give each tensor-parallel group cards of one type"
        if plan.optimizer_sharding
        else "set optimizer_sharding: true in the plan, with which each element has one owner"
    )
    both = f"{rank} ({types[rank]}) and {other} ({types[other]})"
    return (
        f"note: ranks {both} each step the same weights, on unlike cards or hosts, which "
        f"round differently: the weights drift apart. To prevent it, {ways}; "
        "train.check_every says when they do"
    )


def _blend_differs(job: Job) -> bool:
    """Whether the training corpora, or their weights, are others than those of the checkpoint's run."""
    assert job.checkpoint is not None
    saved = job.checkpoint.state.get("run", {}).get("data", {}).get("train")
    return saved is not None and saved != as_plain(job.run)["data"]["train"]


def _run_steps(
    job: Job, stepper: Stepper, progress: Progress, log: Log | None, saver: Saver, stop_requested: list[bool]
) -> None:
    """Train from `progress` to the last step, logging and saving on the way; save at the end."""
    run = job.run
    if log is not None and progress.step >= run.train.steps:
        log.say(f"nothing left to train: train.steps is {run.train.steps}, and {progress.step} are done")
    clock = device_clock(job.device)
    tracer = Tracer(run.train.trace, run.log.directory, grid=stepper.world.grid, coord=stepper.world.coord)
    while progress.step < run.train.steps:
        lr = learning_rate(progress.step, run.optimizer, decay_steps=run.decay_steps)
        stop = stop_requested[0] or saver.failed()
        with tracer.step(progress.step + 1, job.device, clock):
            result = _step(job, stepper, progress, lr, stop=stop, saved=saver.saved)
            measured = measure_step(job, stepper, progress.step + 1, clock)
        scale = progress.scaler.scale if progress.scaler else None
        progress = progress.advance(run, skipped=result.skipped)
        with clock.paused():
            validation = _validate(job, stepper, progress)
        with clock.paused():
            check_weights(run, stepper, progress.step, saved=saver.saved)
        if log is not None:
            log.write(_metrics(job, progress, result, measured, lr, validation, loss_scale=scale))
        if run.checkpoint.every and progress.step % run.checkpoint.every == 0:
            with clock.paused():
                save_progress(job, stepper, progress, saver)
        if result.stop:
            saver.wait()  # Raises if the reason to stop is a failed save.
            if log is not None:
                log.say(f"stopped by SIGTERM after step {progress.step}")
            break
    with as_training_error(stepper.world.coord):
        stepper.finish()
    tracer.finish()
    if saver.started != progress.step:
        save_progress(job, stepper, progress, saver)


def _step(
    job: Job, stepper: Stepper, progress: Progress, lr: float, *, stop: bool, saved: int | None
) -> StepResult:
    """One training step. Raises TrainingError that names the step and the last good checkpoint (`saved`)."""
    scaling, scaler = job.run.train.scaling, progress.scaler
    try:
        with explaining_memory(job.plan, job.position.rank, job.device):
            return stepper.step(
                job.train,
                first_sample=progress.sequences,
                lr=lr,
                clip=job.run.optimizer.clip_grad_norm,
                stop=stop,
                scale=scaler.scale if scaler else 1.0,
                may_skip=scaling is not None and scaler is not None and scaler.scale > scaling.minimum,
            )
    except TrainingError as error:
        between = "\n" if "\n" in str(error) else "; "
        raise type(error)(f"step {progress.step + 1}: {error}{between}{last_good(saved)}") from error


def check_weights(run: RunConfig, stepper: Stepper, step: int, *, saved: int | None) -> None:
    """Check the weights if it is due after a step; collective over all ranks.

    Raises TrainingError that names the step, the ranks, and the last step after which all was well.
    """
    every = run.train.check_every
    if not every or step % every:
        return
    try:
        with as_training_error(stepper.world.coord):
            stepper.check_weights()
    except TrainingError as error:
        before = f"step {step - every}" if step > every else "the start"
        raise type(error)(f"after step {step}: {error} (last after {before}); {last_good(saved)}") from error


def last_good(saved: int | None) -> str:
    return (
        f"the last good checkpoint is that of step {saved}"
        if saved is not None
        else "no checkpoint is saved yet"
    )


@dataclass(frozen=True)
class Measured:
    """What is measured of a step."""

    step_seconds: float
    of_ranks: list[list[float]] | None
    """By rank, seconds of compute and bytes of peak memory; on rank 0, if they were gathered."""
    expert_tokens: list[list[int]] | None
    """Tokens of each layer's experts since they were counted last, if they were counted now."""


def measure_step(job: Job, stepper: Stepper, step: int, clock: StepClock) -> Measured:
    """Wait until all ranks have finished a step, which ends it, and gather their measurements on rank 0.

    Collective over all ranks. Many ranks' measurements are gathered only where a progress line is due.
    """
    # This waits for the device, so that the gathering waits for all of them.
    compute_seconds = stepper.compute_seconds()
    world, of_ranks = stepper.world, None
    if not world.groups.tree or is_logged(step, job.run):
        # To ask the system for the peak takes the host longer than to send a message.
        local = torch.tensor([compute_seconds, peak_footprint_bytes(job.device)], dtype=torch.float64)
        of_ranks = gather_on_first(world.groups, world.coord, local, "the gather of measurements")
    expert_tokens = stepper.take_expert_tokens() if is_logged(step, job.run) else None
    return Measured(clock.lap(), of_ranks, expert_tokens)


def _validate(job: Job, stepper: Stepper, progress: Progress) -> float | None:
    """The validation loss, if it is due (collective over all ranks)."""
    config = job.run.validation
    if job.validation is None or not config.every or progress.step % config.every:
        return None
    loss = stepper.validation_loss(job.validation, num_batches=config.batches)
    stepper.compute_seconds()
    return loss


def _metrics(
    job: Job,
    progress: Progress,
    result: StepResult,
    measured: Measured,
    lr: float,
    validation: float | None,
    *,
    loss_scale: float | None,
) -> StepMetrics:
    run, plan = job.run, job.plan
    seconds, of_ranks = measured.step_seconds, measured.of_ranks
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
        peak_memory_bytes=[int(rank[1]) for rank in of_ranks] if of_ranks else None,
        forecast_step_seconds=plan.forecast.step_seconds if plan.forecast else None,
        stage_seconds=[rank[0] for rank in of_ranks] if of_ranks else None,
        expert_tokens=measured.expert_tokens,
        validation_loss=validation,
        loss_scale=loss_scale,
        skipped_steps=progress.skipped if loss_scale is not None else None,
        accuracy=None if result.preference is None else result.preference[0],
        margin=None if result.preference is None else result.preference[1],
    )


@contextmanager
def stop_on_sigterm() -> Iterator[list[bool]]:
    """While inside, SIGTERM only sets element 0 of the yielded list; the run stops after the current step."""
    stop_requested = [False]

    def request_stop(signum: int, frame: object) -> None:
        stop_requested[0] = True

    previous = signal.signal(signal.SIGTERM, request_stop)
    try:
        yield stop_requested
    finally:
        signal.signal(signal.SIGTERM, previous)
