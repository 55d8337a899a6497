"""Output head and cross-entropy in one op, block by block over the tokens (Yuan 2.0 paper, section 3.4).

For the rows R of a block of tokens, with W the output matrix and g the gradient of one token's loss:

    z = h_R W^T      m = logsumexp(z)      P = exp(z - m), and 0 at the target y
    loss = m - z[y]                        e = exp(z[y] - m) - 1
    dh = g (P W + e W[y])                  dW += P^T (g h),  dW[y] += g e h

so that the T x V logits never exist at once. The target's entry is computed separately, in fp32: P is rounded
to the weights' dtype, which would lose the 1 - P[y] of a confident prediction.

With a vocabulary-parallel head, each rank holds some rows W_r and computes all of the above with its own m_r.
One exchange of two numbers per token, m_r and z[y] (0 where y is not local), gives m = logsumexp_r(m_r) and
z[y]; then

    s = exp(m_r - m)      dh = g (s P W_r + e W_r[y] where y is local), which the caller sums over ranks
    e = exp(z[y] - m) - 1                 dW_r += P^T (g s h),  dW_r[y] += g e h

The exchange is started before the product P W_r and awaited after it.

Products take 16-bit operands; CUDA writes their results in fp32. On CPUs torch has no such product: bf16
results are rounded once, then summed in fp32; fp16 operands, whose range is small, are converted to fp32.

With `sum` every token's loss has the same gradient, so the gradients are computed in the forward, and no
logit is computed twice (6THV instead of 8THV). With `none` the gradients of the losses are known only in the
backward, which computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from yuan_kernels import dispatch, products, reference, registration
from yuan_kernels.reference import Reduction, accumulation_dtype, blocks, check_shape

Exchange = Callable[[Tensor, Tensor], Callable[[], tuple[Tensor, Tensor]]]
"""Starts an all-gather of two vectors [t] over the ranks that share a vocabulary. Returns a function that
waits for it and returns both, [ranks, t] each, in the same order of ranks everywhere. Called once per block,
in order.
"""

WEIGHT_ROWS = {"cpu": 1024, "cuda": 4096}
"""Rows of dW per product whose result needs a temporary; more rows cost memory and gain nothing."""

_PRODUCT_WORDS = 4096
"""Words per product of logits, and of P W, on a CPU: a product over all words packs a copy of the whole W."""

_CACHED = 1 << 17
"""Logits that are converted to fp32 at once on a CPU: 512 kB, half a second-level cache."""

_HALF_SCALE = 1024.0
"""fp16 only: scales probabilities of 1 / V, below fp16's normal range, before they become an operand."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossOptions:
    """The arguments of `ops.linear_cross_entropy` besides hidden, weight and targets, defaults filled in."""

    ignore_index: int
    chunk_size: int
    first_row: int = 0
    exchange: Exchange | None = None
    main_gradient: Tensor | None = None
    gradient_scale: float = 1.0


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
        needs = ctx.needs_input_grad[:2]
        loss, dhidden, dweight = loss_sum(hidden, weight, targets, options, needs)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.gradient_scale = None if options.main_gradient is None else options.gradient_scale
        ctx.save_for_backward(dhidden, dweight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradient_scale is not None:
            _check_loss_gradient(scale, ctx.gradient_scale)
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(_scaled(gradient, scale, dtype) for gradient, dtype in gradients), None, None


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
        needs = ctx.needs_input_grad[:2]
        return *token_losses_backward(scale, ctx.saved_tensors, ctx.options, needs), None, None


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """gradient * scale in `dtype`, without a copy of the whole in the gradient's dtype."""
    if gradient is None:
        return None
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
    loss, *gradients = loss_sum(hidden, weight, targets, options, (needs_hidden, needs_weight))
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
    saved = hidden, weight, targets, normalizer
    gradients = token_losses_backward(scale, saved, options, (True, True))
    assert gradients[0] is not None and gradients[1] is not None
    return gradients[0], gradients[1]


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, *_, needs_hidden, needs_weight = inputs
    ctx.dtypes = (hidden.dtype, weight.dtype)
    ctx.save_for_backward(output[1] if needs_hidden else None, output[2] if needs_weight else None)
    ctx.mark_non_differentiable(*output[1:])


@_sum_op.gradient(_save_sum)
def _sum_backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
    return *(_scaled(gradient, scale, dtype) for gradient, dtype in gradients), *(None,) * 5


def _save_tokens(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, *ctx.sizes = inputs
    ctx.save_for_backward(hidden, weight, targets, output[1])
    ctx.mark_non_differentiable(output[1])


@_token_op.gradient(_save_tokens)
def _tokens_backward(ctx: Any, scale: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    gradients = _token_backward_op(scale, *ctx.saved_tensors, *ctx.sizes)
    needed = zip(gradients, ctx.needs_input_grad[:2], strict=True)
    return *(g if need else None for g, need in needed), None, None, None


# --- the loop over blocks ----------------------------------------------------------------------------------


def loss_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: LossOptions, needs: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (loss, dh [T, H], dW [V, H]), the gradients for g = 1, all in fp32 (fp64 for fp64).

    A gradient is None if it is not needed; dW also if it was added to the main gradient.
    """
    gradients = _Gradients.allocate(hidden, weight, options, needs)
    losses = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
    buffer = _logits_buffer(hidden, weight, options)
    for rows in blocks(hidden.shape[0], options.chunk_size):
        block = _Block(hidden[rows], weight, targets[rows], options, buffer)
        block.forward(probabilities=gradients.needed)
        block_losses = gradients.add(rows, block)
        assert block_losses is not None
        losses[rows] = block_losses
    return losses.sum(), gradients.hidden, None if options.main_gradient is not None else gradients.weight


def token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Return (losses [T], logsumexp [T]), the latter over the whole vocabulary."""
    losses = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
    normalizer = torch.empty_like(losses)
    buffer = _logits_buffer(hidden, weight, options)
    for rows in blocks(hidden.shape[0], options.chunk_size):
        block = _Block(hidden[rows], weight, targets[rows], options, buffer)
        block.forward(probabilities=False)
        losses[rows] = block.start_exchange()()
        normalizer[rows] = block.normalizer
    return losses, normalizer


def token_losses_backward(
    scale: Tensor, saved: Sequence[Tensor], options: LossOptions, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return (dh, dW) in the inputs' dtypes; `scale` [T] is the gradient of each loss, and `saved` are
    hidden, weight, targets and the second result of `token_losses`."""
    hidden, weight, targets, normalizer = saved
    gradients = _Gradients.allocate(hidden, weight, options, needs)
    # Normalised to at most 1 before they multiply a 16-bit operand, whose range may not hold them.
    largest = scale.abs().amax().clamp_min(torch.finfo(scale.dtype).tiny) if scale.numel() else 1.0
    buffer = _logits_buffer(hidden, weight, options)
    for rows in blocks(hidden.shape[0], options.chunk_size):
        block = _Block(hidden[rows], weight, targets[rows], options, buffer)
        block.forward(probabilities=True)
        gradients.add(rows, block, normalizer=normalizer[rows], token_scale=scale[rows] / largest)
    pairs = (gradients.hidden, hidden), (gradients.weight, weight)
    return tuple(None if g is None else g.mul_(largest).to(x.dtype) for g, x in pairs)  # type: ignore[return-value]


# --- one block of tokens -----------------------------------------------------------------------------------


class _Block:
    """Logits of some tokens over this rank's words, then probabilities in the same memory."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, options: LossOptions, buffer: Tensor | None
    ) -> None:
        self.hidden, self.weight, self._options = hidden, weight, options
        self._buffer = None if buffer is None else buffer[: hidden.shape[0]]
        self.ignored = targets == options.ignore_index
        local = targets - options.first_row
        self.is_local = ~self.ignored
        if options.exchange is not None:
            self.is_local &= (local >= 0) & (local < weight.shape[0])
        # Without an exchange, a word outside the vocabulary makes `gather` fail.
        self.index = local.masked_fill(~self.is_local, 0)
        self.normalizer = self._target_logits = self._local_normalizer = hidden.new_empty(0)
        self.probabilities = hidden.new_empty(0)
        self.scale = _HALF_SCALE if hidden.dtype == torch.float16 and hidden.is_cuda else 1.0

    def forward(self, *, probabilities: bool) -> None:
        """Compute logits, logsumexp and, if wanted, `scale` times the P of this file's docstring."""
        logits = _logits(self.hidden, self.weight, self._buffer)
        acc_dtype = accumulation_dtype(self.hidden.dtype)
        picked = logits.gather(1, self.index.unsqueeze(1)).squeeze(1).to(acc_dtype)
        self._target_logits = picked.masked_fill_(~self.is_local, 0.0)
        implementation = dispatch.implementation("linear_cross_entropy", self.hidden)
        if implementation == "triton":
            from yuan_kernels import triton_forms

            self.probabilities, self._local_normalizer = triton_forms.softmax(
                logits, self.hidden.dtype if probabilities else None, self.scale
            )
        else:
            self._local_normalizer = _softmax_(logits, acc_dtype, probabilities=probabilities)
            self.probabilities = logits
            if probabilities and self.scale != 1.0:
                self.probabilities = logits.mul_(self.scale).to(self.hidden.dtype)
            elif probabilities and logits.is_cuda:
                self.probabilities = logits.to(self.hidden.dtype)
        self.normalizer = self._local_normalizer
        if probabilities:
            # Not `scatter_`, which would copy the whole matrix to write one number per row.
            at_target = torch.arange(self.index.shape[0], device=logits.device), self.index
            self.probabilities.index_put_(
                at_target, self.probabilities[at_target].masked_fill_(self.is_local, 0.0)
            )

    def start_exchange(self) -> Callable[[], Tensor]:
        """Start the exchange; the returned function waits and returns the losses [t], 0 where ignored."""
        start = self._options.exchange
        wait = None if start is None else start(self._local_normalizer, self._target_logits)

        def losses() -> Tensor:
            target_logits = self._target_logits
            if wait is not None:
                normalizers, gathered = wait()
                self.normalizer, target_logits = torch.logsumexp(normalizers, dim=0), gathered.sum(dim=0)
            return (self.normalizer - target_logits).masked_fill_(self.ignored, 0.0)

        return losses

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return (s, e) [t] of this file's docstring; both 0 where the target is ignored."""
        share = torch.exp(self._local_normalizer - self.normalizer).masked_fill_(self.ignored, 0.0)
        error = torch.expm1(self._target_logits - self.normalizer).masked_fill_(~self.is_local, 0.0)
        return share, error


@dataclass(kw_only=True, eq=False)
class _Gradients:
    """dh [T, H] and dW [V, H] in fp32 (fp64 for fp64), filled block by block; None if not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    weight_scale: float

    @staticmethod
    def allocate(hidden: Tensor, weight: Tensor, options: LossOptions, needs: Sequence[bool]) -> _Gradients:
        acc_dtype = accumulation_dtype(hidden.dtype)
        dweight = options.main_gradient
        if dweight is None and needs[1]:
            dweight = torch.zeros(weight.shape, dtype=acc_dtype, device=weight.device)
        return _Gradients(
            hidden=torch.empty(hidden.shape, dtype=acc_dtype, device=hidden.device) if needs[0] else None,
            weight=dweight,
            weight_scale=options.gradient_scale if options.main_gradient is not None else 1.0,
        )

    @property
    def needed(self) -> bool:
        return self.hidden is not None or self.weight is not None

    def add(
        self,
        rows: slice,
        block: _Block,
        *,
        normalizer: Tensor | None = None,
        token_scale: Tensor | None = None,
    ) -> Tensor | None:
        """Add a block's gradients; return its losses, or None if `normalizer` is given (no exchange then)."""
        wait = block.start_exchange() if normalizer is None else None
        dhidden = None if self.hidden is None else _sum_over_words(block.probabilities, block.weight)
        losses = None if wait is None else wait()
        if normalizer is not None:
            block.normalizer = normalizer
        if not self.needed:
            return losses
        share, error = block.factors()
        if token_scale is not None:
            share, error = share * token_scale, error * token_scale
        if self.hidden is not None:
            assert dhidden is not None
            dhidden.mul_(share.div(block.scale).unsqueeze(1))
            self.hidden[rows] = dhidden.addcmul_(
                block.weight[block.index].to(dhidden.dtype), error.unsqueeze(1)
            )
        if self.weight is not None:
            self._add_weight(block, share, error)
        return losses

    def _add_weight(self, block: _Block, share: Tensor, error: Tensor) -> None:
        assert self.weight is not None
        scaled = (block.hidden * share.unsqueeze(1)).to(block.probabilities.dtype)
        alpha = self.weight_scale / block.scale
        if products.supports_fp32_addmm(scaled.device, scaled.dtype):
            products.fp32_addmm_(self.weight, block.probabilities.T, scaled, alpha=alpha)
        else:
            # A V x H temporary for each block of tokens would cost as much as the product itself.
            for words in blocks(self.weight.shape[0], WEIGHT_ROWS.get(scaled.device.type, 4096)):
                dweight = _product(block.probabilities[:, words].T, scaled)
                self.weight[words].add_(dweight, alpha=alpha)
        target_rows = block.hidden.to(self.weight.dtype) * error.mul(self.weight_scale).unsqueeze(1)
        # Not `index_add_`, whose order of summation on a GPU differs from call to call.
        self.weight.index_put_((block.index,), target_rows, accumulate=True)


# --- logits, softmax and products --------------------------------------------------------------------------


def _softmax_(logits: Tensor, acc_dtype: torch.dtype, *, probabilities: bool) -> Tensor:
    """Return logsumexp [t] of the logits [t, V]; turn them into probabilities, or leave them undefined.

    On a CPU a few rows at a time are converted to fp32, so that only the 16-bit logits of a block are stored.
    """
    tokens, words = logits.shape
    rows_at_once = tokens if logits.device.type != "cpu" else max(1, _CACHED // max(1, words))
    normalizer = logits.new_empty(tokens, dtype=acc_dtype)
    buffer = (
        None
        if logits.dtype == acc_dtype
        else logits.new_empty(min(rows_at_once, tokens), words, dtype=acc_dtype)
    )
    for rows in blocks(tokens, rows_at_once):
        values = logits[rows] if buffer is None else buffer[: rows.stop - rows.start].copy_(logits[rows])
        largest = values.amax(dim=1, keepdim=True)
        total = values.sub_(largest).exp_().sum(dim=1, keepdim=True)
        normalizer[rows] = total.log().add_(largest).squeeze(1)
        if probabilities:
            values.mul_(total.reciprocal_())
            if buffer is not None:
                logits[rows] = values
    return normalizer


def _logits_buffer(hidden: Tensor, weight: Tensor, options: LossOptions) -> Tensor | None:
    """Memory for each block's logits on a CPU: touching new pages costs a tenth of the product."""
    if hidden.device.type != "cpu" or hidden.dtype == torch.float16:
        return None
    return hidden.new_empty(min(options.chunk_size, hidden.shape[0]), weight.shape[0])


def _logits(hidden: Tensor, weight: Tensor, buffer: Tensor | None) -> Tensor:
    """hidden weight^T: bf16 stays bf16 on a CPU, all other 16-bit results are fp32."""
    if buffer is None:
        return _product(hidden, weight.T)
    for words in blocks(weight.shape[0], _PRODUCT_WORDS):
        buffer[:, words] = products.linear(hidden, weight[words])
    return buffer


def _sum_over_words(probabilities: Tensor, weight: Tensor) -> Tensor:
    """P W in fp32 (fp64 for fp64)."""
    if probabilities.device.type != "cpu" or weight.shape[0] <= _PRODUCT_WORDS:
        return _product(probabilities, weight)
    total = weight.new_zeros(probabilities.shape[0], weight.shape[1], dtype=accumulation_dtype(weight.dtype))
    for words in blocks(weight.shape[0], _PRODUCT_WORDS):
        total.add_(_product(probabilities[:, words], weight[words]))
    return total


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left right in fp32 (fp64 for fp64)."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    if torch.float16 in (left.dtype, right.dtype):
        left, right = left.float(), right.float()
    result = products.product(left, right)
    return result if result.dtype == torch.float64 else result.float()
