"""The search for the fastest plan: shapes pruned by a lower bound, each cut and simulated, the finalists
ranked.

The same input gives the same plan, byte for byte, unless the time limit ends the search; then the best so far
is returned, and `SearchResult.stopped` says so.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.errors import ConfigError, NoPlanFits
from yuan_train.config.plan import Plan, plan_laws
from yuan_train.config.run import Recompute, SearchConfig
from yuan_train.planner.bounds import any_bound
from yuan_train.planner.candidates import Options, Shape, list_shapes, make_plan, read_options
from yuan_train.planner.cost import PlanCost, cost_plan, make_forecast
from yuan_train.planner.explore import Candidate, choice_seconds, solve_shapes
from yuan_train.planner.mixing import deal_unlike, mix_pipelines, split_stages
from yuan_train.planner.refine import refine_plan, refined_hope
from yuan_train.planner.setting import Costs, Setting, make_costs
from yuan_train.planner.shortfall import describe_no_shape, describe_shortfall

NUM_RUNNERS_UP = 4
MAX_FINALISTS = 100
"""Plans simulated once more, whole, with every cost that a step has."""
NUM_TOUCHED, NUM_HOPEFUL = 4, 12
"""Plans, the best ones and those that hope for most from it, that get the last touches of `refine`."""
NUM_SPLIT = 3
"""Plans whose stages are tried as virtual stages."""
NO_VIRTUAL_STAGES = (
    "no plan fits search.schedule: of the cuts that fit, none is left whose stages can be split into virtual "
    "ones: each pipeline must have two stages or more, and each of these two layers or more. Add 1f1b to "
    "search.schedule, or allow fewer cards"
)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A card that the plan does not use, and why."""

    card: Card
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The plan, and what stands beside it in the report."""

    best: Candidate
    """Its plan carries the forecast."""
    runners_up: tuple[Candidate, ...]
    even_split: Candidate | None
    """The cards in the cluster's order, layers shared out evenly; None with more cards than layers."""
    left_out: tuple[LeftOut, ...]
    lower_bound_seconds: float
    exact: bool
    """Whether no other plan of the searched space is faster in the simulation."""
    stopped: bool
    """Whether the time limit ended the search."""
    num_shapes: int
    num_simulated: int
    notes: tuple[str, ...]
    """Where the numbers come from, one line per type of card."""


