"""Block-wise linear cross-entropy against all logits at once."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from yuan_kernels import ops, reference


def make_inputs(tokens: int, hidden: int = 8, vocab: int = 13, *, seed: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < 0.3] = -100
    return h, weight, targets


def with_gradients(form, hidden, weight, targets, *, scale: float | torch.Tensor = 1.0, **options):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = form(hidden, weight, targets, **options)
    return [loss.detach(), *torch.autograd.grad((loss * scale).sum(), (hidden, weight))]


def plain(hidden, weight, targets, **options):
    """What one writes without this op."""
    return F.cross_entropy((hidden @ weight.T).float(), targets, **options)


@given(
    tokens=st.integers(0, 20),
    chunk_size=st.sampled_from([1, 3, 7, 64, None]),
    reduction=st.sampled_from(["sum", "none"]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_equals_all_logits_at_once(tokens, chunk_size, reduction, seed):
    inputs = make_inputs(tokens, seed=seed)
    scale = torch.linspace(-1, 2, tokens, dtype=torch.float64) if reduction == "none" else 0.37
    ours = with_gradients(
        ops.linear_cross_entropy, *inputs, scale=scale, reduction=reduction, chunk_size=chunk_size
    )
    hidden, weight, targets = inputs
    wanted = with_gradients(
        lambda h, w, t: F.cross_entropy(h @ w.T, t, reduction=reduction), hidden, weight, targets, scale=scale
    )
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_reference_equals_all_logits_at_once():
    hidden, weight, targets = make_inputs(9)
    wanted = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(reference.linear_cross_entropy(hidden, weight, targets), wanted)


def test_another_ignore_index():
    hidden, weight, targets = make_inputs(9)
    ours = ops.linear_cross_entropy(hidden, weight, targets.clamp(min=0), ignore_index=0)
    wanted = F.cross_entropy(hidden @ weight.T, targets.clamp(min=0), ignore_index=0, reduction="sum")
    torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gradcheck(reduction):
    hidden, weight, targets = make_inputs(5)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w: ops.linear_cross_entropy(h, w, targets, reduction=reduction, chunk_size=2), leaves
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_worse_than_the_plain_form(dtype):
    # More words than one block of dW, so that the blocks' borders are crossed.
    inputs = make_inputs(300, 32, 5000, dtype=dtype)
    hidden, weight, targets = inputs
    exact = with_gradients(ops.linear_cross_entropy, hidden.double(), weight.double(), targets)
    naive = with_gradients(lambda *a: plain(*a, reduction="sum"), *inputs)
    ours = with_gradients(ops.linear_cross_entropy, *inputs, chunk_size=128)
    assert ours[0].dtype == torch.float32
    for a, b, truth in zip(ours[1:], naive[1:], exact[1:], strict=True):
        assert a.dtype == dtype
        assert (a.double() - truth).norm() <= 2 * (b.double() - truth).norm()
    # A sum of errors of either sign may be zero by luck: the losses are compared token by token.
    losses = ops.linear_cross_entropy(hidden, weight, targets, reduction="none", chunk_size=128).double()
    truth = ops.linear_cross_entropy(hidden.double(), weight.double(), targets, reduction="none")
    naive_losses = plain(hidden, weight, targets, reduction="none").double()
    assert (losses - truth).norm() <= 2 * (naive_losses - truth).norm()


def test_half_keeps_small_probabilities():
    """softmax(z) of many words lies below fp16's normal range; a scaled loss still gives it all its bits."""
    hidden, weight, _ = make_inputs(4, 4, 200_000, dtype=torch.float16)
    hidden = hidden * 0.1
    targets = torch.tensor([0, 1, 2, -100])
    exact = with_gradients(ops.linear_cross_entropy, hidden.double(), weight.double(), targets, scale=4096.0)
    ours = with_gradients(ops.linear_cross_entropy, hidden, weight, targets, scale=4096.0)
    # The targets' own rows, 200,000 times larger, would hide the others.
    exact[2], ours[2] = exact[2][3:], ours[2][3:]
    for a, truth in zip(ours, exact, strict=True):
        assert (a.double() - truth).norm() <= 1e-3 * truth.norm()


def test_evaluation_makes_no_gradients():
    """One product for each block of tokens, and no more."""
    hidden, weight, targets = make_inputs(8)
    products = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products.append(func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watch():
        ops.linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets, chunk_size=4)
    assert sum(products) == 2


def test_only_what_is_asked_for_is_made():
    hidden, weight, targets = make_inputs(5)
    loss = ops.linear_cross_entropy(hidden, weight.requires_grad_(), targets)
    with torch.no_grad():
        assert not ops.linear_cross_entropy(hidden, weight, targets).requires_grad
    ours = torch.autograd.grad(loss, weight)[0]
    torch.testing.assert_close(ours, with_gradients(ops.linear_cross_entropy, hidden, weight, targets)[2])


def test_no_tensor_of_all_logits_exists():
    """64 tokens and 1,000 words in blocks of 8: nothing above the 8 x 1,000 logits of a block is made."""
    hidden, weight, targets = make_inputs(64, 4, 1000, dtype=torch.float32)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        ops.linear_cross_entropy(
            hidden.requires_grad_(), weight.requires_grad_(), targets, chunk_size=8
        ).backward()
    assert largest == 8 * 1000


def test_all_ignored_and_override(monkeypatch):
    hidden, weight, _ = make_inputs(3)
    targets = torch.full((3,), -100)
    loss, dh, dw = with_gradients(ops.linear_cross_entropy, hidden, weight, targets)
    assert loss == 0 and dh.count_nonzero() == 0 and dw.count_nonzero() == 0
    monkeypatch.setattr(reference, "linear_cross_entropy", lambda *_, **__: "reference")
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    assert ops.linear_cross_entropy(hidden, weight, targets) == "reference"


def test_errors():
    hidden, weight, targets = make_inputs(3)
    with pytest.raises(ValueError, match=r"targets has shape \[2\]"):
        ops.linear_cross_entropy(hidden, weight, targets[:2])
    with pytest.raises(ValueError, match="reduction 'mean' is unknown"):
        ops.linear_cross_entropy(hidden, weight, targets, reduction="mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="same dtype"):
        ops.linear_cross_entropy(hidden.float(), weight, targets)
    with pytest.raises(ValueError, match="chunk_size 0"):
        ops.linear_cross_entropy(hidden, weight, targets, chunk_size=0)
