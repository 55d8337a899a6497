"""Environments of a pipeline's answers: the processes that they live in, and what is said between the two.

The pipeline's first rank has the processes, and tells the others. Every answer has an environment of its own,
in the process that its ticket chooses, so that a run is the same again. In flight, replies come among the
controller's messages.
"""

from __future__ import annotations

import json
import queue
import selectors
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from yuan_train.config.errors import ConfigError, DataError
from yuan_train.config.rl import EnvironmentConfig, RLConfig
from yuan_train.data.chat import Message, continue_chat
from yuan_train.data.prompts import ids_of, prompt_of, text_of
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.rl.experience import Ticket
from yuan_train.rl.generator import Opened, Turn, TurnLimits, TurnReply
from yuan_train.rl.rewards import START_SECONDS, Worker
from yuan_train.rl.scoring import Requests

LOOK_SECONDS = 0.1
"""Between two looks at the clock."""

Key = tuple[int | str, int]
"""A ticket, and the number of an answer."""


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
        host = _Host.start("yuan_train.rl.environment_worker", self._order)
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
        self._run = run
        self._tokenizer = tokenizer
        self._requests = requests
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
