"""Plans that the compiled core finds: one search over all that a plan may be, by its own price of a step.

`native/search.c` draws random drafts, changes layers, depths, shares of the batch, order, widths, replicas,
stages, pipelines, schedule, sharding and state on hosts, and keeps what is faster, and for a while what is
not (annealing; Kirkpatrick et al. 1983). It counts the drafts that it prices instead of looking at a clock,
so that equal input gives equal plans. `cost_plan` has the last word on what it finds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_uint8
from dataclasses import replace

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.tables import RECOMPUTES, Tables, draft_of, make_tables, plan_of
from yuan_train.planner.native.evaluator import MAX_REPLICAS, NUM_SIZES, DraftTable, SpaceTable
from yuan_train.planner.native.pipelines import NAMES
from yuan_train.planner.search.explore import Candidate
from yuan_train.planner.search.expressible import is_wanted
from yuan_train.planner.search.mixed_pipelines import first_shape
from yuan_train.planner.search.shapes import Options

MOST_CARDS = 56
"""Cards up to which drafts are searched: on more, cuts of shapes are better in the same time."""
BUDGET_PER_CARD, LEAST_BUDGET = 48_000, 240_000
"""Of a search, for each card, and at least: a draft that is priced whole takes 4 of it, one that is longer
than wanted for certain 1."""
BUDGET_PER_SECOND = 30_000
"""At most, for each second of `search.time_limit`; 4 of it take 10 to 50 us. A search looks at no clock, so
that equal input gives equal plans."""
SHARE_OF_VIRTUAL, SHARE_OF_HOSTS = 1 / 8, 1 / 3
"""What is spent on plans with virtual stages, and on each step that has hosts, besides the budget of the
others."""
NUM_GIVEN = 3
"""Of the fastest plans that are known, which the search begins with."""
NUM_JUDGED, NEAR = 40, 1.004
"""Drafts that are priced once more, as long as their step is within this multiple of the fastest one's."""
VIRTUAL = 1 << NAMES.index("interleaved_1f1b")
ANY = 2**64 - 1
"""The set of all counts."""


def search_drafts(
    costs: Costs,
    ranked: Sequence[Candidate],
    cards: Sequence[Card],
    options: Options,
    stopped: Callable[[], bool],
    *,
    limit_seconds: float,
) -> list[Candidate]:
    """The fastest plans that the core finds, the known ones given; none where it cannot search what is asked:
    disks, and what only `cost_plan` prices."""
    steps = list(_steps(draft_space(options, costs.problem), cards, options))
    fits = len(options.polished_sizes) <= NUM_SIZES
    tables = make_tables(costs, options.polished_sizes, options.tensor) if steps and fits else None
    if tables is None:
        return []
    given = _first_drafts(tables, ranked[: 4 * NUM_GIVEN])
    split = _first_drafts(tables, [one for one in ranked if _can_split(one.plan)])
    most = options.effort * max(BUDGET_PER_CARD * len(cards), LEAST_BUDGET)
    most = min(most, BUDGET_PER_SECOND * limit_seconds)
    found: list[Candidate] = []
    for seed, (own, share) in enumerate(steps, start=1):
        if stopped():
            break
        budget = int(most * share)
        known = [*given, *split] if own.schedules == VIRTUAL else given
        result = tables.evaluator.search(own, known, budget=budget, seed=seed, room=NUM_JUDGED)
        given = [*result.drafts[:NUM_GIVEN], *given]
        for step, draft in zip(result.steps, result.drafts, strict=True):
            if step > NEAR * result.steps[0]:
                break
            found += _judged(tables, costs, draft, options)
    return found


def _first_drafts(tables: Tables, ranked: Sequence[Candidate]) -> list[DraftTable]:
    drafts = (draft_of(tables, candidate.plan) for candidate in ranked)
    return list(itertools.islice((draft for draft in drafts if draft is not None), NUM_GIVEN))


def _can_split(plan: Plan) -> bool:
    """Whether each worker has layers for two virtual stages; the last one may have its head alone."""
    rows = [[stage.num_layers for stage in pipeline.stages] for pipeline in plan.pipelines]
    return all(len(row) > 1 and min(row[:-1]) >= 2 and row[-1] >= 1 for row in rows)


