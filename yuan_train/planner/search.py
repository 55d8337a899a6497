"""The search for the fastest plan: shapes pruned by a lower bound, each cut and simulated, the finalists
ranked.

The same input gives the same plan, byte for byte, unless the time limit ends the search; then the best so far
is returned, and `SearchResult.stopped` says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.errors import ConfigError, NoPlanFits
from yuan_train.config.load import dump
from yuan_train.config.plan import Plan, plan_laws
from yuan_train.config.run import Recompute, SearchConfig
from yuan_train.config.units import show_bytes
from yuan_train.planner.candidates import (
    Options,
    Shape,
    is_faithful,
    list_shapes,
    make_instance,
    make_plan,
    read_options,
)
from yuan_train.planner.cost import Costs, PlanCost, Setting, cost_plan, make_costs, make_forecast
from yuan_train.planner.orders import Solution, nearest_miss, solve
from yuan_train.planner.partition import Cut, Instance, Shortfall, StageTables, area_bound_seconds

NUM_RUNNERS_UP = 4
MAX_FINALISTS = 100
"""Plans simulated once more, whole, with every cost that a step has."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, and what it costs."""

    plan: Plan
    cost: PlanCost
    shape: Shape

    @property
    def step_seconds(self) -> float:
        return self.cost.step_seconds


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
    options = read_options(search, micro_batch_size=micro_batch_size)
    started = clock()

    def stopped() -> bool:
        return clock() - started > search.time_limit

    costs = make_costs(setting)
    cards, without_precision = usable_cards(setting, use_all=options.use_all_devices)
    shapes = list(list_shapes(cards, options, global_batch_size=setting.global_batch_size))
    if not shapes:
        raise ConfigError(_no_shape(setting, options, cards))
    if options.use_all_devices:
        shapes = _with_a_unit_for_each(setting, shapes)
    found = _solve_shapes(costs, shapes, options, stopped)
    if not found.candidates:
        raise NoPlanFits(describe_shortfall(costs, shapes, options))
    ranked = _rank(found.candidates)
    bound = min(found.lower_bound_seconds, ranked[0].step_seconds)
    best = _with_forecast(costs, ranked[0], bound)
    problems = list(plan_laws(best.plan))
    assert not problems, f"the planner made a plan that breaks the laws: {problems}"
    return SearchResult(
        best=best,
        runners_up=_runners_up(ranked),
        even_split=even_split(costs, best.shape, options),
        left_out=(*without_precision, *_idle(cards, best)),
        lower_bound_seconds=bound,
        exact=found.exact,
        stopped=stopped(),
        num_shapes=len(shapes),
        num_simulated=found.num_simulated,
        notes=_notes(best.cost),
    )


def usable_cards(setting: Setting, *, use_all: bool) -> tuple[list[Card], list[LeftOut]]:
    """The cards that can work in the setting's precision, and the others with the reason.

    Raises ConfigError if none can, if `use_all` asks for those that cannot, or if training cannot run it.
    """
    cluster, precision = setting.cluster, setting.precision
    if precision == "fp16":
        raise ConfigError(
            "train.precision: training cannot run fp16 yet; use bf16, or fp32 on cards without it"
        )
    lacking = [card for card in cluster.cards if cluster.device_type(card.type).peak(precision) is None]
    usable = [card for card in cluster.cards if card not in lacking]
    advice = (
        "set train.precision: fp32 (fp16 suits such cards too, but training cannot run it yet)"
        if precision == "bf16"
        else "set train.precision: fp32"
    )
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

    It recomputes everything if it would not fit otherwise. None if there are more slots than layers.
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
    return next((candidate for candidate in tried if candidate.cost.fits), tried[0])


# --- shapes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Found:
    candidates: tuple[Candidate, ...]
    lower_bound_seconds: float
    exact: bool
    num_simulated: int


def _solve_shapes(
    costs: Costs, shapes: Sequence[Shape], options: Options, stopped: Callable[[], bool]
) -> _Found:
    """Solve every shape that a bound does not exclude, the most hopeful first."""
    instances = [(shape, make_instance(costs, shape, options)) for shape in shapes]
    bounds = [area_bound_seconds(instance) for _, instance in instances]
    candidates: list[Candidate] = []
    lower_bound, exact, num_simulated = float("inf"), True, 0
    best = float("inf")
    for i in sorted(range(len(shapes)), key=lambda i: (bounds[i], i)):
        shape, instance = instances[i]
        if bounds[i] >= best:
            lower_bound = min(lower_bound, bounds[i])
            continue
        if stopped() and candidates:
            lower_bound, exact = min(lower_bound, bounds[i]), False
            continue
        solution = solve(instance, stopped=stopped)
        proven = solution.exact and (not solution.cuts or is_faithful(costs, shape, options))
        exact = exact and proven
        num_simulated += solution.num_simulated
        if not proven:
            lower_bound = min(lower_bound, bounds[i])
        elif solution.cuts:
            lower_bound = min(lower_bound, solution.lower_bound_seconds)
        candidates += _as_candidates(costs, shape, instance, options, solution)
        best = min((candidate.step_seconds for candidate in candidates), default=best)
    return _Found(
        candidates=tuple(candidates),
        lower_bound_seconds=lower_bound,
        exact=exact,
        num_simulated=num_simulated,
    )


def _as_candidates(
    costs: Costs, shape: Shape, instance: Instance, options: Options, solution: Solution
) -> list[Candidate]:
    result: list[Candidate] = []
    for cut in solution.cuts:
        plan = _plan_of(costs, shape, options, cut)
        cost = cost_plan(costs, plan)
        if cost.fits:
            result.append(Candidate(plan=plan, cost=cost, shape=shape))
    return result


