"""Sampling from a model, token by token, with the attention and filter caches.

In slots: sequences of one cache that differ in length, begin and end at different times. A prompt is read
once, whatever the number of its answers, and then copied into the slot of each. A slot whose answer has ended
takes the next one.

Draws of tokens that follow from a seed and a place alone: no generator, no sort, no running sum.

With Gumbel noise g the argmax of logit / T + g is a draw from softmax(logit / T) (Maddison et al. 2014). The
noise of word v is hashed, as the masks of dropout are, so that any rank, in any batch, draws the same.

N = draws, R = rows of logits, V = words of this rank, B = slots, S = tokens that each reads at once,
H = hidden size, P = places of the cache.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from yuan_kernels import ops

from yuan_train.config.errors import YuanError
from yuan_train.config.model import ModelConfig
from yuan_train.models.attention import rotary_tables
from yuan_train.models.layers import Keys, hash_keys, hashes
from yuan_train.models.transformer import Cache, Transformer


@dataclass(frozen=True, kw_only=True)
class DocumentRules:
    """What is reset in a sequence after each token `eod_id`: what a model was trained to reset there."""

    eod_id: int | None = None
    reset_position_ids: bool = True
    """Rotary positions count from the document's start. `attention.find_resets` has the same defaults."""
    reset_attention: bool = False
    """Tokens attend only within their document."""
    reset_filter: bool = False
    """The localized filter sees only tokens of its document."""


@dataclass(kw_only=True)
class Resets:
    """What is reset at consecutive tokens of one sequence: fields of `Documents`, a number a token."""

    positions: list[int] = field(default_factory=list)
    document_start: list[bool] = field(default_factory=list)
    visible_from: list[int] = field(default_factory=list)


class SlotDocuments:
    """The documents of one sequence, as far as it is read."""

    def __init__(self, rules: DocumentRules) -> None:
        self._rules = rules
        self._first = 0
        self._has_ended = True

    def advance(self, ids: Sequence[int], start: int) -> Resets:
        """The resets of the next tokens, the first of which has place `start` in the sequence."""
        resets, rules = Resets(), self._rules
        for place, token in enumerate(ids, start):
            if self._has_ended:
                self._first = place
            resets.positions.append(place - self._first if rules.reset_position_ids else place)
            resets.document_start.append(self._has_ended if rules.reset_filter else place == 0)
            resets.visible_from.append(self._first if rules.reset_attention else 0)
            self._has_ended = token == rules.eod_id
        return resets

    def fork(self) -> SlotDocuments:
        """Another sequence that begins as this one."""
        return copy.copy(self)


@dataclass(frozen=True)
class Documents:
    """The resets of the tokens of a step, on the device, all [B, S]; anything where there is padding."""

    positions_BS: Tensor
    document_start_BS: Tensor
    visible_from_BS: Tensor


def documents_at(
    resets: Sequence[Resets | None], places: Sequence[Sequence[int]], device: torch.device
) -> Documents:
    """The resets of tokens at these places of their own, one sequence a row, of which there are none at
    padding: places below 0, and all of a row without resets."""

    def numbers(name: str) -> Tensor:
        found = [
            [getattr(one, name)[place] if one is not None and place >= 0 else 0 for place in row]
            for one, row in zip(resets, places, strict=True)
        ]
        return torch.tensor(found, device=device)

    return Documents(numbers("positions"), numbers("document_start").bool(), numbers("visible_from"))


