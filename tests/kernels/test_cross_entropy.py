"""Block-wise linear cross-entropy against all logits at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from yuan_kernels import ops, products, reference

from tests.support.gradients import assert_close, assert_rounds_no_worse, with_gradients


def make_inputs(tokens: int, hidden: int = 8, vocab: int = 13, *, seed: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < 0.3] = -100
    return h, weight, targets


def plain(hidden, weight, targets, **options):
    """The straightforward code, without this op."""
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
    expected = with_gradients(
        lambda h, w, t: F.cross_entropy(h @ w.T, t, reduction=reduction), hidden, weight, targets, scale=scale
    )
    assert_close(ours, expected)


def test_reference_equals_all_logits_at_once():
    hidden, weight, targets = make_inputs(9)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(reference.linear_cross_entropy(hidden, weight, targets), expected)


def test_another_ignore_index():
    hidden, weight, targets = make_inputs(9)
    ours = ops.linear_cross_entropy(hidden, weight, targets.clamp(min=0), ignore_index=0)
    expected = F.cross_entropy(hidden @ weight.T, targets.clamp(min=0), ignore_index=0, reduction="sum")
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_non_contiguous(reduction):
    hidden, weight, targets = make_inputs(9)
    strided = hidden.T.contiguous().T, weight.T.contiguous().T, torch.stack((targets, targets), 1)[:, 0]
    assert not any(t.is_contiguous() for t in strided)
    ours = with_gradients(ops.linear_cross_entropy, *strided, reduction=reduction, chunk_size=4, scale=1.0)
    expected = with_gradients(
        reference.linear_cross_entropy, hidden, weight, targets, reduction=reduction, scale=1.0
    )
    assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_worse_than_the_plain_form(dtype):
    # More words than one block of dW.
    inputs = make_inputs(300, 32, 5000, dtype=dtype)
    hidden, weight, targets = inputs
    exact = with_gradients(ops.linear_cross_entropy, hidden.double(), weight.double(), targets, scale=1.0)
    naive = with_gradients(lambda *a: plain(*a, reduction="sum"), *inputs, scale=1.0)
    ours = with_gradients(ops.linear_cross_entropy, *inputs, chunk_size=128, scale=1.0)
    assert ours[0].dtype == torch.float32
    assert {gradient.dtype for gradient in ours[1:]} == {dtype}
    assert_rounds_no_worse(ours[1:], naive[1:], exact[1:])
    # Errors of both signs may cancel in a sum, so the losses are compared token by token.
    losses = ops.linear_cross_entropy(hidden, weight, targets, reduction="none", chunk_size=128).double()
    truth = ops.linear_cross_entropy(hidden.double(), weight.double(), targets, reduction="none")
    naive_losses = plain(hidden, weight, targets, reduction="none").double()
    assert (losses - truth).norm() <= 2 * (naive_losses - truth).norm()


def test_confident_predictions_keep_their_small_gradients():
    """1 - P[y] is 1e-4 here: rounded to bf16 before the subtraction, it would be 0."""
    weight = torch.eye(8, 8).bfloat16()
    hidden = (weight * 11.0).float().bfloat16()
    targets = torch.arange(8)
    exact = with_gradients(ops.linear_cross_entropy, hidden.double(), weight.double(), targets, scale=1.0)
    ours = with_gradients(ops.linear_cross_entropy, hidden, weight, targets, scale=1.0)
    for a, truth in zip(ours, exact, strict=True):
        assert (a.double() - truth).norm() <= 1e-2 * truth.norm()


# --- into a main gradient ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float64,) * 2, (torch.bfloat16, torch.float32)])
def test_main_gradient_is_added_to(dtype, wide):
    hidden, weight, targets = make_inputs(20, 16, 3000, dtype=dtype)
    exact = with_gradients(ops.linear_cross_entropy, hidden.double(), weight.double(), targets, scale=0.25)
    plain_gradients = with_gradients(plain, hidden, weight, targets, scale=0.25, reduction="sum")
    before = torch.linspace(-1, 1, weight.numel(), dtype=wide).view_as(weight)
    main = before.clone()
    leaf, fixed = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = ops.linear_cross_entropy(
        leaf, fixed, targets, main_gradient=main, gradient_scale=0.25, chunk_size=7
    )
    after_forward = main.clone()
    (loss * 0.25).backward()
    assert fixed.grad is None and torch.equal(main, after_forward) and leaf.grad is not None
    ours = [loss.detach(), leaf.grad, main.double() - before.double()]
    for a, b, truth in zip(ours[1:], plain_gradients[1:], exact[1:], strict=True):
        rounding = 0.0 if dtype == torch.float64 else (b.double() - truth).norm()
        assert (a.double() - truth).norm() <= 2 * rounding + 1e-6 * truth.norm()


def test_one_pass_into_the_main_gradient_equals_the_blocks(monkeypatch):
    """On CUDA the product's epilogue adds it to the main gradient; here a plain product and a sum do."""
    inputs = make_inputs(20, 16, 3000, dtype=torch.bfloat16)
    expected = with_gradients(ops.linear_cross_entropy, *inputs, chunk_size=7, scale=1.0)
    added = []

    def fp32_addmm_(total, left, right, *, alpha):
        added.append(left.shape)
        total += alpha * (left.float() @ right.float())

    monkeypatch.setattr(products, "supports_fp32_addmm", lambda *_: True)
    monkeypatch.setattr(products, "fp32_addmm_", fp32_addmm_)
    ours = with_gradients(ops.linear_cross_entropy, *inputs, chunk_size=7, scale=1.0)
    assert added == [(3000, 7), (3000, 7), (3000, 6)]
    assert torch.equal(ours[1], expected[1])
    torch.testing.assert_close(ours[2], expected[2], rtol=2e-2, atol=1e-4)


