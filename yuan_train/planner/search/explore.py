"""Which shapes are cut, in which order, and with how much work.

A shape's relaxed estimate decides the order, the most promising first; its lower bound excludes it. Small
shapes are solved; the large ones are sketched within a budget, and the best sketches are refined.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from yuan_train.config.plan import Plan
from yuan_train.planner.costs.grad_reduce import (
    grad_reduce_seconds,
    ring_sharers,
    unit_parameters,
    weight_sync_seconds,
)
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.bounds import shape_bound
from yuan_train.planner.search.candidate import Candidate
from yuan_train.planner.search.descent import Budget
from yuan_train.planner.search.instances import make_instance
from yuan_train.planner.search.offload import with_offload
from yuan_train.planner.search.polish import polish_plan
from yuan_train.planner.search.relaxation import PRUNE_FACTOR, relaxed_seconds
from yuan_train.planner.search.shapes import (
    THOUSANDS,
    Options,
    Shape,
    Slot,
    make_plan,
    stage_recompute,
)
from yuan_train.planner.solver.cost_tables import make_cut
from yuan_train.planner.solver.estimate import may_hide
from yuan_train.planner.solver.instance import Cut
from yuan_train.planner.solver.sketch import Sketch, refine, sketch
from yuan_train.planner.solver.solve import MAX_SMALL_SLOTS, Solution, is_small, solve

FEW_CARDS = 16
"""Cards up to which the larger budgets below hold."""
MAX_SMALL_STEPS, MAX_SMALL_STEPS_OF_FEW = 640, 10_000
"""Stages * micro-batches up to which a shape is solved; the second number is for few cards."""
SOLVED_STEPS, SOLVED_STEPS_OF_FEW = 1_000, 40_000
"""Budget of the same, summed over all solved shapes; the other shapes are sketched."""
SKETCH_WORK_PER_CARD = 250_000
"""Budget of all sketches together: cells of dynamic programming (stages * units^2), per card."""
MANY_CARDS, KEPT_OF_MANY = 48, 2
"""On more cards than these, shapes are sketched alone, and so many cuts of a shape become candidates: proofs
of single shapes say nothing there of the mixed pipelines and polished plans that win."""
PREVIEW_WORK = 100_000
"""Budget of a polish that only helps to choose among sketches; see `descent.Budget`."""
MAX_STEPS_OF_THOUSANDS, NUM_ROUGH = 60_000, 64
"""On thousands of cards, shapes of so many `_num_steps` are cut, or the few with the fewest, others only if
these have no plan; among so many of these the first plan is chosen."""
MAX_REFINED_SHAPES, MAX_POLISHED_SHAPES = 3, 12
"""Sketches that are refined; sketches whose best cut is polished to choose among them."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Candidates of all shapes."""

    candidates: tuple[Candidate, ...]
    num_simulated: int


def solve_shapes(
    costs: Costs,
    shapes: Sequence[Shape],
    options: Options,
    stopped: Callable[[], bool],
    *,
    best_seconds: float = float("inf"),
) -> Found:
    """Solve every small shape that no bound excludes, the most promising first; sketch the large ones, and
    refine the best sketches. Once `stopped()` is true and one shape was tried, the others are skipped.
    There is a plan of `best_seconds` already."""
    search = _Search(costs, options, stopped, best_seconds)
    if len(costs.problem.cluster.cards) <= THOUSANDS:
        search.explore_all(shapes)
    else:
        shapes, longer = _by_steps(shapes, costs.problem.model.num_layers + 2)
        search.sketch_roughly(shapes)
        search.explore_all(shapes)
        if not search.candidates and not stopped():
            search.explore_all(longer)
    return Found(
        candidates=tuple(search.candidates),
        num_simulated=search.num_simulated,
    )


@dataclass(frozen=True, kw_only=True)
class ScoredShape:
    """A shape with two numbers of its best plan's step; of both, less is more promising."""

    shape: Shape
    lower_bound_seconds: float
    """No plan of the shape takes less: it can exclude the shape."""
    estimated_seconds: float
    """Relaxed estimate plus what is exposed of gradient reduction and weight sync: ranks shapes, proves
    nothing; inf if no plan seems to fit."""


