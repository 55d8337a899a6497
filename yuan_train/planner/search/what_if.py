"""What another cluster, run or model would give: a problem is changed and planned again.

`explain_plan` changes the cluster or the run a little and says what gains; every answer is a plan, none a
rule of thumb. `rent_plan` leaves nodes out, one after the other: from the whole cluster on, each round leaves
out one node of each kind that is left, or all of a kind, and goes on from the rest whose plan trains most
tokens for its price. `find_largest` asks for more layers, `other_precision` for fp16 or bf16.

Saves copy a share of the trained state to each node's host, for a while or for good. What they copy depends
on the plan, so it is counted after a search; where a host has no room for it beside what the plan keeps
there, another search leaves that much room on every host (`search_beside_saves`).

A card's pace is how many times as long as forecast it computes, measured in a run: one that throttles, or is
shared. For `plan_at_pace` it becomes a type of its own, with the rates of its type divided by that, and its
measured times multiplied.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from yuan_train.config import profile as profiles
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import GIB, DeviceType, Precision
from yuan_train.config.errors import ConfigError, NoPlanFits, SearchStopped, YuanError
from yuan_train.config.plan import Plan, copied_bytes, uncatalogued_types
from yuan_train.config.run import HostCopies, SearchConfig, check_prices
from yuan_train.config.units import show_bytes
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.costs.workload import PlanProblem, node_host_bytes
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.search import LeftOut, SearchResult, search_plan

Limit = Literal["cards", "memory", "link", "filling", "granularity"]
LIMITS: dict[Limit, str] = {
    "cards": "the cards themselves",
    "memory": "memory",
    "link": "links",
    "filling": "filling and draining the pipelines",
    "granularity": "the granularity of layers",
}
MAX_RENTED = 24
"""Parts of a cluster that are planned at most."""
NO_COPIES = HostCopies()
"""Of a run whose saves copy nothing to hosts."""
HOUR = 3600.0
MOST_LAYERS = 4096
PROBE_SECONDS = 2.0
"""Time limit of a search that asks only whether a plan fits; undecided, it gets the whole limit."""


def plan_again(
    problem: PlanProblem, search: SearchConfig, size: int, copies: HostCopies = NO_COPIES, again: bool = False
) -> SearchResult | NoPlanFits | ConfigError:
    """What one search finds (or several, `again`) beside `copies`, or why it finds nothing."""
    try:
        return search_beside_saves(problem, search, micro_batch_size=size, copies=copies, again=again)
    except (NoPlanFits, ConfigError) as error:
        return error


def with_nodes(cluster: Cluster, changed: Mapping[str, NodeGroup | None]) -> Cluster:
    """The cluster with some nodes changed, or without those that are None; all others keep their names."""
    nodes: list[NodeGroup] = []
    for group in cluster.nodes:
        kept = [node for node in group.node_names if node not in changed]
        whole = len(kept) == group.count
        if whole or (len(kept) > 1 and kept == list(group.node_names[: len(kept)])):
            nodes.append(group if whole else replace(group, count=len(kept)))
            kept = []
        own: dict[str, NodeGroup | None] = {node: replace(group, name=node, count=1) for node in kept}
        own |= changed
        nodes += [other for node in group.node_names if (other := own.get(node)) is not None]
    names = {node for group in nodes for node in group.node_names}
    links = tuple(link for link in cluster.links if {link.from_, link.to} <= names)
    return replace(cluster, nodes=tuple(nodes), links=links)


# --- what would help -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A change of the cluster or the run, and what planning again found."""

    what: str
    limit: Limit
    tokens_per_second: float | None
    """None if no plan fits any more."""
    gain: float
    """In tokens per second, over the plan at hand; -1 if no plan fits."""


_Variant = tuple[str, Limit, bool, PlanProblem, SearchConfig]
"""What is changed, what that tells, whether the plan at hand stays lawful (and counts if the search finds no
better one), and what is searched then."""


def explain_plan(
    problem: PlanProblem,
    search: SearchConfig,
    *,
    micro_batch_size: int,
    step_seconds: float,
    copies: HostCopies = NO_COPIES,
) -> tuple[Change, ...]:
    """The changes, the most helpful first; `step_seconds` is the step of the plan at hand. Each change takes
    a search; `search.time_limit` holds for each."""
    tokens = problem.sequence_length * problem.global_batch_size / step_seconds
    found: list[Change] = []
    for what, limit, adds, own, keys in _variants(problem, search):
        result, rate = plan_again(own, keys, micro_batch_size, copies), tokens if adds else 0.0
        if isinstance(result, SearchResult):
            rate = max(rate, own.global_batch_size * own.sequence_length / result.best.step_seconds)
        found.append(Change(what, limit, rate or None, rate / tokens - 1.0))
    return tuple(sorted(found, key=lambda change: -change.gain))


