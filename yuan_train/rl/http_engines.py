"""Engines over HTTP: servers that draw the answers, behind the same methods as engines of our own.

The controller, rank 0 of the policy, has a thread for each server, which does what it is told in order: have
the server take weights, or answer tickets, some at a time. What comes is scored by the reward functions'
processes of rank 0, beside the policy that trains. The tickets of a server that is lost are asked of others.
Rank 0 has the environments too: a turn is a request, whose prompt is all that was said so far.

Weights go through a folder: the ranks of the policy send rank 0 one tensor after another, under any plan, and
it writes them in Hugging Face's format under a name with their version. A folder is removed once all servers
have taken a later one. It stands alone because its engines are other programs.
"""

from __future__ import annotations

import logging
import queue
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from yuan_train.checkpoint.hf import PRECISIONS, published_weights, write_model
from yuan_train.checkpoint.load import merged_adapters
from yuan_train.config.errors import ConfigError, TrainingError
from yuan_train.config.model import ADAPTERS
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.groups import guard_world_collective
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.transfer import Move, local_slices, plan_holdings, transfer_table
from yuan_train.rl.apart import Answered, Fleet
from yuan_train.rl.collect import answer_fields
from yuan_train.rl.experience import Sample, Ticket
from yuan_train.rl.generator import AnswerUnderWay, SamplingParams, Turn
from yuan_train.rl.helpers import Conversation, Environments, Key, Said, Scorers, Scores, ScoringThread
from yuan_train.rl.job import RLJob
from yuan_train.rl.roles import EngineEnds, Requests
from yuan_train.rl.servers import InferenceServer, LostServer
from yuan_train.train.build import DTYPES
from yuan_train.train.step import Trainer

logger = logging.getLogger(__name__)

NAME = re.compile(r"\.?weights-(\d{8})(\.tmp)?")
"""Of a folder of weights: with its version."""


def http_fleet(
    job: RLJob, trainer: Trainer, scorers: Scorers | None, environments: Environments | None
) -> Fleet:
    """The servers of a run; `scorers` and `environments` on rank 0. Raises ConfigError, there, if a server is
    not as it was when the run began to start, or the folder cannot be written."""
    assert job.http is not None, "servers draw the answers"
    talks = None
    if environments is not None:
        requests = Requests(trainer.runtime.coord, None, 0, None)
        talks = _Talks(Conversation(job.run, job.policy.tokenizer, requests, environments))
    return Fleet(HttpEngines(job, trainer.runtime, scorers, talks), job.http.parts)


