"""The search for the fastest plan: what is found is ranked, chosen and reported.

The same input gives the same plan, byte for byte, unless the time limit ends the search; then the best plan
found so far is returned, and `SearchResult.stopped` says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.errors import ConfigError, NoPlanFits, SearchStopped
from yuan_train.config.load import without_garbage_collector
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.links import unmeasured
from yuan_train.planner.costs.unit_costs import Costs, make_costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import PlanCost, make_forecast
from yuan_train.planner.evaluate.stage_cost import StageCost
from yuan_train.planner.search import shortfall
from yuan_train.planner.search.candidate import (
    Candidate,
    keep_to_cards,
    passed_over,
    prefer_simple,
    simplicity_note,
)
from yuan_train.planner.search.find import Plans, Space, TimeLimit, even_split, find_plans
from yuan_train.planner.search.prove import Bound, lower_bound
from yuan_train.planner.search.shapes import Options, read_options

NUM_RUNNERS_UP = 4
BRIEF = 1 / 8
"""Of the effort, what a search that is not thorough takes."""
CLOSING_SECONDS_PER_CARD = 2e-4
"""Kept of a time limit to cost, check and report one plan."""
NO_VIRTUAL_STAGES = (
    "no plan fits search.schedule: no plan that fits can have virtual stages; each pipeline must have two "
    "stages or more, and each of these two layers or more. Add 1f1b to search.schedule, or allow fewer cards"
)
MOST_LAYERS = 10_000
"""Of a model that is planned for: the core counts a stage's layers in 16 bits."""
NONE_KEPT = "no plan fits the search keys: all plans met that fit the cards break some; loosen those given"


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A card that the plan does not use, and why."""

    card: Card
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The plan found, and what the report says about it."""

    best: Candidate
    """Its plan carries the forecast."""
    runners_up: tuple[Candidate, ...]
    even_split: Candidate | None
    """The naive plan: all cards in the cluster's order, layers divided evenly; None if there is none."""
    no_even_split: str
    """Why there is no even split; empty if there is one."""
    left_out: tuple[LeftOut, ...]
    lower_bound_seconds: float
    """No plan that the search might make takes less."""
    bound: Bound | None
    """How that is known; None if the plan is proven fastest."""
    exact: bool
    """Whether it is proven that no other plan of the searched space is faster in the simulation."""
    stopped: bool
    """Whether the time limit ended the search."""
    num_simulated: int
    notes: tuple[str, ...]
    """Sources of the numbers, one line per type of card."""


