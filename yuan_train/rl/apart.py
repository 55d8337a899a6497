"""Roles on cards of their own: the policy's side issues tickets and publishes weights, engines serve them.

The controller is rank 0 of the policy. Tickets of batch k are issued when version k - staleness is published
(`schedule.flow.newest_batch`), and consumed in their order, so that an answer's weights are never older than
the bound and none is thrown away for its age. An engine does what it is told in the order in which
it is told: take weights, answer tickets, stop. While it answers, the policy trains. In flight
(`generation.weights`) it takes weights between two rounds, and draws tickets from those offered to all.

Tickets that engines draw themselves, in flight: whoever has free slots takes the next one that is offered.

Every engine is offered all tickets, a batch at a time, as far as the bound on staleness allows. Which engine
has which is decided by counters in the launcher's store, so that a slow engine takes fewer and no batch waits
for it. The controller is not asked: it trains meanwhile. A slow engine leaves the last tickets of a batch to
faster ones, and goes on with the next batch: the longest of the answers that it began late would keep all
others waiting.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from yuan_train.config.errors import TrainingError
from yuan_train.config.rl import RLConfig
from yuan_train.config.rl_plan import RlPlan
from yuan_train.data.prompts import Prompts
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.board import RolePosition
from yuan_train.parallel.device import Device
from yuan_train.parallel.environment import tell_launcher
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.groups import as_training_error, guard_world_collective, share_object, wait_for_world
from yuan_train.parallel.transfer import take_weights
from yuan_train.parallel.zero import EngineOptions
from yuan_train.rl.collect import Collector, answer_fields
from yuan_train.rl.experience import Sample, Ticket, share_out
from yuan_train.rl.generator import (
    EngineClock,
    NotFiniteDraw,
    SamplerByTicket,
    SamplingParams,
    TurnReply,
    make_engine,
    pipeline_group,
)
from yuan_train.rl.helpers import Conversation, Environments, Said, Scorers, Scores, ScoringThread
from yuan_train.rl.job import RLJob, check_supported, read_file
from yuan_train.rl.passes import ReadingModel
from yuan_train.rl.roles import (
    Channel,
    EngineEnds,
    Engines,
    Inbox,
    RemoteReadingModel,
    Requests,
    connect_seconds,
    engine_ranks,
    job_ranks,
    joining,
    message_link,
    shares_of,
    weight_buckets,
    weight_link,
)
from yuan_train.schedule.flow import newest_batch
from yuan_train.train.build import DTYPES, build_runtime, model_parts, own_weights
from yuan_train.train.job import Position, choose_planned
from yuan_train.train.step import Trainer


def _counter(offer: int) -> str:
    """Of how many tickets of an offer are drawn, in the store."""
    return f"tickets drawn of {offer}"


def _name(offer: int, place: int) -> str:
    """Of the engine that has drawn a ticket of an offer, in the store."""
    return f"ticket drawn of {offer}: {place}"


SPEED_MEMORY = 0.95
"""What an engine told before counts so much less with each message."""
PART_LEFT = 0.5
"""Of the tickets that all engines would draw while a slow one needs longer than the fastest, what part it
leaves to the others. In simulations of 2 and 3 engines, up to 4 times as slow, none was far better."""


@dataclass
class _EngineSpeed:
    """What an engine has told of late: sums of which what is old counts less."""

    seconds: float = 0.0
    rounds: float = 0.0
    tickets: float = 0.0
    longest: float = 0.0
    """Tokens of the longest answer to each ticket."""

    def hear(self, message: Answered) -> None:
        """Add a message's part."""
        longest: dict[int | str, int] = {}
        for sample in message.samples:
            longest[sample.ticket] = max(longest.get(sample.ticket, 0), len(sample.ids))
        self.seconds = SPEED_MEMORY * self.seconds + message.seconds
        self.rounds = SPEED_MEMORY * self.rounds + message.rounds
        self.tickets = SPEED_MEMORY * self.tickets + len(longest)
        self.longest = SPEED_MEMORY * self.longest + sum(longest.values())


