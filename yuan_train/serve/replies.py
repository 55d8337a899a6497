"""Answers as clients get them: text from tokens, ended by stop strings, whole or as it comes."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from yuan_train.data.tokenizer import Tokenizer
from yuan_train.rl.generator import Token
from yuan_train.serve.draws import NOT_FINITE
from yuan_train.serve.protocol import ApiError, Call, Served

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for the first bytes of a character."""


@dataclass(frozen=True)
class TokenText:
    """A token as log-probabilities tell it."""

    text: str
    log_prob: float
    alternatives: tuple[tuple[str, float], ...] = ()


class TokenTexts:
    """The text of single tokens, with the space that a piece begins with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The first piece of a text loses its space.
        self._before = tokenizer.encode("a")
        self.of = lru_cache(maxsize=1 << 15)(self._find)

    def _find(self, token: int) -> str:
        if token >= self._tokenizer.vocab_size:
            return ""
        before = self._tokenizer.decode(self._before, special=True)
        return self._tokenizer.decode([*self._before, token], special=True).removeprefix(before)


@dataclass
class Piece:
    """What came to an answer since the last piece."""

    text: str
    tokens: list[TokenText]
    ids: list[int]


@dataclass
class Answer:
    """One answer of a request, as far as it is written."""

    index: int
    tokenizer: Tokenizer | None
    texts: TokenTexts | None
    stops: tuple[str, ...]
    is_streamed: bool
    ids: list[int] = field(default_factory=list[int])
    finish_reason: Literal["stop", "length"] | None = None
    _tokens: list[TokenText] = field(default_factory=list[TokenText])
    _taken: int = 0
    """Ids that pieces had."""
    _ready: str = ""
    """Text that no further token changes."""
    _shown: int = 0

    def add(self, token: Token, alternatives: int | None) -> None:
        """Add a token. Raises ApiError if the model's output was not finite."""
        drawn = token.drawn
        number = round(drawn[0])
        if number == NOT_FINITE:
            raise ApiError(
                "the model's logits are not finite: its weights are at fault", status=500, code="not_finite"
            )
        self.ids.append(number)
        if alternatives is not None and self.texts is not None:
            others = [(round(one), value) for one, value in zip(drawn[2::2], drawn[3::2], strict=True)]
            told = tuple((self.texts.of(one), value) for one, value in others[:alternatives])
            self._tokens.append(TokenText(self.texts.of(number), drawn[1], told))
        if token.sample is not None:
            self.finish_reason = "stop" if token.sample.ended == "stop" else "length"
        if self.stops or self.is_streamed or self.finish_reason is not None:
            self._read()

    def take(self) -> Piece | None:
        """What is new; None if nothing is that could be shown."""
        text = self._ready[self._shown :]
        if not text and self.finish_reason is None:
            return None
        piece = Piece(text, self._tokens, self.ids[self._taken :])
        self._shown, self._taken, self._tokens = len(self._ready), len(self.ids), []
        return piece

    def _read(self) -> None:
        """Find the text so far, where a stop string cuts it, and how much of it stays."""
        whole = self._decode()
        places = [place for stop in self.stops if (place := whole.find(stop)) >= 0]
        if places:
            whole = whole[: min(places)]
            self.finish_reason = "stop"
        if self.finish_reason is None:
            whole = whole[: len(whole.rstrip(UNFINISHED))]
            whole = whole[: len(whole) - _begun(whole, self.stops)]
            if not whole.startswith(self._ready):
                return
        self._ready = whole

    def _decode(self) -> str:
        if self.tokenizer is None:
            return ""
        known = [one for one in self.ids if one < self.tokenizer.vocab_size]
        return self.tokenizer.decode(known)