def padded_left(
    prompts: Sequence[Sequence[int]], columns: range, total: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and places, as `step_slots` takes them, of some columns of prompts that fill `total` of them
    from the right."""
    paddings = [total - len(ids) for ids in prompts]
    pairs = list(zip(prompts, paddings, strict=True))
    tokens = [[ids[c - padding] if c >= padding else 0 for c in columns] for ids, padding in pairs]
    return tokens, [[c - padding if c >= padding else -1 for c in columns] for _, padding in pairs]


def new_slots(model: Transformer, *, slots: int, max_length: int) -> Cache:
    """An empty cache for sequences of at most `max_length` tokens; its last place is for padding."""
    return model.new_cache(batch_size=slots, max_length=max_length + 1)


@torch.no_grad()
@ops.variable_held()
def step_slots(
    model: Transformer,
    x: Tensor,
    cache: Cache,
    positions_BS: Tensor,
    *,
    last: int,
    documents: Documents | None = None,
    rests: bool = False,
) -> Tensor:
    """Return the hidden state [B, S, H] of the next S tokens of each slot, and add them to `cache`.

    `x` as in `Transformer.forward`. `positions_BS` int64 is the place of each token in its own sequence, or
    -1 for padding: on the left of a shorter prompt, and all of a slot that is not in use. What a slot held
    before position 0 is not seen. `last` is the greatest position. `documents`: None for sequences of one
    document each, in which nothing is reset. `rests`: sequences of padding alone are gone on with later, so
    their filters' states stay as they are; what they hold of keys and values does in any case.
    """
    x_BSH = model.embedding(x) if model.has_embedding else x
    places_BS = positions_BS.masked_fill(positions_BS < 0, cache.max_length - 1)
    firsts_B = torch.arange(0, len(places_BS) * cache.max_length, cache.max_length, device=places_BS.device)
    places_T = (places_BS + firsts_B.unsqueeze(1)).flatten()
    # Padding attends to the first place: a softmax over no token would be NaN.
    seen_BS = positions_BS.clamp(min=0)
    keys_P = torch.arange(last + 1, device=x_BSH.device)
    hidden_BSP = keys_P > seen_BS.unsqueeze(-1)
    has_filters = any(layer.filter_state is not None for layer in cache.layers.values())
    turned_BS, document_start_BS = seen_BS, positions_BS == 0 if has_filters else None
    if documents is not None:
        turned_BS, document_start_BS = documents.positions_BS, documents.document_start_BS
        hidden_BSP |= keys_P < documents.visible_from_BS.unsqueeze(-1)
    # As numbers that are added: of a mask of booleans every layer would make them again.
    added = torch.zeros(hidden_BSP.shape, dtype=x_BSH.dtype, device=x_BSH.device)
    added = added.masked_fill_(hidden_BSP, -math.inf).unsqueeze(1)
    rotary = rotary_tables(
        model.config, turned_BS, length=max(cache.length, last + 1), dtype=x_BSH.dtype, kept=cache.frequencies
    )
    resting_B = positions_BS[:, -1] < 0 if rests and has_filters else None
    for layer, block in model.blocks.items():
        held = cache.layers[layer]
        before = held.filter_state
        x_BSH = block.step(x_BSH, rotary, held, places_T, document_start_BS, added)
        if resting_B is not None and before is not None and held.filter_state is not None:
            held.filter_state = _kept(before, held.filter_state, resting_B)
    return model.final_norm(x_BSH) if model.has_head else x_BSH


def _kept(before: ops.FilterState, after: ops.FilterState, resting_B: Tensor) -> ops.FilterState:
    """The states before of sequences that rest, and after of the others."""
    last, convolved = (
        torch.where(resting_B.unsqueeze(1), old, new) for old, new in zip(before, after, strict=True)
    )
    return last, convolved


def fork(source: Cache, rows: Tensor, target: Cache, slots: Tensor, *, length: int) -> None:
    """Copy the first `length` tokens of sequences `rows` of one cache into `slots` of another; int64 [n]."""
    for layer, held in target.layers.items():
        read = source.layers[layer]
        held.keys_BPMD[slots, :length] = read.keys_BPMD[rows, :length]
        held.values_BPMD[slots, :length] = read.values_BPMD[rows, :length]
        if held.filter_state is not None:
            assert read.filter_state is not None
            for mine, theirs in zip(held.filter_state, read.filter_state, strict=True):
                mine[slots] = theirs[rows]


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
    return [torch.Generator("cpu").manual_seed((first + number) % (1 << 64)) for number in range(count)]


def sample(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token sampled from logits [V]: temperature first, then top-k, then top-p of the rest."""
    logits_V = logits_V.to("cpu", torch.float32)
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # Subtract the maximum first: a tiny temperature may turn the others into -inf, but none into inf.
    logits_V = (logits_V - logits_V.max()) / max(sampling.temperature, torch.finfo(torch.float32).tiny)
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
