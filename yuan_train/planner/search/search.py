"""The search for the fastest plan: what is found by the compiled core, by a proof, and of special plans, is
ranked, chosen and reported.

The same input gives the same plan, byte for byte, unless the time limit ends the search; then the best plan
found so far is returned, and `SearchResult.stopped` says so.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.document import without_garbage_collector
from yuan_train.config.errors import ConfigError, NoPlanFits, SearchStopped
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import Recompute, SearchConfig
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem, make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.alternating import alternating_plans
from yuan_train.planner.search.bounds import Bound, lower_bound
from yuan_train.planner.search.candidate import Candidate, Space, TimeLimit, rank
from yuan_train.planner.search.drafts import FEW_CARDS, search_drafts
from yuan_train.planner.search.expert_groups import expert_plans, may_divide_experts
from yuan_train.planner.search.islands import search_islands
from yuan_train.planner.search.local import half_layer_plans
from yuan_train.planner.search.paged import check_pages, paged_plans
from yuan_train.planner.search.prove import NOTHING_PROVEN, is_provable, prove_shapes
from yuan_train.planner.search.search_result import (
    LeftOut,
    SearchResult,
    idle_cards,
    notes_of,
    runners_up,
    with_forecast,
)
from yuan_train.planner.search.shapes import Options, Shape, as_plain, make_plan, read_options, wanted_shapes
from yuan_train.planner.search.shortfall import describe_no_shape, describe_shortfall
from yuan_train.planner.search.simplicity import keep_to_cards, passed_over, prefer_simple, simplicity_note

SPECIAL = (expert_plans, alternating_plans, half_layer_plans, paged_plans)
"""What finds plans that the compiled core does not price, each from the plans that are known so far."""
LISTING_SHARE = 1 / 2
"""Of the time, for listing the shapes; what is not listed by then is not searched."""
BRIEF = 1 / 8
"""Of the effort, what a search that is not thorough takes."""
CLOSING_SECONDS_PER_CARD = 2e-4
"""Kept of a time limit to cost, check and report one plan."""
NO_VIRTUAL_STAGES = (
    "no plan fits search.schedule: no plan that fits can have virtual stages; each pipeline must have two "
    "stages or more, and each of these two layers or more. Add 1f1b to search.schedule, or allow fewer cards"
)


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

    `micro_batch_size` is the default of `search.micro_batch_size`; what is not `thorough` tries
    much less; `clock` returns seconds. Raises ConfigError if the search keys, the batch
    or the precision exclude every plan, NoPlanFits (with the nearest miss) if no plan fits the cards,
    SearchStopped if the time limit came first.
    """
    options = _options(problem, search, micro_batch_size=micro_batch_size, thorough=thorough)
    # Groups of more cards than a sequence has tokens do not divide them.
    divisible = problem.sequence_length >= max(options.tensor)
    choices = dict.fromkeys(divided and divisible for divided in search.sequence_parallel)
    found: list[SearchResult] = []
    faults: list[Exception] = []
    for divided in choices:
        own, seconds = replace(problem, sequence_parallel=divided), search.time_limit / len(choices)
        try:
            found.append(_search(own, options, time_limit=seconds, clock=clock))
        except (NoPlanFits, SearchStopped) as fault:
            faults.append(fault)
    if not found:
        raise faults[0]
    return min(found, key=lambda result: result.best.step_seconds)