def test_the_backward_refuses_another_gradient_than_gradient_scale():
    hidden, weight, targets = make_inputs(5)
    main = torch.zeros_like(weight)
    loss = ops.linear_cross_entropy(
        hidden.requires_grad_(), weight, targets, main_gradient=main, gradient_scale=0.25
    )
    with pytest.raises(ValueError, match="gradient_scale was 0.25, but .* another gradient of the loss: 0.5"):
        (loss * 0.5).backward()


# --- a vocabulary sharded over ranks -----------------------------------------------------------------------


class Exchanges:
    """All-gather between ranks that are threads of one process."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=20)
        self._sent: list = [None] * num_ranks
        self.num_calls = 0

    def of(self, rank: int):
        def exchange(local_logsumexp, local_target):
            self._sent[rank] = (local_logsumexp.clone(), local_target.clone())
            self.num_calls += rank == 0

            def wait() -> tuple[Tensor, Tensor]:
                self._barrier.wait()
                sums, targets = (torch.stack(parts) for parts in zip(*self._sent, strict=True))
                self._barrier.wait()
                return sums, targets

            return wait

        return exchange


def on_ranks(bounds, inputs, **options) -> tuple[list[tuple[Tensor, Tensor, Tensor]], int]:
    """(loss, dh, dW) of each rank, and the number of exchanges. With `main`, dW is the main gradient."""
    hidden, weight, targets = inputs
    exchanges = Exchanges(len(bounds))
    scale, main = options.pop("scale", 1.0), options.pop("main", False)

    def run(rank):
        first, last = bounds[rank]
        h, w = hidden.clone().requires_grad_(), weight[first:last].clone().requires_grad_()
        main_gradient = torch.zeros_like(w, dtype=reference.accumulation_dtype(w.dtype)) if main else None
        extra = {"main_gradient": main_gradient, "gradient_scale": float(scale)} if main else {}
        loss = ops.linear_cross_entropy(
            h, w, targets, vocabulary=(first, exchanges.of(rank)), **extra, **options
        )
        (loss * scale).sum().backward()
        dweight = main_gradient if main else w.grad
        assert h.grad is not None and dweight is not None
        return loss.detach(), h.grad, dweight

    with ThreadPoolExecutor(len(bounds)) as pool:
        return list(pool.map(run, range(len(bounds)))), exchanges.num_calls


@pytest.mark.parametrize("bounds", [[(0, 13)], [(0, 6), (6, 13)], [(0, 1), (1, 12), (12, 13)]])
@pytest.mark.parametrize(("reduction", "main"), [("sum", False), ("sum", True), ("none", False)])
def test_a_sharded_vocabulary_equals_the_whole(bounds, reduction, main):
    inputs = make_inputs(10)
    scale = torch.linspace(-1, 2, 10, dtype=torch.float64) if reduction == "none" else 0.37
    loss, dh, dw = with_gradients(ops.linear_cross_entropy, *inputs, scale=scale, reduction=reduction)
    ranks, num_calls = on_ranks(bounds, inputs, scale=scale, reduction=reduction, chunk_size=4, main=main)
    assert num_calls == 3
    for theirs in ranks:
        torch.testing.assert_close(theirs[0], loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.stack([r[1] for r in ranks]).sum(0), dh, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([r[2] for r in ranks]), dw, rtol=0, atol=1e-12)


def test_a_sharded_vocabulary_rounds_no_worse_than_the_plain_form():
    inputs = make_inputs(64, 32, 500, dtype=torch.bfloat16)
    hidden, weight, targets = inputs
    exact = with_gradients(ops.linear_cross_entropy, hidden.double(), weight.double(), targets, scale=1.0)
    naive = with_gradients(plain, *inputs, reduction="sum", scale=1.0)
    ranks, _ = on_ranks([(0, 200), (200, 500)], inputs)
    ours = [ranks[0][0], torch.stack([r[1].double() for r in ranks]).sum(0), torch.cat([r[2] for r in ranks])]
    assert_rounds_no_worse(ours[1:], naive[1:], exact[1:])


def test_an_unknown_word_fails():
    hidden, weight, targets = make_inputs(3)
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        ops.linear_cross_entropy(hidden, weight, targets + 1000)


def test_half_keeps_small_probabilities():
    """softmax(z) over many words lies below fp16's normal range; with a scaled loss no bits are lost."""
    hidden, weight, _ = make_inputs(4, 4, 200_000, dtype=torch.float16)
    hidden = hidden * 0.1
    targets = torch.tensor([0, 1, 2, -100])
    exact = with_gradients(ops.linear_cross_entropy, hidden.double(), weight.double(), targets, scale=4096.0)
    ours = with_gradients(ops.linear_cross_entropy, hidden, weight, targets, scale=4096.0)
    # The targets' rows, 200,000 times larger, would dominate the norm.
    exact[2], ours[2] = exact[2][3:], ours[2][3:]
    for a, truth in zip(ours, exact, strict=True):
        assert (a.double() - truth).norm() <= 1e-3 * truth.norm()


