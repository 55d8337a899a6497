"""What is said between a pipeline's answers and their environments.

The pipeline's first rank has the processes that these live in, and tells the others. In flight, replies come
among the controller's messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from yuan_train.config.errors import DataError
from yuan_train.config.rl import RLConfig
from yuan_train.data.chat import Message, continue_chat
from yuan_train.data.prompts import ids_of, prompt_of, text_of
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.rl.experience import Ticket
from yuan_train.rl.generator import Opened, Turn, TurnLimits, TurnReply
from yuan_train.rl.helpers import Environments, Key, Said
from yuan_train.rl.scoring import Requests


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
