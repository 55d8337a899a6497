"""Plans for many cards: one draft for each of many islands of nodes that are alike.

A cluster of thousands of cards is cut into equal islands, each with its part of every group of nodes and of
the batch. The compiled core searches one island, and prices it as one of so many: a gradient is reduced over
the owners of all, and its state is sharded among them. So pipelines that are alike are priced once, and a
move changes them in all islands. What does not divide stays idle. `cost_plan` has the last word on the whole
plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card, NodeGroup
from yuan_train.config.plan import PipelinePlan, Plan
from yuan_train.planner.costs.plan_problem import plan_on_cards
from yuan_train.planner.costs.unit_costs import Costs, make_costs
from yuan_train.planner.evaluate.tables import Tables, make_tables, plan_of
from yuan_train.planner.native.evaluator import DraftTable, SpaceTable
from yuan_train.planner.native.pipelines import NAMES
from yuan_train.planner.search.candidate import Candidate, Space, judge
from yuan_train.planner.search.drafts import FEW_CARDS, draft_space
from yuan_train.planner.search.shapes import Options

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
    steps: tuple[float, ...] = ()
    drafts: tuple[DraftTable, ...] = ()
    rows: tuple[object, ...] = ()
    """What the drafts point to."""

    def searched(self, budget: int, seed: int) -> _Island:
        """The same, with what a search of so much more found."""
        budget = int(budget * min(1.0, CARDS_OF_BUDGET / self.tables.problem.num_cards))
        found = self.tables.evaluator.search(self.space, self.drafts, budget=budget, seed=seed, room=4)
        if not found.steps or (self.steps and self.steps[0] <= found.steps[0]):
            return self
        return replace(self, steps=found.steps, drafts=found.drafts, rows=found.rows)


def search_islands(space: Space) -> list[Candidate]:
    """The fastest plans of equal islands; none where the core cannot search what is asked."""
    costs, cards, options = space.costs, space.cards, space.options
    few = len(cards) <= FEW_CARDS or len(cards) < len(costs.cards)
    if few or _is_special(options) or costs.topology.dedicated or costs.topology.measured:
        return []
    most = space.limit.seconds * BUDGET_PER_SECOND
    num_cuts = min(NUM_CUTS, max(3, int(most / (3 * FIRST_BUDGET))))
    first = int(min(options.effort * FIRST_BUDGET, most / (3 * num_cuts)))
    num_finalists = min(NUM_FINALISTS, max(1, int(most / (2 * BUDGET))))
    second = int(min(options.effort * BUDGET, most / (2 * num_finalists)))
    searched: list[_Island] = []
    for count in _counts(costs, len(cards), options, num_cuts):
        if searched and space.is_over():
            break
        island = _make_island(costs, options, count)
        searched += [island.searched(first, seed=1)] if island is not None else []
    ranked = sorted((one for one in searched if one.steps), key=lambda one: one.steps[0])[:num_finalists]
    best = [one for one in ranked if one.steps[0] <= WORTH_LONGER * ranked[0].steps[0]]
    longer = [one if space.is_over() else one.searched(second, seed=2) for one in best]
    longer.sort(key=lambda one: one.steps[0])
    if longer and not space.is_over():
        longer[0] = longer[0].searched(second // 2, seed=3)
    found: list[Candidate] = []
    for island in longer:
        if found and space.is_over():
            break
        plans = (_plan_of_all(costs, island, plan_of(island.tables, draft)) for draft in island.drafts)
        judged = (judge(space, plan) for plan in plans if plan is not None)
        # The fastest that fits.
        found += itertools.islice((one for one in judged if one is not None), 1)
    return found


def _is_special(options: Options) -> bool:
    """Whether the search keys ask for what has no island's draft."""
    ordered = options.fixed_order or options.expressible or options.num_micro_batches is not None
    return bool(ordered or "1f1b" not in options.all_schedules)


def _counts(costs: Costs, num_cards: int, options: Options, num_cuts: int) -> Iterator[int]:
    """Numbers of islands, the fewest first: each divides one of the groups without much rest."""
    groups = costs.problem.cluster.nodes
    fewest = -(-num_cards // MOST_ISLAND_CARDS)
    most = min(max(num_cards // LEAST_ISLAND_CARDS, fewest), costs.problem.global_batch_size)
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
    tables = make_tables(make_costs(island), sizes, options.tensor, num_islands=count)
    if tables is None:
        return None
    wanted = draft_space(options, problem).changed(
        schedules=1 << NAMES.index("1f1b"), may_offload=0, may_send=0
    )
    if options.pipelines is not None:
        whole = (n // count for n in options.pipelines if n % count == 0 and n < 63 * count)
        wanted.pipelines = sum(1 << n for n in whole)
    return _Island(count=count, nodes=nodes, tables=tables, space=wanted)


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
