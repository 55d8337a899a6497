"""The localized filter against its definition, against F.conv1d, and against separate documents."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from yuan_kernels import dispatch, ops, reference
from yuan_kernels import localized_filter as sandwich

from tests.support.gradients import assert_close, assert_rounds_no_worse, with_gradients

BATCH = 2


Weights = tuple[Tensor, Tensor, Tensor, Tensor]


def make_inputs(
    tokens: int, hidden: int = 10, *, batch: int = BATCH, seed: int = 0, dtype=torch.float64
) -> tuple[Tensor, Weights]:
    """x and the four weights, scaled like a trained model's."""
    generator = torch.Generator().manual_seed(seed)
    channels = hidden // 2

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x = random(batch, tokens, hidden)
    scale = hidden**-0.5
    w1, b1 = random(channels, hidden, 2) * scale, random(channels) * scale
    w2, b2 = random(hidden, channels, 2) * scale, random(hidden) * scale
    return x, (w1, b1, w2, b2)


def make_starts(tokens: int, *, batch: int = BATCH, seed: int = 0, rate: float = 0.4) -> Tensor:
    return torch.rand(batch, tokens, generator=torch.Generator().manual_seed(seed)) < rate


def two_convolutions(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The published form: each convolution padded with one zero on the left."""
    c = F.conv1d(F.pad(x.transpose(1, 2), (1, 0)), w1, b1)
    return F.conv1d(F.pad(c, (1, 0)), w2, b2).transpose(1, 2)


def definition(x: Tensor, *weights: Tensor, document_start: Tensor | None = None) -> Tensor:
    state = reference.empty_filter_state(x, weights[0])
    return reference.localized_filter_step(x, state, *weights, document_start=document_start)[0]


@pytest.mark.parametrize("form", [definition, sandwich.localized_filter])
def test_worked_example(form):
    """H = 2, by hand: c = 3.25, 4.75, 5.25, because c[-1] is 0 and not the bias."""
    u = torch.tensor([[[1.0, 2.0], [3.0, -1.0], [0.5, 0.0]]], dtype=torch.float64)
    w1 = torch.tensor([[[1.0, 2.0], [-1.0, 0.5]]], dtype=torch.float64)  # [1, 2, 2]: last index older, newer
    b1 = torch.tensor([0.25], dtype=torch.float64)
    w2 = torch.tensor([[[1.0, -1.0]], [[0.5, 2.0]]], dtype=torch.float64)
    b2 = torch.tensor([0.1, -0.2], dtype=torch.float64)
    d = form(u, w1, b1, w2, b2)
    expected = torch.tensor([[[-3.15, 6.3], [-1.4, 10.925], [-0.4, 12.675]]], dtype=torch.float64)
    torch.testing.assert_close(d, expected, rtol=0, atol=1e-12)
    f = ops.rms_norm(d + u, torch.ones(2, dtype=torch.float64), epsilon=1e-6)
    expected = torch.tensor([[[-0.354628, 1.369028], [0.225078, 1.396188], [0.011157, 1.414170]]])
    torch.testing.assert_close(f, expected.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", [definition, sandwich.localized_filter])
def test_equals_two_convolutions(form):
    x, weights = make_inputs(13)
    torch.testing.assert_close(form(x, *weights), two_convolutions(x, *weights), rtol=0, atol=1e-12)


@given(
    tokens=st.integers(1, 11),
    batch=st.integers(1, 3),
    rate=st.sampled_from([None, 0.0, 0.3, 1.0]),
    block=st.sampled_from([1, 2, 3, 5, 256]),
    form=st.sampled_from(["blocks", "torch"]),
    with_before=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_every_form_equals_the_reference(tokens, batch, rate, block, form, with_before, seed):
    """Block borders on, before and after the borders of documents and sequences; with and without a state."""
    x, weights = make_inputs(tokens, 6, batch=batch, seed=seed)
    starts = None if rate is None else make_starts(tokens, batch=batch, seed=seed, rate=rate)
    before = make_inputs(1, 6, batch=batch, seed=seed + 1)[0][:, 0]
    state = [before, before[:, :3] * 2] if with_before else []

    def results_of(function):
        def call(x, w1, b1, w2, b2, *state):
            first = state or reference.empty_filter_state(x, w1)
            return function(x, (w1, b1, w2, b2), first if function is stepped else (state or None))

        return with_gradients(call, x, *weights, *state)

    def stepped(x, weights, state):
        return reference.localized_filter_step(x, state, *weights, document_start=starts)[0]

    def ours(x, weights, state):
        return ops.localized_filter(x, *weights, document_start=starts, before=state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandwich, "_BLOCK", block)
        patch.setattr(dispatch, "implementation", lambda *_: form)
        actual = results_of(ours)
    assert_close(actual, results_of(stepped))


@pytest.mark.parametrize("cut", [2, 5, 10])
@pytest.mark.parametrize("with_starts", [False, True])
def test_a_split_sequence_equals_the_whole(cut, with_starts):
    """Two devices hold a part of the sequence each; the first sends a state, and receives its gradient."""
    x, weights = make_inputs(11)
    starts = make_starts(11) if with_starts else None

    def in_two(x, w1, b1, w2, b2, *, document_start):
        first, second = (None, None) if starts is None else (starts[:, :cut], starts[:, cut:])
        tail = None if starts is None else starts[:, cut - 2 : cut]
        state = ops.localized_filter_state(x[:, cut - 2 : cut], w1, b1, document_start=tail)
        left = ops.localized_filter(x[:, :cut], w1, b1, w2, b2, document_start=first)
        right = ops.localized_filter(x[:, cut:], w1, b1, w2, b2, document_start=second, before=state)
        return torch.cat((left, right), dim=1)

    ours = with_gradients(in_two, x, *weights, document_start=starts)
    expected = with_gradients(definition, x, *weights, document_start=starts)
    assert_close(ours, expected)


def test_a_state_does_not_affect_a_document_that_begins_after_it():
    x, weights = make_inputs(4)
    starts = torch.zeros(BATCH, 4, dtype=torch.bool)
    starts[:, 0] = True
    state = torch.full((BATCH, 10), float("nan")).double(), torch.full((BATCH, 5), float("inf")).double()
    ours = ops.localized_filter(x, *weights, document_start=starts, before=state)
    assert torch.equal(ours, ops.localized_filter(x, *weights, document_start=starts))


@pytest.mark.parametrize("block", [1, 4, 256])
@pytest.mark.parametrize("form", ["blocks", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_documents_do_not_affect_each_other(dtype, form, block, monkeypatch):
    """A document's bits do not depend on the content of other documents, infinities included."""
    monkeypatch.setattr(sandwich, "_BLOCK", block)
    monkeypatch.setattr(dispatch, "implementation", lambda *_: form)
    x, weights = make_inputs(12, dtype=dtype)
    starts = torch.zeros(BATCH, 12, dtype=torch.bool)
    starts[:, [4, 5, 9]] = True
    other = x.clone()
    other[:, :5] = float("inf")
    other[:, 9:] = float("nan")
    before = ops.localized_filter(x, *weights, document_start=starts)
    after = ops.localized_filter(other, *weights, document_start=starts)
    assert torch.equal(before[:, 5:9], after[:, 5:9])


def test_a_packed_document_equals_one_alone():
    x, weights = make_inputs(12)
    starts = torch.zeros(BATCH, 12, dtype=torch.bool)
    starts[:, [5, 9]] = True
    packed = ops.localized_filter(x, *weights, document_start=starts)[:, 5:9]
    torch.testing.assert_close(packed, ops.localized_filter(x[:, 5:9], *weights), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (2, 2), (2, 3), (0, 4), (2, 0)])