@pytest.mark.parametrize("main", [False, True])
def test_evaluation_computes_no_gradients(main, monkeypatch):
    """Only one product for each block of tokens."""
    hidden, weight, targets = make_inputs(8)
    options = {"main_gradient": torch.zeros_like(weight), "gradient_scale": 1.0} if main else {}
    calls = []
    linear = products.linear
    monkeypatch.setattr(products, "linear", lambda *a, **k: calls.append(1) or linear(*a, **k))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with torch.no_grad():
        ops.linear_cross_entropy(hidden, weight, targets, chunk_size=4, **options)
    assert len(calls) == 2
    if main:
        assert options["main_gradient"].count_nonzero() == 0
    ops.linear_cross_entropy(hidden, weight, targets, chunk_size=4, **options)
    assert len(calls) == 2 + 6


def test_only_needed_gradients_are_computed():
    hidden, weight, targets = make_inputs(5)
    loss = ops.linear_cross_entropy(hidden, weight.requires_grad_(), targets)
    with torch.no_grad():
        assert not ops.linear_cross_entropy(hidden, weight, targets).requires_grad
    ours = torch.autograd.grad(loss, weight)[0]
    torch.testing.assert_close(
        ours, with_gradients(ops.linear_cross_entropy, hidden, weight, targets, scale=1.0)[2]
    )


def test_no_tensor_of_all_logits_exists():
    """64 tokens and 1,000 words in blocks of 8: no tensor is larger than a block's 8 x 1,000 logits."""
    hidden, weight, targets = make_inputs(64, 4, 1000, dtype=torch.float32)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    # A dispatch mode does not see inside a registered op; with a main gradient the code runs unregistered.
    main = torch.zeros_like(weight)
    with Watch():
        ops.linear_cross_entropy(
            hidden.requires_grad_(), weight, targets, chunk_size=8, main_gradient=main, gradient_scale=1.0
        ).backward()
    assert largest == 8 * 1000


def test_all_ignored_and_override(monkeypatch):
    hidden, weight, _ = make_inputs(3)
    targets = torch.full((3,), -100)
    loss, dh, dw = with_gradients(ops.linear_cross_entropy, hidden, weight, targets, scale=1.0)
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
    main = torch.zeros_like(weight)
    with pytest.raises(ValueError, match="belong together"):
        ops.linear_cross_entropy(hidden, weight, targets, main_gradient=main)
    with pytest.raises(ValueError, match="main_gradient is torch.float32"):
        ops.linear_cross_entropy(hidden, weight, targets, main_gradient=main.float(), gradient_scale=1.0)
    with pytest.raises(ValueError, match="goes with reduction 'sum'"):
        ops.linear_cross_entropy(
            hidden, weight, targets, main_gradient=main, gradient_scale=1.0, reduction="none"
        )
    with pytest.raises(ValueError, match="chunk_size 0"):
        ops.linear_cross_entropy(hidden, weight, targets, chunk_size=0)
