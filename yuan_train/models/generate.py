"""Sampling from a model, token by token, with the attention and filter caches.

Draws of tokens that follow from a seed and a place alone: no generator, no sort, no running sum.

With Gumbel noise g the argmax of logit / T + g is a draw from softmax(logit / T) (Maddison et al. 2014). The
noise of word v is hashed, as the masks of dropout are, so that any rank, in any batch, draws the same.

N = draws, R = rows of logits, V = words of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from yuan_train.config.errors import YuanError
from yuan_train.config.model import ModelConfig
from yuan_train.models.dropout import Keys, hash_keys, hashes
from yuan_train.models.slots import (
    DocumentRules,
    Resets,
    SlotDocuments,
    documents_at,
    new_slots,
    padded_left,
    step_slots,
)
from yuan_train.models.transformer import Transformer

NOISE_ELEMENTS = 1 << 22
"""Words of all rows whose noise is in memory at once."""
CACHED_ELEMENTS = 1 << 16
"""The same on a CPU, whose cache holds them through the passes that make noise of them."""


def draw_keys(seed: int, ticket: int | str, sample: int, position: int) -> Keys:
    """The keys of the noise of one token: number `position` of an answer of a prompt."""
    return hash_keys(f"{seed}:{ticket}:{sample}:{position}:token")


@torch.no_grad()
def draw(
    model: Transformer,
    hidden_RH: Tensor,
    rows: Sequence[int],
    keys: Sequence[Keys],
    *,
    temperature: float,
    greedy: bool = False,
) -> Tensor:
    """Draw N tokens: fp64 [N, 2] on the host, the token and its log-probability under softmax(logits / T).

    `hidden_RH` is `forward`'s hidden state; draw n is of row `rows[n]` with the noise of `keys[n]`; `greedy`
    takes the most probable word instead, and no keys. A word of a logit that is not finite is never hidden:
    the log-probability is then not finite either. Under tensor parallelism collective over its ranks.
    """
    logits_RV = model.logits(hidden_RH / temperature if temperature != 1 else hidden_RH).double()
    part = model.vocabulary_part
    first = part.first if part is not None else 0
    total_R = None if greedy else logits_RV.logsumexp(1)
    most = CACHED_ELEMENTS if logits_RV.device.type == "cpu" and not greedy else NOISE_ELEMENTS
    chunk = max(1, most // logits_RV.shape[1])
    every = len(rows) == len(logits_RV) and tuple(rows) == tuple(range(len(rows)))
    parts: list[Tensor] = []
    for start in range(0, len(rows), chunk):
        chosen = slice(start, start + chunk)
        if not every:
            chosen = torch.tensor(rows[chosen], device=logits_RV.device)
        score_NV = logits_RV[chosen]
        if total_R is None:
            best_N, word_N = score_NV.max(1)
            logit_N = best_N
            total_N = (score_NV - best_N.unsqueeze(1)).exp_().sum(1).log_().add_(best_N)
        else:
            total_N = total_R[chosen]
            best_N, word_N = _draw_words(score_NV, keys[start : start + chunk], first)
            logit_N = score_NV.gather(1, word_N.unsqueeze(1)).squeeze(1)
        drawn = [(word_N + first).double(), logit_N - total_N]
        parts.append(torch.stack(drawn if part is None else [best_N, drawn[0], total_N, logit_N], 1))
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    if part is None:
        return found.cpu()
    all_TN4 = part.gather(found)
    winner_N = all_TN4[:, :, 0].argmax(0)
    word_N, logit_N = (all_TN4[:, :, i].gather(0, winner_N.unsqueeze(0)).squeeze(0) for i in (1, 3))
    return torch.stack([word_N, logit_N - all_TN4[:, :, 2].logsumexp(0)], 1).cpu()


def _draw_words(logits_NV: Tensor, keys: Sequence[Keys], first: int) -> tuple[Tensor, Tensor]:
    """The greatest of logits and Gumbel noise -log(-log u) of each row, and its word. u is uniform over
    (0, 1); the words are first .. first + V - 1."""
    keys_3N1 = torch.tensor(keys).t().unsqueeze(-1).to(logits_NV.device)
    found_NV = hashes(logits_NV.shape[1], keys_3N1, first=first, device=logits_NV.device).double()
    noise_NV = found_NV.add_(0.5).mul_(2**-32).log_().neg_().log_()
    return torch.sub(logits_NV, noise_NV, out=noise_NV).max(1)


PREFILL_CHUNK = 512
"""Prompt tokens per forward: bounds the attention mask [chunk, prefix] of a long prompt."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled from its logits. Raises YuanError if a value is out of range."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy: always the most probable token."""
    top_k: int = 0
    """Keep only the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep only the fewest most probable tokens whose probabilities sum to at least p."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise YuanError(f"temperature {self.temperature} must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise YuanError(f"top_k {self.top_k} must be 0 (keep all tokens) or a positive number")
        if not 0 < self.top_p <= 1:
            raise YuanError(f"top_p {self.top_p} must lie in (0, 1]; 1 keeps all tokens")


def generate(model: Transformer, prompt_ids: list[int], **options: Any) -> Iterator[int]:
    """Return an iterator over new tokens, each yielded once sampled: `generate_batch` of one prompt."""
    return (
        token
        for tokens in generate_batch(model, [prompt_ids], **options)
        for token in tokens
        if token is not None
    )


