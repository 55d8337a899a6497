"""A plan that was found, with its cost."""

from __future__ import annotations

from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.planner.evaluate.plan_cost import PlanCost
from yuan_train.planner.search.shapes import Shape


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
