"""Parameters in pages of the host, in the forecast: memory, copies in virtual time, and what stalls."""

from dataclasses import replace

import pytest

from tests.planner.by_hand import pipeline, plan_on, stage_times
from tests.planner.search.test_search import MODEL, card, cluster, problem
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.simulator import PageTimes, simulate_schedule
from yuan_train.schedule.copies import Paging, by_group, with_pages
from yuan_train.schedule.schedules import ProgramShape, make_schedule
from yuan_train.schedule.step import one_worker_each

ONE = cluster(Card=(1, card()))


def one_worker(weight, gradient, *, slots=3, group=4):
    """Four micro-batches on four pages of 1 s forward and 2 s backward, and on what takes 1 s and 1 s."""
    paging = Paging(num_pages=4, slots=slots, group=group)
    program = make_schedule("1f1b", num_micro_batches=4, workers=one_worker_each(1), group=group)[0]
    times = PageTimes(
        forward_seconds=(1.0, 1.0, 1.0, 1.0, 1.0),
        backward_seconds=(2.0, 2.0, 2.0, 2.0, 1.0),
        weight_seconds=(weight,) * 4,
        gradient_seconds=(gradient,) * 4,
    )
    return simulate_schedule(
        ProgramShape("1f1b", one_worker_each(1), 4, group=group),
        stage_times((5.0,), (9.0,), pages=(times,)),
        pages={0: by_group(with_pages(program, paging))},
    )


def test_a_step_takes_its_compute_and_the_pages_that_it_waits_for():
    # A group computes a page in 4 s forward and 8 s backward: what takes no longer is hidden, but for the
    # first page and, at the end, the last gradient.
    found = one_worker(4.0, 8.0)
    assert found.busy_seconds == (4 * 14.0,)
    assert found.step_seconds == pytest.approx(4 * 14.0 + 4.0 + 8.0)
    # Copies of 6 s: 6 + 3 x (6 - 4) s in the forward.
    assert one_worker(6.0, 8.0).stall_seconds[0] == pytest.approx(6.0 + 3 * 2.0 + 8.0)
    # Alone, each micro-batch brings each page and its sum.
    assert one_worker(6.0, 8.0, group=1).stall_seconds[0] > 100.0
    # With one slot nothing is hidden: seven pages come, and four gradients go.
    assert one_worker(4.0, 8.0, slots=1).stall_seconds[0] == pytest.approx(7 * 4.0 + 4 * 8.0)


def plan_of(group=1, **keys):
    own = pipeline(16, [(((0,),), MODEL.num_layers)], recompute="full", **keys)
    return plan_on(problem(ONE), replace(own, page_group=group))


def test_a_card_holds_its_slots_and_the_host_the_rest():
    costs = make_costs(problem(ONE))
    here = cost_plan(costs, plan_of()).stages[0]
    away = cost_plan(costs, plan_of(16, parameter_offload=MODEL.num_layers, page_slots=2)).stages[0]
    layer = here.units[1]
    assert away.pages is not None and here.pages is None
    assert away.memory.parameters == here.memory.parameters - (MODEL.num_layers - 2) * layer.parameter_bytes
    assert away.memory.gradients == here.memory.gradients - (MODEL.num_layers - 2) * layer.gradient_bytes
    assert away.host_bytes == MODEL.num_layers * layer.state_bytes and here.host_bytes == 0
    assert away.memory.optimizer == here.memory.optimizer - MODEL.num_layers * layer.optimizer_bytes
    # All sixteen are in flight.
    assert away.in_flight == 16 and here.in_flight == 1


def test_a_larger_group_hides_the_link():
    slow = cluster(Card=(1, replace(card(), host_link=2e9)))
    costs = make_costs(problem(slow))
    keys = {"parameter_offload": MODEL.num_layers, "page_slots": 3}
    steps = [cost_plan(costs, plan_of(group, **keys)) for group in (1, 4, 16)]
    assert steps[0].step_seconds > steps[1].step_seconds > steps[2].step_seconds
    assert all(step.stall_seconds > 0 for step in steps)
