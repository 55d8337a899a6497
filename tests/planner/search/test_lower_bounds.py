"""The bounds against plans: all of those of few cards, and random lawful ones on small random clusters."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.planner.search.test_search import MODEL, card, problem
from yuan_train.config.cluster import Card, Cluster, Host, Link, NodeGroup
from yuan_train.config.plan import PipelinePlan, Plan, RankPlan, StagePlan, uncatalogued_types
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import Recompute, ScheduleName, SearchConfig
from yuan_train.planner.costs.plan_problem import Costs, make_costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.search import equal_bound
from yuan_train.planner.search.equal_bound import Scope
from yuan_train.planner.search.lower_bounds import Bounds, lower_bounds
from yuan_train.planner.search.shapes import read_options
from yuan_train.planner.search.stage_moves import loop_alive
from yuan_train.planner.search.stage_parts import StageParts, stage_parts
from yuan_train.schedule.schedules import make_schedule

pytestmark = pytest.mark.bounds

SIZES = (1, 2)
SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zero_bubble", "interleaved_1f1b")
NUM_PLANS = 120
WORK = 1.2e7


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


def is_equal(plan: Plan, cost: PlanCost) -> bool:
    """Whether all pipelines have as many cards of each type in groups as wide, as large a share and the same
    layers."""

    def look(p: int) -> object:
        own = [stage for stage in cost.stages if stage.pipeline == p]
        pipeline = plan.pipelines[p]
        return (
            pipeline.micro_batch_size,
            pipeline.num_micro_batches,
            [(stage.layers, [c.type for c in stage.cards]) for stage in own],
            [[len(replica) for replica in stage.replicas] for stage in pipeline.stages],
        )

    return all(look(p) == look(0) for p in range(len(plan.pipelines)))


def fastest(costs: Costs, chance: random.Random) -> tuple[float, float]:
    """(of equal pipelines, of any): the shortest steps of random plans."""
    equal = least = float("inf")
    for _ in range(NUM_PLANS):
        plan = random_plan(costs, chance)
        if any(True for _ in validate_plan(plan)):
            continue
        cost = cost_plan(costs, plan)
        if cost.fits:
            least = min(least, cost.step_seconds)
            equal = min(equal, cost.step_seconds) if is_equal(plan, cost) else equal
    return equal, least


def bounds_of(costs: Costs, schedules: tuple, best: float, *, work: float = WORK) -> Bounds:
    given = costs.problem
    options = read_options(
        SearchConfig(tensor=(1, 2), micro_batch_size=SIZES, schedule=schedules),
        micro_batch_size=1,
        model=given.model,
    )
    scope = Scope(schedules=schedules, sizes=SIZES, any_replicas=True, uneven_shares=True)
    return lower_bounds(
        costs,
        given.cluster.cards,
        options,
        scope,
        least_seconds=best / 4,
        best_seconds=2 * best,
        work=work,
        mixed_work=2 * work,
        stopped=lambda: False,
    )


@pytest.mark.parametrize("seed", [1, 17])
def test_no_random_plan_is_faster_than_the_bounds(seed):
    """`best_seconds` is twice the fastest, so that nothing but the bound itself keeps it below."""
    chance = random.Random(seed)
    costs = make_costs(random_problem(chance))
    equal, least = fastest(costs, chance)
    if least == float("inf"):
        return
    bounds = bounds_of(costs, SCHEDULES, least)
    assert bounds.any_seconds <= least * (1 + 1e-9)
    assert bounds.equal_seconds <= equal * (1 + 1e-9)
    assert bounds.any_seconds > least / 4


def test_a_bound_of_slower_stages_is_undercut(monkeypatch):
    """The same check with thrice the seconds of every stage: random plans are fast enough to refute that."""
    chance = random.Random(17)
    costs = make_costs(random_problem(chance))
    _, least = fastest(costs, chance)

    def slower(*args: object, **keys: object) -> StageParts:
        parts = stage_parts(*args, **keys)  # type: ignore[arg-type]
        ways = (replace(way, base=3 * way.base, added=3 * way.added) for way in parts.ways)
        return replace(parts, ways=tuple(ways))

    monkeypatch.setattr(equal_bound, "stage_parts", slower)
    assert bounds_of(costs, ("1f1b",), least, work=2e7).any_seconds > least


# --- all plans of few cards ------------------------------------------------------------------------------

Groups = tuple[tuple[tuple[Card, ...], ...], ...]
"""Stages of a pipeline, their replicas, their cards."""


def few_cards(memory: float, network: float):
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
        model=replace(MODEL, num_layers=2),
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
    fastest_any: dict[ScheduleName, float] = dict.fromkeys(SCHEDULES, float("inf"))
    fastest_equal = dict(fastest_any)
    for plan in every_plan(costs):
        if any(True for _ in validate_plan(plan)):
            continue
        cost = cost_plan(costs, plan)
        if cost.fits:
            seconds = cost.step_seconds
            fastest_any[plan.schedule] = min(fastest_any[plan.schedule], seconds)
            if is_equal(plan, cost):
                fastest_equal[plan.schedule] = min(fastest_equal[plan.schedule], seconds)
    least = min(fastest_any.values())
    bounds = bounds_of(costs, SCHEDULES, least, work=1.5e7)
    for bound in bounds.under:
        for name in bound.schedules:
            assert bound.any_seconds <= fastest_any[name] * (1 + 1e-9)
            assert bound.equal_seconds <= fastest_equal[name] * (1 + 1e-9)
    # Not for free: the bound that all begin at is a quarter of the step.
    assert bounds.any_seconds > 0.3 * least


def test_interleaved_workers_hold_as_much_as_the_bound_says():
    for workers, chunks, batches in itertools.product((2, 3, 5), (2, 3), (1, 2, 4, 7, 9)):
        stages = tuple((s % workers,) for s in range(workers * chunks))
        schedule = make_schedule("interleaved_1f1b", num_micro_batches=batches, workers=stages)
        for worker, program in enumerate(schedule):
            steps = [{"forward": 1, "backward": -1}.get(step.kind, 0) for step in program]
            rest = np.array([float(workers - worker)])
            assert loop_alive(chunks, workers, rest, batches)[0] <= max(itertools.accumulate(steps))
