"""Pages and disks in the search: no slower than every plan of a small case, off unless asked for."""

import itertools
from dataclasses import replace

import pytest

from tests.planner.drafts import draft_of, price_of
from tests.planner.search.test_offload import BIG, memory_of, pipeline_of, with_host
from tests.planner.search.test_search import GIB, MODEL, card, cluster, find, problem
from tests.support.project import with_stages
from yuan_train.config.cluster import Disk, Host
from yuan_train.config.errors import ConfigError, NoPlanFits
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan, cost_stages
from yuan_train.planner.search.drafts import make_tables
from yuan_train.planner.search.paged import with_disks

DEEP = replace(BIG, num_layers=4)


def test_never_slower_than_every_cut_and_number_of_pages_of_two_unlike_cards():
    """Every order, cut, number of pages, of slots and group, with two fractions of the rest."""
    types = {"Fast": (1, card(0.2, speed=2.0)), "Slow": (1, card(0.19))}
    given = problem(cluster(**types), model=DEEP, global_batch_size=4)
    advice = r"search.offload: \[optimizer, parameters\], with which a plan fits"
    for offload in ((), ("optimizer",)):
        with pytest.raises(NoPlanFits, match=advice):
            find(given, offload=offload)
    tiny = problem(cluster(Card=(1, card(0.13))), model=DEEP, global_batch_size=4)
    with pytest.raises(NoPlanFits) as refused:
        find(tiny, offload=("optimizer",))
    assert "search.offload" not in str(refused.value)
    found = find(given, offload=("optimizer", "parameters"))
    (pipeline,) = found.best.plan.pipelines
    assert found.best.cost.fits and any(stage.parameter_offload for stage in pipeline.stages)
    assert not found.exact and found.lower_bound_seconds <= found.best.step_seconds
    costs, seconds = make_costs(given), []
    for order in itertools.permutations(given.cluster.cards):
        for cut in range(1, DEEP.num_layers):
            for keys in every_way((cut, DEEP.num_layers - cut)):
                plan = paged(given, order, (0, cut, DEEP.num_layers), **keys)
                if all(stage.fits for stage in cost_stages(costs, plan)):
                    seconds.append(cost_plan(costs, plan).step_seconds)
    assert found.best.step_seconds <= min(seconds) * (1 + 1e-9)


def every_way(layers):
    """Pages and fractions of both stages, slots and groups."""
    for pages in itertools.product(*(range(count + 1) for count in layers)):
        for fractions in itertools.product((0.95, 1.0), repeat=2):
            for slots, group in itertools.product((2, 1), (4, 1)):
                if any(pages):
                    yield {"pages": pages, "fractions": fractions, "slots": slots, "group": group}


def paged(given, order, bounds, *, pages, fractions, slots, group):
    plan = pipeline_of(given, order, bounds)
    (pipeline,) = plan.pipelines
    stages = tuple(
        replace(
            stage,
            recompute="full",
            optimizer_offload=fraction,
            parameter_offload=count,
            page_slots=min(slots, count) if count else None,
        )
        for stage, count, fraction in zip(pipeline.stages, pages, fractions, strict=True)
    )
    return replace(plan, pipelines=(replace(pipeline, stages=stages, page_group=group),))


def test_pages_that_no_plan_may_have_are_refused_by_name():
    given = problem(cluster(Card=(2, card())))
    with pytest.raises(ConfigError, match="recompute has no full; search.pipelines has no 1"):
        find(given, offload=("parameters",), recompute=("none",), pipelines=(2,))
    experts = replace(MODEL, num_experts=4, experts_per_token=2, expert_ffn_hidden_size=256)
    with pytest.raises(ConfigError, match="parameters.*4 experts"):
        find(replace(given, model=experts), offload=("parameters",))


def test_a_disk_takes_what_its_host_has_no_room_for():
    whole = memory_of(BIG)
    tight = whole.total - 0.75 * whole.optimizer
    given = problem(cluster(Card=(1, card(tight / GIB))), model=BIG)

    def stage(memory, **search):
        cards = with_host(given.cluster, Host(memory=int(memory)), Disk(read=2e9, write=1e9))
        own = replace(given, cluster=cards)
        found = find(own, recompute=("none",), **search).best
        return found.plan.pipelines[0].stages[0], found.cost

    roomy, cost = stage(64 * GIB, offload=("optimizer", "disk"))
    assert roomy.optimizer_offload and not roomy.optimizer_disk
    small = 0.8 * cost.stages[0].host_bytes
    with pytest.raises(NoPlanFits, match="of whose memory"):
        stage(small, offload=("optimizer",))
    short, slower = stage(small, offload=("optimizer", "disk"))
    assert slower.fits and slower.step_seconds >= cost.step_seconds
    assert short.optimizer_offload == roomy.optimizer_offload and short.optimizer_disk > 0
    # As little as that: a thousandth less does not fit.
    assert slower.stages[0].host_bytes > small - 2e-3 * cost.stages[0].host_bytes


def test_the_core_prices_what_hosts_have_no_room_for_as_on_disks():
    """Nine tenths of the state on a host that has room for a part of it; fractions are in thousandths."""
    given = problem(cluster(Card=(2, card(64.0))), model=BIG)
    seconds = [card_seconds(given, room) for room in (1.0, 0.7, 0.5)]
    assert seconds == sorted(seconds) and seconds[2] > 1.1 * seconds[0]


def card_seconds(given, room):
    """The step of two cards whose host has room for that part of what they put there, as `cost_plan` says."""
    plan = find(given, pipelines=(1,), recompute=("none",)).best.plan
    plan = with_stages(plan, *(replace(stage, optimizer_offload=0.9) for stage in plan.pipelines[0].stages))
    held = max(stage.host_bytes for stage in cost_plan(make_costs(given), plan).stages)
    host = Host(memory=int(2 * room * held * 1.001) + 1)
    costs = make_costs(replace(given, cluster=with_host(given.cluster, host, Disk(read=2e9, write=1e9))))
    tables = make_tables(costs, (plan.pipelines[0].micro_batch_size,), (1,), on_disk=True)
    draft = draft_of(tables, plan) if tables else None
    priced = price_of(tables, draft) if tables and draft else None
    defined = cost_plan(costs, with_disks(costs, plan))
    assert priced and defined.fits and not priced.over
    assert priced.step == pytest.approx(defined.step_seconds, rel=2e-3)
    return defined.step_seconds
