"""A run of reinforcement learning of one rank, in sync mode: draw, score, train, in turn.

Reads top to bottom: connect and build, open the logs, step, measure, save. The policy's cards draw with the
policy's own weights, so nothing is copied between training and generation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from yuan_train.config.dump import as_plain, dump, write_text
from yuan_train.config.errors import TrainingError, YuanError
from yuan_train.parallel.board import Board
from yuan_train.parallel.groups import enter_world, meet
from yuan_train.parallel.links import RolePosition, enter_role, join_role
from yuan_train.parallel.world_sum import sum_over_world
from yuan_train.rl.apart import RemoteCollector, Told
from yuan_train.rl.collect import Collected, Collector
from yuan_train.rl.critic import Critic
from yuan_train.rl.engines import fates_of, job_ranks
from yuan_train.rl.experience import RowFeed
from yuan_train.rl.generator import Engine, make_engine, pipeline_group
from yuan_train.rl.job import RLJob
from yuan_train.rl.losses import PolicyLoss
from yuan_train.rl.metrics import RLMetrics, SampleLog
from yuan_train.rl.reference import Reference, finish_weight_sync
from yuan_train.rl.remote import RemoteReference, RemoteRewardModel, RemoteScores
from yuan_train.rl.reward_model import RewardModel
from yuan_train.rl.rewards import Scorers
from yuan_train.rl.updates import Updater, UpdateResult
from yuan_train.train.agreement import (
    check_cards,
    check_same_directory,
    check_same_job,
    find_resume_together,
    raise_together,
)
from yuan_train.train.build import build, restore
from yuan_train.train.clock import StepClock, device_clock
from yuan_train.train.ending import ending_together
from yuan_train.train.footprint import keep_freed_memory
from yuan_train.train.metrics import Log, peak_flops
from yuan_train.train.optimizer import learning_rate
from yuan_train.train.out_of_memory import explaining_memory
from yuan_train.train.run import Measured, check_weights, last_good, measure_step, open_log, stop_on_sigterm
from yuan_train.train.saver import Saver, make_saver, save_progress
from yuan_train.train.state import Progress
from yuan_train.train.step import Trainer
from yuan_train.train.stepper import YuanStepper
from yuan_train.train.watch import watching


@dataclass(frozen=True)
class RLProgress:
    """What a checkpoint holds of a run beside the policy's progress. Nothing that is in flight is in it."""

    next_ticket: int = 0
    optimizer_steps: int = 0
    filtered: int = 0
    failed: int = 0
    critic_steps: int = 0
    """Optimizer steps of the critic, if there is one."""


@dataclass(frozen=True)
class _Parts:
    """What a step needs."""

    job: RLJob
    trainer: Trainer
    collector: Collector
    updater: Updater
    critic: Critic | None
    log: Log | None
    samples: SampleLog | None
    saver: Saver


def train_rl(job: RLJob) -> None:
    """Run a job to its last step, or until SIGTERM; collective over all ranks. Raises YuanError."""
    policy = job.policy
    apart: RolePosition | None = None
    board: Board | None = None
    if job.roles is not None:
        apart = join_role(
            job_ranks(job.roles),
            fates=fates_of(job.roles, job.run.generation.on_lost_engine),
            startup_seconds=policy.run.train.startup_timeout,
        )
        board = apart.board
    elif policy.position.world_size > 1:
        place = policy.plan.ranks[policy.position.rank].device
        board = meet(policy.run.train.startup_timeout, place=place)
    keep_freed_memory(policy.device)
    with ending_together(board, policy.device) as ending:
        timeout = policy.run.train.timeout
        if apart is not None:
            enter_role(apart, device=policy.device, timeout_seconds=timeout)
        elif board is not None:
            enter_world(board, device=policy.device, timeout_seconds=timeout)
        check_same_job(policy)
        check_cards(policy)
        if policy.run.checkpoint.directory is not None:
            check_same_directory(policy.run.checkpoint.directory)
        job = replace(job, policy=find_resume_together(policy))
        with ExitStack() as stack:
            # Before anything is built: a function that cannot be loaded ends the run at once.
            scorers = stack.enter_context(_scorers(job))
            naming = apart.naming_role() if apart is not None else nullcontext()
            explaining = explaining_memory(policy.plan, policy.position.rank, policy.device)
            with ending.telling(), naming, explaining:
                _run(job, scorers, apart, stack)


