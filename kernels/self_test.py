"""One small case of what the dispatcher does not trust unseen: our Triton kernels, other packages' norms."""

from __future__ import annotations

import torch
from torch import Tensor
from yuan_kernels import packages

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_TOKENS, _HIDDEN = 130, 96


def triton_is_right(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our Triton kernels of an op give torch's numbers; raises what Triton raises."""
    return _TESTS[op](device, dtype)


def norm_is_right(norm: packages.Norm, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether another package's norm gives the definition's numbers and gradients, its inputs untouched."""
    from yuan_kernels import reference

    inputs = packages.case(_TOKENS, _HIDDEN, device, dtype)
    kept = [t.detach().clone() for t in inputs]
    (x, weight, dy), epsilon = inputs, packages.EPSILON
    y = norm(x, weight, epsilon)
    made = y, *torch.autograd.grad(y, (x, weight), dy)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = reference.rms_norm(*wide, epsilon=epsilon)
    wanted = exact, *torch.autograd.grad(exact, wide, dy.double())
    untouched = all(torch.equal(t, k) for t, k in zip(inputs, kept, strict=True))
    return untouched and all(
        a.dtype == dtype and _close(a, b, dtype) for a, b in zip(made, wanted, strict=True)
    )


def _localized_filter(device: torch.device, dtype: torch.dtype) -> bool:
    from yuan_kernels import localized_filter, triton_forms

    z, starts = _draw(2, _TOKENS, _HIDDEN, device=device, dtype=dtype), _starts(device)
    before = [_draw(2, _HIDDEN // 2, device=device, dtype=dtype) for _ in range(2)]
    return all(
        _close(triton_forms.filter_forward(z, s, u, c), localized_filter._taps(z, s, u, c), dtype)
        and _close(triton_forms.filter_backward(z, s), localized_filter._dz(z, s), dtype)
        for s in (None, starts)
        for u, c in ((None, None), before)
    )


def _rms_norm(device: torch.device, dtype: torch.dtype) -> bool:
    from yuan_kernels import rms_norm, triton_forms

    x, residual, dy, past = (_draw(_TOKENS, _HIDDEN, device=device, dtype=dtype) for _ in range(4))
    weight = _draw(_HIDDEN, device=device, dtype=dtype)
    for extra, later in ((None, None), (residual, past)):
        (y, s, r), (y1, s1, r1) = (
            (torch.empty_like(x), x if extra is None else torch.empty_like(x), x.new_empty(_TOKENS).float())
            for _ in range(2)
        )
        triton_forms.rms_norm_forward(x, extra, weight, 1e-6, y, s, r)
        rms_norm._forward_blocks(x, extra, weight.float(), 1e-6, y1, s1, r1)
        ds, ds1, dw1 = torch.empty_like(x), torch.empty_like(x), torch.zeros_like(weight).float()
        dw = triton_forms.rms_norm_backward(dy, later, x, weight, r1, ds)
        rms_norm._backward_blocks(dy, later, x, weight.float(), r1, ds1, dw1)
        pairs = (y, y1), (s, s1), (r, r1), (ds, ds1), (dw, dw1)
        if not all(_close(a, b, dtype) for a, b in pairs):
            return False
    return True


def _linear_cross_entropy(device: torch.device, dtype: torch.dtype) -> bool:
    from yuan_kernels import triton_forms

    logits = _draw(_TOKENS, 5000, device=device, dtype=torch.float32)
    made, normalizer = triton_forms.softmax(logits.clone(), dtype, 2.0)
    wanted = 2.0 * torch.softmax(logits, dim=1)
    return _close(made, wanted, dtype) and _close(normalizer, logits.logsumexp(1), torch.float32)


def _adamw(device: torch.device, dtype: torch.dtype) -> bool:
    from yuan_kernels import reference, triton_forms

    master, gradient, exp_avg = (_draw(5000, device=device, dtype=torch.float32) for _ in range(3))
    exp_avg_sq = master.square()
    made, wanted = (
        (master.clone(), gradient, exp_avg.clone(), exp_avg_sq.clone(), master.bfloat16()) for _ in range(2)
    )
    step = reference.AdamWStep(number=3, lr=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
    clip_factor = torch.tensor(0.5, device=device)
    triton_forms.adamw_step(*made, step, clip_factor)
    reference.adamw_step(*wanted, step, clip_factor)
    return all(_close(a, b, a.dtype) for a, b in zip(made, wanted, strict=True))


_TESTS = {
    "localized_filter": _localized_filter,
    "rms_norm": _rms_norm,
    "linear_cross_entropy": _linear_cross_entropy,
    "adamw": _adamw,
}


def _draw(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def _starts(device: torch.device) -> Tensor:
    starts = torch.zeros(2, _TOKENS, dtype=torch.bool)
    starts[0, [0, 5, 6, 31, 32, 129]] = True
    return starts.to(device)


def _close(ours: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Relative to the whole, as single numbers near 0 say nothing."""
    difference = (ours.double() - wanted.double()).norm()
    return bool(difference <= _TOLERANCE[dtype] * wanted.double().norm())
