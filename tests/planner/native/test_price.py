"""The compiled core's price of a step against `cost_plan`, which defines it; and its search."""

from __future__ import annotations

import itertools
import math
import random
from ctypes import c_uint8
from dataclasses import replace

import pytest

from tests.planner.by_hand import pipeline_of, plan_on, unit
from tests.planner.drafts import draft_of, price_of
from tests.planner.search.test_expert_groups import MODEL as EXPERTS
from tests.planner.search.test_offload import of_short_cards
from tests.planner.search.test_search import MODEL, card
from yuan_train.config.cluster import Card, Cluster, Host, Link, NodeGroup
from yuan_train.config.model import LoraConfig
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.profile import (
    LinkProfile,
    NodeLinkProfile,
    Profile,
    ProfileEntry,
    StageStart,
    UnitProfile,
)
from yuan_train.planner.costs.unit_costs import Costs, make_costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.stage_cost import TooFewResidentInPlan
from yuan_train.planner.native.core import NAMES, DraftTable, SpaceTable
from yuan_train.planner.search.drafts import Tables, make_tables, plan_of

SIZES, WIDTHS = (1, 2), (1, 2, 4)


def random_problem(draw: random.Random) -> PlanProblem:
    """A few nodes of unlike cards, on links from fast to slower than the compute."""
    types = {f"Type{i}": card(draw.choice((2.0, 4.0, 8.0)), speed=draw.uniform(0.3, 2.0)) for i in range(3)}
    nodes = tuple(
        NodeGroup(
            name=f"n{i}",
            device=draw.choice(list(types)),
            devices=draw.choice((1, 2, 4)),
            link=Link(bandwidth=draw.choice((1e10, 1e12)), latency=3e-6),
            network=Link(bandwidth=draw.choice((1e8, 1e9, 2.5e10)), latency=1e-5),
            host=Host(memory=draw.choice((1 << 30, 1 << 36)), link_bandwidth=draw.choice((1e8, 1e9, 1e11))),
        )
        for i in range(draw.randint(2, 5))
    )
    return PlanProblem(
        cluster=Cluster(name="random", nodes=nodes, device_types=types),
        model=replace(MODEL, num_layers=draw.randint(4, 12), tie_embeddings=draw.random() < 0.5),
        sequence_length=256,
        global_batch_size=24,
        precision="bf16",
        reduce_dtype=draw.choice(("fp32", "bf16")),
        bucket_size=draw.choice((1 << 18, 1 << 21, 1 << 26)),
        memory_fraction=draw.choice((0.95, 1.0)),
        sends=draw.choice((None, None, "blocking")),
    )


def with_profile(draw: random.Random, problem: PlanProblem) -> PlanProblem:
    """The same with seconds and bytes of each layer, in part, most links, and rates between nodes."""
    cluster, num_layers = problem.cluster, problem.model.num_layers
    whole = draw.random() < 0.3

    def drawn() -> UnitProfile:
        seconds = draw.uniform(0.001, 0.01), draw.uniform(0.002, 0.02)
        state, kept = draw.uniform(1e6, 2e8), draw.uniform(1e6, 5e7)
        more = {} if whole else {"transient_bytes": draw.uniform(0.0, 1e7)}
        return unit(*seconds, state=state, kept=kept, output=1e6, **more)

    entries = [
        ProfileEntry(
            device_type=name,
            embedding=drawn(),
            layers=tuple(drawn() for _ in range(draw.choice((1, num_layers)))),
            head=drawn(),
            start=StageStart(forward_seconds=draw.choice((0.0, 0.001)), backward_seconds=0.0),
        )
        for name in list(cluster.device_types)[: draw.choice((2, 3))]
    ]
    links = [
        LinkProfile(
            from_=a.name,
            to=b.name,
            message_bytes=(1e3, 1e6, 1e7),
            seconds=(draw.uniform(1e-6, 1e-5), draw.uniform(1e-5, 1e-3), draw.uniform(1e-3, 1e-2)),
            compute_seconds_per_byte=draw.choice((0.0, 1e-10, 1e-9)),
        )
        for a, b in itertools.permutations(cluster.cards, 2)
        if draw.random() < 0.9
    ]
    nodes = dict.fromkeys(own.node for own in cluster.cards)
    rates = [
        NodeLinkProfile(from_=a, to=b, bytes_per_second=draw.uniform(1e8, 1e10))
        for a, b in itertools.permutations(nodes, 2)
        if draw.random() < 0.8
    ]
    profile = Profile(
        sequence_length=problem.sequence_length,
        precision=problem.precision,
        entries=tuple(entries) if draw.random() < 0.7 else (),
        links=tuple(links) if draw.random() < 0.8 else (),
        node_links=tuple(rates) if draw.random() < 0.5 else (),
    )
    return replace(problem, profile=profile)


