"""Prompts, and what is known of the right answers, in an order that follows from the seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from yuan_train.config.errors import DataError, why_unread
from yuan_train.data.sampler import hash_key, permuted
from yuan_train.data.tokenizer import Tokenizer, check_question, render_chat


def read_records(path: Path, *, keys: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each object of a JSON-lines file stands (`path:line`), and the object; empty lines are skipped.

    Raises DataError, which names `keys` of the run file if the file cannot be read, else file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {why_unread(error)}; check {keys}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON ({error}); wanted one JSON object a line") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}: {type(record).__name__}; wanted a JSON object")
        yield f"{path}:{number}", record


NAMED = 8
"""Lines that an error names one by one."""


def token_ids(record: Mapping[str, Any], key: str, where: str) -> list[int]:
    """What a record has under a key of ids. Raises DataError."""
    value = record.get(key)
    if not isinstance(value, list) or any(type(item) is not int or abs(item) >= 1 << 31 for item in value):
        raise DataError(f"{where}: {key} is not a list of token ids")
    return value


def refuse_long(path: str | Path, key: str, most: int, lengths: Mapping[str, int]) -> None:
    """Raise DataError if some records of a file have more than `most` tokens, which `key` of the run file
    says; `lengths` are by where they stand."""
    lines = [f"{where.rpartition(':')[2]} ({n} tokens)" for where, n in lengths.items() if n > most]
    if lines:
        more = f" and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
        raise DataError(
            f"{path}: longer than {key} {most}: lines {', '.join(lines[:NAMED])}{more}; raise it, or leave "
            "them out"
        )


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    ids: tuple[int, ...]
    text: str
    """As the file has it; of `prompt_ids` without a tokenizer the ids, with spaces between."""
    answer: Any
    """What the file says under `answer`; None if nothing."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What it says beside these, by name; for reward functions."""
    messages: tuple[Mapping[str, str], ...] | None = None
    """Of a chat, as the file has them; the tokenizer's template made the text of them."""


