"""A rank of a role that scores rows on cards of its own: the reference, or a reward model or teacher.

It does what the controller says until that says stop: a forward pass over some rows, under any plan, and a
number of each token or sequence back. Nothing is trained, so there is neither gradient nor optimizer state.
The reference has its weights from the policy, once or, renewed, again; the others read their checkpoints.

The one loop of a rank that works for the policy: it does what the controller asks until that says stop.

Engines and the roles that score rows differ in what they do for a request; how their ranks come together,
hear the controller and end is here. The first rank of an engine, or of a role, leads: it alone talks to the
controller, and tells the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch.distributed as dist

from yuan_train.checkpoint.load import Checkpoint
from yuan_train.config.errors import PlanError
from yuan_train.config.plan import Plan
from yuan_train.config.rl import RLConfig, policy_run
from yuan_train.config.rl_plan import RlPlan, ScoringRole
from yuan_train.parallel.board import RolePosition, join_role
from yuan_train.parallel.device import Device
from yuan_train.parallel.grid import RankCoord
from yuan_train.parallel.groups import as_training_error, enter_role, share_object
from yuan_train.parallel.transfer import take_weights
from yuan_train.parallel.transport import blame_peers, wait_for_all
from yuan_train.rl.engines import (
    Channel,
    connect_seconds,
    fates_of,
    job_ranks,
    message_link,
    role_buckets,
    weight_link,
)
from yuan_train.rl.experience import Answers, Rows
from yuan_train.rl.passes import Lanes, RowFeed, find_reading_model, last_values, log_probs_at
from yuan_train.train.build import DTYPES, build, load_runtime, own_weights
from yuan_train.train.ending import ending_together, explaining_memory, stop_on_sigterm
from yuan_train.train.job import Job, Position, check_position
from yuan_train.train.step import Trainer


@contextmanager
def joining(run: RLConfig, roles: RlPlan, plan: Plan, device: Device) -> Iterator[RolePosition]:
    """Around the work of a rank of a role with this plan: it meets all others, and ends with them.

    The policy ends the run, also on SIGTERM; the other roles then hear of it. Raises TrainingError if another
    rank is lost.
    """
    position = join_role(
        job_ranks(roles),
        fates=fates_of(roles, run.generation.on_lost_engine),
        startup_seconds=run.train.startup_timeout,
    )
    explaining = explaining_memory(plan, position.rank, device)
    with stop_on_sigterm(), ending_together(position.board, device), position.naming_role(), explaining:
        enter_role(position, device=device, timeout_seconds=run.train.timeout)
        yield position


class Requests:
    """The controller's messages, on all ranks of an engine or a role; its leader answers them."""

    def __init__(
        self, coord: RankCoord, channel: Channel | None, leader: int, group: dist.ProcessGroup | None
    ) -> None:
        """`channel`: on the leader, which is rank `leader` of the role; `group`: its ranks, None for one."""
        self._coord, self.channel, self._leader, self._group = coord, channel, leader, group

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """The requests, as long as there are some."""
        while (request := self.tell(self.channel and self.channel.receive()))[0] != "stop":
            yield request

    def tell(self, value: Any) -> Any:
        """The leader's value, on all ranks; they wait for it, however long that takes."""
        if self._group is None:
            return value
        what, ranks = "the controller's message", dist.get_process_group_ranks(self._group)
        with as_training_error(self._coord):
            wait_for_all(ranks, what, self._group)
            with blame_peers(what, ranks):
                return share_object(value, source=self._leader, group=self._group)

    def answer(self, value: Any) -> None:
        """On the leader, start to send the controller a value; on the others nothing."""
        if self.channel is not None:
            self.channel.send(value)

    def end(self) -> None:
        """The last word: the controller listens no longer."""
        if self.channel is not None:
            self.channel.send(None)
            self.channel.flush()


@dataclass(frozen=True)
class ScoringJob:
    """What a rank of such a role needs; the ranks are not connected yet."""

    run: RLConfig
    roles: RlPlan
    role: ScoringRole
    own: Job
    """Of a trainer that only runs forward."""
    reading_model: Checkpoint | None


def prepare_scoring(run: RLConfig, roles: RlPlan, role: ScoringRole, position: Position) -> ScoringJob:
    """Check the files of a rank of a role, whose `position` is that in it. Raises YuanError."""
    plan = roles.plans[role]
    own = replace(policy_run(run, sequence_length=plan.sequence_length), model=plan.model)
    device, tokenizer = check_position(own, plan, position)
    reading_model = find_reading_model(run, tokenizer) if role == "reward" else None
    if reading_model is not None and replace(reading_model.model, name="") != replace(plan.model, name=""):
        raise PlanError(
            f"roles.reward.plan.model: not that of {reading_model.path} (of reward.model or "
            "reward.teacher); plan again"
        )
    job = Job(own, plan, position, device, Answers([]), None, tokenizer, None)
    return ScoringJob(run, roles, role, job, reading_model)


def serve_scores(job: ScoringJob) -> None:
    """Score until the controller says stop. Raises TrainingError if another rank is lost."""
    with joining(job.run, job.roles, job.own.plan, job.own.device) as position:
        _serve(job, position)


def _serve(job: ScoringJob, position: RolePosition) -> None:
    judges = job.role == "reward" and job.run.reward.model is not None
    numbers = last_values if judges else log_probs_at(job.run.generation.temperature)
    pipeline = job.own.plan.pipeline_of(position.rank)
    feed = RowFeed(micro_batch_size=pipeline.micro_batch_size, device=job.own.device)
    trainer, _ = build(job.own, feed=feed, trained=False)
    take = _fill(job, trainer, position)
    lanes, coord = Lanes(trainer, feed), trainer.runtime.coord
    channel: Channel | None = None
    if position.rank == 0:
        with as_training_error(coord):
            link = message_link(job.roles, job.role, position, connect_seconds(job.run.train))
        channel = Channel(link, job.roles.role_ranks["policy"].start)
    requests = Requests(coord, channel, 0, dist.group.WORLD if dist.is_initialized() else None)
    for kind, *rest in requests:
        if kind == "weights":
            assert take is not None, "a checkpoint's weights stay as they are"
            with as_training_error(coord):
                take(True)
            continue
        rows, count = cast("tuple[Rows, int]", tuple(rest))
        # A number of each token or sequence: fp64 on the host, on all ranks of the role.
        requests.answer(lanes.record(rows, count, numbers, "scores"))


_Take = Callable[[bool], None]
"""Takes the weights that the policy sends: all, or those alone that are trained. Raises LostPeer."""


def _fill(job: ScoringJob, trainer: Trainer, position: RolePosition) -> _Take | None:
    """Fill this rank's weights: a checkpoint's, or those of the policy; returns what takes its next ones."""
    runtime, dtype, roles = trainer.runtime, DTYPES[job.run.train.precision], job.roles
    if job.reading_model is not None:
        load_runtime(job.reading_model, runtime)
        return None
    with as_training_error(runtime.coord):
        link = weight_link(roles, job.role, position, connect_seconds(job.run.train))

        def take(trained: bool) -> None:
            take_weights(
                role_buckets(roles, job.role, dtype.itemsize, trained=trained),
                own_weights(runtime),
                runtime.shards,
                link=link,
                dtype=dtype,
            )

        take(False)
    return take
