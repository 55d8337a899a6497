"""rms_norm, rotary and swiglu against their formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from yuan_kernels import ops


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
