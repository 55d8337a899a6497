"""What a search looks through, and the plans that are found there: by the compiled core, by a proof, and
special ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.config.errors import ConfigError
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.candidate import Candidate, rank
from yuan_train.planner.search.drafts import FEW_CARDS, search_drafts
from yuan_train.planner.search.islands import search_islands
from yuan_train.planner.search.prove import NOTHING_PROVEN, Proof, is_provable, prove_shapes
from yuan_train.planner.search.shapes import Options, Shape, make_plan, wanted_shapes
from yuan_train.planner.search.special import check_special, may_be_special, with_special_plans

LISTING_SHARE = 1 / 2
"""Of the time, for listing the shapes; what is not listed by then is not searched."""


@dataclass(frozen=True)
class TimeLimit:
    """When the search has to end."""

    clock: Callable[[], float]
    started: float
    seconds: float

    def is_over(self, share: float = 1.0) -> bool:
        """Whether that share of the time is over."""
        return self.clock() - self.started > share * self.seconds


@dataclass(frozen=True, kw_only=True)
class Space:
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
class Plans:
    """What was found in a space."""

    ranked: Sequence[Candidate]
    """The plans that fit, fastest first."""
    num_simulated: int
    """Plans of the shapes that were priced."""
    any_fits: bool
    """Whether a plan fits, be it under a schedule that `search.schedule` does not name."""
    lowest: float = math.inf
    """Seconds of the fastest plan of the shapes, if that is proven."""


def find_plans(
    costs: Costs, cards: Sequence[Card], options: Options, limit: TimeLimit
) -> tuple[Space, Plans]:
    """The space, and its fastest plans: of many cards as islands, else of the shapes and beside them. Raises
    ConfigError if the search keys allow none."""
    check_special(costs.problem, options)
    large = search_islands(costs, cards, options, limit.is_over, limit_seconds=limit.seconds)
    if large:
        space = _list_shapes(costs, cards, options, limit, most=1)
        return space, Plans(ranked=rank(large), num_simulated=len(large), any_fits=True)
    space = _list_shapes(costs, cards, options, limit, most=None)
    return space, _search(space)


def _list_shapes(
    costs: Costs, cards: Sequence[Card], options: Options, limit: TimeLimit, *, most: int | None
) -> Space:
    """The shapes, at most so many if there are plans already. Raises ConfigError if no shape is allowed."""
    problem = costs.problem
    wanted = wanted_shapes(cards, options, global_batch_size=problem.global_batch_size)
    listed = itertools.islice(wanted, most)
    shapes = list(_while_time(listed, lambda: limit.is_over(LISTING_SHARE)))
    has_all_shapes = next(wanted, None) is None
    if options.use_all_devices and shapes:
        shapes = _not_longer_than_model(problem, shapes)
    return Space(
        costs=costs,
        cards=cards,
        options=options,
        stopped=limit.is_over,
        shapes=shapes,
        has_all_shapes=has_all_shapes,
        limit_seconds=limit.seconds,
    )


def _search(space: Space) -> Plans:
    """The fastest plans of the space, proven where that is within reach."""
    costs, cards, options, stopped = space.costs, space.cards, space.options, space.stopped
    drafts = search_drafts(costs, space.shapes, cards, options, stopped, limit_seconds=space.limit_seconds)
    ranked = rank(drafts.candidates)
    proof = _prove(space, ranked)
    if proof.exact:
        return _proven_plans(ranked, proof)
    ranked = with_special_plans(costs, cards, options, ranked, stopped)
    any_fits = drafts.any_fits or bool(ranked)
    return Plans(ranked=ranked, num_simulated=drafts.num_priced, any_fits=any_fits)


def _prove(space: Space, known: Sequence[Candidate]) -> Proof:
    """What is proven of the known plans, where a proof may stand."""
    costs, cards, options = space.costs, space.cards, space.options
    provable = not options.offload_disk and space.has_all_shapes and is_provable(space.shapes, cards)
    if not provable or _has_unproven(costs, cards, options):
        return NOTHING_PROVEN
    least = known[0].step_seconds if known else math.inf
    return prove_shapes(costs, space.shapes, cards, options, space.stopped, best_seconds=least)


def _proven_plans(known: Sequence[Candidate], proof: Proof) -> Plans:
    """The plans of a proof that was completed."""
    ranked = rank([*known, *proof.found])
    lowest = min((one.step_seconds for one in proof.found), default=math.inf)
    return Plans(ranked=ranked, num_simulated=proof.num_priced, lowest=lowest, any_fits=bool(ranked))


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
        or may_be_special(costs, cards, options)
    )


def _may_mix(options: Options, cards: Sequence[Card]) -> bool:
    """Whether mixed pipelines, which no proof covers, are among the searched plans."""
    several = options.pipelines is None or max(options.pipelines) > 1
    return several and options.num_micro_batches is None and len(cards) > 1 and not options.expressible


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


def even_split(space: Space, best: Candidate) -> tuple[Candidate | None, str]:
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
