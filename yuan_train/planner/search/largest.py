"""The largest model of a shape that a cluster trains: as many layers as a plan fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from yuan_train.config.errors import NoPlanFits, SearchStopped
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.search_result import SearchResult

MOST_LAYERS = 4096
PROBE_SECONDS = 2.0
"""Time limit of a search that asks only whether a plan fits; undecided, it gets the whole limit."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The most layers with which a plan fits, and what it costs."""

    problem: PlanProblem
    result: SearchResult
    refusal: str
    """Why one more layer does not fit; empty at MOST_LAYERS."""


def find_largest(problem: PlanProblem, search: SearchConfig, *, micro_batch_size: int) -> Largest:
    """The largest model that differs from the problem's in its number of layers alone.

    Searches by bisection, for what a plan needs grows with its layers. Raises NoPlanFits if one layer is too
    much.
    """
    quick = replace(search, time_limit=min(search.time_limit, PROBE_SECONDS))

    def refusal(num_layers: int) -> str:
        try:
            try:
                search_plan(_with_layers(problem, num_layers), quick, micro_batch_size=micro_batch_size)
            except SearchStopped:
                search_plan(_with_layers(problem, num_layers), search, micro_batch_size=micro_batch_size)
        except NoPlanFits as error:
            return str(error)
        return ""

    fits, too_many, why = 0, 1, ""
    while not why and fits < MOST_LAYERS:
        why = refusal(too_many)
        if not why:
            fits, too_many = too_many, min(2 * too_many, MOST_LAYERS)
    if fits == 0:
        raise NoPlanFits(why)
    while why and too_many - fits > 1:
        middle = (fits + too_many) // 2
        found = refusal(middle)
        if found:
            too_many, why = middle, found
        else:
            fits = middle
    largest = _with_layers(problem, fits)
    result = search_plan(largest, search, micro_batch_size=micro_batch_size)
    return Largest(problem=largest, result=result, refusal=why)


def _with_layers(problem: PlanProblem, num_layers: int) -> PlanProblem:
    return replace(problem, model=replace(problem.model, num_layers=num_layers))
