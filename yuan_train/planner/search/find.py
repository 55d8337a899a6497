"""What a search looks through, and the plans that are found there: by the compiled core, by a proof, and
special ones.

It stands alone because what is found does not depend on what is then said of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.unit_costs import Costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.candidate import Candidate, Space, TimeLimit, rank
from yuan_train.planner.search.drafts import FEW_CARDS, search_drafts
from yuan_train.planner.search.islands import search_islands
from yuan_train.planner.search.prove import NOTHING_PROVEN, is_provable, prove_shapes
from yuan_train.planner.search.shapes import Options, Shape, make_plan, wanted_shapes
from yuan_train.planner.search.special import check_special, may_be_special, with_special_plans

LISTING_SHARE = 1 / 2
"""Of the time, for listing the shapes; what is not listed by then is not searched."""

MOST_EVEN = 4
"""Numbers of equal pipelines that are cut evenly, to compare a plan of unlike ones with."""


@dataclass(frozen=True, kw_only=True)
class Plans:
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


def find_plans(
    costs: Costs, cards: Sequence[Card], options: Options, limit: TimeLimit
) -> tuple[Space, Plans]:
    """The space, and its fastest plans, of many cards as islands. Raises ConfigError if none is allowed."""
    space = Space(costs, cards, options, limit)
    check_special(space)
    large = rank(search_islands(space))
    shapes, has_all = _list_shapes(space, most=1 if large else None)
    none = Plans(shapes=shapes, has_all_shapes=has_all, ranked=(), num_simulated=0, any_fits=False)
    if large:
        return space, replace(none, ranked=large, num_simulated=len(large), any_fits=True)
    return space, _search(space, none)


def _list_shapes(space: Space, *, most: int | None) -> tuple[list[Shape], bool]:
    """(shapes, at most so many, whether these are all)."""
    problem = space.costs.problem
    wanted = wanted_shapes(space.cards, space.options, global_batch_size=problem.global_batch_size)
    shapes: list[Shape] = []
    for shape in itertools.islice(wanted, most):
        shapes.append(shape)
        if space.is_over(LISTING_SHARE):
            break
    has_all_shapes = next(wanted, None) is None
    if space.options.use_all_devices:
        # No slot stays empty. Unlike pipelines may still be short enough.
        shapes = [shape for shape in shapes if len(shape.slots) <= problem.model.num_layers + 2]
    return shapes, has_all_shapes


def _search(space: Space, none: Plans) -> Plans:
    """The fastest plans of the listed shapes and beside them, proven where that is within reach."""
    drafts = search_drafts(space, none.shapes)
    ranked = rank(drafts.candidates)
    proof = NOTHING_PROVEN
    provable = none.has_all_shapes and is_provable(none.shapes, space.cards)
    has_unproven = _has_unproven(space)
    # Where few plans fit, it may find one that random drafts do not lead to.
    if provable and not space.options.offload_disk and not (ranked and has_unproven):
        least = ranked[0].step_seconds if ranked else math.inf
        proof = prove_shapes(space, none.shapes, best_seconds=least)
    if proof.exact and not has_unproven:
        ranked = rank([*ranked, *proof.found])
        lowest = min((one.step_seconds for one in proof.found), default=math.inf)
        return replace(
            none, ranked=ranked, num_simulated=proof.num_priced, lowest=lowest, any_fits=bool(ranked)
        )
    ranked = with_special_plans(space, ranked or rank(proof.found))
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
        or may_be_special(space)
    )


def even_split(space: Space, plans: Plans, best: Candidate) -> tuple[Candidate | None, str]:
    """The even split that a plan is compared with, and if there is none the reason: the plan's own shape cut
    evenly; or, of unlike pipelines and single stages, the fastest of a few numbers of equal pipelines."""
    if not plans.shapes and plans.has_all_shapes:
        return None, "the cards, or the batch, do not divide into equal pipelines"
    # Its price is that of a few plans: nothing on few cards, seconds on thousands.
    if not plans.shapes or (space.is_over() and len(space.cards) > FEW_CARDS):
        return None, "search.time_limit was over before its turn"
    num_layers, own = space.costs.problem.model.num_layers, best.shape
    shapes = {one.num_pipelines: one for one in reversed(plans.shapes) if len(one.slots) <= num_layers}
    if 1 < len(own.slots) <= num_layers and len(best.plan.pipelines) == own.num_pipelines:
        shapes = {own.num_pipelines: own}
    if not shapes:
        count = len(plans.shapes[0].slots)
        return None, f"it would have {count} stages, and the model has {num_layers} layers"
    cuts = [_cut_evenly(space.costs, shapes[n], space.options) for n in sorted(shapes)[:MOST_EVEN]]
    return min(cuts, key=lambda cut: (not cut.cost.fits, cut.step_seconds)), ""


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
