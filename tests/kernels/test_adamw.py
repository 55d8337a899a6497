"""AdamW over flat buffers against its definition and torch's."""

import pytest
import torch
from yuan_kernels import adamw, ops, reference


def numbers(step: int) -> ops.AdamWStep:
    return ops.AdamWStep(number=step, lr=0.02, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)


def make_buffers(size: int = 1000, *, dtype=torch.float32) -> list[torch.Tensor]:
    """master, exp_avg, exp_avg_sq."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return [master, torch.zeros_like(master), torch.zeros_like(master)]


def gradient_of(step: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(
        like
    )


@pytest.mark.parametrize("block", [7, 1 << 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("with_copy", [False, True])
def test_equals_the_definition(block, dtype, with_copy, monkeypatch):
    monkeypatch.setattr(adamw, "_BLOCK", block)
    ours, wanted = make_buffers(40, dtype=dtype), make_buffers(40, dtype=dtype)
    copies = [torch.zeros(40, dtype=torch.bfloat16) if with_copy else None for _ in range(2)]
    clip = torch.tensor(0.3)
    for step in (1, 2, 3):
        for (w, m, v), copy, form in zip(
            (ours, wanted), copies, (ops.adamw_step, reference.adamw_step), strict=True
        ):
            form(w, gradient_of(step, w), m, v, copy, numbers(step), clip)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    if with_copy:
        assert copies[0] is not None and torch.equal(copies[0], ours[0].bfloat16())


def test_unclipped_it_is_torchs_to_the_bit():
    master, exp_avg, exp_avg_sq = make_buffers()
    theirs = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW(
        [theirs], lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    for step in (1, 2, 3):
        theirs.grad = gradient_of(step, master)
        optimizer.step()
        gradient = gradient_of(step, master)
        ops.adamw_step(master, gradient, exp_avg, exp_avg_sq, None, numbers(step), torch.ones(()))
    assert torch.equal(master, theirs)


def test_override_and_errors(monkeypatch):
    master, exp_avg, exp_avg_sq = make_buffers(4)
    gradient, clip = torch.ones(4), torch.ones(())
    with pytest.raises(ValueError, match="step 0 is below 1"):
        ops.adamw_step(master, gradient, exp_avg, exp_avg_sq, None, numbers(0), clip)
    with pytest.raises(ValueError, match=r"gradient has shape \[3\]"):
        ops.adamw_step(master, gradient[:3], exp_avg, exp_avg_sq, None, numbers(1), clip)
    called = []
    monkeypatch.setattr(reference, "adamw_step", lambda *_, **__: called.append(1))
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    ops.adamw_step(master, gradient, exp_avg, exp_avg_sq, None, numbers(1), clip)
    assert called


def test_nothing_to_do():
    empty = torch.empty(0)
    ops.adamw_step(empty, empty, empty, empty, None, numbers(1), torch.ones(()))
