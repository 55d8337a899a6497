"""What a server is asked for, and how its tokens are drawn: exactly as `models.generate` samples them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from yuan_train.models.generate import Sampling, sample
from yuan_train.models.transformer import Transformer
from yuan_train.rl.experience import Ended, Ticket
from yuan_train.rl.generator import Draw

MOST_ALTERNATIVES = 20
"""Tokens beside the drawn one whose log-probabilities are told."""
NOT_FINITE = -1
"""In place of a token where the logits are not finite: the answer ends, and the request fails."""


@dataclass(frozen=True, kw_only=True)
class Asked(Ticket):
    """A prompt to be answered `count` times, with settings of its own."""

    sampling: Sampling
    seed: int
    """Answer number i has a generator with this seed + i."""
    max_new_tokens: int
    stop_ids: frozenset[int]
    alternatives: int | None = None
    """Most probable tokens to tell with each; None: not even the token's own log-probability is told."""
    at_temperature: bool = False
    """Whether log-probabilities are those of softmax(logits / temperature), of which tokens are drawn."""


class SeededSampler:
    """Draws with a generator for each answer; `Sampler` of an engine whose tickets are all `Asked`."""

    width = 2 + 2 * MOST_ALTERNATIVES
    """Token, log-probability, and the same of alternatives; of those that are not asked for -1 and 0."""

    def __init__(self) -> None:
        self._generators: dict[int | str, dict[int, torch.Generator]] = {}
        """By ticket and answer."""

    def draw(
        self, model: Transformer, hidden_RH: Tensor, rows: Sequence[int], draws: Sequence[Draw]
    ) -> Tensor:
        """See `Sampler.draw`: fp64 [N, width]."""
        logits_RV = model.logits(hidden_RH)
        found = torch.zeros(len(rows), self.width, dtype=torch.float64)
        part = model.vocabulary_part
        if part is not None:
            logits_RV = part.gather(logits_RV.contiguous()).transpose(0, 1).flatten(1)
            if part.first:
                return found
        logits_RV = logits_RV.to("cpu", torch.float32)
        for row, one, told in zip(rows, draws, found, strict=True):
            assert isinstance(one.ticket, Asked)
            self._draw_one(logits_RV[row], one, one.ticket, told)
        return found

    def _draw_one(self, logits_V: Tensor, one: Draw, asked: Asked, told: Tensor) -> None:
        """Fill the numbers [width] of a draw."""
        told[2::2] = -1.0
        if not bool(logits_V.isfinite().all()):
            told[0] = NOT_FINITE
            return
        token = sample(logits_V, asked.sampling, self._generator(asked, one.number))
        told[0] = token
        if asked.alternatives is None:
            return
        heat = asked.sampling.temperature if asked.at_temperature and asked.sampling.temperature else 1.0
        log_probs_V = (logits_V.double() / heat if heat != 1 else logits_V).log_softmax(0)
        told[1] = log_probs_V[token]
        if count := min(asked.alternatives, len(log_probs_V)):
            values, tokens = log_probs_V.topk(count)
            told[2 : 2 + 2 * count : 2] = tokens.double()
            told[3 : 3 + 2 * count : 2] = values.double()

    def _generator(self, asked: Asked, number: int) -> torch.Generator:
        of_ticket = self._generators.setdefault(asked.number, {})
        if number not in of_ticket:
            of_ticket[number] = torch.Generator("cpu")
            of_ticket[number].manual_seed(asked.seed + number)
        return of_ticket[number]

    def why_ended(self, ticket: Ticket, ids: Sequence[int]) -> Ended | None:
        """See `Sampler.why_ended`."""
        assert isinstance(ticket, Asked)
        if ids[-1] == NOT_FINITE or ids[-1] in ticket.stop_ids:
            return "stop"
        return "limit" if len(ids) >= ticket.max_new_tokens else None

    def forget(self, ticket: int | str, number: int | None = None) -> None:
        """Drop the generator of an answer that has ended, or of all answers to a ticket."""
        if number is not None:
            self._generators.get(ticket, {}).pop(number, None)
        if number is None or not self._generators.get(ticket):
            self._generators.pop(ticket, None)