class HttpEngines(EngineEnds):
    """Those of servers; `talks`: with environments, if the run has one."""

    def __init__(
        self, job: RLJob, runtime: RankRuntime, scorers: Scorers | None, talks: _Talks | None
    ) -> None:
        assert job.http is not None
        super().__init__(job.policy.position.rank)
        self._job = job
        self._left = list(range(len(job.http.http)))
        self._weights = WeightFolder(job, runtime)
        self._found: queue.SimpleQueue[tuple[int, Answered | Exception]] = queue.SimpleQueue()
        self._orders: list[queue.SimpleQueue[Any]] = []
        self._taken: dict[int, int] = {}
        """By engine: the version of the weights that it has."""
        self._ends = False
        self._scoring: ScoringThread | None = None
        self._talks = talks
        if scorers is None:
            return
        self._scoring = ScoringThread(scorers, job.run.reward.workers)
        self._scoring.__enter__()
        for engine, url in enumerate(job.http.http):
            server = InferenceServer(url, job.http, job.run)
            try:
                server.find_kind()
            except (LostServer, TrainingError) as error:
                raise ConfigError(f"roles.generation.http: {error}") from None
            self._orders.append(queue.SimpleQueue())
            threading.Thread(target=self._run, args=(engine, server), daemon=True).start()

    @property
    def left(self) -> tuple[int, ...]:
        return tuple(self._left)

    def tell(self, engine: int, message: Any) -> None:
        self._orders[engine].put(message)

    def hear(self) -> tuple[int, Any | None]:
        """Raises TrainingError if none is left, or a server gave something else."""
        engine, message = self._found.get()
        if not isinstance(message, Exception):
            return engine, message
        if not isinstance(message, LostServer):
            raise message
        self._left.remove(engine)
        if not self._left:
            raise TrainingError(f"{message}; no server is left")
        logger.warning("%s; going on with %d of %d servers", message, len(self._left), len(self._orders))
        return engine, None

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> int:
        """Write the weights of `version`, and tell the servers to take them; collective over the policy's
        ranks. Returns the bytes that this rank has written. Raises TrainingError if they cannot be."""
        count = self._weights.write(version, tensors, shards)
        if self.is_controller:
            self._weights.remove_before(min(self._taken.get(engine, -1) for engine in self._left))
            self.tell_all(("weights", version, str(self._weights.of(version))))
        return count

    def stop(self) -> None:
        """Ask for nothing any more; what servers are asked now nobody waits for."""
        self._ends = True
        if self.is_controller:
            self.tell_all(("stop",))
        if self._scoring is not None:
            self._scoring.__exit__(None, None, None)

    # --- a server's thread -----------------------------------------------------------------------------

    def _run(self, engine: int, server: InferenceServer) -> None:
        """Do what the controller says, in order, until the server is lost."""
        version, orders = -1, self._orders[engine]
        try:
            while (order := orders.get())[0] != "stop":
                if order[0] == "weights":
                    _, version, folder = order
                    server.take_weights(folder)
                    self._taken[engine] = version
                    continue
                _, tickets, params = order
                self._generate(engine, server, version, tickets, params)
        except Exception as error:
            # Whoever hears of it raises it, or goes on without this server.
            self._found.put((engine, error))

    def _generate(
        self,
        engine: int,
        server: InferenceServer,
        version: int,
        tickets: Sequence[Ticket],
        params: SamplingParams,
    ) -> None:
        """Have tickets answered, some at a time, each told of as it comes. Raises the first error."""
        waiting: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Ticket, list[Sample] | str | Exception]] = queue.SimpleQueue()
        for ticket in tickets:
            waiting.put(ticket)
        has_failed = threading.Event()

        def ask() -> None:
            while not self._ends and not has_failed.is_set():
                try:
                    ticket = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    if self._talks is None:
                        done.put((ticket, server.answer(ticket, params)))
                    else:
                        done.put((ticket, self._talks.answer(engine, server, ticket, params)))
                except Exception as error:
                    done.put((ticket, error))

        assert self._job.http is not None
        since = time.perf_counter()
        for _ in range(min(self._job.http.concurrency, len(tickets))):
            # No pool: the program would not end before the threads of one.
            threading.Thread(target=ask, daemon=True).start()
        for _ in tickets:
            ticket, found = done.get()
            if isinstance(found, Exception):
                has_failed.set()
                raise found
            now = time.perf_counter()
            samples = [] if isinstance(found, str) else found
            message = Answered(samples, version, now - since, 0, 0, 0)
            if isinstance(found, str):
                fault = {ticket.number: Scores(error=found)}
                self._found.put((engine, replace(message, scores=fault)))
            else:
                self._score(engine, ticket, message)
            since = now

    def _score(self, engine: int, ticket: Ticket, message: Answered) -> None:
        """Tell the controller of a ticket's answers once they are scored."""
        assert self._scoring is not None and ticket.prompt is not None
        start = time.perf_counter()

        def tell(scores: list[Scores] | str) -> None:
            if isinstance(scores, str):
                self._found.put((engine, replace(message, error=scores)))
                return
            took = time.perf_counter() - start
            told = replace(message, scores={ticket.number: scores[0]}, scoring_seconds=took)
            self._found.put((engine, told))

        fields = answer_fields(ticket, message.samples, self._job.policy.tokenizer)
        self._scoring.score([fields], tell)


