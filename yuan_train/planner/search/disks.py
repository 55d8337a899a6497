"""Optimizer state on the disks of nodes whose hosts have no room for it."""

from __future__ import annotations

import math
from dataclasses import replace

from yuan_train.config.plan import Plan
from yuan_train.planner.costs.host import slot_bytes
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.evaluate.plan_cost import cost_stages

STEPS = 1000
"""Fractions are multiples of one over this."""


def with_disks(costs: Costs, plan: Plan) -> Plan:
    """The plan with the least of each host's state on its node's disk, if any, with which the rest fits."""
    pipelines = [list(pipeline.stages) for pipeline in plan.pipelines]
    slots = slot_bytes(costs.problem.precision, math.inf)
    for cost in cost_stages(costs, plan):
        own = pipelines[cost.pipeline]
        over = cost.host_bytes - cost.host_capacity_bytes
        state = cost.host_bytes - (cost.leaving.host_bytes if cost.leaving else 0.0)
        if over > 0 and state > 0 and all(map(costs.has_disk, cost.cards)):
            over += slots * sum(other.replicas == own[cost.stage].replicas for other in own)
            fraction = min(STEPS, math.ceil(STEPS * over / state)) / STEPS
            own[cost.stage] = replace(own[cost.stage], optimizer_disk=fraction)
    changed = (
        replace(pipeline, stages=tuple(stages))
        for pipeline, stages in zip(plan.pipelines, pipelines, strict=True)
    )
    return replace(plan, pipelines=tuple(changed))
