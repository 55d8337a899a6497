"""Peak bytes of a stage on each of its cards, by category. Never pooled over cards.

    M = parameters + gradients + optimizer + in_flight * activations + logits + buffers + reserved

The first four are sums over the stage's units. A critic adds its parameters, gradients and optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from yuan_train.config.devices import Precision
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import MemoryForecast
from yuan_train.planner.costs.unit_costs import CardCosts, UnitCost, without_critic
from yuan_train.planner.costs.workload import ELEMENT_BYTES
from yuan_train.schedule.schedules import MESSAGES_PER_EDGE


def stage_memory(
    units: Sequence[UnitCost],
    *,
    has_embedding: bool,
    has_head: bool,
    head_holds_embedding: bool,
    in_flight: int,
    boundary_bytes: float,
    reserved_bytes: float,
    optimizer_share: float = 1.0,
    packed_share: float = 0.0,
    critic_packed_share: float = 0.0,
) -> MemoryForecast:
    """Peak bytes of a stage that holds `units` in the model's order, embedding and head where it has them.

    `boundary_bytes` is one hidden state at the end of a stage; it is kept for each micro-batch in flight,
    and each edge has MESSAGES_PER_EDGE messages on the way (what a stage received is among its first unit's
    activations). With `head_holds_embedding`, the embedding matrix is the head's, and counts there: in this
    stage, or in another one of the card. The head's transient (blocks of logits) counts as logits, the
    largest of the other units' as buffers. `optimizer_share` is the share of the optimizer state that the
    card itself holds; `packed_share` is the share of its gradients that it holds twice, because the reduced
    ones lie in a buffer of their own, `critic_packed_share` that of a critic's.
    """
    stored = units[1:] if has_embedding and head_holds_embedding else units
    body = units[:-1] if has_head else units
    tail = units[-1:] if has_head else ()
    num_edges = (not has_embedding) + (not has_head)
    critics = [unit.critic for unit in units if unit.critic is not None]
    own = [without_critic(unit) for unit in stored] if critics else stored
    return MemoryForecast(
        parameters=math.fsum(unit.parameter_bytes for unit in own),
        gradients=(1.0 + packed_share) * math.fsum(unit.gradient_bytes for unit in own),
        optimizer=optimizer_share * math.fsum(unit.optimizer_bytes for unit in own),
        activations=in_flight * math.fsum(unit.activation_bytes for unit in units),
        logits=math.fsum(unit.transient_bytes for unit in tail),
        buffers=max((unit.transient_bytes for unit in body), default=0.0)
        + boundary_bytes * ((not has_head) * in_flight + num_edges * MESSAGES_PER_EDGE),
        reserved=reserved_bytes,
        critic=math.fsum(
            unit.parameter_bytes
            + (1.0 + critic_packed_share) * unit.gradient_bytes
            + optimizer_share * unit.optimizer_bytes
            for unit in critics
        )
        if critics
        else None,
    )


def scoring_bytes(
    model: ModelConfig, costs: CardCosts, precision: Precision, *, width: int = 1
) -> dict[str, float]:
    """Bytes of a reward model on each of `width` cards while it scores: all of it, and of one layer at a time
    at most what it would keep of a micro-batch for a backward. `costs` are the model's on such a card."""
    weights = model.parameters * ELEMENT_BYTES[precision] / width
    return {"weights": weights, "activations": costs.layer.activation_bytes}
