"""A rank of a role that scores rows on cards of its own: the reference, or the reward model.

It does what the controller says until that says stop: a forward pass over some rows, under any plan, and a
number of each token or sequence back. Nothing is trained, so there is neither gradient nor optimizer state.
The reference has its weights from the policy, once; a reward model reads its checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from yuan_train.checkpoint.load import Checkpoint
from yuan_train.config.errors import PlanError
from yuan_train.config.rl import RLConfig, policy_run
from yuan_train.config.rl_plan import RlPlan, ScoringRole
from yuan_train.parallel.groups import as_training_error
from yuan_train.parallel.links import RolePosition, move_weights
from yuan_train.rl.engines import Channel, connect_seconds, role_buckets
from yuan_train.rl.experience import Answers, RowFeed, Rows
from yuan_train.rl.lanes import Lanes, Recorder
from yuan_train.rl.losses import TokenScores
from yuan_train.rl.remote import role_message_link, role_weight_link
from yuan_train.rl.reward_model import LastValues, find_reward_model
from yuan_train.rl.service import Requests, joining
from yuan_train.train.build import DTYPES, build, load_runtime, own_weights
from yuan_train.train.job import Job, Position, check_position
from yuan_train.train.step import Trainer


@dataclass(frozen=True)
class ScoringJob:
    """What a rank of such a role needs; the ranks are not connected yet."""

    run: RLConfig
    roles: RlPlan
    role: ScoringRole
    own: Job
    """Of a trainer that only runs forward."""
    reward_model: Checkpoint | None


def prepare_scoring(run: RLConfig, roles: RlPlan, role: ScoringRole, position: Position) -> ScoringJob:
    """Check the files of a rank of a role, whose `position` is that in it. Raises YuanError."""
    plan = roles.plans[role]
    own = replace(policy_run(run, sequence_length=plan.sequence_length), model=plan.model)
    device, tokenizer = check_position(own, plan, position)
    reward_model = find_reward_model(run, tokenizer) if role == "reward" else None
    if reward_model is not None and replace(reward_model.model, name="") != replace(plan.model, name=""):
        raise PlanError(
            f"roles.reward.plan.model: not that of {reward_model.path} (reward.model.checkpoint); plan again"
        )
    job = Job(own, plan, position, device, Answers([]), None, tokenizer, None)
    return ScoringJob(run, roles, role, job, reward_model)


def serve_scores(job: ScoringJob) -> None:
    """Score until the controller says stop. Raises TrainingError if another rank is lost."""
    with joining(job.run, job.roles, job.own.plan, job.own.device) as position:
        _serve(job, position)


def _serve(job: ScoringJob, position: RolePosition) -> None:
    pipelines = job.own.plan.pipelines
    pipeline = next(p for p in pipelines if position.rank in {r for s in p.stages for r in s.ranks})
    feed = RowFeed(micro_batch_size=pipeline.micro_batch_size, device=job.own.device)
    trainer, _ = build(job.own, feed=feed, trained=False)
    _fill(job, trainer, position)
    lanes, coord = Lanes(trainer, feed), trainer.runtime.coord
    channel: Channel | None = None
    if position.rank == 0:
        with as_training_error(coord):
            link = role_message_link(job.roles, job.role, position, connect_seconds(job.run.train))
        channel = Channel(link, job.roles.role_ranks["policy"].start)
    requests = Requests(coord, channel, 0, dist.group.WORLD if dist.is_initialized() else None)
    for _, rows, count in requests:
        requests.answer(_score(job, lanes, rows, count))


def _score(job: ScoringJob, lanes: Lanes, rows: Rows, count: int) -> torch.Tensor:
    """A number of each of `count` tokens or sequences: fp64 on the host, on all ranks of the role."""

    def make(place_RS: torch.Tensor) -> Recorder:
        if job.role == "reward":
            return LastValues(place_RS, count)
        return TokenScores(place_RS, count, temperature=job.run.generation.temperature)

    return lanes.record(rows, make, "scores")


def _fill(job: ScoringJob, trainer: Trainer, position: RolePosition) -> None:
    """Fill this rank's weights: those of the policy, or a checkpoint's."""
    runtime, dtype = trainer.runtime, DTYPES[job.run.train.precision]
    weights = own_weights(runtime)
    if job.reward_model is None:
        with as_training_error(runtime.coord):
            move_weights(
                role_buckets(job.roles, job.role, dtype.itemsize),
                weights,
                runtime.shards,
                link=role_weight_link(job.roles, job.role, position, connect_seconds(job.run.train)),
                job_rank=position.job_rank,
                dtype=dtype,
            )
        return
    load_runtime(job.reward_model, runtime)
