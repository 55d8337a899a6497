"""The roles of a run that have cards of their own, and what joins them to the policy: messages and weights.

Each engine has links of its own: what becomes of one leaves the links to the others as they are. An engine
that is lost is let go with its links, which tells what is left of it to end, if the run goes on with the
others (`generation.on_lost_engine`).

A role that scores rows is the reference, or a reward model or teacher. The controller, rank 0 of the policy,
sends rows to the role's leader and takes a number of each token, or of each sequence, back; all ranks of the
policy get them. A rank of the role does what the controller says until that says stop: a forward pass over
some rows, under any plan. Nothing is trained, so there is neither gradient nor optimizer state. The reference
has its weights from the policy, once or, renewed, again; the others read their checkpoints.

How the ranks of an engine or a role come together, hear the controller and end is here too. The first one
leads: it alone talks to the controller, and tells the others.
"""

from __future__ import annotations

import functools
import logging
import pickle
import queue
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.checkpoint.load import Checkpoint
from yuan_train.config.errors import PlanError, hearing
from yuan_train.config.model import is_trained
from yuan_train.config.plan import Plan, node_of
from yuan_train.config.rl import OnLostEngine, RLConfig, policy_run
from yuan_train.config.rl_plan import RlPlan, RoleName, ScoringRole
from yuan_train.config.run import TrainConfig
from yuan_train.parallel.board import RolePosition, join_role
from yuan_train.parallel.device import Device
from yuan_train.parallel.grid import RankCoord
from yuan_train.parallel.groups import (
    as_training_error,
    enter_role,
    guard_world_collective,
    share_object,
    wait_for_world,
)
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.transfer import (
    MoveBucket,
    Outlet,
    RankLink,
    make_buckets,
    plan_holdings,
    take_weights,
    transfer_table,
)
from yuan_train.parallel.transport import LostPeer, blame_peers, wait_for_all
from yuan_train.rl.experience import Answers, Rows, make_score_rows
from yuan_train.rl.passes import Lanes, RowFeed, find_reading_model, last_values, log_probs_at
from yuan_train.train.build import DTYPES, build, load_runtime, own_weights
from yuan_train.train.ending import ending_together, explaining_memory
from yuan_train.train.job import Job, Position, check_position
from yuan_train.train.step import Trainer

HEADER = 8
"""Numbers of a header: the version of this format, the bytes of the body, how many messages its sender has
read from this link's other end; the others are 0."""
VERSION = 1


class Channel:
    """Both directions between this rank and another one of a link."""

    def __init__(self, link: RankLink, peer: int) -> None:
        self._link, self._peer = link, peer
        self._sends: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        """Header and body of each message that is not known to be read."""
        self._num_sent = self._num_read = self._num_let_go = 0
        self._letting_go = threading.Lock()
        """A thread may read while another one sends."""

    def send(self, value: Any) -> None:
        """Start to send a value; it is kept until `receive` learns that it was read."""
        body = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        header = torch.zeros(HEADER, dtype=torch.int64)
        header[0], header[1], header[2] = VERSION, len(body), self._num_read
        self._sends.append((self._link.send(header, self._peer), self._link.send(body, self._peer)))
        self._num_sent += 1

    def receive(self) -> Any:
        """The next value from there, however long it takes to come; lets go of the messages that were read
        there before it was sent. Raises LostPeer, naming the rank's role, if it is gone."""
        header = torch.zeros(HEADER, dtype=torch.int64)
        self._link.receive(header, self._peer)()
        assert int(header[0]) == VERSION, "both ends are of one release"
        body = torch.empty(int(header[1]), dtype=torch.uint8)
        self._link.receive(body, self._peer)()
        self._num_read += 1
        self._let_go(int(header[2]))
        return pickle.loads(body.numpy().tobytes())

    def flush(self) -> None:
        """Wait until all that was sent has been taken."""
        self._let_go(self._num_sent)

    def _let_go(self, num_read: int) -> None:
        """Wait for the oldest sends, so many since the start: which is short for those that were read."""
        with self._letting_go:
            while self._num_let_go < num_read:
                for wait in self._sends.popleft():
                    wait()
                self._num_let_go += 1


