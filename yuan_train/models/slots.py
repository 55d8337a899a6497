"""Generation in slots: sequences of one cache that differ in length, begin and end at different times.

A prompt is read once, whatever the number of its answers, and then copied into the slot of each. A slot whose
answer has ended takes the next one.

B = slots, S = tokens that each reads at once, H = hidden size, P = places of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from yuan_train.models.rotary import rotary_tables
from yuan_train.models.transformer import Cache, Transformer


def new_slots(model: Transformer, *, slots: int, max_length: int) -> Cache:
    """An empty cache for sequences of at most `max_length` tokens; its last place is for padding."""
    return model.new_cache(batch_size=slots, max_length=max_length + 1)


@torch.no_grad()
def step_slots(model: Transformer, x: Tensor, cache: Cache, positions_BS: Tensor, *, last: int) -> Tensor:
    """Return the hidden state [B, S, H] of the next S tokens of each slot, and add them to `cache`.

    `x` as in `Transformer.forward`. `positions_BS` int64 is the place of each token in its own sequence, or
    -1 for padding: on the left of a shorter prompt, and all of a slot that is not in use. What a slot held
    before position 0 is not seen. `last` is the greatest position.
    """
    x_BSH = model.embedding(x) if model.has_embedding else x
    is_padding_BS = positions_BS < 0
    places_BS = positions_BS.masked_fill(is_padding_BS, cache.max_length - 1)
    # Padding attends to the first place: a softmax over no token would be NaN.
    seen_BS = positions_BS.clamp(min=0)
    keys_P = torch.arange(last + 1, device=x_BSH.device)
    visible = (keys_P <= seen_BS.unsqueeze(-1)).unsqueeze(1)
    rotary = rotary_tables(model.config, seen_BS, length=last + 1, dtype=x_BSH.dtype)
    document_start_BS = positions_BS == 0
    for layer, block in model.blocks.items():
        x_BSH = block.step(x_BSH, rotary, cache.layers[layer], places_BS, document_start_BS, visible)
    return model.final_norm(x_BSH) if model.has_head else x_BSH


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
