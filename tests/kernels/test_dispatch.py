"""The choice of an op's implementation, and the tests that fast paths must pass before use."""

import logging

import pytest
import torch
from yuan_kernels import attention, dispatch, ops, products, self_test

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_choices():
    """Choices are cached for the life of a process; each test starts without."""
    dispatch.choose.cache_clear()
    products.onednn_is_faster.cache_clear()
    yield
    dispatch.choose.cache_clear()
    dispatch.forget_fallbacks()
    products.onednn_is_faster.cache_clear()


def test_a_choice_is_logged_once(caplog):
    # What fits one block has no choice on a CPU.
    x = torch.ones(1 << 13, 16)
    dispatch._say_cpu.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="yuan_kernels"):
        for _ in range(3):
            ops.rms_norm(x, torch.ones(16), epsilon=1e-6)
            ops.swiglu(x)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert line.startswith("kernels on the CPU: torch's and blocks, torch.float32")
    detail = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert len(detail) == 2 and detail[:1] == [
        "rms_norm on cpu, torch.float32, regular rows: blocks (Triton kernels are for CUDA devices)"
    ]


def test_choices_name_every_op(monkeypatch):
    choices = ops.choices(CPU, torch.bfloat16, hidden=64)
    assert [c.op for c in choices] == list(dispatch.OPS)
    found = {c.op: c.implementation for c in choices}
    assert found.pop("causal_attention") in ("torch", "blocks") and found.pop("add_product") == "torch"
    assert (found.pop("document_attention"), found.pop("grouped_linear")) == ("loop", "loop")
    assert set(found.values()) == {"blocks"}
    assert all(c.reason for c in choices)
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    assert {c.implementation for c in ops.choices(CPU, torch.bfloat16, hidden=64)} == {"reference"}


def fake_gpu(monkeypatch, *, capability=(9, 0), triton=True, varlen=True, correct=lambda *_: True) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda _: object() if triton else None)
    monkeypatch.setattr(self_test, "triton_is_correct", correct)
    monkeypatch.setattr(self_test, "varlen_is_correct", correct)
    monkeypatch.setattr(attention, "varlen_attention", lambda: object() if varlen else None)


CUDA = torch.device("cuda", 0)


def test_a_gpu_gets_tested_kernels(monkeypatch):
    fake_gpu(monkeypatch)
    choice = dispatch.choose("rms_norm", CUDA, torch.bfloat16, "regular")
    assert (choice.implementation, choice.reason) == ("triton", "tested")


def broken(*_):
    raise RuntimeError("no ptxas\nat all")


@pytest.mark.parametrize(
    ("gpu", "dtype", "shape", "reason"),
    [
        ({"triton": False}, torch.float16, "regular", "triton is not installed"),
        ({"capability": (6, 1)}, torch.float16, "regular", "compute capability 6.1 is below 7.0"),
        ({}, torch.float64, "regular", "no Triton kernel for torch.float64"),
        ({}, torch.float16, "odd", "not a multiple of 16"),
        ({"correct": lambda *_: False}, torch.float16, "regular", "its results differ from the definition's"),
        ({"correct": broken}, torch.float16, "regular", "failed its test: RuntimeError: no ptxas"),
    ],
)
def test_what_a_kernel_does_not_support_falls_back(gpu, dtype, shape, reason, monkeypatch):
    fake_gpu(monkeypatch, **gpu)
    choice = dispatch.choose("rms_norm", CUDA, dtype, shape)
    assert choice.implementation == "torch" and reason in choice.reason


def test_documents_take_one_call_on_a_gpu(monkeypatch):
    fake_gpu(monkeypatch)
    choice = dispatch.choose("document_attention", CUDA, torch.bfloat16, "regular")
    assert (choice.implementation, choice.reason) == ("varlen", "tested")


@pytest.mark.parametrize(
    ("gpu", "dtype", "head_dim", "reason"),
    [
        ({}, torch.float32, 64, "flash attention does not support torch.float32"),
        ({}, torch.float16, 60, "not a multiple of 8"),
        ({}, torch.float16, 512, "above 256"),
        ({"capability": (7, 5)}, torch.float16, 64, "compute capability 7.5 is below 8.0"),
        ({"varlen": False}, torch.float16, 64, "has no variable-length attention"),
        ({"correct": lambda *_: False}, torch.float16, 64, "failed its test: its results differ"),
        ({"correct": broken}, torch.float16, 64, "failed its test: RuntimeError: no ptxas"),
    ],
)
def test_documents_otherwise_take_a_call_each(gpu, dtype, head_dim, reason, monkeypatch):
    fake_gpu(monkeypatch, **gpu)
    shape = dispatch.shape_class("document_attention", head_dim)
    choice = dispatch.choose("document_attention", CUDA, dtype, shape)
    assert choice.implementation == "loop" and reason in choice.reason


@pytest.mark.parametrize(
    ("capability", "form"), [((7, 0), "repeated"), ((7, 5), "repeated"), ((8, 0), "torch"), ((9, 0), "torch")]
)
def test_cards_without_flash_attention_repeat_heads(capability, form, monkeypatch):
    fake_gpu(monkeypatch, capability=capability)
    assert dispatch.choose("causal_attention", CUDA, torch.float16, "any").implementation == form
    assert attention.whole_form(CUDA, torch.float16) == form
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    assert attention.whole_form(CUDA, torch.float16) == "torch"