@dataclass(frozen=True)
class Offer:
    """A message of the controller to all engines: tickets that they are to draw, in their order."""

    number: int
    tickets: Sequence[Ticket]
    params: SamplingParams


class Offers:
    """On the controller: what is offered, and how fast the engines are."""

    def __init__(self, store: dist.Store, num_engines: int) -> None:
        self._store, self._num_engines = store, num_engines
        self._count = 0
        self._places: dict[int | str, tuple[int, int]] = {}
        """By ticket, its newest offer and its place there."""
        self._speeds = [_EngineSpeed() for _ in range(num_engines)]

    def hear(self, engine: int, message: Answered) -> None:
        """Learn how fast an engine is."""
        self._speeds[engine].hear(message)

    def leaves(self, engine: int, left: Sequence[int]) -> int:
        """How many of the last tickets of an offer an engine leaves to faster ones of those that are left;
        none before all have told how fast they are."""
        speeds = [self._speeds[one] for one in left]
        if any(not speed.rounds or not speed.tickets for speed in speeds):
            return 0
        own = self._speeds[engine]
        slower = own.seconds / own.rounds - min(speed.seconds / speed.rounds for speed in speeds)
        longest = sum(speed.longest for speed in speeds) / sum(speed.tickets for speed in speeds)
        drawn = sum(speed.tickets / speed.seconds for speed in speeds if speed.seconds)
        return round(PART_LEFT * drawn * slower * longest)

    def make(self, tickets: Sequence[Ticket], params: SamplingParams) -> Offer:
        """Offer tickets, behind all that were offered before."""
        offer = Offer(self._count, tickets, params)
        self._count += 1
        self._places |= {ticket.number: (offer.number, place) for place, ticket in enumerate(tickets)}
        return offer

    def lost(self, unanswered: Iterable[int | str], left: Sequence[int]) -> list[int | str]:
        """Those of the unanswered tickets that an engine has drawn which is not left, or that nobody is known
        to have drawn though their turn is past: at worst two engines answer one."""
        if len(left) == self._num_engines:
            return []
        return [n for n in unanswered if self._is_lost(*self._places[n], left)]

    def _is_lost(self, offer: int, place: int, left: Sequence[int]) -> bool:
        if self._store.add(_counter(offer), 0) <= place:
            return False
        name = _name(offer, place)
        return not self._store.check([name]) or int(self._store.get(name)) not in left


