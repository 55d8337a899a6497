"""Other packages' norms: identified by their function, tested before use, used only on request."""

import logging
import sys
import types

import pytest
import torch
from torch import Tensor
from yuan_kernels import dispatch, ops, packages, reference

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def fresh_choices():
    dispatch.choose.cache_clear()
    yield
    dispatch.choose.cache_clear()


def install(monkeypatch, name: str, **attributes: object) -> None:
    """Install a fake module and its parent packages instead of any real ones."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:depth]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for attribute, value in attributes.items():
        setattr(sys.modules[name], attribute, value)


def liger(x: Tensor, w: Tensor, eps: float, *, offset: float, casting_mode: str, in_place: bool) -> Tensor:
    """Liger's signature over the definition; refuses the modes that compute something else."""
    assert (offset, casting_mode, in_place) == (0.0, "gemma", False)
    return reference.rms_norm(x, w, epsilon=eps)


def apex(x: Tensor, w: Tensor, normalized_shape: tuple[int, ...], *, eps: float) -> Tensor:
    assert normalized_shape == w.shape
    return reference.rms_norm(x, w, epsilon=eps)


def transformer_engine(
    x: Tensor, w: Tensor, eps: float, out: None, quantizer: None, otype: str, sm_margin: int, centred: bool
) -> tuple[Tensor, None, Tensor]:
    """TransformerEngine's forward kernel, of contiguous rows: (y, no mean, scale), without a gradient."""
    assert x.dim() == 2 and x.is_contiguous() and not torch.is_grad_enabled()
    assert (out, quantizer, sm_margin, centred) == (None, None, 0, False)
    assert otype == {torch.float32: "f4", torch.bfloat16: "b2", torch.float16: "f2"}[x.dtype]
    scale = torch.rsqrt(x.float().square().mean(-1) + eps)
    return reference.rms_norm(x, w, epsilon=eps), None, scale


def transformer_engine_backward(
    dy: Tensor, x: Tensor, scale: Tensor, w: Tensor, sm_margin: int, centred: bool
) -> tuple[Tensor, Tensor]:
    assert dy.shape == x.shape and dy.is_contiguous() and (sm_margin, centred) == (0, False)
    g, s, r = dy.float() * w.float(), x.float(), scale.unsqueeze(1)
    dx = r * g - s * r**3 * (g * s).mean(-1, keepdim=True)
    return dx.to(x.dtype), (dy.float() * s * r).sum(0).to(w.dtype)


CORRECT = {"liger": liger, "apex": apex, "transformer_engine": transformer_engine}


def install_norm(monkeypatch, name: str, function: object) -> None:
    package = packages.PACKAGES[name]
    types_ = types.SimpleNamespace(kFloat32="f4", kBFloat16="b2", kFloat16="f2")
    beside = {"rmsnorm_bwd": transformer_engine_backward, "DType": types_}
    install(
        monkeypatch,
        package.module,
        **{package.attribute: function},
        **(beside if name == "transformer_engine" else {}),
    )


def treat_cpu_as_gpu(monkeypatch) -> None:
    """Choose implementations for CPU tensors as if they were on a GPU."""
    monkeypatch.setattr(dispatch, "_on_cuda", lambda *_: ("blocks", "ours"))
    package_fault, choose = dispatch.package_fault, dispatch.choose
    norm_is_correct = dispatch._norm_is_correct
    monkeypatch.setattr(
        dispatch, "_norm_is_correct", lambda norm, _, dtype: norm_is_correct(norm, CPU, dtype)
    )
    monkeypatch.setattr(dispatch, "package_fault", lambda name, _, dtype: package_fault(name, CUDA, dtype))
    monkeypatch.setattr(dispatch, "choose", lambda op, _, *rest: choose(op, CUDA, *rest))


