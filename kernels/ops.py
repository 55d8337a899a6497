"""One public function per op; `dispatch.py` chooses the implementation.

The environment variable `YUAN_KERNELS` is read at each call: `reference` selects the definitions in
`reference.py`, `grouped_linear=triton` our kernel for products of groups.
Unset or empty selects our fast implementations; any other value is a ValueError.

The ops are registered with torch.library (namespace `yuan`) and so support torch.compile, fake tensors and
autograd. While torch.compile is tracing, norms, rotary embedding and SwiGLU are their definitions, which it
fuses with their neighbours; products, filter, attention and cross-entropy stay whole. Exception:
cross-entropy with a main gradient or a sharded vocabulary, which calls back into Python, is not registered
and breaks the graph under torch.compile.

B = sequences, S = tokens of a sequence, T = tokens, H = hidden size, N = heads, D = size of a head,
F = feed-forward width, V = vocabulary, K = experts of a token, R = rows of all experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from yuan_kernels import attention, cross_entropy, dispatch, products, reference
from yuan_kernels import expert_rows as expert_moves
from yuan_kernels import grouped_linear as groups
from yuan_kernels import linear as linear_maps
from yuan_kernels import localized_filter as sandwich
from yuan_kernels import rms_norm as norms
from yuan_kernels import rotary as rotations
from yuan_kernels import router as routers
from yuan_kernels import swiglu as gates
from yuan_kernels.attention import DocumentRanges
from yuan_kernels.cross_entropy_blocks import Exchange
from yuan_kernels.dispatch import Choice, variable_held
from yuan_kernels.reference import FilterState, Reduction

__all__ = [
    "Choice",
    "DocumentRanges",
    "Exchange",
    "FilterState",
    "add_grouped_products_",
    "add_product_",
    "add_rms_norm",
    "attention_router_weights",
    "attention_scores",
    "bf16_products",
    "causal_attention",
    "choices",
    "choose_all",
    "combine_rows",
    "expert_rows",
    "fall_back",
    "forget_fallbacks",
    "fp32_products",
    "grouped_linear",
    "linear",
    "linear_cross_entropy",
    "localized_filter",
    "localized_filter_data_gradient",
    "localized_filter_forward",
    "localized_filter_state",
    "localized_filter_step",
    "localized_filter_weight_gradient",
    "masked_attention",
    "prepare_compile",
    "rms_norm",
    "rotary",
    "swiglu",
    "variable_held",
    "wide_linear",
]


def localized_filter(
    x: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    *,
    document_start: Tensor | None = None,
    before: FilterState | None = None,
) -> Tensor:
    """Return the two causal convolutions of Yuan 2.0's attention, before residual and norm.

    c[t] = A0 x[t-1] + A1 x[t] + a,  d[t] = B0 c[t-1] + B1 c[t] + b; x[-1] = 0 and c[-1] = 0
    (IEIT-Yuan/Yuan-2.0:megatron/model/transformer.py:395).

    Args:
        x: [B, S, H]; may be non-contiguous, empty, or of one token.
        conv1_weight: [n, H, 2] with n = H/2 channels, or a shard of them; last index 0 is the older token.
        conv1_bias: [n].
        conv2_weight: [H, n, 2].
        conv2_bias: [H]; None adds none, for a caller that sums the outputs of shards and adds it once.
        document_start: bool [B, S], True where a token begins a document: the terms of t-1 are absent
            there, and no value of another document can change a bit of this one. None resets nothing.
        before: (u [B, H], c [B, n]) of the token before x[:, 0], if x continues a sequence;
            `localized_filter_state` computes it. Both get gradients. None: x begins the sequence.

    Returns:
        d, [B, S, H] in x's dtype.

    Raises:
        ValueError: a shape does not fit the others, or document_start is not bool.
    """
    _check_filter(x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start)
    if before is not None:
        _check_state("before", before, x, conv1_weight)
    return sandwich.localized_filter(
        x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start=document_start, before=before
    )


def localized_filter_state(
    x_tail: Tensor, conv1_weight: Tensor, conv1_bias: Tensor, *, document_start: Tensor | None = None
) -> FilterState:
    """Return the state (u [B, H], c [B, n]) after x_tail [B, 2, H], the last two tokens of a sequence part.
    With a sequence split over devices (context parallelism), the state is the halo: the device that holds a
    part sends it to the device that holds the next part, which passes it to `localized_filter` as `before`.
    It needs no other result, so it can be sent first. Autograd propagates its gradient to x_tail and the
    weights. Every part but the last has at least two tokens. `document_start` is bool [B, 2], for x_tail.

    Raises:
        ValueError: x_tail is not [B, 2, H].
    """
    _check_shape("x_tail", x_tail, (x_tail.shape[0], 2, x_tail.shape[-1]))
    return sandwich.localized_filter_state(x_tail, conv1_weight, conv1_bias, document_start=document_start)


def localized_filter_step(
    x: Tensor,
    state: FilterState,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    *,
    document_start: Tensor | None = None,
) -> tuple[Tensor, FilterState]:
    """Return the filter of the next tokens x [B, S, H] of a sequence, and the state after them.

    `state` is (u_last [B, H], c_last [B, n]) of the token before; both zero before the first token. S may
    be any length, so a prefix can be processed in chunks; the results equal those of `localized_filter` over
    the whole sequence. Other arguments and errors as there.
    """
    _check_filter(x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start)
    _check_state("state", state, x, conv1_weight)
    selected = dispatch.reference_selected()
    step = reference.localized_filter_step if selected else sandwich.localized_filter_step
    return step(x, state, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start=document_start)


def localized_filter_forward(
    x: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    *,
    document_start: Tensor | None = None,
    before: FilterState | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (y [B, S, H], taps [B, S, 2n]): `localized_filter` for a caller that splits the backward.

    The call is not recorded by autograd. Arguments and errors as in `localized_filter`.
    """
    _check_filter(x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start)
    if before is not None:
        _check_state("before", before, x, conv1_weight)
    with torch.no_grad():
        return sandwich.sandwich_forward(
            x, conv1_weight, conv1_bias, conv2_weight, conv2_bias, document_start, before
        )


