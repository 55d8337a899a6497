"""Causal attention over whole sequences, or inside each document of packed sequences.

Whole sequences: torch's `scaled_dot_product_attention`, with two exceptions (`whole_form`). On a CPU without
instructions for bf16, torch's backward multiplies number by number, 20 times slower than in fp32. There our
backward converts some heads at a time to fp32 and calls torch's flash backward on them; the forward is
torch's own. On a card without flash attention, the memory-efficient kernel wants as many heads of keys and
values as of queries; for grouped queries torch would fall back to S x S scores of each head in memory. There
keys and values are repeated first.

Documents: one call of torch's variable-length attention for all of them where it has passed a test (CUDA,
16 bits); elsewhere one call per document.

B = sequences, S = tokens of a sequence, T = B * S, N = heads (M of keys and values), D = size of a head.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from yuan_kernels import dispatch, registration

DocumentRanges = tuple[tuple[int, int], ...]
"""Half-open token ranges of the documents, over a micro-batch's B * S flattened tokens, without gaps."""

_CONVERTED = 1 << 20
"""Elements of each operand that the backward converts to fp32 at once: 4 MB."""


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, document_ranges: DocumentRanges | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v [B, S, N, D]; no token sees a later one.

    `query` is [B, S, N, D], `key` and `value` are [B, S, M, D]: each of the M key-value heads is read by N/M
    query heads (grouped queries).

    With `document_ranges` tokens also see only their own document: half-open ranges of the B * S flattened
    tokens, in order and without gaps, none across two sequences.
    """
    ranges = document_ranges
    if ranges is None:
        return _attend(query, key, value)
    if not ranges:
        return torch.zeros_like(query)
    if dispatch.implementation("document_attention", query) == "varlen":
        return attend_in_one_call(query, key, value, ranges)
    return attend_in_turn(query, key, value, ranges)


# --- documents ---------------------------------------------------------------------------------------------


def attend_in_turn(query: Tensor, key: Tensor, value: Tensor, ranges: DocumentRanges) -> Tensor:
    """Return the attention inside each document, one call per document.

    `split` and `cat` keep the backward's cost linear in the number of tokens.
    """
    lengths = [last - first for first, last in ranges]
    per_document = (x.flatten(0, 1).split(lengths) for x in (query, key, value))
    documents = [_attend(q[None], k[None], v[None])[0] for q, k, v in zip(*per_document, strict=True)]
    return torch.cat(documents).unflatten(0, query.shape[:2])


def attend_in_one_call(query: Tensor, key: Tensor, value: Tensor, ranges: DocumentRanges) -> Tensor:
    """Return the attention inside each document, by torch's variable-length attention."""
    attend = varlen_attention()
    assert attend is not None
    key, value = _for_every_head(query, key, value)
    lengths = tuple(last - first for first, last in ranges)
    borders, longest = _borders(lengths, query.device), max(lengths)
    packed = (x.flatten(0, 1) for x in (query, key, value))
    # Each token sees all before it and none after it: a window that is open on the left.
    heads = attend(*packed, borders, borders, longest, longest, window_size=(-1, 0))
    return heads.unflatten(0, query.shape[:2])


def varlen_attention() -> Callable[..., Any] | None:
    """Return torch's variable-length attention; None if this torch has none, or one with other arguments."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "window_size" in inspect.signature(varlen_attn).parameters else None


@functools.lru_cache(maxsize=16)
def _borders(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [documents + 1]: where each document begins, and the end of the last.

    Cached, because all layers of a micro-batch have the same documents. A card copies them out of pinned
    memory, which torch keeps until it has: else the host would wait there for all compute before.
    """
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return borders if device.type == "cpu" else borders.pin_memory().to(device, non_blocking=True)


# --- whole sequences ---------------------------------------------------------------------------------------


