"""Output head and cross-entropy in one op, block by block over the tokens (Yuan 2.0 paper, section 3.4).

For the rows R of a block, with W the output matrix, g the gradient of one token's loss:

    z = h_R W^T      m = logsumexp(z)      P = exp(z - m), and 0 at the target y
    loss = m - z[y]                        e = exp(z[y] - m) - 1
    dh = g (P W + e W[y])                  dW += P^T (g h),  dW[y] += g e h

so that T x V logits never exist whole. The target's entry goes by itself, in fp32: P is rounded to the
weights' dtype, and 1 - P[y] of a sure model would be lost in that.

With `sum` every g is the same number, and the gradients are made in the forward: no logit is computed twice
(6THV instead of 8THV). With `none` the g are known in the backward only, which computes the logits again.

Of a vocabulary cut over ranks each holds some rows W_r, and all of the above with its own m_r. One exchange
of two numbers per token, m_r and z[y] where y is local, else 0, gives m = logsumexp_r(m_r) and z[y]; then

    s = exp(m_r - m)      dh = g (s P W_r + e W_r[y] where y is local),   summed over ranks by the caller
    e = exp(z[y] - m) - 1                 dW_r += P^T (g s h),  dW_r[y] += g e h

The exchange is started before the product P W_r and awaited after it.

Products take 16-bit operands as they come; CUDA writes their results in fp32. A CPU has no such product in
torch: bf16 results are rounded once, then summed in fp32; fp16 operands, whose range is small, are widened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from yuan_kernels import dispatch, products, reference
from yuan_kernels.reference import Reduction, accumulation_dtype

Exchange = Callable[[Tensor, Tensor], Callable[[], tuple[Tensor, Tensor]]]
"""Starts to gather two vectors [t] over the ranks that share a vocabulary; what it returns waits, and gives
both gathered, [ranks, t] each, in the same order of ranks everywhere. Called once per block, in order."""

_WEIGHT_ROWS = {"cpu": 1024, "cuda": 4096}
"""Rows of dW per product where its result needs a temporary; larger ones cost memory and gain nothing."""

_PRODUCT_WORDS = 4096
"""Words per product of logits, and of P W, on a CPU: one over all packs a copy of the whole W for itself."""

_CACHED = 1 << 17
"""Logits that are widened at once on a CPU: 512 kB in fp32, half a second-level cache."""

_HALF_SCALE = 1024.0
"""fp16 only: lifts probabilities of 1 / V, below fp16's normal range, before they become an operand."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Form:
    """What a call asks for besides its tensors."""

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
    gradient_scale: float = 1.0,
    vocabulary: tuple[int, Exchange] | None = None,
) -> Tensor:
    """Cross-entropy of hidden weight^T against targets; arguments and result as in `ops`."""
    chunk_size = chunk_size or _default_chunk(hidden)
    if dispatch.reference_selected() and vocabulary is None:
        main_gradient = None
    if main_gradient is None and vocabulary is None:
        return _registered(hidden, weight, targets, ignore_index, chunk_size, reduction)
    first_row, exchange = vocabulary or (0, None)
    form = _Form(
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        first_row=first_row,
        exchange=exchange,
        main_gradient=main_gradient if torch.is_grad_enabled() else None,
        gradient_scale=gradient_scale,
    )
    if not torch.is_grad_enabled():
        # An autograd function is told which inputs require gradients, but not that nobody will ask.
        hidden, weight = hidden.detach(), weight.detach()
    function = _TokenLosses if reduction == "none" else _LossSum
    return function.apply(hidden, weight, targets, form)  # type: ignore[no-any-return]


def _registered(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk_size: int, reduction: Reduction
) -> Tensor:
    """The form without a partner or a place for dW: torch.compile and fake tensors know it."""
    if dispatch.reference_selected():
        return reference.linear_cross_entropy(
            hidden, weight, targets, ignore_index=ignore_index, reduction=reduction
        )
    ops = torch.ops.yuan
    if reduction == "none":
        return ops.token_losses(hidden, weight, targets, ignore_index, chunk_size)[0]
    asked = torch.is_grad_enabled()
    needs = asked and hidden.requires_grad, asked and weight.requires_grad
    return ops.linear_cross_entropy(hidden, weight, targets, ignore_index, chunk_size, *needs)[0]


