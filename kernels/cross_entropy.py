"""Output head and cross-entropy in one op, block by block over the tokens (Yuan 2.0 paper, section 3.4).

`cross_entropy_blocks.py` has the formulas and the block loop; here are the op's autograd functions and its
registration with torch.library.

With `sum` every token's loss has the same gradient, so the gradients are computed in the forward, and no
logit is computed twice (6THV instead of 8THV). With `none` the gradients of the losses are known only in the
backward, which computes the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from yuan_kernels import dispatch, reference, registration
from yuan_kernels.cross_entropy_blocks import (
    WEIGHT_ROWS,
    Exchange,
    LossOptions,
    blocks,
    loss_sum,
    token_losses,
    token_losses_backward,
)
from yuan_kernels.reference import Reduction, accumulation_dtype, check_shape


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
    check_shape("targets", targets, hidden.shape[:1])
    check_shape("weight", weight, (weight.shape[0], hidden.shape[-1]))
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
    chunk_size = chunk_size or _default_chunk(hidden)
    if dispatch.reference_selected() and vocabulary is None:
        main_gradient = None
    if main_gradient is None and vocabulary is None:
        return _registered(hidden, weight, targets, ignore_index, chunk_size, reduction)
    first_row, exchange = vocabulary or (0, None)
    options = LossOptions(
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        first_row=first_row,
        exchange=exchange,
        main_gradient=main_gradient if torch.is_grad_enabled() else None,
        gradient_scale=1.0 if gradient_scale is None else gradient_scale,
    )
    if not torch.is_grad_enabled():
        # Under no_grad `needs_input_grad` is still set: detach, so that no gradient is computed.
        hidden, weight = hidden.detach(), weight.detach()
    function = _TokenLosses if reduction == "none" else _LossSum
    return function.apply(hidden, weight, targets, options)  # type: ignore[no-any-return]


def _check_main_gradient(main_gradient: Tensor, weight: Tensor, reduction: Reduction) -> None:
    check_shape("main_gradient", main_gradient, tuple(weight.shape))
    expected = accumulation_dtype(weight.dtype)
    if main_gradient.dtype != expected:
        raise ValueError(f"main_gradient is {main_gradient.dtype}; for {weight.dtype} it must be {expected}")
    if reduction != "sum":
        raise ValueError(
            "main_gradient goes with reduction 'sum': with 'none' gradients are computed in the backward"
        )


def _registered(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk_size: int, reduction: Reduction
) -> Tensor:
    """Without exchange and main gradient: registered ops, for torch.compile and fake tensors."""
    if dispatch.reference_selected():
        return reference.linear_cross_entropy(
            hidden, weight, targets, ignore_index=ignore_index, reduction=reduction
        )
    if reduction == "none":
        return _token_op(hidden, weight, targets, ignore_index, chunk_size)[0]
    enabled = torch.is_grad_enabled()
    needs = enabled and hidden.requires_grad, enabled and weight.requires_grad
    return _sum_op(hidden, weight, targets, ignore_index, chunk_size, *needs)[0]


def _default_chunk(hidden: Tensor) -> int:
    """Tokens of a block.

    Few large blocks are faster, because dW is read and written once for each; but on a CPU the logits of 1024
    tokens and 135,040 words take 280 MB in bf16.
    """
    if hidden.is_cuda:
        return 2048
    return 1024 if hidden.dtype == torch.bfloat16 else 256


# --- autograd: with a main gradient or a sharded vocabulary ------------------------------------------------


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        loss, dhidden, dweight = loss_sum(hidden, weight, targets, options, needs_hidden, needs_weight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.gradient_scale = None if options.main_gradient is None else options.gradient_scale
        ctx.save_for_backward(dhidden, dweight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradient_scale is not None:
            _check_loss_gradient(scale, ctx.gradient_scale)
        return *_scaled(ctx.saved_tensors, scale, ctx.dtypes), None, None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: LossOptions) -> Tensor:
        losses, normalizer = token_losses(hidden, weight, targets, options)
        ctx.save_for_backward(hidden, weight, targets, normalizer)
        ctx.options = options
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, normalizer = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        gradients = token_losses_backward(
            scale, hidden, weight, targets, normalizer, ctx.options, needs_hidden, needs_weight
        )
        return *gradients, None, None


def _scaled(
    gradients: tuple[Tensor | None, ...], scale: Tensor, dtypes: tuple[torch.dtype, ...]
) -> tuple[Tensor | None, ...]:
    return tuple(
        None if gradient is None else _scaled_to(gradient, scale, dtype)
        for gradient, dtype in zip(gradients, dtypes, strict=True)
    )


def _scaled_to(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * scale in `dtype`, without a copy of the whole in the gradient's dtype."""
    if gradient.device.type != "cpu" or gradient.dtype == dtype:
        return (gradient * scale).to(dtype)
    result = torch.empty(gradient.shape, dtype=dtype)
    for rows in blocks(gradient.shape[0], WEIGHT_ROWS["cpu"]):
        result[rows] = gradient[rows] * scale
    return result