class _Search:
    """State of one search: what was found so far, and what is left of the budgets."""

    def __init__(
        self,
        costs: Costs,
        options: Options,
        stopped: Callable[[], bool],
        best_seconds: float,
    ) -> None:
        self.costs, self.options, self.stopped = costs, options, stopped
        self.candidates: list[Candidate] = []
        self.taken: set[tuple[Shape, Cut]] = set()
        """Cuts that were costed: a shape is sketched in two ways, often with the same cuts."""
        self.best = best_seconds
        self.num_simulated = self.solved_steps = self.num_tried = 0
        self.few = len(costs.problem.cluster.cards) <= FEW_CARDS
        self.many = len(costs.problem.cluster.cards) > MANY_CARDS
        self.max_steps = MAX_SMALL_STEPS_OF_FEW if self.few else MAX_SMALL_STEPS
        self.max_solved = SOLVED_STEPS_OF_FEW if self.few else SOLVED_STEPS

    def prunes(self, scored: ScoredShape) -> bool:
        """Whether a shape is skipped: it cannot win, is unlikely to (on many cards), or the time is over."""
        unpromising = not self.few and scored.estimated_seconds > PRUNE_FACTOR * self.best
        return scored.lower_bound_seconds >= self.best or unpromising or self.is_late()

    def is_late(self) -> bool:
        """Whether the time is over and a shape was tried: also where nothing fits, the limit holds."""
        return self.num_tried > 0 and self.stopped()

    def explore_all(self, shapes: Iterable[Shape]) -> None:
        """Explore the shapes that the time allows to bound."""
        costs, cards = self.costs, self.costs.problem.cluster.cards
        bounded: list[tuple[float, Shape]] = []
        for shape in shapes:
            if bounded and self.stopped():
                break
            bounded.append((shape_bound(costs, shape, self.options), shape))
        # Estimates of stages with several replicas are too low, because no deeper warm-up hides their
        # transfers; so these shapes come second, and do not use up the budget of the others.
        for several in (False, True):
            own = [item for item in bounded if any(len(slot[0]) > 1 for slot in item[1].slots) == several]
            self.explore(own, solving=not several or len(cards) <= MAX_SMALL_SLOTS)

    def explore(self, bounded: Sequence[tuple[float, Shape]], *, solving: bool) -> None:
        """Solve the small shapes, if `solving`, and sketch the others, the most promising first."""
        large = [item for item in bounded if not (solving and self.may_solve(item[1]))]
        small = [item for item in bounded if solving and self.may_solve(item[1])]
        for scored in self.ranked(small, lambda: self.solved_steps >= self.max_solved or self.is_late()):
            if not self.prunes(scored) and not (self.may_solve(scored.shape) and self.solve(scored.shape)):
                large.append((scored.lower_bound_seconds, scored.shape))
        self.sketch_shapes(large)

    def ranked(
        self, bounded: Sequence[tuple[float, Shape]], is_over: Callable[[], bool]
    ) -> Iterator[ScoredShape]:
        """Shapes with their lower bounds, in the order of their estimates; from when it `is_over`, or nothing
        is left that might be promising, in the order of their bounds, which are taken for the estimates.

        Shapes that do not seem to fit come last (their estimate is infinite).
        """
        waiting = [(bound, bound, i, False) for i, (bound, _) in enumerate(bounded)]
        heapq.heapify(waiting)
        while waiting:
            estimate, bound, i, known = heapq.heappop(waiting)
            shape = bounded[i][1]
            hopeless = not self.few and estimate > PRUNE_FACTOR * self.best
            if known or hopeless or is_over() or self.stopped():
                yield ScoredShape(shape=shape, lower_bound_seconds=bound, estimated_seconds=estimate)
                continue
            seconds = relaxed_seconds(self.costs, shape, self.options)
            seconds += _exposed_estimate(self.costs, shape, self.options)
            heapq.heappush(waiting, (max(seconds, bound), bound, i, True))

    def may_solve(self, shape: Shape) -> bool:
        """Whether a shape looks small, and the budget of solved shapes is not used up."""
        depth = min(len(shape.slots), self.costs.problem.model.num_layers + 2)
        small = (
            not self.many
            and len(shape.slots) <= MAX_SMALL_SLOTS
            and depth * shape.num_micro_batches <= self.max_steps
        )
        return small and self.solved_steps < self.max_solved

    def solve(self, shape: Shape) -> bool:
        """Solve a shape and take its candidates; False, and nothing done, if its instance is not small."""
        instance = make_instance(self.costs, shape, self.options)
        if not is_small(instance):
            return False
        self.num_tried += 1
        solution = solve(instance, stopped=self.stopped)
        self.solved_steps += instance.num_slots * shape.num_micro_batches
        self._take(shape, solution)
        if instance.num_slots > 1 and may_hide(instance) and instance.message_seconds.any():
            # Cuts are of 1F1B's own warm-up depths; `polish_plan` may make these faster.
            deeper = refine(sketch(instance), hidden=True, stopped=self.stopped)
            self.candidates += _as_candidates(self.costs, shape, self.options, deeper.cuts)
        return True

    def sketch_shapes(self, large: Sequence[tuple[float, Shape]]) -> None:
        """Sketch large shapes, the most promising first, while the budget lasts; refine the best sketches."""
        sketches: list[tuple[Shape, Sketch]] = []
        least = self.best
        budget = SKETCH_WORK_PER_CARD * len(self.costs.problem.cluster.cards)

        def is_over() -> bool:
            return self.is_late() or (bool(sketches or self.candidates) and budget <= 0)

        for scored in self.ranked(large, is_over):
            least_of_shape = min(scored.lower_bound_seconds, scored.estimated_seconds / PRUNE_FACTOR)
            if is_over() or self.prunes(scored) or least_of_shape >= least:
                continue
            instance = make_instance(self.costs, scored.shape, self.options)
            self.num_tried += 1
            found = sketch(instance)
            budget -= min(instance.num_slots, instance.num_units) * instance.num_units**2 * 40
            if found.plain:
                sketches.append((scored.shape, found))
                least = min(least, *found.plain.values())
        # Sorting is stable: among equals, the more promising shape comes first.
        ranked = sorted(sketches, key=lambda item: min(item[1].plain.values()))
        for shape, found in ranked[:MAX_REFINED_SHAPES]:
            if self.candidates and self.stopped():
                return
            self._take(shape, refine(found, stopped=self.stopped))
        for shape, found in self._best_if_deepened([item for item in sketches if item[1].hidden]):
            if self.candidates and self.stopped():
                return
            self._take(shape, refine(found, hidden=True, stopped=self.stopped))

    def sketch_roughly(self, shapes: Sequence[Shape]) -> None:
        """Sketch the most promising of the first shapes: on thousands of cards, where they take the least
        time, so that there is a plan before the time is over."""
        fewest = shapes[:NUM_ROUGH]
        seconds: list[float] = []
        for shape in fewest:
            if seconds and self.stopped():
                break
            estimate = relaxed_seconds(self.costs, shape, self.options)
            seconds.append(estimate + _exposed_estimate(self.costs, shape, self.options))
        if min(seconds, default=math.inf) < math.inf:
            self.num_tried += 1
            shape = fewest[seconds.index(min(seconds))]
            cuts = refine(sketch(make_instance(self.costs, shape, self.options)), stopped=lambda: True).cuts
            self.candidates += _as_candidates(self.costs, shape, self.options, cuts[:1])
            self.best = min([self.best, *(c.step_seconds for c in self.candidates)])

    def _best_if_deepened(self, sketches: Sequence[tuple[Shape, Sketch]]) -> list[tuple[Shape, Sketch]]:
        """The best sketches if deeper warm-ups hide the transfers.

        First ranked by estimate, which ignores the memory that deeper warm-ups need; then, unless there are
        many cards, by the step of each sketch's best cut after `polish_plan`.
        """
        chosen = sorted(sketches, key=lambda item: min(item[1].hidden.values()))
        if self.many:
            return chosen[:MAX_REFINED_SHAPES]
        seconds: dict[int, float] = {}
        for i, (shape, found) in enumerate(chosen[:MAX_POLISHED_SHAPES]):
            (order, bounds), estimate = next(iter(found.hidden.items()))
            plan = _plan_of(self.costs, shape, self.options, make_cut(found.tables, order, bounds, estimate))
            budget = Budget(PREVIEW_WORK, self.stopped)
            _, cost = polish_plan(self.costs, plan, cost_plan(self.costs, plan), self.options, budget)
            seconds[i] = cost.step_seconds
        return [chosen[i] for i in sorted(seconds, key=lambda i: (seconds[i], i))[:MAX_REFINED_SHAPES]]

    def _take(self, shape: Shape, solution: Solution) -> None:
        """Add a solution's candidates, and its count of simulated cuts."""
        self.num_simulated += solution.num_simulated
        for cut in solution.cuts[:KEPT_OF_MANY] if self.many else solution.cuts:
            known = shape, replace(cut, step_seconds=0.0)
            if known in self.taken:
                continue
            self.taken.add(known)
            self.candidates += _as_candidates(self.costs, shape, self.options, [cut])
            if self.candidates and self.stopped():
                break
        self.best = min([self.best, *(c.step_seconds for c in self.candidates)])