class Desk:
    """On an engine's leader: the controller's messages as they come, and the tickets that it draws."""

    def __init__(
        self, channel: Channel, store: dist.Store, engine: int, talk: Conversation | None = None
    ) -> None:
        self._talk = talk
        self._opening: dict[int | str, tuple[Ticket, SamplingParams, dict[int, Said]]] = {}
        """Tickets whose environments are being made, and what these have said."""
        if talk is not None and talk.environments is not None:
            talk.environments.deliver = lambda said: self._inbox.put(-1, said)
        self._store, self._engine = store, engine
        self._inbox = Inbox()
        self._inbox.open(0, channel)
        self._offered: dict[int, Offer] = {}
        """By number, those of which there may be tickets that nobody has drawn."""
        self._leaves = 0
        """The last tickets of an offer that this engine leaves to others."""
        self._left: set[int] = set()
        """Offers of which it has left them."""
        self._drawn: tuple[Ticket, SamplingParams] | None = None
        """This engine's next one."""

    def has_news(self, num_free: int) -> bool:
        """Whether `orders` would give some now."""
        return not self._inbox.is_empty or (num_free > self._num_opening and self._draw())

    @property
    def _num_opening(self) -> int:
        """Answers that will want slots."""
        return sum(ticket.count for ticket, _, _ in self._opening.values())

    def orders(self, num_free: int, *, wait: bool) -> list[Sequence[Any]]:
        """What the engine is to do now, in order: ("weights", version), ("answer", ticket, params) for as
        many tickets as fill the free slots, or ("stop",); of environments ("reply", reply) and ("fault",
        ticket, why). `wait`: until there is something.

        Raises what ended the connection to the controller.
        """
        found: list[Sequence[Any]] = []
        num_free -= self._num_opening
        while True:
            while not self._inbox.is_empty or (wait and not found and not (num_free > 0 and self._draw())):
                _, message = self._inbox.take()
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, Said):
                    found += self._hear(message)
                    continue
                if message[0] == "offer":
                    self._offered[message[1].number] = message[1]
                    continue
                if message[0] == "leave":
                    self._leaves = message[1]
                    self._left.clear()
                    continue
                found.append(message)
                if message[0] == "stop":
                    return found
            while num_free > 0 and self._draw():
                assert self._drawn is not None
                (ticket, params), self._drawn = self._drawn, None
                num_free -= ticket.count
                if self._talk is None:
                    found.append(("answer", ticket, params))
                    continue
                self._opening[ticket.number] = (ticket, params, {})
                self._talk.ask_for(ticket)
            if found or not wait:
                return found

    def _hear(self, said: Said) -> list[Sequence[Any]]:
        """What an environment's word has the engine do."""
        assert self._talk is not None
        ticket, number = said.key
        if ticket not in self._opening:
            return [("reply", self._talk.reply(said))]
        asked, params, told = self._opening[ticket]
        told[number] = said
        if len(told) < asked.count:
            return []
        del self._opening[ticket]
        opened = self._talk.opened(asked, [told[n].told for n in range(asked.count)])
        return [("fault", asked, opened) if isinstance(opened, str) else ("answer", opened, params)]

    def _draw(self) -> bool:
        """Whether a ticket is this engine's next one, which is drawn if there is none."""
        for offer in () if self._drawn is not None else list(self._offered.values()):
            if offer.number in self._left:
                continue
            size, counter = len(offer.tickets), _counter(offer.number)
            # Never all: else nobody would hear that it has become faster.
            leaves = min(self._leaves, size - 1)
            if leaves and size - self._store.add(counter, 0) <= leaves:
                self._left.add(offer.number)
                continue
            place = self._store.add(counter, 1) - 1
            if place < size:
                self._store.set(_name(offer.number, place), str(self._engine))
                self._drawn = offer.tickets[place], offer.params
                break
            del self._offered[offer.number]
        return self._drawn is not None


@dataclass(frozen=True)
class Told:
    """What the engines have told of a batch, for the metrics."""

    versions: tuple[int, ...]
    """Of the weights that drew each group's first tokens."""
    engine_seconds: float
    """Of generation, the busiest engine's."""
    rounds: int
    """The most of any engine."""
    slots_filled: float
    """Share of the slots that got a token, over all rounds of all engines."""
    scoring_seconds: float
    """The most of any engine."""
    sync_seconds: float
    """In which the policy packed weights and waited for those before to be taken."""
    sync_bytes: int
    tokens_per_second: tuple[float, ...]
    """Of answers, by engine, while it was at work; 0 of one that drew none."""


@dataclass(frozen=True)
class Answered:
    """A message of an engine: all answers to some tickets."""

    samples: Sequence[Sample]
    version: int
    """Of the weights that drew their first tokens."""
    seconds: float
    """Of the engine since the message before, as the others."""
    rounds: float
    filled: float
    """Slots that got a token, over all rounds."""
    slots: int
    """Of the engine."""
    scores: Mapping[int | str, Scores] = field(default_factory=dict[int | str, Scores])
    """By ticket: the functions'."""
    scoring_seconds: float = 0.0
    error: str | None = None
    """What ends the run: weights at fault, or functions that cannot be loaded any more."""


@dataclass(frozen=True)
class _ToldOfTicket:
    """A ticket's part of what a message told."""

    engine: int
    message: Answered
    tokens: int
    """That were drawn."""


@dataclass(frozen=True)
class Fleet:
    """Engines that are not on the policy's cards, and how they are used."""

    engines: EngineEnds
    shares: Sequence[float]
    """Of the prompts."""
    offers: Offers | None = None
    """In flight."""