def _check_loss_gradient(scale: Tensor, expected: float) -> None:
    """Refuse a gradient of the loss other than `expected`: dW has already been added with that one."""
    equal = (scale - expected).abs() <= 1e-5 * abs(expected)
    message = f"gradient_scale was {expected}, but the backward received another gradient of the loss"
    if scale.is_cuda:
        # Reading the value here would synchronize with the device.
        torch._assert_async(equal, message)
    elif not equal:
        raise ValueError(f"{message}: {scale.item()}")


# --- registration: without a main gradient and a sharded vocabulary ----------------------------------------


def _empty_sums(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore: int, chunk: int, *needs: bool
) -> tuple[Tensor, ...]:
    shapes = ((), *(x.shape if need else (0,) for x, need in zip((hidden, weight), needs, strict=True)))
    return tuple(hidden.new_empty(shape, dtype=accumulation_dtype(hidden.dtype)) for shape in shapes)


def _empty_losses(hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    losses = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
    return losses, torch.empty_like(losses)


@registration.register("yuan::linear_cross_entropy", _empty_sums)
def _sum_op(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk_size: int,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, dh, dW): the gradients for g = 1, in fp32 (fp64 for fp64), empty if not needed."""
    options = LossOptions(ignore_index=ignore_index, chunk_size=chunk_size)
    loss, *gradients = loss_sum(hidden, weight, targets, options, needs_hidden, needs_weight)
    dhidden, dweight = (loss.new_empty(0) if g is None else g for g in gradients)
    return loss, dhidden, dweight


@registration.register("yuan::token_losses", _empty_losses)
def _token_op(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk_size: int
) -> tuple[Tensor, Tensor]:
    options = LossOptions(ignore_index=ignore_index, chunk_size=chunk_size)
    return token_losses(hidden, weight, targets, options)


@registration.register("yuan::token_losses_backward", "hidden weight")
def _token_backward_op(
    scale: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    options = LossOptions(ignore_index=ignore_index, chunk_size=chunk_size)
    gradients = token_losses_backward(scale, hidden, weight, targets, normalizer, options, True, True)
    assert gradients[0] is not None and gradients[1] is not None
    return gradients[0], gradients[1]


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, *_, needs_hidden, needs_weight = inputs
    ctx.dtypes = (hidden.dtype, weight.dtype)
    ctx.save_for_backward(output[1] if needs_hidden else None, output[2] if needs_weight else None)
    ctx.mark_non_differentiable(*output[1:])


@_sum_op.gradient(_save_sum)
def _sum_backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_scaled(ctx.saved_tensors, scale, ctx.dtypes), None, None, None, None, None


def _save_tokens(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, *ctx.sizes = inputs
    ctx.save_for_backward(hidden, weight, targets, output[1])
    ctx.mark_non_differentiable(output[1])


@_token_op.gradient(_save_tokens)
def _tokens_backward(ctx: Any, scale: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    gradients = _token_backward_op(scale, *ctx.saved_tensors, *ctx.sizes)
    needed = zip(gradients, ctx.needs_input_grad[:2], strict=True)
    return *(g if need else None for g, need in needed), None, None, None
