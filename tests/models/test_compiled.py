"""Compiled layers: the values, names and saved bytes of plain ones; one graph for all layers."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from yuan_train.models import transformer
from yuan_train.models.attention import find_resets
from yuan_train.models.layers import DropoutSeed
from yuan_train.models.transformer import Transformer, compile_blocks
from yuan_train.train.job import compiler_fault

# Torch looks at .grad of the hidden state while it traces, and hides its own warning, which is an error here.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


INDUCTOR = transformer.BACKEND


@pytest.fixture(autouse=True)
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces, differentiates and partitions as inductor does, without its code, which takes seconds."""
    monkeypatch.setattr(transformer, "BACKEND", "aot_eager")
    torch.compiler.reset()
    counters.clear()


def resets_of(tokens_BS: torch.Tensor) -> dict[str, Any]:
    return find_resets(tokens_BS, eod_id=9, reset_filter=True).arguments()


def step(model: Transformer, tokens_BS: torch.Tensor, *, seed: int = 5) -> dict[str, torch.Tensor]:
    """Loss and gradients with dropout, and with resets of positions and filter at document ends."""
    hidden_BSH = model(tokens_BS, dropout_seed=DropoutSeed(seed, seed), **resets_of(tokens_BS))
    loss = model.loss(hidden_BSH, tokens_BS)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    names = (name for name, _ in model.named_parameters())
    return {"loss": loss.detach()} | dict(zip(names, gradients, strict=True))


def saved_hidden_states(model: Transformer, tokens_BS: torch.Tensor) -> float:
    """Bytes that autograd saves per layer besides the weights, each storage once, in hidden states."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        hidden_BSH = model(tokens_BS, dropout_seed=DropoutSeed(5, 5), **resets_of(tokens_BS))
    return sum(saved.values()) / hidden_BSH.nbytes / len(model.blocks)


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def check(make_model: Any, tokens_BS: torch.Tensor, *, tolerance: float, **settings: Any) -> Transformer:
    settings |= {"hidden_dropout": 0.2}
    expected = step(make_model(**settings), tokens_BS)
    model = make_model(**settings)
    compile_blocks(model)
    with torch.no_grad():
        model(tokens_BS)
    assert counters["stats"]["unique_graphs"] == 0, "without gradients, layers run as they are"
    assert difference(step(model, tokens_BS), expected) < tolerance
    for seed in (6, 7):
        other = step(model, tokens_BS, seed=seed)
        assert difference(other, expected) > 2 * tolerance, "the masks must follow the seed"
    # Three layers and three micro-batches.
    assert counters["stats"]["unique_graphs"] == 1
    return model


@pytest.mark.parametrize(
    ("recompute", "dtype", "tolerance", "saved"),
    [
        ("none", torch.float64, 1e-12, (15, 20)),
        ("selective", torch.float64, 1e-12, (10, 14)),
        ("full", torch.float64, 1e-12, (1, 4)),
        ("none", torch.bfloat16, 0.05, (15, 20)),
    ],
)
def test_compiled_layers_compute_what_plain_ones_do(
    make_model: Any,
    tokens_BS: torch.Tensor,
    recompute: str,
    dtype: torch.dtype,
    tolerance: float,
    saved: tuple[float, float],
) -> None:
    model = check(make_model, tokens_BS, tolerance=tolerance, recompute=recompute, dtype=dtype)
    assert saved[0] < saved_hidden_states(model, tokens_BS) < saved[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(compiler_fault("cpu") is not None, reason="there is no C++ compiler")
def test_so_does_their_machine_code(
    make_model: Any, tokens_BS: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer, "BACKEND", INDUCTOR)
    check(make_model, tokens_BS, tolerance=1e-5, dtype=torch.float32)
