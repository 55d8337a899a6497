"""The collectives that a sharded layer really makes, against those that the planner prices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.models import VARIANTS, tiny_model
from yuan_train.config.architecture import sharding_of
from yuan_train.config.devices import CATALOGUE
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.parallel import collectives
from yuan_train.parallel.tensor import ShardSpec, apply_tensor_parallel
from yuan_train.planner.costs.unit_costs import card_costs


class Counter:
    """Counts all-reduces instead of making them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, part: torch.Tensor, group: Any) -> torch.Tensor:
        self.count += 1
        return part.clone()

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


SHARED = [
    variant
    for variant in VARIANTS
    if all(n % 2 == 0 for n in tiny_model(variant).spec.tensor_sizes(tiny_model(variant)).values())
]
"""Models that a group of two can share: those without experts."""


@pytest.mark.parametrize("variant", SHARED)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_makes_the_all_reduces_that_the_planner_prices(
    variant: str, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter()
    monkeypatch.setattr(collectives, "_all_reduce", counter)
    model = tiny_model(variant)
    part = Transformer(model, layers=(0, 2), embedding=False, head=False, recompute=recompute)
    init_weights(part, seed=0)
    alone = Transformer(model, layers=(0, 2), embedding=False, head=False)
    init_weights(alone, seed=0)
    apply_tensor_parallel(part, ShardSpec(*sharding_of(model)), group=None)  # pyright: ignore[reportArgumentType]
    costs = card_costs(
        model,
        sequence_length=8,
        micro_batch_size=1,
        precision="fp32",
        recompute=recompute,
        type_name="A100-80G",
        device=CATALOGUE["A100-80G"],
        profile=None,
    )
    layer = costs.units[1]
    inputs = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        hidden = inputs.clone().requires_grad_()
        output = part(hidden)
        assert counter.take() == 2 * layer.forward_collectives
        output.square().sum().backward()
        assert counter.take() == 2 * layer.backward_collectives
        # A group of one rank: the gradient is that of the model alone.
        hidden_alone = inputs.clone().requires_grad_()
        alone(hidden_alone).square().sum().backward()
        assert hidden.grad is not None and hidden_alone.grad is not None
        torch.testing.assert_close(hidden.grad, hidden_alone.grad, rtol=1e-5, atol=1e-5)
