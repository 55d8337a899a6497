"""From answers to rows of tokens: packing, and where each answer's tokens lie in the rows.

Values of tokens (log-probabilities, advantages) are kept flat, by answer: number n of all N tokens of a
batch's answers: those that the policy drew. `Rows.place` says which token a row's position predicts.

R = rows, S = tokens of a row, N = answer tokens of the batch.

What is asked of an engine, and what it answers.

Ticket k is prompt k of the run's order. An answer is a function of the weights, the run's seed, its ticket
and its number: whichever engine writes it, beside whichever others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from yuan_train.data.loader import Batch
from yuan_train.data.prompts import Prompt
from yuan_train.models.transformer import IGNORE_INDEX

Ended = Literal["stop", "limit"]
"""Why an answer ends: with a token that ends answers, or with as many tokens, or turns, as it may have."""


@dataclass(frozen=True)
class Ticket:
    """A prompt to be answered `count` times."""

    number: int | str
    """Of the run's order; prompts of an evaluation have names."""
    prompt_ids: tuple[int, ...]
    count: int
    prompt: Prompt | None = None
    """For the scores of its answers, where an engine has them made."""


@dataclass(frozen=True)
class Episode:
    """What an environment made of an answer: turns of the policy, and what it said to each."""

    prompt_ids: tuple[int, ...]
    """What was read first."""
    drawn: tuple[int, ...]
    """Places in `Sample.ids` of the policy's own tokens; the others are the environment's."""
    last_turn: int
    """Where in these the policy's last turn begins."""
    turns: int
    """Of the policy."""
    reward: float | None
    """The sum of what the environment gave; None if it gave none."""


@dataclass(frozen=True)
class Sample:
    """One answer."""

    ticket: int | str
    number: int
    """Among the answers to its prompt."""
    ids: tuple[int, ...]
    """With the token that ended it, if one did."""
    log_probs: tuple[float, ...]
    """Of each token that was drawn, under the weights that drew it."""
    ended: Ended
    episode: Episode | None = None
    """None without an environment: all tokens were drawn."""
    experts: bytes | None = None
    """Of a model with experts: those of each token that was read, prompt and answer without its last token,
    in each layer; int16 [tokens, L, K]."""
    expert_shape: tuple[int, int] | None = None
    """L and K."""

    @property
    def said(self) -> tuple[int, ...]:
        """Its tokens without the one that ended it; with an environment, of its last turn."""
        said = self.ids[self.episode.last_turn :] if self.episode is not None else self.ids
        return said[:-1] if self.ended == "stop" else said

    @property
    def given(self) -> float | None:
        """What an environment gave; None without one, or if it gave nothing."""
        return self.episode.reward if self.episode is not None else None

    @property
    def num_drawn(self) -> int:
        """Tokens that the policy drew, and that are trained."""
        return len(self.log_probs)

    @property
    def drawn(self) -> Sequence[int]:
        """Their places in `ids`."""
        return self.episode.drawn if self.episode is not None else range(len(self.ids))


def share_out(tickets: Sequence[Ticket], shares: Sequence[float]) -> list[list[Ticket]]:
    """The tickets of each engine: a weighted round robin, which follows from the order of tickets alone.

    Each ticket goes to the engine that is furthest behind its share; of equals, to the first.
    """
    given = [0] * len(shares)
    found: list[list[Ticket]] = [[] for _ in shares]
    for done, ticket in enumerate(tickets, start=1):
        engine = max(range(len(shares)), key=lambda e: (shares[e] * done - given[e], -e))
        given[engine] += 1
        found[engine].append(ticket)
    return found


@dataclass(frozen=True)
class Group:
    """The answers to one prompt, scored."""

    ticket: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    scores: tuple[tuple[float | None, ...], ...]
    """Of each answer, by function."""
    rewards: tuple[float, ...]

    @property
    def is_level(self) -> bool:
        """Whether all rewards are equal: nothing is learned of it."""
        return len(set(self.rewards)) == 1


@dataclass(frozen=True)
class Rows:
    """Rows of answers, each behind its prompt; on the host."""

    tokens: Tensor
    """int64 [R, S]."""
    targets: Tensor
    """int64 [R, S]: the next token where it is an answer's, else IGNORE_INDEX."""
    starts: Tensor
    """bool [R, S], where a prompt begins; also where the padding after the last answer does."""
    place: Tensor
    """int64 [R, S]: the number of the token that is predicted, or -1."""
    used: int
    """Tokens that are read, padding not counted."""
    shared: bool
    """Whether some row has several answers."""
    experts: Tensor | None = None
    """int16 [R, S, L, K]: the experts of each layer with which answers were drawn; anything at padding."""

    @property
    def anew(self) -> Self:
        """The same, whose experts a model chooses itself: not the one that drew them."""
        return replace(self, experts=None)

    @property
    def count(self) -> int:
        """R."""
        return self.tokens.shape[0]


