"""A run of reinforcement learning of one rank of the policy: draw, score, train, in turn.

Reads top to bottom: connect, build, and the policy as an engine of the training loop (`train/run.py`). Where
the policy's cards draw, they do with its own weights, so nothing is copied between training and generation.
It stands alone because the command reads arguments and no more.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TextIO

import torch

from yuan_train.checkpoint.load import LocalShard, find_checkpoints
from yuan_train.config.errors import CheckpointError, ConfigError
from yuan_train.config.load import as_plain, dump, write_text
from yuan_train.config.run import RunConfig
from yuan_train.data.prompts import text_of
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.parallel.board import Board, RolePosition, join_role, meet
from yuan_train.parallel.device import keep_freed_memory
from yuan_train.parallel.groups import enter_role, enter_world, sum_over_world
from yuan_train.rl.apart import RemoteCollector, Told, own_fleet
from yuan_train.rl.collect import Collected, Collector, turns_of
from yuan_train.rl.experience import Group
from yuan_train.rl.generator import GenerationEngine, make_engine, pipeline_group
from yuan_train.rl.helpers import Conversation, Environments, Helpers, helping, talking_rank
from yuan_train.rl.http_engines import http_fleet
from yuan_train.rl.job import RLJob
from yuan_train.rl.passes import PolicyLoss, ReadingModel, RowFeed
from yuan_train.rl.roles import (
    RemoteReadingModel,
    RemoteReference,
    RemoteScores,
    Requests,
    fates_of,
    job_ranks,
)
from yuan_train.rl.updates import (
    Critic,
    Reference,
    Renewal,
    Updater,
    UpdateResult,
    finish_weight_sync,
    load_reference,
)
from yuan_train.train.agreement import agree_on_job, holding_directories
from yuan_train.train.build import build, restore
from yuan_train.train.ending import ending_together, explaining_memory
from yuan_train.train.engine import Progress, StepRecord, StepRequest, StepResult, World, step_metrics
from yuan_train.train.job import Job
from yuan_train.train.metrics import StepMetrics, close_quietly, open_after, write_lines
from yuan_train.train.run import differences, run_loop
from yuan_train.train.step import Trainer

SAMPLES_PER_STEP = 4
PARTS = ("start", "data", "generation", "reward", "algorithm", "critic", "schedule", "environment")
"""Of a run, beside the policy's: it is told if a resumed one has others."""
CURVES = (
    "reward",
    "reward_std",
    "entropy_estimate",
    "kl",
    "truncated",
    "clipped",
    "generation_seconds",
    "training_seconds",
    "samples_per_second",
)