@contextmanager
def _scorers(job: RLJob) -> Iterator[Scorers | None]:
    """The reward functions' processes, on rank 0. Raises, on all ranks, what is wrong with the functions."""
    if job.policy.position.rank > 0:
        raise_together(None)
        yield None
        return
    scorers = Scorers(job.run.reward)
    fault: YuanError | None = None
    try:
        scorers.__enter__()
    except YuanError as error:
        fault = error
    try:
        raise_together(fault)
        yield scorers
    finally:
        scorers.__exit__(None, None, None)


def _run(job: RLJob, scorers: Scorers | None, apart: RolePosition | None, stack: ExitStack) -> None:
    run, policy = job.run, job.policy
    loss = PolicyLoss(
        run.algorithm,
        correction=run.correction(job.mode),
        temperature=run.generation.temperature,
        device=policy.device.torch,
    )
    plan = policy.plan
    pipeline = next(
        p for p in plan.pipelines if policy.position.rank in {r for s in p.stages for r in s.ranks}
    )
    feed = RowFeed(micro_batch_size=pipeline.micro_batch_size, device=policy.device)
    trainer, progress, reference = _build(job, feed, loss, apart)
    critic = Critic(job, feed) if run.critic is not None else None
    engine = None if job.generates_apart else _make_engine(job, trainer)
    updater = Updater(
        run,
        trainer,
        feed,
        loss,
        sequence_length=plan.sequence_length,
        reference=reference,
        decoupled=run.correction(job.mode) == "decoupled",
        critic=critic,
    )
    stop_requested = stack.enter_context(stop_on_sigterm())
    log = stack.enter_context(open_log(policy, progress))
    samples = None
    if policy.position.rank == 0:
        samples = SampleLog(run.log.directory, policy.tokenizer, first_step=progress.step + 1)
        stack.callback(samples.close)
    if log is not None and run.log.directory is not None:
        write_text(Path(run.log.directory) / "config.yaml", dump(run))
    saver = stack.enter_context(make_saver(policy, YuanStepper(trainer), log))
    stack.enter_context(
        watching(
            trainer.runtime.grid,
            trainer.runtime.coord,
            policy.device,
            timeout_seconds=run.train.timeout,
            last_good=lambda: last_good(saver.saved),
        )
    )
    reward_model = _make_reward_model(job, trainer, apart)
    if job.generates_apart:
        assert apart is not None
        collector = RemoteCollector(job, trainer, scorers, reward_model, apart)
    else:
        collector = Collector(job, trainer, engine, scorers, reward_model)
    parts = _Parts(job, trainer, collector, updater, critic, log, samples, saver)
    state = RLProgress()
    if policy.checkpoint is not None and "rl" in policy.checkpoint.state:
        state = RLProgress(**policy.checkpoint.state["rl"]["progress"])
        trainer.optimizer.set_step(state.optimizer_steps)
    _run_steps(parts, progress, state, stop_requested)
    for role in (collector, reward_model, reference):
        if isinstance(role, RemoteCollector | RemoteScores):
            role.stop()


def _make_reward_model(
    job: RLJob, trainer: Trainer, apart: RolePosition | None
) -> RewardModel | RemoteRewardModel | None:
    if job.reward_model is None:
        return None
    if job.has_apart("reward"):
        assert job.roles is not None and apart is not None
        return RemoteRewardModel(job.roles, trainer, apart, job.run)
    return RewardModel(job.reward_model, job.run, trainer)


def _build(
    job: RLJob, feed: RowFeed, loss: PolicyLoss, apart: RolePosition | None
) -> tuple[Trainer, Progress, Reference | RemoteReference | None]:
    """The trainer, and the reference if the run needs one; both with the weights of step 0 at first."""
    policy = job.policy
    if not job.run.needs_reference:
        return *build(policy, feed=feed, objective=loss), None
    fresh = policy
    if policy.checkpoint is not None:
        fresh = replace(policy, checkpoint=None, start=job.reference_start())
    trainer, progress = build(fresh, feed=feed, objective=loss)
    if job.has_apart("reference"):
        assert job.roles is not None and apart is not None
        finish_weight_sync(trainer.runtime)
        reference = RemoteReference(job.roles, trainer, apart, job.run)
    else:
        reference = Reference(trainer.runtime, trainer.device)
    if policy.checkpoint is not None:
        progress = restore(policy.checkpoint, trainer, policy.run)
    return trainer, progress, reference