def localized_filter_data_gradient(
    dy: Tensor, conv1_weight: Tensor, conv2_weight: Tensor, *, document_start: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx [B, S, H], dz [B, S, 2n], dc_before [B, n]) of the gradient dy [B, S, H].

    dz is for `localized_filter_weight_gradient`; dc_before is the gradient of before[1], if the forward had
    one. (That of before[0] is dz[:, 0, n:] conv1_weight[:, :, 0], or 0 at a document's start.)
    """
    with torch.no_grad():
        return sandwich.data_gradient(dy, conv1_weight, conv2_weight, document_start)


def localized_filter_weight_gradient(
    x: Tensor, taps: Tensor, dz: Tensor, dy: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of conv1_weight, conv1_bias, conv2_weight and conv2_bias, in `dtype` (None: x's).

    From x and taps [B, S, 2n] of the forward, dz [B, S, 2n] of the data gradient, and dy [B, S, H]. The
    contribution of `before` to conv1_weight's gradient is not included.
    """
    with torch.no_grad():
        return sandwich.weight_gradient(x, taps, dz, dy, dtype)


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight over the last dim of x [..., H].

    Statistics and products in fp32 (fp64 for fp64), rounded once to x's dtype (Zhang and Sennrich 2019).

    Raises:
        ValueError: weight is not [H].
    """
    _check_shape("weight", weight, x.shape[-1:])
    return norms.rms_norm(x, weight, epsilon=epsilon)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(s), s) of s = x + residual, all [..., H]; s is rounded to x's dtype first.

    Raises:
        ValueError: residual's shape is not x's, or weight is not [H].
    """
    _check_shape("residual", residual, x.shape)
    _check_shape("weight", weight, x.shape[-1:])
    return norms.add_rms_norm(x, residual, weight, epsilon=epsilon)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x [B, S, N, D] in the half-split layout (Su et al. 2021).

    The pair (x[i], x[i + R/2]) is rotated by the angle whose cosine and sine are cos[b, s, i] and
    sin[b, s, i]; both are [B or 1, S, R/2], in fp32 (fp64 for fp64), which is also the precision of the
    products. They get no gradients. R is at most D; the dims from R on are returned as they are.

    Raises:
        ValueError: x is not of four dims, or a table does not fit it.
    """
    if x.dim() != 4:
        raise ValueError(f"x has shape {list(x.shape)}; rotary expects [batch, tokens, heads, head_dim]")
    for name, table in (("cos", cos), ("sin", sin)):
        batch = 1 if table.shape[:1] == (1,) else x.shape[0]
        _check_shape(name, table, (batch, x.shape[1], min(cos.shape[-1], x.shape[3] // 2)))
    return rotations.rotary(x, cos, sin)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(z0) * z1 [..., F] of x [..., 2F] = (z0, z1) (Shazeer 2020); Yuan's `up` has z0 first.

    The backward needs x alone.

    Raises:
        ValueError: the last dim is odd.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x has shape {list(x.shape)}; swiglu halves the last dim, which must be even")
    return gates.swiglu(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias [..., N] of x [..., K], weight [N, K] and bias [N].

    Torch's, except on CPUs where torch's is slow: bf16 without instructions for it goes through fp32 blocks
    and is rounded once, large fp32 products may go through oneDNN (see `products.py`).
    """
    return linear_maps.linear(x, weight, bias)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T [..., N] in fp32 (fp64 for fp64) of x [..., K] and weight [N, K].

    For operands of 16 bits nothing is rounded before or after the product but their gradients.
    """
    return linear_maps.wide_linear(x, weight)


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Return x_e weight_e^T [R, N] of rows x [R, K] in E groups, and matrices weight [E, N, K].

    Group e has the next counts[e] rows, of which there may be none. Counts are integers of the host, so that
    no group's size is read from a device. In 16 bits and fp32 as `linear` rounds.

    Raises:
        ValueError: there is not one count for each matrix, or they do not sum to the rows.
    """
    if weight.dim() != 3 or len(counts) != weight.shape[0] or sum(counts) != x.shape[0]:
        raise ValueError(
            f"{len(counts)} counts of {sum(counts)} rows in all; wanted one for each matrix of weight "
            f"{list(weight.shape)}, and the rows of x {list(x.shape)}"
        )
    _check_shape("x", x, (x.shape[0], weight.shape[2]))
    return groups.grouped_linear(x, weight, counts)


def add_grouped_products_(total: Tensor, dy: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    """Add dy_e^T x_e to total[e] for each group, in place: the weights' gradient of `grouped_linear`.

    `total` is [E, N, K], dy [R, N], x [R, K]; precisions as in `add_product_`.
    """
    with torch.no_grad():
        groups.add_grouped_products_(total, dy, x, counts)


def attention_scores(products: Tensor) -> Tensor:
    """Return the attention router's score of each expert [T, N] of products [T, 3N] = (q, k, v).

    p_i = sum_j softmax_j(q_i k_j) v_j (arXiv 2405.17976, section 3.1). Without a gradient.
    """
    return routers.attention_scores(products)


def attention_router_weights(products: Tensor, chosen: Tensor) -> Tensor:
    """Return the softmax [T, K] over the `attention_scores` of the chosen experts, int64 [T, K]."""
    return routers.attention_router_weights(products, chosen)


def expert_rows(x: Tensor, order: Tensor, slots: int) -> Tensor:
    """Return copies [R, H] of the tokens x [T, H], one for each slot in `order`, int64 [R].

    Each token has `slots` of them: slot t * slots + k is token t's k-th. A slot is in `order` at most once.
    """
    return expert_moves.expert_rows(x, order, slots)


def combine_rows(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Return [T, H]: for each token its slots' rows times their weights [T, K], added in slot order.

    `rows` [R, H] are those of the slots in `order`; slots that are not there count as zero. Weights and each
    product are rounded to the rows' dtype, as published.
    """
    return expert_moves.combine_rows(rows, weights, order)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left right [M, N] of left [M, K] and right [K, N] to `total` in place, without a gradient.

    `total` is in the operands' precision, or in fp32 for operands of 16 bits: then the product is not rounded
    to 16 bits, where the device can (see `products.py`).
    """
    with torch.no_grad():
        products.add_product_(total, left, right)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, document_ranges: DocumentRanges | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v [B, S, N, D]; no token sees a later one.

    `query` is [B, S, N, D], `key` and `value` are [B, S, M, D]: each of the M key-value heads is read by N/M
    query heads (grouped queries).

    With `document_ranges` tokens also see only their own document: half-open ranges of the B * S flattened
    tokens, in order and without gaps, none across two sequences.
    """
    return attention.causal_attention(query, key, value, document_ranges)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Return the attention [B, S, N, D] of query [B, S, N, D] to P tokens, key and value [B, P, M, D].

    `visible` is bool [B or 1, 1, S, P], True where a token attends to another, or in query's dtype what is
    added to the products (0, -inf).
    """
    return attention.masked_attention(query, key, value, visible, is_causal=False)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "sum",
    chunk_size: int | None = None,
    main_gradient: Tensor | None = None,
    gradient_scale: float | None = None,
    vocabulary: tuple[int, Exchange] | None = None,
) -> Tensor:
    """Return the cross-entropy of the logits hidden weight^T without storing all logits at once.

    Args:
        hidden: [T, H], T may be 0.
        weight: [V, H], in hidden's dtype.
        targets: int64 [T]; tokens whose target is `ignore_index` have loss 0 and no gradient.
        reduction: `sum` over the tokens (gradients are computed in the forward), or `none` for the loss of
            each token (the backward computes the logits again).
        chunk_size: tokens whose logits exist at once; None chooses by device and dtype.
        main_gradient: [V, H], fp32 (fp64 for fp64). The forward adds the weight's gradient to it, and
            autograd gives `weight` none. Only with `sum`. Unchanged if gradients are disabled, and with
            `YUAN_KERNELS=reference`, where autograd computes the weight's gradient as usual.
        gradient_scale: with `main_gradient`, the gradient of this op's result that the backward will receive
            (1 / trained tokens of the step), as the forward needs it. The backward refuses another one.
        vocabulary: (first_row, exchange) if `weight` holds only the words [first_row, first_row + V) of a
            vocabulary sharded over ranks. `exchange(local_logsumexp [t], local_target_logit [t])` starts an
            all-gather of both over the ranks and returns a function that waits and returns both, [ranks, t]
            each. It is called once per block of t tokens, so `chunk_size` must be equal on all ranks. The
            loss is then the same on all ranks; hidden's gradient is partial, and the caller sums it over
            the ranks.

    Returns:
        fp32 (fp64 for fp64): a scalar for `sum`, [T] for `none`.

    Raises:
        ValueError: a shape, a dtype or the reduction is wrong; in the backward, the gradient of the loss is
            not `gradient_scale` (on CUDA: a device-side assertion).
    """
    _check_shape("targets", targets, hidden.shape[:1])
    _check_shape("weight", weight, (weight.shape[0], hidden.shape[-1]))
    if weight.dtype != hidden.dtype:
        raise ValueError(f"weight is {weight.dtype} and hidden {hidden.dtype}; give both the same dtype")
    if reduction not in ("sum", "none"):
        raise ValueError(f"reduction {reduction!r} is unknown; use 'sum' or 'none'")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size} is not positive")
    if (main_gradient is None) != (gradient_scale is None):
        raise ValueError("main_gradient and gradient_scale belong together; give both or neither")
    if main_gradient is not None:
        _check_main_gradient(main_gradient, weight, reduction)
    return cross_entropy.linear_cross_entropy(
        hidden,
        weight,
        targets,
        ignore_index=ignore_index,
        reduction=reduction,
        chunk_size=chunk_size,
        main_gradient=main_gradient,
        gradient_scale=1.0 if gradient_scale is None else gradient_scale,
        vocabulary=vocabulary,
    )


def prepare_compile() -> None:
    """Make the ops ready for torch.compile: to be called before, as often as one likes.

    The compiler then takes the outcome of the tests that choose an implementation; it cannot trace them.
    """
    torch.compiler.assume_constant_result(attention.whole_form)


def choices(device: torch.device, dtype: torch.dtype, *, hidden: int, head_dim: int = 64) -> list[Choice]:
    """Return the implementation of each op on a device, with the reasons.

    For rows of `hidden` elements, and for heads of `head_dim`.
    """
    rows = {op: (hidden,) for op in dispatch.OPS} | {"document_attention": (head_dim,)}
    return choose_all(device, dtype, rows)


def choose_all(device: torch.device, dtype: torch.dtype, rows: Mapping[str, Sequence[int]]) -> list[Choice]:
    """Choose the implementation of ops on a device, for the lengths of the rows that each will be given.

    To be called before the first forward: tests and Triton's compilation then stay out of it. What was chosen
    before is known. For the ops by name see `dispatch.OPS`.
    """
    if dispatch.reference_selected():
        reason = "YUAN_KERNELS=reference selects the definitions"
        return [Choice(op, str(device), dtype, "any", "reference", reason) for op in rows]
    found = {(op, dispatch.shape_class(op, row)): None for op, lengths in rows.items() for row in lengths}
    return [dispatch.find(op, device, dtype, shape) for op, shape in found]


def fall_back(choice: Choice, reason: str) -> None:
    """Use, in place of a choice, the implementation that every card has: `torch`, or `loop`."""
    dispatch.fall_back(choice, reason)


def forget_fallbacks() -> None:
    """Use what was chosen again: another run begins, with other ranks."""
    dispatch.forget_fallbacks()


def bf16_products() -> str:
    """Return `oneDNN` or `fp32 blocks`: how this CPU multiplies matrices of bf16."""
    return "oneDNN" if products.cpu_multiplies_bf16() else "fp32 blocks"


def fp32_products() -> str:
    """Return `oneDNN` or `torch`: the library for large fp32 products of our ops on this CPU."""
    return "oneDNN" if products.onednn_is_faster() else "torch"


def _check_main_gradient(main_gradient: Tensor, weight: Tensor, reduction: Reduction) -> None:
    _check_shape("main_gradient", main_gradient, tuple(weight.shape))
    expected = reference.accumulation_dtype(weight.dtype)
    if main_gradient.dtype != expected:
        raise ValueError(f"main_gradient is {main_gradient.dtype}; for {weight.dtype} it must be {expected}")
    if reduction != "sum":
        raise ValueError(
            "main_gradient goes with reduction 'sum': with 'none' gradients are computed in the backward"
        )


def _check_state(name: str, state: FilterState, x: Tensor, conv1_weight: Tensor) -> None:
    _check_shape(f"{name}[0]", state[0], (x.shape[0], x.shape[2]))
    _check_shape(f"{name}[1]", state[1], (x.shape[0], conv1_weight.shape[0]))


def _check_filter(
    x: Tensor,
    conv1_weight: Tensor,
    conv1_bias: Tensor,
    conv2_weight: Tensor,
    conv2_bias: Tensor | None,
    document_start: Tensor | None,
) -> None:
    if x.dim() != 3:
        raise ValueError(f"x has shape {list(x.shape)}; the filter expects [batch, tokens, hidden]")
    batch, tokens, hidden = x.shape
    channels = conv1_weight.shape[0]
    _check_shape("conv1_weight", conv1_weight, (channels, hidden, 2))
    _check_shape("conv1_bias", conv1_bias, (channels,))
    _check_shape("conv2_weight", conv2_weight, (hidden, channels, 2))
    if conv2_bias is not None:
        _check_shape("conv2_bias", conv2_bias, (hidden,))
    if document_start is not None:
        _check_shape("document_start", document_start, (batch, tokens))
        if document_start.dtype != torch.bool:
            raise ValueError(f"document_start is {document_start.dtype}; it must be bool")


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; the other arguments need {list(expected)}")
