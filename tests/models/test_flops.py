"""The FLOP that planner and MFU count, against those that torch counts while a layer runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.models import VARIANTS, tiny_model
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.planner.costs.workload import TokenRows, model_work

TOKENS = 32


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_are_those_that_torch_counts(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the definitions: torch sees not into our kernels. It counts all of the causal scores, we half."""
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    config = tiny_model(variant, num_layers=1)
    work = model_work(config, TokenRows(1, TOKENS, "fp32"), logit_rows=TOKENS).layer
    scores = 2 * TOKENS * TOKENS * sum(half.scores for half in config.spec.sublayers(config))
    part = Transformer(config, embedding=False, head=False)
    init_weights(part, seed=0)
    hidden = torch.randn(1, TOKENS, config.hidden_size, requires_grad=True)
    # Of its forms of attention, torch counts on a CPU the one that multiplies batches of matrices.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            output = part(hidden)
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
    assert forward.get_total_flops() - attention(forward) == work.forward_flops - scores
    assert attention(forward) == 2 * scores
    assert backward.get_total_flops() - attention(backward) == work.backward_flops - 2 * scores


@pytest.mark.parametrize("variant", ["yuan", "llama"])
def test_flops_of_the_head(variant: str) -> None:
    config = tiny_model(variant, num_layers=1)
    model = Transformer(config, layers=(0, 0), embedding=False)
    hidden = torch.randn(1, TOKENS, config.hidden_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.logits(hidden)
    assert counter.get_total_flops() == TOKENS * config.head_forward_flops


def attention(counter: FlopCounterMode) -> int:
    """FLOP of scores and weighted values."""
    counts: dict[Any, int] = counter.get_flop_counts()["Global"]
    return sum(count for op, count in counts.items() if "bmm" in str(op))
