"""The search for the fastest plan: shapes pruned by a lower bound, each cut and simulated, the finalists
ranked.

The same input gives the same plan, byte for byte, unless the time limit ends the search; then the best so far
is returned, and `SearchResult.stopped` says so.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.errors import ConfigError, NoPlanFits
from yuan_train.config.plan import Plan, plan_laws
from yuan_train.config.run import Recompute, SearchConfig
from yuan_train.planner.bounds import any_bound, shape_bound
from yuan_train.planner.candidates import Options, Shape, list_shapes, make_plan, read_options
from yuan_train.planner.cost import PlanCost, cost_plan, make_forecast
from yuan_train.planner.mixing import mix_pipelines, split_stages
from yuan_train.planner.orders import (
    MAX_SMALL_SLOTS,
    Sketch,
    Solution,
    is_small,
    refine,
    sketch,
    solve,
)
from yuan_train.planner.outlook import outlook_seconds
from yuan_train.planner.partition import Cut, may_hide
from yuan_train.planner.problem import is_faithful, make_instance
from yuan_train.planner.refine import refine_plan, refined_hope
from yuan_train.planner.setting import Costs, Setting, make_costs
from yuan_train.planner.shortfall import describe_no_shape, describe_shortfall
from yuan_train.planner.sums import sum_seconds, unit_parameters

NUM_RUNNERS_UP = 4
MAX_FINALISTS = 100
"""Plans simulated once more, whole, with every cost that a step has."""
FEW_CARDS = 16
MAX_SMALL_STEPS, MAX_SMALL_STEPS_OF_FEW = 640, 10_000
"""Stages * micro-batches up to which a shape is searched to its end; with few cards it is worth more."""
SOLVED_STEPS, SOLVED_STEPS_OF_FEW = 1_000, 40_000
"""The same, summed over the shapes that are searched so; the rest is sketched."""
PROOF_WORK, PROOF_WORK_OF_FEW = 100_000_000, 4_000_000_000
"""What all proofs together may take; see `orders.Solution.work`."""
SKETCH_WORK_PER_CARD = 250_000
"""Cells of dynamic programming (stages * units^2) that all sketches together may fill."""
HOPELESS = 1.1
"""On many cards: shapes whose outlook is so many times the best that was found are not cut."""
MANY_CARDS, KEPT_OF_MANY = 64, 3
"""Cuts of a shape that are costed whole, on more cards than these."""
MAX_REFINED_SHAPES = 3
NUM_TOUCHED, NUM_HOPEFUL = 4, 12
"""Plans, the best ones and those that hope for most from it, that get the last touches of `refine`."""
NUM_SPLIT = 3
"""Plans whose stages are tried as virtual stages."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, and what it costs."""

    plan: Plan
    cost: PlanCost
    shape: Shape

    @property
    def step_seconds(self) -> float:
        return self.cost.step_seconds

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Layers of each stage of the first pipeline."""
        return tuple(stage.layers for stage in self.plan.pipelines[0].stages)

    @property
    def cards(self) -> frozenset[Card]:
        return frozenset(card for stage in self.cost.stages for card in stage.cards)


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
    if not shapes:
        raise ConfigError(describe_no_shape(setting, options, cards))
    if options.use_all_devices:
        shapes = _with_a_unit_for_each(setting, shapes)
    found = _solve_shapes(costs, shapes, options, stopped)
    if not found.candidates:
        raise NoPlanFits(describe_shortfall(costs, shapes, options))
    ranked = _rank(costs, _lawful(found.candidates))
    ranked = _rank(costs, [*ranked, *_beyond(costs, ranked, cards, options, stopped)])
    ranked = [candidate for candidate in ranked if candidate.plan.schedule in options.schedules]
    if not ranked:
        raise NoPlanFits(describe_shortfall(costs, shapes, options))
    ranked = _rank(costs, _refined(costs, ranked, options))
    lowest = found.lower_bound_seconds
    exact = found.exact and not _may_mix(options, cards) and ranked[0].step_seconds >= lowest * (1 - 1e-9)
    beyond = _may_mix(options, cards) or len(_shapes_of(ranked)) > len(_shapes_of(found.candidates))
    if beyond or (not exact and not setting.is_schema_profile):
        lowest = min(lowest, any_bound(costs, cards, options))
    bound = min(lowest, ranked[0].step_seconds)
    best = _with_forecast(costs, ranked[0], bound)
    problems = list(plan_laws(best.plan))
    assert not problems, f"the planner made a plan that breaks the laws: {problems}"
    even_shape = best.shape if len(best.shape.slots) > 1 else shapes[0]
    return SearchResult(
        best=best,
        runners_up=_runners_up(ranked),
        even_split=even_split(costs, even_shape, options),
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
    """Solve every small shape that a bound does not exclude, the most hopeful first; sketch the large ones,
    and refine the best of them."""
    search = _Search(costs, options, stopped)
    chances = [
        _Chance(
            shape=shape,
            bound=shape_bound(costs, shape, options),
            hope=outlook_seconds(costs, shape, options) + _sync_hope(costs, shape),
        )
        for shape in shapes
    ]
    large: list[_Chance] = []
    # Shapes that seem not to fit come last.
    for chance in sorted(chances, key=lambda c: (c.hope, c.bound)):
        if search.excludes(chance):
            search.skip(chance.bound)
        elif not search.may_solve(chance.shape) or not search.solve(chance.shape):
            large.append(chance)
    search.draw(large)
    return _Found(
        candidates=tuple(search.candidates),
        lower_bound_seconds=search.lower_bound,
        exact=search.exact,
        num_simulated=search.num_simulated,
    )


@dataclass(frozen=True, kw_only=True)
class _Chance:
    """A shape, what it cannot beat, and what it promises."""

    shape: Shape
    bound: float
    hope: float


class _Search:
    """What has been found so far; it lives for one search."""

    def __init__(self, costs: Costs, options: Options, stopped: Callable[[], bool]) -> None:
        self.costs, self.options, self.stopped = costs, options, stopped
        self.candidates: list[Candidate] = []
        self.best = self.lower_bound = float("inf")
        self.exact = True
        self.num_simulated = self.solved_steps = 0
        self.few = len(costs.setting.cluster.cards) <= FEW_CARDS
        self.max_steps = MAX_SMALL_STEPS_OF_FEW if self.few else MAX_SMALL_STEPS
        self.max_solved = SOLVED_STEPS_OF_FEW if self.few else SOLVED_STEPS
        self.proof_work = PROOF_WORK_OF_FEW if self.few else PROOF_WORK

    def excludes(self, chance: _Chance) -> bool:
        """Whether a shape need not be looked at: it cannot win, hardly can, or the time is over."""
        hopeless = not self.few and chance.hope > HOPELESS * self.best
        return chance.bound >= self.best or hopeless or (self.stopped() and bool(self.candidates))

    def skip(self, bound: float) -> None:
        """A shape that is not looked at: excluded if its bound is above the best."""
        self.exact = self.exact and bound >= self.best
        self.lower_bound = min(self.lower_bound, bound)

    def may_solve(self, shape: Shape) -> bool:
        """Whether a shape may be small, and there is work left for it."""
        depth = min(len(shape.slots), self.costs.setting.model.num_layers + 2)
        few = len(shape.slots) <= MAX_SMALL_SLOTS and depth * shape.num_micro_batches <= self.max_steps
        return few and self.solved_steps < self.max_solved

    def solve(self, shape: Shape) -> bool:
        """Search a shape to its end; False if it is not small after all."""
        instance = make_instance(self.costs, shape, self.options)
        if not is_small(instance):
            return False
        solution = solve(instance, max_work=max(self.proof_work, 0), stopped=self.stopped)
        self.solved_steps += instance.num_slots * shape.num_micro_batches
        self.proof_work -= solution.work
        proven = solution.exact and (not solution.cuts or is_faithful(self.costs, shape, self.options))
        self._take(shape, solution, proven=proven)
        if instance.num_slots > 1 and may_hide(instance) and instance.message_seconds.any():
            # The proof is about plain warm-ups; these are for `refine_plan`.
            deeper = refine(sketch(instance), hidden=True, stopped=self.stopped)
            self.candidates += _as_candidates(self.costs, shape, self.options, deeper.cuts)
        return True

    def draw(self, large: Sequence[_Chance]) -> None:
        """Sketch large shapes, the most hopeful first, while the budget lasts; refine the best sketches."""
        drawn: list[tuple[Shape, Sketch]] = []
        least = self.best
        budget = SKETCH_WORK_PER_CARD * len(self.costs.setting.cluster.cards)
        for chance in large:
            done = bool(drawn or self.candidates) and (budget <= 0 or self.stopped())
            if done or min(chance.bound, chance.hope / HOPELESS) >= least:
                self.skip(chance.bound)
                continue
            instance = make_instance(self.costs, chance.shape, self.options)
            found = sketch(instance)
            budget -= min(instance.num_slots, instance.num_units) * instance.num_units**2 * 40
            self.exact = False
            self.lower_bound = min(self.lower_bound, chance.bound)
            if found.plain:
                drawn.append((chance.shape, found))
                least = min(least, *found.plain.values())
        for hidden in (False, True):
            # Sorting is stable: of equals, the more hopeful shape.
            estimated = [(s, d, d.hidden if hidden else d.plain) for s, d in drawn]
            good = sorted((item for item in estimated if item[2]), key=lambda item: min(item[2].values()))
            for shape, found, _ in good[:MAX_REFINED_SHAPES]:
                self._take(shape, refine(found, hidden=hidden, stopped=self.stopped), proven=False)

    def _take(self, shape: Shape, solution: Solution, *, proven: bool) -> None:
        self.exact = self.exact and proven
        self.num_simulated += solution.num_simulated
        if not proven:
            self.lower_bound = min(self.lower_bound, shape_bound(self.costs, shape, self.options))
        elif solution.cuts:
            self.lower_bound = min(self.lower_bound, solution.lower_bound_seconds)
        many = len(self.costs.setting.cluster.cards) > MANY_CARDS
        cuts = solution.cuts[:KEPT_OF_MANY] if many else solution.cuts
        self.candidates += _as_candidates(self.costs, shape, self.options, cuts)
        self.best = min((choice_seconds(self.costs, c.cost) for c in self.candidates), default=self.best)


def choice_seconds(costs: Costs, cost: PlanCost) -> float:
    """What decides between plans: the step; under another tool's profile without what it does not know."""
    if costs.setting.is_schema_profile:
        return cost.compute_seconds + cost.sync_seconds
    return cost.step_seconds


