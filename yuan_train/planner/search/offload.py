"""Optimizer state on the hosts, chosen with the cut.

A cut that may count on t seconds of the hosts' optimizer step has more memory on every card: with h seconds
of a host's step by parameter and s bytes of state, t s / h bytes of its stages' state, whatever the stage. So

    needed(stage) - min(optimizer bytes(stage), t s / h)

decides whether a stage fits, and the cut is the same dynamic programming. The plan then offloads from each
card the smallest fraction that lets it fit. `host_budgets.py` tries several t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan, StagePlan
from yuan_train.planner.costs.away import most_away
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan, cost_stages
from yuan_train.planner.search.disks import STEPS, with_disks
from yuan_train.planner.search.shapes import Options, Shape


def offload_bytes(costs: Costs, shape: Shape, options: Options) -> NDArray[np.float64] | None:
    """[D]: bytes of optimizer state that each slot's cards may put on their hosts; None if none may."""
    if not options.host_seconds:
        return None
    state = STATE_BYTES[costs.problem.precision].optimizer
    groups = costs.topology.groups
    known: dict[tuple[str, str], float] = {}

    def parameters(card: Card) -> float:
        key = (card.type, groups[card.node].name)
        if key not in known:
            known[key] = most_away(costs, card, options.host_seconds, on_disk=options.offload_disk)
        return known[key]

    slots = ([card for group in slot for replica in group for card in replica] for slot in shape.slots)
    return np.array([state * min(map(parameters, cards)) for cards in slots])


def with_offload(costs: Costs, plan: Plan, *, on_disk: bool) -> tuple[Plan, PlanCost]:
    """The plan with the smallest fraction of each card's optimizer state on its host that lets it fit, as far
    as there is one, and its cost; `on_disk`: of that on a disk as little as its host has no room for."""
    pipelines = [list(pipeline.stages) for pipeline in plan.pipelines]
    for stage in cost_stages(costs, plan):
        over = stage.memory.total - stage.capacity_bytes
        if over > 0 and stage.memory.optimizer > 0:
            # Of a card with several stages, the same fraction of each: memory is that of the whole card.
            fraction = min(STEPS, math.ceil(STEPS * over / stage.memory.optimizer)) / STEPS
            own = pipelines[stage.pipeline]
            own[stage.stage] = replace(own[stage.stage], optimizer_offload=fraction)
    plan = _with_stages(plan, pipelines)
    if on_disk:
        plan = with_disks(costs, plan)
    return plan, cost_plan(costs, plan)


def _with_stages(plan: Plan, pipelines: Sequence[Sequence[StagePlan]]) -> Plan:
    changed = tuple(
        replace(pipeline, stages=tuple(stages))
        for pipeline, stages in zip(plan.pipelines, pipelines, strict=True)
    )
    return replace(plan, pipelines=changed)
