"""Activations that leave the card, in the forecast: memory, copies in virtual time, and what stalls."""

from dataclasses import replace

import pytest

from tests.planner.by_hand import pipeline, plan_on, stage_times
from tests.planner.search.test_search import card, cluster, problem
from tests.support.project import with_stages
from yuan_train.config.errors import PlanError
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.simulator import PartTimes, simulate_schedule
from yuan_train.schedule import copies
from yuan_train.schedule.copies import Offload, group_copies, with_copies
from yuan_train.schedule.schedules import ProgramShape, make_schedule
from yuan_train.schedule.step import one_worker_each

TWO = cluster(Card=(2, card()))


def one_worker(copy_seconds):
    """A stage of two parts of 1 s forward and 2 s backward, whose first one leaves, under gpipe; of six
    micro-batches' parts three stay."""
    offloads = {0: Offload(num_parts=2, num_leaving=1, resident=3, ahead=1)}
    program = make_schedule("gpipe", num_micro_batches=6, workers=one_worker_each(1))[0]
    parts = PartTimes(forward_seconds=(1.0, 1.0), backward_seconds=(2.0, 2.0), copy_seconds=(copy_seconds,))
    times = stage_times((2.0,), (4.0,), parts=(parts,))
    copies = {0: group_copies(with_copies(program, offloads))}
    return simulate_schedule(ProgramShape("gpipe", one_worker_each(1), 6), times, copies=copies)


@pytest.mark.parametrize(("copy_seconds", "stall"), [(0.0, 0.0), (2.0, 0.0), (3.0, 5.0), (5.0, 21.0)])
def test_a_step_takes_its_compute_and_the_copies_that_it_waits_for(copy_seconds, stall):
    # Three stay. Copies of 3 s, one after another from 1 s on, are down when forwards of 2 s need their room
    # (4, 7 and 10 s); at 12 s the first fetch waits 1 s for the fourth. Fetched one part of 2 s ahead, each
    # of the four that left is waited for 1 s. Of 5 s: two forwards, a fetch and four backwards wait 3 s.
    found = one_worker(copy_seconds)
    assert found.step_seconds == pytest.approx(sum(found.busy_seconds) + found.stall_seconds[0])
    assert found.busy_seconds == (6 * 6.0,)
    assert found.stall_seconds[0] == pytest.approx(stall)


def plan_of(**keys):
    plan = plan_on(problem(TWO), pipeline(16, [(((0,),), 4), (((1,),), 4)]), schedule="gpipe")
    first, last = plan.pipelines[0].stages
    return with_stages(plan, replace(first, **keys), last)


def cost(plan, cards=TWO):
    return cost_plan(make_costs(problem(cards)), plan)


def test_a_stage_keeps_what_may_stay_and_its_host_the_rest():
    here, away = cost(plan_of()), cost(plan_of(activation_offload=4, resident_parts=8, fetch_ahead=2))
    (stays, _), (leaves, other) = here.stages, away.stages
    # Of 16 micro-batches of 8 parts, 8 parts stay: as much as one micro-batch, or two of its larger halves.
    assert 1 / 16 < leaves.memory.activations / stays.memory.activations < 2 / 16
    assert leaves.host_bytes == pytest.approx(stays.memory.activations * 15 / 16, rel=0.05)
    assert other.host_bytes == 0 == stays.host_bytes and other.leaving is None
    half = cost(plan_of(activation_offload=2, resident_parts=4)).stages[0]
    assert half.memory.activations == pytest.approx(stays.memory.activations * (1 / 2 + 1 / 32), rel=0.05)


def test_a_fast_link_hides_the_copies_and_a_slow_one_stalls():
    keys = {"activation_offload": 4, "resident_parts": 8}

    def on_link(rate):
        types = {"Card": replace(card(), host_link=rate)}
        return cost(plan_of(**keys), replace(TWO, device_types=types))

    fast, slow, slower = on_link(1e15), on_link(1e9), on_link(1e8)
    assert fast.stall_seconds < 1e-6 and fast.step_seconds == pytest.approx(cost(plan_of()).step_seconds)
    assert 0 < slow.stall_seconds < slower.stall_seconds
    assert slow.step_seconds < slower.step_seconds


def test_a_search_that_reads_no_text_does_not_pay_for_it(monkeypatch):
    monkeypatch.setattr(copies, "_least_resident", lambda *_: pytest.fail("the text was made"))
    with pytest.raises(PlanError):
        cost(plan_of(activation_offload=4, resident_parts=1, fetch_ahead=1))


def test_too_few_resident_parts_are_an_error():
    with pytest.raises(PlanError, match=r"pipelines\[0\]: stage 0: resident_parts: 1 is too small"):
        cost(plan_of(activation_offload=4, resident_parts=1, fetch_ahead=1))