def own_fleet(job: RLJob, position: RolePosition) -> Fleet:
    """The engines of an RL plan."""
    roles, run = job.roles, job.run
    assert roles is not None, "roles are apart"
    engines = Engines(
        roles,
        position,
        dtype=DTYPES[run.train.precision],
        timeout_seconds=connect_seconds(run.train),
        run=run,
    )
    in_flight = run.generation.weights == "in_flight"
    offers = Offers(position.store, len(roles.engine_shares)) if in_flight else None
    return Fleet(engines, roles.engine_shares, offers)


_Heard = tuple[dict[int | str, list[Sample]], dict[int | str, _ToldOfTicket], dict[int | str, Scores]]


class RemoteCollector(Collector):
    """Collects batches from engines on other cards; every rank of the policy calls the same."""

    def __init__(
        self,
        job: RLJob,
        trainer: Trainer,
        scorers: Scorers | None,
        reward_model: ReadingModel | RemoteReadingModel | None,
        fleet: Fleet,
    ) -> None:
        super().__init__(job, trainer, None, scorers, reward_model)
        self._staleness = job.staleness
        self._shares = fleet.shares
        self._engines = fleet.engines
        self._offers = fleet.offers
        self._published = -1
        self._issued = 0
        self._owner: dict[int | str, int] = {}
        self._found: dict[int | str, list[Sample]] = {}
        self._scored: dict[int | str, Scores] = {}
        """The functions' scores of what was found, and not asked for yet."""
        self._told: dict[int | str, _ToldOfTicket] = {}
        """Of each ticket since the last batch."""
        self._told_early: dict[int | str, _ToldOfTicket] = {}
        """The same of tickets that no batch has taken yet."""
        self._open: dict[int | str, tuple[Ticket, SamplingParams]] = {}
        """On the controller: what is asked and not answered; if its engine is lost, another one is asked."""
        self._leavers: tuple[int, ...] = ()
        """In flight: the engines when they were told what to leave to others."""
        self._sync_seconds, self._sync_bytes = 0.0, 0

    def begin(self, version: int, *, first_ticket: int) -> None:
        """Publish the weights of `version` batches, and issue all tickets that it allows from the first that
        no batch has had, but for batches behind the run's end. A run that was resumed may have had other
        batches before."""
        self.publish(version)
        self._tell_leaves()
        per_step, end = self._job.run.train.prompts_per_step, self._job.run.train.steps
        batches = min(newest_batch(version, self._staleness) + 1, end) - version
        limit = first_ticket + batches * per_step
        first = max(self._issued, first_ticket)
        # In messages of a batch each: an engine takes new weights between two of them.
        for start in range(first, limit, per_step):
            numbers = range(start, min(start + per_step, limit))
            self._issue([self._ticket(n) for n in numbers], self._params)
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
        versions = tuple(self._told[number].message.version for number in tickets)
        found, messages = list(self._told.values()), [told.message for told in self._told.values()]
        self._told.clear()

        def by_engine(part: Callable[[_ToldOfTicket], float]) -> list[float]:
            sums = [0.0] * len(self._shares)
            for told in found:
                sums[told.engine] += part(told)
            return sums

        seconds, tokens = by_engine(lambda told: told.message.seconds), by_engine(lambda told: told.tokens)
        room = math.fsum(message.rounds * message.slots for message in messages)
        return Told(
            versions,
            max(seconds),
            round(max(by_engine(lambda told: told.message.rounds))),
            math.fsum(message.filled for message in messages) / max(room, 1.0),
            max(by_engine(lambda told: told.message.scoring_seconds)),
            self._sync_seconds,
            self._sync_bytes,
            tuple(drawn / max(own, 1e-9) for drawn, own in zip(tokens, seconds, strict=True)),
        )

    def stop(self) -> None:
        """Tell the engines to end, once they have taken all that was sent."""
        with as_training_error(self._trainer.runtime.coord):
            self._engines.stop()

    def _issue(self, tickets: Sequence[Ticket], params: SamplingParams) -> None:
        self._ask(tickets, params)
        self._ask_again()

    def _ask(self, tickets: Sequence[Ticket], params: SamplingParams) -> None:
        """Ask the engines that are left; one that is lost now has its tickets in `_open`."""
        if self._offers is not None:
            self._owner |= dict.fromkeys((ticket.number for ticket in tickets), -1)
            if self._engines.is_controller:
                self._open |= {ticket.number: (ticket, params) for ticket in tickets}
                with as_training_error(self._trainer.runtime.coord):
                    self._engines.tell_all(("offer", self._offers.make(tickets, params)))
            return
        left = self._engines.left
        for engine, own in zip(left, share_out(tickets, shares_of(self._shares, left)), strict=True):
            self._owner |= dict.fromkeys((ticket.number for ticket in own), engine)
            if own and self._engines.is_controller:
                self._open |= {ticket.number: (ticket, params) for ticket in own}
                if engine in self._engines.left:
                    with as_training_error(self._trainer.runtime.coord):
                        self._engines.tell(engine, ("generate", own, params))

    def _ask_again(self) -> None:
        """Ask the engines that are left for what those that are lost have not answered, in its order."""
        per_step = self._job.run.train.prompts_per_step
        if self._engines.left != self._leavers:
            # The fastest one may be gone, to which the others have left what there is.
            self._tell_leaves()
        while lost := self._lost():
            params = self._open[lost[0]][1]
            same = [n for n in lost if self._open[n][1] == params][:per_step]
            self._ask([self._open[n][0] for n in same], params)

    def _tell_leaves(self) -> None:
        """In flight, tell engines how many tickets they are to leave to others of those that are left."""
        while self._offers is not None and (left := self._engines.left):
            self._leavers = left
            for engine in left if self._engines.is_controller else ():
                if engine in self._engines.left:
                    with as_training_error(self._trainer.runtime.coord):
                        self._engines.tell(engine, ("leave", self._offers.leaves(engine, left)))
            if self._engines.left == left:
                return

    def _lost(self) -> list[int | str]:
        """What an engine that is lost had to answer."""
        if self._offers is not None:
            return self._offers.lost(self._open, self._engines.left)
        return [n for n in self._open if self._owner[n] not in self._engines.left]

    def _generate(self, tickets: Sequence[Ticket], params: SamplingParams) -> list[list[Sample]]:
        """The answers to each ticket, on all ranks of the policy; waits for the engines that have them."""
        missing = [ticket for ticket in tickets if ticket.number not in self._owner]
        if missing:
            self._issue(missing, params)
            numbers = [ticket.number for ticket in missing if isinstance(ticket.number, int)]
            self._issued = max([self._issued, *(number + 1 for number in numbers)])
        with as_training_error(self._trainer.runtime.coord):
            for ticket in tickets if self._engines.is_controller else ():
                while ticket.number not in self._found:
                    self._take()
                    self._ask_again()
        wait_for_world(self._trainer.runtime.coord, "the engines' answers")
        told: _Heard = ({}, {}, {})
        for ticket in tickets:
            del self._owner[ticket.number]
        if self._engines.is_controller:
            numbers = [ticket.number for ticket in tickets]
            told = (
                {number: self._found.pop(number) for number in numbers},
                {number: self._told_early.pop(number) for number in numbers},
                {number: self._scored.pop(number) for number in numbers},
            )
        with guard_world_collective(self._trainer.runtime.coord, "the broadcast of answers"):
            samples, heard, scored = share_object(told)
        self._told |= {number: found for number, found in heard.items() if isinstance(number, int)}
        self._scored |= scored
        return [samples[ticket.number] for ticket in tickets]

    def _score_by_functions(self, groups: Sequence[tuple[Ticket, Sequence[Sample]]]) -> list[Scores]:
        """As the engines told."""
        return [self._scored.pop(ticket.number) for ticket, _ in groups]

    def _take(self) -> None:
        """The next answers of any engine; none if it is lost and others are left."""
        engine, message = self._engines.hear()
        if message is None:
            return
        assert isinstance(message, Answered)
        if message.error is not None:
            raise TrainingError(f"engine {engine}: {message.error}")
        if self._offers is not None:
            self._offers.hear(engine, message)
        found: dict[int | str, list[Sample]] = {number: [] for number in message.scores}
        for sample in message.samples:
            found[sample.ticket].append(sample)
        count = max(len(found), 1)
        part = replace(
            message,
            samples=(),
            scores={},
            scoring_seconds=message.scoring_seconds / count,
            seconds=message.seconds / count,
            rounds=message.rounds / count,
            filled=message.filled / count,
        )
        for ticket, samples in found.items():
            # Else a second answer: it was asked for again when an engine was lost.
            if self._open.pop(ticket, None) is not None:
                self._found[ticket] = samples
                self._scored[ticket] = message.scores[ticket]
                tokens = sum(sample.num_drawn for sample in samples)
                self._told_early[ticket] = _ToldOfTicket(engine, part, tokens)