def whole_form(device: torch.device, dtype: torch.dtype) -> str:
    """How whole sequences are attended to: `torch`, `blocks` (our backward), `repeated` keys and values."""
    if dispatch.reference_selected():
        return "torch"
    return dispatch.find("causal_attention", device, dtype, "any").implementation


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    if _needs_own_backward(query, key, value):
        return _forward(query, key, value)[0]
    return masked_attention(query, key, value, None)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """Return the attention [B, S, N, D] of query [B, S, N, D] to P tokens, key and value [B, P, M, D].

    `visible` is bool [B or 1, 1, S, P], True where a token attends to another, or in query's dtype what is
    added to the products (0, -inf); None: to all that are not later.
    """
    if query.shape[2] != key.shape[2] and whole_form(query.device, query.dtype) == "repeated":
        key, value = _for_every_head(query, key, value)
    heads = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=visible,
        is_causal=visible is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return heads.transpose(1, 2)


def _for_every_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for each query head, where an operation has no grouped queries."""
    count = query.shape[2] // key.shape[2]
    if count == 1:
        return key, value
    return key.repeat_interleave(count, dim=2), value.repeat_interleave(count, dim=2)


def _needs_own_backward(*operands: Tensor) -> bool:
    query = operands[0]
    if query.device.type != "cpu" or query.dtype != torch.bfloat16 or dispatch.reference_selected():
        return False
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in operands) or not query.numel():
        return False
    return whole_form(query.device, query.dtype) == "blocks"


def own_backward_is_correct() -> bool:
    """Test the private operations of torch that we call, on two sequences of strided operands."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, dy = (
        torch.randn(2, 5, heads, 8, generator=generator).bfloat16() for heads in (6, 3, 3, 6)
    )
    wide = [x.float().transpose(1, 2).requires_grad_() for x in (query, key, value)]
    expected = F.scaled_dot_product_attention(wide[0], wide[1], wide[2], is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad(expected, wide, dy.float().transpose(1, 2))
    y, normalizer = _forward(query, key, value)
    actual = y, *_backward_blocks(dy, query, key, value, y, normalizer)
    return all(
        (a.float() - b.transpose(1, 2)).norm() <= 2e-2 * b.norm()
        for a, b in zip(actual, (expected.detach(), *gradients), strict=True)
    )


def _empty_outputs(query: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads = query.shape[:3]
    return query.new_empty(query.shape), query.new_empty(batch, heads, tokens, dtype=torch.float32)


@registration.register("yuan::causal_attention", _empty_outputs)
def _forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs [B, S, N, D] and the log-sum-exp [B, N, S] in fp32."""
    operands = (x.transpose(1, 2) for x in (query, key, value))
    heads, normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*operands, 0.0, True)
    return heads.transpose(1, 2).contiguous(), normalizer.contiguous()


@registration.register("yuan::causal_attention_backward", "query key value")
def _backward_blocks(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, y: Tensor, normalizer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, some heads of one sequence after the other."""
    gradients = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    batch, tokens, heads, head_dim = query.shape
    group = heads // key.shape[2]
    # torch gives each thread whole heads. Query heads that read the same keys stay together.
    step = -(-max(torch.get_num_threads(), _CONVERTED // (tokens * head_dim)) // group) * group
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for sequence in range(batch):
        for first in range(0, heads, step):
            of_queries = (slice(sequence, sequence + 1), slice(None), slice(first, first + step))
            of_keys = (*of_queries[:2], slice(first // group, (first + step) // group))
            blocks = (of_queries, of_queries, of_keys, of_keys, of_queries)
            operands = zip((dy, query, key, value, y), blocks, strict=True)
            wide = (x[block].float().transpose(1, 2) for x, block in operands)
            parts = flash(*wide, normalizer[sequence : sequence + 1, first : first + step], 0.0, True)
            for gradient, part, block in zip(gradients, parts, blocks[1:4], strict=True):
                gradient[block] = part.transpose(1, 2)
    return gradients


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


@_forward.gradient(_save)
def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _backward_blocks(dy, *ctx.saved_tensors)
