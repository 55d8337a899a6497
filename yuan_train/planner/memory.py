"""Peak bytes of a stage on each of its cards, by category. Never pooled over cards.

    M = parameters + gradients + optimizer + in_flight * activations + logits + buffers + reserved

(planning notes: weights + gradients + optimizer + in_flight * act + transient + edge buffers + reserve.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from yuan_train.config.plan import MemoryForecast
from yuan_train.planner.timing import UnitCost

MESSAGES_PER_EDGE = 2
"""One being sent and one being received, beside what the micro-batches in flight keep."""


def in_flight(
    schedule: str,
    *,
    stage: int,
    num_stages: int,
    num_micro_batches: int,
    replicas: Sequence[int] = (),
    depths: Sequence[int] | None = None,
) -> int:
    """Most micro-batches whose forward has begun and whose backward has not ended, on stage 0, 1, ...

    1F1B: min(P - s, m); where stages have several replicas, those from s to the end share the depth; `depths`
    gives the stages others.
    GPipe: m. Zero bubble: min(P, m).
    """
    own = replicas[stage] if replicas else 1
    mine = -(-num_micro_batches // own)
    if schedule == "gpipe":
        return mine
    if schedule == "zero_bubble":
        return min(sum(replicas) if replicas else num_stages, mine)
    assert schedule == "1f1b", f"no count for schedule {schedule!r}"
    depth = sum(replicas[stage:]) if replicas else num_stages - stage
    depth = depths[stage] if depths else depth
    return min(-(-depth // own), mine)


def stage_memory(
    units: Sequence[UnitCost],
    *,
    has_embedding: bool,
    has_head: bool,
    tied: bool,
    in_flight: int,
    boundary_bytes: float,
    reserved_bytes: float,
    optimizer_share: float = 1.0,
    packed_share: float = 0.0,
) -> MemoryForecast:
    """Peak bytes of a stage that holds `units` in the model's order, embedding and head where it has them.

    `boundary_bytes` is one hidden state at the end of a stage; it is kept for each micro-batch in flight,
    and each edge has messages on the way (what came in is among the first unit's activations). A stage with
    both ends of a tied model holds the table once. The head's transient (blocks of logits) counts as logits,
    the largest of the other units' as buffers. `optimizer_share` is what a card itself holds of the
    optimizer's state; of `packed_share` it holds summed gradients once more, for they lie apart from its own.
    """
    once = units[1:] if tied and has_embedding and has_head else units
    body = units[:-1] if has_head else units
    tail = units[-1:] if has_head else ()
    num_edges = (not has_embedding) + (not has_head)
    return MemoryForecast(
        parameters=math.fsum(unit.parameter_bytes for unit in once),
        gradients=(1.0 + packed_share) * math.fsum(unit.gradient_bytes for unit in once),
        optimizer=optimizer_share * math.fsum(unit.optimizer_bytes for unit in once),
        activations=in_flight * math.fsum(unit.activation_bytes for unit in units),
        logits=math.fsum(unit.transient_bytes for unit in tail),
        buffers=max((unit.transient_bytes for unit in body), default=0.0)
        + boundary_bytes * ((not has_head) * in_flight + num_edges * MESSAGES_PER_EDGE),
        reserved=reserved_bytes,
    )
