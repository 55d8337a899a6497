"""Optimizer state and activations on the hosts, chosen with the cut: where memory is short, nowhere else."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.planner.by_hand import pipeline, plan_on
from tests.planner.search.test_search import GIB, MODEL, card, cluster, find, problem
from tests.support.project import with_stages
from tools.bench.problems import small_problem
from yuan_train.config.cluster import Host
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.profile import HostProfile, Profile, merge_profiles
from yuan_train.config.run import SearchConfig, Tier
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.native import core
from yuan_train.planner.report.plan import plan_table
from yuan_train.planner.search import drafts
from yuan_train.planner.search.candidate import beside_cards
from yuan_train.planner.search.drafts import RESTART, search_space
from yuan_train.planner.search.paged import STEPS
from yuan_train.planner.search.search import search_plan

BIG = replace(MODEL, num_layers=8, hidden_size=512, ffn_hidden_size=2048)
"""Large enough that the states decide, not the activations."""
TWO_OWNERS = {"pipelines": (2,), "recompute": ("none",), "optimizer_sharding": (True,)}


def fractions(plan):
    return [stage.optimizer_offload for stage in plan.stages]


def with_host(cards, host, disk=None):
    """The cluster with this host in each node, and perhaps a disk."""
    return replace(cards, nodes=tuple(replace(node, host=host, disk=disk) for node in cards.nodes))


def memory_of(model, **search):
    """What one card takes with the whole model."""
    given = problem(cluster(Card=(1, card(64))), model=model)
    return find(given, **search).best.cost.stages[0].memory


@pytest.mark.parametrize(
    ("types", "model", "keys", "offload"),
    [
        ({"Fast": (2, card(speed=3.0)), "Slow": (2, card())}, MODEL, {}, ("optimizer",)),
        ({"Fast": (2, card(speed=3.0)), "Slow": (1, card())}, MODEL, {}, ("activations",)),
        ({"Card": (1, card())}, MODEL, {}, ("optimizer", "parameters", "disk")),
        ({"Large": (1, card(8.0)), "Small": (1, card())}, BIG, TWO_OWNERS, ("optimizer",)),
    ],
)
def test_a_plan_that_fits_keeps_nothing_beside_its_cards(types, model, keys, offload):
    given = problem(cluster(**types), model=model)
    without, found = find(given, **keys), find(given, offload=offload, **keys)
    assert found.best.step_seconds == pytest.approx(without.best.step_seconds, rel=1e-9)
    assert found.best.plan.pipelines == without.best.plan.pipelines and not beside_cards(found.best.plan)
    assert found.exact == without.exact or "parameters" in offload


def test_the_smallest_fraction_that_fits():
    whole = memory_of(BIG)
    tight = whole.total - 0.25 * whole.optimizer
    given = problem(cluster(Card=(1, card(tight / GIB))), model=BIG)
    with pytest.raises(NoPlanFits, match="search.offload"):
        find(given, recompute=("none",))
    found = find(given, recompute=("none",), offload=("optimizer",))
    (fraction,) = fractions(found.best.plan)
    assert found.best.cost.fits and 0.25 <= fraction <= 0.25 + 2 / STEPS
    costs = make_costs(given)
    (stage,) = found.best.plan.pipelines[0].stages
    fewer = with_stages(found.best.plan, replace(stage, optimizer_offload=fraction - 1 / STEPS))
    assert not cost_plan(costs, fewer).fits


def test_a_plan_without_recompute_may_be_faster():
    # With its state on the host a card need not recompute; the step on the host takes longer.
    whole = memory_of(BIG)
    given = problem(
        cluster(Card=(1, card((whole.total - 0.5 * whole.activations) / GIB))),
        model=BIG,
        global_batch_size=64,
    )
    without, with_hosts = find(given), find(given, offload=("optimizer",))
    assert without.best.cost.stages[0].num_recomputed and not any(fractions(without.best.plan))
    assert with_hosts.best.step_seconds < without.best.step_seconds
    assert any(fractions(with_hosts.best.plan)) and not with_hosts.best.cost.stages[0].num_recomputed


def test_the_hosts_memory_is_kept():
    whole = memory_of(BIG)
    tight = whole.total - 0.5 * whole.optimizer
    given = problem(cluster(Card=(1, card(tight / GIB))), model=BIG)

    def on_host(memory):
        cards = with_host(given.cluster, Host(memory=int(memory)))
        own = replace(given, cluster=cards, host_reserved=GIB)
        return find(own, recompute=("none",), offload=("optimizer",)).best.cost.stages[0]

    # Four numbers of four bytes by parameter, where the card keeps three.
    needed = on_host(64 * GIB).host_bytes
    assert needed == pytest.approx(16 / 12 * 0.5 * whole.optimizer, rel=0.01)
    assert on_host(needed + GIB + 4096).host_bytes == needed
    with pytest.raises(NoPlanFits, match="of whose memory a card has"):
        on_host(0.9 * needed + GIB)


def test_a_hosts_rates_are_shared_by_its_cards():
    given = problem(cluster(Card=(2, card(1.0))), model=BIG)
    (group, *_), slow = given.cluster.nodes, []
    for bandwidth in (50e9, 25e9):
        own = with_host(given.cluster, Host(memory=64 * GIB, bandwidth=bandwidth, link_bandwidth=1e12))
        costs = make_costs(replace(given, cluster=own))
        slow.append(costs.host_of(own.cards[0]).memory_bytes_per_second * group.num_cards)
    assert slow == [50e9, 25e9]


def test_measured_rates_of_a_host_are_each_cards_own():
    given = problem(with_host(cluster(Card=(2, card())), Host(memory=64 * GIB, bandwidth=50e9)))
    measured = HostProfile(
        device_type="Card", host_link_down=9e9, host_link_up=8e9, host_step_bytes_per_second=7e9
    )
    parts = [
        Profile(sequence_length=256, hosts=(host,))
        for host in (replace(measured, host_link_down=99e9, host_link_up=99e9), measured)
    ]
    merged = merge_profiles([("one", parts[0]), ("other", parts[1])])
    assert merged.hosts == (measured,)
    share = make_costs(replace(given, profile=merged)).host_of(given.cluster.cards[0])
    assert (share.link_bytes_per_second, share.memory_bytes_per_second) == (8e9, 7e9)
    assert share.memory_bytes == make_costs(given).host_of(given.cluster.cards[0]).memory_bytes


def test_never_slower_than_every_cut_and_fraction_of_three_unlike_cards():
    """Every order and cut of pipelines of up to three cards, with fractions in eighths: of each stage the
    smallest that fits, because the host steps more slowly than the card."""
    model = replace(BIG, num_layers=6)
    whole = memory_of(model).total
    cards = {
        f"Card{i}": (1, card(share * whole / GIB, speed=1.0 + i)) for i, share in enumerate((0.7, 0.6, 0.5))
    }
    given = problem(cluster(**cards), model=model, global_batch_size=8)
    found = find(given, offload=("optimizer",), recompute=("none",), pipelines=(1,)).best
    costs = make_costs(given)
    seconds = []
    for count in (1, 2, 3):
        for order in itertools.permutations(given.cluster.cards, count):
            for cuts in itertools.combinations(range(model.num_layers + 1), count - 1):
                plan = in_eighths(costs, pipeline_of(given, order, (0, *cuts, model.num_layers)))
                seconds += [plan.step_seconds] if plan.fits else []
    assert any(fractions(found.plan)) and found.step_seconds <= min(seconds) * (1 + 1e-9)


def pipeline_of(given, order, bounds):
    """One pipeline of single cards, cut at these layers."""
    stages = [(((s,),), end - start) for s, (start, end) in enumerate(itertools.pairwise(bounds))]
    return plan_on(given, pipeline(given.global_batch_size, stages), cards=order)


def in_eighths(costs, plan):
    """The cost of the plan with each stage's smallest fraction that fits."""
    over = [stage.memory.total - stage.capacity_bytes for stage in cost_plan(costs, plan).stages]
    state = [stage.memory.optimizer for stage in cost_plan(costs, plan).stages]
    stages = (
        replace(stage, optimizer_offload=min(1.0, max(0, math.ceil(8 * more / (own or 1.0))) / 8))
        for stage, more, own in zip(plan.pipelines[0].stages, over, state, strict=True)
    )
    return cost_plan(costs, with_stages(plan, *stages))


