"""Plans beside saves that copy a share of the trained state to each node's host, for a while or for good.

What they copy depends on the plan, so it is counted after a search; where a host has no room for it beside
what the plan keeps there, another search leaves that much room on every host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from yuan_train.config.errors import NoPlanFits
from yuan_train.config.plan import copied_bytes
from yuan_train.config.run import HostCopies, SearchConfig
from yuan_train.config.units import show_bytes
from yuan_train.planner.costs.plan_problem import PlanProblem, node_host_bytes
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.search_result import SearchResult

MOST_SEARCHES = 3
"""Room for the copies of one plan is mostly enough for those of the next."""


class HostUse(NamedTuple):
    """Bytes on a node's host: kept by the plan, copied by saves, and not left to other programs."""

    node: str
    kept: float
    copied: float
    available: float

    @property
    def over(self) -> float:
        """What it has no room for; not above 0 if it has."""
        return self.kept + self.copied - self.available


def search_beside_saves(
    problem: PlanProblem, search: SearchConfig, *, micro_batch_size: int, copies: HostCopies
) -> SearchResult:
    """As `search_plan`, with room on hosts for what saves copy there, and a note of it. If no such plan fits,
    the one that leaves too little, with a note that says so."""
    result, room = search_plan(problem, search, micro_batch_size=micro_batch_size), 0.0
    for _ in range(MOST_SEARCHES if copies.keys else 0):
        over = [use for use in host_uses(result, problem, copies) if use.over > 0 and use.kept]
        if not over:
            break
        room = max(room, *(use.copied for use in over))
        given = replace(problem, host_reserved=problem.host_reserved + int(room))
        try:
            result = search_plan(given, search, micro_batch_size=micro_batch_size)
        except NoPlanFits:
            break
    return with_saves(result, problem, copies)


def with_saves(result: SearchResult, problem: PlanProblem, copies: HostCopies) -> SearchResult:
    """A result with a note of what saves copy to the fullest host, if they do."""
    uses = list(host_uses(result, problem, copies)) if copies.keys else []
    if not uses:
        return result
    fullest = max(uses, key=lambda use: use.over)
    words = (
        f"saves ({copies.keys}) copy {show_bytes(fullest.copied)} to the host of {fullest.node}, beside "
        f"{show_bytes(fullest.kept)} of the plan, of {show_bytes(fullest.available)}"
    )
    if fullest.over > 0:
        words += f": more than it has; do without {copies.keys}, or set memory.host_reserved lower"
    return replace(result, notes=(*result.notes, words))


def host_uses(result: SearchResult, problem: PlanProblem, copies: HostCopies) -> Iterator[HostUse]:
    """What a plan and its saves take on the host of each node."""
    plan, kept = result.best.plan, dict[str, float]()
    for stage in result.best.cost.stages:
        for card in stage.cards:
            kept[card.node] = kept.get(card.node, 0.0) + stage.host_bytes
    for node, state in kept.items():
        available = max(0.0, node_host_bytes(problem.cluster, node) - problem.host_reserved)
        yield HostUse(node, state, copied_bytes(plan, node, copies), available)