def _search(
    problem: PlanProblem, options: Options, *, time_limit: float, clock: Callable[[], float]
) -> SearchResult:
    """The same in one space, in which groups divide tokens or do not."""
    closing = min(CLOSING_SECONDS_PER_CARD * len(problem.cluster.cards), time_limit / 2)
    limit = TimeLimit(clock, clock(), time_limit - closing)
    cards, without_precision = usable_cards(problem, use_all=options.use_all_devices)
    space = Space(make_costs(problem), cards, options, limit)
    plans = _find_plans(space)
    if not plans.ranked:
        raise _nothing_found(space, plans, time_limit)
    kept, faster = keep_to_cards(plans.ranked) if options.keeps_to_cards else (plans.ranked, None)
    exact, lowest, bound = _bounded(space, kept, faster, plans.lowest)
    ranked = kept if exact else prefer_simple(space.costs, kept, options)
    best = with_forecast(space.costs, ranked[0], lowest)
    violations = list(validate_plan(best.plan))
    assert not violations, f"the planner made a plan that violates constraints: {violations}"
    even, no_even = _even_split(space, plans, best)
    notes = notes_of(space.costs, best.cost)
    return SearchResult(
        best=best,
        runners_up=runners_up(ranked),
        even_split=even,
        no_even_split=no_even,
        left_out=(*without_precision, *idle_cards(cards, best)),
        lower_bound_seconds=lowest,
        bound=bound,
        exact=exact,
        stopped=space.is_over(),
        num_simulated=plans.num_simulated,
        notes=(*notes, *passed_over(best, faster), *simplicity_note(best, kept[0])),
    )


def _options(problem: PlanProblem, search: SearchConfig, *, micro_batch_size: int, thorough: bool) -> Options:
    """The search keys for a problem. Of sizes those count that its profile has of every type of card."""
    entries = problem.profile.entries if problem.profile else ()
    sizes: dict[str, set[int]] = {}
    for entry in entries:
        sizes.setdefault(entry.device_type, set()).add(entry.micro_batch_size)
    options = read_options(
        search,
        micro_batch_size=micro_batch_size,
        model=problem.model,
        measured_widths=tuple(sorted({entry.tensor_parallel for entry in entries})),
        measured_sizes=tuple(sorted(set[int].intersection(*sizes.values()))) if sizes else (),
        num_cards=len(problem.cluster.cards),
    )
    if problem.profile is not None and problem.profile.is_whole:
        options = as_plain(options)
    return replace(options, effort=options.effort * (1.0 if thorough else BRIEF))


def _nothing_found(
    space: Space, plans: _Plans, time_limit: float
) -> SearchStopped | NoPlanFits | ConfigError:
    """Why there is no plan."""
    if not plans.any_fits and (space.is_over() or not plans.has_all_shapes):
        return SearchStopped(
            f"search.time_limit ({time_limit:g} s) ended the search before it found a plan that fits; "
            f"there may be one. It had {len(plans.shapes)} ways to assign the cards to look at: raise "
            "search.time_limit, or allow fewer with search.tensor, search.pipelines or search.replicas"
        )
    if not plans.shapes and not plans.num_simulated:
        return ConfigError(describe_no_shape(space.costs.problem, space.options, space.cards))
    if plans.any_fits:
        return NoPlanFits(NO_VIRTUAL_STAGES)
    return NoPlanFits(describe_shortfall(space.costs, space.cards, space.options))


def _bounded(
    space: Space, kept: Sequence[Candidate], faster: Candidate | None, lowest: float
) -> tuple[bool, float, Bound | None]:
    """(whether the first plan is proven to be the fastest, seconds that no plan beats, how that is known);
    `lowest` is what no plan of the shapes beats, if that is proven."""
    costs, best = space.costs, (faster or kept[0]).step_seconds
    stages = [stage for candidate in kept for stage in candidate.cost.stages]
    # Where no plan recomputes, activations on hosts gain nothing.
    may_send = any(stage.num_recomputed or stage.leaving for stage in stages)
    may_send = may_send and space.options.offload_activations and not costs.problem.compile
    if faster is None and not may_send and best >= lowest * (1 - 1e-9):
        return True, min(lowest, best), None
    bound = lower_bound(costs, space.cards, space.options)
    return False, min(bound.seconds, best), bound


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


# --- what is found -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Plans:
    """What was found in a space."""

    shapes: Sequence[Shape]
    has_all_shapes: bool
    """Whether the time sufficed to list them."""
    ranked: Sequence[Candidate]
    """The plans that fit, fastest first."""
    num_simulated: int
    """Plans of the shapes that were priced."""
    any_fits: bool
    """Whether a plan fits, be it under a schedule that `search.schedule` does not name."""
    lowest: float = math.inf
    """Seconds of the fastest plan of the shapes, if that is proven."""