def _variants(problem: PlanProblem, search: SearchConfig) -> Iterator[_Variant]:
    cluster = problem.cluster

    def other(what: str, limit: Limit, changed: Cluster, *, adds: bool = True) -> _Variant:
        return what, limit, adds, replace(problem, cluster=changed), search

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
    yield "twice as many sequences per step", "filling", False, twice, search
    if not search.half_layers and problem.profile is None:
        halves = replace(search, half_layers=True)
        yield "stages that may end in half a layer", "granularity", True, problem, halves


def _twice(link: Link | None) -> Link | None:
    return link and replace(link, bandwidth=2 * link.bandwidth, stream=link.stream and 2 * link.stream)


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
    group = next(group for group in reversed(cluster.nodes) if name in group.types)
    left, last = list(group.types), group.node_names[-1]
    del left[len(left) - 1 - left[::-1].index(name)]
    return with_nodes(cluster, {last: group.with_cards(left, name=last) if left else None})


# --- renting ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rented:
    """A part of the cluster and its best plan."""

    left_out: tuple[str, ...]
    """Nodes."""
    problem: PlanProblem
    """On the nodes that were tried; those without a card in the plan need not be rented."""
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
    copies: HostCopies = NO_COPIES,
    clock: Callable[[], float] = time.monotonic,
) -> Rent:
    """The plan for `search.objective`, of all parts of the cluster that are tried. `search.time_limit` holds
    for all of them together. Raises ConfigError without prices, NoPlanFits if no plan fits, or none ends in
    time."""
    check_prices(problem.cluster, search.objective)
    started = clock()

    def planned(left_out: tuple[str, ...]) -> Rented | NoPlanFits | ConfigError:
        keys = replace(search, time_limit=max(search.time_limit - (clock() - started), 0.01))
        own = replace(problem, cluster=with_nodes(problem.cluster, dict.fromkeys(left_out)))
        result = plan_again(own, keys, micro_batch_size, copies, again=not left_out)
        return result if not isinstance(result, SearchResult) else _rented(problem, own, result)

    whole = planned(())
    if not isinstance(whole, Rented):
        raise whole
    found, current, num_planned = [whole], whole, 1
    stopped = False
    while num_planned < MAX_RENTED and not stopped:
        tried: list[Rented] = []
        for more in _next_nodes(problem.cluster, current.left_out):
            stopped = clock() - started > search.time_limit
            if num_planned >= MAX_RENTED or stopped:
                break
            part = planned((*current.left_out, *more))
            num_planned += 1
            tried += [part] if isinstance(part, Rented) else []
        found += tried
        if not tried:
            break
        current = max(tried, key=lambda part: part.tokens_per_price)
    return Rent(chosen=_choose(found, search, num_steps), pareto=_pareto(found), stopped=stopped)


def _rented(problem: PlanProblem, own: PlanProblem, result: SearchResult) -> Rented:
    """What the plan of a part, `own`, costs: a node is rented whole, or not at all."""
    cluster, seconds = problem.cluster, result.best.step_seconds
    absent = (card for card in cluster.cards if card.node not in own.cluster.groups)
    left_out = (*result.left_out, *(LeftOut(card=card, reason="not worth their rent") for card in absent))
    used = {card.node for stage in result.best.cost.stages for card in stage.cards}
    price = sum(cluster.node_price(group) or 0.0 for node, group in cluster.groups.items() if node in used)
    return Rented(
        left_out=tuple(node for node in cluster.groups if node not in used),
        problem=own,
        result=replace(result, left_out=left_out),
        price_per_hour=price,
        tokens_per_price=problem.global_batch_size * problem.sequence_length / (price * seconds / HOUR),
    )


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
    kept = ranked[:1]
    for part in ranked[1:]:
        kept += [part] if part.price_per_step < kept[-1].price_per_step * (1 - 1e-9) else []
    return tuple(kept)


