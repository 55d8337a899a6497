"""Plans, profiles and seconds that tests of the planner write by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from yuan_train.config.cluster import Card
from yuan_train.config.plan import PipelinePlan, Plan, RankPlan, StagePlan
from yuan_train.config.profile import ProfileEntry, UnitProfile
from yuan_train.planner.costs.unit_costs import Costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.simulator import StageTimes
from yuan_train.planner.search.candidate import Candidate, shape_of_plan

Replicas = tuple[tuple[int, ...], ...]


def pipeline(
    count: int, stages: Sequence[tuple[Replicas, float]], size: int = 1, **keys: Any
) -> PipelinePlan:
    """A pipeline of `count` micro-batches; of each stage its replicas and number of layers. `keys` are of all
    its stages."""
    ends = [0, *itertools.accumulate(layers for _, layers in stages)]
    made = (
        StagePlan(replicas=replicas, layers=layers, **keys)
        for (replicas, _), layers in zip(stages, itertools.pairwise(ends), strict=True)
    )
    return pipeline_of(count, tuple(made), size)


def pipeline_of(count: int, stages: Iterable[StagePlan], size: int = 1) -> PipelinePlan:
    """A pipeline of these stages, of which the first has the embedding and the last one the head."""
    first, *others = stages
    made = [replace(first, embedding=True), *others]
    made[-1] = replace(made[-1], head=True)
    return PipelinePlan(micro_batch_size=size, num_micro_batches=count, stages=tuple(made))


def plan_on(
    given: PlanProblem, *pipelines: PipelinePlan, cards: Sequence[Card] | None = None, **keys: Any
) -> Plan:
    """A plan whose ranks are the cards in turn, the problem's own where none are given."""
    count = 1 + max((rank for own in pipelines for stage in own.stages for rank in stage.ranks), default=-1)
    used = list(cards or given.cluster.cards)[:count]
    return Plan(
        cluster=given.cluster.name,
        model=given.model,
        sequence_length=given.sequence_length,
        global_batch_size=sum(own.num_sequences for own in pipelines),
        ranks=tuple(RankPlan(rank=r, device=card.name, type=card.type) for r, card in enumerate(used)),
        pipelines=pipelines,
        device_types=given.cluster.device_types,
        **keys,
    )


def candidate_of(costs: Costs, plan: Plan) -> Candidate:
    """A plan as the search has it."""
    cost = cost_plan(costs, plan)
    return Candidate(plan=plan, cost=cost, shape=shape_of_plan(plan, cost))


def stage_times(
    forward: Iterable[float], backward: Iterable[float], links: Iterable[float] = (), **more: Any
) -> StageTimes:
    """Seconds of stages, and of the messages over the links between them, the same both ways."""
    sends = tuple(links)
    return StageTimes(
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        send_activation_seconds=sends,
        send_gradient_seconds=sends,
        **more,
    )


def unit(forward: float, backward: float, *, state=1e6, kept=1e5, output=1e4, **more: Any) -> UnitProfile:
    """A unit's seconds, and bytes."""
    return UnitProfile(
        forward_seconds=forward,
        backward_seconds=backward,
        state_bytes=state,
        activation_bytes=kept,
        output_bytes=output,
        **more,
    )


def entry(device_type: str, own: UnitProfile, **more: Any) -> ProfileEntry:
    """A type of card on which every unit takes the same."""
    return ProfileEntry(device_type=device_type, embedding=own, layers=(own,), head=own, **more)
