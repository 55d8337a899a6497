"""Roles on cards of their own: the policy's side issues tickets and publishes weights, engines serve them.

The controller is rank 0 of the policy. Tickets of batch k are issued when version k - staleness is published
(`schedule.flow.newest_batch`), and consumed in their order, so that an answer's weights are never older than
the bound and none is thrown away for its age. An engine does what it is told in the order in which
it is told: take weights, answer tickets, stop. While it answers, the policy trains.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from yuan_train.config.architecture import sharding_of
from yuan_train.config.errors import TrainingError
from yuan_train.config.rl import RLConfig
from yuan_train.config.rl_plan import RlPlan
from yuan_train.parallel.apply import ModelParts, RankRuntime, parallelize
from yuan_train.parallel.device import Device
from yuan_train.parallel.environment import tell_launcher
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.grid import Grid
from yuan_train.parallel.groups import (
    as_training_error,
    guard_world_collective,
    wait_for_world,
)
from yuan_train.parallel.links import RolePosition, enter_role, join_role, move_weights
from yuan_train.parallel.transport import blame_peers, wait_for_all
from yuan_train.rl.collect import Collector
from yuan_train.rl.engines import (
    Channel,
    Engines,
    connect_seconds,
    engine_ranks,
    fates_of,
    job_ranks,
    message_link,
    shares_of,
    weight_buckets,
    weight_link,
)
from yuan_train.rl.generator import Drawing, NotFiniteDraw, make_engine, pipeline_group
from yuan_train.rl.job import RLJob
from yuan_train.rl.remote import RemoteRewardModel
from yuan_train.rl.reward_model import RewardModel
from yuan_train.rl.rewards import Scorers
from yuan_train.rl.tickets import Sample, Ticket, share_out
from yuan_train.schedule.flow import newest_batch
from yuan_train.train.build import DTYPES, build_part, own_weights
from yuan_train.train.ending import ending_together
from yuan_train.train.forms import settle_forms
from yuan_train.train.out_of_memory import explaining_memory
from yuan_train.train.run import stop_on_sigterm
from yuan_train.train.step import Trainer


@dataclass(frozen=True)
class Told:
    """What the engines have told of a batch, for the metrics."""

    versions: tuple[int, ...]
    """Of the weights that drew each group."""
    engine_seconds: float
    """Of generation, the busiest engine's."""
    rounds: int
    """The most of any engine."""
    sync_seconds: float
    """In which the policy packed weights and waited for those before to be taken."""
    sync_bytes: int


@dataclass(frozen=True)
class _ToldOfTicket:
    """What an engine told of a ticket: the version of its weights, and the ticket's part of what a message of
    several took."""

    version: int
    engine: int
    seconds: float
    rounds: float