def _begun(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text with which a stop string may begin."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


class Reply:
    """The bodies of one request's answers."""

    def __init__(self, call: Call, served: Served, texts: TokenTexts | None) -> None:
        self._call = call
        self._head = {
            "id": f"{'chatcmpl' if call.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
        }
        self.answers = {
            asked.number: Answer(index, served.tokenizer, texts, call.stops, call.stream)
            for index, asked in enumerate(call.asked)
        }
        self._offsets = [len(echo) for echo in call.echoes]

    def add(self, token: Token) -> Answer | None:
        """Add a token to its answer, and return that; None if it has ended before. Raises ApiError."""
        answer = self.answers[token.ticket]
        if answer.finish_reason is not None:
            return None
        answer.add(token, self._call.asked[answer.index].alternatives)
        return answer

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.finish_reason is not None for answer in self.answers.values())

    def whole(self) -> dict[str, Any]:
        """The body of a request that is not streamed, once it is done."""
        choices: list[dict[str, Any]] = []
        for answer in self.answers.values():
            piece = answer.take()
            assert piece is not None
            if self._call.is_chat:
                message = {"role": "assistant", "content": piece.text, "refusal": None}
                choice = self._choice(answer, piece) | {"message": message}
            else:
                choice = self._choice(answer, piece) | {"text": self._call.echoes[answer.index] + piece.text}
            choices.append(choice)
        kind = "chat.completion" if self._call.is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices, "usage": self._usage()}

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        if self._call.is_chat:
            return [
                self._chunk({"index": answer.index, "delta": {"role": "assistant", "content": ""}})
                for answer in self.answers.values()
            ]
        return [
            self._chunk({"index": answer.index, "text": echo})
            for answer, echo in zip(self.answers.values(), self._call.echoes, strict=True)
            if echo
        ]

    def chunk(self, answer: Answer) -> dict[str, Any] | None:
        """What is new of a streamed answer; None if nothing is."""
        piece = answer.take()
        if piece is None:
            return None
        text = {"delta": {"content": piece.text}} if self._call.is_chat else {"text": piece.text}
        return self._chunk(self._choice(answer, piece) | text)

    def last_chunks(self) -> list[dict[str, Any]]:
        """What a stream ends with."""
        if not self._call.include_usage:
            return []
        kind = "chat.completion.chunk" if self._call.is_chat else "text_completion"
        return [self._head | {"object": kind, "choices": [], "usage": self._usage()}]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._call.is_chat else "text_completion"
        whole = {"finish_reason": None, "logprobs": None} | choice
        return self._head | {"object": kind, "choices": [whole]}

    def _choice(self, answer: Answer, piece: Piece) -> dict[str, Any]:
        asked = self._call.asked[answer.index]
        found: dict[str, Any] = {
            "index": answer.index,
            "finish_reason": answer.finish_reason,
            "logprobs": None,
        }
        if asked.alternatives is not None:
            found["logprobs"] = (
                _chat_log_probs(piece.tokens) if self._call.is_chat else self._log_probs(answer, piece.tokens)
            )
        if self._call.with_ids:
            found["token_ids"] = piece.ids
            found["prompt_token_ids"] = list(asked.prompt_ids)
        return found

    def _log_probs(self, answer: Answer, tokens: Sequence[TokenText]) -> dict[str, Any]:
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offsets[answer.index])
            self._offsets[answer.index] += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            # Of tokens with the same text the most probable one, which is told last here.
            "top_logprobs": [dict(reversed(token.alternatives)) for token in tokens],
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, int]:
        written = sum(len(answer.ids) for answer in self.answers.values())
        return {
            "prompt_tokens": self._call.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._call.prompt_tokens + written,
        }


def _chat_log_probs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    def entry(text: str, value: float) -> dict[str, Any]:
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    return {
        "content": [
            entry(token.text, token.log_prob)
            | {"top_logprobs": [entry(text, value) for text, value in token.alternatives]}
            for token in tokens
        ],
        "refusal": None,
    }


def event(value: dict[str, Any] | str) -> bytes:
    """A server-sent event with an object, or a word."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n".encode("utf-8", "replace")
