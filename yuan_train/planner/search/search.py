"""The search for the fastest plan: what the compiled core and others find is ranked.

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
from yuan_train.config.document import without_garbage_collector
from yuan_train.config.errors import ConfigError, NoPlanFits, SearchStopped
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import Recompute, SearchConfig
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem, make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.alternating import alternating_plans
from yuan_train.planner.search.bounds import Bound, lower_bound
from yuan_train.planner.search.candidate import Candidate
from yuan_train.planner.search.drafts import FEW_CARDS, search_drafts
from yuan_train.planner.search.expert_groups import expert_plans, may_divide_experts
from yuan_train.planner.search.expressible import wanted_shapes
from yuan_train.planner.search.finalists import keep_to_cards, rank
from yuan_train.planner.search.half_layers import half_layer_plans
from yuan_train.planner.search.islands import search_islands
from yuan_train.planner.search.paged import check_pages, paged_plans
from yuan_train.planner.search.prove import NOTHING_PROVEN, Proof, is_provable, prove_shapes
from yuan_train.planner.search.search_result import (
    LeftOut,
    SearchResult,
    idle_cards,
    notes_of,
    passed_over,
    runners_up,
    with_forecast,
)
from yuan_train.planner.search.shapes import Options, Shape, as_plain, make_plan, read_options
from yuan_train.planner.search.shortfall import describe_no_shape, describe_shortfall
from yuan_train.planner.search.simplicity import prefer_simple, simplicity_note

SPECIAL = (expert_plans, alternating_plans, half_layer_plans, paged_plans)
"""Plans that the compiled core does not price: each is found from those that are known so far."""
BRIEF = 1 / 8
"""Of the effort, what a search that is not thorough takes."""
CLOSING_SECONDS_PER_CARD = 2e-4
"""Of a time limit; costing and checking one plan takes about that."""
LISTING_SHARE = 1 / 2
"""Of the time, for listing the shapes; what is not listed by then is not searched."""
NO_VIRTUAL_STAGES = (
    "no plan fits search.schedule: none of the cuts that fit can be split into virtual stages; each pipeline "
    "must have two stages or more, and each of these two layers or more. Add 1f1b to search.schedule, or "
    "allow fewer cards"
)


@dataclass(frozen=True)
class _TimeLimit:
    """When the search has to end."""

    clock: Callable[[], float]
    started: float
    seconds: float

    def is_over(self, share: float = 1.0) -> bool:
        """Whether that share of the time is over."""
        return self.clock() - self.started > share * self.seconds


@dataclass(frozen=True, kw_only=True)
class _Space:
    """What is searched, and until when."""

    costs: Costs
    cards: Sequence[Card]
    options: Options
    stopped: Callable[[], bool]
    shapes: Sequence[Shape]
    has_all_shapes: bool
    """Whether the time sufficed to list them."""
    limit_seconds: float
    """Of the whole search."""


@dataclass(frozen=True, kw_only=True)
class _Plans:
    """What was found in a space."""

    ranked: Sequence[Candidate]
    """The plans that fit, fastest first."""
    faster: Candidate | None
    """A plan that is a little faster, but uses more beside the cards than it gains (`keep_to_cards`)."""
    num_simulated: int
    """Plans of the shapes that were priced."""
    any_fits: bool
    """Whether a plan fits, be it under a schedule that `search.schedule` does not name."""
    lowest: float = math.inf
    """Seconds of the fastest plan of the shapes, if that is proven."""


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
    closing = _closing_seconds(len(problem.cluster.cards), search.time_limit)
    limit = _TimeLimit(clock, clock(), search.time_limit - closing)
    cards, without_precision = usable_cards(problem, use_all=options.use_all_devices)
    costs = make_costs(problem)
    large = search_islands(costs, cards, options, limit.is_over, limit_seconds=limit.seconds)
    space = _list_shapes(costs, cards, options, limit, most=1 if large else None)
    plans = _ranked_plans(space, large) if large else _find_plans(space)
    if not plans.ranked:
        raise _nothing_found(space, plans, search.time_limit)
    exact, lowest, bound = _bounded(space, plans)
    ranked = plans.ranked if exact else prefer_simple(space.costs, plans.ranked, options)
    best = with_forecast(space.costs, ranked[0], lowest)
    violations = list(validate_plan(best.plan))
    assert not violations, f"the planner made a plan that violates constraints: {violations}"
    even, no_even = _even_split_of(space, best)
    return SearchResult(
        best=best,
        runners_up=runners_up(ranked),
        even_split=even,
        no_even_split=no_even,
        left_out=(*without_precision, *idle_cards(cards, best)),
        lower_bound_seconds=lowest,
        bound=bound,
        exact=exact,
        stopped=limit.is_over(),
        num_shapes=len(space.shapes),
        num_simulated=plans.num_simulated,
        notes=(
            *notes_of(space.costs, best.cost),
            *passed_over(best, plans.faster),
            *simplicity_note(best, plans.ranked[0]),
        ),
    )


def _options(problem: PlanProblem, search: SearchConfig, *, micro_batch_size: int, thorough: bool) -> Options:
    options = read_options(
        search,
        micro_batch_size=micro_batch_size,
        model=problem.model,
        measured_widths=_widths(problem),
        measured_sizes=_sizes(problem),
        num_cards=len(problem.cluster.cards),
    )
    if problem.profile is not None and problem.profile.is_whole:
        options = as_plain(options)
    options = replace(options, effort=options.effort * (1.0 if thorough else BRIEF))
    check_pages(problem, options)
    return options


def _list_shapes(
    costs: Costs, cards: Sequence[Card], options: Options, limit: _TimeLimit, *, most: int | None
) -> _Space:
    """The shapes, at most so many if there are plans already. Raises ConfigError if no shape is allowed."""
    problem = costs.problem
    wanted = wanted_shapes(cards, options, global_batch_size=problem.global_batch_size)
    listed = itertools.islice(wanted, most)
    shapes = list(_while_time(listed, lambda: limit.is_over(LISTING_SHARE)))
    has_all_shapes = next(wanted, None) is None
    if options.use_all_devices and shapes:
        shapes = _not_longer_than_model(problem, shapes)
    return _Space(
        costs=costs,
        cards=cards,
        options=options,
        stopped=limit.is_over,
        shapes=shapes,
        has_all_shapes=has_all_shapes,
        limit_seconds=limit.seconds,
    )


def _find_plans(space: _Space) -> _Plans:
    """The fastest plans of the space, proven where that is within reach."""
    costs, cards, options, stopped = space.costs, space.cards, space.options, space.stopped
    drafts = search_drafts(costs, space.shapes, cards, options, stopped, limit_seconds=space.limit_seconds)
    ranked = rank(costs, drafts.candidates)
    proof = _prove(space, ranked)
    if proof.exact:
        return _proven_plans(space, ranked, proof)
    for find in SPECIAL:
        ranked = rank(costs, [*ranked, *find(costs, cards, options, ranked, stopped)])
    any_fits, faster = drafts.any_fits or bool(ranked), None
    if options.keeps_to_cards:
        ranked, faster = keep_to_cards(costs, ranked)
    return _Plans(ranked=ranked, faster=faster, num_simulated=drafts.num_priced, any_fits=any_fits)


def _prove(space: _Space, known: Sequence[Candidate]) -> Proof:
    """What is proven of the known plans, where a proof may stand."""
    costs, cards, options = space.costs, space.cards, space.options
    provable = not options.offload_disk and space.has_all_shapes and is_provable(space.shapes, cards)
    if not provable or _has_unproven(costs, cards, options):
        return NOTHING_PROVEN
    least = known[0].step_seconds if known else math.inf
    return prove_shapes(costs, space.shapes, cards, options, space.stopped, best_seconds=least)


def _proven_plans(space: _Space, known: Sequence[Candidate], proof: Proof) -> _Plans:
    """The plans of a proof that was completed."""
    ranked, faster = rank(space.costs, [*known, *proof.found]), None
    if space.options.keeps_to_cards:
        ranked, faster = keep_to_cards(space.costs, ranked)
    lowest = min((one.step_seconds for one in proof.found), default=math.inf)
    return _Plans(
        ranked=ranked,
        faster=faster,
        num_simulated=proof.num_priced,
        lowest=lowest,
        any_fits=bool(ranked),
    )


def _ranked_plans(space: _Space, candidates: Sequence[Candidate]) -> _Plans:
    """Plans that were found without shapes."""
    ranked = rank(space.costs, candidates)
    return _Plans(ranked=ranked, faster=None, num_simulated=len(candidates), any_fits=True)


def _nothing_found(
    space: _Space, plans: _Plans, time_limit: float
) -> SearchStopped | NoPlanFits | ConfigError:
    """Why there is no plan."""
    if not plans.any_fits and (space.stopped() or not space.has_all_shapes):
        return SearchStopped(
            f"search.time_limit ({time_limit:g} s) ended the search before it found a plan that fits; "
            f"there may be one. It had {len(space.shapes)} ways to assign the cards to look at: raise "
            "search.time_limit, or allow fewer with search.tensor, search.pipelines or search.replicas"
        )
    if not space.shapes and not plans.num_simulated:
        return ConfigError(describe_no_shape(space.costs.problem, space.options, space.cards))
    if plans.any_fits:
        return NoPlanFits(NO_VIRTUAL_STAGES)
    return NoPlanFits(describe_shortfall(space.costs, space.cards, space.options))


def _bounded(space: _Space, plans: _Plans) -> tuple[bool, float, Bound | None]:
    """(whether the first plan is proven to be the fastest, seconds that no plan beats, how that is known)."""
    costs, cards, best = space.costs, space.cards, (plans.faster or plans.ranked[0]).step_seconds
    stages = [stage for candidate in plans.ranked for stage in candidate.cost.stages]
    # Where no plan recomputes, activations on hosts gain nothing.
    may_send = any(stage.num_recomputed or stage.leaving for stage in stages)
    may_send = may_send and space.options.offload_activations and not costs.problem.compile
    if plans.faster is None and not may_send and best >= plans.lowest * (1 - 1e-9):
        return True, min(plans.lowest, best), None
    bound = lower_bound(costs, cards, space.options)
    return False, min(bound.seconds, best), bound


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
        or (options.all_schedules, options.all_sizes) != proven
        or "interleaved_1f1b" in options.all_schedules
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


def _even_split_of(space: _Space, best: Candidate) -> tuple[Candidate | None, str]:
    """The even split that a plan is compared with, and if there is none the reason."""
    if not space.shapes and space.has_all_shapes:
        return None, "the cards do not divide into equal pipelines"
    # Its price is one plan's: nothing on few cards, seconds on thousands.
    if not space.shapes or (space.stopped() and len(space.cards) > FEW_CARDS):
        return None, "search.time_limit was over before its turn"
    shape = best.shape if len(best.shape.slots) > 1 else space.shapes[0]
    num_layers = space.costs.problem.model.num_layers
    if len(shape.slots) > num_layers:
        return None, f"it would have {len(shape.slots)} stages, and the model has {num_layers} layers"
    return _cut_evenly(space.costs, shape, space.options), ""


def _cut_evenly(costs: Costs, shape: Shape, options: Options) -> Candidate:
    """The naive plan: all slots in the cluster's order, layers divided evenly; the first slots get one more.

    All stages have the first recompute of the options that fits; the first of all if none does.
    """
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