def usable_part(shape: Shape, num_units: int) -> Shape:
    """The shape with as many slots of each kind as a pipeline of so many units may have stages, the first
    ones. Other slots differ from these in their links alone; on thousands of cards they take too long."""
    taken: Counter[tuple[str, int, int]] = Counter()
    kept: list[Slot] = []
    for slot in shape.slots:
        kind = slot[0][0][0].type, len(slot[0][0]), len(slot[0])
        taken[kind] += 1
        if taken[kind] <= num_units:
            kept.append(slot)
    return shape if len(kept) == len(shape.slots) else replace(shape, slots=tuple(kept))


def _by_steps(shapes: Sequence[Shape], num_units: int) -> tuple[list[Shape], Iterator[Shape]]:
    """The usable parts of the shapes whose plans are costed soon, and of the others; fewest steps first."""
    steps = [_num_steps(shape, num_units) for shape in shapes]
    ranked = sorted(range(len(shapes)), key=lambda i: (steps[i], i))
    count = sum(number <= MAX_STEPS_OF_THOUSANDS for number in steps) or NUM_ROUGH
    parts = (usable_part(shapes[i], num_units) for i in ranked)
    return list(itertools.islice(parts, count)), parts


def _num_steps(shape: Shape, num_units: int) -> int:
    """How long it takes to cost a plan of the shape: steps to simulate, and stages of all pipelines."""
    return min(len(shape.slots), num_units) * (shape.num_micro_batches + shape.num_pipelines)


