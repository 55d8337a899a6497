"""Plans for many cards: one draft for each of many islands of nodes that are alike.

A cluster of thousands of cards is cut into equal islands, each with its part of every group of nodes and of
the batch. The compiled core searches one island, and prices it as one of so many: a gradient is reduced over
the owners of all, and its state is sharded among them. So pipelines that are alike are priced once, and a
move changes them in all islands. What does not divide stays idle. `cost_plan` has the last word on the whole
plan.

Hosts are searched where state takes much of all memory: on from the fastest drafts on cards, or from the
beginning where none fits. It stands alone because few cards need none of it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card, NodeGroup
from yuan_train.config.plan import PipelinePlan, Plan
from yuan_train.planner.costs.unit_costs import Costs, make_costs
from yuan_train.planner.costs.workload import plan_on_cards
from yuan_train.planner.native.core import NAMES, DraftTable, SpaceTable, run_together
from yuan_train.planner.search.candidate import Candidate, Space, TimeLimit, judge
from yuan_train.planner.search.drafts import FEW_CARDS, Tables, draft_space, make_tables, plan_of
from yuan_train.planner.search.paged import with_disks
from yuan_train.planner.search.shapes import Options
from yuan_train.planner.search.shortfall import most_copies, state_of

MOST_ISLAND_CARDS, LEAST_ISLAND_CARDS = 256, 24
"""Of an island; where the cluster has no more than the most, the whole is one too."""
NUM_CUTS = 14
"""Numbers of islands that are tried, in even steps of their logarithm."""
FIRST_BUDGET, BUDGET, CARDS_OF_BUDGET = 8_000, 44_000, 80
"""Of the search for each number of islands, and of the ones for the best numbers; see `drafts`. Of islands
with more cards, whose drafts take longer to price, so much less."""
BUDGET_PER_SECOND = 12_000
"""At most, for each second of `search.time_limit`: a search looks at no clock."""
NUM_SIZES_TRIED = 2
"""Micro-batch sizes: many cards have few micro-batches each."""
NUM_FINALISTS, WORTH_LONGER = 5, 1.08
"""Numbers of islands that are searched longer, if their steps are within this multiple of the fastest one."""
LEAST_ROUNDS, ROUNDS_TO_FIT, MOST_ROUNDS, WORTH_A_ROUND = 2, 4, 6, 0.01
"""Searches with hosts, each of which begins with what the one before found, those while nothing fits, and the
part of the step that one must gain for there to be another."""
MUCH_STATE = 0.4
"""Of the memory of all cards, the part from which on hosts are searched, if the state of all islands takes
it: up to 0.35 none of nine clusters of 64 to 1,024 cards gained more than 0.5 %, from 0.41 on five gained 0.2
to 16 %."""
SPARE = 3
"""Where memory is short: of the islands that it may suffice for, this part is tried too, for a state that is
cut into whole layers takes more."""
NEAR = 1.07
"""Of numbers of islands within this factor, the one that leaves the fewest cards over is tried."""
MOST_IDLE = 0.2
"""Of all cards, those that a number of islands may leave over."""


@dataclass(frozen=True, kw_only=True)
class _Island:
    """One of so many alike, and the fastest drafts that are known for it."""

    count: int
    nodes: tuple[int, ...]
    """Of each group of the cluster, how many an island has."""
    tables: Tables
    space: SpaceTable
    """What is searched: cards alone, at first."""
    beside: SpaceTable
    """The same with what the search keys allow of hosts."""
    steps: tuple[float, ...] = ()
    drafts: tuple[DraftTable, ...] = ()
    rows: tuple[object, ...] = ()
    """What the drafts point to."""

    def searched(self, limit: TimeLimit, budget: int, seed: int) -> _Island:
        """The same, with what a search of so much more found."""
        num_cards = min(self.tables.problem.num_cards, MOST_ISLAND_CARDS)
        budget = int(budget * min(1.0, CARDS_OF_BUDGET / num_cards))
        found = self.tables.evaluator.search(
            self.space, self.drafts, budget=budget, seed=seed, room=4, seconds=limit.left()
        )
        if not found.steps or (self.steps and self.steps[0] <= found.steps[0]):
            return self
        return replace(self, steps=found.steps, drafts=found.drafts, rows=found.rows)


def search_islands(space: Space) -> list[Candidate]:
    """The fastest plans of equal islands; none where the core cannot search what is asked."""
    costs, cards, options = space.costs, space.cards, space.options
    few = len(cards) <= FEW_CARDS or len(cards) < len(costs.cards)
    if few or _is_special(options) or costs.topology.dedicated or costs.topology.measured:
        return []
    budgets = _budgets_of(space)
    first = functools.partial(_Island.searched, limit=space.limit, budget=budgets.first, seed=1)
    searched = run_together(first, _islands(space, budgets))
    found = _searched_longer(space, searched, budgets)
    if found and not space.is_over():
        found[0] = found[0].searched(space.limit, budgets.longer // 2, seed=3)
    own, optimizer, room = state_of(costs, cards)
    if not found or found[0].count * own + optimizer > MUCH_STATE * room:
        known = found[:1] or searched[: budgets.num_finalists]
        found = [*_searched_beside(space, known, budgets), *found]
    return list(_plans_of_all(space, found))


@dataclass(frozen=True, kw_only=True)
class _Budgets:
    """Of the searches that a time limit and an effort allow, and how many there are."""

    num_cuts: int
    first: int
    num_finalists: int
    longer: int


def _budgets_of(space: Space) -> _Budgets:
    most, effort = space.limit.seconds * BUDGET_PER_SECOND, space.options.effort
    num_cuts = min(NUM_CUTS, max(3, int(most / (3 * FIRST_BUDGET))))
    num_finalists = min(NUM_FINALISTS, max(1, int(most / (2 * BUDGET))))
    return _Budgets(
        num_cuts=num_cuts,
        first=int(min(effort * FIRST_BUDGET, most / (3 * num_cuts))),
        num_finalists=num_finalists,
        longer=int(min(effort * BUDGET, most / (2 * num_finalists))),
    )


def _islands(space: Space, budgets: _Budgets) -> Iterator[_Island]:
    """Each number of islands that is tried; one of them whatever the time."""
    is_first = True
    for count in _counts(space.costs, len(space.cards), space.options, budgets.num_cuts):
        if not is_first and space.is_over():
            return
        island = _make_island(space.costs, space.options, count)
        if island is not None:
            is_first = False
            yield island


def _searched_longer(space: Space, searched: Sequence[_Island], budgets: _Budgets) -> list[_Island]:
    """The islands whose steps are nearly the shortest, after a longer search of each; fastest first."""
    ranked = sorted((one for one in searched if one.steps), key=lambda one: one.steps[0])
    best = [
        one for one in ranked[: budgets.num_finalists] if one.steps[0] <= WORTH_LONGER * ranked[0].steps[0]
    ]

    def search(one: _Island) -> _Island:
        return one if space.is_over() else one.searched(space.limit, budgets.longer, seed=2)

    return sorted(run_together(search, best), key=lambda one: one.steps[0])


def _searched_beside(space: Space, islands: Sequence[_Island], budgets: _Budgets) -> list[_Island]:
    """The best of some islands after searches with hosts; none if nothing fits. Copies of activations, whose
    drafts take many times as long to price, wait until no more is gained by optimizer state there."""
    may_use = [one for one in islands if one.beside.may_offload or one.beside.may_send]
    state = [replace(one, space=one.beside.changed(may_send=0)) for one in may_use]
    found = _while_it_gains(space, state, budgets, seed=4)
    if any(one.beside.may_send for one in found):
        found = _while_it_gains(space, [replace(one, space=one.beside) for one in found], budgets, seed=20)
    return [one for one in found if one.steps]


def _while_it_gains(space: Space, islands: Sequence[_Island], budgets: _Budgets, seed: int) -> list[_Island]:
    """The best of some islands after rounds of searches; all of them while nothing fits."""
    found = list(islands)
    for number in range(MOST_ROUNDS if found else 0):
        if space.is_over():
            break
        before = min(one.steps[0] if one.steps else math.inf for one in found)
        budget = budgets.longer // 2 if number < LEAST_ROUNDS else budgets.longer
        again = functools.partial(_Island.searched, limit=space.limit, budget=budget, seed=seed + number)
        searched = run_together(again, found)
        found = sorted((one for one in searched if one.steps), key=lambda one: one.steps[0])[:1] or found
        gains = bool(found[0].steps) and found[0].steps[0] <= before * (1 - WORTH_A_ROUND)
        if number + 1 >= (LEAST_ROUNDS if found[0].steps else ROUNDS_TO_FIT) and not gains:
            break
    return found


def _plans_of_all(space: Space, found: Sequence[_Island]) -> Iterator[Candidate]:
    """The fastest plan of each island's drafts that fits; the first one whatever the time."""
    is_first = True
    for island in found:
        if not is_first and space.is_over():
            return
        plans = (_plan_of_all(space.costs, island, plan_of(island.tables, draft)) for draft in island.drafts)
        if space.options.offload_disk:
            plans = (plan and with_disks(space.costs, plan) for plan in plans)
        judged = (judge(space, plan) for plan in plans if plan is not None)
        for one in itertools.islice((one for one in judged if one is not None), 1):
            is_first = False
            yield one