# --- an engine -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineJob:
    """What a rank of generation needs."""

    run: RLConfig
    roles: RlPlan
    device: Device
    tokenizer: Tokenizer | None
    columns: Sequence[str]
    """What each prompt has beside prompt and answer."""


def prepare_engine(run: RLConfig, roles: RlPlan, position: Position) -> EngineJob:
    """Check the files of a rank of an engine, whose `position` is that in its role. Raises YuanError."""
    check_supported(run, None, roles)
    plan = roles.plans["generation"]
    device = choose_planned(run.train.device, plan.ranks, position, plan.find_type)
    tokenizer = Tokenizer.load(run.data.tokenizer) if run.data.tokenizer else None
    files = [read_file(source.file, run, tokenizer) for source in run.data.prompts]
    columns = Prompts(files, [1.0] * len(files), seed=0).columns
    return EngineJob(run, roles, device, tokenizer, columns)


def serve(job: EngineJob) -> None:
    """A rank of an engine, until the controller says stop. Raises TrainingError if another rank is lost."""
    run, roles = job.run, job.roles
    plan = roles.roles.generation.plan
    assert plan is not None, "roles are apart"
    with joining(run, roles, plan, job.device) as position:
        dtype = DTYPES[run.train.precision]
        options = EngineOptions(
            dtype,
            timeout_seconds=run.train.timeout,
            startup_timeout_seconds=run.train.startup_timeout,
            trained=False,
        )
        parts = model_parts(run.model, dtype)
        runtime = build_runtime(plan, position.rank, parts, job.device, options)
        with as_training_error(runtime.coord):
            server = _Server(job, runtime, position, dtype)
            with server.scoring(), server.talking():
                if run.generation.weights == "in_flight":
                    server.run_in_flight()
                else:
                    server.run()
            server.requests.end()
            server.tell_overruns()


