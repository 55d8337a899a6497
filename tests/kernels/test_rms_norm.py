"""rms_norm and add_rms_norm against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from yuan_kernels import ops, reference, rms_norm

from tests.support.gradients import assert_close, assert_rounds_no_worse, with_gradients

EPSILON = 1e-6


def make_inputs(*shape: int, dtype=torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual and weight."""
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64).to(dtype)

    return random(*shape), random(*shape), random(shape[-1])


@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=2),
    hidden=st.sampled_from([1, 3, 8, 33]),
    block=st.sampled_from([1, 20, 1000]),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_equals_the_definition(shape, hidden, block):
    x, residual, weight = make_inputs(*shape, hidden)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rms_norm, "BLOCK", block)
        pairs = [
            (
                with_gradients(ops.rms_norm, x, weight, epsilon=EPSILON),
                with_gradients(reference.rms_norm, x, weight, epsilon=EPSILON),
            ),
            (
                with_gradients(ops.add_rms_norm, x, residual, weight, epsilon=EPSILON),
                with_gradients(reference.add_rms_norm, x, residual, weight, epsilon=EPSILON),
            ),
        ]
    for ours, expected in pairs:
        assert_close(ours, expected, atol=1e-11)


@pytest.mark.parametrize("output", [0, 1])
def test_one_result_alone(output):
    inputs = make_inputs(4, 6)
    ours, expected = (
        with_gradients(lambda *a, form=form: form(*a, epsilon=EPSILON)[0], *inputs)
        if output == 0
        else with_gradients(lambda x, r, form=form: form(x, r, inputs[2], epsilon=EPSILON)[1], *inputs[:2])
        for form in (ops.add_rms_norm, reference.add_rms_norm)
    )
    assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_worse_than_the_plain_form(dtype):
    inputs = make_inputs(50, 64, dtype=dtype)
    exact = with_gradients(reference.add_rms_norm, *(t.double() for t in inputs), epsilon=EPSILON)
    plain = with_gradients(reference.add_rms_norm, *inputs, epsilon=EPSILON)
    ours = with_gradients(ops.add_rms_norm, *inputs, epsilon=EPSILON)
    assert {one.dtype for one in ours} == {dtype}
    assert_rounds_no_worse(ours, plain, exact)


def test_the_sum_equals_torchs_bit_for_bit():
    x, residual, weight = make_inputs(5, 16, dtype=torch.bfloat16)
    assert torch.equal(ops.add_rms_norm(x, residual, weight, epsilon=EPSILON)[1], x + residual)


def test_non_contiguous():
    x, residual, weight = make_inputs(4, 3, 8)
    strided = (x.transpose(0, 1), residual.transpose(0, 1), torch.stack((weight, weight), 1)[:, 0])
    ours = with_gradients(ops.add_rms_norm, *strided, epsilon=EPSILON)
    expected = with_gradients(reference.add_rms_norm, *strided, epsilon=EPSILON)
    assert_close(ours, expected)


def test_override_selects_the_reference(monkeypatch):
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    monkeypatch.setattr(reference, "rms_norm", lambda *_, **__: "reference")
    x, residual, weight = make_inputs(2, 4)
    assert ops.rms_norm(x, weight, epsilon=EPSILON) == "reference"
    assert ops.add_rms_norm(x, residual, weight, epsilon=EPSILON)[0] == "reference"


def test_errors_name_shapes():
    x, residual, weight = make_inputs(2, 4)
    with pytest.raises(ValueError, match=r"weight has shape \[3\]"):
        ops.rms_norm(x, weight[:3], epsilon=EPSILON)
    with pytest.raises(ValueError, match=r"residual has shape \[1, 4\]"):
        ops.add_rms_norm(x, residual[:1], weight, epsilon=EPSILON)
