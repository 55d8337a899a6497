"""The bound against plans: all of those of few cards, and random lawful ones on small random clusters."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tests.planner.search.test_search import MODEL, card, problem
from yuan_train.config.cluster import Card, Cluster, Host, Link, NodeGroup
from yuan_train.config.plan import PipelinePlan, Plan, RankPlan, StagePlan, uncatalogued_types
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import Recompute, ScheduleName, SearchConfig
from yuan_train.planner.costs.plan_problem import Costs, make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search import bounds
from yuan_train.planner.search.bounds import lower_bound
from yuan_train.planner.search.shapes import read_options

SIZES = (1, 2)
SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zero_bubble", "interleaved_1f1b")
NUM_PLANS = 120


def random_problem(chance: random.Random):
    """Two kinds of node, one of them faster, with memory that some plans exceed."""
    memory = [1 / 8 + chance.choice([0.01, 0.02, 0.04, 4.0]) for _ in range(2)]
    types = {
        "Fast": card(memory[0], speed=chance.uniform(1.0, 4.0)),
        "Slow": card(memory[1]),
    }
    host = chance.choice([None, Host(memory=2**36)])
    nodes = tuple(
        NodeGroup(
            name=name.lower(),
            device=name,
            devices=chance.randint(1, 3),
            link=Link(bandwidth=chance.choice([1e8, 1e10])),
            network=Link(bandwidth=chance.choice([1e7, 1e9]), latency=1e-5),
            host=host,
        )
        for name in types
    )
    return problem(
        Cluster(name="random", nodes=nodes, device_types=types),
        model=replace(MODEL, num_layers=chance.randint(2, 5)),
        global_batch_size=chance.choice([2, 4, 6]),
        bucket_size=10**9,
    )


def random_plan(costs: Costs, chance: random.Random) -> Plan:
    """Any pipelines: often not lawful."""
    given = costs.problem
    cards = list(given.cluster.cards)
    chance.shuffle(cards)
    cards = cards[: chance.randint(1, len(cards))]
    schedule = chance.choice(SCHEDULES)
    chunks = chance.choice([2, 3]) if schedule == "interleaved_1f1b" else 1
    num_pipelines = chance.choice([1, 1, 2, 2, 3])
    pipelines, ranks, batch = [], {}, given.global_batch_size
    for p in range(num_pipelines):
        own = cards[p::num_pipelines]
        size = chance.choice(SIZES)
        groups = []
        while own:
            width, count = chance.choice([1, 1, 2]), chance.choice([1, 1, 1, 2]) if chunks == 1 else 1
            taken, own = own[: width * count], own[width * count :]
            if len(taken) < width * count:
                width, count = len(taken), 1
            groups.append([taken[i * width : (i + 1) * width] for i in range(count)])
        for group in groups:
            for replica in group:
                for one in replica:
                    ranks[one] = None
        cuts = sorted(chance.randint(0, given.model.num_layers) for _ in groups[1:])
        counts = [b - a for a, b in itertools.pairwise([0, *cuts, given.model.num_layers])]
        # Virtual stages as the search makes them.
        parts = [n // chunks + (chunk < n % chunks) for chunk in range(chunks) for n in counts]
        pipelines.append((size, groups * chunks, [0, *itertools.accumulate(parts)]))
    order = {one: i for i, one in enumerate(c for c in given.cluster.cards if c in ranks)}
    shares = [batch // num_pipelines] * num_pipelines
    if chance.random() < 0.4 and num_pipelines > 1:
        shares[0] += 1
        shares[1] -= 1
    shares[0] += batch - sum(shares)
    made = []
    for (size, stages, ends), share in zip(pipelines, shares, strict=True):
        depth = chance.choice([None, None, 1, 3]) if schedule == "1f1b" else None
        offload = chance.choice([0.0, 0.0, 0.5, 1.0])
        made.append(
            PipelinePlan(
                micro_batch_size=size,
                num_micro_batches=max(share // size, 1),
                stages=tuple(
                    StagePlan(
                        replicas=tuple(tuple(order[one] for one in replica) for replica in group),
                        layers=(ends[s], ends[s + 1]),
                        embedding=s == 0,
                        head=s == len(stages) - 1,
                        in_flight=None if depth is None else max(depth, len(group)) * len(stages),
                        recompute=(kind := chance.choice(["none", "selective", "full"])),
                        recompute_layers=1 if kind != "none" and ends[s + 1] > ends[s] else None,
                        optimizer_offload=offload,
                    )
                    for s, group in enumerate(stages)
                ),
            )
        )
    return Plan(
        cluster=given.cluster.name,
        model=given.model,
        sequence_length=given.sequence_length,
        global_batch_size=batch,
        schedule=schedule,
        optimizer_sharding=chance.random() < 0.5,
        ranks=tuple(RankPlan(rank=i, device=one.name, type=one.type) for one, i in order.items()),
        pipelines=tuple(made),
        device_types=uncatalogued_types(given.cluster, {one.type for one in order}),
    )


def fastest(costs: Costs, chance: random.Random) -> float:
    """The shortest step of random plans."""
    least = float("inf")
    for _ in range(NUM_PLANS):
        plan = random_plan(costs, chance)
        if any(True for _ in validate_plan(plan)):
            continue
        cost = cost_plan(costs, plan)
        if cost.fits:
            least = min(least, cost.step_seconds)
    return least


def bound_of(costs: Costs, *schedules: ScheduleName) -> float:
    given = costs.problem
    search = SearchConfig(tensor=(1, 2), micro_batch_size=SIZES, schedule=schedules)
    options = read_options(search, micro_batch_size=1, model=given.model)
    return lower_bound(costs, given.cluster.cards, options).seconds


@pytest.mark.parametrize("seed", [1, 8, 17])
def test_no_random_plan_is_faster_than_the_bound(seed: int):
    chance = random.Random(seed)
    costs = make_costs(random_problem(chance))
    least, bound = fastest(costs, chance), bound_of(costs, *SCHEDULES)
    assert bound <= least * (1 + 1e-9)
    # Not for free.
    assert least == float("inf") or bound > least / 8


def test_a_bound_of_slower_units_is_undercut(monkeypatch: pytest.MonkeyPatch):
    """The same check with thrice the seconds of every unit: random plans are fast enough to refute that."""
    chance = random.Random(17)
    costs = make_costs(random_problem(chance))
    least = fastest(costs, chance)
    assert bound_of(costs, "1f1b") <= least
    monkeypatch.setattr(bounds, "_seconds", lambda unit: 3 * (unit.forward_seconds + unit.backward_seconds))
    assert bound_of(costs, "1f1b") > least


def test_filling_counts_where_memory_makes_pipelines_deep():
    """Cards that hold one layer or two: later ones wait for the first. Split backwards and workers of several
    stages wait less."""
    roomy, tight = (make_costs(few_cards(memory, 1e9, num_layers=6)) for memory in (4.0, 0.005))
    assert bound_of(roomy, "1f1b") == pytest.approx(bound_of(roomy, "interleaved_1f1b"), rel=1e-5)
    plain, split, several = (bound_of(tight, name) for name in SCHEDULES)
    assert plain > split > several > 0
    # A card that holds no layer holds no model.
    assert bound_of(make_costs(few_cards(0.001, 1e9)), "1f1b") == float("inf")


# --- all plans of few cards ------------------------------------------------------------------------------

Groups = tuple[tuple[tuple[Card, ...], ...], ...]
"""Stages of a pipeline, their replicas, their cards."""


def few_cards(memory: float, network: float, num_layers: int = 2):
    """One fast card, two slow ones on one node."""
    types = {"Fast": card(1 / 8 + memory, speed=2.5), "Slow": card(1 / 8 + memory)}
    nodes = tuple(
        NodeGroup(
            name=name.lower(),
            device=name,
            devices=number,
            link=Link(bandwidth=1e10),
            network=Link(bandwidth=network, latency=1e-5),
        )
        for name, number in (("Fast", 1), ("Slow", 2))
    )
    return problem(
        Cluster(name="few", nodes=nodes, device_types=types),
        model=replace(MODEL, num_layers=num_layers),
        global_batch_size=4,
        bucket_size=10**9,
    )


def every_pipelines(cards: Sequence[Card]) -> Iterator[tuple[Groups, ...]]:
    """Up to two pipelines of some of the cards, in any order, once for each order of their types."""
    seen: set[object] = set()
    for count in range(1, len(cards) + 1):
        for own in itertools.permutations(cards, count):
            for borders in itertools.product((0, 1, 2, 3), repeat=count - 1):
                # After a card: another stage, replica or card of the group, or another pipeline.
                made: list[list[list[list[Card]]]] = [[[[own[0]]]]]
                for one, border in zip(own[1:], borders, strict=True):
                    target = [[made[-1][-1][-1], one], [made[-1][-1], [one]], [made[-1], [[one]]]]
                    if border == 3:
                        made.append([[[one]]])
                    else:
                        target[border][0].append(target[border][1])
                groups = tuple(tuple(tuple(map(tuple, stage)) for stage in row) for row in made)
                kinds = tuple(
                    tuple(tuple(tuple(c.type for c in r) for r in s) for s in row) for row in groups
                )
                alike = all(len({c for r in s for c in r}) == 1 for row in kinds for s in row)
                even = all(len({len(r) for r in s}) == 1 for row in kinds for s in row)
                if alike and even and len(groups) < 3 and kinds not in seen:
                    seen.add(kinds)
                    yield groups


def every_plan(costs: Costs) -> Iterator[Plan]:
    """All plans of at most two pipelines, without offload: schedules, cards, cuts, sizes, shares; full or no
    recompute and 1F1B's own or a deeper warm-up, the same everywhere."""
    given = costs.problem
    num_layers, batch = given.model.num_layers, given.global_batch_size
    for row in every_pipelines(given.cluster.cards):
        cuts = [
            [
                [b - a for a, b in itertools.pairwise([0, *borders, num_layers])]
                for borders in itertools.combinations_with_replacement(range(num_layers + 1), len(own) - 1)
            ]
            for own in row
        ]
        shares = [(batch,)] if len(row) == 1 else [(n, batch - n) for n in range(1, batch)]
        ways = itertools.product(itertools.product(*cuts), shares, SIZES, ("none", "full"), (0, 2))
        for layers, share, size, recompute, deeper in ways:
            if any(n % size for n in share):
                continue
            for schedule in SCHEDULES:
                if deeper and (schedule != "1f1b" or any(len(s) > 1 for own in row for s in own)):
                    continue
                if schedule == "interleaved_1f1b" and any(len(s) > 1 for own in row for s in own):
                    continue
                yield plan_of(costs, row, layers, share, size, recompute, deeper, schedule)


