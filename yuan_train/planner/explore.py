"""Which shapes are cut, and how far: the most hopeful first, to the end where they are small.

A shape's outlook decides the order; a lower bound excludes. Small shapes are cut to the end and proven; of
the large ones a few are sketched, and the best sketches refined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.planner.bounds import shape_bound
from yuan_train.planner.candidates import Options, Shape, make_plan, stage_recompute
from yuan_train.planner.cost import PlanCost, cost_plan
from yuan_train.planner.orders import MAX_SMALL_SLOTS, Sketch, Solution, is_small, refine, sketch, solve
from yuan_train.planner.outlook import HOPELESS, outlook_seconds
from yuan_train.planner.partition import Cut, make_cut, may_hide
from yuan_train.planner.problem import is_faithful, make_instance
from yuan_train.planner.refine import refine_plan
from yuan_train.planner.setting import Costs
from yuan_train.planner.sums import sum_seconds, unit_parameters

FEW_CARDS = 16
MAX_SMALL_STEPS, MAX_SMALL_STEPS_OF_FEW = 640, 10_000
"""Stages * micro-batches up to which a shape is searched to its end; with few cards it is worth more."""
SOLVED_STEPS, SOLVED_STEPS_OF_FEW = 1_000, 40_000
"""The same, summed over the shapes that are searched so; the rest is sketched."""
PROOF_WORK, PROOF_WORK_OF_FEW = 100_000_000, 4_000_000_000
"""What all proofs together may take; see `orders.Solution.work`."""
SKETCH_WORK_PER_CARD = 250_000
"""Cells of dynamic programming (stages * units^2) that all sketches together may fill."""
MANY_CARDS, KEPT_OF_MANY = 48, 3
"""Cuts of a shape that are costed whole, on more cards than these."""
MAX_REFINED_SHAPES, MAX_TOUCHED_SHAPES = 3, 12


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
class Found:
    """What came of the shapes."""

    candidates: tuple[Candidate, ...]
    lower_bound_seconds: float
    """No plan of these shapes takes less."""
    exact: bool
    """Whether none of their plans is faster than the best candidate, before the last touches."""
    num_simulated: int


def solve_shapes(
    costs: Costs, shapes: Sequence[Shape], options: Options, stopped: Callable[[], bool]
) -> Found:
    """Solve every small shape that a bound does not exclude, the most hopeful first; sketch the large ones,
    and refine the best of them. What stands still open when `stopped` says so is left."""
    search = _Search(costs, options, stopped)
    chances: list[_Chance] = []
    for shape in shapes:
        bound = shape_bound(costs, shape, options)
        outlook = bound if stopped() else outlook_seconds(costs, shape, options)
        chances.append(_Chance(shape=shape, bound=bound, hope=outlook + _sync_hope(costs, shape)))
    # Shapes that seem not to fit come last. Several replicas promise more than they keep, for no warm-up
    # hides their transfers: they must not crowd the others out.
    ranked = sorted(chances, key=lambda c: (c.hope, c.bound))
    for several in (False, True):
        own = [c for c in ranked if any(len(slot[0]) > 1 for slot in c.shape.slots) == several]
        search.explore(own, solving=not several or len(costs.setting.cluster.cards) <= MAX_SMALL_SLOTS)
    return Found(
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
        self.many = len(costs.setting.cluster.cards) > MANY_CARDS
        self.max_steps = MAX_SMALL_STEPS_OF_FEW if self.few else MAX_SMALL_STEPS
        self.max_solved = SOLVED_STEPS_OF_FEW if self.few else SOLVED_STEPS
        self.proof_work = PROOF_WORK_OF_FEW if self.few else PROOF_WORK

    def excludes(self, chance: _Chance) -> bool:
        """Whether a shape need not be looked at: it cannot win, hardly can, or the time is over."""
        hopeless = not self.few and chance.hope > HOPELESS * self.best
        return chance.bound >= self.best or hopeless or (self.stopped() and bool(self.candidates))

    def explore(self, ranked: Sequence[_Chance], *, solving: bool) -> None:
        """Solve the small shapes, if any are to be solved, and sketch the others."""
        large: list[_Chance] = []
        for chance in ranked:
            if self.excludes(chance):
                self.skip(chance.bound)
            elif not (solving and self.may_solve(chance.shape) and self.solve(chance.shape)):
                large.append(chance)
        self.draw(large)

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
        # Sorting is stable: of equals, the more hopeful shape.
        for shape, found in sorted(drawn, key=lambda item: min(item[1].plain.values()))[:MAX_REFINED_SHAPES]:
            self._take(shape, refine(found, stopped=self.stopped), proven=False)
        for shape, found in self._deepest([item for item in drawn if item[1].hidden]):
            self._take(shape, refine(found, hidden=True, stopped=self.stopped), proven=False)

    def _deepest(self, drawn: Sequence[tuple[Shape, Sketch]]) -> list[tuple[Shape, Sketch]]:
        """The sketches that gain most by deeper warm-ups: by estimate, which knows no memory for them, and of
        these by what the touches make of the best cut, where that is soon told."""
        chosen = sorted(drawn, key=lambda item: min(item[1].hidden.values()))
        if self.many:
            return chosen[:MAX_REFINED_SHAPES]
        seconds: dict[int, float] = {}
        for i, (shape, found) in enumerate(chosen[:MAX_TOUCHED_SHAPES]):
            (order, bounds), estimate = next(iter(found.hidden.items()))
            plan = _plan_of(self.costs, shape, self.options, make_cut(found.tables, order, bounds, estimate))
            _, cost = refine_plan(self.costs, plan, cost_plan(self.costs, plan), self.options.recompute)
            seconds[i] = cost.step_seconds
        return [chosen[i] for i in sorted(seconds, key=lambda i: (seconds[i], i))[:MAX_REFINED_SHAPES]]

    def _take(self, shape: Shape, solution: Solution, *, proven: bool) -> None:
        self.exact = self.exact and proven
        self.num_simulated += solution.num_simulated
        if not proven:
            self.lower_bound = min(self.lower_bound, shape_bound(self.costs, shape, self.options))
        elif solution.cuts:
            self.lower_bound = min(self.lower_bound, solution.lower_bound_seconds)
        cuts = solution.cuts[:KEPT_OF_MANY] if self.many else solution.cuts
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


def _as_candidates(costs: Costs, shape: Shape, options: Options, cuts: Sequence[Cut]) -> list[Candidate]:
    result: list[Candidate] = []
    for cut in cuts:
        plan = _plan_of(costs, shape, options, cut)
        cost = cost_plan(costs, plan)
        if cost.fits:
            result.append(Candidate(plan=plan, cost=cost, shape=shape))
    return result


def _plan_of(costs: Costs, shape: Shape, options: Options, cut: Cut) -> Plan:
    recompute = stage_recompute(cut.bounds, cut.choices, options.recompute, costs.setting.model.num_layers)
    return make_plan(costs, shape, order=cut.order, bounds=cut.bounds, recompute=recompute)
