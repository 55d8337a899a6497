"""Preference pairs as rows of one length, in an order that follows from the seed: no state to save.

Sample 2i of the global order is the chosen answer of a pair, sample 2i + 1 the rejected one; each is a row of
its own, prompt and answer, padded on the right.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from yuan_train.config.errors import DataError
from yuan_train.data.loader import IGNORED, Batch
from yuan_train.data.prompts import read_records, refuse_long, token_ids
from yuan_train.data.sampler import hash_key, permuted
from yuan_train.data.tokenizer import Message, Tokenizer, check_messages, encode_chat

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
