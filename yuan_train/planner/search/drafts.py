"""Plans that the compiled core finds: one search over all that a plan may be, by its own price of a step.

`native/search.c` draws random drafts, changes layers, depths, shares of the batch, order, widths, replicas,
stages, pipelines, schedule, sharding and state on hosts, and keeps what is faster, and for a while what is
not (annealing; Kirkpatrick et al. 1983). It counts the drafts that it prices instead of looking at a clock,
so that equal input gives equal plans. `cost_plan` has the last word on what it finds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from ctypes import c_uint8
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.tables import RECOMPUTES, Tables, make_tables, plan_of, without_limits
from yuan_train.planner.native import core
from yuan_train.planner.search.candidate import Candidate, Space, judge
from yuan_train.planner.search.paged import with_disks
from yuan_train.planner.search.shapes import Options, Shape

FEW_CARDS = 56
"""Cards up to which more are searched longer: on more still, a draft takes as much longer to price."""
BUDGET_PER_CARD, LEAST_BUDGET = 20_000, 600_000
"""Of a search, for each card, and at least: a draft that is priced whole takes 4 of it, one that is longer
than wanted for certain 1."""
BUDGET_PER_SECOND = 30_000
"""At most, for each second of `search.time_limit`; 4 of it take 10 to 50 us."""
NUM_RESTARTS, MORE_RESTARTS, RESTART = 6, 16, 1 / 40
"""Searches under each set of schedules that know nothing of each other, those that follow under the better
set, and the part of the budget that each takes."""
SMALL_CARDS, NUM_SMALL = 8, 9
"""Cards up to which as many searches begin in each part of the space, half as long, and as many follow: with
one pipeline, with two and with any number, each under 1F1B, under others and under all. Of eight cards whose
best plan has two pipelines one search of 84 in all parts met it, and nine of 120 among plans with two."""
NUM_VIRTUAL = 12
"""Short searches of virtual stages on so few cards: most of them end in slower plans than the best one."""
AGAIN_CARDS, MOST_TIMES, EQUAL = 12, 4, 1e-3
"""Cards up to which all is searched again until the fastest draft is found twice, how often at most, and
which steps count as equal: one search in twelve of so few cards misses it, and it takes a second or two."""
GOING_ON, LEAST_ROUNDS, MOST_ROUNDS, LEAST_GAIN = 1 / 4, 2, 5, 1e-3
"""Part of the budget that goes on from the fastest drafts in a round, how many rounds there are, and what one
must gain for there to be a further one."""
PROMISING_VIRTUAL, PROMISING_BESIDE = 1.02, 0.99
"""A part of the space that few plans gain by is searched further if a short search has found a step of at
most this multiple of the fastest one's: virtual stages, and what is preferred only if it gains much."""
OF_SHAPES, MOST_SHAPES = 1 / 8, 400
"""Part of the budget of a search that begins with shapes, and how many of these."""
NUM_GIVEN = 6
"""Of the fastest drafts that are known, which a search begins with."""
NUM_JUDGED, NEAR = 20, 1.004
"""Drafts that are priced once more, as long as their step is within this multiple of the fastest one's."""
NUM_JUDGED_BESIDE = 5
"""The same of those with something on hosts, of which `cost_plan` places copy after copy."""
FIRST_SEED = 300
"""Of the random numbers of the searches, which count on from it; docs/benchmarks-planner.md tried three."""
PLAIN, VIRTUAL = 1 << core.NAMES.index("1f1b"), 1 << core.NAMES.index("interleaved_1f1b")
ANY = 2**64 - 1
"""The set of all counts."""


@dataclass(frozen=True)
class FoundDrafts:
    """Plans that fit, and whether some fits under a schedule that the search keys may not name."""

    candidates: tuple[Candidate, ...]
    any_fits: bool
    num_priced: int