class RemoteCollector(Collector):
    """Collects batches from engines on other cards; every rank of the policy calls the same."""

    def __init__(
        self,
        job: RLJob,
        trainer: Trainer,
        scorers: Scorers | None,
        reward_model: RewardModel | RemoteRewardModel | None,
        position: RolePosition,
    ) -> None:
        super().__init__(job, trainer, None, scorers, reward_model)
        roles = job.roles
        assert roles is not None, "roles are apart"
        run = job.run
        self._staleness = roles.staleness
        self._shares = roles.engine_shares
        self._engines = Engines(
            roles,
            position,
            dtype=DTYPES[run.train.precision],
            timeout_seconds=connect_seconds(run.train),
            on_lost=run.generation.on_lost_engine,
        )
        self._published = -1
        self._issued = 0
        self._owner: dict[int | str, int] = {}
        self._found: dict[int | str, list[Sample]] = {}
        self._told: dict[int | str, _ToldOfTicket] = {}
        """Of each ticket since the last batch."""
        self._told_early: dict[int | str, _ToldOfTicket] = {}
        """The same of tickets that no batch has taken yet."""
        self._open: dict[int | str, tuple[Ticket, Drawing]] = {}
        """On the controller: what is asked and not answered; if its engine is lost, another one is asked."""
        self._sync_seconds, self._sync_bytes = 0.0, 0

    def begin(self, version: int, *, first_ticket: int, replaced: int) -> None:
        """Publish the weights of `version` batches, and issue all tickets that it allows; `replaced` are the
        groups that were filtered or failed so far."""
        self.publish(version)
        per_step = self._job.run.train.prompts_per_step
        limit = (newest_batch(version, self._staleness) + 1) * per_step + replaced
        group = self._job.run.algorithm.group
        first = max(self._issued, first_ticket)
        # In messages of a batch each: an engine takes new weights between two of them.
        for start in range(first, limit, per_step):
            numbers = range(start, min(start + per_step, limit))
            self._issue([Ticket(n, self._job.prompts[n].ids, group) for n in numbers], self._drawing)
        self._issued = max(limit, first)

    def publish(self, version: int) -> None:
        """Send the engines the weights as they are, those of `version` batches, unless they have had them."""
        if version == self._published:
            return
        start = time.perf_counter()
        runtime = self._trainer.runtime
        with as_training_error(runtime.coord):
            self._sync_bytes = self._engines.publish(version, own_weights(runtime), runtime.shards)
        self._published = version
        self._sync_seconds = time.perf_counter() - start
        self._ask_again()

    def told(self, tickets: Sequence[int]) -> Told:
        """What the engines told of a batch of these tickets; on rank 0 with seconds."""
        versions = tuple(self._told[number].version for number in tickets)
        seconds, rounds = dict[int, float](), dict[int, float]()
        for told in self._told.values():
            seconds[told.engine] = seconds.get(told.engine, 0.0) + told.seconds
            rounds[told.engine] = rounds.get(told.engine, 0.0) + told.rounds
        self._told.clear()
        return Told(
            versions,
            max(seconds.values()),
            round(max(rounds.values())),
            self._sync_seconds,
            self._sync_bytes,
        )

    def stop(self) -> None:
        """Tell the engines to end, once they have taken all that was sent."""
        with as_training_error(self._trainer.runtime.coord):
            self._engines.stop()

    def _issue(self, tickets: Sequence[Ticket], drawing: Drawing) -> None:
        self._ask(tickets, drawing)
        self._ask_again()

    def _ask(self, tickets: Sequence[Ticket], drawing: Drawing) -> None:
        """Ask the engines that are left; one that is lost now has its tickets in `_open`."""
        left = self._engines.left
        for engine, own in zip(left, share_out(tickets, shares_of(self._shares, left)), strict=True):
            self._owner |= dict.fromkeys((ticket.number for ticket in own), engine)
            if own and self._engines.is_controller:
                self._open |= {ticket.number: (ticket, drawing) for ticket in own}
                if engine in self._engines.left:
                    with as_training_error(self._trainer.runtime.coord):
                        self._engines.tell(engine, ("generate", own, drawing))

    def _ask_again(self) -> None:
        """Ask the engines that are left for what those that are lost have not answered, in its order."""
        per_step = self._job.run.train.prompts_per_step
        while lost := [n for n in self._open if self._owner[n] not in self._engines.left]:
            drawing = self._open[lost[0]][1]
            same = [n for n in lost if self._open[n][1] == drawing][:per_step]
            self._ask([self._open[n][0] for n in same], drawing)

    def _generate(self, tickets: Sequence[Ticket], drawing: Drawing) -> list[list[Sample]]:
        """The answers to each ticket, on all ranks of the policy; waits for the engines that have them."""
        missing = [ticket for ticket in tickets if ticket.number not in self._owner]
        if missing:
            self._issue(missing, drawing)
            numbers = [ticket.number for ticket in missing if isinstance(ticket.number, int)]
            self._issued = max([self._issued, *(number + 1 for number in numbers)])
        with as_training_error(self._trainer.runtime.coord):
            for ticket in tickets if self._engines.is_controller else ():
                while len(self._found.get(ticket.number, ())) < ticket.count:
                    self._take(self._owner[ticket.number])
                    self._ask_again()
        wait_for_world(self._trainer.runtime.coord, "the engines' answers")
        told: list[Any] = [None]
        for ticket in tickets:
            del self._owner[ticket.number]
        if self._engines.is_controller:
            samples = [self._found.pop(ticket.number) for ticket in tickets]
            told[0] = samples, {ticket.number: self._told_early.pop(ticket.number) for ticket in tickets}
        if dist.is_initialized():
            with guard_world_collective(self._trainer.runtime.coord, "the broadcast of answers"):
                dist.broadcast_object_list(told, src=0)
        self._told |= {number: found for number, found in told[0][1].items() if isinstance(number, int)}
        return told[0][0]

    def _take(self, engine: int) -> None:
        """The next answers of an engine; none if it is lost and others are left."""
        answers = self._engines.hear(engine)
        if answers is None:
            return
        if answers["error"] is not None:
            raise TrainingError(f"engine {engine}: {answers['error']}")
        for sample in answers["samples"]:
            self._found.setdefault(sample.ticket, []).append(sample)
        tickets = {sample.ticket for sample in answers["samples"]}
        for ticket in tickets:
            del self._open[ticket]
        count = max(len(tickets), 1)
        told = _ToldOfTicket(
            answers["version"], engine, answers["seconds"] / count, answers["rounds"] / count
        )
        self._told_early |= dict.fromkeys(tickets, told)


