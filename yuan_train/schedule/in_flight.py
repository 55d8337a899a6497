"""How many micro-batches and messages a stage holds at once under each schedule."""

from __future__ import annotations

from collections.abc import Sequence

MESSAGES_PER_EDGE = 2
"""Buffers besides those of the micro-batches in flight: one message being sent, one being received."""


def in_flight(
    schedule: str,
    *,
    stage: int,
    num_stages: int,
    num_micro_batches: int,
    replicas: Sequence[int] = (),
    depths: Sequence[int] | None = None,
) -> int:
    """The most micro-batches in flight (forward begun, backward not ended) on a replica of stage s = `stage`.

    For P stages and m micro-batches: 1F1B min(P - s, m), GPipe m, zero bubble min(P, m). With `replicas`, the
    number of each stage's replicas, P - s is the number of replicas from s to the end, P that of all, and a
    stage's replicas share it and m, rounded up. `depths` gives the 1F1B depth of each stage instead of P - s.
    """
    num_replicas = replicas[stage] if replicas else 1
    per_replica = -(-num_micro_batches // num_replicas)
    if schedule == "gpipe":
        return per_replica
    if schedule == "zero_bubble":
        return min(sum(replicas) if replicas else num_stages, per_replica)
    assert schedule == "1f1b", f"no closed form for schedule {schedule!r}"
    depth = sum(replicas[stage:]) if replicas else num_stages - stage
    depth = depths[stage] if depths else depth
    return min(-(-depth // num_replicas), per_replica)
