"""The lower bound and the search against all plans of problems that are small enough to list them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.planner.by_hand import entry, pipeline_of, plan_on, unit
from tests.planner.search.test_search import MODEL, card, cluster, find, problem
from yuan_train.config.cluster import Card, Cluster, Link, NodeGroup
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.profile import Profile, ProfileEntry
from yuan_train.config.run import Recompute, ScheduleName, SearchConfig
from yuan_train.planner.costs.unit_costs import Costs, UnitCost, make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.prove import lower_bound
from yuan_train.planner.search.shapes import Shape, make_plan, read_options

SMALL = replace(MODEL, num_layers=3)
SIZES = (1, 2)
SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zero_bubble", "interleaved_1f1b")

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
    used = [c for c in costs.problem.cluster.cards if any(c in r for own in row for s in own for r in s)]
    rank = {c: i for i, c in enumerate(used)}
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    pipelines: list[PipelinePlan] = []
    for own, counts, share in zip(row, layers, shares, strict=True):
        parts = [n // chunks + (chunk < n % chunks) for chunk in range(chunks) for n in counts]
        ends = [0, *itertools.accumulate(parts)]
        stages = own * chunks
        made = (
            StagePlan(
                replicas=tuple(tuple(rank[c] for c in replica) for replica in group),
                layers=(ends[s], ends[s + 1]),
                recompute=recompute if parts[s] else "none",
                in_flight=len(stages) - s + deeper if deeper else None,
            )
            for s, group in enumerate(stages)
        )
        pipelines.append(pipeline_of(share // size, made, size))
    return plan_on(costs.problem, *pipelines, cards=used, schedule=schedule, optimizer_sharding=True)


def fastest(costs: Costs) -> dict[ScheduleName, float]:
    """The shortest step of all plans that are lawful and fit, by schedule."""
    least: dict[ScheduleName, float] = dict.fromkeys(SCHEDULES, float("inf"))
    for plan in every_plan(costs):
        if not any(True for _ in validate_plan(plan)):
            cost = cost_plan(costs, plan)
            if cost.fits:
                least[plan.schedule] = min(least[plan.schedule], cost.step_seconds)
    return least


def bound_of(costs: Costs, *schedules: ScheduleName) -> float:
    given = costs.problem
    search = SearchConfig(tensor=(1, 2), micro_batch_size=SIZES, schedule=schedules)
    options = read_options(search, micro_batch_size=1, model=given.model)
    return lower_bound(costs, given.cluster.cards, options).seconds


@pytest.mark.parametrize(("memory", "network"), [(4.0, 1e7), (0.02, 1e9)])
def test_no_plan_of_few_cards_is_faster_than_the_bound_of_its_schedule(
    memory: float, network: float, monkeypatch: pytest.MonkeyPatch
):
    """With thrice the seconds of every unit there are plans fast enough to refute the bound."""
    costs = make_costs(few_cards(memory, network))
    least = fastest(costs)
    for name, seconds in least.items():
        assert bound_of(costs, name) <= seconds * (1 + 1e-9)
    assert bound_of(costs, *SCHEDULES) > 0.3 * min(least.values())
    seconds = UnitCost.seconds.fget
    assert seconds is not None
    monkeypatch.setattr(UnitCost, "seconds", property(lambda unit: 3 * seconds(unit)))
    assert bound_of(costs, "1f1b") > least["1f1b"]


@pytest.mark.parametrize("seed", range(4))
def test_the_search_comes_close_to_the_best_of_all_plans(seed):
    """Pipelines with unequal shares of the batch, two widths, idle cards, sharded optimizer state."""
    rng = np.random.default_rng(seed)
    fast, slow = [(1, 1), (2, 1), (1, 2)][seed % 3]
    speed = float(rng.uniform(1, 4))
    given_problem = problem(
        cluster(Fast=(fast, card(speed=speed)), Slow=(slow, card(float(rng.choice([0.3, 4.0]))))),
        model=SMALL,
        global_batch_size=int(rng.integers(2, 4)),
    )
    lowest = fastest(make_costs(given_problem))["1f1b"]
    try:
        result = find(given_problem, SIZES, tensor=(1, 2))
    except NoPlanFits:
        assert lowest == np.inf
        return
    assert result.lower_bound_seconds <= lowest * (1 + 1e-9)
    # No proof covers mixed pipelines, but the search should come close to their best.
    assert result.best.step_seconds <= lowest * 1.05
    if result.exact:
        assert result.best.step_seconds <= lowest * (1 + 1e-7)


def test_filling_counts_where_memory_makes_pipelines_deep():
    """Cards that hold one layer or two: later ones wait for the first. Split backwards and workers of several
    stages wait less."""
    roomy, tight = (make_costs(few_cards(memory, 1e9, num_layers=6)) for memory in (4.0, 0.008))
    assert bound_of(roomy, "1f1b") == pytest.approx(bound_of(roomy, "interleaved_1f1b"), rel=1e-5)
    plain, split, several = (bound_of(tight, name) for name in SCHEDULES)
    assert plain > split > several > 0
    # A card that holds no layer holds no model.
    assert bound_of(make_costs(few_cards(0.001, 1e9)), "1f1b") == float("inf")


@pytest.mark.parametrize(
    ("bandwidth", "layers", "sharded"),
    [(1e8, 0.5, True), (1e8, 99, False), (1e9, 2.1, True), (1e10, 1, False)],
)
def test_no_cut_of_two_equal_pipelines_is_faster(bandwidth, layers, sharded):
    """Gradients are reduced in buckets of so many layers, over links from slow to fast."""
    link = Link(bandwidth=bandwidth, latency=1e-5)
    nodes = tuple(NodeGroup(name=kind, device=kind, count=2, network=link) for kind in ("Fast", "Slow"))
    types = {"Fast": card(speed=2.5), "Slow": card()}
    given_problem = problem(
        Cluster(name="four", nodes=nodes, device_types=types),
        model=SMALL,
        bucket_size=int(layers * SMALL.layer_parameters),
        global_batch_size=8,
    )
    costs, bounds = make_costs(given_problem), range(1, SMALL.num_layers + 2)
    cards = given_problem.cluster.cards
    slots = tuple(((((cards[i],),), ((cards[i + 1],),))) for i in (0, 2))
    shape = Shape(schedule="1f1b", micro_batch_size=1, num_micro_batches=4, slots=slots, sharded=sharded)
    cuts = [((i,), (0, bounds.stop)) for i in (0, 1)]
    cuts += [(order, (0, b, bounds.stop)) for order in ((0, 1), (1, 0)) for b in bounds]
    costs_of_cuts = [
        cost_plan(costs, make_plan(costs, shape, order=order, bounds=ends, recompute=["none" for _ in order]))
        for order, ends in cuts
    ]
    lowest = min(cost.step_seconds for cost in costs_of_cuts)
    keys = {"tensor": (1,), "replicas": (1,), "recompute": ("none",), "num_micro_batches": (4,)}
    result = find(given_problem, pipelines=(2,), optimizer_sharding=(sharded,), **keys)
    # Over slow links deeper warm-ups are faster still. No proof covers them.
    assert result.best.step_seconds <= lowest * (1 + 1e-9)
    assert not result.exact if bandwidth == 1e8 else result.best.step_seconds < lowest or result.exact
    assert result.lower_bound_seconds <= lowest * (1 + 1e-9)


def test_units_that_take_no_time_have_a_bound():
    """A clock may be too coarse for them under one recompute; the search for the bound ends all the same."""
    entries = (
        entry("Fast", unit(seconds, seconds, state=1e3, kept=1e3, output=1e3), recompute=kind)
        for kind, seconds in (("none", 1e-3), ("full", 0.0))
    )
    profile = Profile(sequence_length=256, entries=tuple(entries))
    given_problem = problem(cluster(Fast=(1, card())), model=SMALL, profile=profile)
    search = SearchConfig(recompute=("none", "full"), tensor=(1,), micro_batch_size=(1,))
    options = read_options(search, micro_batch_size=1, model=SMALL)
    assert lower_bound(make_costs(given_problem), given_problem.cluster.cards, options).seconds == 0.0


def test_a_profile_that_knows_of_no_state_is_planned_with() -> None:
    entries = (entry("Fast", unit(1e-3, 1e-3, state=0.0, kept=1e3, output=1e3), recompute="none"),)
    profile = Profile(sequence_length=256, entries=entries)
    given_problem = problem(cluster(Fast=(1, card())), model=SMALL, profile=profile)
    assert find(given_problem, tensor=(1,), recompute=("none",)).best.cost.fits


@pytest.mark.parametrize(("layers", "small"), [(2, 3), (4, 6)])
def test_a_plan_that_random_drafts_miss_is_found_by_the_proof(layers: int, small: int) -> None:
    """A layer fills a large card, embedding and head each a small one: one order of so many stages fits."""
    end, layer = unit(1e-3, 2e-3, state=80e6), unit(1e-3, 2e-3, state=85e6)
    entries = tuple(
        ProfileEntry(device_type=name, embedding=end, layers=(layer,), head=end)
        for name in ("Small", "Large")
    )
    small_card, large_card = (
        replace(card(), memory=memory, reserved=0) for memory in (83 * 10**6, 90 * 10**6)
    )
    types = {"Small": (small, small_card), "Large": (layers, large_card)}
    model = replace(SMALL, num_layers=layers)
    profile = Profile(sequence_length=256, precision="bf16", entries=entries)
    given_problem = problem(cluster(**types), model=model, profile=profile, memory_fraction=1.0)
    plan = find(given_problem, schedule=None).best.plan
    assert [stage.num_layers for stage in plan.stages] == [0, *[1] * layers, 0]