def _find_plans(space: Space) -> _Plans:
    """The fastest plans of a space, of many cards as islands. Raises ConfigError if none is allowed."""
    check_pages(space.costs.problem, space.options)
    large = rank(search_islands(space))
    shapes, has_all = _list_shapes(space, most=1 if large else None)
    none = _Plans(shapes=shapes, has_all_shapes=has_all, ranked=(), num_simulated=0, any_fits=False)
    if large:
        return replace(none, ranked=large, num_simulated=len(large), any_fits=True)
    return _look_through(space, none)


def _list_shapes(space: Space, *, most: int | None) -> tuple[list[Shape], bool]:
    """(shapes, at most so many, whether these are all). Raises ConfigError if none is allowed."""
    problem = space.costs.problem
    wanted = wanted_shapes(space.cards, space.options, global_batch_size=problem.global_batch_size)
    shapes: list[Shape] = []
    for shape in itertools.islice(wanted, most):
        shapes.append(shape)
        if space.is_over(LISTING_SHARE):
            break
    has_all_shapes = next(wanted, None) is None
    if space.options.use_all_devices and shapes:
        shapes = _not_longer_than_model(problem, shapes)
    return shapes, has_all_shapes


def _look_through(space: Space, none: _Plans) -> _Plans:
    """The fastest plans of the listed shapes and beside them, proven where that is within reach."""
    drafts = search_drafts(space, none.shapes)
    ranked = rank(drafts.candidates)
    proof = NOTHING_PROVEN
    provable = none.has_all_shapes and is_provable(none.shapes, space.cards)
    if provable and not space.options.offload_disk and not _has_unproven(space):
        least = ranked[0].step_seconds if ranked else math.inf
        proof = prove_shapes(space, none.shapes, best_seconds=least)
    if proof.exact:
        ranked = rank([*ranked, *proof.found])
        lowest = min((one.step_seconds for one in proof.found), default=math.inf)
        return replace(
            none, ranked=ranked, num_simulated=proof.num_priced, lowest=lowest, any_fits=bool(ranked)
        )
    for find in SPECIAL:
        ranked = rank([*ranked, *find(space, ranked)])
    any_fits = drafts.any_fits or bool(ranked)
    return replace(none, ranked=ranked, num_simulated=drafts.num_priced, any_fits=any_fits)


def _has_unproven(space: Space) -> bool:
    """Whether plans that no proof covers are among the searched ones: mixed pipelines, or special ones."""
    options = space.options
    several = options.pipelines is None or max(options.pipelines) > 1
    may_mix = several and options.num_micro_batches is None and len(space.cards) > 1
    return (
        (may_mix and not options.expressible)
        or options.all_schedules != options.schedules
        or options.all_sizes != options.micro_batch_sizes
        or "interleaved_1f1b" in options.all_schedules
        or options.half_layers
        or options.offload_parameters
        or may_divide_experts(space)
    )


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


def _even_split(space: Space, plans: _Plans, best: Candidate) -> tuple[Candidate | None, str]:
    """The even split that a plan is compared with, and if there is none the reason."""
    if not plans.shapes and plans.has_all_shapes:
        return None, "the cards do not divide into equal pipelines"
    # Its price is one plan's: nothing on few cards, seconds on thousands.
    if not plans.shapes or (space.is_over() and len(space.cards) > FEW_CARDS):
        return None, "search.time_limit was over before its turn"
    shape = best.shape if len(best.shape.slots) > 1 else plans.shapes[0]
    num_layers = space.costs.problem.model.num_layers
    if len(shape.slots) > num_layers:
        return None, f"it would have {len(shape.slots)} stages, and the model has {num_layers} layers"
    return _cut_evenly(space.costs, shape, space.options), ""


def _cut_evenly(costs: Costs, shape: Shape, options: Options) -> Candidate:
    """The naive plan: all slots in the cluster's order, layers divided evenly, the first slots with one more,
    and the first recompute that fits, or the first of all."""
    num_layers, num_stages = costs.problem.model.num_layers, len(shape.slots)
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