class _Talks:
    """What servers' answers and environments say to each other; safe to be used by several threads."""

    def __init__(self, talk: Conversation) -> None:
        assert talk.environments is not None
        self._talk = talk
        self._heard: dict[Key, queue.SimpleQueue[Said]] = {}
        """What environments have said, by the answer that it is for."""
        talk.environments.deliver = lambda said: self._heard[said.key].put(said)

    def answer(
        self, engine: int, server: InferenceServer, ticket: Ticket, params: SamplingParams
    ) -> list[Sample] | str:
        """All answers to a prompt, or why its environments gave none. Raises as `server.answer` does."""
        # Of an engine that is lost a thread may still talk, when another one is asked.
        own = replace(ticket, number=f"{ticket.number}@{engine}")
        keys = [(own.number, number) for number in range(ticket.count)]
        self._heard |= {key: queue.SimpleQueue() for key in keys}
        try:
            self._talk.ask_for(own)
            opened = self._talk.opened(own, [self._heard[key].get().told for key in keys])
            if isinstance(opened, str):
                return opened
            return self._go_on(server, replace(opened, number=ticket.number), keys, params)
        finally:
            self._talk.close(own.number)
            for key in keys:
                del self._heard[key]

    def _go_on(
        self, server: InferenceServer, ticket: Ticket, keys: Sequence[Key], params: SamplingParams
    ) -> list[Sample] | str:
        """`answer` once environments are there: first turns in one request, the others as they come."""
        done: queue.SimpleQueue[tuple[int, Sample | str | Exception]] = queue.SimpleQueue()

        def converse(key: Key, first: Sample) -> None:
            try:
                done.put((first.number, self._converse(server, ticket, key, first, params)))
            except Exception as error:
                done.put((first.number, error))

        for key, first in zip(keys, server.answer(ticket, params), strict=True):
            threading.Thread(target=converse, args=(key, first), daemon=True).start()
        found = [one for _, one in sorted((done.get() for _ in keys), key=lambda told: told[0])]
        for one in found:
            if isinstance(one, Exception):
                raise one
        fault = next((one for one in found if isinstance(one, str)), None)
        return fault or [one for one in found if isinstance(one, Sample)]

    def _converse(
        self, server: InferenceServer, ticket: Ticket, key: Key, turn: Sample, params: SamplingParams
    ) -> Sample | str:
        """An answer whose first turn is there, or what is wrong with its environment."""
        answer, number = AnswerUnderWay(ticket, turn.number), turn.number
        while True:
            answer.drawn += range(len(answer.ids), len(answer.ids) + len(turn.ids))
            answer.ids += turn.ids
            answer.log_probs += turn.log_probs
            answer.turns += 1
            if turn.ended == "limit":
                return answer.sample("limit", has_turns=True)
            self._talk.say([Turn(*key, said=tuple(answer.ids[answer.last_turn : -1]))])
            reply = self._talk.reply(self._heard[key].get())
            if reply.fault is not None:
                return reply.fault
            if (ended := answer.hear(reply, self._talk.limits)) is not None:
                return answer.sample(ended, has_turns=True)
            prompt = (*ticket.prompt_ids, *answer.ids)
            asked = Ticket(f"{ticket.number}/{number}/{answer.turns}", prompt, count=1)
            left = params.max_new_tokens - len(answer.ids)
            (turn,) = server.answer(asked, replace(params, max_new_tokens=left))