def _sync_hope(costs: Costs, shape: Shape) -> float:
    """About what the gradient sum adds, for the order in which shapes are looked at."""
    slot = shape.slots[0]
    leads = [replica[0] for place in slot for replica in place]
    share = sum(unit_parameters(costs.setting.model)) / min(len(shape.slots), costs.setting.model.num_layers)
    return sum_seconds(costs, leads, share / len(slot[0][0]), sharded=shape.sharded)


def _lawful(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [c for c in candidates if not list(plan_laws(c.plan))]


def _shapes_of(candidates: Sequence[Candidate]) -> set[object]:
    return {id(candidate.shape) for candidate in candidates}


def _beyond(
    costs: Costs,
    ranked: Sequence[Candidate],
    cards: Sequence[Card],
    options: Options,
    stopped: Callable[[], bool],
) -> list[Candidate]:
    """Plans that no shape holds: unlike pipelines, and stages split into virtual ones."""
    made: list[tuple[Shape, Plan]] = []
    for best in ranked[:NUM_SPLIT]:
        if best.plan.schedule == "1f1b" and "interleaved_1f1b" in options.schedules:
            made += [(best.shape, plan) for plan in split_stages(best.plan)]
    if _may_mix(options, cards) and not stopped() and ranked:
        mixed = mix_pipelines(costs, cards, options, limit_seconds=ranked[0].step_seconds)
        made += [(ranked[0].shape, plan) for plan in mixed]
    result: list[Candidate] = []
    for shape, plan in made:
        if list(plan_laws(plan)):
            continue
        cost = cost_plan(costs, plan)
        if cost.fits and _keeps_memory(cost):
            own = replace(shape, schedule=plan.schedule)
            result.append(Candidate(plan=plan, cost=cost, shape=own))
    return result


def _refined(costs: Costs, ranked: Sequence[Candidate], options: Options) -> list[Candidate]:
    """The candidates, the best ones after the last touches. Under another tool's profile there are none: it
    is to be judged by plain 1F1B."""
    if costs.setting.is_schema_profile:
        return list(ranked)
    result = list(ranked)
    hopes = [refined_hope(candidate.plan, candidate.cost) for candidate in ranked]
    hopeful = sorted(range(len(ranked)), key=lambda i: (hopes[i], i))[:NUM_HOPEFUL]
    best = ranked[0].step_seconds
    for i in dict.fromkeys([*range(min(NUM_TOUCHED, len(ranked))), *hopeful]):
        if i < NUM_TOUCHED or hopes[i] < best:
            plan, cost = refine_plan(costs, ranked[i].plan, ranked[i].cost, options.recompute)
            result[i] = replace(ranked[i], plan=plan, cost=cost)
            best = min(best, cost.step_seconds)
    return result


def _keeps_memory(cost: PlanCost) -> bool:
    return all(stage.memory.total <= stage.capacity_bytes for stage in cost.stages)


def _as_candidates(costs: Costs, shape: Shape, options: Options, cuts: Sequence[Cut]) -> list[Candidate]:
    result: list[Candidate] = []
    for cut in cuts:
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
        shape.num_pipelines,
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