def _make_engine(job: RLJob, trainer: Trainer) -> Engine:
    return make_engine(
        trainer.runtime,
        job.run,
        slots=job.slots(trainer.runtime.coord.pipeline),
        stopwatch=trainer.stopwatch,
        device=trainer.device.torch,
        ranks=pipeline_group(trainer.runtime, timeout_seconds=job.run.train.timeout),
    )


def _run_steps(parts: _Parts, progress: Progress, state: RLProgress, stop_requested: list[bool]) -> None:
    """Train from `progress` to the last step, logging and saving on the way; save at the end."""
    run, policy, log, saver = parts.job.run, parts.job.policy, parts.log, parts.saver
    if log is not None and progress.step >= run.train.steps:
        log.say(f"nothing left to train: train.steps is {run.train.steps}, and {progress.step} are done")
    clock = device_clock(policy.device)
    while progress.step < run.train.steps:
        progress, state, stop = _step(parts, progress, state, clock, stop=stop_requested[0] or saver.failed())
        with clock.paused():
            check_weights(policy.run, YuanStepper(parts.trainer), progress.step, saved=saver.saved)
        if run.checkpoint.every and progress.step % run.checkpoint.every == 0:
            with clock.paused():
                _save(parts, progress, state)
        if stop:
            saver.wait()  # Raises if the reason to stop is a failed save.
            if log is not None:
                log.say(f"stopped by SIGTERM after step {progress.step}")
            break
    finish_weight_sync(parts.trainer.runtime)
    if saver.started != progress.step:
        _save(parts, progress, state)


def _save(parts: _Parts, progress: Progress, state: RLProgress) -> None:
    more = {"rl": {"progress": asdict(state), "run": as_plain(parts.job.run)}}
    tensors = parts.critic.checkpoint_tensors() if parts.critic is not None else None
    stepper = YuanStepper(parts.trainer)
    save_progress(parts.job.policy, stepper, progress, parts.saver, more=more, more_tensors=tensors)


def _step(
    parts: _Parts, progress: Progress, state: RLProgress, clock: StepClock, *, stop: bool
) -> tuple[Progress, RLProgress, bool]:
    """One batch drawn, scored, trained and logged; whether a rank has asked to stop."""
    job, trainer, number = parts.job, parts.trainer, progress.step + 1
    run, policy = job.run, job.policy
    scaler, scaling = progress.scaler, run.train.scaling
    lr = learning_rate(progress.step, run.optimizer, decay_steps=policy.run.decay_steps)
    try:
        # Generation does not go through the modules whose forwards wait for weights.
        finish_weight_sync(trainer.runtime)
        if isinstance(parts.collector, RemoteCollector):
            replaced = state.filtered + state.failed
            parts.collector.begin(progress.step, first_ticket=state.next_ticket, replaced=replaced)
        batch = parts.collector.collect(state.next_ticket)
        start = time.perf_counter()
        result = parts.updater.train(
            batch.groups,
            lr=lr,
            scale=scaler.scale if scaler else 1.0,
            may_skip=scaling is not None and scaler is not None and scaler.scale > scaling.minimum,
        )
    except TrainingError as error:
        raise type(error)(f"step {number}: {error}; {last_good(parts.saver.saved)}") from error
    told: Told | None = None
    if isinstance(parts.collector, RemoteCollector):
        told = parts.collector.told([group.ticket for group in batch.groups])
    stops = torch.tensor([float(stop)], dtype=torch.float64)
    sum_over_world(trainer.runtime.groups, trainer.runtime.coord, stops, "the agreement on a stop")
    measured = measure_step(policy, YuanStepper(trainer), number, clock)
    training_seconds = time.perf_counter() - start
    progress = replace(
        progress.advance(policy.run, skipped=result.overflowed), tokens=progress.tokens + result.tokens
    )
    state = RLProgress(
        next_ticket=batch.next_ticket,
        optimizer_steps=state.optimizer_steps + result.steps,
        filtered=state.filtered + batch.filtered,
        failed=state.failed + batch.failed,
        critic_steps=parts.critic.steps if parts.critic is not None else 0,
    )
    evaluation = None
    if run.evaluation.every and number % run.evaluation.every == 0:
        with clock.paused():
            finish_weight_sync(trainer.runtime)
            if isinstance(parts.collector, RemoteCollector):
                parts.collector.publish(progress.step)
            evaluation = parts.collector.evaluate()
            trainer.stopwatch.read()
    if parts.log is not None:
        metrics = _metrics(job, progress, state, batch, result, measured, lr, training_seconds, evaluation)
        if told is not None:
            metrics = _with_engines(metrics, told, progress.step - 1)
        parts.log.write(replace(metrics, loss_scale=scaler.scale if scaler else None))
        assert parts.samples is not None
        parts.samples.write(number, batch.groups, run.reward.labels)
    return progress, state, bool(stops[0] > 0)


