"""How long the hosts may step what a plan offloads: budgets, tried one after another (`search.offload`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.search.candidate import Candidate
from yuan_train.planner.search.explore import MANY_CARDS, Found, solve_shapes
from yuan_train.planner.search.shapes import Options, Shape

SHARES, SHARES_OF_MANY = (1 / 2, 1 / 4, 1 / 8, 1 / 16), (1 / 4,)
"""Of the hosts' step in the best plan without a limit; the second ones with many cards."""
NUM_SHAPES_OF_MANY = 2
"""On many cards only so many shapes, those of the fastest plans, are cut again."""


def solve_with_hosts(
    costs: Costs, shapes: Sequence[Shape], options: Options, found: Found, stopped: Callable[[], bool]
) -> Found:
    """What was found without hosts, and the plans that offload optimizer state.

    First the hosts cost nothing, in the choice of cuts: what is then faster than the best plan shows what
    there is to gain. If nothing is, the others are not searched.
    """
    if stopped():
        return found
    best = min((c.step_seconds for c in found.candidates), default=math.inf)
    many = len(costs.problem.cluster.cards) > MANY_CARDS
    if many and best < math.inf and not is_short_of_memory(costs, found.candidates):
        return found
    if many and best < math.inf:
        ranked = sorted(found.candidates, key=lambda c: c.step_seconds)
        shapes = list(dict.fromkeys(c.shape for c in ranked))[:NUM_SHAPES_OF_MANY]

    def solve(host_seconds: float, shapes: Sequence[Shape]) -> Found:
        return solve_shapes(
            costs, shapes, replace(options, host_seconds=host_seconds), stopped, best_seconds=best
        )

    def offloading(found: Found) -> list[Candidate]:
        return [c for c in found.candidates if any(stage.host_bytes for stage in c.cost.stages)]

    unlimited = solve(math.inf, shapes)
    added = offloading(unlimited)
    # A shape that is too slow even if its hosts cost nothing stays so if they may do less.
    gaining = {c.shape for c in added if c.step_seconds - c.cost.update_seconds < best}
    if gaining:
        shapes = [shape for shape in shapes if shape in gaining]
        longest = min(added, key=lambda c: c.step_seconds).cost.update_seconds
        for share in SHARES_OF_MANY if many else SHARES:
            best = min([best, *(c.step_seconds for c in added)])
            added += offloading(solve(share * longest, shapes))
    plain = min((c.step_seconds for c in found.candidates), default=math.inf)
    faster = [c for c in added if c.step_seconds < plain]
    return Found(
        candidates=(*found.candidates, *faster),
        num_simulated=found.num_simulated + unlimited.num_simulated,
    )


def is_short_of_memory(costs: Costs, candidates: Sequence[Candidate]) -> bool:
    """Whether the best plan recomputes, or leaves a card out, which it may do for want of memory."""
    if not candidates:
        return True
    fastest = min(candidates, key=lambda c: c.step_seconds)
    recomputes = any(stage.num_recomputed for stage in fastest.cost.stages)
    return recomputes or len(fastest.plan.ranks) < len(costs.problem.cluster.cards)