class WeightFolder:
    """Writes the policy's weights in Hugging Face's format; every rank of the policy calls the same."""

    def __init__(self, job: RLJob, runtime: RankRuntime) -> None:
        """Removes what a run before has left there. Raises ConfigError, on rank 0, if it cannot be made."""
        assert job.http is not None
        self._job = job
        self._coord = runtime.coord
        self._model = job.run.model
        self._dtype = DTYPES[job.run.train.precision]
        given = job.http.folder or Path(job.run.log.directory or ".") / "weights"
        self._folder = Path(given).absolute()
        holdings = plan_holdings(job.policy.plan)
        whole = {name: Shard(shard.shape) for held in holdings.values() for name, shard in held.items()}
        self._moves: dict[str, list[Move]] = defaultdict(list)
        for move in transfer_table(holdings, {0: whole}):
            self._moves[move.name].append(move)
        self._shapes = {name: shard.shape for name, shard in whole.items()}
        self._last: tuple[str, torch.Tensor] | None = None
        self._parts: Mapping[str, torch.Tensor] = {}
        self._shards: Mapping[str, Shard] = {}
        if self._coord.rank == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"roles.generation.folder: {self._folder} cannot be written: {error}"
                ) from None
            self.remove_before(None)

    def of(self, version: int) -> Path:
        """Where the weights of a version are."""
        return self._folder / f"weights-{version:08d}"

    def remove_before(self, version: int | None) -> None:
        """On rank 0: remove the weights before a version; None: all."""
        for path in self._folder.iterdir():
            found = NAME.fullmatch(path.name)
            if found is not None and (version is None or int(found[1]) < version):
                shutil.rmtree(path, ignore_errors=True)

    def write(self, version: int, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> int:
        """Write the weights as they are; `tensors` are this rank's parts. Returns the bytes, 0 beside rank 0.
        Raises TrainingError if they cannot be written."""
        self._parts, self._shards, self._last = tensors, shards, None
        resets = {"reset_position_ids": False, "reset_attention": False, "reset_filter": False}
        written = 0
        with guard_world_collective(self._coord, "the weights for the servers"), torch.no_grad():
            if self._coord.rank > 0:
                for name, _ in published_weights(self._model):
                    self._gather_all(name)
            else:
                dtype = PRECISIONS[self._job.run.train.precision]
                try:
                    written = write_model(self._model, self, self.of(version), dtype=dtype, resets=resets)
                except OSError as error:
                    raise TrainingError(
                        f"roles.generation.folder: {self.of(version)} cannot be written: {error}; free some "
                        "space, or give another"
                    ) from None
        self._parts, self._shards, self._last = {}, {}, None
        return written

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """On rank 0, see `WeightReader`: in the order of `published_weights`, as the other ranks send."""
        if self._last is None or self._last[0] != name:
            self._last = None  # Freed before the next one is there.
            weight, *adapters = self._gather_all(name)
            if adapters:
                assert self._model.lora is not None
                weight = merged_adapters(weight, *adapters, scale=self._model.lora.scale)
            self._last = (name, weight)
        return self._last[1]

    def _gather_all(self, name: str) -> list[torch.Tensor]:
        """On rank 0: a weight, with its adapters if it has some; the others send them."""
        module, _, kind = name.rpartition(".")
        names = [name, *(f"{module}.{one}" for one in ADAPTERS if kind == "weight")]
        found = [self._gather(one) for one in names if one in self._moves]
        return [one for one in found if one is not None]

    def _gather(self, name: str) -> torch.Tensor | None:
        """A whole tensor on rank 0, from those that hold its parts; None elsewhere."""
        rank = self._coord.rank
        whole = torch.empty(self._shapes[name], dtype=self._dtype) if rank == 0 else None
        for move in self._moves[name]:
            part = None
            if move.source == rank:
                part = self._parts[name][local_slices(self._shards[name], move)]
            if whole is None:
                if part is not None:
                    dist.send(part.cpu().contiguous(), 0)
                continue
            if part is None:
                part = torch.empty(move.sizes, dtype=self._dtype)
                dist.recv(part, move.source)
            whole[tuple(slice(o, o + n) for o, n in zip(move.offsets, move.sizes, strict=True))] = part.cpu()
        return whole
