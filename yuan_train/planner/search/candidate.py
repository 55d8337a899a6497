"""A plan that was found, with its cost; the order of plans, and what they use beside the cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.planner.evaluate.plan_cost import PlanCost
from yuan_train.planner.search.shapes import Shape

MAX_FINALISTS = 100
"""Fastest candidates that are kept when candidates are ranked."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, its cost, and the shape that it is a cut of."""

    plan: Plan
    cost: PlanCost
    shape: Shape

    @property
    def step_seconds(self) -> float:
        return self.cost.step_seconds

    @property
    def bounds(self) -> tuple[tuple[float, float], ...]:
        """Layers of each stage of the first pipeline."""
        return tuple(stage.layers for stage in self.plan.pipelines[0].stages)

    @property
    def cards(self) -> frozenset[Card]:
        return frozenset(card for stage in self.cost.stages for card in stage.cards)


def first_shape(plan: Plan, cost: PlanCost) -> Shape:
    """The shape of a plan's first pipeline; for mixed pipelines where no shape has a candidate."""
    return Shape(
        schedule=plan.schedule,
        micro_batch_size=plan.pipelines[0].micro_batch_size,
        num_micro_batches=plan.pipelines[0].num_micro_batches,
        slots=tuple((tuple(stage.replicas),) for stage in cost.stages if stage.pipeline == 0),
    )


def beside_cards(plan: Plan) -> int:
    """How much of the engine beside the cards a plan uses: 0 nothing, 1 optimizer state on hosts, 2
    activations too, 3 pages of parameters or disks."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if any(stage.parameter_offload or stage.optimizer_disk for stage in stages):
        return 3
    if any(stage.activation_offload for stage in stages):
        return 2
    return int(any(stage.optimizer_offload for stage in stages))


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest MAX_FINALISTS, fastest first; equals (to 9 digits) by fewer cards, then by `_text`. The
    fastest that uses no more beside the cards than some number (`beside_cards`) stays, however slow."""

    def seconds(candidate: Candidate) -> float:
        return candidate.step_seconds

    ordered = sorted(candidates, key=seconds)
    finalists = ordered[:MAX_FINALISTS]
    for candidate in ordered[MAX_FINALISTS:]:
        if beside_cards(candidate.plan) < min(beside_cards(one.plan) for one in finalists):
            finalists.append(candidate)
    return sorted(
        finalists,
        key=lambda c: (float(f"{seconds(c):.8e}"), len(c.plan.ranks), _text(c.plan)),
    )


def _text(plan: Plan) -> str:
    """A text that identifies a plan within a search."""
    return repr((plan.schedule, plan.optimizer_sharding, [r.device for r in plan.ranks], plan.pipelines))