def _plan_of(costs: Costs, shape: Shape, options: Options, cut: Cut) -> Plan:
    recompute: list[Recompute] = []
    for s, choice in enumerate(cut.choices):
        layers = min(cut.bounds[s + 1] - 1, costs.setting.model.num_layers) - max(cut.bounds[s] - 1, 0)
        recompute.append(options.recompute[choice] if layers else "none")
    return make_plan(costs, shape, order=cut.order, bounds=cut.bounds, recompute=recompute)


def _rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Fastest first; equals (to 9 digits) by fewer cards, then by the plan's text."""
    finalists = sorted(candidates, key=lambda c: c.step_seconds)[:MAX_FINALISTS]
    return sorted(
        finalists,
        key=lambda c: (float(f"{c.step_seconds:.8e}"), len(c.plan.ranks), dump(c.plan)),
    )


def _runners_up(ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The next best, each shape and number of stages at most once, then whatever is left."""
    seen: set[object] = {_family(ranked[0])}
    distinct: list[Candidate] = []
    others: list[Candidate] = []
    for candidate in ranked[1:]:
        family = _family(candidate)
        (others if family in seen else distinct).append(candidate)
        seen.add(family)
    return tuple(sorted([*distinct, *others][:NUM_RUNNERS_UP], key=lambda c: c.step_seconds))


def _family(candidate: Candidate) -> object:
    shape = candidate.shape
    return (
        shape.schedule,
        shape.num_pipelines,
        shape.micro_batch_size,
        tuple(stage.card.type for stage in candidate.cost.stages if stage.pipeline == 0),
    )


def _with_forecast(costs: Costs, candidate: Candidate, lower_bound_seconds: float) -> Candidate:
    forecast = make_forecast(costs, candidate.cost, lower_bound_seconds=lower_bound_seconds)
    return replace(candidate, plan=replace(candidate.plan, forecast=forecast))


def _idle(cards: Sequence[Card], best: Candidate) -> list[LeftOut]:
    working = {entry.device for entry in best.plan.ranks}
    dealt = {card for slot in best.shape.slots for card in slot}
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
    return tuple(dict.fromkeys(f"{stage.card.type}: {stage.note}" for stage in cost.stages))


# --- nothing fits ----------------------------------------------------------------------------------------


def describe_shortfall(costs: Costs, shapes: Sequence[Shape], options: Options) -> str:
    """The nearest miss over all shapes: which stage lacks how much, and what would help."""
    misses: list[tuple[float, int, Shortfall]] = []
    for i, shape in enumerate(shapes):
        instance = make_instance(costs, shape, options)
        _, miss = nearest_miss(instance)
        misses.append((miss.needed_bytes / max(miss.capacity_bytes, 1.0), i, miss))
    _, i, miss = min(misses, key=lambda item: item[:2])
    shape = shapes[i]
    slot = miss.order[miss.stage]
    card = shape.slots[slot][0]
    device = costs.setting.cluster.device_type(card.type)
    first, end = miss.bounds[miss.stage], miss.bounds[miss.stage + 1]
    text = (
        f"no plan fits. Nearest: {len(miss.order)} stage{'s' * (len(miss.order) > 1)}; stage {miss.stage} "
        f"({card.name}, {card.type}, {_unit_words(costs, first, end)}) needs "
        f"{show_bytes(miss.needed_bytes + device.reserved)} of {show_bytes(device.memory)}"
    )
    advice = ". Give more cards or memory, a smaller micro_batch_size, a shorter sequence_length"
    if options.recompute[miss.choice] == "full":
        return f"{text} with recompute: full{advice}"
    recomputed = _with_full(costs, shape, options, miss)
    if recomputed < miss.needed_bytes + device.reserved:
        text += f"; with recompute: full it needs {show_bytes(recomputed)}"
        if "full" not in options.recompute:
            advice += ", or allow search.recompute: [none, full]"
    return text + advice


def _with_full(costs: Costs, shape: Shape, options: Options, miss: Shortfall) -> float:
    """Bytes that the stage would need, the reserve included."""
    tables = StageTables(make_instance(costs, shape, replace(options, recompute=("full",))))
    slot = miss.order[miss.stage]
    needed = tables.needed_bytes(slot, tables.in_flight(miss.stage, len(miss.order)))
    device = costs.setting.cluster.device_type(shape.slots[slot][0].type)
    return float(needed[0, miss.bounds[miss.stage], miss.bounds[miss.stage + 1]]) + device.reserved


def _unit_words(costs: Costs, first: int, end: int) -> str:
    """`embedding and layers 0 to 3`."""
    num_layers = costs.setting.model.num_layers
    low, high = max(first - 1, 0), min(end - 1, num_layers)
    words = ["embedding"] * (first == 0)
    if high > low:
        words.append(f"layer {low}" if high == low + 1 else f"layers {low} to {high - 1}")
    return " and ".join(words + ["head"] * (end == num_layers + 2))


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


def _no_shape(setting: Setting, options: Options, cards: Sequence[Card]) -> str:
    wanted = ", ".join(
        f"{name} {'any' if values is None else list(values)}"
        for name, values in (
            ("pipelines", options.pipelines),
            ("micro_batch_size", options.micro_batch_sizes),
            ("num_micro_batches", options.num_micro_batches),
        )
    )
    return (
        f"no pipelines can be made: {len(cards)} cards, global_batch_size {setting.global_batch_size} = "
        f"pipelines * micro_batch_size * num_micro_batches with {wanted} has no solution"
        + (" that uses every card" if options.use_all_devices else "")
        + "; loosen these search keys, or change train.global_batch_size"
    )


def _names(cards: Sequence[Card]) -> str:
    names = [card.name for card in cards]
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])} and {len(names) - 8} more"
