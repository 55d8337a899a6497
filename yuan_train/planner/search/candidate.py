"""What is searched, and plans found there: whether they are wanted, what they cost, and their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.config.express import is_expressible
from yuan_train.config.plan import Plan, unlike_owners
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.planner.costs.unit_costs import Costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.search.shapes import Options, Shape

MAX_FINALISTS = 100
"""Fastest candidates that are kept when candidates are ranked."""


@dataclass(frozen=True)
class TimeLimit:
    """When the search has to end."""

    clock: Callable[[], float]
    started: float
    seconds: float


@dataclass(frozen=True)
class Space:
    """What is searched, and until when."""

    costs: Costs
    cards: Sequence[Card]
    """That may be used."""
    options: Options
    limit: TimeLimit

    def is_over(self, share: float = 1.0) -> bool:
        """Whether that share of the time for it is."""
        return self.limit.clock() - self.limit.started > share * self.limit.seconds


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, its cost, and the shape that it is a cut of."""

    plan: Plan
    cost: PlanCost
    shape: Shape

    @property
    def step_seconds(self) -> float:
        return self.cost.step_seconds


def first_shape(plan: Plan, cost: PlanCost) -> Shape:
    """The shape of a plan's first pipeline; for mixed pipelines where no shape has a candidate."""
    return Shape(
        schedule=plan.schedule,
        micro_batch_size=plan.pipelines[0].micro_batch_size,
        num_micro_batches=plan.pipelines[0].num_micro_batches,
        slots=tuple((tuple(stage.replicas),) for stage in cost.stages if stage.pipeline == 0),
    )


def judge(space: Space, plan: Plan, shape: Shape | None = None) -> Candidate | None:
    """The plan with cost and shape (else its first pipeline's); None if it is not wanted or does not fit."""
    if not is_wanted(plan, space.options):
        return None
    cost = cost_plan(space.costs, plan)
    return Candidate(plan=plan, cost=cost, shape=shape or first_shape(plan, cost)) if cost.fits else None


def is_wanted(plan: Plan, options: Options) -> bool:
    """Whether a plan keeps the search keys and violates no constraint, no weights are stepped by unlike
    owners unless nothing else is asked for or cards share experts, and the engine that the options name can
    run it."""
    if not _keeps_keys(plan, options) or next(validate_plan(plan), None) is not None:
        return False
    # With pages of a host no state is sharded.
    spared = bool(plan.paged_layers) or plan.divides_experts
    if True in options.sharded and not spared and unlike_owners(plan) is not None:
        return False
    return not options.expressible or is_expressible(plan)


def _keeps_keys(plan: Plan, options: Options) -> bool:
    """Whether a plan has only what the search keys allow; hosts, disks and idle cards are not asked for."""
    counts, stages = options.num_micro_batches, plan.stages
    widths = {len(replica) for stage in stages for replica in stage.replicas}
    return (
        (plan.divides_experts or widths <= set(options.tensor))
        and (options.any_replicas or {len(stage.replicas) for stage in stages} <= set(options.replicas))
        and {stage.recompute for stage in stages if stage.num_blocks} <= set(options.recompute)
        and plan.schedule in options.all_schedules
        and (options.pipelines is None or len(plan.pipelines) in options.pipelines)
        and {p.micro_batch_size for p in plan.pipelines} <= set(options.all_sizes)
        and (counts is None or {p.num_micro_batches for p in plan.pipelines} <= set(counts))
    )


def beside_cards(plan: Plan) -> int:
    """What a plan uses beside cards: 0 nothing, 1 state on hosts, 2 activations too, 3 pages or disks."""
    tiers = (
        any(stage.optimizer_offload for stage in plan.stages),
        any(stage.activation_offload for stage in plan.stages),
        any(stage.parameter_offload or stage.optimizer_disk for stage in plan.stages),
    )
    return max(number * used for number, used in enumerate(tiers, 1))


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest MAX_FINALISTS, fastest first; equals (to 9 digits) by fewer cards, then by their text. The
    fastest that uses no more beside the cards than some number (`beside_cards`) stays, however slow."""

    ordered = sorted(candidates, key=lambda c: c.step_seconds)
    finalists = ordered[:MAX_FINALISTS]
    for candidate in ordered[MAX_FINALISTS:]:
        if beside_cards(candidate.plan) < min(beside_cards(one.plan) for one in finalists):
            finalists.append(candidate)
    return sorted(finalists, key=lambda c: (float(f"{c.step_seconds:.8e}"), len(c.plan.ranks), _text(c.plan)))


def _text(plan: Plan) -> str:
    """A text that identifies a plan within a search."""
    return repr((plan.schedule, plan.optimizer_sharding, [r.device for r in plan.ranks], plan.pipelines))
