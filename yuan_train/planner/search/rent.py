"""Plans by what they cost to rent: nodes are left out one after the other, and the rest is planned anew.

From the whole cluster on, each round leaves out one node of each kind that is left, or all of a kind, and
goes on from the rest whose plan trains most tokens for its price. What no other plan beats in both seconds
and price is the Pareto list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Cluster, NodeGroup
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.run import SearchConfig
from yuan_train.config.search_objective import check_prices
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.search_result import SearchResult

MAX_PLANNED = 24
"""Clusters that are planned at most."""
HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Rented:
    """A part of the cluster and its best plan."""

    left_out: tuple[str, ...]
    """Nodes."""
    result: SearchResult
    price_per_hour: float
    """Of the nodes that are rented, all their cards."""
    tokens_per_price: float

    @property
    def step_seconds(self) -> float:
        return self.result.best.step_seconds

    @property
    def price_per_step(self) -> float:
        return self.price_per_hour * self.step_seconds / HOUR


@dataclass(frozen=True, kw_only=True)
class Rent:
    """The part that the objective asks for, and those that no other beats in both seconds and price."""

    chosen: Rented
    pareto: tuple[Rented, ...]
    """The fastest first."""
    stopped: bool
    """Whether the time limit ended the search for parts."""


def rent_plan(
    problem: PlanProblem,
    search: SearchConfig,
    *,
    micro_batch_size: int,
    num_steps: int,
    clock: Callable[[], float] = time.monotonic,
) -> Rent:
    """The plan for `search.objective`, of all parts of the cluster that are tried.

    `search.time_limit` holds for all of them together. Raises ConfigError without prices, NoPlanFits if no
    plan fits, or none ends in time.
    """
    check_prices(problem.cluster, search.objective)
    started = clock()
    nodes = {node: replace(group, name=node, count=1) for node, group in problem.cluster.groups.items()}
    tokens = problem.global_batch_size * problem.sequence_length

    def planned(left_out: tuple[str, ...]) -> Rented | None:
        left = max(search.time_limit - (clock() - started), 0.01)
        cluster = without_nodes(problem.cluster, left_out)
        try:
            result = search_plan(
                replace(problem, cluster=cluster),
                replace(search, time_limit=left),
                micro_batch_size=micro_batch_size,
            )
        except NoPlanFits:
            return None
        # A node is rented whole; one without any card in the plan need not be rented.
        used = {stage_card.node for stage_card in result.best.cards}
        price = sum(cluster.node_price(group) or 0.0 for node, group in nodes.items() if node in used)
        seconds = result.best.step_seconds
        return Rented(
            left_out=tuple(node for node in nodes if node not in used),
            result=result,
            price_per_hour=price,
            tokens_per_price=tokens / (price * seconds / HOUR),
        )

    whole = planned(())
    if whole is None:
        search_plan(problem, search, micro_batch_size=micro_batch_size)
        raise NoPlanFits("no plan fits")
    found, current, num_planned = [whole], whole, 1
    stopped = False
    while num_planned < MAX_PLANNED and not stopped:
        tried: list[Rented] = []
        for more in _next_nodes(problem.cluster, current.left_out):
            stopped = clock() - started > search.time_limit
            if num_planned >= MAX_PLANNED or stopped:
                break
            part = planned((*current.left_out, *more))
            num_planned += 1
            tried += [part] if part is not None else []
        found += tried
        if not tried:
            break
        current = max(tried, key=lambda part: part.tokens_per_price)
    return Rent(chosen=_choose(found, search, num_steps), pareto=_pareto(found), stopped=stopped)


def _choose(found: list[Rented], search: SearchConfig, num_steps: int) -> Rented:
    if search.objective == "tokens_per_price":
        return max(found, key=lambda part: part.tokens_per_price)
    if search.objective == "step_time":
        return min(found, key=lambda part: part.step_seconds)
    assert search.deadline is not None, "the run file is checked"
    in_time = [part for part in found if part.step_seconds * num_steps <= search.deadline]
    if not in_time:
        fastest = min(part.step_seconds for part in found) * num_steps
        raise NoPlanFits(
            f"search.deadline: {search.deadline:.6g} s for {num_steps} steps (train.steps), but the fastest "
            f"plan takes {fastest:.6g} s; give a later deadline, fewer steps or more cards"
        )
    return min(in_time, key=lambda part: part.price_per_step)


def _pareto(found: list[Rented]) -> tuple[Rented, ...]:
    ranked = sorted(found, key=lambda part: (part.step_seconds, part.price_per_step))
    kept: list[Rented] = []
    for part in ranked:
        if not kept or part.price_per_step < kept[-1].price_per_step * (1 - 1e-9):
            kept.append(part)
    return tuple(kept)


def _next_nodes(cluster: Cluster, left_out: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """What else to leave out: the last node of each group that has one, and whole groups of several."""
    rest = [[node for node in group.node_names if node not in left_out] for group in cluster.nodes]
    if sum(map(len, rest)) < 2:
        return
    for own in rest:
        if own and sum(map(len, rest)) > 1:
            yield (own[-1],)
        if len(own) > 1 and len(own) < sum(map(len, rest)):
            yield tuple(own)


def without_nodes(cluster: Cluster, left_out: tuple[str, ...]) -> Cluster:
    """The cluster without these nodes; all others keep their names."""
    if not left_out:
        return cluster
    nodes: list[NodeGroup] = []
    for group in cluster.nodes:
        kept = [node for node in group.node_names if node not in left_out]
        if len(kept) == group.count:
            nodes.append(group)
        elif len(kept) > 1 and kept == list(group.node_names[: len(kept)]):
            nodes.append(replace(group, count=len(kept)))
        else:
            nodes += [replace(group, name=node, count=1) for node in kept]
    links = tuple(link for link in cluster.links if not {link.from_, link.to} & set(left_out))
    return replace(cluster, nodes=tuple(nodes), links=links)