def generate_batch(
    model: Transformer,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int | None = None,
    documents: DocumentRules | None = None,
    stop_ids: Collection[int] | None = None,
) -> Iterator[list[int | None]]:
    """Return an iterator over lists with the next token of every prompt; None for a prompt that has ended.

    Prompts may differ in length: shorter ones are padded on the left. Neither attention nor the filter sees
    the padding, so each prompt yields the same tokens as alone.

    Args:
        model: a whole model.
        prompts: at least one, each of at least one token.
        max_new_tokens: maximum number of tokens per prompt.
        sampling: of each token.
        seed: of the sampling generators: prompt i uses `seed + i`. None seeds them at random.
        documents: what the model was trained to reset at document ends; None: nothing, there are none.
        stop_ids: a prompt ends after yielding one of these tokens; None: after their `eod_id`.

    Raises:
        YuanError: (a ValueError) an argument is out of range, or a prompt and new tokens together exceed the
            model's max_sequence_length. Raised by the call itself, before the iterator is used.
    """
    if not prompts:
        raise YuanError("there is no prompt; give at least one")
    for prompt_ids in prompts:
        _check_request(model, prompt_ids, max_new_tokens)
    rules = documents or DocumentRules()
    stops = frozenset((rules.eod_id,) if stop_ids is None else stop_ids)
    reader = _Reader(model, prompts, rules, max_new_tokens)
    return _stream(reader, max_new_tokens, sampling, _generators(seed, len(prompts)), stops)


def _generators(seed: int | None, count: int) -> list[torch.Generator]:
    first = torch.Generator("cpu").seed() >> 1 if seed is None else seed
    return [torch.Generator("cpu").manual_seed(first + number) for number in range(count)]


def sample(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token sampled from logits [V]: temperature first, then top-k, then top-p of the rest."""
    logits_V = logits_V.to("cpu", torch.float32)
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # Subtract the maximum first: a tiny temperature may turn the others into -inf, but none into inf.
    logits_V = (logits_V - logits_V.max()) / sampling.temperature
    sorted_V, order_V = logits_V.sort(descending=True, stable=True)
    if sampling.top_k:
        sorted_V = sorted_V[: sampling.top_k]
    probabilities = sorted_V.softmax(dim=0)
    before = probabilities.cumsum(dim=0) - probabilities
    # Keeps at least the first token, for which `before` is exactly 0.
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    chosen = torch.multinomial(probabilities, 1, generator=generator)
    return int(order_V[chosen])


def _stream(
    reader: _Reader,
    max_new_tokens: int,
    sampling: Sampling,
    generators: list[torch.Generator],
    stops: frozenset[int | None],
) -> Iterator[list[int | None]]:
    tokens: list[int | None] = []
    ended = [False] * len(generators)
    for _ in range(max_new_tokens):
        logits_BV = reader.read(tokens) if tokens else reader.read_prompts()
        tokens = [
            None if ended[row] else sample(logits_BV[row], sampling, generator)
            for row, generator in enumerate(generators)
        ]
        yield tokens
        ended = [token is None or token in stops for token in tokens]
        if all(ended):
            return


class _Reader:
    """Reads the prompts of a batch, and then a token of each at a time."""

    def __init__(
        self, model: Transformer, prompts: Sequence[list[int]], rules: DocumentRules, max_new_tokens: int
    ) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._prompts = prompts
        self._longest = max(map(len, prompts))
        self._documents = [SlotDocuments(rules) for _ in prompts]
        self._cache = new_slots(model, slots=len(prompts), max_length=self._longest + max_new_tokens)
        self._lengths = [len(prompt_ids) for prompt_ids in prompts]

    def read_prompts(self) -> Tensor:
        """The logits [B, V] of the first new tokens."""
        resets = [own.advance(ids, 0) for own, ids in zip(self._documents, self._prompts, strict=True)]
        hidden_BSH = None
        for first in range(0, self._longest, PREFILL_CHUNK):
            columns = range(first, min(first + PREFILL_CHUNK, self._longest))
            tokens, places = padded_left(self._prompts, columns, self._longest)
            hidden_BSH = self._step(tokens, places, resets, places)
        assert hidden_BSH is not None
        return self._logits(hidden_BSH)

    def read(self, tokens: Sequence[int | None]) -> Tensor:
        """The logits [B, V] of the tokens after these; those of rows that have ended are to be ignored."""
        ids, places = [[token or 0] for token in tokens], [[length] for length in self._lengths]
        rows = zip(self._documents, ids, self._lengths, strict=True)
        resets = [own.advance(new, length) for own, new, length in rows]
        self._lengths = [length + 1 for length in self._lengths]
        self._longest += 1
        return self._logits(self._step(ids, places, resets, [[0]] * len(ids)))

    def _step(
        self, tokens: list[list[int]], places: list[list[int]], resets: list[Resets], of: list[list[int]]
    ) -> Tensor:
        """The hidden state of tokens at their places; `of`: where in `resets` each one's are."""
        self._cache.length = self._longest
        return step_slots(
            self._model,
            torch.tensor(tokens, device=self._device),
            self._cache,
            torch.tensor(places, device=self._device),
            last=max(0, *(row[-1] for row in places)),
            documents=documents_at(resets, of, self._device),
        )

    def _logits(self, hidden_BSH: Tensor) -> Tensor:
        with torch.no_grad():
            return self._model.logits(hidden_BSH[:, -1])


def _check_request(model: Transformer, prompt_ids: list[int], max_new_tokens: int) -> None:
    config: ModelConfig = model.config
    if not (model.has_embedding and model.has_head and len(model.layers) == config.num_layers):
        raise YuanError("this is one stage of a model; only a whole model generates")
    if config.output == "value":
        raise YuanError(f"model {config.name} scores (output: value); only a language model generates")
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
