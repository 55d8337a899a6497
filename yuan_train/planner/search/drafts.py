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
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.tables import RECOMPUTES, Tables, draft_of, make_tables, plan_of
from yuan_train.planner.native.evaluator import MAX_REPLICAS, NUM_SIZES, DraftTable, SpaceTable
from yuan_train.planner.native.pipelines import NAMES
from yuan_train.planner.search.candidate import Candidate, first_shape
from yuan_train.planner.search.disks import with_disks
from yuan_train.planner.search.expressible import is_wanted
from yuan_train.planner.search.shapes import Options

MOST_CARDS = 56
"""Cards up to which drafts are searched: on more, cuts of shapes are better in the same time."""
BUDGET_PER_CARD, LEAST_BUDGET = 32_000, 960_000
"""Of a search, for each card, and at least: a draft that is priced whole takes 4 of it, one that is longer
than wanted for certain 1."""
BUDGET_PER_SECOND = 30_000
"""At most, for each second of `search.time_limit`; 4 of it take 10 to 50 us. A search looks at no clock, so
that equal input gives equal plans."""
SHARE_OF_VIRTUAL = 1 / 2
"""What is spent on plans with virtual stages, besides the budget of the others."""
NUM_RESTARTS, SHARE_OF_RESTARTS = 3, 0.6
"""Searches in each part of the space that know nothing of each other, and what they take of the budget."""
NUM_GIVEN = 6
"""Of the fastest drafts that are known, which a search begins with."""
NUM_JUDGED, NEAR = 20, 1.004
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
    """The fastest plans that the core finds, the known ones given; none where it cannot search."""
    runs = list(_wanted_runs(draft_space(options, costs.problem), cards, options))
    tables = None
    if runs:
        tables = make_tables(costs, options.polished_sizes, options.tensor, on_disk=options.offload_disk)
    if tables is None:
        return []
    first = _first_drafts(tables, ranked[: 4 * NUM_GIVEN])
    split = _first_drafts(tables, [one for one in ranked if _can_split(one.plan)])
    most = options.effort * max(BUDGET_PER_CARD * len(cards), LEAST_BUDGET)
    most = min(most, BUDGET_PER_SECOND * limit_seconds)
    on_cards, beside = list[_Known](), list[_Known]()
    for seed, run in enumerate(runs, start=1):
        if stopped():
            break
        given = _fastest([*first, *on_cards, *beside])[:NUM_GIVEN] if run.goes_on else []
        given += split if run.space.schedules == VIRTUAL else []
        drafts, budget = [draft for _, draft in given], int(most * run.share)
        found = tables.evaluator.search(run.space, drafts, budget=budget, seed=seed, room=NUM_JUDGED)
        known = zip(found.steps, found.drafts, strict=True)
        if run.space.may_offload or run.space.may_send:
            beside = _fastest([*known, *beside])
        else:
            on_cards = _fastest([*known, *on_cards])
    # Those that keep to the cards may be preferred to faster ones.
    near = [one for pool in (on_cards, beside) for one in pool if one[0] <= NEAR * pool[0][0]]
    return [candidate for _, draft in near for candidate in _judged(tables, costs, draft, options)]


_Known = tuple[float, DraftTable]
"""A draft, and its step in seconds."""


def _first_drafts(tables: Tables, ranked: Sequence[Candidate]) -> list[_Known]:
    drafts = ((known.step_seconds, draft_of(tables, known.plan)) for known in ranked)
    return list(itertools.islice(((step, draft) for step, draft in drafts if draft is not None), NUM_GIVEN))


def _can_split(plan: Plan) -> bool:
    """Whether each worker has layers for two virtual stages; the last one may have its head alone."""
    rows = [[stage.num_layers for stage in pipeline.stages] for pipeline in plan.pipelines]
    return all(len(row) > 1 and min(row[:-1]) >= 2 and row[-1] >= 1 for row in rows)


@dataclass(frozen=True)
class _Run:
    """One search of the core: what it may change, its share of the budget, and whether it begins with the
    fastest drafts that are known."""

    space: SpaceTable
    share: float
    goes_on: bool


def _runs(space: SpaceTable) -> Iterator[_Run]:
    """Several searches that know nothing of each other, then some that go on from the fastest drafts.

    Single searches end in unlike structures, whose steps differ by some percent: the fastest of several is
    worth more than one that is longer. Some run under one schedule alone: under another one nearly all plans
    may be faster, and none the fastest. With virtual stages last and for less, because few plans gain by
    them. What is good with hosts may be so without them, and that is preferred: so those come after.
    """
    plain, others = 1 << NAMES.index("1f1b"), space.schedules & ~VIRTUAL
    steps = list(dict.fromkeys((others & plain or others, others))) if others else []
    spaces = [space.changed(schedules=schedules, may_offload=0, may_send=0) for schedules in steps]
    last = spaces[-1:]
    if steps and (space.may_offload or space.may_send):
        hosts = space.changed(schedules=others)
        spaces, last = [*spaces, hosts], [hosts, *last]
    for own in spaces:
        for _ in range(NUM_RESTARTS):
            yield _Run(own, SHARE_OF_RESTARTS / (NUM_RESTARTS * len(spaces)), goes_on=False)
    for own in last:
        yield _Run(own, (1 - SHARE_OF_RESTARTS) / len(last), goes_on=True)
    if space.schedules & VIRTUAL:
        own = space.changed(schedules=VIRTUAL, may_send=0)
        yield _Run(own, SHARE_OF_VIRTUAL if steps else 1.0, goes_on=True)


def _fastest(found: Sequence[_Known]) -> list[_Known]:
    """The NUM_JUDGED fastest of drafts and their steps, of several with equal steps one."""
    kept: list[_Known] = []
    for step, draft in sorted(found, key=lambda item: item[0]):
        if not kept or step - kept[-1][0] > 1e-7 * step:
            kept.append((step, draft))
    return kept[:NUM_JUDGED]


def _wanted_runs(space: SpaceTable, cards: Sequence[Card], options: Options) -> Iterator[_Run]:
    """As `_runs`; where drafts are not searched, known plans are split in virtual stages alone, on many cards
    if no other schedule is asked for."""
    few = len(cards) <= MOST_CARDS
    if searches_drafts(cards, options):
        yield from _runs(space)
    elif "interleaved_1f1b" in (options.polished_schedules if few else options.schedules):
        yield _Run(space.changed(schedules=VIRTUAL, may_send=0), 0.0, goes_on=True)


def _judged(tables: Tables, costs: Costs, draft: DraftTable, options: Options) -> list[Candidate]:
    plan = plan_of(tables, draft)
    if options.offload_disk:
        plan = with_disks(costs, plan)
    if not is_wanted(plan, options):
        return []
    cost = cost_plan(costs, plan)
    if not cost.fits:
        return []
    return [Candidate(plan=plan, cost=cost, shape=replace(first_shape(plan, cost), schedule=plan.schedule))]


def searches_drafts(cards: Sequence[Card], options: Options) -> bool:
    """Whether drafts are searched: on few cards, of few micro-batch sizes."""
    few = len(cards) <= MOST_CARDS and len(options.polished_sizes) <= NUM_SIZES
    return few and options.restructures


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
        int(options.offload),
        int(options.offload_activations and not problem.compile),
        int(options.use_all_devices),
        int(True in options.sharded),
        int(options.fixed_order),
        int(options.expressible),
        each,
    )