class Prompts:
    """The prompts of some files, in proportion to their weights; each file's in an order of its own.

    A prompt may rest for some epochs of its file; which tickets that changes are those not asked for yet.
    """

    def __init__(
        self,
        files: Sequence[Sequence[Prompt]],
        weights: Sequence[float],
        *,
        seed: int,
        order: Literal["shuffled", "file"] = "shuffled",
    ) -> None:
        assert files and all(files)
        self._is_shuffled = order == "shuffled"
        self._files = files
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._seed = seed
        self._identities = [_identity(prompts) for prompts in files]
        self._order: list[tuple[int, int]] = []
        """Of the tickets from `_first` on: the file, and its place in all epochs of the file."""
        self._first = 0
        self._given = [0] * len(files)
        """Tickets of each file so far."""
        self._read = [0] * len(files)
        """Likewise, with the places of prompts that rested: the place of the file's next ticket."""
        self._rests: list[dict[int, int]] = [{} for _ in files]
        """Of each file, by index of a prompt: the last epoch in which it rests."""

    @property
    def fingerprints(self) -> list[str]:
        """What ranks compare of the files, wherever these lie."""
        return [
            f"{len(prompts)} prompts, content {identity}"
            for prompts, identity in zip(self._files, self._identities, strict=True)
        ]

    @property
    def columns(self) -> list[str]:
        """What each prompt of all files has beside prompt and answer."""
        every = [set(prompt.columns) for prompts in self._files for prompt in prompts]
        return sorted(set.intersection(*every))

    def __getitem__(self, ticket: int) -> Prompt:
        """The prompt of a ticket. Every epoch of a file gives each of its prompts once, unless it rests."""
        while self._first + len(self._order) <= ticket:
            self._order.append(self._next())
        file, place = self._order[ticket - self._first]
        return self._files[file][self._index(file, place)]

    def rest(self, ticket: int, epochs: int) -> None:
        """Leave the prompt of a ticket that was asked for out of the file's next epochs."""
        file, place = self._order[ticket - self._first]
        until = place // len(self._files[file]) + epochs
        rests = self._rests[file]
        index = self._index(file, place)
        rests[index] = max(until, rests.get(index, 0))

    def state(self, next_ticket: int) -> dict[str, Any]:
        """What tickets from `next_ticket` on depend on; all before were asked for, and none behind."""
        assert self._first + len(self._order) == next_ticket
        rests = [
            {str(index): until for index, until in sorted(rests.items()) if until >= read // len(prompts)}
            for rests, read, prompts in zip(self._rests, self._read, self._files, strict=True)
        ]
        return {
            "next_ticket": next_ticket,
            "files": list(self._identities),
            "given": list(self._given),
            "read": list(self._read),
            "rests": rests,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; of other files than these nothing is known, so they begin as without one."""
        if state["files"] != self._identities:
            return
        self._order, self._first = [], int(state["next_ticket"])
        self._given, self._read = list(state["given"]), list(state["read"])
        self._rests = [{int(index): until for index, until in rests.items()} for rests in state["rests"]]

    def _next(self) -> tuple[int, int]:
        """File and place of the next ticket."""
        done = self._first + len(self._order) + 1
        behind = [share * done - given for share, given in zip(self._shares, self._given, strict=True)]
        file = behind.index(max(behind))
        place, rests = self._read[file], self._rests[file]
        # Ends: each rest does, so an epoch comes in which not all prompts of the file rest.
        while rests and rests.get(self._index(file, place), -1) >= place // len(self._files[file]):
            place += 1
        self._given[file] += 1
        self._read[file] = place + 1
        return file, place

    def _index(self, file: int, place: int) -> int:
        """Of the prompt at a place of all epochs of a file."""
        size = len(self._files[file])
        epoch, index = divmod(place, size)
        if not self._is_shuffled:
            return index
        return permuted(index, size, hash_key("prompts", self._seed, self._identities[file], epoch))


def read_prompts(
    path: str | Path, tokenizer: Tokenizer | None, *, template: str, max_tokens: int, vocab_size: int
) -> list[Prompt]:
    """Read a .jsonl file of prompts: `prompt` (text or messages) or `prompt_ids`, and `answer`.

    Raises DataError for a file without prompts, a line of another form, and, naming the lines, for prompts of
    more than `max_tokens`.
    """
    found: list[Prompt] = []
    lengths: dict[str, int] = {}
    for where, record in read_records(Path(path), keys="data.prompts and data.evaluation"):
        prompt = _prompt(record, tokenizer, template, where)
        if not prompt.ids:
            raise DataError(f"{where}: an empty prompt; wanted at least one token")
        if min(prompt.ids) < 0 or max(prompt.ids) >= vocab_size:
            raise DataError(
                f"{where}: token id {max(prompt.ids)} is beyond the model's vocabulary of {vocab_size}"
            )
        lengths[where] = len(prompt.ids)
        found.append(prompt)
    if not found:
        raise DataError(f'{path}: no prompts; wanted {{"prompt": ..., "answer": ...}}, one object a line')
    refuse_long(path, "data.max_prompt_tokens", max_tokens, lengths)
    return found


def text_of(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The text of tokens, without special ones; without a tokenizer their numbers, with spaces between.

    A model may draw words that only fill up its vocabulary; they have no text.
    """
    if tokenizer is None:
        return " ".join(map(str, ids))
    return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size])


def prompt_of(value: Any, tokenizer: Tokenizer | None, template: str) -> Prompt:
    """The prompt of a text, or of messages, as one of a file; without a tokenizer a text has token ids.

    Raises DataError.
    """
    if tokenizer is None and isinstance(value, str):
        return Prompt(ids_of(value, None), value, None)
    return _prompt({"prompt": value}, tokenizer, template, "the prompt")


def ids_of(text: str, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens of a text in which no special ones are recognised; see `text_of`. Raises DataError."""
    if tokenizer is not None:
        return tuple(tokenizer.encode(text))
    try:
        return tuple(int(word) for word in text.split())
    except ValueError:
        raise DataError(
            f"{text[:100]!r}: without data.tokenizer a text is token ids, with spaces between"
        ) from None


def _prompt(record: dict[str, Any], tokenizer: Tokenizer | None, template: str, where: str) -> Prompt:
    answer = record.get("answer")
    columns = {key: value for key, value in record.items() if key not in ("prompt", "prompt_ids", "answer")}
    if "prompt_ids" in record:
        ids = token_ids(record, "prompt_ids", where)
        return Prompt(tuple(ids), text_of(ids, tokenizer), answer, columns)
    prompt = record.get("prompt")
    if tokenizer is None:
        raise DataError(f"{where}: text needs data.tokenizer; or give prompt_ids")
    if isinstance(prompt, list):
        check_question(prompt, where)
        text = render_chat(tokenizer, prompt)
        ids = tuple(tokenizer.encode(text, special=True))
        return Prompt(ids, text, answer, columns, messages=tuple(prompt))
    if not isinstance(prompt, str):
        raise DataError(f"{where}: prompt is {type(prompt).__name__}; wanted text, messages or prompt_ids")
    text = template.replace("{prompt}", prompt)
    return Prompt((*tokenizer.prefix_ids, *tokenizer.encode(text, special=True)), prompt, answer, columns)


def _identity(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.ids, prompt.answer], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]