def plan_of(
    costs: Costs,
    row: tuple[Groups, ...],
    layers: Sequence[list[int]],
    shares: Sequence[int],
    size: int,
    recompute: Recompute,
    deeper: int,
    schedule: ScheduleName,
) -> Plan:
    given = costs.problem
    used = [c for c in given.cluster.cards if any(c in r for own in row for s in own for r in s)]
    rank = {c: i for i, c in enumerate(used)}
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    pipelines: list[PipelinePlan] = []
    for own, counts, share in zip(row, layers, shares, strict=True):
        parts = [n // chunks + (chunk < n % chunks) for chunk in range(chunks) for n in counts]
        ends = [0, *itertools.accumulate(parts)]
        stages = own * chunks
        pipelines.append(
            PipelinePlan(
                micro_batch_size=size,
                num_micro_batches=share // size,
                stages=tuple(
                    StagePlan(
                        replicas=tuple(tuple(rank[c] for c in replica) for replica in group),
                        layers=(ends[s], ends[s + 1]),
                        embedding=s == 0,
                        head=s == len(stages) - 1,
                        recompute=recompute if parts[s] else "none",
                        in_flight=len(stages) - s + deeper if deeper else None,
                    )
                    for s, group in enumerate(stages)
                ),
            )
        )
    return Plan(
        cluster=given.cluster.name,
        model=given.model,
        sequence_length=given.sequence_length,
        global_batch_size=given.global_batch_size,
        schedule=schedule,
        optimizer_sharding=True,
        ranks=tuple(RankPlan(rank=i, device=c.name, type=c.type) for c, i in rank.items()),
        pipelines=tuple(pipelines),
        device_types=uncatalogued_types(given.cluster, {c.type for c in used}),
    )


@pytest.mark.parametrize(("memory", "network"), [(4.0, 1e7), (0.02, 1e9)])
def test_no_plan_of_few_cards_is_faster_than_the_bound_of_its_schedule(memory: float, network: float):
    costs = make_costs(few_cards(memory, network))
    least: dict[ScheduleName, float] = dict.fromkeys(SCHEDULES, float("inf"))
    for plan in every_plan(costs):
        if any(True for _ in validate_plan(plan)):
            continue
        cost = cost_plan(costs, plan)
        if cost.fits:
            least[plan.schedule] = min(least[plan.schedule], cost.step_seconds)
    for name, seconds in least.items():
        assert bound_of(costs, name) <= seconds * (1 + 1e-9)
    assert bound_of(costs, *SCHEDULES) > 0.3 * min(least.values())
