"""Causal attention: over documents in one call, and its backward on processors without bf16 instructions."""

import pytest
import torch
import torch.nn.functional as F
from yuan_kernels import attention, dispatch, ops, products

from tests.support.gradients import assert_rounds_no_worse
from tests.support.memory import kept_bytes

RANGES = ((0, 1), (1, 6), (6, 9), (9, 18))


def operands(dtype: torch.dtype, *, tokens: int = 9) -> tuple[torch.Tensor, ...]:
    """Queries and keys interleaved, as in the model."""
    generator = torch.Generator().manual_seed(0)
    query_key = torch.randn(2, tokens, 3, 2, 8, generator=generator).to(dtype)
    value = torch.randn(2, tokens, 3, 8, generator=generator).to(dtype)
    return tuple(t.requires_grad_() for t in (*query_key.unbind(3), value))


def defined(query, key, value, visible) -> torch.Tensor:
    """The definition, with a mask [.., T, T], of [.., T, N, D]."""
    scores = torch.einsum("...ind,...jnd->...nij", query, key) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("...nij,...jnd->...ind", weights, value)


def varlen_definition(query, key, value, cu_q, cu_k, max_q, max_k, *, window_size):
    """Torch's variable-length attention by its documentation, of [T, N, D]."""
    assert query.dim() == 3 and query.stride(-1) == 1 and window_size == (-1, 0)
    assert cu_q.dtype == torch.int32 and cu_q is cu_k and cu_q[0] == 0 and cu_q[-1] == query.shape[0]
    assert max_q == max_k == int(cu_q.diff().max())
    document = torch.bucketize(torch.arange(query.shape[0]), cu_q, right=True)
    visible = (document[:, None] == document).tril()
    return defined(query, key, value, visible)


def test_one_call_for_all_documents(monkeypatch):
    whole = operands(torch.float64)
    loop = ops.causal_attention(*whole, document_ranges=RANGES)
    monkeypatch.setattr(attention, "varlen_attention", lambda: varlen_definition)
    monkeypatch.setattr(dispatch, "implementation", lambda *_: "varlen")
    packed = ops.causal_attention(*whole, document_ranges=RANGES)
    dy = torch.randn(loop.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for a, b in zip(
        (packed, *torch.autograd.grad(packed, whole, dy)),
        (loop, *torch.autograd.grad(loop, whole, dy)),
        strict=True,
    ):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b)


def test_documents_are_isolated_and_none_is_nothing():
    query, key, value = operands(torch.float32)
    before = ops.causal_attention(query, key, value, document_ranges=RANGES)
    changed = value.detach().clone()
    changed[0, 2] = float("inf")
    after = ops.causal_attention(query, key, changed, document_ranges=RANGES)
    outside = [0, *range(6, 18)]
    assert torch.equal(before.flatten(0, 1)[outside], after.flatten(0, 1)[outside])
    nothing = ops.causal_attention(query[:0], key[:0], value[:0], document_ranges=())
    assert nothing.shape == (0, 9, 3, 8)


