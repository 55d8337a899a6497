"""What a stage's optimizer state away from its cards takes: bytes of host and disk, and seconds of a step.

Chunks come down, are stepped and go up side by side with reads and writes of the disk, so that the slowest of
them counts; the card steps its own part meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.config.plan import StagePlan
from yuan_train.planner.costs.host import (
    disk_bytes,
    disk_step_seconds,
    host_bytes,
    host_step_seconds,
    slot_bytes,
)
from yuan_train.planner.costs.plan_problem import Costs


@dataclass(frozen=True, kw_only=True)
class AwayCost:
    """What the state of each card of a stage takes away from it, and the seconds of its step."""

    update_seconds: float
    """Of the optimizer step that the next step waits for."""
    host_bytes: float = 0.0
    disk_bytes: float = 0.0


def away_cost(
    costs: Costs, stage: StagePlan, cards: Sequence[Card], num_parameters: float, *, card_seconds: float
) -> AwayCost:
    """Of `num_parameters` that each of `cards` steps; `card_seconds` by parameter on the card itself."""
    x, precision = stage.optimizer_offload, costs.problem.precision
    if not x:
        return AwayCost(update_seconds=num_parameters * card_seconds)
    on_disk = stage.optimizer_disk
    hosts = [costs.host_of(card) for card in cards]
    seconds = max(host_step_seconds(host, precision) for host in hosts)
    if on_disk:
        slowest = max(disk_step_seconds(costs.disk_of(card), precision) for card in cards)
        seconds = max(seconds, on_disk * slowest)
    on_host = num_parameters * x * host_bytes(precision) * (1.0 - on_disk)
    if on_disk:
        on_host += slot_bytes(precision, num_parameters * x * on_disk)
    return AwayCost(
        update_seconds=num_parameters * max((1.0 - x) * card_seconds, x * seconds),
        host_bytes=on_host,
        disk_bytes=num_parameters * x * on_disk * disk_bytes(precision),
    )


def most_away(costs: Costs, card: Card, host_seconds: float, *, on_disk: bool) -> float:
    """Parameters whose state a card may put on its host in so many seconds of its step; `on_disk`: what the
    host has no room for on the node's disk, if the cluster file gives it one."""
    precision, host = costs.problem.precision, costs.host_of(card)
    in_time = host_seconds / host_step_seconds(host, precision)
    on_host = host.memory_bytes / host_bytes(precision)
    if in_time <= on_host or not on_disk or not costs.has_disk(card):
        return min(in_time, on_host)
    beside = (host.memory_bytes - slot_bytes(precision, math.inf)) / host_bytes(precision)
    if beside < 0.0:
        return on_host
    disk = costs.disk_of(card)
    written = min(
        disk.capacity_bytes / disk_bytes(precision), host_seconds / disk_step_seconds(disk, precision)
    )
    return max(on_host, min(in_time, beside + written))