@dataclass(frozen=True, kw_only=True)
class RLMetrics(StepMetrics):
    """One batch, trained. Means are over its answers or their tokens; None: nothing was trained of it."""

    reward: float
    reward_std: float
    rewards: dict[str, float | None]
    """Mean score by function, over the answers that it scored."""
    answer_tokens: dict[str, float]
    """`mean` and `max`, of those that the policy drew."""
    environment_tokens: int
    """Of the batch's answers, those that environments said."""
    turns: float
    """Mean turns of the policy in an answer."""
    truncated: float
    """Share of the answers that reached max_new_tokens."""
    entropy_estimate: float
    """-mean log-probability of the tokens that were drawn."""
    kl: float | None
    """The estimate of the divergence from the reference; None without one."""
    teacher_kl: float | None
    """The mean over tokens of log policy - log teacher, when they were drawn; None without a teacher."""
    ratio_mean: float | None
    """Of the policy to that which drew, before clipping, over all updates; and the largest."""
    ratio_max: float | None
    clipped: float | None
    """Share of the tokens outside the clip, or with AIPO beyond rho, over all updates."""
    log_prob_gap: dict[str, float | None]
    """`mean` and `max` of |log pi - log mu| before the first step: what generation and training compute
    differently, and in async mode what the batches between have changed."""
    version: int
    """Batches trained when the answers were drawn."""
    staleness_mean: float
    staleness_max: int
    groups_zero_variance: int
    """Groups of equal rewards among those that were scored."""
    groups_filtered: int
    """Those of them that were replaced."""
    groups_failed: int
    """Groups without a reward, which were replaced."""
    next_ticket: int
    optimizer_steps: int
    """Since the start of the run."""
    rounds: int
    """Of generation, in which each answer under way gets a token; of the pipeline or engine with the most."""
    slots_filled: float
    """Share of the slots that got a token, over the rounds of all pipelines or engines."""
    generation_seconds: float
    scoring_seconds: float
    """Where engines of their own score, while they draw and the policy trains, that of the slowest."""
    training_seconds: float
    sync_seconds: float
    """0 where generation uses the policy's own weights, as `sync_bytes`."""
    sync_bytes: int
    wait_seconds: float
    """In which it neither generates nor trains."""
    idle_policy: float
    """Share of the step in which the policy's cards do not train."""
    idle_generation: float
    """Share of the step in which the engines' cards do not generate."""
    samples_per_second: float
    engine_tokens_per_second: tuple[float, ...] = ()
    """Of answers, by engine or server that is not on the policy's cards, while it was at work; 0 of one that
    drew none."""
    value_loss: float | None = None
    """The critic's; None without one."""
    explained_variance: float | None = None
    """Of the returns, by the critic's values; None also where all returns are equal."""
    evaluation: dict[str, float] | None = None
    """`pass_1`, `pass_k` and `mean_reward`, if it was due."""
    evaluation_at_start: dict[str, float] | None = None
    """The same of the weights before the first step, in that step's line."""

    @property
    def highlights(self) -> tuple[str, ...]:
        """The reward, and the length of answers; the loss says little, and comes last."""
        shown = [f"reward {self.reward:.3f}", f"tokens {self.answer_tokens['mean']:.1f}"]
        if self.evaluation is not None:
            shown.append(f"pass@1 {self.evaluation['pass_1']:.3f}")
        return (*shown, f"loss {self.loss:.4f}")

    @property
    def figures(self) -> dict[str, float]:
        """What trackers draw, by name."""
        found = super().figures | {name: getattr(self, name) for name in CURVES}
        found |= {f"reward/{name}": value for name, value in self.rewards.items()}
        found |= {f"answer_tokens/{name}": value for name, value in self.answer_tokens.items()}
        found |= {f"evaluation/{name}": value for name, value in (self.evaluation or {}).items()}
        return {name: value for name, value in found.items() if value is not None}


class SampleLog:
    """samples.jsonl: a few answers of each step."""

    def __init__(self, directory: str | None, tokenizer: Tokenizer | None, *, first_step: int) -> None:
        """Lines of `first_step` and later ones are replaced. Raises ConfigError if it cannot be written."""
        self._tokenizer = tokenizer
        self._file: TextIO | None = None
        if directory is not None:
            path = Path(directory) / "samples.jsonl"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open_after(path, first_step)
            except OSError as error:
                raise ConfigError(f"log.directory: {path} cannot be written: {error}") from None

    def write(self, step: int, groups: Sequence[Group], labels: Sequence[str]) -> None:
        """The first answers to the first prompts of a batch. Raises TrainingError if the disk is full."""
        if self._file is None:
            return
        lines: list[str] = []
        for group in groups[:SAMPLES_PER_STEP]:
            sample = group.samples[0]
            line: dict[str, Any] = {
                "step": step,
                "ticket": group.ticket,
                "sample": sample.number,
                "prompt": group.prompt.text,
                "text": text_of(sample.said, self._tokenizer),
                "answer": group.prompt.answer,
                "reward": group.rewards[0],
                "rewards": dict(zip(labels, group.scores[0], strict=True)),
                "tokens": sample.num_drawn,
                "ended": sample.ended,
            }
            if sample.episode is not None:
                line["rewards"]["environment"] = sample.given
                line["turns"] = turns_of(sample, self._tokenizer)
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        write_lines(self._file, lines)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            close_quietly(self._file)


@dataclass(frozen=True)
class RLProgress:
    """What a checkpoint holds of a run beside the policy's progress. Nothing that is in flight is in it."""

    next_ticket: int = 0
    optimizer_steps: int = 0
    filtered: int = 0
    failed: int = 0
    critic_steps: int = 0
    """Optimizer steps of the critic, if there is one."""
    best_step: int | None = None
    """Behind which the evaluation was best, with `evaluation.keep_best`."""
    best_score: tuple[float, ...] | None = None
    """Its pass_1 and mean_reward."""