def _next_nodes(cluster: Cluster, left_out: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """What else to leave out: the last node of each group that has one, and whole groups of several."""
    rest = [[node for node in group.node_names if node not in left_out] for group in cluster.nodes]
    left = sum(map(len, rest))
    for own in rest:
        if own and left > 1:
            yield (own[-1],)
        if 1 < len(own) < left:
            yield tuple(own)


# --- the largest model -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The most layers with which a plan fits, and what it costs."""

    problem: PlanProblem
    result: SearchResult
    refusal: str
    """Why one more layer does not fit; empty at MOST_LAYERS."""


def find_largest(problem: PlanProblem, search: SearchConfig, *, micro_batch_size: int) -> Largest:
    """The largest model that differs from the problem's in its number of layers alone. Searches by bisection,
    for what a plan needs grows with its layers. Raises NoPlanFits if one layer is too much."""
    quick = replace(search, time_limit=min(search.time_limit, PROBE_SECONDS))

    def refusal(num_layers: int) -> NoPlanFits | ConfigError | None:
        own = _with_layers(problem, num_layers)
        found = plan_again(own, quick, micro_batch_size)
        if isinstance(found, SearchStopped):
            found = plan_again(own, search, micro_batch_size)
        return None if isinstance(found, SearchResult) else found

    fits, too_many, why = 0, 1, None
    while fits < MOST_LAYERS and (why := refusal(too_many)) is None:
        fits, too_many = too_many, min(2 * too_many, MOST_LAYERS)
    if fits == 0 and why is not None:
        raise why
    while why is not None and too_many - fits > 1:
        middle = (fits + too_many) // 2
        found = refusal(middle)
        fits, too_many, why = (middle, too_many, why) if found is None else (fits, middle, found)
    largest = _with_layers(problem, fits)
    result = search_plan(largest, search, micro_batch_size=micro_batch_size)
    return Largest(problem=largest, result=result, refusal="" if why is None else str(why))


def _with_layers(problem: PlanProblem, num_layers: int) -> PlanProblem:
    return replace(problem, model=replace(problem.model, num_layers=num_layers))


@dataclass(frozen=True, kw_only=True)
class OtherPrecision:
    """The fastest plan in the precision that the run does not have."""

    precision: Precision
    fp16_only: Mapping[str, int]
    """Cards without units for bf16, by type."""
    tokens_per_second: float | None
    """None if there is no such plan."""
    refusal: str
    """Why there is none; else empty."""


def other_precision(
    problem: PlanProblem, search: SearchConfig, *, micro_batch_size: int
) -> OtherPrecision | None:
    """Plan again in fp16 for bf16, or in bf16 for fp16; None where all cards are alike in that."""
    types = Counter(card.type for card in problem.cluster.cards)
    kinds = {name: problem.cluster.device_type(name) for name in types}
    fp16_only = {name: types[name] for name, kind in kinds.items() if kind.bf16 is None and kind.fp16}
    some_have_bf16 = any(kind.bf16 is not None for kind in kinds.values())
    if problem.precision not in ("bf16", "fp16") or not fp16_only or not some_have_bf16:
        return None
    precision: Precision = "fp16" if problem.precision == "bf16" else "bf16"
    speed, refusal = None, ""
    try:
        other = replace(problem, precision=precision)
        found = search_plan(other, search, micro_batch_size=micro_batch_size, again=False)
        speed = problem.global_batch_size * problem.sequence_length / found.best.step_seconds
    except YuanError as error:
        refusal = str(error).partition("\n")[0]
    return OtherPrecision(precision=precision, fp16_only=fp16_only, tokens_per_second=speed, refusal=refusal)


# --- beside saves -----------------------------------------------------------------------------------------


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
    problem: PlanProblem,
    search: SearchConfig,
    *,
    micro_batch_size: int,
    copies: HostCopies,
    again: bool = True,
) -> SearchResult:
    """As `search_plan`, with room on hosts for what saves copy there, and a note of it. If no such plan fits,
    the one that leaves too little, with a note that says so."""
    result, room = search_plan(problem, search, micro_batch_size=micro_batch_size, again=again), 0.0
    for _ in range(MOST_SEARCHES if copies.keys else 0):
        over = [use for use in host_uses(result, problem, copies) if use.over > 0 and use.kept]
        if not over:
            break
        room = max(room, *(use.copied for use in over))
        given = replace(problem, host_reserved=problem.host_reserved + int(room))
        try:
            result = search_plan(given, search, micro_batch_size=micro_batch_size, again=again)
        except NoPlanFits:
            break
    return with_saves(result, problem, copies)


def with_saves(result: SearchResult, problem: PlanProblem, copies: HostCopies) -> SearchResult:
    """A result with a note of what saves copy to the fullest host, if they do."""
    if not copies.keys:
        return result
    fullest = max(host_uses(result, problem, copies), key=lambda use: use.over)
    words = (
        f"saves ({copies.keys}) copy {show_bytes(fullest.copied)} to the host of {fullest.node}, beside "
        f"{show_bytes(fullest.kept)} of the plan, of {show_bytes(fullest.available)}"
    )
    if fullest.over > 0:
        words += f": more than it has; do without {copies.keys}, or set memory.host_reserved lower"
    return replace(result, notes=(*result.notes, words))


def host_uses(result: SearchResult, problem: PlanProblem, copies: HostCopies) -> Iterator[HostUse]:
    """What a plan and its saves take on the host of each node."""
    plan = result.best.plan
    # Of a card's stages each has what the whole card puts there.
    held = {card: stage.host_bytes for stage in result.best.cost.stages for card in stage.cards}
    for node in dict.fromkeys(card.node for card in held):
        state = sum(own for card, own in held.items() if card.node == node)
        available = max(0.0, node_host_bytes(problem.cluster, node) - problem.host_reserved)
        yield HostUse(node, state, copied_bytes(plan, node, copies), available)


# --- at another pace --------------------------------------------------------------------------------------


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
    copies: HostCopies = NO_COPIES,
) -> Plan:
    """The fastest plan for cards of that pace, which the forecast counts, beside what saves copy to hosts.
    Raises as `search_plan`."""
    slowed, types = _with_pace(problem, pace)
    # A run that has lost cards waits for it.
    found = search_beside_saves(slowed, search, micro_batch_size=micro_batch_size, copies=copies, again=False)
    plan = found.best.plan
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
