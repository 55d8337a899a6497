"""Why a plan takes as long as it does: the cluster or the run is changed a little, and planned again.

Every answer is a plan, none a rule of thumb. What a change only adds cannot make the step longer: the plan
at hand is still lawful, and counts if the search finds none better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from yuan_train.config.cluster import Cluster, Link
from yuan_train.config.devices import GIB
from yuan_train.config.errors import ConfigError, NoPlanFits
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.search.search import search_plan

Limit = Literal["cards", "memory", "link", "filling", "granularity"]
LIMITS: dict[Limit, str] = {
    "cards": "the cards themselves",
    "memory": "memory",
    "link": "links",
    "filling": "filling and draining the pipelines",
    "granularity": "the granularity of layers",
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the cluster or the run, and what planning again found."""

    what: str
    limit: Limit
    adds: bool
    """Whether the plan at hand remains lawful."""
    tokens_per_second: float | None
    """None if no plan fits any more."""
    gain: float
    """In tokens per second, over the plan at hand; -1 if no plan fits."""


@dataclass(frozen=True)
class _Variant:
    what: str
    limit: Limit
    adds: bool
    problem: PlanProblem
    search: SearchConfig


def explain_plan(
    problem: PlanProblem, search: SearchConfig, *, micro_batch_size: int, step_seconds: float
) -> tuple[Change, ...]:
    """The changes, the most helpful first; `step_seconds` is the step of the plan at hand.

    Each change takes a search; `search.time_limit` holds for each.
    """
    tokens = problem.sequence_length * problem.global_batch_size / step_seconds
    found: list[Change] = []
    for variant in _variants(problem, search):
        batch = variant.problem.global_batch_size * variant.problem.sequence_length
        try:
            best = search_plan(variant.problem, variant.search, micro_batch_size=micro_batch_size).best
            rate = batch / best.step_seconds
        except (NoPlanFits, ConfigError):
            rate = 0.0
        rate = max(rate, tokens) if variant.adds else rate
        found.append(
            Change(
                what=variant.what,
                limit=variant.limit,
                adds=variant.adds,
                tokens_per_second=rate or None,
                gain=rate / tokens - 1.0,
            )
        )
    return tuple(sorted(found, key=lambda change: -change.gain))


def _variants(problem: PlanProblem, search: SearchConfig) -> Iterator[_Variant]:
    cluster = problem.cluster

    def other(what: str, limit: Limit, changed: Cluster, *, adds: bool = True) -> _Variant:
        return _Variant(what, limit, adds, replace(problem, cluster=changed), search)

    types = dict.fromkeys(card.type for card in cluster.cards)
    for name in types:
        yield other(f"one more {name}", "cards", _one_more(cluster, name))
        if len(cluster.cards) > 1:
            yield other(f"one {name} less", "cards", _one_less(cluster, name), adds=False)
        device = cluster.device_type(name)
        more = {**cluster.device_types, name: replace(device, memory=device.memory + GIB)}
        yield other(f"one GiB more on each {name}", "memory", replace(cluster, device_types=more))
    if any(group.network for group in cluster.nodes) and len(cluster.groups) > 1:
        nodes = tuple(replace(group, network=_twice(group.network)) for group in cluster.nodes)
        yield other("networks twice as fast", "link", replace(cluster, nodes=nodes))
    if any(group.link for group in cluster.nodes):
        nodes = tuple(replace(group, link=_twice(group.link)) for group in cluster.nodes)
        yield other("links inside nodes twice as fast", "link", replace(cluster, nodes=nodes))
    twice = replace(problem, global_batch_size=2 * problem.global_batch_size)
    yield _Variant("twice as many sequences per step", "filling", False, twice, search)
    if not search.half_layers and problem.profile is None:
        halves = replace(search, half_layers=True)
        yield _Variant("stages that may end in half a layer", "granularity", True, problem, halves)


def _twice(link: Link | None) -> Link | None:
    if link is None:
        return None
    stream = None if link.stream is None else 2 * link.stream
    return replace(link, bandwidth=2 * link.bandwidth, stream=stream)


def _one_more(cluster: Cluster, name: str) -> Cluster:
    """Another node of one card, with the network of the type's first node."""
    group = next(group for group in cluster.nodes if name in group.types)
    if group.network is None:
        # A cluster of one node: the card is put into it.
        link = group.link or Link(bandwidth=cluster.device_type(name).host_link)
        grown = replace(group, link=link).with_cards((*group.types, name))
        return replace(cluster, nodes=(grown,))
    names = set(cluster.groups)
    added = next(
        f"{group.name}-more{i}" for i in range(len(names) + 1) if f"{group.name}-more{i}" not in names
    )
    return replace(cluster, nodes=(*cluster.nodes, group.with_cards([name], name=added)))


def _one_less(cluster: Cluster, name: str) -> Cluster:
    """Without the last card of the last node of a type."""
    at = max(i for i, group in enumerate(cluster.nodes) if name in group.types)
    group = cluster.nodes[at]
    last = group.node_names[-1]
    if group.count == 1:
        rest = ()
    elif group.count == 2:
        rest = (replace(group, name=group.node_names[0], count=1),)
    else:
        rest = (replace(group, count=group.count - 1),)
    left = list(group.types)
    del left[len(left) - 1 - left[::-1].index(name)]
    smaller = (group.with_cards(left, name=last),) if left else ()
    nodes = (*cluster.nodes[:at], *rest, *smaller, *cluster.nodes[at + 1 :])
    kept = {node for other in nodes for node in other.node_names}
    links = tuple(link for link in cluster.links if {link.from_, link.to} <= kept)
    return replace(cluster, nodes=nodes, links=links)