def test_a_host_that_is_not_stated_is_as_large_as_the_cards() -> None:
    """Not larger, and the report says so and names the key; of what the file states it says no such word."""
    whole = memory_of(BIG)
    given = problem(cluster(Card=(1, card((whole.total - 0.5 * whole.optimizer) / GIB))), model=BIG)
    memory = given.cluster.device_type("Card").memory
    stated = replace(given, cluster=with_host(given.cluster, Host(memory=memory)))
    keys: dict[str, Any] = {"offload": ("optimizer",), "recompute": ("none",)}
    assumed, same = find(given, **keys), find(stated, **keys)
    assert assumed.best.step_seconds == same.best.step_seconds
    (stage,) = assumed.best.cost.stages
    assert 0 < stage.host_bytes <= stage.host_capacity_bytes == memory
    words = "assumed: as much as the cards have together; state nodes[0].host.memory)"
    assert words in plan_table(assumed, given) and "assumed" not in plan_table(same, stated)
    # Other programs have their part of it.
    with pytest.raises(NoPlanFits, match=r"assumed: as much as the cards have together; state nodes\[0\]"):
        find(replace(given, host_reserved=memory - int(0.9 * stage.host_bytes)), **keys)


def test_by_default_nothing_leaves_the_cards_for_a_small_gain() -> None:
    """Where a tier gains 3 %, or nothing fits without, it is taken; for less only if it is asked for."""
    whole = memory_of(BIG)

    def found(short: float, **search: Any):
        one = replace(card((whole.total - short * whole.activations) / GIB), host_memory_bandwidth=2e9)
        given = problem(cluster(Card=(1, one)), model=BIG, global_batch_size=64)
        return find(given, **search)

    both = ("optimizer", "activations")
    little, much = found(0.03, offload=None), found(0.5, offload=None)
    assert beside_cards(little.best.plan) == 0 == beside_cards(found(0.03).best.plan)
    asked = found(0.03, offload=both)
    assert 1 < little.best.step_seconds / asked.best.step_seconds < 1.03 and beside_cards(asked.best.plan)
    assert "search.offload: [optimizer" in little.notes[-1] and "% faster" in little.notes[-1]
    assert little.lower_bound_seconds <= asked.best.step_seconds and not little.exact
    # Optimizer state on the host gains 22 %, and activations there another 0.2 %.
    assert beside_cards(much.best.plan) == 1 < beside_cards(found(0.5, offload=both).best.plan)
    assert found(0.5).best.step_seconds > 1.03 * much.best.step_seconds
    assert beside_cards(found(0.5, offload=None, recompute=("none",)).best.plan) == 1


