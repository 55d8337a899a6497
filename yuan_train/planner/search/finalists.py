"""The order of the plans that a search found, and what they use beside the cards."""

from __future__ import annotations

from collections.abc import Sequence

from yuan_train.config.plan import Plan
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.search.candidate import Candidate

MAX_FINALISTS = 100
"""Fastest candidates that are kept when candidates are ranked."""
WORTH_LEAVING = 0.03
"""What a plan must gain by default to use what has not run on CUDA yet (docs/ran_on.md): copies to hosts and
disks, and steps there."""


def beside_cards(plan: Plan) -> int:
    """How much of the engine beside the cards a plan uses: 0 nothing, 1 optimizer state on hosts, 2
    activations too, 3 pages of parameters or disks."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if any(stage.parameter_offload or stage.optimizer_disk for stage in stages):
        return 3
    if any(stage.activation_offload for stage in stages):
        return 2
    return int(any(stage.optimizer_offload for stage in stages))


def keep_to_cards(costs: Costs, ranked: Sequence[Candidate]) -> tuple[list[Candidate], Candidate | None]:
    """The plans without those that gain less than WORTH_LEAVING by what they use beside the cards, so that
    the fastest of the rest comes first; and the fastest plan, if it is not that one."""
    firsts: dict[int, Candidate] = {}
    for candidate in ranked:
        firsts.setdefault(beside_cards(candidate.plan), candidate)
    most = 0
    for level in sorted(firsts):
        seconds = firsts[level].step_seconds
        if most not in firsts or seconds * (1 + WORTH_LEAVING) <= firsts[most].step_seconds:
            most = level
    kept = [candidate for candidate in ranked if beside_cards(candidate.plan) <= most]
    return kept, None if not ranked or kept[0] is ranked[0] else ranked[0]


def rank(costs: Costs, candidates: Sequence[Candidate]) -> list[Candidate]:
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