def _default_chunk(hidden: Tensor) -> int:
    """Tokens of a block.

    Few large blocks, as dW is read and written once for each; but on a CPU the logits of 1024 tokens take
    280 MB in bf16.
    """
    if hidden.is_cuda:
        return 2048
    return 1024 if hidden.dtype == torch.bfloat16 else 256


# --- the two reductions ------------------------------------------------------------------------------------


def _sum_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, form: _Form, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (loss, dh, dW): wide, at g = 1; None where not needed, or added to the main gradient."""
    gradients = _Gradients.like(hidden, weight, form, needs_hidden, needs_weight)
    losses = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
    place = _place_of_logits(hidden, weight, form)
    for rows in _blocks(hidden.shape[0], form.chunk_size):
        block = _Block(hidden[rows], weight, targets[rows], form, place)
        block.read(probabilities=gradients.any)
        made = gradients.add(rows, block)
        assert made is not None
        losses[rows] = made
    return losses.sum(), gradients.hidden, None if form.main_gradient is not None else gradients.weight


def _token_losses(hidden: Tensor, weight: Tensor, targets: Tensor, form: _Form) -> tuple[Tensor, Tensor]:
    """Return (losses [T], normalizer [T]), the latter over the whole vocabulary."""
    losses = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
    normalizer = torch.empty_like(losses)
    place = _place_of_logits(hidden, weight, form)
    for rows in _blocks(hidden.shape[0], form.chunk_size):
        block = _Block(hidden[rows], weight, targets[rows], form, place)
        block.read(probabilities=False)
        losses[rows] = block.exchange()()
        normalizer[rows] = block.normalizer
    return losses, normalizer


def _token_losses_backward(
    scale: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    form: _Form,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return (dh, dW) in the inputs' dtypes; `scale` [T] is the gradient of each token's loss."""
    gradients = _Gradients.like(hidden, weight, form, needs_hidden, needs_weight)
    # Brought to at most 1 before they multiply a 16-bit operand, whose range may not hold them.
    largest = scale.abs().amax().clamp_min(torch.finfo(scale.dtype).tiny) if scale.numel() else 1.0
    place = _place_of_logits(hidden, weight, form)
    for rows in _blocks(hidden.shape[0], form.chunk_size):
        block = _Block(hidden[rows], weight, targets[rows], form, place)
        block.read(probabilities=True)
        gradients.add(rows, block, normalizer=normalizer[rows], token_scale=scale[rows] / largest)
    made = (gradients.hidden, hidden), (gradients.weight, weight)
    return tuple(None if g is None else g.mul_(largest).to(x.dtype) for g, x in made)  # type: ignore[return-value]


# --- one block of tokens -----------------------------------------------------------------------------------