# --- activations instead of recompute --------------------------------------------------------------------


DEEP = replace(MODEL, num_layers=16)
SHORT = {"recompute": ("none", "full"), "pipelines": (1,), "tensor": (1,), "replicas": (1,)}


def of_short_cards(host_link, **search):
    """Four cards in one pipeline, of which the first has no room for what it has in flight."""
    cards = cluster(Card=(4, replace(card(0.19), host_link=host_link)))
    given = problem(with_host(cards, Host(memory=1000 * GIB)), model=DEEP, global_batch_size=32)
    return given, find(given, 4, **SHORT, **search)


def test_a_fast_link_replaces_recompute_and_a_slow_one_does_not():
    given, without = of_short_cards(1e12)
    assert any(stage.num_recomputed for stage in without.best.cost.stages)
    _, found = of_short_cards(1e12, offload=("activations",))
    assert found.best.step_seconds < without.best.step_seconds and found.best.cost.fits
    assert any(stage.activation_offload for stage in found.best.plan.stages)
    assert not list(validate_plan(found.best.plan))
    assert not found.exact and found.lower_bound_seconds <= found.best.step_seconds
    assert "optimizer state and activations on the host" in plan_table(found, given)
    _, slow = of_short_cards(1e7, offload=("activations",))
    assert slow.best.plan.pipelines == without.best.plan.pipelines


def test_what_lies_on_hosts_is_judged_too_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    given, _ = of_short_cards(1e12)
    keys = SearchConfig(**SHORT, offload=("activations",), micro_batch_size=(4,), schedule=("1f1b",))
    seconds, again = [0.0], drafts.search_again

    def late(*arguments: Any, **more: Any) -> Any:
        pools = again(*arguments, **more)
        seconds[0] = 1e9
        return pools

    monkeypatch.setattr(drafts, "search_again", late)
    found = search_plan(given, keys, micro_batch_size=4, clock=lambda: seconds[0])
    assert found.stopped and any(stage.activation_offload for stage in found.best.plan.stages)


# --- unequal shares of the state -------------------------------------------------------------------------


BATCH = 8