def with_gloo(draw: random.Random, problem: PlanProblem) -> PlanProblem:
    """The same with simulated cards, cards of gloo's, and such of unlike libraries."""
    every = draw.choice(({"slowdown": 3.0}, {"backend": "gloo"}, None))
    kinds = ({"backend": "gloo"}, {"slowdown": 2.0}, {}, {"backend": "hccl"})
    types = {
        name: replace(device, **(every or draw.choice(kinds)))
        for name, device in problem.cluster.device_types.items()
    }
    return replace(problem, cluster=replace(problem.cluster, device_types=types))


def random_stage(
    draw: random.Random, groups: list[tuple[int, ...]], layers: tuple[int, int], *, may_send: bool
) -> StagePlan:
    kind, count = draw.choice(("none", "none", "selective", "full")), layers[1] - layers[0]
    some = draw.randint(1, count) if kind != "none" and count > 1 and draw.random() < 0.5 else None
    may_send = may_send and count > 0 and kind != "full" and draw.random() < 0.5
    away = draw.randint(1, count) if may_send else 0
    return StagePlan(
        activation_offload=away,
        resident_parts=draw.choice((2, 6, 12, 30)) if away else None,
        fetch_ahead=draw.choice((None, 1, 2, 5)) if away else None,
        replicas=tuple(groups),
        layers=layers,
        recompute=kind,
        recompute_layers=some,
        optimizer_offload=draw.choice((0.0, 0.0, 0.3, 1.0)),
    )