class _Block:
    """Logits of some tokens over this rank's words, then probabilities in the same place."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, form: _Form, place: Tensor | None
    ) -> None:
        self.hidden, self.weight, self._form = hidden, weight, form
        self._place = None if place is None else place[: hidden.shape[0]]
        self.ignored = targets == form.ignore_index
        local = targets - form.first_row
        self.inside = ~self.ignored
        if form.exchange is not None:
            self.inside &= (local >= 0) & (local < weight.shape[0])
        # Without a partner a word outside the vocabulary is left to fail in `gather`.
        self.index = local.masked_fill(~self.inside, 0)
        self.normalizer = self._picked = self._own_normalizer = hidden.new_empty(0)
        self.probabilities = hidden.new_empty(0)
        self.lift = _HALF_SCALE if hidden.dtype == torch.float16 and hidden.is_cuda else 1.0

    def read(self, *, probabilities: bool) -> None:
        """Make the logits, their sums and, if wanted, the probabilities: P of the file's head, lifted."""
        logits = _logits(self.hidden, self.weight, self._place)
        wide = accumulation_dtype(self.hidden.dtype)
        picked = logits.gather(1, self.index.unsqueeze(1)).squeeze(1).to(wide)
        self._picked = picked.masked_fill_(~self.inside, 0.0)
        form = dispatch.implementation("linear_cross_entropy", self.hidden)
        if form == "triton":
            from yuan_kernels import triton_forms

            self.probabilities, self._own_normalizer = triton_forms.softmax(
                logits, self.hidden.dtype if probabilities else None, self.lift
            )
        else:
            self._own_normalizer = _softmax_(logits, wide, probabilities=probabilities)
            self.probabilities = logits
            if probabilities and self.lift != 1.0:
                self.probabilities = logits.mul_(self.lift).to(self.hidden.dtype)
            elif probabilities and logits.is_cuda:
                self.probabilities = logits.to(self.hidden.dtype)
        self.normalizer = self._own_normalizer
        if probabilities:
            # Not `scatter_`, which copies the whole of what it writes a few numbers into.
            place = torch.arange(self.index.shape[0], device=logits.device), self.index
            self.probabilities.index_put_(place, self.probabilities[place].masked_fill_(self.inside, 0.0))

    def exchange(self) -> Callable[[], Tensor]:
        """Start to exchange; what is returned waits, and gives the losses [t], 0 where ignored."""
        start = self._form.exchange
        wait = None if start is None else start(self._own_normalizer, self._picked)

        def losses() -> Tensor:
            picked = self._picked
            if wait is not None:
                normalizers, picks = wait()
                self.normalizer, picked = torch.logsumexp(normalizers, dim=0), picks.sum(dim=0)
            return (self.normalizer - picked).masked_fill_(self.ignored, 0.0)

        return losses

    def factors(self) -> tuple[Tensor, Tensor]:
        """(s, e) [t] of the file's head; both 0 where nothing is to be learned."""
        share = torch.exp(self._own_normalizer - self.normalizer).masked_fill_(self.ignored, 0.0)
        miss = torch.expm1(self._picked - self.normalizer).masked_fill_(~self.inside, 0.0)
        return share, miss


@dataclass(kw_only=True, eq=False)
class _Gradients:
    """dh [T, H] and dW [V, H] in fp32 (fp64 for fp64), filled block by block; None where not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    weight_scale: float

    @staticmethod
    def like(
        hidden: Tensor, weight: Tensor, form: _Form, needs_hidden: bool, needs_weight: bool
    ) -> _Gradients:
        wide = accumulation_dtype(hidden.dtype)
        dweight = form.main_gradient
        if dweight is None and needs_weight:
            dweight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        return _Gradients(
            hidden=torch.empty(hidden.shape, dtype=wide, device=hidden.device) if needs_hidden else None,
            weight=dweight,
            weight_scale=form.gradient_scale if form.main_gradient is not None else 1.0,
        )

    @property
    def any(self) -> bool:
        return self.hidden is not None or self.weight is not None

    def add(
        self,
        rows: slice,
        block: _Block,
        *,
        normalizer: Tensor | None = None,
        token_scale: Tensor | None = None,
    ) -> Tensor | None:
        """Add a block's part; return its losses, None if the normalizer was known and nothing exchanged."""
        wait = block.exchange() if normalizer is None else None
        pulled = None if self.hidden is None else _sum_over_words(block.probabilities, block.weight)
        losses = None if wait is None else wait()
        if normalizer is not None:
            block.normalizer = normalizer
        if not self.any:
            return losses
        share, miss = block.factors()
        if token_scale is not None:
            share, miss = share * token_scale, miss * token_scale
        if self.hidden is not None:
            assert pulled is not None
            pulled.mul_(share.div(block.lift).unsqueeze(1))
            self.hidden[rows] = pulled.addcmul_(block.weight[block.index].to(pulled.dtype), miss.unsqueeze(1))
        if self.weight is not None:
            self._add_weight(block, share, miss)
        return losses

    def _add_weight(self, block: _Block, share: Tensor, miss: Tensor) -> None:
        assert self.weight is not None
        scaled = (block.hidden * share.unsqueeze(1)).to(block.probabilities.dtype)
        alpha = self.weight_scale / block.lift
        if products.adds_wide(scaled.device, scaled.dtype):
            products.add_wide_(self.weight, block.probabilities.T, scaled, alpha=alpha)
        else:
            # A V x H temporary for each block of tokens would cost as much as the product itself.
            for words in _blocks(self.weight.shape[0], _WEIGHT_ROWS.get(scaled.device.type, 4096)):
                made = _product(block.probabilities[:, words].T, scaled)
                self.weight[words].add_(made, alpha=alpha)
        target_rows = block.hidden.to(self.weight.dtype) * miss.mul(self.weight_scale).unsqueeze(1)
        # Not `index_add_`, whose order of summing on a GPU is another one each time.
        self.weight.index_put_((block.index,), target_rows, accumulate=True)


