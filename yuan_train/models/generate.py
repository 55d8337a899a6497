"""Sampling from a model, token by token, with the attention and filter caches.

Draws of tokens that follow from a seed and a place alone: no generator, no sort, no running sum.

With Gumbel noise g the argmax of logit / T + g is a draw from softmax(logit / T) (Maddison et al. 2014). The
noise of word v is hashed, as the masks of dropout are, so that any rank, in any batch, draws the same.

N = draws, R = rows of logits, V = words of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from yuan_train.config.errors import YuanError
from yuan_train.config.model import ModelConfig
from yuan_train.models.dropout import Keys, hash_keys, hashes
from yuan_train.models.transformer import Cache, Transformer

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
    stop_ids: Collection[int] | None = None,
    reset_position_ids: bool = True,
    reset_attention: bool = False,
    reset_filter: bool = False,
) -> Iterator[int]:
    """Return an iterator over new tokens, each yielded once sampled: `generate_batch` of one prompt."""
    batch = generate_batch(
        model,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eod_id=eod_id,
        stop_ids=stop_ids,
        reset_position_ids=reset_position_ids,
        reset_attention=reset_attention,
        reset_filter=reset_filter,
    )
    return (token for tokens in batch for token in tokens if token is not None)


def generate_batch(
    model: Transformer,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    eod_id: int | None = None,
    stop_ids: Collection[int] | None = None,
    reset_position_ids: bool = True,
    reset_attention: bool = False,
    reset_filter: bool = False,
) -> Iterator[list[int | None]]:
    """Return an iterator over lists with the next token of every prompt; None for a prompt that has ended.

    Prompts may differ in length: shorter ones are padded on the left. Neither attention nor the filter sees
    the padding, so each prompt yields the same tokens as alone.

    Args:
        model: a whole model.
        prompts: at least one, each of at least one token.
        max_new_tokens: maximum number of tokens per prompt.
        temperature: 0 is greedy; see `Sampling` for this and the next two.
        top_k: see `Sampling`.
        top_p: see `Sampling`.
        seed: of the sampling generators: prompt i uses `seed + i`. None seeds them at random.
        eod_id: ends a document; the three switches say what the model was trained to reset there
            (`documents.find_resets` has the same defaults).
        stop_ids: a prompt ends after yielding one of these tokens; None: after `eod_id`.
        reset_position_ids: rotary positions count from the document's start.
        reset_attention: tokens attend only within their document.
        reset_filter: the localized filter sees only tokens of its document.

    Raises:
        YuanError: (a ValueError) an argument is out of range, or a prompt and new tokens together exceed the
            model's max_sequence_length. Raised by the call itself, before the iterator is used.
    """
    if not prompts:
        raise YuanError("there is no prompt; give at least one")
    for prompt_ids in prompts:
        _check_request(model, prompt_ids, max_new_tokens)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    longest = max(map(len, prompts))
    reader = _Reader(
        model,
        model.new_cache(batch_size=len(prompts), max_length=longest + max_new_tokens),
        paddings=[longest - len(prompt_ids) for prompt_ids in prompts],
        eod_id=eod_id,
        reset_position_ids=reset_position_ids,
        reset_attention=reset_attention,
        reset_filter=reset_filter,
    )
    padded = [[0] * (longest - len(prompt_ids)) + list(prompt_ids) for prompt_ids in prompts]
    stops = frozenset((eod_id,) if stop_ids is None else stop_ids)
    return _stream(reader, padded, max_new_tokens, sampling, _generators(seed, len(prompts)), stops)


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
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    generators: list[torch.Generator],
    stops: frozenset[int | None],
) -> Iterator[list[int | None]]:
    unread = prompts
    ended = [False] * len(prompts)
    for _ in range(max_new_tokens):
        logits_BV = reader.read(unread)
        tokens = [
            None if ended[row] else sample(logits_BV[row], sampling, generators[row])
            for row in range(len(prompts))
        ]
        yield tokens
        ended = [token is None or token in stops for token in tokens]
        if all(ended):
            return
        # The model still processes rows that have ended; their logits are ignored.
        unread = [[0 if token is None else token] for token in tokens]


@dataclass(kw_only=True)
class Resets:
    """Arguments of `Transformer.forward_cached` for consecutive tokens of one sequence, of the same names."""

    positions: list[int] = field(default_factory=list)
    document_start: list[bool] = field(default_factory=list)
    visible_from: list[int] = field(default_factory=list)


class DocumentTracker:
    """Tracks the documents of one sequence, which begins with `padding` tokens that belong to none."""

    def __init__(self, padding: int, eod_id: int | None) -> None:
        self._padding = padding
        self._eod_id = eod_id
        self._first = padding
        self._ended = True

    def advance(self, ids: list[int], start: int) -> Resets:
        """Return the resets of the next tokens, the first of which has index `start`."""
        resets = Resets()
        for index, token in enumerate(ids, start=start):
            if index < self._padding:
                # A padding token attends to itself: a softmax over no token would be NaN.
                self._append(resets, 0, False, index)
                continue
            if self._ended:
                self._first = index
            self._append(resets, index - self._first, self._ended, self._first)
            self._ended = token == self._eod_id
        return resets

    @staticmethod
    def _append(resets: Resets, position: int, start: bool, first: int) -> None:
        resets.positions.append(position)
        resets.document_start.append(start)
        resets.visible_from.append(first)


class _Reader:
    """Feeds tokens to a model through its cache, and tracks the documents in them.

    The first token after the padding is a document's start even if the resets are off.
    """

    def __init__(
        self,
        model: Transformer,
        cache: Cache,
        *,
        paddings: list[int],
        eod_id: int | None,
        reset_position_ids: bool,
        reset_attention: bool,
        reset_filter: bool,
    ) -> None:
        self.model = model
        self.cache = cache
        self.eod_id = eod_id
        self._switches = {
            "positions": reset_position_ids,
            "document_start": reset_filter,
            "visible_from": reset_attention,
        }
        self._padded = any(paddings)
        # The first tracker sees the ends of documents; the second, for switches that are off, only padding.
        self._by_document = [DocumentTracker(padding, eod_id) for padding in paddings]
        self._by_sequence = [DocumentTracker(padding, None) for padding in paddings]

    def read(self, rows: list[list[int]]) -> Tensor:
        """Feed rows of equal length, at least 1; return the logits [B, V] of the next tokens."""
        hidden_BSH = None
        length = self.cache.length + len(rows[0])
        for start in range(0, len(rows[0]), PREFILL_CHUNK):
            hidden_BSH = self._read_chunk([row[start : start + PREFILL_CHUNK] for row in rows], length)
        assert hidden_BSH is not None
        with torch.no_grad():
            return self.model.logits(hidden_BSH[:, -1])

    def _read_chunk(self, rows: list[list[int]], length: int) -> Tensor:
        device = next(self.model.parameters()).device
        start = self.cache.length
        documents = [t.advance(ids, start) for t, ids in zip(self._by_document, rows, strict=True)]
        sequences = [t.advance(ids, start) for t, ids in zip(self._by_sequence, rows, strict=True)]

        def resets_of(name: str) -> Tensor | None:
            if self._switches[name]:
                return torch.tensor([getattr(resets, name) for resets in documents], device=device)
            if self._padded:
                return torch.tensor([getattr(resets, name) for resets in sequences], device=device)
            return None

        visible_from = resets_of("visible_from")
        if not self._padded and visible_from is not None and not visible_from.any():
            visible_from = None  # no earlier document to hide: no mask needed
        return self.model.forward_cached(
            torch.tensor(rows, device=device),
            self.cache,
            positions=resets_of("positions"),
            document_start=resets_of("document_start"),
            visible_from=visible_from,
            length=length,
        )


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
