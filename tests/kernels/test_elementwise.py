"""rms_norm, rotary and swiglu against their formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from yuan_kernels import ops, reference

from tests.support.gradients import assert_rounds_no_worse, with_gradients
from tests.support.memory import kept_bytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm(dtype):
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.linspace(0.5, 2, 16).to(dtype)
    ours = ops.rms_norm(x, weight, epsilon=1e-6)
    expected = F.rms_norm(x.double(), (16,), weight.double(), 1e-6)
    assert ours.dtype == dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), expected, rtol=2 * rounding, atol=1e-15)


def test_rms_norm_statistics_do_not_overflow_in_half():
    x = torch.full((1, 4), 1000.0, dtype=torch.float16)
    assert torch.equal(ops.rms_norm(x, torch.ones(4, dtype=torch.float16), epsilon=1e-6), torch.ones_like(x))


def test_rotary_rotates_pairs_across_both_halves():
    x = torch.tensor([1.0, 10.0, 2.0, 20.0]).view(1, 1, 1, 4)
    angles = torch.tensor([math.pi / 2, 0.0]).view(1, 1, 2)
    rotated = ops.rotary(x, angles.cos(), angles.sin())
    torch.testing.assert_close(rotated.flatten(), torch.tensor([-2.0, 10.0, 1.0, 20.0]))


def test_rotary_computes_in_fp32_and_keeps_the_dtype():
    x = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = torch.linspace(0, 3, 8).view(1, 2, 4)
    rotated = ops.rotary(x, angles.cos(), angles.sin())
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, ops.rotary(x.float(), angles.cos(), angles.sin()).bfloat16())


def test_swiglu_gates_with_the_first_half():
    x = torch.tensor([[1.0, -1.0, 3.0, 5.0]])
    expected = F.silu(torch.tensor([[1.0, -1.0]])) * torch.tensor([[3.0, 5.0]])
    assert torch.equal(ops.swiglu(x), expected)


def swiglu_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # More rows than one block of a CPU holds.
    x, dy = (3 * torch.randn(2, 40, width, generator=generator) for width in (2048, 1024))
    return x.to(dtype).requires_grad_(), dy.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_swiglu_rounds_no_worse_than_its_definition(dtype):
    x, dy = swiglu_inputs(dtype)
    exact = with_gradients(reference.swiglu, x.double(), scale=dy.double())
    ours, plain = (with_gradients(form, x, scale=dy) for form in (ops.swiglu, reference.swiglu))
    assert {one.dtype for one in ours} == {dtype}
    assert_rounds_no_worse(ours, plain, exact, most=1.1)


def test_swiglu_saves_only_its_input():
    x, _ = swiglu_inputs(torch.float32)
    kept = kept_bytes(lambda: ops.swiglu(x), beside=[x])
    assert kept == x.nbytes // 2  # the result


@pytest.mark.parametrize("tables", [1, 2])
def test_rotary_equals_its_definition_and_rotates_gradients_back(tables):
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(2, 300, 5, 22, generator=generator).requires_grad_() for _ in range(2))
    angles = 3 * torch.randn(tables, 300, 11, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    assert torch.equal(ops.rotary(x, cos, sin), reference.rotary(x, cos, sin))
    (dx,) = torch.autograd.grad(ops.rotary(x, cos, sin), x, dy)
    torch.testing.assert_close(dx, ops.rotary(dy, cos, -sin))
    # A gradient that is not contiguous.
    (dx,) = torch.autograd.grad(ops.rotary(x, cos, sin).transpose(1, 2), x, dy.transpose(1, 2))
    torch.testing.assert_close(dx, ops.rotary(dy, cos, -sin))


def test_backwards_pass_gradcheck():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, 2, 6, dtype=torch.float64, generator=generator).requires_grad_()
    angles = torch.randn(1, 3, 3, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(ops.swiglu, x)
    assert torch.autograd.gradcheck(lambda x: ops.rotary(x, angles.cos(), angles.sin()), x)
    assert torch.autograd.gradgradcheck(lambda x: ops.rotary(x, angles.cos(), angles.sin()), x)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_swiglu_of_nothing(shape):
    x = torch.ones(shape, requires_grad=True)
    assert ops.swiglu(x).shape == (shape[0], shape[1] // 2)
    assert torch.autograd.grad(ops.swiglu(x).sum(), x)[0].shape == shape


def test_wrong_shapes_are_named():
    x, table = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 2)
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 4\]; rotary expects \[batch, tokens, heads"):
        ops.rotary(x[0], table, table)
    with pytest.raises(ValueError, match=r"sin has shape \[1, 2, 4\]; the other arguments need \[1, 2, 2\]"):
        ops.rotary(x, table, torch.ones(1, 2, 4))
    with pytest.raises(ValueError, match=r"x has shape \[2, 3\]; swiglu halves the last dim"):
        ops.swiglu(torch.ones(2, 3))