class Inbox:
    """What comes from some channels, read by a thread of each: it can be asked whether something is there.

    A channel's last message is None. What ends a thread otherwise is raised where it is taken.
    """

    def __init__(self) -> None:
        self._found: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._readers: dict[int, threading.Thread] = {}

    def open(self, number: int, channel: Channel) -> None:
        """Read a channel from now on."""
        reader = threading.Thread(target=self._read, args=(number, channel), daemon=True)
        self._readers[number] = reader
        reader.start()

    def _read(self, number: int, channel: Channel) -> None:
        value: Any = ()
        while value is not None and not (isinstance(value, tuple) and value[:1] == ("stop",)):
            try:
                value = channel.receive()
            except Exception as error:
                # Whoever takes it raises it; without the frames, which would hold the link.
                self._found.put((number, type(error)(*error.args)))
                return
            if value is not None:
                self._found.put((number, value))

    def put(self, number: int, value: Any) -> None:
        """Add a message that came by no channel."""
        self._found.put((number, value))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there now."""
        return self._found.empty()

    def take(self) -> tuple[int, Any]:
        """The next message, or exception, of any channel, and the channel's number; waits for it."""
        return self._found.get()

    def close(self, numbers: Sequence[int]) -> None:
        """Wait for the last messages of these channels."""
        for number in numbers:
            self._readers[number].join()


logger = logging.getLogger(__name__)


def job_ranks(roles: RlPlan) -> dict[str, range]:
    """The ranks of the job of each role."""
    return {str(name): ranks for name, ranks in roles.role_ranks.items()}


def engine_ranks(roles: RlPlan) -> list[tuple[int, ...]]:
    """The ranks of the job of each engine, its leader first: the first rank of its first stage."""
    engines = roles.roles.generation.plan
    assert engines is not None, "roles are apart"
    first = roles.role_ranks["generation"].start
    found: list[tuple[int, ...]] = []
    for pipeline in engines.pipelines:
        leader = pipeline.stages[0].replicas[0][0]
        others = sorted(pipeline.ranks - {leader})
        found.append(tuple(first + rank for rank in (leader, *others)))
    return found


def fates_of(roles: RlPlan, on_lost: OnLostEngine) -> list[tuple[int, ...]]:
    """The ranks of the job that end together: all, or, where the run goes on without a lost engine, those of
    each engine, and all others."""
    job = tuple(range(roles.world_size))
    if on_lost != "go_on" or roles.roles.generation.is_shared:
        return [job]
    engines = [tuple(sorted(ranks)) for ranks in engine_ranks(roles)]
    return [tuple(rank for rank in job if not any(rank in own for own in engines)), *engines]


def role_buckets(
    roles: RlPlan, role: RoleName, itemsize: int, *, trained: bool = False
) -> tuple[MoveBucket, ...]:
    """What each rank of the policy sends to each rank of a role with the same model: all parameters, or only
    those that are `trained`."""
    nodes = [node_of(entry) for entry in roles.ranks]
    table = transfer_table(
        plan_holdings(roles.roles.policy.plan),
        plan_holdings(roles.plans[role], first_rank=roles.role_ranks[role].start),
        node_of=lambda rank: nodes[rank],
    )
    model = roles.roles.policy.plan.model
    moves = [move for move in table if not trained or is_trained(model, move.name)]
    return make_buckets(moves, itemsize=itemsize)


def weight_buckets(roles: RlPlan, itemsize: int, *, trained: bool) -> list[tuple[MoveBucket, ...]]:
    """What each rank of the policy sends to each rank of each engine, the same on all ranks.

    An engine has all parameters once; then those that are `trained`: of a policy with adapters these alone.
    """
    buckets = role_buckets(roles, "generation", itemsize, trained=trained)
    return [tuple(b for b in buckets if b.target in ranks) for ranks in engine_ranks(roles)]