def test_ranks_may_fall_back_together(monkeypatch):
    fake_gpu(monkeypatch)
    rows = {"rms_norm": (64, 8), "document_attention": (64,), "swiglu": (64, 8)}
    chosen = ops.choose_all(CUDA, torch.bfloat16, rows)
    assert [(c.op, c.shape, c.implementation) for c in chosen] == [
        ("rms_norm", "regular", "triton"),
        ("rms_norm", "odd", "torch"),
        ("document_attention", "regular", "varlen"),
        ("swiglu", "any", "triton"),
    ]
    for choice in chosen:
        ops.fall_back(choice, "rank 3 has no triton")
    fallen = ops.choose_all(CUDA, torch.bfloat16, rows)
    assert [c.implementation for c in fallen] == ["torch", "torch", "loop", "torch"]
    assert dispatch.implementation("swiglu", torch.ones(1, 64)) == "blocks", "another device's is as it was"
    ops.forget_fallbacks()
    assert ops.choose_all(CUDA, torch.bfloat16, rows) == chosen


@pytest.mark.parametrize(
    ("hidden", "shape"), [(16, "regular"), (2048, "regular"), (17, "odd"), (0, "odd"), (1 << 20, "odd")]
)
def test_shape_classes(hidden, shape):
    assert dispatch.shape_class("rms_norm", hidden) == shape
    assert dispatch.shape_class("swiglu", hidden) == "any"


# --- fp32 products through oneDNN --------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products(fast, with_out, with_bias, monkeypatch):
    if fast and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(products, "_LARGE", 0)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: fast)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 17, generator=generator) for n in (5, 7))
    bias = torch.randn(7, generator=generator) if with_bias else None
    out = torch.empty(5, 7) if with_out else None
    expected = torch.nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double())
    for left, right in ((x, w), (x.T.contiguous().T, w.T.contiguous().T)):
        actual = products.linear(left, right, bias, out=out)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
        assert out is None or actual.data_ptr() == out.data_ptr()
    torch.testing.assert_close(products.product(x, w.T).double(), (x @ w.T).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_ops_through_onednn_round_no_worse(monkeypatch):
    """The filter and cross-entropy in fp32, with every product through the fast path."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 40, 24), (12, 24, 2), (12,), (24, 12, 2), (24,), (5000, 24)
    inputs = [torch.randn(*shape, generator=generator) for shape in shapes]
    targets = torch.randint(5000, (80,), generator=generator)

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        y = ops.localized_filter(*leaves[:5])
        loss = ops.linear_cross_entropy(y.flatten(0, 1), leaves[5], targets, chunk_size=30)
        return torch.autograd.grad(loss, leaves)

    truth, plain = gradients(torch.float64), gradients(torch.float32)
    calls = []
    onednn = products._onednn
    monkeypatch.setattr(products, "_LARGE", 0)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "_onednn", lambda *a: calls.append(1) or onednn(*a))
    for a, b, exact in zip(gradients(torch.float32), plain, truth, strict=True):
        assert (a.double() - exact).norm() <= 2 * (b.double() - exact).norm()
    assert len(calls) > 6


@pytest.mark.parametrize(
    ("correct", "untuned", "chosen"),
    [
        (lambda: True, True, True),
        (lambda: True, False, False),
        (lambda: False, True, False),
        (broken, True, False),
    ],
)
def test_the_fast_path_must_be_correct_and_faster(correct, untuned, chosen, monkeypatch):
    monkeypatch.setattr(products, "_onednn_is_correct", correct)
    monkeypatch.setattr(products, "_mkl_is_untuned", lambda: untuned)
    assert products.onednn_is_faster() is chosen
    assert ops.fp32_products() == ("oneDNN" if chosen else "torch")


def test_the_test_of_the_fast_path_runs_here():
    if torch.backends.mkldnn.is_available():
        assert products._onednn_is_correct()
    assert products._mkl_is_untuned() in (True, False)


def test_products_are_added_in_one_pass_on_cuda_once_tested(monkeypatch):
    assert not products.supports_fp32_addmm(CPU, torch.bfloat16)
    for correct, chosen in ((lambda *_: True, True), (lambda *_: False, False), (broken, False)):
        dispatch.choose.cache_clear()
        monkeypatch.setattr(products, "fp32_addmm_is_correct", correct)
        assert products.supports_fp32_addmm(CUDA, torch.bfloat16) is chosen
    assert not products.supports_fp32_addmm(CUDA, torch.float32)


def test_the_test_of_one_pass_detects_16_bit_sums(monkeypatch):
    def fp32_addmm_(total, left, right, *, alpha, rounded=False):
        product = left.float() @ right.float() * alpha
        total += product.bfloat16() if rounded else product

    def fp32_mm(left, right, *, rounded=False):
        product = left.float() @ right.float()
        return product.bfloat16().float() if rounded else product

    monkeypatch.setattr(products, "fp32_addmm_", fp32_addmm_)
    monkeypatch.setattr(products, "fp32_mm", lambda *a: fp32_mm(*a, rounded=True))
    assert not products.fp32_addmm_is_correct(CPU, torch.bfloat16)
    monkeypatch.setattr(products, "fp32_mm", fp32_mm)
    assert products.fp32_addmm_is_correct(CPU, torch.bfloat16)
    monkeypatch.setattr(products, "fp32_addmm_", lambda *a, **k: fp32_addmm_(*a, **k, rounded=True))
    assert not products.fp32_addmm_is_correct(CPU, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_pass_is_correct_on_a_gpu():
    assert products.fp32_addmm_is_correct(torch.device("cuda"), torch.float16)


def test_small_products_and_other_dtypes_stay_with_torch(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", broken)
    small, wide = torch.ones(2, 3), torch.ones(300, 300, dtype=torch.float64)
    assert products.linear(small, small).shape == (2, 2)
    assert products.linear(wide, wide).shape == (300, 300)


def test_the_variable_is_looked_up_once_where_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    with dispatch.variable_held():
        monkeypatch.setenv("YUAN_KERNELS", "reference")
        assert not dispatch.reference_selected()
    assert dispatch.reference_selected()
