"""The tests that the dispatcher runs before it uses our Triton kernels.

Each compares results on one small case.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_TOKENS, _HIDDEN = 130, 96


def triton_is_correct(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether our Triton kernels of an op agree with torch. Raises what Triton raises."""
    return all(_TESTS[op](device, dtype))


def varlen_is_correct(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length attention agrees with one call per document, in values and gradients.

    Queries and keys are interleaved, as in the model, and documents end inside the kernel's tiles.
    """
    from yuan_kernels import attention

    ranges = ((0, 1), (1, 70), (70, _TOKENS), (_TOKENS, 2 * _TOKENS))
    query_key = _random(2, _TOKENS, 3, 2, 64, device=device, dtype=dtype)
    value, dy = _random(2, 2, _TOKENS, 3, 64, device=device, dtype=dtype).unbind(0)
    results: list[tuple[Tensor, ...]] = []
    for attend in (attention.attend_in_one_call, attention.attend_in_turn):
        leaves = [x.detach().clone().requires_grad_() for x in (query_key, value)]
        query, key = leaves[0].unbind(3)
        heads = attend(query, key, leaves[1], ranges)
        results.append((heads, *torch.autograd.grad(heads, leaves, dy)))
    return all(_close(a, b, dtype) for a, b in zip(*results, strict=True))


def grouped_is_correct(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product agrees with a loop over the groups, of which some are empty."""
    from yuan_kernels import grouped_linear

    return all(
        _close(grouped_linear.one_call(x, matrix, counts), grouped_linear.loop(x, matrix, counts), dtype)
        for x, matrix, counts in _grouped_cases(device, dtype)
    )


def _localized_filter(device: torch.device, dtype: torch.dtype) -> Iterator[bool]:
    from yuan_kernels import localized_filter, triton_forms

    z, starts = _random(2, _TOKENS, _HIDDEN, device=device, dtype=dtype), _starts(device)
    before = [_random(2, _HIDDEN // 2, device=device, dtype=dtype) for _ in range(2)]
    for s, (u, c) in itertools.product((None, starts), ((None, None), before)):
        yield _close(triton_forms.filter_forward(z, s, u, c), localized_filter._taps(z, s, u, c), dtype)
        yield _close(triton_forms.filter_backward(z, s), localized_filter._dz(z, s), dtype)


def _rms_norm(device: torch.device, dtype: torch.dtype) -> Iterator[bool]:
    from yuan_kernels import rms_norm, triton_forms

    x, residual, dy, past = (_random(_TOKENS, _HIDDEN, device=device, dtype=dtype) for _ in range(4))
    weight = _random(_HIDDEN, device=device, dtype=dtype)
    for added, bypass in ((None, None), (residual, past)):
        (y, s, r), (y1, s1, r1) = (
            (torch.empty_like(x), x if added is None else torch.empty_like(x), x.new_empty(_TOKENS).float())
            for _ in range(2)
        )
        triton_forms.rms_norm_forward(x, added, weight, 1e-6, y, s, r)
        rms_norm._forward_blocks(x, added, weight.float(), 1e-6, y1, s1, r1)
        ds, ds1, dw1 = torch.empty_like(x), torch.empty_like(x), torch.zeros_like(weight).float()
        dw = triton_forms.rms_norm_backward(dy, bypass, x, weight, r1, ds)
        rms_norm._backward_blocks(dy, bypass, x, weight.float(), r1, ds1, dw1)
        pairs = (y, y1), (s, s1), (r, r1), (ds, ds1), (dw, dw1)
        yield from (_close(a, b, dtype) for a, b in pairs)


def _linear_cross_entropy(device: torch.device, dtype: torch.dtype) -> Iterator[bool]:
    from yuan_kernels import triton_forms

    logits = _random(_TOKENS, 5000, device=device, dtype=torch.float32)
    actual, normalizer = triton_forms.softmax(logits.clone(), dtype, 2.0)
    expected = 2.0 * torch.softmax(logits, dim=1)
    yield _close(actual, expected, dtype)
    yield _close(normalizer, logits.logsumexp(1), torch.float32)


def _rotary(device: torch.device, dtype: torch.dtype) -> Iterator[bool]:
    from yuan_kernels import rotary, triton_forms

    # One table for both sequences, then one each; heads and pairs that do not fill a block, then that do.
    for batch, heads, head_dim in ((1, 5, 22), (2, 8, 32)):
        x = _random(2, 7, heads, head_dim, device=device, dtype=dtype)
        angles = 3 * _random(batch, 7, head_dim // 2, device=device, dtype=torch.float32)
        cos, sin = angles.cos(), angles.sin()
        for inverse in (False, True):
            actual = triton_forms.rotary(x, cos, sin, inverse=inverse)
            expected = rotary._rotate_blocks(x, cos, -sin if inverse else sin)
            yield _close(actual, expected, dtype)


def _swiglu(device: torch.device, dtype: torch.dtype) -> Iterator[bool]:
    from yuan_kernels import swiglu, triton_forms

    for width in (37, 1200):
        x, dy = (4 * _random(3, n, device=device, dtype=dtype) for n in (2 * width, width))
        (y, dx), (y1, dx1) = ((torch.empty_like(dy), torch.empty_like(x)) for _ in range(2))
        triton_forms.swiglu_forward(x, y)
        triton_forms.swiglu_backward(dy, x, dx)
        swiglu._forward_blocks(x, y1)
        swiglu._backward_blocks(dy, x, dx1)
        yield _close(y, y1, dtype) and _close(dx, dx1, dtype)


def _grouped_cases(
    device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, tuple[int, ...]]]:
    """Rows, matrices and counts, some 0, with both memory orders of the matrices: as in the forward, and as
    for the gradient of the input."""
    counts = (0, _TOKENS, 1, 0, 37)
    weight = _random(len(counts), 64, _HIDDEN, device=device, dtype=dtype)
    for n, matrix in ((_HIDDEN, weight), (64, weight.transpose(1, 2))):
        yield _random(sum(counts), n, device=device, dtype=dtype), matrix, counts


_TESTS = {
    "localized_filter": _localized_filter,
    "rms_norm": _rms_norm,
    "linear_cross_entropy": _linear_cross_entropy,
    "rotary": _rotary,
    "swiglu": _swiglu,
}


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def _starts(device: torch.device) -> Tensor:
    starts = torch.zeros(2, _TOKENS, dtype=torch.bool)
    starts[0, [0, 5, 6, 31, 32, 129]] = True
    return starts.to(device)


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Compare relative to the norm of the whole: single elements near 0 have no meaningful relative error."""
    difference = (actual.double() - expected.double()).norm()
    return bool(difference <= _TOLERANCE[dtype] * expected.double().norm())