@pytest.mark.parametrize("large", [1.2, 0.75])
def test_never_slower_than_every_share_of_the_state_of_two_unlike_owners(large):
    """A card with room for the model and one without, or two without: every share of the batch, and of the
    state in eighths, with the smallest fractions on the hosts."""
    whole = memory_of(BIG).total
    types = {"Large": (1, card(large * whole / GIB)), "Small": (1, card(0.62 * whole / GIB))}
    given = problem(cluster(**types), model=BIG, global_batch_size=BATCH)
    found = find(given, offload=("optimizer",), **TWO_OWNERS).best
    assert found.cost.fits and not list(validate_plan(found.plan))
    stages = [pipeline.stages[0] for pipeline in found.plan.pipelines]
    first, second = sorted(stages, key=lambda stage: found.plan.ranks[stage.ranks[0]].type)
    assert first.optimizer_share > second.optimizer_share
    assert first.optimizer_offload < second.optimizer_offload
    costs, seconds = make_costs(given), {}
    for count in range(1, BATCH):
        for share in range(1, 8):
            cost = on_hosts(costs, two_pipelines(given, count, share))
            if cost.fits:
                seconds[count, share] = cost.step_seconds
    assert found.step_seconds <= min(seconds.values()) * (1 + 1e-9)
    equal = [step for (_, share), step in seconds.items() if share == 4]
    assert found.step_seconds < min(equal)


def on_hosts(costs, plan):
    """The cost of a plan of single stages, each with the fewest thousandths of its state on its host."""
    for i, stage in enumerate(cost_plan(costs, plan).stages):
        over = stage.memory.total - stage.capacity_bytes
        fraction = min(1.0, max(0.0, math.ceil(1000 * over / stage.memory.optimizer) / 1000))
        own = replace(plan.pipelines[i].stages[0], optimizer_offload=fraction)
        pipelines = list(plan.pipelines)
        pipelines[i] = replace(pipelines[i], stages=(own,))
        plan = replace(plan, pipelines=tuple(pipelines))
    return cost_plan(costs, plan)


def two_pipelines(given, count, share):
    """The first card with so many sequences and eighths of the state, the second with the rest."""
    parts = ((count, share), (BATCH - count, 8 - share))
    made = (
        pipeline(number, [(((i,),), given.model.num_layers)], optimizer_share=own)
        for i, (number, own) in enumerate(parts)
    )
    return plan_on(given, *made, optimizer_sharding=True)


@pytest.mark.parametrize(("recomputed", "gains"), [(3, False), (0, False), (0, True)])
def test_hosts_are_searched_further_where_cards_are_short_of_memory(
    recomputed: int, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where a short search of them is a little slower than a long one of cards alone: a long one of
    hosts need not be."""
    monkeypatch.setattr(drafts, "_wants_memory", lambda *_: gains)
    draft, asked = core.DraftTable(num_stages=1), list[tuple[bool, float]]()
    draft.stages = (core.StageRow * 1)(core.StageRow(width=1, num_replicas=1, num_recomputed=recomputed))

    def run(begins: Any, share: float, part: int = core.WHOLE) -> list[list[tuple[float, core.DraftTable]]]:
        asked.extend((bool(space.may_offload), share if part == core.HOT else 0.0) for space, _ in begins)
        return [[(1.01 if space.may_offload else 1.0, draft)] for space, _ in begins]

    search: Any = SimpleNamespace(run=run, tables=SimpleNamespace(problem=SimpleNamespace(num_cards=1)))
    search_space(search, core.SpaceTable(schedules=1, may_offload=1), [(0.0, draft)], keeps_to_cards=False)
    # The first annealing of a draft in a round takes more than a whole short search.
    assert any(share > RESTART for hosts, share in asked if hosts) == (recomputed > 0 or gains)


@pytest.mark.parametrize("seed", [36, 98])
def test_hosts_are_searched_where_memory_decides_a_cut_without_recompute(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of zero bubble that recomputes nothing may still give cards fewer layers than these are fast."""
    monkeypatch.setattr(drafts, "LEAST_BUDGET", 600_000)
    given = small_problem(seed)
    beside: list[tuple[Tier, ...]] = [(), ("optimizer", "activations")]
    alone, both = (
        search_plan(given, SearchConfig(simplicity=0.0, effort="quick", offload=tiers), micro_batch_size=1)
        for tiers in beside
    )
    assert both.best.step_seconds < 0.95 * alone.best.step_seconds
