"""Processes that work for a rank: those that score answers, and those that environments live in.

Every answer has an environment of its own, in the process that its ticket chooses, so that a run is the same
again. What is said between a pipeline's answers and their environments is a `Conversation`. The pipeline's
first rank has the processes, and tells the others. In flight, replies come among the controller's messages.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any, Self

from yuan_train.config.errors import ConfigError, DataError
from yuan_train.config.rl import EnvironmentConfig, RewardConfig, RLConfig
from yuan_train.data.prompts import ids_of, prompt_of, text_of
from yuan_train.data.tokenizer import Message, Tokenizer, continue_chat
from yuan_train.parallel.transport import LostPeer
from yuan_train.rl.experience import Ticket
from yuan_train.rl.generator import Opened, Turn, TurnLimits, TurnReply
from yuan_train.rl.job import RLJob
from yuan_train.rl.roles import Requests
from yuan_train.train.agreement import agreeing

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""How long a process may take to load the functions: a file may import what takes long."""
READ_BYTES = 1 << 16
LOOK_SECONDS = 0.1
"""Between two looks at the clock."""
ENDING_SECONDS = 5.0
"""How long a run that has failed waits for its thread that scores."""

Key = tuple[int | str, int]
"""A ticket, and the number of an answer."""


@dataclass(frozen=True)
class Helpers:
    """Processes that work for this rank."""

    scorers: Scorers | None
    """Of the reward functions, on rank 0; engines of their own score where they are, but what servers draw is
    scored here."""
    environments: Environments | None
    """Those of a pipeline's answers, on its first rank; of what servers draw, on rank 0."""


@contextmanager
def helping(job: RLJob) -> Iterator[Helpers]:
    """While inside, they are there. Raises on all ranks what is wrong with one of a rank."""
    rank = job.policy.position.rank
    turns = job.run.turns
    talks = turns is not None and talking_rank(job) == rank
    scores = rank == 0 and (job.http is not None or not job.generates_apart)
    scorers = Scorers(job.run.reward, job.prompts.columns) if scores else None
    environments = Environments(turns) if turns is not None and talks else None
    with ExitStack() as stack:
        for helper in (scorers, environments):
            with agreeing():
                if helper is not None:
                    stack.enter_context(helper)
        yield Helpers(scorers, environments)


def talking_rank(job: RLJob) -> int | None:
    """That talks with environments: of this rank's pipeline, or to servers; None where other cards
    generate."""
    if job.generates_apart:
        return 0 if job.http is not None else None
    return min(job.policy.plan.pipeline_of(job.policy.position.rank).ranks)