def test_the_borders_of_equal_documents_are_made_once():
    cpu = torch.device("cpu")
    assert attention._borders((1, 5, 3), cpu).tolist() == [0, 1, 6, 9]
    assert attention._borders((1, 5, 3), cpu) is attention._borders((1, 5, 3), cpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_call_agrees_with_the_loop_on_a_gpu(dtype):
    choice = dispatch.choose("document_attention", torch.device("cuda"), dtype, "regular")
    if torch.cuda.get_device_capability() >= (8, 0) and attention.varlen_attention() is not None:
        assert choice.implementation == "varlen", choice.reason
    else:
        assert choice.implementation == "loop"


# --- the backward without bf16 instructions ----------------------------------------------------------------


@pytest.fixture
def no_bf16(monkeypatch):
    dispatch.choose.cache_clear()
    monkeypatch.setattr(products, "cpu_multiplies_bf16", lambda: False)
    # Two of the three heads at a time.
    monkeypatch.setattr(attention, "_CONVERTED", 9 * 8 * 2)
    yield
    dispatch.choose.cache_clear()


def test_the_fp32_backward_rounds_no_worse(no_bf16):
    inputs = operands(torch.bfloat16)
    dy = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = ops.causal_attention(*inputs)
    assert type(ours.grad_fn).__name__ == "causal_attentionBackward"
    query, key, value = (t.transpose(1, 2) for t in inputs)
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    wide = tuple(t.detach().double().requires_grad_() for t in inputs)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    exact = defined(wide[0], wide[1], wide[2], visible)
    results = [
        (y, *torch.autograd.grad(y, leaves, dy.to(y.dtype)))
        for y, leaves in ((ours, inputs), (plain.transpose(1, 2), inputs), (exact, wide))
    ]
    assert {one.dtype for one in results[0]} == {torch.bfloat16}
    assert_rounds_no_worse(*results, most=1.1)


def test_the_fp32_backward_keeps_no_fp32_copies(no_bf16):
    inputs = operands(torch.bfloat16)
    kept = kept_bytes(lambda: ops.causal_attention(*inputs), beside=inputs)
    assert kept == inputs[2].nbytes + 2 * 9 * 3 * 4  # the result, and fp32 log-sum-exps


def test_where_torchs_own_backward_is_kept(no_bf16, monkeypatch):
    inputs = operands(torch.bfloat16)
    assert attention._needs_own_backward(*inputs)
    assert not attention._needs_own_backward(*operands(torch.float32))
    assert not attention._needs_own_backward(*(t.detach() for t in inputs))
    with torch.no_grad():
        assert not attention._needs_own_backward(*inputs)
    dispatch.choose.cache_clear()
    monkeypatch.setattr(attention, "own_backward_is_correct", lambda: False)
    assert not attention._needs_own_backward(*inputs)


def test_a_torch_without_the_private_operations(no_bf16, monkeypatch):
    choose = dispatch.choose.__wrapped__
    choice = choose("causal_attention", torch.device("cpu"), torch.bfloat16, "any")
    assert (choice.implementation, choice.reason) == ("blocks", "tested")
    monkeypatch.setattr(attention, "_forward", lambda *_: torch.ops.aten._no_such_operation())
    choice = choose("causal_attention", torch.device("cpu"), torch.bfloat16, "any")
    assert choice.implementation == "torch" and "failed its test: AttributeError" in choice.reason


# --- grouped queries on cards without flash attention ------------------------------------------------------


def grouped_operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 9, n, 8, generator=generator, dtype=torch.float64).requires_grad_() for n in (6, 2, 2)
    )
    return query, key, value


@pytest.fixture
def calls(monkeypatch):
    """The shapes that reach torch's attention, and whether its queries are grouped."""
    found = []
    real = F.scaled_dot_product_attention

    def record(query, key, value, *a, enable_gqa=False, **k):
        found.append((tuple(query.shape), tuple(key.shape), tuple(value.shape), enable_gqa))
        return real(query, key, value, *a, enable_gqa=enable_gqa, **k)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return found


@pytest.mark.parametrize("kind", ["whole", "documents", "cache"])
def test_repeated_heads_reach_the_kernel(kind, calls, monkeypatch):
    inputs = grouped_operands()
    visible = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]

    def attend() -> tuple[torch.Tensor, ...]:
        if kind == "cache":
            y = ops.masked_attention(*inputs, visible)
        else:
            y = ops.causal_attention(*inputs, document_ranges=RANGES if kind == "documents" else None)
        dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        return y, *torch.autograd.grad(y, inputs, dy)

    grouped = attend()
    assert calls and all(call[3] and call[1][1] == 2 for call in calls)
    calls.clear()
    monkeypatch.setattr(attention, "whole_form", lambda *_: "repeated")
    repeated = attend()
    assert calls and all(not call[3] and call[0] == call[1] == call[2] for call in calls)
    for a, b in zip(repeated, grouped, strict=True):
        torch.testing.assert_close(a, b)


def test_a_card_copies_the_borders_of_documents_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of pinned memory, without the host's waiting; a device without memory stands for the card."""
    pinned: list[torch.Tensor] = []
    copied: list[tuple[bool, dict[str, object]]] = []
    to = torch.Tensor.to

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def copy(tensor: torch.Tensor, *where: object, **how: object) -> torch.Tensor:
        copied.append((any(tensor is one for one in pinned), how))
        return to(tensor, *where, **how)  # pyright: ignore

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    attention._borders.cache_clear()  # pyright: ignore[reportPrivateUsage]
    for _ in "two layers":
        found = attention._borders((3, 2), torch.device("meta"))  # pyright: ignore[reportPrivateUsage]
    assert found.shape == (3,) and copied == [(True, {"non_blocking": True})]
    assert pinned[0].tolist() == [0, 3, 5]