def _is_special(options: Options) -> bool:
    """Whether the search keys ask for what has no island's draft."""
    ordered = options.fixed_order or options.expressible or options.num_micro_batches is not None
    return bool(ordered or "1f1b" not in options.all_schedules)


def _counts(costs: Costs, num_cards: int, options: Options, num_cuts: int) -> Iterator[int]:
    """Numbers of islands, the fewest first: each divides one of the groups without much rest."""
    groups = costs.problem.cluster.nodes
    holding = most_copies(costs, costs.problem.cluster.cards, options)
    fewest = min(-(-num_cards // MOST_ISLAND_CARDS), -(-holding // SPARE))
    most = min(max(num_cards // LEAST_ISLAND_CARDS, fewest), holding, costs.problem.global_batch_size)
    if not fewest:
        return
    last = 0
    for i in range(num_cuts):
        wanted = fewest * (most / fewest) ** (i / (num_cuts - 1))
        near = range(max(fewest, last + 1, int(wanted / NEAR)), math.ceil(wanted * NEAR) + 1)
        count = max(near, key=lambda k: (_num_used(groups, k), -k), default=last)
        if count == last:
            continue
        idle = 1 - _num_used(groups, count) / num_cards
        if idle <= (0.0 if options.use_all_devices else MOST_IDLE):
            yield count
        last = count


def _num_used(groups: Sequence[NodeGroup], count: int) -> int:
    return sum(group.count // count * count * group.num_cards for group in groups)


def _make_island(costs: Costs, options: Options, count: int) -> _Island | None:
    problem = costs.problem
    nodes = tuple(group.count // count for group in problem.cluster.nodes)
    size, rest = divmod(problem.global_batch_size, count)
    groups = zip(problem.cluster.nodes, nodes, strict=True)
    own = tuple(replace(group, count=number) for group, number in groups if number)
    # What is left of the batch is dealt by single sequences.
    sizes = (1,) if rest else options.all_sizes[:NUM_SIZES_TRIED]
    if not own or (rest and 1 not in options.all_sizes):
        return None
    cluster = replace(problem.cluster, nodes=own)
    island = replace(problem, cluster=cluster, global_batch_size=size + (rest > 0))
    own_costs, on_disk = make_costs(island), options.offload_disk
    tables = make_tables(own_costs, sizes, options.tensor, num_islands=count, on_disk=on_disk)
    if tables is None:
        return None
    wanted = draft_space(options, problem).changed(schedules=1 << NAMES.index("1f1b"))
    if options.pipelines is not None:
        whole = (n // count for n in options.pipelines if n % count == 0 and n < 63 * count)
        wanted.pipelines = sum(1 << n for n in whole)
    on_cards = wanted.changed(may_offload=0, may_send=0)
    return _Island(count=count, nodes=nodes, tables=tables, space=on_cards, beside=wanted)


def _plan_of_all(costs: Costs, island: _Island, plan: Plan) -> Plan | None:
    """An island's plan on the cards of all; None if a pipeline has no micro-batch to give up."""
    problem = costs.problem
    too_many = island.count * plan.global_batch_size - problem.global_batch_size
    own = island.tables.costs.problem.cluster.cards
    places = {card.name: i for i, card in enumerate(own)}
    cards = [_cards_of(costs, island, i) for i in range(island.count)]
    used = {all_of[places[rank.device]] for all_of in cards for rank in plan.ranks}
    longest = max(range(len(plan.pipelines)), key=lambda p: plan.pipelines[p].num_micro_batches)
    if too_many and plan.pipelines[longest].num_micro_batches < 2:
        return None

    def pipelines(rank_of: Mapping[Card, int]) -> Iterator[PipelinePlan]:
        for i, all_of in enumerate(cards):
            ranks = {rank.rank: rank_of[all_of[places[rank.device]]] for rank in plan.ranks}
            for p, pipeline in enumerate(plan.pipelines):
                fewer = p == longest and i >= island.count - too_many
                stages = tuple(
                    replace(own, replicas=tuple(tuple(ranks[rank] for rank in one) for one in own.replicas))
                    for own in pipeline.stages
                )
                count = pipeline.num_micro_batches - fewer
                yield replace(pipeline, stages=stages, num_micro_batches=count)

    return plan_on_cards(problem, used, pipelines, schedule=plan.schedule, sharded=plan.optimizer_sharding)


def _cards_of(costs: Costs, island: _Island, number: int) -> list[Card]:
    """The cards of an island, in the order of its own cluster's."""
    found: list[Card] = []
    first = 0
    for group, count in zip(costs.problem.cluster.nodes, island.nodes, strict=True):
        begin = first + number * count * group.num_cards
        found += costs.problem.cluster.cards[begin : begin + count * group.num_cards]
        first += group.count * group.num_cards
    return found
