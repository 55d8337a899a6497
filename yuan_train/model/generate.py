"""Sampling from a model, token by token, with the attention and filter caches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from yuan_train.config.errors import YuanError
from yuan_train.config.model import ModelConfig
from yuan_train.model.transformer import Cache, Transformer

PREFILL_CHUNK = 512
"""Prompt tokens read at once: bounds the mask [chunk, prefix] of a long prompt."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from its logits."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_k: int = 0
    """Only the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Only the most probable tokens whose probabilities reach p together."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise YuanError(f"temperature {self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise YuanError(f"top_k {self.top_k} must be 0 (keep all tokens) or a positive number")
        if not 0 < self.top_p <= 1:
            raise YuanError(f"top_p {self.top_p} must lie in (0, 1]; 1 keeps all tokens")


def generate(
    model: Transformer,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    eod_id: int | None = None,
    reset_position_ids: bool = True,
    reset_attention: bool = False,
    reset_filter: bool = False,
) -> Iterator[int]:
    """Return an iterator over new tokens, each as soon as it is drawn.

    Args:
        model: a whole model.
        prompt_ids: at least one token.
        max_new_tokens: where to stop at the latest.
        temperature: 0 is greedy; see `Sampling` for this and the next two.
        top_k: see `Sampling`.
        top_p: see `Sampling`.
        seed: of the draw's own generator; None takes a fresh one.
        eod_id: stop after yielding this token. In the prompt it closes a document, and the three switches
            say what the model was trained to reset there (`documents.find_resets` has the same defaults).
        reset_position_ids: rotary positions count from the document's start.
        reset_attention: tokens see their own document only.
        reset_filter: the localized filter sees its own document only.

    Raises:
        YuanError: (a ValueError) an argument is out of range, or prompt and new tokens together exceed the
            model's max_sequence_length. Raised by the call, before the first token is asked for.
    """
    _check_request(model, prompt_ids, max_new_tokens)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    generator = torch.Generator("cpu")
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    reader = _Reader(
        model,
        model.new_cache(batch_size=1, max_length=len(prompt_ids) + max_new_tokens),
        eod_id=eod_id,
        reset_position_ids=reset_position_ids,
        reset_attention=reset_attention,
        reset_filter=reset_filter,
    )
    return _stream(reader, prompt_ids, max_new_tokens, sampling, generator)


def sample(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return one token of logits [V]; temperature first, then top-k, then top-p of what is left."""
    logits_V = logits_V.to("cpu", torch.float32)
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # The largest logit becomes 0 first: a tiny temperature may send the others to -inf, but none to inf.
    logits_V = (logits_V - logits_V.max()) / sampling.temperature
    sorted_V, order_V = logits_V.sort(descending=True, stable=True)
    if sampling.top_k:
        sorted_V = sorted_V[: sampling.top_k]
    probabilities = sorted_V.softmax(dim=0)
    before = probabilities.cumsum(dim=0) - probabilities
    # Never empty: exactly 0 lies before the first token.
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    chosen = torch.multinomial(probabilities, 1, generator=generator)
    return int(order_V[chosen])


def _stream(
    reader: _Reader,
    prompt_ids: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> Iterator[int]:
    unread = prompt_ids
    for _ in range(max_new_tokens):
        token = sample(reader.read(unread), sampling, generator)
        yield token
        if token == reader.eod_id:
            return
        unread = [token]


@dataclass(kw_only=True)
class _Places:
    """Of tokens being read: place in the document, whether they begin one, and where theirs began."""

    positions: list[int] = field(default_factory=list)
    starts: list[bool] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)


class _Reader:
    """Feeds a model through its cache and follows the documents in what it reads."""

    def __init__(
        self,
        model: Transformer,
        cache: Cache,
        *,
        eod_id: int | None,
        reset_position_ids: bool,
        reset_attention: bool,
        reset_filter: bool,
    ) -> None:
        self.model = model
        self.cache = cache
        self.eod_id = eod_id
        self.reset_position_ids = reset_position_ids
        self.reset_attention = reset_attention
        self.reset_filter = reset_filter
        self._first = 0
        self._closed = True

    def read(self, ids: list[int]) -> Tensor:
        """Read ids, at least one; return the logits [V] of the token that follows."""
        hidden_BSH = None
        for start in range(0, len(ids), PREFILL_CHUNK):
            hidden_BSH = self._read_chunk(ids[start : start + PREFILL_CHUNK])
        assert hidden_BSH is not None
        with torch.no_grad():
            return self.model.logits(hidden_BSH[0, -1])

    def _read_chunk(self, ids: list[int]) -> Tensor:
        places = self._follow(ids)
        device = next(self.model.parameters()).device

        def row(values: list[int] | list[bool], wanted: bool) -> Tensor | None:
            return torch.tensor([values], device=device) if wanted else None

        return self.model.forward_cached(
            torch.tensor([ids], device=device),
            self.cache,
            positions=row(places.positions, self.reset_position_ids),
            document_start=row(places.starts, self.reset_filter),
            # Without an older document in the cache there is nothing to hide, and no mask to make.
            visible_from=row(places.firsts, self.reset_attention and self._first > 0),
        )

    def _follow(self, ids: list[int]) -> _Places:
        places = _Places()
        for index, token in enumerate(ids, start=self.cache.length):
            if self._closed:
                self._first = index
            places.positions.append(index - self._first)
            places.starts.append(self._closed)
            places.firsts.append(self._first)
            self._closed = token == self.eod_id
        return places


def _check_request(model: Transformer, prompt_ids: list[int], max_new_tokens: int) -> None:
    config: ModelConfig = model.config
    if not (model.has_embedding and model.has_head and len(model.layers) == config.num_layers):
        raise YuanError("this is a part of a model; only a whole model generates")
    if not prompt_ids:
        raise YuanError("the prompt is empty; give at least one token")
    for index, token in enumerate(prompt_ids):
        if not 0 <= token < config.vocab_size:
            raise YuanError(f"prompt_ids[{index}]: {token} is not in the vocabulary [0, {config.vocab_size})")
    if max_new_tokens < 0:
        raise YuanError(f"max_new_tokens {max_new_tokens} must be 0 or more")
    room = config.max_sequence_length - len(prompt_ids)
    if max_new_tokens > room:
        raise YuanError(
            f"{len(prompt_ids)} prompt tokens and {max_new_tokens} new ones exceed the model's "
            f"max_sequence_length {config.max_sequence_length}; ask for at most {max(room, 0)} new tokens"
        )
