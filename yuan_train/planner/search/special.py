"""Plans that the compiled core does not price: each kind is found from the plans that are known so far.

It stands alone because it is the list to which a further kind is added.
"""

from __future__ import annotations

from collections.abc import Sequence

from yuan_train.planner.search.alternating import alternating_plans
from yuan_train.planner.search.candidate import Candidate, Space, rank
from yuan_train.planner.search.expert_groups import expert_plans, may_divide_experts
from yuan_train.planner.search.local import half_layer_plans
from yuan_train.planner.search.paged import check_pages, paged_plans

KINDS = (expert_plans, alternating_plans, half_layer_plans, paged_plans)


def with_special_plans(space: Space, known: Sequence[Candidate]) -> list[Candidate]:
    """The known plans and those of each kind that is searched, fastest first."""
    ranked = list(known)
    for find in KINDS:
        ranked = rank([*ranked, *find(space, ranked)])
    return ranked


def check_special(space: Space) -> None:
    """Raise ConfigError if the search keys ask for plans of a kind that the problem cannot have."""
    check_pages(space.costs.problem, space.options)


def may_be_special(space: Space) -> bool:
    """Whether some kind is searched."""
    return space.options.half_layers or space.options.offload_parameters or may_divide_experts(space)