def train_rl(job: RLJob) -> None:
    """Run a job to its last step, or until SIGTERM; collective over all ranks. Raises YuanError."""
    policy = job.policy
    apart: RolePosition | None = None
    board: Board | None = None
    if job.roles is not None:
        ranks = job_ranks(job.roles)
        fates = fates_of(job.roles, job.run.generation.on_lost_engine)
        apart = join_role(ranks, fates=fates, startup_seconds=policy.run.train.startup_timeout)
        board = apart.board
    elif policy.position.world_size > 1:
        place = policy.plan.ranks[policy.position.rank].device
        board = meet(policy.run.train.startup_timeout, place=place)
    keep_freed_memory(policy.device)
    with ending_together(board, policy.device) as ending, ExitStack() as held:
        timeout = policy.run.train.timeout
        if apart is not None:
            enter_role(apart, device=policy.device, timeout_seconds=timeout)
        elif board is not None:
            enter_world(board, device=policy.device, timeout_seconds=timeout)
        held.enter_context(holding_directories(policy))
        job = replace(job, policy=agree_on_job(policy))

        @contextmanager
        def guarding(policy: Job) -> Iterator[None]:
            naming = apart.naming_role() if apart is not None else nullcontext()
            explaining = explaining_memory(policy.plan, policy.position.rank, policy.device)
            with ending.telling(), naming, explaining:
                yield

        # Before anything is built: a function that cannot be loaded ends the run at once.
        with helping(job) as helpers:
            with guarding(policy):
                engine, progress = _build_engine(job, helpers, apart)
            tell, hear = ending.tell_stop, ending.hear_stop
            with engine:
                run_loop(job.policy, engine, progress, guarding=guarding, tell_stop=tell, hear_stop=hear)
                with guarding(policy):
                    engine.stop_roles()


def _build_engine(job: RLJob, helpers: Helpers, apart: RolePosition | None) -> tuple[PolicyEngine, Progress]:
    """The policy with all that trains it, and the progress to start from; collective over its ranks."""
    run, policy = job.run, job.policy
    trainer, progress, feed, loss = _build_policy(job)
    renewal = None
    if run.needs_reference:
        renewal = _make_renewal(job, trainer, apart)
        if policy.checkpoint is not None:
            progress = restore(policy.checkpoint, trainer, policy.run)
    reference = renewal.reference if renewal is not None else None
    critic = Critic(job, feed) if run.critic is not None else None
    reader = _make_reading_model(job, trainer, apart)
    teaches = run.reward.teacher is not None
    updater = Updater(
        run, trainer, feed, loss, reference=reference, critic=critic, teacher=reader if teaches else None
    )
    generating, talk = None, None
    if not job.generates_apart:
        generating, talk = _make_engine(job, trainer, helpers.environments)
    if policy.checkpoint is not None and "rl" in policy.checkpoint.state:
        trainer.optimizer.set_step(policy.checkpoint.state["rl"]["progress"]["optimizer_steps"])

    def make_collector() -> tuple[Collector, list[object]]:
        reward_model = None if teaches else reader
        if job.http is not None:
            fleet = http_fleet(job, trainer, helpers.scorers, helpers.environments)
            collector = RemoteCollector(job, trainer, helpers.scorers, reward_model, fleet)
        elif job.generates_apart:
            assert apart is not None
            collector = RemoteCollector(job, trainer, helpers.scorers, reward_model, own_fleet(job, apart))
        else:
            collector = Collector(job, trainer, generating, helpers.scorers, reward_model, talk)
        return collector, [collector, reader, reference]

    return PolicyEngine(job, trainer, updater, critic, renewal, make_collector), progress