def _with_engines(metrics: RLMetrics, told: Told, version: int) -> RLMetrics:
    """The metrics of a step whose answers other cards drew; `batch.generation_seconds` was waiting."""
    ages = [version - drawn for drawn in told.versions]
    step = metrics.step_seconds
    return replace(
        metrics,
        staleness_mean=statistics.fmean(ages),
        staleness_max=max(ages),
        rounds=told.rounds,
        generation_seconds=told.engine_seconds,
        sync_seconds=told.sync_seconds,
        sync_bytes=told.sync_bytes,
        idle_generation=max(0.0, 1 - told.engine_seconds / step),
    )


def _metrics(
    job: RLJob,
    progress: Progress,
    state: RLProgress,
    batch: Collected,
    result: UpdateResult,
    measured: Measured,
    lr: float,
    training_seconds: float,
    evaluation: dict[str, float] | None,
) -> RLMetrics:
    run, plan, seconds, of_ranks = job.run, job.policy.plan, measured.step_seconds, measured.of_ranks
    samples = [sample for group in batch.groups for sample in group.samples]
    rewards = [reward for group in batch.groups for reward in group.rewards]
    scores = [row for group in batch.groups for row in group.scores]
    lengths = [len(sample.ids) for sample in samples]
    drawn = math.fsum(p for sample in samples for p in sample.log_probs)
    peak = peak_flops(plan, run.train.precision)
    flops = result.tokens * run.model.training_flops(plan.sequence_length)
    found: Mapping[str, Any] = result.measures
    return RLMetrics(
        step=progress.step,
        loss=result.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        tokens=progress.tokens,
        step_seconds=seconds,
        tokens_per_second=result.tokens / seconds,
        mfu=flops / seconds / peak if peak else None,
        peak_memory_bytes=[int(rank[1]) for rank in of_ranks] if of_ranks else None,
        forecast_step_seconds=job.forecast.step_seconds if job.forecast else None,
        stage_seconds=[rank[0] for rank in of_ranks] if of_ranks else None,
        skipped_steps=progress.skipped,
        reward=statistics.fmean(rewards),
        reward_std=statistics.pstdev(rewards),
        rewards={
            label: statistics.fmean(row[i] for row in scores) for i, label in enumerate(run.reward.labels)
        },
        answer_tokens={"mean": statistics.fmean(lengths), "max": max(lengths)},
        truncated=sum(sample.ended == "limit" for sample in samples) / len(samples),
        entropy_estimate=-drawn / sum(lengths),
        kl=found.get("kl"),
        ratio_mean=found.get("ratio"),
        ratio_max=found.get("ratio_max"),
        clipped=found.get("clipped"),
        log_prob_gap={"mean": found.get("gap"), "max": found.get("gap_max")},
        version=progress.step - 1,
        staleness_mean=0.0,
        staleness_max=0,
        groups_zero_variance=batch.zero_variance,
        groups_filtered=batch.filtered,
        groups_failed=batch.failed,
        next_ticket=state.next_ticket,
        optimizer_steps=state.optimizer_steps,
        rounds=batch.rounds,
        generation_seconds=batch.generation_seconds,
        scoring_seconds=batch.scoring_seconds,
        training_seconds=training_seconds,
        sync_seconds=0.0,
        sync_bytes=0,
        wait_seconds=max(0.0, seconds - batch.generation_seconds - training_seconds),
        idle_policy=max(0.0, 1 - training_seconds / seconds),
        idle_generation=max(0.0, 1 - batch.generation_seconds / seconds),
        samples_per_second=len(samples) / seconds,
        value_loss=result.critic.loss if result.critic is not None else None,
        explained_variance=result.critic.explained_variance if result.critic is not None else None,
        evaluation=evaluation,
    )
