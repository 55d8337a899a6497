"""Activations on the hosts instead of recompute: where the link hides the copies, and nowhere else."""

from dataclasses import replace

from tests.planner.search.test_search import MODEL, card, cluster, find, problem, with_hosts
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.planner.report.terminal import plan_table

DEEP = replace(MODEL, num_layers=16)
SHORT = {"recompute": ("none", "full"), "pipelines": (1,), "tensor": (1,), "replicas": (1,)}


def of_short_cards(host_link, **search):
    """Four cards in one pipeline, of which the first has no room for what it has in flight."""
    types = {"Card": replace(card(0.19), host_link=host_link)}
    cards = with_hosts(replace(cluster(Card=(4, card())), device_types=types))
    given = problem(cards, model=DEEP, global_batch_size=32)
    return given, find(given, 4, **SHORT, **search)


def test_a_fast_link_replaces_recompute_and_a_slow_one_does_not():
    given, without = of_short_cards(1e12)
    assert any(stage.num_recomputed for stage in without.best.cost.stages)
    _, found = of_short_cards(1e12, offload=("activations",))
    away = [stage for pipeline in found.best.plan.pipelines for stage in pipeline.stages]
    assert found.best.step_seconds < without.best.step_seconds and found.best.cost.fits
    assert any(stage.activation_offload for stage in away) and not list(validate_plan(found.best.plan))
    assert not found.exact and found.lower_bound_seconds <= found.best.step_seconds
    assert "optimizer state and activations on the host" in plan_table(found, given)
    _, slow = of_short_cards(1e7, offload=("activations",))
    assert slow.best.plan.pipelines == without.best.plan.pipelines
