"""The registered ops under opcheck, fake tensors and torch.compile."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from yuan_kernels import ops


def random(*shape: int, grad: bool = True, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_(grad)


def filter_inputs(hidden: int = 6) -> list[torch.Tensor]:
    n = hidden // 2
    return [random(2, 5, hidden), random(n, hidden, 2), random(n), random(hidden, n, 2), random(hidden)]


def starts() -> torch.Tensor:
    return torch.tensor([[1, 0, 0, 1, 0], [0, 0, 1, 1, 0]], dtype=torch.bool)


SLOTS = torch.tensor([4, 0, 3, 5, 1, 2])
TARGETS = torch.tensor([0, 3, -100, 8])
YUAN = torch.ops.yuan
CASES = {
    "rms_norm": lambda: (YUAN.rms_norm, (random(2, 3, 8), random(8), 1e-6)),
    "add_rms_norm": lambda: (YUAN.add_rms_norm, (random(2, 3, 8), random(2, 3, 8), random(8), 1e-6)),
    "filter": lambda: (YUAN.localized_filter, (*filter_inputs(), starts(), None, None)),
    "filter_before": lambda: (YUAN.localized_filter, (*filter_inputs(), None, random(2, 6), random(2, 3))),
    "sum": lambda: (YUAN.linear_cross_entropy, (random(4, 6), random(9, 6), TARGETS, -100, 2, True, True)),
    "linear": lambda: (YUAN.linear, (random(2, 3, 8), random(5, 8), random(5))),
    "attention": lambda: (YUAN.causal_attention, tuple(random(1, 4, 2, 8) for _ in range(3))),
    "rotary": lambda: (YUAN.rotary, (random(2, 3, 2, 4), *(random(1, 3, 2, grad=False),) * 2, False)),
    "swiglu": lambda: (YUAN.swiglu, (random(2, 3, 8),)),
    "partly_rotated": lambda: (YUAN.rotary, (random(2, 3, 2, 8), *(random(1, 3, 2, grad=False),) * 2, False)),
    "wide_linear": lambda: (YUAN.wide_linear, tuple(random(n, 8, dtype=torch.bfloat16) for n in (3, 5))),
    "grouped_linear": lambda: (YUAN.grouped_linear, (random(6, 4), random(3, 5, 4), [2, 0, 4])),
    "grouped_weight_gradient": lambda: (
        YUAN.grouped_weight_gradient,
        (random(6, 5, grad=False), random(6, 4, grad=False), [2, 0, 4]),
    ),
    "router": lambda: (YUAN.attention_router_weights, (random(3, 12), SLOTS.view(3, 2) % 4)),
    "expert_rows": lambda: (YUAN.expert_rows, (random(3, 4), SLOTS, 2)),
    "combine_rows": lambda: (YUAN.combine_rows, (random(6, 4), random(3, 2), SLOTS)),
    "losses": lambda: (YUAN.token_losses, (random(4, 6), random(9, 6), TARGETS, -100, 2)),
}


# Of torch 2.14's own check, which asks results for their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
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


def test_compile_has_no_graph_break():
    """aot_eager traces forward and backward as inductor would, without compiling."""
    inputs = [*filter_inputs(), random(6), random(9, 6)]
    targets = torch.tensor([0, 3, -100, 8, 2])

    def step(x, w1, b1, w2, b2, scale, head):
        y = ops.localized_filter(x, w1, b1, w2, b2, document_start=starts())
        normed, total = ops.add_rms_norm(y, x, scale, epsilon=1e-6)
        normed = ops.rms_norm(normed + total, scale, epsilon=1e-6)
        return ops.linear_cross_entropy(normed[0], head, targets)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    expected, actual = step(*inputs), compiled(*inputs)
    torch.testing.assert_close(actual, expected)
    grads = zip(torch.autograd.grad(actual, inputs), torch.autograd.grad(expected, inputs), strict=True)
    for a, b in grads:
        torch.testing.assert_close(a, b)