def _softmax_(logits: Tensor, wide: torch.dtype, *, probabilities: bool) -> Tensor:
    """Return logsumexp [t] of the logits [t, V]; turn them into probabilities, or leave them undefined.

    Widened, a few rows at a time on a CPU: the 16-bit logits are all that is kept of a block.
    """
    tokens, words = logits.shape
    rows_at_once = tokens if logits.device.type != "cpu" else max(1, _CACHED // max(1, words))
    normalizer = logits.new_empty(tokens, dtype=wide)
    buffer = None if logits.dtype == wide else logits.new_empty(min(rows_at_once, tokens), words, dtype=wide)
    for rows in _blocks(tokens, rows_at_once):
        values = logits[rows] if buffer is None else buffer[: rows.stop - rows.start].copy_(logits[rows])
        largest = values.amax(dim=1, keepdim=True)
        total = values.sub_(largest).exp_().sum(dim=1, keepdim=True)
        normalizer[rows] = total.log().add_(largest).squeeze(1)
        if probabilities:
            values.mul_(total.reciprocal_())
            if buffer is not None:
                logits[rows] = values
    return normalizer


def _blocks(count: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def _place_of_logits(hidden: Tensor, weight: Tensor, form: _Form) -> Tensor | None:
    """Where each block's logits are written on a CPU: touching new memory costs a tenth of the product."""
    if hidden.device.type != "cpu" or hidden.dtype == torch.float16:
        return None
    return hidden.new_empty(min(form.chunk_size, hidden.shape[0]), weight.shape[0])


def _logits(hidden: Tensor, weight: Tensor, place: Tensor | None) -> Tensor:
    """hidden weight^T; bf16 stays bf16 on a CPU, all other 16-bit numbers are widened."""
    if place is None:
        return _product(hidden, weight.T)
    for words in _blocks(weight.shape[0], _PRODUCT_WORDS):
        place[:, words] = products.linear(hidden, weight[words])
    return place


def _sum_over_words(probabilities: Tensor, weight: Tensor) -> Tensor:
    """P W in fp32 (fp64 for fp64)."""
    if probabilities.device.type != "cpu" or weight.shape[0] <= _PRODUCT_WORDS:
        return _product(probabilities, weight)
    total = weight.new_zeros(probabilities.shape[0], weight.shape[1], dtype=accumulation_dtype(weight.dtype))
    for words in _blocks(weight.shape[0], _PRODUCT_WORDS):
        total.add_(_product(probabilities[:, words], weight[words]))
    return total


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left right in fp32 (fp64 for fp64)."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    if torch.float16 in (left.dtype, right.dtype):
        left, right = left.float(), right.float()
    made = products.product(left, right)
    return made if made.dtype == torch.float64 else made.float()


# --- autograd: with a main gradient or a cut vocabulary ----------------------------------------------------


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, form: _Form) -> Tensor:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        loss, dhidden, dweight = _sum_forward(hidden, weight, targets, form, needs_hidden, needs_weight)
        ctx.dtypes = (hidden.dtype, weight.dtype)
        ctx.promised = None if form.main_gradient is None else form.gradient_scale
        ctx.save_for_backward(dhidden, dweight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.promised is not None:
            _refuse_another(scale, ctx.promised)
        return *_scaled(ctx.saved_tensors, scale, ctx.dtypes), None, None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, form: _Form) -> Tensor:
        losses, normalizer = _token_losses(hidden, weight, targets, form)
        ctx.save_for_backward(hidden, weight, targets, normalizer)
        ctx.form = form
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, normalizer = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        made = _token_losses_backward(
            scale, hidden, weight, targets, normalizer, ctx.form, needs_hidden, needs_weight
        )
        return *made, None, None


def _scaled(
    gradients: tuple[Tensor | None, ...], scale: Tensor, dtypes: tuple[torch.dtype, ...]
) -> tuple[Tensor | None, ...]:
    return tuple(
        None if gradient is None else _scaled_to(gradient, scale, dtype)
        for gradient, dtype in zip(gradients, dtypes, strict=True)
    )


def _scaled_to(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * scale in another dtype, without a wide copy of the whole."""
    if gradient.device.type != "cpu" or gradient.dtype == dtype:
        return (gradient * scale).to(dtype)
    made = torch.empty(gradient.shape, dtype=dtype)
    for rows in _blocks(gradient.shape[0], _WEIGHT_ROWS["cpu"]):
        made[rows] = gradient[rows] * scale
    return made


def _refuse_another(scale: Tensor, promised: float) -> None:
    """The weight gradient has been added already: it cannot follow another gradient of the loss."""
    kept = (scale - promised).abs() <= 1e-5 * abs(promised)
    message = f"main_gradient was given the gradient of the loss as {promised}; another one reached backward"
    if scale.is_cuda:
        # Looking at the value here would wait for the device.
        torch._assert_async(kept, message)
    elif not kept:
        raise ValueError(f"{message}: {scale.item()}")


# --- registration: the form without them -------------------------------------------------------------------


@torch.library.custom_op("yuan::linear_cross_entropy", mutates_args=())
def _sum_op(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk_size: int,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, dh, dW): gradients at g = 1, wide, and empty where not needed."""
    form = _Form(ignore_index=ignore_index, chunk_size=chunk_size)
    loss, *gradients = _sum_forward(hidden, weight, targets, form, needs_hidden, needs_weight)
    dhidden, dweight = (loss.new_empty(0) if g is None else g for g in gradients)
    return loss, dhidden, dweight


@torch.library.custom_op("yuan::token_losses", mutates_args=())
def _token_op(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk_size: int
) -> tuple[Tensor, Tensor]:
    form = _Form(ignore_index=ignore_index, chunk_size=chunk_size)
    return _token_losses(hidden, weight, targets, form)


@torch.library.custom_op("yuan::token_losses_backward", mutates_args=())
def _token_backward_op(
    scale: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    form = _Form(ignore_index=ignore_index, chunk_size=chunk_size)
    made = _token_losses_backward(scale, hidden, weight, targets, normalizer, form, True, True)
    assert made[0] is not None and made[1] is not None
    return made[0], made[1]


@_sum_op.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    chunk_size: int,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulation_dtype(hidden.dtype)
    shapes = hidden.shape if needs_hidden else (0,), weight.shape if needs_weight else (0,)
    dhidden, dweight = (hidden.new_empty(shape, dtype=wide) for shape in shapes)
    return hidden.new_empty((), dtype=wide), dhidden, dweight


@_token_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, chunk_size: int
) -> tuple[Tensor, Tensor]:
    losses = hidden.new_empty(hidden.shape[0], dtype=accumulation_dtype(hidden.dtype))
    return losses, torch.empty_like(losses)


@_token_backward_op.register_fake
def _(
    scale: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, *_, needs_hidden, needs_weight = inputs
    ctx.dtypes = (hidden.dtype, weight.dtype)
    ctx.save_for_backward(output[1] if needs_hidden else None, output[2] if needs_weight else None)
    ctx.mark_non_differentiable(*output[1:])


def _sum_backward(ctx: Any, scale: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_scaled(ctx.saved_tensors, scale, ctx.dtypes), None, None, None, None, None


def _keep_tokens(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, targets, *ctx.sizes = inputs
    ctx.save_for_backward(hidden, weight, targets, output[1])
    ctx.mark_non_differentiable(output[1])


def _tokens_backward(ctx: Any, scale: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.yuan.token_losses_backward(scale, *ctx.saved_tensors, *ctx.sizes)
    needed = zip(gradients, ctx.needs_input_grad[:2], strict=True)
    return *(g if need else None for g, need in needed), None, None, None


_sum_op.register_autograd(_sum_backward, setup_context=_keep_sum)
_token_op.register_autograd(_tokens_backward, setup_context=_keep_tokens)
