"""The ops under torch.library's own checks, fake tensors and torch.compile."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from yuan_kernels import ops


def draw(*shape: int, grad: bool = True, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_(grad)


def filter_inputs(hidden: int = 6) -> list[torch.Tensor]:
    n = hidden // 2
    return [draw(2, 5, hidden), draw(n, hidden, 2), draw(n), draw(hidden, n, 2), draw(hidden)]


def starts() -> torch.Tensor:
    return torch.tensor([[1, 0, 0, 1, 0], [0, 0, 1, 1, 0]], dtype=torch.bool)


TARGETS = torch.tensor([0, 3, -100, 8])
YUAN = torch.ops.yuan
CASES = {
    "rms_norm": lambda: (YUAN.rms_norm, (draw(2, 3, 8), draw(8), 1e-6)),
    "add_rms_norm": lambda: (YUAN.add_rms_norm, (draw(2, 3, 8), draw(2, 3, 8), draw(8), 1e-6)),
    "filter": lambda: (YUAN.localized_filter, (*filter_inputs(), starts(), None, None)),
    "filter_before": lambda: (
        YUAN.localized_filter,
        (*filter_inputs(), None, draw(2, 6), draw(2, 3)),
    ),
    "sum": lambda: (
        YUAN.linear_cross_entropy,
        (draw(4, 6), draw(9, 6), TARGETS, -100, 2, True, True),
    ),
    "losses": lambda: (YUAN.token_losses, (draw(4, 6), draw(9, 6), TARGETS, -100, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    torch.library.opcheck(*CASES[case]())


def test_fake_tensors_have_the_real_shapes():
    def run() -> list[torch.Tensor]:
        x, *weights = (t.detach() for t in filter_inputs())
        y = ops.localized_filter(x, *weights)
        normed, total = ops.add_rms_norm(y, x, torch.ones(6), epsilon=1e-6)
        loss = ops.linear_cross_entropy(normed[0], torch.ones(9, 6), torch.zeros(5, dtype=torch.int64))
        return [y, normed, total, loss]

    real = run()
    with FakeTensorMode():
        fake = run()
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake]


def test_compiled_without_a_break():
    """aot_eager traces forward and backward as inductor would, and compiles nothing."""
    inputs = [*filter_inputs(), draw(6), draw(9, 6)]
    targets = torch.tensor([0, 3, -100, 8, 2])

    def step(x, w1, b1, w2, b2, scale, head):
        y = ops.localized_filter(x, w1, b1, w2, b2, document_start=starts())
        normed, total = ops.add_rms_norm(y, x, scale, epsilon=1e-6)
        normed = ops.rms_norm(normed + total, scale, epsilon=1e-6)
        return ops.linear_cross_entropy(normed[0], head, targets)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    wanted, made = step(*inputs), compiled(*inputs)
    torch.testing.assert_close(made, wanted)
    grads = zip(torch.autograd.grad(made, inputs), torch.autograd.grad(wanted, inputs), strict=True)
    for a, b in grads:
        torch.testing.assert_close(a, b)