def _exposed_estimate(costs: Costs, shape: Shape, options: Options) -> float:
    """Approximate seconds of a shape's gradient reduction and weight sync that no compute hides, on the first
    slot and for equal stages of layers; only ranks shapes.

    The reduction of all n buckets of a stage starts with the first of them, when 1/n of its last backward has
    ended; the last bucket starts after all of it. Weights come back likewise, before the first forward.
    """
    slot, problem = shape.slots[0], costs.problem
    owners = [replica for group in slot for replica in group]
    if len(owners) == 1:
        return 0.0
    # The slots of the first one's node reduce at the same time.
    node = owners[0][0].node
    beside = sum(other[0][0][0].node == node for other in shape.slots)
    sharers = ring_sharers([owners])[0] * beside
    depth = min(len(shape.slots), problem.model.num_layers)
    num_layers = problem.model.num_layers / depth
    share = sum(unit_parameters(costs)) / depth
    bucket = min(share, max(problem.bucket_size, problem.model.trained_unit_parameters[1]))
    layer = costs.of_replica(slot[0][0], shape.micro_batch_size, options.recompute[0]).layer

    def exposed(seconds: Callable[[float], float], layer_seconds: float) -> float:
        hidden = num_layers * layer_seconds * (1.0 - bucket / share)
        return max(seconds(bucket), seconds(share) - hidden)

    reduce = exposed(
        lambda n: grad_reduce_seconds(costs, owners, n, sharded=shape.sharded, sharers=sharers),
        layer.backward_seconds,
    )
    if not shape.sharded:
        return reduce
    return reduce + exposed(
        lambda n: weight_sync_seconds(costs, owners, n, sharers=sharers), layer.forward_seconds
    )


def _as_candidates(costs: Costs, shape: Shape, options: Options, cuts: Sequence[Cut]) -> list[Candidate]:
    """The cuts as plans with their full cost; those that do not fit are dropped."""
    result: list[Candidate] = []
    for cut in cuts:
        plan = _plan_of(costs, shape, options, cut)
        if options.host_seconds:
            plan, cost = with_offload(costs, plan, on_disk=options.offload_disk)
        else:
            cost = cost_plan(costs, plan)
        if cost.fits:
            result.append(Candidate(plan=plan, cost=cost, shape=shape))
    return result


def _plan_of(costs: Costs, shape: Shape, options: Options, cut: Cut) -> Plan:
    recompute = stage_recompute(cut.bounds, cut.choices, options.recompute, costs.problem.model.num_layers)
    return make_plan(costs, shape, order=cut.order, bounds=cut.bounds, recompute=recompute)