def connect_seconds(train: TrainConfig) -> float:
    """How long a rank waits for a link to be made: others may load their weights before they come to it."""
    return max(train.startup_timeout, train.timeout)


def _other_end(roles: RlPlan, other: int | ScoringRole) -> tuple[str, tuple[int, ...]]:
    """An engine, by number, or another role: what links call it, and its ranks, the leader first."""
    if isinstance(other, int):
        return f"engine {other}", engine_ranks(roles)[other]
    return f"the {other}", tuple(roles.role_ranks[other])


def message_link(
    roles: RlPlan, other: int | ScoringRole, position: RolePosition, timeout_seconds: float
) -> RankLink:
    """The link of the controller and the leader of an engine or a role, on either of them."""
    name, ranks = _other_end(roles, other)
    ends = [roles.role_ranks["policy"].start, ranks[0]]
    return RankLink(f"messages of {name}", ends, position, timeout_seconds=timeout_seconds)


def weight_link(
    roles: RlPlan, other: int | ScoringRole, position: RolePosition, timeout_seconds: float
) -> RankLink:
    """The link of the policy's ranks and those of an engine or a role, on any of them."""
    name, ranks = _other_end(roles, other)
    ends = [*roles.role_ranks["policy"], *ranks]
    return RankLink(f"weights of {name}", ends, position, timeout_seconds=timeout_seconds)


class EngineEnds(ABC):
    """The ends of a rank of the policy of all engines; the controller's, rank 0's, have messages too."""

    def __init__(self, rank: int) -> None:
        self.is_controller = rank == 0
        """Whether this rank talks to engines."""

    @property
    @abstractmethod
    def left(self) -> tuple[int, ...]:
        """The engines that this rank has not found to be lost."""

    @abstractmethod
    def tell(self, engine: int, message: Any) -> None:
        """On the controller: start to send an engine a message, behind those that it has."""

    def tell_all(self, message: Any) -> None:
        """On the controller: `tell` the engines that are left."""
        for engine in self.left:
            self.tell(engine, message)

    @abstractmethod
    def hear(self) -> tuple[int, Any | None]:
        """On the controller: the next message of any engine, and which; None if it is lost and the run goes
        on. Waits for it."""

    @abstractmethod
    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> int:
        """Give all engines the weights of `version`: this rank's parts, as they are. Returns its bytes."""

    @abstractmethod
    def stop(self) -> None:
        """Tell the engines to end."""