def _narrow_to_wide(space: SpaceTable) -> Iterator[tuple[SpaceTable, float]]:
    """The space in steps, each searched from what was found in those before, and its share of the budget: a
    wider one never loses.

    Under one schedule first: under the other one nearly all plans may be faster, and none the fastest. With
    virtual stages apart and for less, because few plans gain by them.
    """
    plain, others = 1 << NAMES.index("1f1b"), space.schedules & ~VIRTUAL
    steps = list(dict.fromkeys((others & plain or others, others))) if others else []
    for schedules in steps:
        yield _changed(space, schedules, may_offload=0, may_send=0), 1 / len(steps)
    for schedules in steps if space.may_offload or space.may_send else ():
        own = _changed(space, schedules, may_offload=space.may_offload, may_send=space.may_send)
        yield own, SHARE_OF_HOSTS
    if steps and (space.may_offload or space.may_send):
        # What is good with hosts may be so without them, and that is preferred.
        yield _changed(space, others, may_offload=0, may_send=0), SHARE_OF_HOSTS / 2
    if space.schedules & VIRTUAL:
        own = _changed(space, VIRTUAL, may_offload=space.may_offload, may_send=0)
        yield own, SHARE_OF_VIRTUAL if steps else 1.0


def _steps(space: SpaceTable, cards: Sequence[Card], options: Options) -> Iterator[tuple[SpaceTable, float]]:
    """As `_narrow_to_wide`; where drafts are not searched, known plans are split in virtual stages alone, on
    many cards if no other schedule is asked for."""
    few = len(cards) <= MOST_CARDS
    if few and options.restructures and not options.offload_disk:
        yield from _narrow_to_wide(space)
    elif "interleaved_1f1b" in (options.polished_schedules if few else options.schedules):
        yield _changed(space, VIRTUAL, may_offload=space.may_offload, may_send=0), 0.0


def _changed(space: SpaceTable, schedules: int, *, may_offload: int, may_send: int) -> SpaceTable:
    own = SpaceTable.from_buffer_copy(space)
    own.schedules, own.may_offload, own.may_send = schedules, may_offload, may_send
    return own


def _judged(tables: Tables, costs: Costs, draft: DraftTable, options: Options) -> list[Candidate]:
    plan = plan_of(tables, draft)
    if not is_wanted(plan, options):
        return []
    cost = cost_plan(costs, plan)
    if not cost.fits:
        return []
    return [Candidate(plan=plan, cost=cost, shape=replace(first_shape(plan, cost), schedule=plan.schedule))]


def draft_tables(costs: Costs, cards: Sequence[Card], options: Options) -> Tables | None:
    """What a search of drafts takes; None where it cannot search what is asked."""
    if options.offload_disk or not options.restructures or len(cards) > MOST_CARDS:
        return None
    if len(options.polished_sizes) > NUM_SIZES:
        return None
    return make_tables(costs, options.polished_sizes, options.tensor)


def draft_space(options: Options, problem: PlanProblem) -> SpaceTable:
    """The search keys."""
    allowed, batch = options.num_micro_batches, problem.global_batch_size
    each = None if allowed is None else (c_uint8 * (batch + 1))(*(n in allowed for n in range(batch + 1)))
    schedules = sum(1 << NAMES.index(name) for name in options.polished_schedules)
    replicas = ANY if options.any_replicas else sum(1 << n for n in options.replicas if n <= MAX_REPLICAS)
    counts = ANY if options.pipelines is None else sum(1 << n for n in options.pipelines if n < 63)
    return SpaceTable(
        sum(1 << RECOMPUTES.index(kind) for kind in options.recompute),
        schedules,
        sum(1 << int(sharded) for sharded in options.sharded),
        counts,
        replicas,
        int(options.offload and not problem.late_updates),
        int(options.offload_activations and not problem.compile),
        int(options.use_all_devices),
        int(True in options.sharded),
        int(options.fixed_order),
        int(options.expressible),
        each,
    )