def lawful(draw: random.Random, replicas: list[int]) -> list[int | None]:
    """Depths of a pipeline's stages, or none."""
    depths: list[int] = []
    for s in reversed(range(len(replicas))):
        more, n, after = draw.choice((0, 0, 1, 2, 6)), replicas[s], depths[0] if depths else 0
        depths.insert(0, max(sum(replicas[s:]) + more, n, -(-after // n) * n))
    return list(depths) if draw.random() < 0.5 else [None] * len(replicas)


def random_plan(draw: random.Random, problem: PlanProblem) -> Plan:
    """Pipelines of some of the cards, in groups inside nodes, some of them with state on hosts."""
    names = ("1f1b", "1f1b", "gpipe", "zero_bubble", "interleaved_1f1b")
    schedule, sharded = draw.choice(names), draw.random() < 0.5
    free = [list(own) for _, own in itertools.groupby(problem.cluster.cards, key=lambda own: own.node)]
    number = {own.name: i for i, own in enumerate(problem.cluster.cards)}
    size, pipelines = draw.choice(SIZES), draw.choice((1, 1, 2, 3))
    made: list[PipelinePlan] = []
    for _ in range(pipelines):
        groups: list[list[tuple[int, ...]]] = []
        for _ in range(draw.randint(1, 4)):
            own = list(_draw_groups(draw, free, number))
            groups += [own] if own else []
        if not groups:
            continue
        num_workers = len(groups)
        if schedule in ("zero_bubble", "interleaved_1f1b") and draw.random() < 0.7:
            groups = _with_virtual_stages(draw, groups)
        cuts = sorted(draw.randint(0, problem.model.num_layers) for _ in groups[1:])
        borders = list(itertools.pairwise([0, *cuts, problem.model.num_layers]))
        shares = {tuple(own): draw.choice((1.0, 1.0, 2.0)) for own in groups}
        depths = lawful(draw, [len(own) for own in groups]) if schedule == "1f1b" else [None] * len(groups)
        stages = [
            replace(
                random_stage(draw, own, layers, may_send=len(groups) <= num_workers),
                optimizer_share=shares[tuple(own)] if sharded else 1.0,
                in_flight=depth,
            )
            for own, layers, depth in zip(groups, borders, depths, strict=True)
        ]
        made.append(pipeline_of(draw.randint(1, 9), stages, size))
    return _numbered(problem, made, schedule, sharded)


def _with_virtual_stages(draw: random.Random, groups: list[list[tuple[int, ...]]]):
    """The same workers in rounds, to and fro, or anyhow."""
    how = draw.randrange(3)
    if how == 2:
        return [*groups, *draw.choices(groups, k=draw.randint(1, 5))]
    return groups * draw.randint(2, 3) if how else groups + groups[::-1]


def _draw_groups(draw: random.Random, free: list[list[Card]], number: dict[str, int]):
    width = draw.choice((1, 1, 2, 4))
    for _ in range(draw.choice((1, 1, 2, 3))):
        roomy = [own for own in free if len(own) >= width]
        if roomy:
            node = draw.choice(roomy)
            yield tuple(number[node.pop(0).name] for _ in range(width))


def _numbered(problem: PlanProblem, made: list[PipelinePlan], schedule, sharded: bool) -> Plan:
    """Ranks number the used cards in the cluster's order."""
    used = sorted({rank for pipeline in made for stage in pipeline.stages for rank in stage.ranks})
    rank_of = {card: rank for rank, card in enumerate(used)}
    cards = problem.cluster.cards
    pipelines = [
        replace(
            pipeline,
            stages=tuple(
                replace(stage, replicas=tuple(tuple(rank_of[c] for c in group) for group in stage.replicas))
                for stage in pipeline.stages
            ),
        )
        for pipeline in made
    ]
    own = [cards[c] for c in used]
    return plan_on(problem, *pipelines, cards=own, schedule=schedule, optimizer_sharding=sharded)


def tables_of(costs: Costs, sizes: tuple[int, ...] = SIZES, widths: tuple[int, ...] = WIDTHS) -> Tables:
    tables = make_tables(costs, sizes, widths)
    assert tables is not None
    return tables


def check(costs: Costs, tables: Tables, plan: Plan) -> None:
    """Every part of the price, to 1e-9 of the step."""
    draft = draft_of(tables, plan)
    assert draft is not None
    found = price_of(tables, draft)
    try:
        defined = cost_plan(costs, plan)
    except TooFewResidentInPlan:
        assert found is None
        return
    assert found is not None
    parts = {"reduce": "grad_reduce", "tied": "tied_embedding", "sync": "weight_sync"}
    for name in ("step", "compute", "reduce", "tied", "update", "sync"):
        ours, theirs = getattr(found, name), getattr(defined, f"{parts.get(name, name)}_seconds")
        assert abs(ours - theirs) <= 1e-9 * defined.step_seconds, (name, ours, theirs)
    for ours, stage in zip(found.stages[: draft.num_stages], defined.stages, strict=True):
        assert math.isclose(ours.memory, stage.memory.total, rel_tol=1e-9)
    assert (found.over == 0.0) == defined.fits


def check_drawn(draw: random.Random, problem: PlanProblem, change=lambda plan: plan) -> int:
    """Every lawful one of 40 plans is priced as it is defined, if it divides no experts. How many."""
    costs, priced = make_costs(problem), 0
    tables = tables_of(costs)
    for plan in (change(random_plan(draw, problem)) for _ in range(40)):
        if not plan.pipelines or next(validate_plan(plan), None) is not None:
            continue
        if plan.divides_experts:
            assert draft_of(tables, plan) is None
        else:
            check(costs, tables, plan)
            priced += 1
    return priced


@pytest.mark.parametrize("seed", range(12))
def test_the_core_prices_a_step_as_it_is_defined(seed: int) -> None:
    draw = random.Random(seed)
    assert check_drawn(draw, replace(random_problem(draw), critic=seed % 4 == 0)) >= 5


@pytest.mark.parametrize("seed", range(100, 112))
def test_profiles_and_other_libraries_are_priced_as_defined(seed: int) -> None:
    draw = random.Random(seed)
    problem = random_problem(draw)
    if draw.random() < 0.7:
        problem = with_profile(draw, problem)
    if draw.random() < 0.5:
        problem = with_gloo(draw, problem)
    if draw.random() < 0.3:
        model = replace(EXPERTS, num_layers=problem.model.num_layers, tie_embeddings=draw.random() < 0.5)
        problem = replace(problem, model=model)
    check_drawn(draw, problem)


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_adapters_are_priced_as_defined(seed: int) -> None:
    draw = random.Random(seed)
    problem = random_problem(draw)
    problem = replace(problem, model=replace(problem.model, lora=LoraConfig(rank=3)))

    def here(plan: Plan) -> Plan:
        """Adapters keep nothing on hosts."""
        made = (
            tuple(replace(stage, optimizer_offload=0.0, activation_offload=0) for stage in own.stages)
            for own in plan.pipelines
        )
        return replace(
            plan, pipelines=tuple(replace(own, stages=s) for own, s in zip(plan.pipelines, made, strict=True))
        )

    assert check_drawn(draw, problem, here) >= 5


def test_what_the_core_forgets_of_large_batches_is_made_anew() -> None:
    problem = replace(random_problem(random.Random(1)), global_batch_size=9_000)
    problem = replace(problem, model=replace(problem.model, num_layers=12))
    costs, half = make_costs(problem), 6
    tables = tables_of(costs, (1,), (1,))

    def price(own: Tables, depth: int) -> tuple[float, ...] | None:
        first = StagePlan(
            replicas=((0,),),
            layers=(0, half),
            embedding=True,
            head=False,
            activation_offload=half,
            resident_parts=12,
            in_flight=depth,
        )
        last = StagePlan(replicas=((1,),), layers=(half, 2 * half), embedding=False, head=True)
        line = PipelinePlan(micro_batch_size=1, num_micro_batches=9_000, stages=(first, last))
        draft = draft_of(own, _numbered(problem, [line], "1f1b", False))
        found = None if draft is None else price_of(own, draft)
        return found and (found.step, found.over, *(stage.memory for stage in found.stages[:2]))

    kept = [price(tables, depth) for depth in (*range(2, 90), 2, 3, 50)]
    assert None not in kept and kept[:2] == kept[-3:-1] and kept[48] == kept[-1]
    assert kept[-3:] == [price(tables_of(costs, (1,), (1,)), depth) for depth in (2, 3, 50)]


def search(tables: Tables, *, budget=3_000, schedules=0b1001, hosts=1, given=(), seconds=math.inf):
    everything = 2**64 - 1
    space = SpaceTable(0b111, schedules, 0b11, everything, everything, hosts, hosts, 0, 0)
    return tables.evaluator.search(space, given, budget=budget, seed=1, room=8, seconds=seconds)


def with_memory(problem: PlanProblem, memory: float) -> PlanProblem:
    """The same cards with so many GiB each."""
    types = problem.cluster.device_types.items()
    short = {name: replace(device, memory=int(memory * 2**30)) for name, device in types}
    return replace(problem, cluster=replace(problem.cluster, device_types=short))


@pytest.mark.parametrize(
    ("seed", "schedules", "is_measured", "batch", "memory"),
    [
        *((seed, 0b1001, seed == 5, 24, None) for seed in (0, 2, 5)),
        *((1, 0b1111, True, 24, None), (1, 0b100, False, 24, None), (4, 0b100, True, 24, None)),
        (5, 0b10, False, 24, None),
        # Fewer micro-batches than a stage may have replicas.
        *((seed, 0b1001, False, 3, None) for seed in (0, 2)),
        # Most stages need what hosts take, and all recompute besides.
        *((seed, 0b1001, False, 24, 0.15) for seed in (7, 10)),
    ],
)
def test_found_drafts_are_lawful_plans_of_the_price_they_say(
    seed: int, schedules: int, is_measured: bool, batch: int, memory: float | None
) -> None:
    draw = random.Random(seed)
    problem = replace(random_problem(draw), global_batch_size=batch)
    if memory is not None:
        problem = with_memory(problem, memory)
    if is_measured:
        problem = with_gloo(draw, with_profile(draw, problem))
    costs = make_costs(problem)
    tables = tables_of(costs)
    found = search(tables, schedules=schedules)
    assert found.drafts and list(found.steps) == sorted(found.steps)
    for step, draft in zip(found.steps, found.drafts, strict=True):
        plan = plan_of(tables, draft)
        assert list(validate_plan(plan)) == [] and schedules >> NAMES.index(plan.schedule) & 1
        assert plan.global_batch_size == problem.global_batch_size
        cost = cost_plan(costs, plan)
        assert cost.fits and math.isclose(cost.step_seconds, step, rel_tol=1e-9)


def test_a_search_gives_the_same_drafts_again_and_loses_none_that_it_is_given() -> None:
    tables = tables_of(make_costs(random_problem(random.Random(1))))
    first, again = search(tables), search(tables)
    assert first.steps == again.steps
    assert [plan_of(tables, draft) for draft in first.drafts] == [
        plan_of(tables, draft) for draft in again.drafts
    ]
    other = search(tables, given=first.drafts[:1], budget=10)
    assert other.steps[0] <= first.steps[0]


def test_a_search_ends_with_its_time_but_not_before_it_has_found_a_draft() -> None:
    tables = tables_of(make_costs(random_problem(random.Random(1))))
    found = search(tables, budget=10**15, seconds=0.0)
    assert found.drafts and found.num_priced < 10_000


@pytest.mark.parametrize("seed", [1, 7])
def test_search_keys_limit_what_is_found(seed: int) -> None:
    problem = random_problem(random.Random(seed))
    tables = tables_of(make_costs(problem))
    everything = 2**64 - 1
    number = {card.name: i for i, card in enumerate(problem.cluster.cards)}

    def found(
        *, ordered: int = 0, even: int = 0, counts: tuple[int, ...] | None = None, run: int = 1
    ) -> list[Plan]:
        each = None if counts is None else (c_uint8 * 25)(*(n in counts for n in range(25)))
        space = SpaceTable(0b111, 0b1001, 0b11, everything, everything, 0, 0, 0, 0, ordered, even, 0, each)
        result = tables.evaluator.search(space, [], budget=6_000, seed=run, room=40)
        assert result.drafts
        return [plan_of(tables, draft) for draft in result.drafts]

    def is_ordered(plan: Plan) -> bool:
        places = [
            [number[plan.ranks[stage.replicas[0][0]].device] for stage in pipeline.stages]
            for pipeline in plan.pipelines
        ]
        return all(own == sorted(own) for own in places)

    def counts_of(plans: list[Plan]) -> set[int]:
        return {pipeline.num_micro_batches for plan in plans for pipeline in plan.pipelines}

    def cuts_of(plan: Plan) -> set[tuple[tuple[float, float], ...]]:
        return {tuple(stage.layers for stage in pipeline.stages) for pipeline in plan.pipelines}

    free = [plan for run in range(1, 5) for plan in found(run=run)]
    assert all(map(is_ordered, found(ordered=1))) and not all(map(is_ordered, free))
    assert counts_of(found(counts=(6, 12))) <= {6, 12} and not counts_of(free) <= {6, 12}
    assert all(len(cuts_of(plan)) == 1 for plan in found(even=1))
    assert any(len(cuts_of(plan)) > 1 for plan in free)


def test_activations_leave_short_cards_where_that_is_faster_and_never_those_of_virtual_stages() -> None:
    given, _ = of_short_cards(1e12)
    tables = tables_of(make_costs(given), (1,), (1,))

    def away(draft: DraftTable) -> int:
        return sum(stage.away for stage in draft.stages[: draft.num_stages])

    without, found = search(tables, hosts=0, budget=9_000), search(tables, budget=9_000)
    assert found.steps[0] < without.steps[0] and away(found.drafts[0]) and not away(without.drafts[0])
    looped = search(tables, schedules=0b100, given=found.drafts)
    assert looped.drafts and not any(map(away, looped.drafts))
