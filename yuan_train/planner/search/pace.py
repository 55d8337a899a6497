"""Plans for cards that compute at another pace than their type: one that throttles, or is shared.

A card's pace is how many times as long as forecast it computes, measured in a run. A slow card becomes a type
of its own for the search, with the rates of its type divided by that, and its measured times multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from yuan_train.config import profile as profiles
from yuan_train.config.cluster import Cluster
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan import Plan, uncatalogued_types
from yuan_train.config.run import HostCopies, SearchConfig
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.saves import search_beside_saves
from yuan_train.planner.search.what_if import with_nodes

Pace = Mapping[str, float]
"""By card (`b/0`), how many times as long as its type it computes; 1 where it is not named."""

LEAST = 0.1
"""What a pace is rounded to: cards that differ by less are of one type."""


def plan_at_pace(
    problem: PlanProblem,
    pace: Pace,
    search: SearchConfig,
    *,
    micro_batch_size: int,
    copies: HostCopies | None = None,
) -> Plan:
    """The fastest plan for cards of that pace, which the forecast counts, beside what saves copy to hosts.
    Raises as `search_plan`."""
    slowed, types = _with_pace(problem, pace)
    size, copies = micro_batch_size, copies or HostCopies()
    plan = search_beside_saves(slowed, search, micro_batch_size=size, copies=copies).best.plan
    ranks = tuple(replace(entry, type=types.get(entry.type, entry.type)) for entry in plan.ranks)
    own = uncatalogued_types(problem.cluster, {entry.type for entry in ranks})
    return replace(plan, ranks=ranks, device_types=own)


def step_at_pace(problem: PlanProblem, pace: Pace, plan: Plan) -> float:
    """Seconds of a plan's step on cards of that pace. Raises PlanError if they are not the plan's."""
    slowed, _ = _with_pace(problem, pace)
    types = {card.name: card.type for card in slowed.cluster.cards}
    ranks = tuple(replace(entry, type=types.get(entry.device, entry.type)) for entry in plan.ranks)
    return cost_plan(make_costs(slowed), replace(plan, ranks=ranks)).step_seconds


def _with_pace(problem: PlanProblem, pace: Pace) -> tuple[PlanProblem, dict[str, str]]:
    """The problem with a type for each pace of each type, and what these are types of."""
    factors: dict[str, tuple[str, float]] = {}
    changed: dict[str, tuple[str, ...]] = {}
    for node, group in problem.cluster.groups.items():
        names: list[str] = []
        for i, kind in enumerate(group.types):
            factor = round(pace.get(f"{node}/{i}", 1.0) / LEAST) * LEAST
            name = kind if abs(factor - 1.0) < LEAST else f"{kind} x {factor:.1f}"
            names.append(name)
            if name != kind:
                factors[name] = kind, factor
        if tuple(names) != group.types:
            changed[node] = tuple(names)
    nodes = {node: problem.cluster.groups[node].with_cards(own, name=node) for node, own in changed.items()}
    cluster = with_nodes(problem.cluster, nodes)
    slow = {name: _slowed(problem.cluster, kind, factor) for name, (kind, factor) in factors.items()}
    cluster = replace(cluster, device_types={**cluster.device_types, **slow})
    profile = problem.profile and _slowed_profile(problem.profile, factors)
    types = {name: kind for name, (kind, _) in factors.items()}
    return replace(problem, cluster=cluster, profile=profile), types


def _slowed(cluster: Cluster, kind: str, factor: float) -> DeviceType:
    device, rates = cluster.device_type(kind), ("fp32", "bf16", "fp16", "memory_bandwidth")
    known = {name: rate for name in rates if (rate := getattr(device, name)) is not None}
    return replace(device, **{name: rate / factor for name, rate in known.items()})


Timed = TypeVar("Timed", profiles.UnitProfile, profiles.StageStart)


def _slowed_profile(profile: profiles.Profile, factors: Mapping[str, tuple[str, float]]) -> profiles.Profile:
    """The profile, with what it has of a type also for the types that are slower."""

    def copies(own: tuple[profiles.Named, ...]) -> tuple[profiles.Named, ...]:
        return tuple(
            replace(entry, device_type=name)
            for name, (kind, _) in factors.items()
            for entry in own
            if entry.device_type == kind
        )

    slow = tuple(_slowed_entry(entry, factors[entry.device_type][1]) for entry in copies(profile.entries))
    return replace(
        profile,
        entries=(*profile.entries, *slow),
        hosts=(*profile.hosts, *copies(profile.hosts)),
        generation=(*profile.generation, *copies(profile.generation)),
    )


def _slowed_entry(entry: profiles.ProfileEntry, factor: float) -> profiles.ProfileEntry:
    def slow(own: Timed) -> Timed:
        forward, backward = own.forward_seconds * factor, own.backward_seconds * factor
        return replace(own, forward_seconds=forward, backward_seconds=backward)

    return replace(
        entry,
        embedding=slow(entry.embedding),
        layers=tuple(map(slow, entry.layers)),
        head=slow(entry.head),
        bare_layer=None if entry.bare_layer is None else slow(entry.bare_layer),
        start=slow(entry.start),
    )