@pytest.mark.parametrize("name", CORRECT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_correct_norm_is_used_on_request(name, dtype, monkeypatch, caplog):
    called = []
    norm = CORRECT[name]
    install_norm(monkeypatch, name, lambda *a, **k: called.append(1) or norm(*a, **k))
    treat_cpu_as_gpu(monkeypatch)
    x, residual = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = torch.linspace(0.5, 2, 32).to(dtype)
    ours = ops.add_rms_norm(x, residual, weight, epsilon=1e-6)
    assert not called
    monkeypatch.setenv("YUAN_KERNELS", f"rms_norm={name}")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="yuan_kernels"):
        for _ in range(2):
            theirs = ops.add_rms_norm(x, residual, weight, epsilon=1e-6)
    assert len(called) == 3  # Its test, then two calls.
    assert [r.getMessage().rpartition(": ")[2] for r in caplog.records] == [f"{name} (requested, and tested)"]
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    torch.testing.assert_close(ops.rms_norm(theirs[1], weight, epsilon=1e-6), theirs[0], rtol=0, atol=0)
    assert ops.rms_norm(x[:0], weight, epsilon=1e-6).shape == (0, 32)


def overwrites(x, w, eps, **_):
    y = reference.rms_norm(x, w, epsilon=eps)
    with torch.no_grad():
        x.mul_(2)
    return y


def explode(*_, **__):
    raise OSError("libcudart.so.11: cannot open shared object file\nat all")


WRONG = {
    "the weight is an offset from 1": (
        lambda x, w, eps, **_: reference.rms_norm(x, 1 + w, epsilon=eps),
        "its results differ from the definition's",
    ),
    "correct values, no gradient through the statistics": (
        lambda x, w, eps, **_: x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + eps) * w,
        "its results differ from the definition's",
    ),
    "its input is changed": (overwrites, "its results differ from the definition's|modified by an inplace"),
    "it cannot run": (explode, "OSError: libcudart.so.11: cannot open shared object file$"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_norm_is_not_used(case, monkeypatch):
    function, reason = WRONG[case]
    install_norm(monkeypatch, "liger", function)
    treat_cpu_as_gpu(monkeypatch)
    monkeypatch.setenv("YUAN_KERNELS", "rms_norm=liger")
    y = ops.rms_norm(torch.ones(2, 16), torch.ones(16), epsilon=1e-6)
    torch.testing.assert_close(y, torch.ones(2, 16))
    choice = dispatch.choose("rms_norm", CUDA, torch.float32, "regular", "liger")
    assert choice.implementation == "blocks" and choice.reason.startswith("ours; not liger: ")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(choice.reason)


def test_an_apex_of_another_project_is_not_used(monkeypatch):
    """PyPI's has no such module; another might have the module but not the function."""
    install(monkeypatch, "apex")
    assert packages.find_norm("apex") is None
    install(monkeypatch, "apex.normalization.fused_layer_norm")
    assert packages.find_norm("apex") is None
    fault = dispatch.package_fault("apex", CUDA, torch.bfloat16)
    assert fault == "apex.normalization.fused_layer_norm.fused_rms_norm_affine is not installed"


def test_on_a_cpu_and_in_fp64_ours_is_used(monkeypatch):
    install_norm(monkeypatch, "liger", explode)
    monkeypatch.setenv("YUAN_KERNELS", "rms_norm=liger")
    assert ops.rms_norm(torch.ones(2, 16), torch.ones(16), epsilon=1e-6).shape == (2, 16)
    choice = next(c for c in ops.choices(CPU, torch.float32, hidden=16) if c.op == "rms_norm")
    assert choice.implementation == "blocks" and choice.reason.endswith("not liger: it is for CUDA devices")
    assert dispatch.package_fault("liger", CUDA, torch.float64) == "it is not used for torch.float64"


def test_relative_time_runs_forward_and_backward(monkeypatch):
    install_norm(monkeypatch, "liger", liger)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    calls = []

    def ours(x: Tensor, w: Tensor, epsilon: float) -> Tensor:
        calls.append(x.shape)
        return reference.rms_norm(x, w, epsilon=epsilon)

    assert packages.relative_time("liger", ours, CPU, torch.float32, hidden=16) > 0
    assert calls == [(4096, 16)] * 12
    assert set(ops.other_norms(CPU, torch.float32, hidden=16).values()) == {"it is for CUDA devices"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CORRECT)
def test_an_installed_norm_is_correct_on_a_gpu(name):
    if packages.find_norm(name) is None:
        pytest.skip(f"{name} is not installed")
    assert dispatch.package_fault(name, torch.device("cuda"), torch.bfloat16) is None