@dataclass(eq=False)
class Worker:
    """A process that loads what a run names, and then reads and writes lines."""

    process: subprocess.Popen[bytes]
    deadline: float
    """Of loading."""
    is_ready: bool = False
    """Whether it has said that all is loaded."""
    unread: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(cls, what: str, order: str) -> Self:
        """Start a process of `worker`, which does `what` to an order."""
        process = subprocess.Popen(
            [sys.executable, "-m", "yuan_train.rl.worker", what, order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process, time.monotonic() + START_SECONDS)

    @property
    def input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def read(self) -> list[bytes] | None:
        """The lines that are whole now; None if it has ended."""
        part = os.read(self.output.fileno(), READ_BYTES)
        *lines, rest = bytes(self.unread + part).split(b"\n")
        self.unread = bytearray(rest)
        return lines if part else None

    def end(self) -> None:
        """End the process, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.input, self.output):
            with suppress(OSError):
                pipe.close()


@dataclass(frozen=True)
class Scores:
    """Of the answers to one prompt: a number per `RewardConfig.labels` of each, None where a function says
    that an answer is not its own; or why there are none."""

    of_answers: tuple[tuple[float | None, ...], ...] = ()
    error: str | None = None


@dataclass(eq=False)
class _Scorer(Worker):
    """A process that scores, and the group that it is at; its deadline is then that of the group, and in the
    past while it waits for one."""

    task: int | None = None
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a group."""
        return self.is_ready and self.task is None


class Scorers:
    """The processes that score; as a context manager, they end with it.

    A process whose functions take too long for a group is ended, and another takes its place. While one loads
    the functions, those that have them go on: how long a file's imports take costs no group its time.
    """

    def __init__(self, config: RewardConfig, columns: Sequence[str] = ()) -> None:
        """`columns`: what each prompt has beside `worker.FIELDS`. Raises ConfigError, when entered, if
        a first process cannot load the functions."""
        self._config = config
        self._workers: list[_Scorer] = []
        self._did_not_load = False
        """Of this batch: whether a process could not load the functions, as the first one could."""
        self.is_abandoned = False
        functions = [
            {key: getattr(f, key) for key in ("name", "python", "url", "pattern", "label", "batch")}
            for f in config.functions
        ]
        order = {"functions": functions, "columns": list(columns), "concurrency": config.concurrency}
        self._order = json.dumps(order)

    def __enter__(self) -> Self:
        self._start()
        try:
            while not self._workers[0].is_ready:
                self._collect({})
        except _Failed as error:
            raise ConfigError(f"reward.functions: {error}") from None
        return self

    def __exit__(self, *failure: object) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def score(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[Scores]:
        """Score groups of answers, each given as its fields (`answer_fields`); in their order.

        Raises OSError if no process can load the functions any more: no group is at fault.
        """
        waiting = deque(range(len(groups)))
        found: dict[int, Scores] = {}
        self._did_not_load = False
        try:
            while len(found) < len(groups):
                if self.is_abandoned:
                    raise _Failed("were abandoned")
                self._hand_out(waiting, groups)
                self._collect(found)
        except _Failed as error:
            raise OSError(str(error)) from None
        return [found[number] for number in range(len(groups))]

    def abandon(self) -> None:
        """End `score` in another thread, which wakes when its processes end; it raises OSError."""
        self.is_abandoned = True
        for worker in tuple(self._workers):
            worker.process.kill()

    def _hand_out(self, waiting: deque[int], groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Give each idle process a group; start processes while more groups wait than load the functions."""
        for worker in [w for w in self._workers if w.is_idle and w.process.poll() is not None]:
            # Ended between two batches, by the system or by a thread of the functions.
            self._drop(worker)
        for worker in self._workers:
            if waiting and worker.is_idle:
                worker.task = waiting.popleft()
                # Its own time begins when it has the whole group.
                worker.deadline = time.monotonic() + START_SECONDS
                worker.unsent = memoryview(json.dumps(list(groups[worker.task])).encode() + b"\n")
        if self._did_not_load and self._workers:
            return
        loading = sum(not worker.is_ready for worker in self._workers)
        for _ in range(min(self._config.workers - len(self._workers), len(waiting) - loading)):
            self._start()

    def _collect(self, found: dict[int, Scores]) -> None:
        """Wait until something is written, is read, or takes too long. Raises _Failed."""
        busy = [worker for worker in self._workers if not worker.is_idle]
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.output, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.input, selectors.EVENT_WRITE, worker)
            soonest = min(worker.deadline for worker in busy)
            ready = selector.select(max(0.0, soonest - time.monotonic()))
        for key, events in ready:
            worker: _Scorer = key.data
            if worker not in self._workers or worker.is_idle:
                continue
            if events & selectors.EVENT_WRITE:
                self._write(worker, found)
            elif (line := self._read(worker, found)) is None:
                continue
            elif worker.task is not None:
                found[worker.task] = _scores(line)
                worker.task = None
            else:
                self._see_ready(worker, line, found)
        for worker in busy:
            if worker not in self._workers or worker.is_idle or time.monotonic() < worker.deadline:
                continue
            if not worker.is_ready:
                self._give_up(worker, found, f"were not loaded within {START_SECONDS:g} s")
            elif worker.unsent:
                self._give_up(worker, found, f"did not read a group within {START_SECONDS:g} s")
            else:
                timeout = f"reward.timeout ({self._config.timeout:g} s)"
                self._give_up(worker, found, f"took longer than {timeout}")

    def _see_ready(self, worker: _Scorer, line: bytes, found: dict[int, Scores]) -> None:
        """Take the first line of a process."""
        told: Any = json.loads(line)
        if "error" in told:
            self._give_up(worker, found, str(told["error"]))
        else:
            worker.is_ready = True

    def _write(self, worker: _Scorer, found: dict[int, Scores]) -> None:
        try:
            sent = os.write(worker.input.fileno(), worker.unsent[:READ_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self._give_up(worker, found, f"ended its process ({error})")
            return
        worker.unsent = worker.unsent[sent:]
        if not worker.unsent:
            worker.deadline = time.monotonic() + self._config.timeout

    def _read(self, worker: _Scorer, found: dict[int, Scores]) -> bytes | None:
        """A whole line of a process, if there is one now."""
        lines = worker.read()
        if lines is None:
            self._give_up(worker, found, f"ended its process (exit code {worker.process.wait()})")
        return lines[0] if lines else None

    def _give_up(self, worker: _Scorer, found: dict[int, Scores], why: str) -> None:
        """End a process; its group is lost. Without one, it has not loaded the functions: raises _Failed
        if it was the last."""
        self._drop(worker)
        if worker.task is not None:
            found[worker.task] = Scores(error=f"the reward functions: {why}")
            return
        self._did_not_load = True
        if not self._workers:
            raise _Failed(why)
        logger.warning("a process less scores, whose reward functions could not be loaded: %s", why)

    def _drop(self, worker: _Scorer) -> None:
        self._workers.remove(worker)
        worker.end()

    def _start(self) -> None:
        """Start a process, which begins to load the functions."""
        worker = _Scorer.start("scores", self._order)
        os.set_blocking(worker.input.fileno(), False)
        self._workers.append(worker)


class ScoringThread:
    """Scores groups beside the thread that gives them, as they come: some at a time, one for each process."""

    def __init__(self, scorers: Scorers, at_once: int) -> None:
        """As a context manager, it ends with it; what was not scored by then is dropped."""
        self._scorers, self._at_once = scorers, at_once
        self._given: queue.SimpleQueue[_Given | None] = queue.SimpleQueue()
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._ends = True
        self._given.put(None)
        if kind is not None:
            self._scorers.abandon()
        # Who is told of scores may wait for a controller that the failed run has lost.
        self._thread.join(None if kind is None else ENDING_SECONDS)

    def score(
        self, groups: Sequence[Sequence[Mapping[str, Any]]], then: Callable[[list[Scores] | str], None]
    ) -> None:
        """Have groups scored; `then` gets the scores in their order, in the other thread, or what is wrong
        if no process can load the functions any more."""
        self._given.put((groups, then))

    def _run(self) -> None:
        # Who listens to a lost peer says so.
        with suppress(LostPeer):
            self._score_all()

    def _score_all(self) -> None:
        while not self._ends and (first := self._given.get()) is not None:
            given, count = [first], len(first[0])
            while count < self._at_once and not self._given.empty():
                if (more := self._given.get()) is None:
                    return
                given.append(more)
                count += len(more[0])
            groups = [group for own, _ in given for group in own]
            try:
                scores = self._scorers.score(groups)
            except OSError as error:
                if self._scorers.is_abandoned:
                    return
                for _, then in given:
                    then(f"the reward functions' processes cannot be used: {error}")
                continue
            for own, then in given:
                then(scores[: len(own)])
                scores = scores[len(own) :]


_Given = tuple[Sequence[Sequence[Mapping[str, Any]]], Callable[[list[Scores] | str], None]]


class _Failed(Exception):
    """A process did not load the functions."""


def _scores(line: bytes) -> Scores:
    told: Any = json.loads(line)
    if "error" in told:
        return Scores(error=str(told["error"]))
    return Scores(tuple(tuple(row) for row in told["scores"]))


@dataclass(frozen=True)
class Said:
    """What came of a call of an environment: `said`, `reward` and `done`, or `error`."""

    key: Key
    told: Mapping[str, Any]


@dataclass(eq=False)
class _Host(Worker):
    """A process that environments live in."""

    fault: str | None = None
    """Why it cannot make an environment."""
    deadlines: dict[Key, tuple[int, float]] = field(default_factory=dict[Key, tuple[int, float]])
    """Of the calls that it is at, each with its number."""
    writing: threading.Lock = field(default_factory=threading.Lock)


class Environments:
    """The processes that environments live in; as a context manager, they end with it.

    A thread reads what they say and hands it to `deliver`. A process that does not answer in time is ended,
    with all that live in it, and another takes its place.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Raises ConfigError, when entered, if a process cannot make an environment."""
        self._config = config
        self._order = json.dumps({key: getattr(config, key) for key in ("name", "python", "folder")})
        self._hosts: list[_Host] = []
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._calls = 0
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._found: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self.deliver: Callable[[Said], None] = self._found.put
        """Called by the thread."""

    def __enter__(self) -> Self:
        self._hosts = [self._start() for _ in range(self._config.workers)]
        self._thread.start()
        while not self._hosts[0].is_ready:
            if (fault := self._hosts[0].fault) is not None:
                self.__exit__(None, None, None)
                raise ConfigError(f"environment: {fault}")
            time.sleep(LOOK_SECONDS / 10)
        return self

    def __exit__(self, *failure: object) -> None:
        self._ends = True
        self._thread.join()
        for host in self._hosts:
            host.end()
        self._selector.close()

    def call(self, key: Key, request: Mapping[str, Any]) -> None:
        """Have an environment reset or make a step; what comes of it is delivered."""
        with self._lock:
            host = self._host_of(key[0])
            if host.fault is not None:
                self.deliver(Said(key, {"error": host.fault}))
                return
            self._calls += 1
            call = self._calls
            host.deadlines[key] = (call, time.monotonic() + self._config.timeout)
        self._write(host, {"id": [*key, call], **request})

    def forget(self, ticket: int | str) -> None:
        """Let go of the environments of a ticket; what its calls come to is not delivered any more."""
        with self._lock:
            host = self._host_of(ticket)
            for key in [key for key in host.deadlines if key[0] == ticket]:
                del host.deadlines[key]
        self._write(host, {"forget": ticket})

    def take(self) -> Said:
        """The next that was delivered, unless `deliver` is another's; waits for it."""
        return self._found.get()

    def drain(self) -> None:
        """Drop what was delivered and not taken."""
        with self._lock:
            while not self._found.empty():
                self._found.get()

    def _host_of(self, ticket: int | str) -> _Host:
        return self._hosts[zlib.crc32(str(ticket).encode()) % len(self._hosts)]

    def _write(self, host: _Host, request: Mapping[str, Any]) -> None:
        line = json.dumps(request).encode() + b"\n"
        # The thread finds a process that has ended, and says so of all its calls.
        with host.writing, suppress(OSError, ValueError):
            host.input.write(line)
            host.input.flush()

    def _start(self) -> _Host:
        host = _Host.start("environments", self._order)
        self._selector.register(host.output, selectors.EVENT_READ, host)
        return host

    def _run(self) -> None:
        while not self._ends:
            for key, _ in self._selector.select(LOOK_SECONDS):
                host: _Host = key.data
                if (lines := host.read()) is None:
                    self._replace(host, "ended their process")
                    continue
                for line in lines:
                    self._hear(host, json.loads(line))
            now = time.monotonic()
            for host in list(self._hosts):
                with self._lock:
                    late = host.is_ready and any(until < now for _, until in host.deadlines.values())
                if late:
                    seconds = f"environment.timeout ({self._config.timeout:g} s)"
                    self._replace(host, f"took longer than {seconds}, or ended with one that did")
                elif not host.is_ready and host.fault is None and now > host.deadline:
                    self._give_up(host, f"were not made within {START_SECONDS:g} s")

    def _hear(self, host: _Host, told: dict[str, Any]) -> None:
        if "error" in told and not host.is_ready:
            self._give_up(host, str(told["error"]))
            return
        if not host.is_ready:
            with self._lock:
                host.is_ready = True
                until = time.monotonic() + self._config.timeout
                host.deadlines = {key: (call, until) for key, (call, _) in host.deadlines.items()}
            return
        ticket, number, call = told.pop("id")
        key = (ticket, number)
        with self._lock:
            if host.deadlines.get(key, (0, 0.0))[0] == call:
                del host.deadlines[key]
                self.deliver(Said(key, told))

    def _replace(self, host: _Host, why: str) -> None:
        """End a process, and start another; what it was asked has failed."""
        if not host.is_ready:
            self._give_up(host, why)
            return
        self._selector.unregister(host.output)
        host.end()
        with self._lock:
            self._hosts[self._hosts.index(host)] = self._start()
        self._fail(host, why)

    def _give_up(self, host: _Host, why: str) -> None:
        """Let a process go that could not make an environment: another one could not either."""
        self._selector.unregister(host.output)
        host.end()
        with self._lock:
            host.fault = why
        self._fail(host, why)

    def _fail(self, host: _Host, why: str) -> None:
        with self._lock:
            for key in host.deadlines:
                self.deliver(Said(key, {"error": why}))
            host.deadlines.clear()


class Conversation:
    """`Talk` of a pipeline's answers with their environments; every rank of it calls the same."""

    def __init__(
        self,
        run: RLConfig,
        tokenizer: Tokenizer | None,
        requests: Requests,
        environments: Environments | None,
    ) -> None:
        """`requests`: by which the first rank tells the others; `environments`: on that rank."""
        config = run.turns
        assert config is not None
        self._run, self._tokenizer, self._requests = run, tokenizer, requests
        self.environments = environments
        self.limits = TurnLimits(turns=config.turns, tokens=run.generation.max_new_tokens)
        self._arrived: dict[Key, Mapping[str, Any]] = {}
        """What was said, and is not due yet, or of a ticket that was given up."""
        self._chats: dict[int | str, bool] = {}
        """Whether the prompt of a ticket is a chat."""

    def open(self, tickets: Sequence[Ticket]) -> Opened:
        """See `Talk`, as the others; the environments of tickets before are let go of."""
        opened: Opened | None = None
        if self.environments is not None:
            for number in list(self._chats):
                self.close(number)
            self.environments.drain()
            self._arrived.clear()
            for ticket in tickets:
                self.ask_for(ticket)
            said = self._gather((t.number, n) for t in tickets for n in range(t.count))
            faults: dict[int | str, str] = {}
            good: list[Ticket] = []
            for ticket in tickets:
                found = self.opened(ticket, [said[ticket.number, n] for n in range(ticket.count)])
                if isinstance(found, str):
                    faults[ticket.number] = found
                else:
                    good.append(found)
            opened = Opened(good, faults)
        return self._requests.tell(opened)

    def say(self, turns: Sequence[Turn]) -> None:
        """Hand turns to environments, on the first rank."""
        if self.environments is not None:
            for turn in turns:
                text = text_of(turn.said, self._tokenizer)
                self.environments.call((turn.ticket, turn.number), {"step": text})

    def hear(self, turns: Sequence[Turn]) -> Sequence[TurnReply]:
        """Wait for the replies to turns."""
        replies: list[TurnReply] = []
        if self.environments is not None:
            said = self._gather((turn.ticket, turn.number) for turn in turns)
            replies = [self.reply(Said(key, told)) for key, told in said.items()]
        return self._requests.tell(replies)

    def ask_for(self, ticket: Ticket) -> None:
        """On the first rank: have environments made for all answers to a ticket."""
        assert self.environments is not None and ticket.prompt is not None
        prompt = ticket.prompt
        given = prompt.text if prompt.messages is None else prompt.messages
        row = {**prompt.columns, "prompt": given, "prompt_ids": prompt.ids, "answer": prompt.answer}
        for number in range(ticket.count):
            self.environments.call((ticket.number, number), {"reset": row})

    def opened(self, ticket: Ticket, told: Sequence[Mapping[str, Any]]) -> Ticket | str:
        """On the first rank, of what all its environments said to a reset: the ticket with what is to be read
        first, or what is wrong."""
        assert ticket.prompt is not None
        if (error := next((one["error"] for one in told if "error" in one), None)) is not None:
            return f"the environment: {error}"
        said = told[0]["said"]
        if any(one["said"] != said for one in told):
            return "the environment: reset said something else for another answer to the same prompt"
        self._chats[ticket.number] = (
            ticket.prompt.messages is not None if said is None else isinstance(said, list)
        )
        if said is None:
            return ticket
        try:
            prompt = prompt_of(said, self._tokenizer, self._run.data.template)
            self._check(prompt.ids)
        except DataError as error:
            return f"the environment: reset: {error}"
        most = self._run.data.max_prompt_tokens
        if not 0 < len(prompt.ids) <= most:
            return f"the environment: reset said {len(prompt.ids)} tokens; wanted 1 to {most}"
        given = replace(ticket.prompt, ids=prompt.ids, text=prompt.text)
        return replace(ticket, prompt_ids=prompt.ids, prompt=given)

    def reply(self, said: Said) -> TurnReply:
        """On the first rank: what came of a step, in tokens."""
        told, (ticket, number) = said.told, said.key
        if "error" in told:
            return TurnReply(ticket, number, None, None, f"the environment: {told['error']}")
        if told["done"]:
            return TurnReply(ticket, number, None, told["reward"])
        try:
            ids = self._tokens(told["said"], is_chat=self._chats.get(ticket, False))
            self._check(ids)
        except DataError as error:
            return TurnReply(ticket, number, None, None, f"the environment: step: {error}")
        return TurnReply(ticket, number, ids, told["reward"])

    def close(self, number: int | str) -> None:
        """On the first rank: let go of the environments of a ticket."""
        self._chats.pop(number, None)
        if self.environments is not None:
            self.environments.forget(number)

    def _tokens(self, said: str | list[Message], *, is_chat: bool) -> tuple[int, ...]:
        """What is read behind the token that ended a turn."""
        if isinstance(said, str) and not is_chat:
            return ids_of(said, self._tokenizer)
        if self._tokenizer is None:
            raise DataError("messages of a chat need data.tokenizer, whose template they are read by")
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        ids = self._tokenizer.encode(continue_chat(self._tokenizer, messages), special=True)
        # The policy has drawn the end of its answer.
        return tuple(ids[1:] if ids and ids[0] in self._tokenizer.stop_ids else ids)

    def _check(self, ids: Sequence[int]) -> None:
        vocabulary = self._run.model.vocab_size
        for token in ids:
            if not 0 <= token < vocabulary:
                raise DataError(f"token id {token} is beyond the model's vocabulary of {vocabulary}")

    def _gather(self, keys: Iterable[Key]) -> dict[Key, Mapping[str, Any]]:
        """What was said of calls, in the order of these; waits for it."""
        assert self.environments is not None
        found: dict[Key, Mapping[str, Any]] = {}
        for key in keys:
            while key not in self._arrived:
                said = self.environments.take()
                self._arrived[said.key] = said.told
            found[key] = self._arrived.pop(key)
        return found