def make_rows(groups: Sequence[Group], *, length: int, packed: bool, without_truncated: bool = False) -> Rows:
    """Rows of `length` tokens: first-fit decreasing if `packed`, else one answer each.

    `without_truncated`: answers that reached the limit are read, and none of their tokens is a target.
    """
    samples = [sample for group in groups for sample in group.samples]
    sequences = [(group.prompt.ids, sample.ids) for group in groups for sample in group.samples]
    # The last token of an answer is predicted, and not read.
    sizes = [len(prompt) + len(answer) - 1 for prompt, answer in sequences]
    bins = fit_rows(sizes, length) if packed else [[i] for i in range(len(sizes))]
    firsts = [0]
    for sample in samples:
        firsts.append(firsts[-1] + sample.num_drawn)
    # As lists: thousands of short answers would each take a few small tensors.
    room = len(bins) * length
    tokens, targets, starts, place = [0] * room, [IGNORE_INDEX] * room, [False] * room, [-1] * room
    for row, members in enumerate(bins):
        at = row * length
        for i in members:
            prompt, answer = sequences[i]
            end, first = at + sizes[i], at + len(prompt) - 1
            tokens[at:end] = [*prompt, *answer[:-1]]
            if not (without_truncated and samples[i].ended == "limit"):
                if samples[i].episode is None:
                    targets[first:end] = answer
                    place[first:end] = range(firsts[i], firsts[i + 1])
                for number, drawn in enumerate(samples[i].drawn if samples[i].episode else (), firsts[i]):
                    targets[first + drawn], place[first + drawn] = answer[drawn], number
            starts[at] = True
            at = end
        if at < (row + 1) * length:
            starts[at] = True
    tokens_RS, targets_RS, starts_RS, place_RS = (
        torch.tensor(values).view(len(bins), length) for values in (tokens, targets, starts, place)
    )
    shared = any(len(members) > 1 for members in bins)
    experts = _experts_of(samples, bins, sizes, length)
    return Rows(tokens_RS, targets_RS, starts_RS, place_RS, sum(sizes), shared, experts)


def _experts_of(
    samples: Sequence[Sample], bins: Sequence[Sequence[int]], sizes: Sequence[int], length: int
) -> Tensor | None:
    """int16 [R, S, L, K] of the rows; None for a model without experts."""
    if not samples or samples[0].experts is None or samples[0].expert_shape is None:
        return None
    layers, slots = samples[0].expert_shape
    experts_RSLK = torch.arange(slots, dtype=torch.int16).expand(len(bins), length, layers, slots).clone()
    for row, members in enumerate(bins):
        at = 0
        for i in members:
            held = samples[i].experts
            assert held is not None
            own = torch.frombuffer(bytearray(held), dtype=torch.int16).view(sizes[i], layers, slots)
            experts_RSLK[row, at : at + sizes[i]] = own
            at += sizes[i]
    return experts_RSLK


def make_score_rows(sequences: Sequence[Sequence[int]], *, length: int, packed: bool) -> Rows:
    """Rows of sequences that are read whole; `place` has the number of each at its last token."""
    sizes = [len(sequence) for sequence in sequences]
    bins = fit_rows(sizes, length) if packed else [[i] for i in range(len(sizes))]
    tokens_RS = torch.zeros((len(bins), length), dtype=torch.int64)
    starts_RS, place_RS = torch.zeros_like(tokens_RS, dtype=torch.bool), torch.full_like(tokens_RS, -1)
    for row, members in enumerate(bins):
        at = 0
        for i in members:
            starts_RS[row, at] = True
            tokens_RS[row, at : at + sizes[i]] = torch.tensor(sequences[i])
            at += sizes[i]
            place_RS[row, at - 1] = i
        if at < length:
            starts_RS[row, at] = True
    shared = any(len(members) > 1 for members in bins)
    return Rows(tokens_RS, torch.full_like(tokens_RS, IGNORE_INDEX), starts_RS, place_RS, sum(sizes), shared)


def fit_rows(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Bins of items: each into the first that has room, the largest first (Johnson 1973)."""
    bins: list[list[int]] = []
    left: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[item]
        found = next((b for b, space in enumerate(left) if space >= size), None)
        if found is None:
            bins.append([])
            left.append(room)
            found = len(bins) - 1
        bins[found].append(item)
        left[found] -= size
    return bins


class Answers:
    """The samples of a run whose batches are made as it goes, and not read: only their files are known."""

    masks = False
    """The loss counts by itself what it is a mean of."""

    def __init__(self, fingerprints: list[str]) -> None:
        self.fingerprints = fingerprints

    def known_terms(self, num_samples: int) -> int:
        """One: the loss divides by itself."""
        return 1

    def batch(self, first_sample: int, count: int) -> Batch:
        """Never: `RowFeed` has the rows."""
        raise AssertionError("answers are not read by number")