@contextmanager
def _without_cycle_search() -> Generator[None, None, None]:
    """Millions of small values are made and kept, without a cycle among them; Python's search for cycles
    would look through them again and again, a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_cycle_search()
def search_plan(
    setting: Setting,
    search: SearchConfig,
    *,
    micro_batch_size: int,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """The fastest plan that fits.

    `micro_batch_size` holds where `search.micro_batch_size` names none. Raises ConfigError if the search
    keys, the batch or the precision rule every plan out, NoPlanFits (with the nearest miss) if no plan fits
    the cards.
    """
    options = read_options(
        search,
        micro_batch_size=micro_batch_size,
        model=setting.model,
        measured_widths=_widths(setting),
        num_cards=len(setting.cluster.cards),
    )
    started = clock()

    def stopped() -> bool:
        return clock() - started > search.time_limit

    costs = make_costs(setting)
    cards, without_precision = usable_cards(setting, use_all=options.use_all_devices)
    shapes = list(list_shapes(cards, options, global_batch_size=setting.global_batch_size))
    unlike = (shape for deal in deal_unlike(costs, cards, options) for shape in deal)
    parts = shapes or list(unlike)
    if not parts:
        raise ConfigError(describe_no_shape(setting, options, cards))
    if options.use_all_devices and shapes:
        shapes = _with_a_unit_for_each(setting, shapes)
    found = solve_shapes(costs, shapes, options, stopped)
    ranked = _rank(costs, _lawful(found.candidates))
    ranked = _rank(costs, [*ranked, *_beyond(costs, ranked, cards, options, stopped)])
    if not ranked:
        raise NoPlanFits(describe_shortfall(costs, parts, options))
    ranked = [candidate for candidate in ranked if candidate.plan.schedule in options.schedules]
    if not ranked:
        raise NoPlanFits(NO_VIRTUAL_STAGES)
    ranked = _rank(costs, _refined(costs, ranked, options, stopped))
    lowest = found.lower_bound_seconds
    beyond = _may_mix(options, cards) or "interleaved_1f1b" in options.schedules
    exact = found.exact and not beyond and ranked[0].step_seconds >= lowest * (1 - 1e-9)
    if beyond or (not exact and not setting.is_schema_profile):
        lowest = min(lowest, any_bound(costs, cards, options))
    bound = min(lowest, ranked[0].step_seconds)
    best = _with_forecast(costs, ranked[0], bound)
    problems = list(plan_laws(best.plan))
    assert not problems, f"the planner made a plan that breaks the laws: {problems}"
    even_shape = best.shape if len(best.shape.slots) > 1 or not shapes else shapes[0]
    return SearchResult(
        best=best,
        runners_up=_runners_up(ranked),
        even_split=even_split(costs, even_shape, options) if shapes else None,
        left_out=(*without_precision, *_idle(cards, best)),
        lower_bound_seconds=bound,
        exact=exact,
        stopped=stopped(),
        num_shapes=len(shapes),
        num_simulated=found.num_simulated,
        notes=_notes(best.cost),
    )


def _may_mix(options: Options, cards: Sequence[Card]) -> bool:
    """Whether unlike pipelines are among the searched plans, which no bound excludes."""
    several = options.pipelines is None or max(options.pipelines) > 1
    return several and options.num_micro_batches is None and len(cards) > 1


def _widths(setting: Setting) -> tuple[int, ...]:
    """Tensor-parallel widths that the profile has; none without one."""
    entries = setting.profile.entries if setting.profile else ()
    return tuple(sorted({entry.tensor_parallel for entry in entries}))


def usable_cards(setting: Setting, *, use_all: bool) -> tuple[list[Card], list[LeftOut]]:
    """The cards that can work in the setting's precision, and the others with the reason.

    Raises ConfigError if none can, or if `use_all` asks for those that cannot.
    """
    cluster, precision = setting.cluster, setting.precision
    lacking = [card for card in cluster.cards if cluster.device_type(card.type).peak(precision) is None]
    usable = [card for card in cluster.cards if card not in lacking]
    has_fp16 = all(cluster.device_type(card.type).fp16 is not None for card in cluster.cards)
    advice = f"set train.precision: {'fp16' if precision == 'bf16' and has_fp16 else 'fp32'}"
    if lacking and (use_all or not usable):
        types = ", ".join(sorted({card.type for card in lacking}))
        demand = "search.use_all_devices asks for them" if usable else "there are no other cards"
        raise ConfigError(
            f"train.precision: {precision}: {_names(lacking)} ({types}) have no {precision} units, "
            f"and {demand}; " + advice + (", or use_all_devices: false to leave them out" if usable else "")
        )
    reason = f"no {precision} units; {advice} to use it"
    return usable, [LeftOut(card=card, reason=reason) for card in lacking]


def even_split(costs: Costs, shape: Shape, options: Options) -> Candidate | None:
    """The naive plan: all slots in the cluster's order, layers shared out evenly, the first ones get one
    more.

    All stages recompute in the first way that fits, none if that does. None if there are more slots than
    layers.
    """
    num_layers, num_stages = costs.setting.model.num_layers, len(shape.slots)
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


def _lawful(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [c for c in candidates if not list(plan_laws(c.plan))]


def _beyond(
    costs: Costs,
    ranked: Sequence[Candidate],
    cards: Sequence[Card],
    options: Options,
    stopped: Callable[[], bool],
) -> list[Candidate]:
    """Plans that no shape holds: unlike pipelines, and stages split into virtual ones."""
    made: list[tuple[Shape | None, Plan]] = []
    if "interleaved_1f1b" in options.schedules:
        plain = (candidate for candidate in ranked if candidate.plan.schedule == "1f1b")
        split = ((candidate.shape, list(split_stages(candidate.plan))) for candidate in plain)
        whole = itertools.islice((item for item in split if item[1]), NUM_SPLIT)
        made += [(shape, plan) for shape, plans in whole for plan in plans]
    if _may_mix(options, cards) and not (ranked and stopped()):
        limit = ranked[0].step_seconds if ranked else math.inf
        mixed = mix_pipelines(costs, cards, options, limit_seconds=limit)
        made += [(ranked[0].shape if ranked else None, plan) for plan in mixed]
    result: list[Candidate] = []
    for shape, plan in made:
        if list(plan_laws(plan)):
            continue
        cost = cost_plan(costs, plan)
        if cost.fits and _keeps_memory(cost):
            own = replace(shape or _first_shape(plan, cost), schedule=plan.schedule)
            result.append(Candidate(plan=plan, cost=cost, shape=own))
    return result


def _first_shape(plan: Plan, cost: PlanCost) -> Shape:
    """The shape of a plan's first pipeline, where no shape of equal pipelines is possible."""
    return Shape(
        schedule=plan.schedule,
        micro_batch_size=plan.pipelines[0].micro_batch_size,
        num_micro_batches=plan.pipelines[0].num_micro_batches,
        slots=tuple((tuple(stage.replicas),) for stage in cost.stages if stage.pipeline == 0),
    )