class Engines(EngineEnds):
    """Those of engines on cards of the job."""

    def __init__(
        self,
        roles: RlPlan,
        position: RolePosition,
        *,
        dtype: torch.dtype,
        timeout_seconds: float,
        run: RLConfig,
    ) -> None:
        super().__init__(position.rank)
        self._position = position
        self._goes_on = run.generation.on_lost_engine == "go_on"
        first, trained = (weight_buckets(roles, dtype.itemsize, trained=only) for only in (False, True))
        self._outlets: dict[int, list[Outlet]] = {}
        """By engine, of what it has next, and, where that is not the same, of what it has from then on."""
        self._ranks = engine_ranks(roles)
        self._channels: dict[int, Channel] = {}
        self._links: dict[int, RankLink] = {}
        self._sends: dict[int, list[Callable[[], None]]] = {}
        self._inbox = Inbox()
        for engine in range(len(self._ranks)):
            if self.is_controller:
                talk = message_link(roles, engine, position, timeout_seconds)
                self._channels[engine] = Channel(talk, self._ranks[engine][0])
                self._inbox.open(engine, self._channels[engine])
            self._links[engine] = weight_link(roles, engine, position, timeout_seconds)
            make = functools.partial(Outlet, link=self._links[engine], dtype=dtype)
            again = make(trained[engine], by_difference=run.sync == "changed")
            whole = [] if first[engine] == trained[engine] else [make(first[engine], by_difference=False)]
            self._outlets[engine] = [*whole, again]

    @property
    def left(self) -> tuple[int, ...]:
        return tuple(self._links)

    def tell(self, engine: int, message: Any) -> None:
        """If it is lost, see `left`, or LostPeer."""
        with self._reaching(engine):
            self._channels[engine].send(message)

    def hear(self) -> tuple[int, Any | None]:
        engine, message = self._inbox.take()
        if not isinstance(message, Exception):
            return engine, message
        if engine in self._links:
            with self._reaching(engine):
                raise message
        return engine, None

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> int:
        """Start to send the weights of `version` to all engines, once those before are taken: all parameters
        at first, then those that are trained. Returns the bytes of this rank. Raises LostPeer."""
        if self.is_controller:
            self.tell_all(("weights", version))
        self._wait_for_sends()
        sent = 0
        for engine in self.left:
            outlet, *later = self._outlets[engine]
            self._outlets[engine] = later or [outlet]
            with self._reaching(engine):
                more, self._sends[engine] = outlet.post(tensors, shards)
                sent += more
        return sent

    def stop(self) -> None:
        """Tell the engines to end, once they have taken all that was sent. Raises LostPeer."""
        if self.is_controller:
            self.tell_all(("stop",))
        self._wait_for_sends()
        for engine in self.left if self.is_controller else ():
            with self._reaching(engine):
                self._channels[engine].flush()
        self._inbox.close(self.left if self.is_controller else ())

    def _wait_for_sends(self) -> None:
        for engine in self.left:
            with self._reaching(engine):
                for wait in self._sends.pop(engine, ()):
                    wait()

    @contextmanager
    def _reaching(self, engine: int) -> Iterator[None]:
        """Around what needs an engine: if it is lost and others are left, let it go, where the run does."""
        try:
            yield
        except LostPeer as error:
            if not self._goes_on or self.left == (engine,):
                raise
            # What is left of it waits for these links, and ends when they are gone.
            self._channels.pop(engine, None)
            self._sends.pop(engine, None)
            del self._links[engine], self._outlets[engine]
            if self.is_controller:
                logger.warning(
                    "engine %d (%s) is lost: %s; going on with %d of %d engines",
                    engine,
                    ", ".join(map(self._position.label, self._ranks[engine])),
                    error,
                    len(self.left),
                    len(self._ranks),
                )


def shares_of(shares: Sequence[float], left: Sequence[int]) -> list[float]:
    """The shares of the engines that are left, in their proportion; as they are if all are."""
    if len(left) == len(shares):
        return list(shares)
    whole = sum(shares[engine] for engine in left)
    return [shares[engine] / whole for engine in left]


class RemoteScores:
    """Scores rows on other cards; every rank of the policy calls the same."""

    def __init__(
        self,
        roles: RlPlan,
        role: ScoringRole,
        trainer: Trainer,
        position: RolePosition,
        *,
        timeout_seconds: float,
    ) -> None:
        """Make the link, once the role's ranks are there. Raises TrainingError."""
        self._trainer = trainer
        self._what = f"the broadcast of the {role}'s scores"
        self._channel: Channel | None = None
        self._counts: list[int] = []
        if position.rank == 0:
            with as_training_error(trainer.runtime.coord):
                link = message_link(roles, role, position, timeout_seconds)
            self._channel = Channel(link, roles.role_ranks[role].start)

    def begin(self, rows: Sequence[Rows], counts: Sequence[int]) -> None:
        """Ask for the scores of some batches of rows, of so many numbers each; does not wait."""
        self._counts = list(counts)
        if self._channel is not None:
            with as_training_error(self._trainer.runtime.coord):
                for batch, count in zip(rows, counts, strict=True):
                    self._channel.send(("score", batch, count))

    def finish(self) -> Tensor:
        """The numbers of all that `begin` asked for: fp64 [N] on the host."""
        coord = self._trainer.runtime.coord
        scores = torch.zeros(sum(self._counts), dtype=torch.float64)
        if self._channel is not None:
            with as_training_error(coord):
                scores = torch.cat([self._channel.receive() for _ in self._counts])
        wait_for_world(coord, "the scores of another role")
        if dist.is_initialized():
            with guard_world_collective(coord, self._what):
                dist.broadcast(scores, 0)
        return scores

    def stop(self) -> None:
        """Tell the role's ranks to end."""
        if self._channel is not None:
            with as_training_error(self._trainer.runtime.coord):
                self._channel.send(("stop",))
                self._channel.flush()