class PolicyEngine:
    """The policy as an engine of the loop: a step draws a batch of answers, scores and trains them."""

    def __init__(
        self,
        job: RLJob,
        trainer: Trainer,
        updater: Updater,
        critic: Critic | None,
        renewal: Renewal | None,
        make_collector: Callable[[], tuple[Collector, list[object]]],
    ) -> None:
        """`make_collector` makes what draws and scores, and says what may have cards of its own; collective,
        once the run is watched over."""
        self._job, self._trainer, self._updater = job, trainer, updater
        self._critic, self._renewal, self._make_collector = critic, renewal, make_collector
        self._roles: list[object] = []
        self._samples: SampleLog | None = None
        self._version = 0
        """Batches trained."""
        self._progress = RLProgress()
        checkpoint = job.policy.checkpoint
        if checkpoint is not None and "rl" in checkpoint.state:
            held = checkpoint.state["rl"]["progress"]
            # As a tuple again: JSON has lists.
            best = held.get("best_score")
            self._progress = RLProgress(**held | {"best_score": best and tuple(best)})
            if job.run.data.skip_solved and "prompts" in checkpoint.state["rl"]:
                job.prompts.restore(checkpoint.state["rl"]["prompts"])
        self._at_start: dict[str, float] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._samples is not None:
            self._samples.close()

    @property
    def world(self) -> World:
        return self._trainer.runtime

    def reading(self) -> AbstractContextManager[object]:
        """Nothing is read ahead: what a batch is made of is drawn in its step."""
        return nullcontext()

    def prepare(self, job: Job, progress: Progress) -> str | None:
        directory = self._job.run.log.directory
        self._version = progress.step
        if job.position.rank == 0:
            self._samples = SampleLog(directory, job.tokenizer, first_step=progress.step + 1)
            if directory is not None:
                write_text(Path(directory) / "config.yaml", dump(self._job.run))
        self._collector, self._roles = self._make_collector()
        if self._job.run.evaluation.at_start and progress.step == 0:
            self._at_start = self._measure(0)
        saved = job.checkpoint.state.get("rl", {}) if job.checkpoint is not None else {}
        changed = differences(saved["run"], self._job.run, PARTS) if saved else []
        return "\n".join(f"note: not as in the run that saved it: {change}" for change in changed) or None

    def step(self, request: StepRequest) -> StepResult:
        runtime, before, collector = self._trainer.runtime, self._progress, self._collector
        # Generation does not go through the modules whose forwards wait for weights.
        finish_weight_sync(runtime)
        if isinstance(collector, RemoteCollector):
            collector.begin(self._version, first_ticket=before.next_ticket)
        self._batch = batch = collector.collect(before.next_ticket)
        self._training_since = time.perf_counter()
        self._result = result = self._updater.train(batch.groups, request)
        self._told = None
        if isinstance(collector, RemoteCollector):
            self._told = collector.told([group.ticket for group in batch.groups])
        stops = torch.tensor([float(request.stop)], dtype=torch.float64)
        sum_over_world(runtime.groups, runtime.coord, stops, "the agreement on a stop")
        self._version += 1
        if self._renewal is not None:
            self._renewal.after(self._version)
        self._progress = replace(
            before,
            next_ticket=batch.next_ticket,
            optimizer_steps=before.optimizer_steps + result.steps,
            filtered=before.filtered + batch.filtered,
            failed=before.failed + batch.failed,
            critic_steps=self._critic.steps if self._critic is not None else 0,
        )
        return StepResult(
            loss=result.loss,
            grad_norm=result.grad_norm,
            stop=bool(stops[0] > 0),
            skipped=result.overflowed,
            tokens=result.tokens,
        )

    def evaluate(self, job: Job, step: int) -> dict[str, float] | None:
        every = self._job.run.evaluation.every
        if not every or step % every:
            return None
        found = self._measure(step)
        score, before = (found["pass_1"], found["mean_reward"]), self._progress.best_score
        if before is None or score > before:
            self._progress = replace(self._progress, best_step=step, best_score=score)
        return found

    def _measure(self, version: int) -> dict[str, float]:
        """What `Collector.evaluate` finds of the weights as they are, those of `version` batches."""
        finish_weight_sync(self._trainer.runtime)
        if isinstance(self._collector, RemoteCollector):
            self._collector.publish(version)
        found = self._collector.evaluate()
        self._trainer.stopwatch.read()
        return found

    @property
    def kept_step(self) -> int | None:
        """The step behind which the evaluation was best, if its checkpoint is to be kept."""
        return self._progress.best_step if self._job.run.evaluation.keep_best else None

    def describe(self, job: Job, record: StepRecord) -> RLMetrics:
        """The metrics of a step; also notes a few of its answers."""
        batch, seconds = self._batch, record.measured.step_seconds
        training_seconds = record.measured.end - self._training_since
        base = step_metrics(job, replace(record, evaluation=None))
        forecast = self._job.forecast
        metrics = RLMetrics(
            **{
                **vars(base),
                "forecast_step_seconds": forecast.step_seconds if forecast else None,
                **_of_answers(batch, self._job.run.reward.labels),
                **_of_updates(self._result),
            },
            version=record.progress.step - 1,
            staleness_mean=0.0,
            staleness_max=0,
            groups_zero_variance=batch.zero_variance,
            groups_filtered=batch.filtered,
            groups_failed=batch.failed,
            next_ticket=self._progress.next_ticket,
            optimizer_steps=self._progress.optimizer_steps,
            rounds=batch.rounds,
            slots_filled=batch.slots_filled,
            generation_seconds=batch.generation_seconds,
            scoring_seconds=batch.scoring_seconds,
            training_seconds=training_seconds,
            sync_seconds=0.0,
            sync_bytes=0,
            wait_seconds=max(0.0, seconds - batch.generation_seconds - training_seconds),
            idle_policy=max(0.0, 1 - training_seconds / seconds),
            idle_generation=max(0.0, 1 - batch.generation_seconds / seconds),
            samples_per_second=sum(len(group.samples) for group in batch.groups) / seconds,
            evaluation=record.evaluation,
            evaluation_at_start=self._at_start if record.progress.step == 1 else None,
        )
        if self._samples is not None:
            self._samples.write(record.progress.step, batch.groups, self._job.run.reward.labels)
        return metrics if self._told is None else _with_engines(metrics, self._told)

    def compute_seconds(self) -> float:
        return self._trainer.compute_seconds()

    def take_expert_tokens(self) -> list[list[int]] | None:
        return self._trainer.take_expert_tokens()

    def tensors(self) -> dict[str, LocalShard]:
        """The policy's, the critic's, and those of a reference that was renewed."""
        critic = self._critic.checkpoint_tensors() if self._critic is not None else {}
        reference = self._renewal.tensors if self._renewal is not None else {}
        return self._trainer.tensors() | critic | reference

    def state(self) -> Mapping[str, Any]:
        found = {"progress": asdict(self._progress), "run": as_plain(self._job.run)} | self._job.begun
        if self._job.run.data.skip_solved:
            found["prompts"] = self._job.prompts.state(self._progress.next_ticket)
        return {"rl": found}

    def finish(self) -> None:
        self._trainer.finish()

    def check_bits(self) -> None:
        self._trainer.check_bits()

    def stop_roles(self) -> None:
        """Tell what has cards of its own that the run has ended."""
        for role in self._roles:
            if isinstance(role, RemoteCollector | RemoteScores):
                role.stop()