def _refined(
    costs: Costs, ranked: Sequence[Candidate], options: Options, stopped: Callable[[], bool]
) -> list[Candidate]:
    """The candidates, the best ones after the last touches. Under another tool's profile there are none: it
    is to be judged by plain 1F1B."""
    if costs.setting.is_schema_profile:
        return list(ranked)
    result = list(ranked)
    hopes = [refined_hope(candidate.plan, candidate.cost) for candidate in ranked]
    hopeful = sorted(range(len(ranked)), key=lambda i: (hopes[i], i))[:NUM_HOPEFUL]
    best = ranked[0].step_seconds
    for i in dict.fromkeys([*range(min(NUM_TOUCHED, len(ranked))), *hopeful]):
        if not stopped() and (i < NUM_TOUCHED or hopes[i] < best):
            plan, cost = refine_plan(costs, ranked[i].plan, ranked[i].cost, options.recompute)
            result[i] = replace(ranked[i], plan=plan, cost=cost)
            best = min(best, cost.step_seconds)
    return result


def _keeps_memory(cost: PlanCost) -> bool:
    return all(stage.memory.total <= stage.capacity_bytes for stage in cost.stages)


def _rank(costs: Costs, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Fastest first; equals (to 9 digits) by fewer cards, then by the plan's text."""

    def seconds(candidate: Candidate) -> float:
        return choice_seconds(costs, candidate.cost)

    finalists = sorted(candidates, key=seconds)[:MAX_FINALISTS]
    return sorted(
        finalists,
        key=lambda c: (float(f"{seconds(c):.8e}"), len(c.plan.ranks), _text(c.plan)),
    )


def _text(plan: Plan) -> str:
    """What tells two plans of a search apart."""
    return repr((plan.schedule, plan.optimizer_sharding, [r.device for r in plan.ranks], plan.pipelines))


def _runners_up(ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The next best, each shape and number of stages at most once, then other cuts of these."""
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
    shape = candidate.shape
    return (
        shape.schedule,
        len(candidate.plan.pipelines),
        shape.micro_batch_size,
        tuple((s.card.type, len(s.cards)) for s in candidate.cost.stages if s.pipeline == 0),
    )


def _with_forecast(costs: Costs, candidate: Candidate, lower_bound_seconds: float) -> Candidate:
    forecast = make_forecast(costs, candidate.cost, lower_bound_seconds=lower_bound_seconds)
    return replace(candidate, plan=replace(candidate.plan, forecast=forecast))


def _idle(cards: Sequence[Card], best: Candidate) -> list[LeftOut]:
    working = {entry.device for entry in best.plan.ranks}
    dealt = best.shape.cards
    result: list[LeftOut] = []
    for card in cards:
        if card.name in working:
            continue
        reason = (
            "every faster cut found does without it"
            if card in dealt
            else f"the {card.type}s do not divide into {best.shape.num_pipelines} equal pipelines"
        )
        result.append(LeftOut(card=card, reason=reason))
    return result


def _notes(cost: PlanCost) -> tuple[str, ...]:
    notes = (f"{s.card.type}: {s.note}" + _width_note(s.replicas, s.source) for s in cost.stages)
    return tuple(dict.fromkeys(notes))


def _width_note(replicas: Sequence[Sequence[Card]], source: str) -> str:
    width = len(replicas[0])
    return f", tensor_parallel {width}" if width > 1 and source == "estimated" else ""


def _with_a_unit_for_each(setting: Setting, shapes: Sequence[Shape]) -> list[Shape]:
    """The shapes whose pipelines are not longer than the model. Raises ConfigError if there are none."""
    num_units = setting.model.num_layers + 2
    kept = [shape for shape in shapes if len(shape.slots) <= num_units]
    if not kept:
        shortest = min(len(shape.slots) for shape in shapes)
        raise ConfigError(
            f"search.use_all_devices: pipelines of at least {shortest} cards, but the model has only "
            f"{num_units} parts (embedding, layers, head) to give to them; allow more search.pipelines, "
            "or leave cards out "
            "with use_all_devices: false"
        )
    return kept


def _names(cards: Sequence[Card]) -> str:
    names = [card.name for card in cards]
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])} and {len(names) - 8} more"