def search_drafts(space: Space, shapes: Sequence[Shape]) -> FoundDrafts:
    """The fastest plans that the core finds, from shapes and random drafts; none where it has no tables."""
    costs, options = space.costs, space.options
    sizes, found = options.all_sizes, list[Candidate]()
    any_fits, num_priced, num_cards = False, 0, len(space.cards)
    most = max(BUDGET_PER_CARD * min(num_cards, FEW_CARDS), LEAST_BUDGET)
    # More effort begins with a normal search, so that it ends in no slower plan.
    efforts = sorted({min(options.effort, 1.0), options.effort})
    # The core has room for so many sizes at a time.
    for first, effort in itertools.product(range(0, len(sizes), core.NUM_SIZES), efforts):
        own = effort * most * min(1.0, FEW_CARDS / num_cards)
        budget = int(min(own, BUDGET_PER_SECOND * space.limit.seconds))
        some = sizes[first : first + core.NUM_SIZES]
        tables = make_tables(costs, some, options.tensor, on_disk=options.offload_disk)
        if tables is None:
            continue
        search = _Search(tables, budget, space.is_over)
        # At most so many of the shapes, in even steps.
        count = min(len(shapes), MOST_SHAPES)
        drafts = [draft_of_shape(tables, shapes[i * len(shapes) // count]) for i in range(count)]
        shaped = [(0.0, draft) for draft in drafts if draft is not None]
        wanted = draft_space(options, costs.problem)
        times = MOST_TIMES if options.searches_again and num_cards <= AGAIN_CARDS and effort == 1.0 else 1
        pools = search_again(search, wanted, shaped, keeps_to_cards=options.keeps_to_cards, times=times)
        # Those that keep to the cards, or but for state, may be preferred to faster ones.
        counts = (NUM_JUDGED, NUM_JUDGED_BESIDE, NUM_JUDGED_BESIDE)
        tops = (pool[:n] for pool, n in zip(pools, counts, strict=True))
        near = [draft for top in tops for step, draft in top if step <= NEAR * top[0][0]]
        plans = (plan_of(tables, draft) for draft in near)
        if options.offload_disk:
            plans = (with_disks(costs, plan) for plan in plans)
        found += [one for plan in plans if (one := judge(space, plan)) is not None]
        any_fits, num_priced = any_fits or search.any_fits, num_priced + sum(search.priced)
    return FoundDrafts(tuple(found), any_fits=any_fits, num_priced=num_priced)


def draft_of_shape(tables: Tables, shape: Shape) -> core.DraftTable | None:
    """Equal pipelines of a shape's slots, without layers; None if a draft cannot have them."""
    rows: list[core.StageRow] = []
    for d, slot in itertools.product(range(shape.num_pipelines), shape.slots):
        group = slot[d]
        if len(group) > core.MAX_REPLICAS:
            return None
        row = core.StageRow(width=len(group[0]), num_replicas=len(group), share=1.0)
        for r, replica in enumerate(group):
            row.pools[r] = tables.pool_of[replica[0].name]
        rows.append(row)
    if shape.micro_batch_size not in tables.sizes:
        return None
    size, stages = tables.sizes.index(shape.micro_batch_size), len(shape.slots)
    count = shape.num_micro_batches
    lines = [core.PipelineRow(size, count, d * stages, stages) for d in range(shape.num_pipelines)]
    draft = core.DraftTable(schedule=core.NAMES.index(shape.schedule), is_sharded=shape.sharded)
    draft.num_pipelines, draft.num_stages = len(lines), len(rows)
    draft.pipelines = (core.PipelineRow * len(lines))(*lines)
    draft.stages = (core.StageRow * len(rows))(*rows)
    return draft


def is_short(tables: Tables, draft: core.DraftTable) -> bool:
    """Whether a draft recomputes, or leaves a card out, which it may do for want of memory."""
    rows: list[core.StageRow] = draft.stages[: draft.num_stages]
    used = sum(row.num_replicas * row.width for row in rows if not row.worker)
    return used < tables.problem.num_cards or any(row.num_recomputed for row in rows)


def sends_away(draft: core.DraftTable) -> bool:
    """Whether activations of a stage lie on its hosts."""
    return any(row.away for row in draft.stages[: draft.num_stages])


_Known = tuple[float, core.DraftTable]
"""A draft, and its step in seconds."""
_Begin = tuple[core.SpaceTable, Sequence[_Known]]
"""What a search may choose, and what it begins with."""


class _Pools(NamedTuple):
    """Drafts, the fastest first."""

    on_cards: list[_Known]
    """That keep to the cards."""
    beside: list[_Known]
    """With something beside them."""
    with_state: list[_Known]
    """With state alone beside them, where those before have more than that."""


class _Search:
    """Searches of the core, each with its own random numbers, as many at a time as there are processors."""

    def __init__(self, tables: Tables, budget: int, stopped: Callable[[], bool]) -> None:
        self.tables, self.budget, self.stopped = tables, budget, stopped
        self.num_searches, self.any_fits, self.priced = 0, False, list[int]()

    def run(self, begins: Sequence[_Begin], share: float, part: int = core.WHOLE) -> list[list[_Known]]:
        """The fastest drafts of each of several that take, whole or in part, that share of the budget."""
        first = FIRST_SEED + self.num_searches + 1
        self.num_searches += len(begins)
        one = partial(self._run_one, budget=int(self.budget * share), part=part)
        # Those of many cards would take too much memory together.
        most = core.MOST_THREADS if self.tables.problem.num_cards <= FEW_CARDS else 1
        return core.run_together(one, begins, itertools.count(first), most=most)

    def _run_one(self, begin: _Begin, seed: int, *, budget: int, part: int) -> list[_Known]:
        space, given = begin[0], [draft for _, draft in begin[1]]
        if (self.stopped() and self.any_fits) or (part != core.WHOLE and not given):
            return []
        found = self.tables.evaluator.search(
            space, given, budget=budget, seed=seed, room=NUM_JUDGED, part=part
        )
        self.priced.append(found.num_priced)
        self.any_fits = self.any_fits or bool(found.steps)
        return _fastest(list(zip(found.steps, found.drafts, strict=True)))


def search_again(
    search: _Search, space: core.SpaceTable, shaped: Sequence[_Known], *, keeps_to_cards: bool, times: int
) -> _Pools:
    """What searches of a space find: so many, or fewer if two of them have found the fastest draft."""
    pools, steps = _Pools([], [], []), list[float]()
    while len(steps) < times:
        more = search_space(search, space, shaped, keeps_to_cards=keeps_to_cards)
        pools = _Pools(*(_fastest([*own, *new]) for own, new in zip(pools, more, strict=True)))
        steps.append(min((step for pool in more for step, _ in pool[:1]), default=math.inf))
        least = min(steps)
        if math.isinf(least) or sum(step <= least * (1 + EQUAL) for step in steps) == 2:
            break
    return pools


def search_space(
    search: _Search, space: core.SpaceTable, shaped: Sequence[_Known], *, keeps_to_cards: bool
) -> _Pools:
    """The fastest drafts that one search of a space finds.

    Single searches end in unlike structures, whose steps differ by some percent: the fastest of several is
    worth more than one that is longer, and the last one goes on from it. Some run under 1F1B alone: under
    another schedule nearly all plans may be faster, and none the fastest.
    """
    # Plans with virtual stages alone are split from others.
    others, only = space.schedules & ~VIRTUAL or PLAIN, not space.schedules & ~VIRTUAL
    sets = list(dict.fromkeys((others & PLAIN or others, others)))
    spaces = [space.changed(schedules=schedules, may_offload=0, may_send=0) for schedules in sets]
    hosts, later = space.changed(schedules=others), list[list[_Known]]()
    found, beside = _restarted(search, spaces), list[_Known]()
    found += search.run([(spaces[0], shaped)], OF_SHAPES, core.DEALS)
    on_cards = _continued(search, spaces[-1], found)
    if space.may_offload or space.may_send:
        found = [_annealed(search, hosts, RESTART, on_cards)]
        short = not on_cards or is_short(search.tables, on_cards[0][1])
        short = short or _wants_memory(search, spaces[-1], on_cards)
        if short:
            found += _restarted(search, [space.changed(schedules=schedules) for schedules in sets])
            for row in (row for _, draft in shaped for row in draft.stages[: draft.num_stages]):
                row.may_offload = space.may_offload
            found += search.run([(hosts, shaped)], OF_SHAPES, core.DEALS)
        beside = _fastest(list(itertools.chain(*found)))
        most = PROMISING_BESIDE if keeps_to_cards and on_cards else 1.0
        if beside and (not on_cards or beside[0][0] < most * on_cards[0][0]):
            beside = _continued(search, hosts, [*found, on_cards])
        elif short:
            later = [*found, on_cards]
    if space.schedules & VIRTUAL:
        own = space.changed(schedules=VIRTUAL, may_send=0, may_offload=space.may_offload * (not on_cards))
        known = _fastest([*on_cards, *beside])
        small = search.tables.problem.num_cards <= SMALL_CARDS
        runs = search.run([(own, known[:NUM_GIVEN])] * (NUM_VIRTUAL if small else 1), RESTART)
        split = _fastest(list(itertools.chain(*runs)))
        if split and (only or split[0][0] < PROMISING_VIRTUAL * known[0][0]):
            split = _continued(search, own, [split])
        on_cards = split if only else _fastest([*on_cards, *split])
    # Where memory is short, a short search of hosts says little of a long one.
    if later and not only:
        beside = _continued(search, hosts, later)
    if only or not beside or not sends_away(beside[0][1]):
        return _Pools(on_cards, [] if only else beside, [])
    alone = _fastest([one for run in (*found, beside) for one in run if not sends_away(one[1])])
    return _Pools(on_cards, beside, _annealed(search, hosts.changed(may_send=0), RESTART, alone))


def _restarted(search: _Search, spaces: Sequence[core.SpaceTable]) -> list[list[_Known]]:
    """What searches of each space find, and more of the one whose drafts are faster."""
    num, more, share = NUM_RESTARTS, MORE_RESTARTS, RESTART
    if search.tables.problem.num_cards <= SMALL_CARDS:
        num, more, share, spaces = NUM_SMALL, NUM_SMALL, RESTART / 2, _parts(spaces)
    runs = search.run([(own, ()) for own in spaces for _ in range(num)], share)
    found = [runs[i : i + num] for i in range(0, len(runs), num)]
    steps = [min((step for run in own for step, _ in run), default=math.inf) for own in found]
    better = spaces[steps.index(min(steps))]
    return [*runs, *search.run([(better, ())] * more, share)]


def _parts(spaces: Sequence[core.SpaceTable]) -> list[core.SpaceTable]:
    """The spaces and the last one without 1F1B; of each, plans of one pipeline, of two, and of any number."""
    last = spaces[-1]
    if beside := last.schedules & ~PLAIN:
        spaces = spaces if beside == last.schedules else [*spaces, last.changed(schedules=beside)]
    return [
        own.changed(pipelines=own.pipelines & some)
        for own in spaces
        for some in (1 << 1, 1 << 2, ANY)
        if own.pipelines & some or some == ANY
    ]


def _wants_memory(search: _Search, space: core.SpaceTable, known: Sequence[_Known]) -> bool:
    """Whether a short search finds faster drafts if cards' memory does not end; hosts can gain no more."""
    roomy = _Search(without_limits(search.tables), search.budget, search.stopped)
    # What it finds need not fit, so that it ends with the time.
    roomy.any_fits = True
    found = _annealed(roomy, space, RESTART, known)
    search.priced += roomy.priced
    return bool(found) and found[0][0] < PROMISING_BESIDE * known[0][0]


def _continued(search: _Search, space: core.SpaceTable, found: Sequence[list[_Known]]) -> list[_Known]:
    """The fastest drafts after rounds that go on from the fastest one of each search, while they gain."""
    runs = [run for run in found if run]
    for number in range(1, MOST_ROUNDS + 1 if runs else 1):
        # Those of one search are much alike.
        firsts = _fastest([run[0] for run in runs])
        runs.append(_annealed(search, space, GOING_ON, firsts))
        gains = bool(runs[-1]) and runs[-1][0][0] <= firsts[0][0] * (1 - LEAST_GAIN)
        runs = [run for run in runs if run]
        if number >= LEAST_ROUNDS and not gains:
            break
    return _fastest(list(itertools.chain(*runs)))


def _annealed(search: _Search, space: core.SpaceTable, share: float, given: Sequence[_Known]) -> list[_Known]:
    """The fastest drafts after the given ones are annealed, ever fewer and ever colder."""
    firsts, found = given, list[_Known]()
    for part, own, most in ((core.HOT, 3 / 8, NUM_GIVEN), (core.WARM, 1 / 2, 3), (core.COLD, 1 / 8, 1)):
        begins = [(space, [one]) for one in firsts[:most]]
        runs = search.run(begins, share * own / max(len(begins), 1), part)
        firsts = _fastest([run[0] for run in runs if run])
        found += itertools.chain(*runs)
    return _fastest(found)


def _fastest(found: Sequence[_Known]) -> list[_Known]:
    """The NUM_JUDGED fastest of drafts and their steps, of several with equal steps one."""
    kept: list[_Known] = []
    for step, draft in sorted(found, key=lambda item: item[0]):
        if not kept or step - kept[-1][0] > 1e-7 * step:
            kept.append((step, draft))
    return kept[:NUM_JUDGED]


def draft_space(options: Options, problem: PlanProblem) -> core.SpaceTable:
    """The search keys."""
    allowed, batch = options.num_micro_batches, problem.global_batch_size
    each = None if allowed is None else (c_uint8 * (batch + 1))(*(n in allowed for n in range(batch + 1)))
    schedules = sum(1 << core.NAMES.index(name) for name in options.all_schedules)
    replicas = (
        ANY if options.any_replicas else sum(1 << n for n in options.replicas if n <= core.MAX_REPLICAS)
    )
    counts = ANY if options.pipelines is None else sum(1 << n for n in options.pipelines if n < 63)
    recompute = sum(1 << RECOMPUTES.index(kind) for kind in options.recompute)
    return core.SpaceTable(
        recompute,
        schedules,
        sum(1 << int(sharded) for sharded in options.sharded),
        counts,
        replicas,
        int(options.offload),
        int(options.offload_activations and not problem.compile),
        int(options.use_all_devices),
        int(True in options.sharded) * (1 + problem.model.tie_embeddings),
        int(options.fixed_order),
        int(options.expressible),
        int(options.plain),
        each,
    )
