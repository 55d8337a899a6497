"""Prompts of which answers are drawn, and preference pairs, prompts with two answers each: lines of files.

Both come in an order that follows from the seed; pairs need no state to save. Sample 2i of their global order
is the chosen answer of a pair, sample 2i + 1 the rejected one; each is a row of its own, prompt and answer,
padded on the right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from yuan_train.config.errors import DataError, why_unread
from yuan_train.data.loader import IGNORED, Batch
from yuan_train.data.sampler import hash_key, permuted
from yuan_train.data.tokenizer import (
    Message,
    Tokenizer,
    check_messages,
    check_question,
    encode_chat,
    render_chat,
)


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
            record = json.loads(line, parse_constant=_refuse_constant)
            if "\\u" in line:
                # An escape may be half a surrogate pair, which nothing can write.
                json.dumps(record, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(f"{path}:{number}: holds half a surrogate pair; fix the escapes") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON ({error}); wanted one JSON object a line") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}: {type(record).__name__}; wanted a JSON object")
        yield f"{path}:{number}", record


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


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
        if (odd := next((one for one in prompt.ids if not 0 <= one < vocab_size), None)) is not None:
            raise DataError(f"{where}: token id {odd} is beyond the model's vocabulary of {vocab_size}")
        lengths[where] = len(prompt.ids)
        found.append(prompt)
    if not found:
        raise DataError(f'{path}: no prompts; wanted {{"prompt": ..., "answer": ...}}, one object a line')
    refuse_long(path, "data.max_prompt_tokens", max_tokens, lengths)
    return found


def text_of(ids: Sequence[int], tokenizer: Tokenizer | None, *, special: bool = False) -> str:
    """The text of tokens; without a tokenizer their numbers, with spaces between.

    Special ones are left out unless `special`; words that only fill up a vocabulary always are.
    """
    if tokenizer is None:
        return " ".join(map(str, ids))
    return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size], special=special)


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
        text = render_chat(tokenizer, prompt, where)
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


# --- pairs --------------------------------------------------------------------------------------------------


SIDES = ("chosen", "rejected")


@dataclass(frozen=True, eq=False)
class Row:
    """Tokens int32 of a prompt and an answer to it; the answer begins at `first`."""

    tokens: np.ndarray
    first: int


class Pairs:
    """Preference pairs, read at once: four bytes a token.

    `trained` are the targets of a row: its answer's tokens (`answer`, for log-probabilities), or its last
    token alone (`end`, where a reward model scores).
    """

    masks = False
    """The number of pairs of a batch is known without reading it."""

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        sequence_length: int,
        seed: int,
        pad_id: int,
        trained: Literal["answer", "end"],
    ) -> None:
        assert rows and len(rows) % 2 == 0
        self._rows, self._sequence_length, self._seed = rows, sequence_length, seed
        self._pad_id, self._trained = pad_id, trained
        digest = hashlib.sha256()
        for row in rows:
            digest.update(np.array([len(row.tokens), row.first]).tobytes() + row.tokens.tobytes())
        self.identity = digest.hexdigest()[:16]

    def __len__(self) -> int:
        """Pairs of an epoch."""
        return len(self._rows) // 2

    @property
    def fingerprints(self) -> list[str]:
        """What ranks compare, wherever the file lies."""
        return [f"{len(self)} pairs, content {self.identity}"]

    def known_terms(self, num_samples: int) -> int:
        """Terms of the mean loss of so many samples: their pairs."""
        return num_samples // 2

    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples [first_sample, first_sample + count) of the global order, whole pairs."""
        assert first_sample % 2 == 0 and count % 2 == 0
        return self._rows_of(
            [self._pair_at(number) for number in range(first_sample // 2, (first_sample + count) // 2)]
        )

    def in_file_order(self, first_row: int, count: int) -> Batch:
        """Rows [first_row, first_row + count) of the file, whole pairs."""
        assert first_row % 2 == 0 and count % 2 == 0
        return self._rows_of(range(first_row // 2, (first_row + count) // 2))

    def _rows_of(self, pairs: Sequence[int]) -> Batch:
        places = np.array([2 * pair + side for pair in pairs for side in (0, 1)])
        shape = (len(places), self._sequence_length)
        batch = Batch(np.full(shape, self._pad_id), np.full(shape, IGNORED), places)
        for inputs, targets, place in zip(batch.inputs, batch.targets, places, strict=True):
            row = self._rows[place]
            end = len(row.tokens)
            inputs[:end] = row.tokens
            if self._trained == "answer":
                targets[row.first - 1 : end - 1] = row.tokens[row.first :]
            else:
                targets[end - 1] = row.tokens[-1]
        return batch

    def _pair_at(self, number: int) -> int:
        """Every epoch reads each pair once, in an order of its own."""
        epoch, index = divmod(number, len(self))
        return permuted(index, len(self), hash_key("pairs", self._seed, self.identity, epoch))


def read_pairs(
    path: str | Path,
    tokenizer: Tokenizer | None,
    *,
    sequence_length: int,
    seed: int,
    vocab_size: int,
    trained: Literal["answer", "end"],
) -> Pairs:
    """Read a .jsonl file of pairs: `prompt`, `chosen`, `rejected`, or the same with `_ids`.

    A prompt is text, in which special tokens are recognised, or messages, which the tokenizer's chat template
    renders. An answer is text, and ends with the end-of-document token; in a chat it ends as the template has
    it. Raises DataError for a line of another form, and, naming the lines, for pairs that are longer than
    `sequence_length`.
    """
    rows: list[Row] = []
    lengths: dict[str, int] = {}
    for where, record in read_records(Path(path), keys="data.pairs"):
        pair = [_row(record, side, tokenizer, where) for side in SIDES]
        longest, largest = (max(f(row.tokens) for row in pair) for f in (len, np.max))
        if largest >= vocab_size or min(row.tokens.min() for row in pair) < 0:
            raise DataError(f"{where}: token id {largest} is beyond the model's vocabulary of {vocab_size}")
        lengths[where] = longest
        rows += pair
    if not rows:
        raise DataError(f"{path}: no pairs; wanted one JSON object a line with prompt, chosen and rejected")
    refuse_long(path, "data.sequence_length", sequence_length, lengths)
    pad_id = tokenizer.eod_id if tokenizer is not None else 0
    return Pairs(rows, sequence_length=sequence_length, seed=seed, pad_id=pad_id, trained=trained)


def _row(record: dict[str, Any], side: str, tokenizer: Tokenizer | None, where: str) -> Row:
    if "prompt_ids" in record:
        prompt, answer = (token_ids(record, f"{name}_ids", where) for name in ("prompt", side))
    elif tokenizer is None:
        raise DataError(f"{where}: text needs data.tokenizer; or give prompt_ids, chosen_ids, rejected_ids")
    elif isinstance(record.get("prompt"), list):
        prompt, answer = _chat(record, side, tokenizer, where)
    else:
        prompt = [*tokenizer.prefix_ids, *tokenizer.encode(_text(record, "prompt", where), special=True)]
        answer = [*tokenizer.encode(_text(record, side, where)), tokenizer.eod_id]
    if not prompt or not answer:
        raise DataError(f"{where}: an empty {side if prompt else 'prompt'}; wanted at least one token")
    return Row(np.array([*prompt, *answer], dtype=np.int32), len(prompt))


def _chat(record: dict[str, Any], side: str, tokenizer: Tokenizer, where: str) -> tuple[list[int], list[int]]:
    """Prompt and answer of a chat: `chosen` may be text, or messages of which the last one is the answer."""
    answer = record.get(side)
    said: list[Message] = (
        [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer or []
    )
    prompt = record["prompt"]
    # Some collections repeat the prompt in front of each answer.
    messages = said if said[: len(prompt)] == prompt else [*prompt, *said]
    check_messages(messages, where)
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{where}: {side} ends with a message of {messages[-1]['role']!r}; wanted assistant")
    tokens, is_answer = encode_chat(tokenizer, messages, where)
    # What follows the token that ends the answer belongs to the next turn.
    end = len(tokens) - is_answer[::-1].index(True) if True in is_answer else 0
    first = end
    while first > 0 and is_answer[first - 1]:
        first -= 1
    return tokens[:first], tokens[first:end]


def _text(record: dict[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        what = f"{key} is {type(value).__name__}" if key in record else f"no key {key!r}"
        raise DataError(f"{where}: {what}; wanted text")
    return value
