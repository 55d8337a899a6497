"""The lower bounds of a search: which plans they cover, and how much work they may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from yuan_train.config.cluster import Card
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.search.bounds import any_bound
from yuan_train.planner.search.equal_bound import Scope
from yuan_train.planner.search.expert_groups import may_divide_experts
from yuan_train.planner.search.finalists import MAX_RESTRUCTURED_CARDS
from yuan_train.planner.search.lower_bounds import Bounds, lower_bounds
from yuan_train.planner.search.paged import MOST_CARDS
from yuan_train.planner.search.shapes import Options

WORK_PER_CARD, WORK_PER_PAIR = 300_000, 2_000
"""Budget of each bound of each kind of schedule, by cards and by their square, whichever is more: so grows
the search's own time, and no plan should wait for its bound much longer than for itself."""
WORK_PER_CARD_OF_FEW, LEAST_WORK = 3_500_000, 25_000_000
"""The same of few cards, whose search takes longer by card."""
LEAST_MIXED_WORK = 1e9
"""On many cards a smaller budget finds nothing more of unequal pipelines than is known without."""


def bound_plans(
    costs: Costs,
    cards: Sequence[Card],
    options: Options,
    *,
    best_seconds: float,
    stopped: Callable[[], bool],
) -> Bounds:
    """What no plan that the search may make can beat; `best_seconds` is the best plan's step."""
    # Beyond so many cards the search makes no pages, and memory is as it is without.
    pages = options.offload_parameters and len(cards) <= MOST_CARDS
    options = replace(options, offload_parameters=pages)
    few = len(costs.problem.cluster.cards) <= MAX_RESTRUCTURED_CARDS
    scope = Scope(
        schedules=options.polished_schedules if few else options.schedules,
        sizes=options.polished_sizes if few else options.micro_batch_sizes,
        any_replicas=few and options.any_replicas,
        uneven_shares=few,
    )
    least = min(any_bound(costs, cards, options, scope.sizes), best_seconds)
    if may_divide_experts(costs, cards, options) or stopped():
        # Groups of cards that divide experts are not among the stages that `search.lower_bounds` knows.
        return Bounds(equal_seconds=least, any_seconds=least, scope=scope, knows_memory=False)
    many = max(WORK_PER_CARD * len(cards), WORK_PER_PAIR * len(cards) ** 2)
    work = max(WORK_PER_CARD_OF_FEW * len(cards), LEAST_WORK) if few else many
    return lower_bounds(
        costs,
        cards,
        options,
        scope,
        least_seconds=least,
        best_seconds=best_seconds,
        work=work,
        mixed_work=2 * work if few else work if work >= LEAST_MIXED_WORK else 0.0,
        stopped=stopped,
    )
