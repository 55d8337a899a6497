"""Plans that the compiled core does not price: each kind is found from the plans that are known so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from yuan_train.config.cluster import Card
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem
from yuan_train.planner.search.alternating import alternating_plans
from yuan_train.planner.search.candidate import Candidate, rank
from yuan_train.planner.search.expert_groups import expert_plans, may_divide_experts
from yuan_train.planner.search.local import half_layer_plans
from yuan_train.planner.search.paged import check_pages, paged_plans
from yuan_train.planner.search.shapes import Options

KINDS = (expert_plans, alternating_plans, half_layer_plans, paged_plans)


def with_special_plans(
    costs: Costs,
    cards: Sequence[Card],
    options: Options,
    known: Sequence[Candidate],
    stopped: Callable[[], bool],
) -> list[Candidate]:
    """The known plans and those of each kind that is searched, fastest first."""
    ranked = list(known)
    for find in KINDS:
        ranked = rank([*ranked, *find(costs, cards, options, ranked, stopped)])
    return ranked


def check_special(problem: PlanProblem, options: Options) -> None:
    """Raise ConfigError if the search keys ask for plans of a kind that the problem cannot have."""
    check_pages(problem, options)


def may_be_special(costs: Costs, cards: Sequence[Card], options: Options) -> bool:
    """Whether some kind is searched."""
    return options.half_layers or options.offload_parameters or may_divide_experts(costs, cards, options)
