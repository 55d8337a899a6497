"""What experts need: products of groups of rows, the attention router, copies of tokens and their sums."""

import pytest
import torch
from yuan_kernels import dispatch, grouped_linear, ops, products, reference, self_test

from tests.support.gradients import with_gradients

COUNTS = (0, 5, 1, 0, 14)
CPU = torch.device("cpu")


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_groups_are_multiplied_as_defined(dtype):
    x, weight, dy = random(20, 12, dtype=dtype), random(5, 7, 12, dtype=dtype), random(20, 7, dtype=dtype)
    ours = with_gradients(lambda x, w: ops.grouped_linear(x, w, COUNTS), x, weight, scale=dy)
    form = lambda x, w: reference.grouped_linear(x, w, COUNTS)  # noqa: E731
    wide = with_gradients(form, x.double(), weight.double(), scale=dy.double())
    for a, b in zip(ours, wide, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(
            a.double(), b, rtol=0, atol=8 * torch.finfo(dtype).eps * b.abs().max().item()
        )
    assert not ours[2][0].any() and not ours[2][3].any(), "experts without tokens have no gradient"


def test_bf16_groups_use_the_fp32_blocks(monkeypatch):
    """On a processor without instructions for bf16, rounded once."""
    monkeypatch.setattr(products, "cpu_multiplies_bf16", lambda: False)
    monkeypatch.setattr(products, "_CONVERTED", 0)
    x, weight = random(20, 40, dtype=torch.bfloat16), random(5, 32, 40, dtype=torch.bfloat16)
    exact = reference.grouped_linear(x.double(), weight.double(), COUNTS)
    y = ops.grouped_linear(x, weight, COUNTS)
    large = exact.bfloat16()[-14:]
    assert (y[-14:] - large).count_nonzero() <= 1


def test_gradients_of_groups_are_added_unrounded():
    dy, x = random(20, 7, dtype=torch.bfloat16), random(20, 12, dtype=torch.bfloat16)
    total = torch.ones(5, 7, 12)
    ops.add_grouped_products_(total, dy, x, COUNTS)
    exact = torch.stack(
        [
            a.double().T @ b.double()
            for a, b in zip(dy.split(list(COUNTS)), x.split(list(COUNTS)), strict=True)
        ]
    )
    torch.testing.assert_close(total.double(), 1 + exact, rtol=0, atol=0.05)
    assert torch.equal(total[0], torch.ones(7, 12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_of_torch_agrees(dtype):
    """The form for recent GPUs runs on a CPU too; a gradient that is expanded, and no group with a row."""
    assert self_test.grouped_is_correct(CPU, dtype)
    weight = random(5, 16, 8, dtype=dtype)
    expanded = random(1, 8, dtype=dtype).expand(20, 8)
    found = grouped_linear.one_call(expanded, weight, COUNTS)
    torch.testing.assert_close(found, grouped_linear.loop(expanded, weight, COUNTS))
    assert ops.grouped_linear(expanded[:0], weight, [0] * 5).shape == (0, 16)


def test_the_card_decides(monkeypatch):
    monkeypatch.setattr(self_test, "grouped_is_correct", lambda *_: True)
    cuda = torch.device("cuda", 0)

    def fault(capability, dtype=torch.bfloat16, shape="regular"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        return dispatch.grouped_fault(cuda, dtype, shape)

    assert fault((9, 0)) is None
    assert "8.0 is below 9.0" in (fault((8, 0)) or "")
    assert "multiple of 16 bytes" in (fault((9, 0), shape="odd") or "")
    assert "float64" in (fault((9, 0), torch.float64) or "")
    monkeypatch.setattr(grouped_linear, "grouped_mm", lambda: None)
    assert "no grouped product" in (fault((9, 0)) or "")
    assert "CPU" in (dispatch.grouped_fault(CPU, torch.bfloat16, "regular") or "")


@pytest.mark.parametrize("counts", [(20,), (1, 2, 3, 4, 5)])
def test_counts_must_fit(counts):
    with pytest.raises(ValueError, match="counts of"):
        ops.grouped_linear(random(20, 12), random(5, 7, 12), counts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_router_equals_its_definition(dtype, monkeypatch):
    monkeypatch.setattr("yuan_kernels.router._TOKENS", 4)
    products_T3N = 2 * random(9, 15, dtype=dtype)
    scores = ops.attention_scores(products_T3N)
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :3]
    dw = random(9, 3, dtype=dtype)
    ours = with_gradients(lambda p: ops.attention_router_weights(p, chosen), products_T3N, scale=dw)
    plain = with_gradients(
        lambda p: reference.attention_scores(p).gather(1, chosen).softmax(-1), products_T3N, scale=dw
    )
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(scores, reference.attention_scores(products_T3N))


def test_wide_products_are_not_rounded():
    x, weight = random(4, 64, dtype=torch.bfloat16), random(6, 64, dtype=torch.bfloat16)
    dy = random(4, 6).float()
    ours = with_gradients(ops.wide_linear, x, weight, scale=dy)
    exact = with_gradients(torch.nn.functional.linear, x.double(), weight.double(), scale=dy.double())
    assert [t.dtype for t in ours] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for a, b, tolerance in zip(ours, exact, (1e-5, 2e-2, 2e-2), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_are_copied_and_summed_slot_by_slot(dtype):
    x, weights = random(6, 8, dtype=dtype), random(6, 3, dtype=reference.accumulation_dtype(dtype)).abs()
    # Some slots are another card's: their weights get no gradient here.
    order = torch.randperm(18, generator=torch.Generator().manual_seed(0))[:11]
    forms = []
    for module in (ops, reference):
        copies = with_gradients(lambda x, m=module: m.expert_rows(x, order, 3), x)
        sums = with_gradients(lambda r, w, m=module: m.combine_rows(r, w, order), copies[0], weights)
        forms.append((*copies, *sums))
    for a, b in zip(*forms, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-12, atol=1e-2)
    absent = torch.ones(18, dtype=torch.bool)
    absent[order] = False
    assert not forms[0][-1].flatten()[absent].any()


def test_a_head_may_be_rotated_in_part():
    x, angles = random(1, 3, 2, 12), random(1, 3, 2)
    ours = with_gradients(lambda x: ops.rotary(x, angles.cos(), angles.sin()), x, scale=x)
    first = with_gradients(lambda x: ops.rotary(x[..., :4], angles.cos(), angles.sin()), x, scale=x[..., :4])
    assert torch.equal(ours[0][..., :4], first[0]) and torch.equal(ours[0][..., 4:], x[..., 4:])
    assert torch.equal(ours[1][..., :4], first[1][..., :4])
    with pytest.raises(ValueError, match="cos has shape"):
        ops.rotary(x, random(1, 3, 7).cos(), random(1, 3, 7).sin())