@dataclass
class _UnderWay:
    """A ticket that is answered."""

    ticket: Ticket
    version: int
    """Of the weights when it was begun."""
    samples: list[Sample] = field(default_factory=list[Sample])
    faults: Mapping[int | str, str] = field(default_factory=dict[int | str, str])
    """Why its environment gave no answers, by the ticket's number."""


class _Server:
    def __init__(
        self, job: EngineJob, runtime: RankRuntime, position: RolePosition, dtype: torch.dtype
    ) -> None:
        run, roles = job.run, job.roles
        coord, grid = runtime.coord, runtime.grid
        self._group = pipeline_group(runtime, timeout_seconds=run.train.timeout)
        leader, ranks = engine_ranks(roles)[coord.pipeline][0], job_ranks(roles)
        channel: Channel | None = None
        controller = ranks["policy"].start
        if position.job_rank == leader:
            talk = message_link(roles, coord.pipeline, position, connect_seconds(run.train))
            channel = Channel(talk, controller)
        self.requests = Requests(coord, channel, leader - ranks["generation"].start, self._group)
        self._link = weight_link(roles, coord.pipeline, position, connect_seconds(run.train))
        self._first = weight_buckets(roles, dtype.itemsize, trained=False)[coord.pipeline]
        self._buckets = weight_buckets(roles, dtype.itemsize, trained=True)[coord.pipeline]
        tell_launcher(position.job_rank, "linked")
        self._runtime, self._position, self._dtype = runtime, position, dtype
        self._version = -1
        self._job = job
        self._scoring: ScoringThread | None = None
        self._sampler = SamplerByTicket()
        self._under_way: dict[int | str, _UnderWay] = {}
        """In flight."""
        self._given_up: list[_UnderWay] = []
        """Likewise: tickets whose environments are at fault."""
        self._talk: Conversation | None = None
        pipeline = grid.plan.pipelines[coord.pipeline]
        self._engine = make_engine(
            runtime,
            run,
            slots=pipeline.num_sequences,
            groups=pipeline.num_micro_batches,
            stopwatch=Stopwatch(job.device, simulated=grid.simulated(coord.rank)),
            device=job.device.torch,
            ranks=self._group,
        )

    def tell_overruns(self) -> None:
        """See `Stopwatch`."""
        self._engine.stopwatch.tell_overruns()

    def run(self) -> None:
        """Do what the controller says, in order: an engine has new weights between two batches."""
        for kind, *rest in self.requests:
            if kind == "weights":
                self._take_weights(rest[0])
                continue
            tickets, params = cast("tuple[list[Ticket], SamplingParams]", tuple(rest))
            start, samples, error = time.perf_counter(), list[Sample](), None
            try:
                samples = self._engine.generate(tickets, params, self._talk)
            except NotFiniteDraw as failure:
                error = str(failure)
            self._answer(
                samples,
                self._version,
                time.perf_counter() - start,
                EngineClock(),
                error,
                tickets=tickets,
                faults=self._engine.faults,
            )

    def run_in_flight(self) -> None:
        """Answer tickets as they are drawn, without an end between batches, and take weights between two
        rounds: keys and values of the tokens so far stay those of the weights that made them."""
        engine, channel = self._engine, self.requests.channel
        limits = self._talk.limits if self._talk is not None else None
        engine.begin(self._sampler, limits)
        desk = None
        if channel is not None:
            desk = Desk(channel, self._position.store, self._runtime.coord.pipeline, self._talk)
        told, since, has_news = EngineClock(), time.perf_counter(), True
        while True:
            is_waiting = engine.is_idle or engine.is_resting
            ended: list[Sample] = []
            if has_news or is_waiting:
                began = time.perf_counter()
                orders = desk.orders(engine.num_free, wait=is_waiting) if desk is not None else None
                if not self._follow(self.requests.tell(orders), ended):
                    return
                since += time.perf_counter() - began
            if not (engine.is_idle or engine.is_resting):
                try:
                    # The other ranks hear of what the leader has by the sum of the tokens, a round later.
                    tokens = engine.step(news=desk is not None and desk.has_news(engine.num_free))
                except NotFiniteDraw as failure:
                    self._answer([], self._version, 0.0, told, str(failure))
                    self._under_way.clear()
                    engine.begin(self._sampler, limits)
                    continue
                has_news = engine.has_news or self._group is None
                ended += [token.sample for token in tokens if token.sample is not None]
                if self._talk is not None:
                    self._talk.say(engine.take_turns())
            for answers in self._ended(ended):
                now = time.perf_counter()
                self._answer(
                    answers.samples,
                    answers.version,
                    now - since,
                    told,
                    tickets=[answers.ticket],
                    faults=answers.faults,
                )
                told, since = replace(engine.clock), now

    def _follow(self, orders: Sequence[Sequence[Any]], ended: list[Sample]) -> bool:
        """Do what the leader's desk gave; whether the engine is to go on. Replies may end answers."""
        for kind, *rest in orders:
            if kind == "stop":
                return False
            if kind == "weights":
                self._take_weights(rest[0])
            elif kind == "reply":
                ended += self._take_reply(rest[0])
            elif kind == "fault":
                ticket, why = cast("tuple[Ticket, str]", tuple(rest))
                self._given_up.append(_UnderWay(ticket, self._version, faults={ticket.number: why}))
            else:
                ticket, params = cast("tuple[Ticket, SamplingParams]", tuple(rest))
                self._sampler.params[ticket.number] = params
                self._under_way[ticket.number] = _UnderWay(ticket, self._version)
                self._engine.join([ticket])
        return True

    def _take_reply(self, reply: TurnReply) -> list[Sample]:
        """The answer that a reply ends, if it does. A ticket whose environment is at fault is given up."""
        if reply.ticket not in self._under_way:
            return []
        if reply.fault is None:
            sample = self._engine.reply(reply)
            return [] if sample is None else [sample]
        answers = self._under_way.pop(reply.ticket)
        del self._sampler.params[reply.ticket]
        self._engine.leave([reply.ticket])
        self._given_up.append(replace(answers, samples=[], faults={reply.ticket: reply.fault}))
        return []

    def _ended(self, samples: Sequence[Sample]) -> Iterator[_UnderWay]:
        """The tickets whose last answers these are, and those that were given up."""
        given_up, self._given_up = self._given_up, []
        for answers in given_up:
            self._let_go(answers.ticket)
            yield answers
        for sample in samples:
            answers = self._under_way[sample.ticket]
            answers.samples.append(sample)
            if len(answers.samples) == answers.ticket.count:
                del self._under_way[sample.ticket], self._sampler.params[sample.ticket]
                answers.samples.sort(key=lambda one: one.number)
                self._let_go(answers.ticket)
                yield answers

    def _let_go(self, ticket: Ticket) -> None:
        if self._talk is not None:
            self._talk.close(ticket.number)

    def _take_weights(self, version: int) -> None:
        take_weights(
            self._first if self._version < 0 else self._buckets,
            own_weights(self._runtime),
            self._runtime.shards,
            link=self._link,
            dtype=self._dtype,
        )
        self._version = version

    def _answer(
        self,
        samples: Sequence[Sample],
        version: int,
        seconds: float,
        told: EngineClock,
        error: str | None = None,
        *,
        tickets: Sequence[Ticket] = (),
        faults: Mapping[int | str, str] | None = None,
    ) -> None:
        """Tell the controller, on the leader once the answers to the tickets are scored; `told` is the clock
        as it was told of before. `faults`: why environments gave none to some."""
        faults = faults or {}
        clock = self._engine.clock
        rounds, filled = clock.rounds - told.rounds, clock.filled - told.filled
        slots = self._engine.num_slots
        message = Answered(samples, version, seconds, rounds, filled, slots, error=error)
        if self._scoring is None or error is not None or not tickets:
            self.requests.answer(message)
            return
        answered = [ticket for ticket in tickets if ticket.number not in faults]
        groups = [[one for one in samples if one.ticket == ticket.number] for ticket in answered]
        fields = [
            answer_fields(ticket, group, self._job.tokenizer)
            for ticket, group in zip(answered, groups, strict=True)
        ]
        start = time.perf_counter()

        def answer(scores: list[Scores] | str) -> None:
            if isinstance(scores, str):
                self.requests.answer(replace(message, error=scores))
                return
            by_ticket = {ticket.number: own for ticket, own in zip(answered, scores, strict=True)}
            by_ticket |= {number: Scores(error=why) for number, why in faults.items()}
            took = time.perf_counter() - start
            self.requests.answer(replace(message, scores=by_ticket, scoring_seconds=took))

        self._scoring.score(fields, answer)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """While inside, the leader has processes that score. Raises ConfigError, on the leader, if they
        cannot load the functions."""
        if self.requests.channel is None:
            yield
            return
        reward = self._job.run.reward
        with Scorers(reward, self._job.columns) as scorers:
            with ScoringThread(scorers, reward.workers) as self._scoring:
                yield

    @contextmanager
    def talking(self) -> Iterator[None]:
        """While inside, answers have environments, if the run has one; the leader has their processes. Raises
        ConfigError, on the leader, if they cannot make one."""
        run = self._job.run
        if run.turns is None:
            yield
            return
        environments = Environments(run.turns) if self.requests.channel is not None else None
        with environments or nullcontext():
            self._talk = Conversation(run, self._job.tokenizer, self.requests, environments)
            yield
