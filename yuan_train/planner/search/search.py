"""The search for the fastest plan: shapes are pruned or cut and simulated, and the finalists are ranked.

The same input gives the same plan, byte for byte, unless the time limit ends the search; then the best plan
found so far is returned, and `SearchResult.stopped` says so.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.collector import without_garbage_collector
from yuan_train.config.errors import ConfigError, NoPlanFits, SearchStopped
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import Recompute, SearchConfig
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem, make_costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan, make_forecast
from yuan_train.planner.evaluate.stage_cost import StageCost
from yuan_train.planner.search.activations import may_send_activations, with_activations_away
from yuan_train.planner.search.alternating import alternating_plans
from yuan_train.planner.search.expert_groups import may_divide_experts, plans_with_experts
from yuan_train.planner.search.explore import Candidate, solve_shapes
from yuan_train.planner.search.expressible import is_wanted, wanted_shapes
from yuan_train.planner.search.finalists import MAX_RESTRUCTURED_CARDS, improve, rank
from yuan_train.planner.search.host_budgets import solve_with_hosts
from yuan_train.planner.search.lower_bounds import Bounds
from yuan_train.planner.search.mixed_pipelines import (
    deal_mixed,
    first_shape,
    mix_pipelines,
    split_stages,
)
from yuan_train.planner.search.paged import check_pages, paged_plans
from yuan_train.planner.search.plan_bounds import bound_plans
from yuan_train.planner.search.shapes import Options, Shape, make_plan, read_options
from yuan_train.planner.search.shortfall import describe_no_shape, describe_shortfall
from yuan_train.planner.search.state_shares import mixed_with_hosts, with_other_shares

NUM_RUNNERS_UP = 4
LEAST_HOPE = 1.25
"""Plans with groups that divide experts are costed if their estimate is within this multiple of the best
step: the estimate knows neither deeper warm-ups nor partial recompute."""
CLOSING_SECONDS_PER_CARD = 2e-4
"""Of a time limit; costing and checking one plan takes about that."""
LISTING_SHARE = 1 / 2
"""Of the time, for listing the shapes; what is not listed by then is not searched."""
NUM_SPLIT = 3
"""Plans whose stages are also tried as virtual stages."""
NO_VIRTUAL_STAGES = (
    "no plan fits search.schedule: none of the cuts that fit can be split into virtual stages; each pipeline "
    "must have two stages or more, and each of these two layers or more. Add 1f1b to search.schedule, or "
    "allow fewer cards"
)


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
    """The naive plan, see `even_split`; None with more slots than layers, without shapes, or without time."""
    left_out: tuple[LeftOut, ...]
    lower_bound_seconds: float
    """No plan that the search might make takes less."""
    bounds: Bounds | None
    """How that is known, and what no plan of equal pipelines beats; None if the plan is proven fastest."""
    exact: bool
    """Whether it is proven that no other plan of the searched space is faster in the simulation."""
    stopped: bool
    """Whether the time limit ended the search."""
    num_shapes: int
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
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """The fastest plan that fits, with its forecast.

    `micro_batch_size` is the default of `search.micro_batch_size`; what is not `thorough` keeps the structure
    of its plans and seeks no bound; `clock` returns seconds. Raises ConfigError if the search keys, the batch
    or the precision exclude every plan, NoPlanFits (with the nearest miss) if no plan fits the cards,
    SearchStopped if the time limit came first.
    """
    options = read_options(
        search,
        micro_batch_size=micro_batch_size,
        model=problem.model,
        measured_widths=_widths(problem),
        measured_sizes=_sizes(problem),
        num_cards=len(problem.cluster.cards),
    )
    if problem.has_external_profile:
        # Its plans are not polished.
        sizes = options.micro_batch_sizes
        options = replace(options, polished_schedules=options.schedules, polished_sizes=sizes)
    check_pages(problem, options := replace(options, restructures=thorough))
    started = clock()
    end = search.time_limit - _closing_seconds(len(problem.cluster.cards), search.time_limit)

    def stopped(share: float = 1.0) -> bool:
        return clock() - started > share * end

    costs = make_costs(problem)
    cards, without_precision = usable_cards(problem, use_all=options.use_all_devices)
    wanted = wanted_shapes(cards, options, global_batch_size=problem.global_batch_size)
    shapes = list(_while_time(wanted, lambda: stopped(LISTING_SHARE)))
    has_all_shapes = next(wanted, None) is None
    mixed = (shape for pipelines in deal_mixed(costs, cards, options) for shape in pipelines)
    any_shapes = shapes or ([] if options.expressible else list(mixed))
    if not any_shapes:
        raise ConfigError(describe_no_shape(problem, options, cards))
    if options.use_all_devices and shapes:
        shapes = _not_longer_than_model(problem, shapes)
    found = solve_shapes(costs, shapes, options, stopped)
    # Few plans are improved on many cards, and those with hosts among them.
    apart = bool(found.candidates) and len(cards) <= MAX_RESTRUCTURED_CARDS
    without_hosts = found.candidates
    if options.offload and not problem.has_external_profile:
        found = solve_with_hosts(costs, shapes, options, found, stopped)
    ranked = rank(costs, _valid(without_hosts if apart else found.candidates, options))
    ranked = rank(costs, [*ranked, *_more_plans(costs, ranked, cards, options, stopped)])
    before = ranked
    hosted = [*(found.candidates[len(without_hosts) :] if apart else ())]
    if _may_mix(options, cards):
        hosted += mixed_with_hosts(costs, cards, ranked, options, stopped)
    hosted = rank(costs, _valid(hosted, options))
    ranked = _improved(costs, ranked, hosted, cards, options, stopped)
    ranked = rank(costs, [*ranked, *with_other_shares(costs, ranked, options, stopped)])
    tries_activations = may_send_activations(costs, ranked, options)
    if tries_activations:
        ranked = rank(costs, [*ranked, *with_activations_away(costs, ranked, options, stopped)])
    paged = paged_plans(costs, cards, options, limit_seconds=_least_seconds(ranked), stopped=stopped)
    ranked = rank(costs, [*ranked, *paged])
    if not ranked and not before and (stopped() or not has_all_shapes):
        raise SearchStopped(
            f"search.time_limit ({search.time_limit:g} s) ended the search before it found a plan that fits; "
            f"there may be one. It had {len(shapes)} ways to assign the cards to look at: raise "
            "search.time_limit, or allow fewer with search.tensor, search.pipelines or search.replicas"
        )
    if not ranked:
        raise NoPlanFits(
            NO_VIRTUAL_STAGES if before else describe_shortfall(costs, any_shapes, cards, options)
        )
    lowest = found.lower_bound_seconds
    has_unproven = tries_activations or _has_unproven(costs, cards, options)
    exact = (
        found.exact and has_all_shapes and not has_unproven and ranked[0].step_seconds >= lowest * (1 - 1e-9)
    )
    bounds = None
    if thorough and not exact:
        # Where no plan recomputes, none has activations on hosts.
        own = replace(options, offload_activations=tries_activations)
        bounds = bound_plans(costs, cards, own, best_seconds=ranked[0].step_seconds, stopped=stopped)
        lowest = bounds.any_seconds
    bound = min(lowest, ranked[0].step_seconds)
    best = _with_forecast(costs, ranked[0], bound)
    violations = list(validate_plan(best.plan))
    assert not violations, f"the planner made a plan that violates constraints: {violations}"
    even_shape = best.shape if len(best.shape.slots) > 1 or not shapes else shapes[0]
    return SearchResult(
        best=best,
        runners_up=_runners_up(ranked),
        even_split=even_split(costs, even_shape, options) if shapes and not stopped() else None,
        left_out=(*without_precision, *_idle(cards, best)),
        lower_bound_seconds=bound,
        bounds=bounds,
        exact=exact,
        stopped=stopped(),
        num_shapes=len(shapes),
        num_simulated=found.num_simulated,
        notes=_notes(best.cost),
    )


def _improved(
    costs: Costs,
    ranked: Sequence[Candidate],
    hosted: Sequence[Candidate],
    cards: Sequence[Card],
    options: Options,
    stopped: Callable[[], bool],
) -> list[Candidate]:
    """The plans under schedules that may be polished, improved, ranked. Plans with hosts, and those that
    divide experts, are improved apart, so that no other is improved less because there are some."""

    def improved(candidates: Sequence[Candidate]) -> list[Candidate]:
        wanted = [one for one in candidates if one.plan.schedule in options.polished_schedules]
        return improve(costs, wanted, cards, options, stopped)

    found = improved(ranked)
    found = rank(costs, [*found, *improved(hosted)])
    limit = LEAST_HOPE * _least_seconds(found)
    grouped = plans_with_experts(costs, cards, options, limit_seconds=limit, stopped=stopped)
    return rank(costs, [*found, *improve(costs, rank(costs, grouped), cards, options, stopped)])


def _least_seconds(ranked: Sequence[Candidate]) -> float:
    return ranked[0].step_seconds if ranked else math.inf


def _closing_seconds(num_cards: int, time_limit: float) -> float:
    """What is kept of the time limit to cost, check and report a plan of so many cards."""
    return min(CLOSING_SECONDS_PER_CARD * num_cards, time_limit / 2)


def _while_time(shapes: Iterator[Shape], is_over: Callable[[], bool]) -> Iterator[Shape]:
    """The shapes, the first one at least, until the time for them is over."""
    for shape in shapes:
        yield shape
        if is_over():
            return


def _has_unproven(costs: Costs, cards: Sequence[Card], options: Options) -> bool:
    """Whether plans that no proof covers are among the searched ones."""
    proven = options.schedules, options.micro_batch_sizes
    return (
        _may_mix(options, cards)
        or (options.polished_schedules, options.polished_sizes) != proven
        or "interleaved_1f1b" in options.polished_schedules
        or options.half_layers
        or options.offload_parameters
        or may_divide_experts(costs, cards, options)
    )


def _may_mix(options: Options, cards: Sequence[Card]) -> bool:
    """Whether mixed pipelines, which no proof covers, are among the searched plans."""
    several = options.pipelines is None or max(options.pipelines) > 1
    return several and options.num_micro_batches is None and len(cards) > 1 and not options.expressible


def _widths(problem: PlanProblem) -> tuple[int, ...]:
    """Tensor-parallel widths that the profile has measured; none without a profile."""
    entries = problem.profile.entries if problem.profile else ()
    return tuple(sorted({entry.tensor_parallel for entry in entries}))


def _sizes(problem: PlanProblem) -> tuple[int, ...]:
    """Micro-batch sizes that the profile has measured on every type of card; none without a profile."""
    measured: dict[str, set[int]] = {}
    for entry in problem.profile.entries if problem.profile else ():
        measured.setdefault(entry.device_type, set()).add(entry.micro_batch_size)
    return tuple(sorted(set[int].intersection(*measured.values()))) if measured else ()


def usable_cards(problem: PlanProblem, *, use_all: bool) -> tuple[list[Card], list[LeftOut]]:
    """(cards that support the problem's precision, the others with the reason).

    Raises ConfigError if no card does, or if one does not and `use_all` is set.
    """
    cluster, precision = problem.cluster, problem.precision
    lacking = [card for card in cluster.cards if cluster.device_type(card.type).peak(precision) is None]
    usable = [card for card in cluster.cards if card not in lacking]
    has_fp16 = all(cluster.device_type(card.type).fp16 is not None for card in cluster.cards)
    advice = f"set train.precision: {'fp16' if precision == 'bf16' and has_fp16 else 'fp32'}"
    if lacking and (use_all or not usable):
        types = ", ".join(sorted({card.type for card in lacking}))
        demand = "search.use_all_devices requires them" if usable else "there are no other cards"
        raise ConfigError(
            f"train.precision: {precision}: {_names(lacking)} ({types}) have no {precision} units, "
            f"and {demand}; " + advice + (", or use_all_devices: false to leave them out" if usable else "")
        )
    reason = f"no {precision} units; {advice} to use it"
    return usable, [LeftOut(card=card, reason=reason) for card in lacking]


def even_split(costs: Costs, shape: Shape, options: Options) -> Candidate | None:
    """The naive plan: all slots in the cluster's order, layers divided evenly; the first slots get one more.

    All stages have the first recompute of the options that fits; the first of all if none does. None if there
    are more slots than layers.
    """
    num_layers, num_stages = costs.problem.model.num_layers, len(shape.slots)
    if num_stages > num_layers:
        return None
    size, rest = divmod(num_layers, num_stages)
    bounds = [0] + [1 + (s + 1) * size + min(s + 1, rest) for s in range(num_stages)]
    bounds[-1] += 1
    tried: list[Candidate] = []
    for recompute in options.recompute:
        same: list[Recompute] = [recompute] * num_stages
        plan = make_plan(costs, shape, order=range(num_stages), bounds=bounds, recompute=same)
        tried.append(Candidate(plan=plan, cost=cost_plan(costs, plan), shape=shape))
        if tried[-1].cost.fits:
            return tried[-1]
    return tried[0]


def _valid(candidates: Sequence[Candidate], options: Options) -> list[Candidate]:
    return [c for c in candidates if is_wanted(c.plan, options)]


def _more_plans(
    costs: Costs,
    ranked: Sequence[Candidate],
    cards: Sequence[Card],
    options: Options,
    stopped: Callable[[], bool],
) -> list[Candidate]:
    """Plans that are no cut of a shape: mixed pipelines, and good plans with virtual stages."""
    made: list[tuple[Shape | None, Plan]] = []
    # Making a schedule of virtual stages takes seconds on many cards: there only if it is asked for.
    few = len(cards) <= MAX_RESTRUCTURED_CARDS
    if "interleaved_1f1b" in (options.polished_schedules if few else options.schedules):
        plain = (candidate for candidate in ranked if candidate.plan.schedule == "1f1b")
        split = ((candidate.shape, list(split_stages(candidate.plan))) for candidate in plain)
        splittable = itertools.islice((item for item in split if item[1]), NUM_SPLIT)
        made += [(shape, plan) for shape, plans in splittable for plan in plans]
    if _may_mix(options, cards) and not stopped():
        mixed = mix_pipelines(costs, cards, options, limit_seconds=_least_seconds(ranked))
        made += [(ranked[0].shape if ranked else None, plan) for plan in mixed]
    if not stopped():
        made += [(None, plan) for plan in alternating_plans(costs, cards, options)]
    result: list[Candidate] = []
    for shape, plan in made:
        if stopped():
            break
        if not is_wanted(plan, options):
            continue
        cost = cost_plan(costs, plan)
        if cost.fits and _fits_memory(cost):
            own = replace(shape or first_shape(plan, cost), schedule=plan.schedule)
            result.append(Candidate(plan=plan, cost=cost, shape=own))
    return result


def _fits_memory(cost: PlanCost) -> bool:
    return all(stage.fits for stage in cost.stages)


def _runners_up(ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The next best: one plan of each other `_family`, then other cuts of the same families."""
    seen: set[object] = {_family(ranked[0])}
    cuts: set[object] = {(_family(ranked[0]), ranked[0].bounds)}
    distinct: list[Candidate] = []
    others: list[Candidate] = []
    for candidate in ranked[1:]:
        family = _family(candidate)
        if family not in seen:
            distinct.append(candidate)
        elif (family, candidate.bounds) not in cuts:
            others.append(candidate)
        seen.add(family)
        cuts.add((family, candidate.bounds))
    return tuple(sorted([*distinct, *others][:NUM_RUNNERS_UP], key=lambda c: c.step_seconds))


def _family(candidate: Candidate) -> object:
    """Schedule, pipelines, micro-batch size, and the first pipeline's stages by type and number of cards."""
    shape = candidate.shape
    return (
        shape.schedule,
        len(candidate.plan.pipelines),
        shape.micro_batch_size,
        tuple((s.card.type, len(s.cards)) for s in candidate.cost.stages if s.pipeline == 0),
    )


def _with_forecast(costs: Costs, candidate: Candidate, lower_bound_seconds: float) -> Candidate:
    forecast = make_forecast(costs, candidate.plan, candidate.cost, lower_bound_seconds=lower_bound_seconds)
    return replace(candidate, plan=replace(candidate.plan, forecast=forecast))


def _idle(cards: Sequence[Card], best: Candidate) -> list[LeftOut]:
    """The cards that the best plan does not use, and why."""
    used = {entry.device for entry in best.plan.ranks}
    assigned = best.shape.cards
    result: list[LeftOut] = []
    for card in cards:
        if card.name in used:
            continue
        reason = (
            "the fastest plan found does not use it"
            if card in assigned
            else f"the {card.type}s do not divide into {_groups_of(best, card)}"
            f"{best.shape.num_pipelines} equal pipelines"
        )
        result.append(LeftOut(card=card, reason=reason))
    return result


def _groups_of(best: Candidate, card: Card) -> str:
    """Words for the groups that a type's cards form in the shape of a plan; none for single cards."""
    slots = (slot for slot in best.shape.slots if slot[0][0][0].type == card.type)
    width = max((len(slot[0][0]) for slot in slots), default=1)
    return f"groups of {width} within their nodes, in " if width > 1 else ""


def _notes(cost: PlanCost) -> tuple[str, ...]:
    notes = (
        f"{name}: {stage.note}" + _width_note(stage)
        for stage in cost.stages
        for name in dict.fromkeys(card.type for card in stage.cards)
    )
    return tuple(dict.fromkeys(notes))


def _width_note(stage: StageCost) -> str:
    width = len(stage.replicas[0])
    if width == 1 or (stage.source != "estimated" and not stage.experts):
        return ""
    if stage.experts:
        return "" if stage.source == "estimated" else ", of fewer experts scaled"
    return f", tensor_parallel {width}"


def _not_longer_than_model(problem: PlanProblem, shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes with at most as many slots as the model has units. Raises ConfigError if there are none."""
    num_units = problem.model.num_layers + 2
    kept = [shape for shape in shapes if len(shape.slots) <= num_units]
    if not kept:
        shortest = min(len(shape.slots) for shape in shapes)
        raise ConfigError(
            f"search.use_all_devices: pipelines of at least {shortest} cards, but the model has only "
            f"{num_units} parts (embedding, layers, head) to give to them; allow more search.pipelines, "
            "or leave cards out with use_all_devices: false"
        )
    return kept


def _names(cards: Sequence[Card]) -> str:
    names = [card.name for card in cards]
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])} and {len(names) - 8} more"