class RemoteReference(RemoteScores):
    """The log-probabilities of the policy's weights as they are when it is made, on other cards."""

    def __init__(self, roles: RlPlan, trainer: Trainer, position: RolePosition, run: RLConfig) -> None:
        """Send the weights. Raises TrainingError."""
        runtime, dtype, timeout = trainer.runtime, DTYPES[run.train.precision], connect_seconds(run.train)
        with as_training_error(runtime.coord):
            link = weight_link(roles, "reference", position, timeout)

            def outlet(trained: bool) -> Outlet:
                buckets = role_buckets(roles, "reference", dtype.itemsize, trained=trained)
                return Outlet(buckets, link=link, dtype=dtype, by_difference=False)

            self._send(trainer, outlet(trained=False))
        self._outlet = outlet(trained=True)
        super().__init__(roles, "reference", trainer, position, timeout_seconds=timeout)

    def renew(self) -> None:
        """Send the weights as they are now, of a policy with adapters these alone. Raises TrainingError."""
        with as_training_error(self._trainer.runtime.coord):
            if self._channel is not None:
                self._channel.send(("weights",))
            self._send(self._trainer, self._outlet)

    @staticmethod
    def _send(trainer: Trainer, outlet: Outlet) -> None:
        _, sends = outlet.post(own_weights(trainer.runtime), trainer.runtime.shards)
        for wait in sends:
            wait()


class RemoteReadingModel(RemoteScores):
    """A reward model or a teacher on other cards."""

    def __init__(self, roles: RlPlan, trainer: Trainer, position: RolePosition, run: RLConfig) -> None:
        """Make the link. Raises TrainingError."""
        super().__init__(roles, "reward", trainer, position, timeout_seconds=connect_seconds(run.train))
        self._length = roles.plans["reward"].sequence_length
        self._packed = run.train.pack

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The value at the last token of each sequence, as `ReadingModel.score`."""
        if not sequences:
            return []
        rows = make_score_rows(sequences, length=self._length, packed=self._packed)
        return self.log_probs([rows], [len(sequences)]).tolist()

    def log_probs(self, batches: Sequence[Rows], counts: Sequence[int]) -> Tensor:
        """Of a teacher, the log-probability of each token, as `ReadingModel.log_probs`."""
        self.begin(batches, counts)
        return self.finish()


# --- the ranks of a role ------------------------------------------------------------------------------------


@contextmanager
def joining(run: RLConfig, roles: RlPlan, plan: Plan, device: Device) -> Iterator[RolePosition]:
    """Around the work of a rank of a role with this plan: it meets all others, and ends with them.

    The policy ends the run, also if SIGTERM comes here; the other roles then hear of it. Raises TrainingError
    if another rank is lost.
    """
    position = join_role(
        job_ranks(roles),
        fates=fates_of(roles, run.generation.on_lost_engine),
        startup_seconds=run.train.startup_timeout,
    )
    explaining = explaining_memory(plan, position.rank, device)

    def ask_policy(signum: int, frame: object) -> None:
        # Whom the others may lose stays until then. The main thread may be at the board itself.
        if 0 in position.board.members:
            threading.Thread(target=ending.tell_stop, daemon=True).start()

    with (
        hearing({signal.SIGTERM: ask_policy}),
        ending_together(position.board, device) as ending,
        position.naming_role(),
        explaining,
    ):
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
