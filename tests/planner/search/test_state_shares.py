"""Mixed pipelines whose unlike owners share the optimizer's state unequally, some of it on their hosts."""

import math
from dataclasses import replace

import pytest

from tests.planner.by_hand import pipeline, plan_on
from tests.planner.search.test_offload import BIG, TWO_OWNERS, memory_of
from tests.planner.search.test_search import GIB, card, cluster, find, problem
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.planner.costs.plan_problem import make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan

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
