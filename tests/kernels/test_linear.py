"""Linear maps, and bf16 products through fp32 blocks on processors without instructions for bf16."""

import logging
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from yuan_kernels import ops, products


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.fixture
def no_bf16(monkeypatch):
    """A processor without instructions for bf16, and blocks that small matrices exceed."""
    monkeypatch.setattr(products, "cpu_multiplies_bf16", lambda: False)
    monkeypatch.setattr(products, "_CONVERTED", 0)
    monkeypatch.setattr(products, "_BLOCK", 16)


def rounds_once(actual: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether the error is that of one rounding to bf16 (sums in fp32 add next to nothing)."""
    least = (exact.to(torch.bfloat16).double() - exact).norm()
    return actual.dtype == torch.bfloat16 and bool((actual.double() - exact).norm() <= 1.001 * least)


@pytest.mark.parametrize(("with_bias", "with_out"), product((False, True), (False, True)))
def test_bf16_blocks_round_once(with_bias, with_out, no_bf16):
    x, w = random(37, 53), random(29, 53)
    bias = random(29) if with_bias else None
    out = torch.empty(37, 58, dtype=torch.bfloat16)[:, ::2] if with_out else None
    exact = x.double() @ w.double().T + (0 if bias is None else bias.double())
    for left, right in product((x, x.T.contiguous().T), (w, torch.cat((w, w), dim=1)[:, :53])):
        actual = products.linear(left, right, bias, out=out)
        assert rounds_once(actual, exact)
        assert out is None or actual is out


def test_bf16_gradients_round_once(no_bf16):
    x, w, bias = (t.requires_grad_() for t in (random(2, 20, 53), random(29, 53), random(29)))
    dy = random(2, 20, 29)
    y = ops.linear(x, w, bias)
    assert rounds_once(y, F.linear(x.double(), w.double(), bias.double()))
    dx, dw, db = torch.autograd.grad(y, (x, w, bias), dy)
    flat = dy.double().flatten(0, 1)
    assert rounds_once(dx, dy.double() @ w.double())
    assert rounds_once(dw, flat.T @ x.double().flatten(0, 1))
    assert rounds_once(db, flat.sum(dim=0))
    (only_w,) = torch.autograd.grad(ops.linear(x.detach(), w), w, dy)
    assert torch.equal(only_w, dw)


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 3, 0)])
def test_bf16_blocks_of_nothing(shape, no_bf16, monkeypatch):
    monkeypatch.setattr(products, "_CONVERTED_ROWS", 0)
    rows, terms, columns = shape
    y = products.linear(random(rows, terms), random(columns, terms))
    assert torch.equal(y, torch.zeros(rows, columns, dtype=torch.bfloat16))


def test_the_processor_decides(monkeypatch):
    x, w = random(64, 64), random(64, 64)
    monkeypatch.setattr(products, "cpu_multiplies_bf16", lambda: False)
    assert products.replaces_torch(x, 64) and ops.bf16_products() == "fp32 blocks"
    # One token, as in generation, and matrices that no block pays for.
    assert not products.replaces_torch(x[:1], 64) and not products.replaces_torch(x, 3)
    assert not products.replaces_torch(x.float(), 64) and not products.replaces_torch(x.half(), 64)
    monkeypatch.setattr(products, "cpu_multiplies_bf16", lambda: True)
    assert not products.replaces_torch(x, 64) and ops.bf16_products() == "oneDNN"
    assert torch.equal(ops.linear(x, w), F.linear(x, w))


@pytest.mark.parametrize(("onednn", "supported"), [(True, True), (True, False), (False, True)])
def test_what_the_processor_is_asked(onednn, supported, monkeypatch, caplog):
    class Library:
        _is_mkldnn_bf16_supported = staticmethod(lambda: supported)

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    monkeypatch.setattr(torch.ops, "mkldnn", Library)
    with caplog.at_level(logging.INFO, logger="yuan_kernels"):
        assert products.cpu_multiplies_bf16.__wrapped__() is (onednn and supported)
    assert len(caplog.records) == 1


def test_the_op_passes_gradcheck():
    inputs = [t.requires_grad_() for t in (random(2, 3, 4), random(5, 4), random(5))]
    inputs = [t.detach().double().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(torch.ops.yuan.linear, inputs)
