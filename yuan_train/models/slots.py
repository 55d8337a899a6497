"""Generation in slots: sequences of one cache that differ in length, begin and end at different times.

A prompt is read once, whatever the number of its answers, and then copied into the slot of each. A slot whose
answer has ended takes the next one.

B = slots, S = tokens that each reads at once, H = hidden size, P = places of the cache.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from yuan_kernels import ops

from yuan_train.models.rotary import rotary_tables
from yuan_train.models.transformer import Cache, Transformer


@dataclass(frozen=True, kw_only=True)
class DocumentRules:
    """What is reset in a sequence after each token `eod_id`: what a model was trained to reset there."""

    eod_id: int | None = None
    reset_position_ids: bool = True
    """Rotary positions count from the document's start. `documents.find_resets` has the same defaults."""
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