def _make_reading_model(
    job: RLJob, trainer: Trainer, apart: RolePosition | None
) -> ReadingModel | RemoteReadingModel | None:
    if job.reading_model is None:
        return None
    if job.has_apart("reward"):
        assert job.roles is not None and apart is not None
        return RemoteReadingModel(job.roles, trainer, apart, job.run)
    return ReadingModel(job.reading_model, job.run, trainer)


def _build_policy(job: RLJob) -> tuple[Trainer, Progress, RowFeed, PolicyLoss]:
    """The trainer and its progress, and what it trains with; if the run needs a reference, which is made of
    it first, with the weights of step 0."""
    run = job.run
    policy = job.policy
    pipeline = policy.plan.pipeline_of(policy.position.rank)
    feed = RowFeed(micro_batch_size=pipeline.micro_batch_size, device=policy.device)
    loss = PolicyLoss(
        run.algorithm,
        correction=run.correction(job.mode),
        temperature=run.generation.temperature,
        device=policy.device.torch,
    )
    if policy.checkpoint is None or not run.needs_reference:
        trainer, progress = build(policy, feed=feed, objective=loss)
    else:
        start = find_checkpoints(_as_begun(job), anew=True)[1]
        fresh = replace(policy, checkpoint=None, start=start)
        trainer, progress = build(fresh, feed=feed, objective=loss)
    return trainer, progress, feed, loss


def _as_begun(job: RLJob) -> RunConfig:
    """The policy's run, with the very start of the run that it resumes: its directory may have newer ones."""
    run, name = job.policy.run, job.begun.get("start")
    given = run.start.checkpoint
    if name is None or name == Path(given or "").name:
        return run
    if not given or not name or not Path(given, name).is_dir():
        raise CheckpointError(
            f"start.checkpoint: {given or 'none'}: the reference of the run that is resumed is what it began "
            f"with, {name or 'no checkpoint'}; give that, or begin anew (checkpoint.resume: never)"
        )
    return replace(run, start=replace(run.start, checkpoint=str(Path(given, name))))


