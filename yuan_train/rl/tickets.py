"""What is asked of an engine, and what it answers. Knows no torch.

Ticket k is prompt k of the run's order. An answer is a function of the weights, the run's seed, its ticket
and its number: whichever engine writes it, beside whichever others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from yuan_train.data.prompts import Prompt

Ended = Literal["stop", "limit"]
"""Why an answer ends: with a token that ends answers, or with as many tokens as it may have."""


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
class Sample:
    """One answer."""

    ticket: int | str
    number: int
    """Among the answers to its prompt."""
    ids: tuple[int, ...]
    """With the token that ended it, if one did."""
    log_probs: tuple[float, ...]
    """Of each token, under the weights that drew it."""
    ended: Ended

    @property
    def said(self) -> tuple[int, ...]:
        """Its tokens without the one that ended it."""
        return self.ids[:-1] if self.ended == "stop" else self.ids


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
