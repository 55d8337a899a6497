"""The critic of PPO beside the policy: the policy's model with one number a token for a head.

It is trained on the same cards in turn with the policy, under the same plan. So its parameters, gradients and
optimizer state are there beside the policy's, and its activations are not.
"""

from __future__ import annotations

from dataclasses import replace

from yuan_train.config.model import ModelConfig
from yuan_train.planner.costs.unit_costs import UnitCost


def value_model(model: ModelConfig) -> ModelConfig:
    """The model of a policy's critic."""
    return replace(model, output="value")


def with_critic(unit: UnitCost, critic: UnitCost) -> UnitCost:
    """The unit with the states of a critic's beside it; of what they keep of a micro-batch the larger."""
    return replace(
        unit,
        parameter_bytes=unit.parameter_bytes + critic.parameter_bytes,
        gradient_bytes=unit.gradient_bytes + critic.gradient_bytes,
        optimizer_bytes=unit.optimizer_bytes + critic.optimizer_bytes,
        activation_bytes=max(unit.activation_bytes, critic.activation_bytes),
        transient_bytes=max(unit.transient_bytes, critic.transient_bytes),
        critic=critic,
    )


def without_critic(unit: UnitCost) -> UnitCost:
    """The unit with its own states alone."""
    if unit.critic is None:
        return unit
    return replace(
        unit,
        parameter_bytes=unit.parameter_bytes - unit.critic.parameter_bytes,
        gradient_bytes=unit.gradient_bytes - unit.critic.gradient_bytes,
        optimizer_bytes=unit.optimizer_bytes - unit.critic.optimizer_bytes,
        critic=None,
    )