def _make_renewal(job: RLJob, trainer: Trainer, apart: RolePosition | None) -> Renewal:
    """What renews the reference: it has the trainer's weights, those of step 0, or those of which a
    checkpoint says that it was made."""
    policy = job.policy
    held = load_reference(policy.checkpoint, trainer) if policy.checkpoint is not None else {}
    if job.has_apart("reference"):
        assert job.roles is not None and apart is not None
        finish_weight_sync(trainer.runtime)
        reference = RemoteReference(job.roles, trainer, apart, job.run)
    else:
        reference = Reference(trainer.runtime, trainer.device)
    return Renewal(job.run.algorithm.kl.renew, trainer, reference, held=held)


def _make_engine(
    job: RLJob, trainer: Trainer, environments: Environments | None
) -> tuple[GenerationEngine, Conversation | None]:
    """What draws the answers of this rank's pipeline, and what they talk with."""
    ranks = pipeline_group(trainer.runtime, timeout_seconds=job.run.train.timeout)
    engine = make_engine(
        trainer.runtime,
        job.run,
        slots=job.slots(trainer.runtime.coord.pipeline),
        stopwatch=trainer.stopwatch,
        device=trainer.device.torch,
        ranks=ranks,
    )
    if job.run.turns is None:
        return engine, None
    first = talking_rank(job)
    assert first is not None
    requests = Requests(trainer.runtime.coord, None, first, ranks)
    return engine, Conversation(job.run, job.policy.tokenizer, requests, environments)


def _with_engines(metrics: RLMetrics, told: Told) -> RLMetrics:
    """The metrics of a step whose answers other cards drew; `batch.generation_seconds` was waiting."""
    ages = [metrics.version - drawn for drawn in told.versions]
    step = metrics.step_seconds
    return replace(
        metrics,
        staleness_mean=statistics.fmean(ages),
        staleness_max=max(ages),
        rounds=told.rounds,
        slots_filled=told.slots_filled,
        generation_seconds=told.engine_seconds,
        sync_seconds=told.sync_seconds,
        sync_bytes=told.sync_bytes,
        engine_tokens_per_second=told.tokens_per_second,
        scoring_seconds=told.scoring_seconds,
        idle_generation=max(0.0, 1 - told.engine_seconds / step),
    )


def _of_answers(batch: Collected, labels: Sequence[str]) -> dict[str, Any]:
    """What the metrics say of a batch's answers and their rewards."""
    samples = [sample for group in batch.groups for sample in group.samples]
    rewards = [reward for group in batch.groups for reward in group.rewards]
    scores = [row for group in batch.groups for row in group.scores]
    lengths = [sample.num_drawn for sample in samples]
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    by_function = {label: _mean([row[i] for row in scores]) for i, label in enumerate(labels)}
    if episodes:
        by_function |= {"environment": _mean([episode.reward for episode in episodes])}
    drawn = math.fsum(p for sample in samples for p in sample.log_probs)
    return {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "rewards": by_function,
        "answer_tokens": {"mean": statistics.fmean(lengths), "max": max(lengths)},
        "truncated": sum(sample.ended == "limit" for sample in samples) / len(samples),
        "entropy_estimate": -drawn / sum(lengths),
        "environment_tokens": sum(len(sample.ids) for sample in samples) - sum(lengths),
        "turns": sum(episode.turns for episode in episodes) / len(samples) if episodes else 1.0,
    }


def _mean(scores: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    found = [score for score in scores if score is not None]
    return statistics.fmean(found) if found else None


def _of_updates(result: UpdateResult) -> dict[str, Any]:
    """What the metrics say of the optimizer steps of a batch."""
    found, critic = result.measures, result.critic
    return {
        "kl": found.get("kl"),
        "ratio_mean": found.get("ratio"),
        "ratio_max": found.get("ratio_max"),
        "clipped": found.get("clipped"),
        "log_prob_gap": {"mean": found.get("gap"), "max": found.get("gap_max")},
        "value_loss": critic.loss if critic is not None else None,
        "teacher_kl": result.teacher_kl,
        "explained_variance": critic.explained_variance if critic is not None else None,
    }