# The search keeps millions of small values without cycles: scanning them would take a quarter of the time.
@without_garbage_collector()
def search_plan(
    problem: PlanProblem,
    search: SearchConfig,
    *,
    micro_batch_size: int,
    thorough: bool = True,
    again: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """The fastest plan that fits, with its forecast.

    `micro_batch_size` is the default of `search.micro_batch_size`; what is not `thorough` tries much less;
    few cards are searched `again` until the fastest plan is found twice; `clock` returns seconds. Raises
    ConfigError if the search keys, the batch or the precision exclude every plan, NoPlanFits (with the
    nearest miss) if no plan fits the cards, SearchStopped if the time limit came first.
    """
    if problem.model.num_layers > MOST_LAYERS:
        words = f"wanted at most {MOST_LAYERS} to plan for, got {problem.model.num_layers}"
        raise ConfigError(f"model.num_layers: {words}")
    options = read_options(
        search,
        micro_batch_size=micro_batch_size,
        model=problem.model,
        profile=problem.profile,
        num_cards=len(problem.cluster.cards),
    )
    options = replace(options, effort=options.effort * (1.0 if thorough else BRIEF), searches_again=again)
    # Groups of more cards than a sequence has tokens do not divide them.
    divisible = problem.sequence_length >= max(options.tensor)
    choices = dict.fromkeys(divided and divisible for divided in search.sequence_parallel)
    found: list[SearchResult] = []
    missed: list[tuple[NoPlanFits, float]] = []
    for divided in choices:
        own, seconds = replace(problem, sequence_parallel=divided), search.time_limit / len(choices)
        try:
            found.append(_search(own, options, time_limit=seconds, clock=clock))
        except NoPlanFits as fault:
            cards, _ = usable_cards(own, use_all=options.use_all_devices)
            missed.append((fault, lower_bound(make_costs(own), cards, options).seconds))
    if not found:
        raise missed[0][0]
    return found[0] if len(choices) == 1 else _both(found, missed, options)


def _both(found: list[SearchResult], missed: list[tuple[NoPlanFits, float]], keys: Options) -> SearchResult:
    """The faster result of two spaces; what it claims holds in both, also where no plan was found."""
    first = min(found, key=lambda result: result.best.step_seconds)
    best, lows = first.best, [*(own.lower_bound_seconds for own in found), *(low for _, low in missed)]
    exact = first.exact and min(lows) >= best.step_seconds * (1 - 1e-9)
    forecast = best.plan.forecast and replace(best.plan.forecast, lower_bound_seconds=min(lows))
    bound = Bound(seconds=min(lows), schedules=keys.all_schedules, sizes=keys.all_sizes)
    return replace(
        first,
        best=replace(best, plan=replace(best.plan, forecast=forecast)),
        lower_bound_seconds=min(lows),
        bound=None if exact else bound,
        exact=exact,
        stopped=any([own.stopped for own in found] + [isinstance(own, SearchStopped) for own, _ in missed]),
        num_simulated=sum(own.num_simulated for own in found),
    )


def _search(
    problem: PlanProblem, options: Options, *, time_limit: float, clock: Callable[[], float]
) -> SearchResult:
    """The same in one space, in which groups divide tokens or do not."""
    closing = min(CLOSING_SECONDS_PER_CARD * len(problem.cluster.cards), time_limit / 2)
    limit = TimeLimit(clock, clock(), time_limit - closing)
    cards, without_precision = usable_cards(problem, use_all=options.use_all_devices)
    costs = make_costs(problem)
    bound = lower_bound(costs, cards, options)
    have_room = options.offload_parameters or shortfall.most_copies(costs, cards, options)
    if not have_room or bound.seconds == math.inf:
        raise NoPlanFits(shortfall.describe_shortfall(costs, cards, options))
    space, plans = find_plans(costs, cards, options, limit)
    if not plans.ranked:
        plans = replace(plans, ranked=_nearest(space, plans, time_limit))
    kept, faster = keep_to_cards(plans.ranked) if options.keeps_to_cards else (plans.ranked, None)
    exact = _is_proven(space, kept, faster, plans.lowest)
    lowest = min(plans.lowest if exact else bound.seconds, (faster or kept[0]).step_seconds)
    ranked = kept if exact else prefer_simple(space.costs, kept, options)
    best = with_forecast(space.costs, ranked[0], lowest)
    violations = list(validate_plan(best.plan))
    assert not violations, f"the planner made a plan that violates constraints: {violations}"
    even, no_even = even_split(space, plans, best)
    return SearchResult(
        best=best,
        runners_up=runners_up(ranked),
        even_split=even,
        no_even_split=no_even,
        left_out=(*without_precision, *idle_cards(cards, best)),
        lower_bound_seconds=lowest,
        bound=None if exact else bound,
        exact=exact,
        stopped=space.is_over(),
        num_simulated=plans.num_simulated,
        notes=(
            *notes_of(space.costs, best.cost),
            *passed_over(best, faster),
            *simplicity_note(best, kept[0]),
        ),
    )


def _nearest(space: Space, plans: Plans, time_limit: float) -> list[Candidate]:
    """The plans that come nearest, if they fit. Raises why there is none, if it is not memory alone."""
    costs, cards, options = space.costs, space.cards, space.options
    if not plans.any_fits and (space.is_over() or not plans.has_all_shapes):
        raise SearchStopped(
            f"search.time_limit ({time_limit:g} s) ended the search before it found a plan that fits; "
            f"there may be one. It had {len(plans.shapes)} ways to assign the cards to look at: raise "
            "search.time_limit, or allow fewer with search.tensor, search.pipelines or search.replicas"
        )
    if not plans.shapes and (options.use_all_devices or not plans.num_simulated):
        raise ConfigError(shortfall.describe_no_shape(costs.problem, options, cards))
    if plans.any_fits:
        raise NoPlanFits(NO_VIRTUAL_STAGES if options.all_schedules == ("interleaved_1f1b",) else NONE_KEPT)
    near = shortfall.nearest_plans(space)
    if not near:
        raise NoPlanFits(shortfall.describe_shortfall(costs, cards, options))
    return near


def _is_proven(space: Space, kept: Sequence[Candidate], faster: Candidate | None, lowest: float) -> bool:
    """Whether the first plan is proven fastest; no plan of the shapes takes less than `lowest`, if finite."""
    stages = [stage for candidate in kept for stage in candidate.cost.stages]
    # Where no plan recomputes, activations on hosts gain nothing.
    may_send = any(stage.num_recomputed or stage.leaving for stage in stages)
    may_send = may_send and space.options.offload_activations and not space.costs.problem.compile
    return faster is None and not may_send and kept[0].step_seconds >= lowest * (1 - 1e-9)


def usable_cards(problem: PlanProblem, *, use_all: bool) -> tuple[list[Card], list[LeftOut]]:
    """(cards that support the problem's precision, the others with the reason). Raises ConfigError if no card
    does, or if one does not and `use_all` is set."""
    cluster, precision = problem.cluster, problem.precision
    lacking = [card for card in cluster.cards if cluster.device_type(card.type).peak(precision) is None]
    usable = [card for card in cluster.cards if card not in lacking]
    has_fp16 = all(cluster.device_type(card.type).fp16 is not None for card in cluster.cards)
    advice = f"set train.precision: {'fp16' if precision == 'bf16' and has_fp16 else 'fp32'}"
    if lacking and (use_all or not usable):
        types = ", ".join(sorted({card.type for card in lacking}))
        names = ", ".join(card.name for card in lacking[:8])
        names += f" and {len(lacking) - 8} more" if len(lacking) > 8 else ""
        demand = "search.use_all_devices requires them" if usable else "there are no other cards"
        raise ConfigError(
            f"train.precision: {precision}: {names} ({types}) have no {precision} units, "
            f"and {demand}; " + advice + (", or use_all_devices: false to leave them out" if usable else "")
        )
    reason = f"no {precision} units; {advice} to use it"
    return usable, [LeftOut(card=card, reason=reason) for card in lacking]


# --- what is said of it -------------------------------------------------------------------------------------


def runners_up(ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The next best: one plan of each other family, then other cuts of the same families. Those of one have
    schedule, pipelines, micro-batch size, and the first pipeline's stages by type and number of cards."""
    families: dict[object, dict[object, Candidate]] = {}
    for candidate in ranked:
        plan, shape = candidate.plan, candidate.shape
        groups = tuple((s.card.type, len(s.cards)) for s in candidate.cost.stages if s.pipeline == 0)
        family = (shape.schedule, len(plan.pipelines), shape.micro_batch_size, groups)
        cut = tuple(stage.layers for stage in plan.pipelines[0].stages)
        families.setdefault(family, {}).setdefault(cut, candidate)
    (_, *cuts), *others = (list(own.values()) for own in families.values())
    rest = {id(one) for own in (cuts, *(own[1:] for own in others)) for one in own}
    distinct = [*(own[0] for own in others), *(one for one in ranked if id(one) in rest)]
    return tuple(sorted(distinct[:NUM_RUNNERS_UP], key=lambda c: c.step_seconds))


def with_forecast(costs: Costs, candidate: Candidate, lower_bound_seconds: float) -> Candidate:
    """The candidate, its plan with the forecast."""
    forecast = make_forecast(costs, candidate.plan, candidate.cost, lower_bound_seconds=lower_bound_seconds)
    return replace(candidate, plan=replace(candidate.plan, forecast=forecast))


def idle_cards(cards: Sequence[Card], best: Candidate) -> list[LeftOut]:
    """The cards that the best plan does not use, and why."""
    used = {entry.device for entry in best.plan.ranks}
    idle = [card for card in cards if card.name not in used]
    reasons = {name: _why_idle(name, cards, idle, best) for name in {card.type for card in idle}}
    return [LeftOut(card=card, reason=reasons[card.type]) for card in idle]


def _why_idle(name: str, cards: Sequence[Card], idle: Sequence[Card], best: Candidate) -> str:
    """Why some cards of a type are left: a remainder of the division into equal pipelines, or no gain."""
    count = len(best.plan.pipelines)
    of_type = (s.replicas[0] for s in best.cost.stages if any(card.type == name for card in s.cards))
    width = max(map(len, of_type), default=1)
    number, left = (sum(card.type == name for card in some) for some in (cards, idle))
    if count != best.shape.num_pipelines or left > number % (width * count):
        return "not in the fastest plan found"
    sizes = {f"groups of {width} within their nodes": width, f"{count} equal pipelines": count}
    return f"the {name}s do not divide into " + ", in ".join(text for text, n in sizes.items() if n > 1)


def notes_of(costs: Costs, cost: PlanCost) -> tuple[str, ...]:
    """Where the numbers of each type of card come from, and of links where some were measured."""
    notes = (
        f"{name}: {stage.note}{_width_note(stage)}"
        for stage in cost.stages
        for name in dict.fromkeys(card.type for card in stage.cards)
    )
    cards = {card for stage in cost.stages for card in stage.cards}
    alike, unknown = unmeasured(costs.topology, cards)
    of = f"of {len(cards) * (len(cards) - 1)} pairs of cards"
    words = {
        f"links {of}: {alike} not measured, taken as another pair's of the same nodes": alike,
        f"links {of}: {unknown} not measured, taken as the cluster file states them": unknown,
    }
    return (*dict.fromkeys(notes), *(text for text, number in words.items() if number))


def _width_note(stage: StageCost) -> str:
    width, estimated = len(stage.replicas[0]), stage.source == "estimated"
    if width == 1 or estimated == bool(stage.experts):
        return ""
    return ", of fewer experts scaled" if stage.experts else f", tensor_parallel {width}"