@pytest.mark.parametrize("with_starts", [False, True])
def test_odd_sizes(batch, tokens, with_starts):
    x, weights = make_inputs(tokens, 6, batch=batch)
    starts = make_starts(tokens, batch=batch) if with_starts else None
    ours = with_gradients(ops.localized_filter, x, *weights, document_start=starts)
    expected = with_gradients(definition, x, *weights, document_start=starts)
    assert_close(ours, expected)


def test_non_contiguous():
    x, weights = make_inputs(8)
    strided = torch.empty(8, BATCH, 20, dtype=x.dtype)[:, :, ::2].transpose(0, 1)
    strided.copy_(x)
    transposed = tuple(w.clone().mT.contiguous().mT if w.dim() == 3 else w for w in weights)
    assert not strided.is_contiguous() and not transposed[0].is_contiguous()
    ours = with_gradients(ops.localized_filter, strided, *transposed)
    assert_close(ours, with_gradients(ops.localized_filter, x, *weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_worse_than_the_plain_form(dtype):
    x, weights = make_inputs(64, 64, dtype=dtype)
    exact = with_gradients(two_convolutions, x.double(), *(w.double() for w in weights))
    plain = with_gradients(two_convolutions, x, *weights)
    ours = with_gradients(ops.localized_filter, x, *weights)
    assert_rounds_no_worse(ours, plain, exact)


@pytest.mark.parametrize("needed", range(5))
def test_one_gradient_alone(needed):
    x, weights = make_inputs(5)
    expected = with_gradients(definition, x, *weights)[1 + needed]
    inputs = [x, *weights]
    inputs[needed] = inputs[needed].clone().requires_grad_()
    y = ops.localized_filter(*inputs)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ours = torch.autograd.grad(y, inputs[needed], upstream)[0]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


def test_sharded_channels_sum_to_the_whole():
    """Tensor parallelism: convolution 1 sharded by rows, convolution 2 by columns, its bias added once."""
    x, (w1, b1, w2, b2) = make_inputs(7, 12)
    starts = make_starts(7)
    parts = [
        ops.localized_filter(x, w1[shard], b1[shard], w2[:, shard], None, document_start=starts)
        for shard in (slice(0, 2), slice(2, 6))
    ]
    whole = ops.localized_filter(x, w1, b1, w2, b2, document_start=starts)
    torch.testing.assert_close(parts[0] + parts[1] + b2, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("with_starts", [False, True])
def test_data_and_weight_gradients_are_separable(with_starts):
    x, weights = make_inputs(6)
    starts = make_starts(6) if with_starts else None
    wanted_y, dx, *dweights = with_gradients(definition, x, *weights, document_start=starts)
    y, taps = ops.localized_filter_forward(x, *weights, document_start=starts)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ours, dz, _ = ops.localized_filter_data_gradient(dy, weights[0], weights[2], document_start=starts)
    assert_close((y, ours), (wanted_y, dx))
    assert_close(ops.localized_filter_weight_gradient(x, taps, dz, dy), dweights)


@given(
    chunks=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    rate=st.sampled_from([0.0, 0.4]),
    seed=st.integers(0, 99),
    choice=st.sampled_from([reference.localized_filter_step, sandwich.localized_filter_step]),
)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_steps_equal_the_whole(chunks, rate, seed, choice):
    tokens = sum(chunks)
    x, weights = make_inputs(tokens, 6, seed=seed)
    starts = make_starts(tokens, seed=seed, rate=rate)
    expected = sandwich.localized_filter(x, *weights, document_start=starts)
    state = x.new_zeros(BATCH, 6), x.new_zeros(BATCH, 3)
    parts = []
    for chunk, start in zip(x.split(chunks, dim=1), starts.split(chunks, dim=1), strict=True):
        part, state = choice(chunk, state, *weights, document_start=start)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=1e-12)


def test_override_selects_the_reference(monkeypatch):
    monkeypatch.setattr(reference, "localized_filter_step", lambda *_, **__: ("reference", None))
    x, weights = make_inputs(3)
    assert isinstance(ops.localized_filter(x, *weights), Tensor)
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    assert ops.localized_filter(x, *weights) == "reference"
    monkeypatch.setenv("YUAN_KERNELS", "fastest")
    with pytest.raises(ValueError, match="YUAN_KERNELS='fastest'"):
        ops.localized_filter(x, *weights)


def test_errors_name_shapes():
    x, (w1, b1, w2, b2) = make_inputs(3)
    with pytest.raises(ValueError, match=r"conv2_weight has shape \[5, 10, 2\]"):
        ops.localized_filter(x, w1, b1, w1, b2)
    with pytest.raises(ValueError, match="batch, tokens, hidden"):
        ops.localized_filter(x[0], w1, b1, w2, b2)
    with pytest.raises(ValueError, match="must be bool"):
        ops.localized_filter(x, w1, b1, w2, b2, document_start=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="the state's u"):
        ops.localized_filter(x, w1, b1, w2, b2, before=(x, x))
    with pytest.raises(ValueError, match="x_tail"):
        ops.localized_filter_state(x, w1, b1)
    with pytest.raises(ValueError, match="the state's c"):
        ops.localized_filter_step(x, (x[:, 0], x[:, 0]), w1, b1, w2, b2)
