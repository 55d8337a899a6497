"""Bytes of a reward model on a card while it scores: a forward pass that keeps nothing."""

from __future__ import annotations

from yuan_train.config.devices import Precision
from yuan_train.config.model import ModelConfig
from yuan_train.planner.costs.unit_costs import CardCosts
from yuan_train.planner.costs.workload import ELEMENT_BYTES


def scoring_bytes(
    model: ModelConfig, costs: CardCosts, precision: Precision, *, width: int = 1
) -> dict[str, float]:
    """Of the whole model on `width` cards, and of one layer at a time: at most what it would keep of a
    micro-batch for a backward. `costs` are the model's on such a card."""
    weights = model.parameters * ELEMENT_BYTES[precision] / width
    return {"weights": weights, "activations": costs.layer.activation_bytes}