# --- an engine -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineJob:
    """What a rank of generation needs."""

    run: RLConfig
    roles: RlPlan
    device: Device


def serve(job: EngineJob) -> None:
    """A rank of an engine, until the controller says stop. Raises TrainingError if another rank is lost."""
    run, roles = job.run, job.roles
    plan = roles.roles.generation.plan
    assert plan is not None, "roles are apart"
    position = join_role(
        job_ranks(roles),
        fates=fates_of(roles, run.generation.on_lost_engine),
        startup_seconds=run.train.startup_timeout,
    )
    dtype = DTYPES[run.train.precision]
    # The policy ends the run, also on SIGTERM; engines then hear of it.
    explaining = explaining_memory(plan, position.rank, job.device)
    with stop_on_sigterm(), ending_together(position.board, job.device), position.naming_role(), explaining:
        enter_role(position, device=job.device, timeout_seconds=run.train.timeout)
        settle_forms(Grid(plan), position.rank, device=job.device, dtype=dtype)
        sharding, row_blocks = sharding_of(run.model)
        parts = ModelParts(
            build=partial(build_part, run.model, dtype),
            initial=None,
            sharding=sharding,
            row_blocks=row_blocks,
        )
        runtime = parallelize(
            plan,
            position.rank,
            parts,
            device=job.device,
            dtype=dtype,
            timeout_seconds=run.train.timeout,
            startup_timeout_seconds=run.train.startup_timeout,
            trained=False,
        )
        with as_training_error(runtime.coord):
            _Server(job, runtime, position, dtype).run()


class _Server:
    def __init__(
        self, job: EngineJob, runtime: RankRuntime, position: RolePosition, dtype: torch.dtype
    ) -> None:
        run, roles = job.run, job.roles
        coord, grid = runtime.coord, runtime.grid
        self._group = pipeline_group(runtime, timeout_seconds=run.train.timeout)
        leader, ranks = engine_ranks(roles)[coord.pipeline][0], job_ranks(roles)
        self._leader = leader - ranks["generation"].start
        self._channel: Channel | None = None
        controller = ranks["policy"].start
        if position.job_rank == leader:
            talk = message_link(roles, coord.pipeline, position, connect_seconds(run.train))
            self._channel = Channel(talk, controller)
        self._link = weight_link(roles, coord.pipeline, position, connect_seconds(run.train))
        self._first = weight_buckets(roles, dtype.itemsize, trained=False)[coord.pipeline]
        self._buckets = weight_buckets(roles, dtype.itemsize, trained=True)[coord.pipeline]
        tell_launcher(position.job_rank)
        self._runtime, self._position, self._dtype = runtime, position, dtype
        pipeline = grid.plan.pipelines[coord.pipeline]
        self._engine = make_engine(
            runtime,
            run,
            slots=pipeline.num_sequences,
            groups=pipeline.num_micro_batches,
            stopwatch=Stopwatch(job.device, slowdown=grid.slowdown(coord.rank)),
            device=job.device.torch,
            ranks=self._group,
        )

    def run(self) -> None:
        """Do what the controller says, in order."""
        version = -1
        while True:
            kind, *rest = self._next()
            if kind == "stop":
                return
            if kind == "weights":
                buckets = self._first if version < 0 else self._buckets
                version = rest[0]
                move_weights(
                    buckets,
                    own_weights(self._runtime),
                    self._runtime.shards,
                    link=self._link,
                    job_rank=self._position.job_rank,
                    dtype=self._dtype,
                )
                continue
            tickets, drawing = cast("tuple[list[Ticket], Drawing]", tuple(rest))
            start, samples, error = time.perf_counter(), list[Sample](), None
            try:
                samples = self._engine.generate(tickets, drawing)
            except NotFiniteDraw as failure:
                error = str(failure)
            if self._channel is not None:
                self._channel.send(
                    {
                        "version": version,
                        "seconds": time.perf_counter() - start,
                        "rounds": self._engine.clock.rounds,
                        "samples": samples,
                        "error": error,
                    }
                )

    def _next(self) -> Any:
        """The next message, on all ranks of the engine."""
        told: list[Any] = [self._channel.receive() if self._channel is not None else None]
        if self._group is not None:
            what, ranks = "the controller's message", dist.get_process_group_ranks(self._group)
            with as_training_error(self._runtime.coord):
                wait_for_all(ranks, what, self._group)
                with blame_peers(what, ranks):
                    dist.broadcast_object_list(told, src=self._leader, group=self._group)
        return told[0]
