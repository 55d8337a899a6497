"""Plans by rent, and what would help a plan."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.search.test_search import MODEL, NETWORK, card, problem
from tests.support.commands import Ask
from yuan_train.config.cluster import Cluster, NodeGroup
from yuan_train.config.errors import ConfigError, NoPlanFits
from yuan_train.config.load import dump
from yuan_train.config.run import HostCopies, SearchConfig
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan, make_forecast
from yuan_train.planner.report.plan import change_lines, rent_lines
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.what_if import (
    explain_plan,
    host_uses,
    rent_plan,
    search_beside_saves,
    with_nodes,
)
from yuan_train.train.agreement import needs_of

KEYS = {"schedule": ("1f1b",), "micro_batch_size": (1,), "tensor": (1,), "replicas": (1,), "offload": ()}


def rented(slow_price: float | None = 5.0):
    """A fast node, and two slow ones that add little and cost much."""
    types = {"Fast": card(speed=8.0), "Slow": card()}
    prices = {"Fast": 4.0, "Slow": slow_price}
    nodes = tuple(
        NodeGroup(name=name.lower(), count=count, device=name, network=NETWORK, price=prices[name])
        for name, count in (("Fast", 1), ("Slow", 2))
    )
    small = replace(MODEL, num_layers=4)
    return problem(Cluster(name="rented", nodes=nodes, device_types=types), model=small, global_batch_size=4)


def test_the_objective_decides_which_nodes_are_rented() -> None:
    given = rented()

    def rent(objective: str, **keys: object):
        search = SearchConfig(objective=objective, **KEYS, **keys)  # type: ignore[arg-type]
        return rent_plan(given, search, micro_batch_size=1, num_steps=100)

    cheap, fast = rent("tokens_per_price"), rent("step_time")
    assert cheap.chosen.left_out == ("slow-0", "slow-1") and cheap.chosen.price_per_hour == 4.0
    assert fast.chosen.step_seconds <= cheap.chosen.step_seconds
    assert all(
        a.step_seconds < b.step_seconds and a.price_per_step > b.price_per_step
        for a, b in zip(fast.pareto, fast.pareto[1:], strict=False)
    )
    assert any("(chosen)" in line for line in rent_lines(cheap))
    tight = 100 * fast.chosen.step_seconds * 1.0001
    assert rent("price_under_deadline", deadline=tight).chosen.step_seconds * 100 <= tight
    with pytest.raises(NoPlanFits, match=r"search\.deadline: .* fewer steps or more cards"):
        rent("price_under_deadline", deadline=tight / 2)


def test_what_is_said_of_a_rented_part_is_of_that_part(tmp_path: Path, ask: Ask) -> None:
    """Each card is in the plan or left out, and no gain is that of the nodes that are not rented."""
    like = {"count": 1, "device": "Fast", "network": NETWORK}
    nodes = (NodeGroup(name="cheap", price=1.0, **like), NodeGroup(name="dear", price=9.0, **like))
    cluster, model = tmp_path / "cluster.yaml", tmp_path / "model.yaml"
    cluster.write_text(dump(replace(rented().cluster, nodes=nodes)))
    model.write_text(dump(MODEL))
    words = ("plan", "--cluster", cluster, "--model", model, "train.precision=fp32", "search.effort=quick")
    assert len(ask(*words)["stages"]) == 2
    found = ask(*words, "--explain", "search.objective=tokens_per_price")
    assert found["left_out"] == [{"card": "dear/0", "reason": "not worth their rent"}]
    gains = {own["change"]: own["gain"] for own in found["explanation"]}
    assert gains["one GiB more on each Fast"] == 0 < gains["one more Fast"]


def test_what_is_rented_leaves_room_for_saves() -> None:
    """And of the whole cluster the plan is the one without prices: it is searched as often."""
    given, search = rented(), SearchConfig(**KEYS)  # type: ignore[arg-type]
    copies = HostCopies(kept=1)
    rent = rent_plan(given, search, micro_batch_size=1, num_steps=1, copies=copies)
    own = search_beside_saves(given, search, micro_batch_size=1, copies=copies)
    assert rent.chosen.result.best.plan == own.best.plan
    assert rent.chosen.result.notes == own.notes and "checkpoint.in_memory" in own.notes[-1]


def test_what_a_card_with_several_stages_holds_counts_once() -> None:
    """In the host memory beside saves, and in what its rank finds free at its start."""
    like = NodeGroup(name="n", count=2, device="Fast", network=NETWORK)
    cluster = replace(rented().cluster, nodes=(like,))
    given = problem(cluster, model=MODEL, global_batch_size=4)
    keys = {**KEYS, "schedule": ("interleaved_1f1b",), "pipelines": (1,), "use_all_devices": True}
    result = search_plan(given, SearchConfig(**keys), micro_batch_size=1)  # type: ignore[arg-type]
    (pipeline,) = result.best.plan.pipelines
    assert len(pipeline.stages) == 4
    stages = tuple(replace(stage, optimizer_offload=0.5) for stage in pipeline.stages)
    plan = replace(result.best.plan, pipelines=(replace(pipeline, stages=stages),))
    costs = make_costs(given)
    cost = cost_plan(costs, plan)
    uses = host_uses(replace(result, best=replace(result.best, plan=plan, cost=cost)), given, HostCopies())
    held = {use.node: use.kept for use in uses}
    assert len(held) == 2
    plan = replace(plan, forecast=make_forecast(costs, plan, cost, lower_bound_seconds=0.0))
    for rank in plan.ranks:
        own = next(stage for stage in cost.stages if stage.card.name == rank.device)
        needs = needs_of(plan, rank.rank)
        assert needs is not None and needs.card == own.memory.total < own.card_bytes
        assert needs.host == held[own.card.node] == own.host_bytes > 0


def test_a_card_without_price_is_refused() -> None:
    search = SearchConfig(objective="tokens_per_price")
    wanted = r"nodes\[1\] \(slow\): Slow has no price.*add price:"
    with pytest.raises(ConfigError, match=wanted):
        rent_plan(rented(None), search, micro_batch_size=1, num_steps=1)


def test_nodes_that_are_left_keep_their_names() -> None:
    cluster = rented().cluster
    assert [c.name for c in with_nodes(cluster, {"slow-1": None}).cards] == ["fast/0", "slow-0/0"]
    assert [c.name for c in with_nodes(cluster, {"slow-0": None}).cards] == ["fast/0", "slow-1/0"]


def test_what_would_help_is_planned_again() -> None:
    """Few sequences leave much to fill; nothing that adds loses."""
    given = replace(rented(), global_batch_size=2)
    search = SearchConfig(**KEYS)  # type: ignore[arg-type]
    step = search_plan(given, search, micro_batch_size=1).best.step_seconds
    changes = explain_plan(given, search, micro_batch_size=1, step_seconds=step)
    by_name = {change.what: change for change in changes}
    assert by_name["twice as many sequences per step"].gain > 0.0 > by_name["one Fast less"].gain
    assert all(change.gain >= 0 for change in changes if not change.what.endswith(" less"))
    assert change_lines(changes)[0].startswith("limited most by ")
