"""Plans of random problems keep constraints, search keys and memory (the tool tries thousands of them), and
more choice never makes one slower."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.bench import check_plans as tool
from tools.bench.planner import CHAINS, violations
from tools.bench.problems import small_problem, with_external_profile
from yuan_train.config.run import SearchConfig


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(min_value=0, max_value=10**6))
def test_plans_keep_what_was_asked(seed):
    answer, faults = tool.check_problem(seed)
    assert not faults and answer != "error", faults


# Attention and feed-forward apart ignored search.tensor; a stage that had no room under full recompute alone
# was planned without any; with halves of layers and other depths too few parts were resident (an error);
# pages were searched without any; of plans that divide experts no critic was counted; beside unlike pipelines
# the even split was of the first one, with its part of the batch alone.
@pytest.mark.parametrize(
    ("seed", "answer"),
    [(19, "refused"), (5008, "plan"), (10663, "plan"), (1804, "no plan"), (11908, "plan"), (48, "plan")],
)
def test_faults_that_were_found_so_stay_mended(seed, answer):
    assert tool.check_problem(seed) == (answer, [])


def test_it_sees_what_a_plan_breaks():
    """With less memory than the plan needs, and other search keys, there are faults."""
    problem, search = tool.random_problem(5008)
    plan = tool.search_plan(problem, search, micro_batch_size=1, clock=lambda: 0.0).best.plan
    types = {
        name: replace(card, memory=card.memory // 30) for name, card in problem.cluster.device_types.items()
    }
    small = replace(problem, cluster=replace(problem.cluster, device_types=types))
    found = " ".join(tool.faults_of(small, replace(search, pipelines=(7,)), plan))
    assert "does not fit" in found and "bytes at least" in found and "search.pipelines: [7]" in found


# The benchmark compares on 60 clusters; with the second of these, zero bubble alone once beat both schedules.
# With an external profile further ones were not searched though they were named.
@pytest.mark.parametrize(
    ("seed", "chains", "external"), [(1, (0, 4, 7, 9), False), (3, (1,), False), (8, (1, 7), True)]
)
def test_a_wider_search_finds_a_plan_as_fast(seed, chains, external):
    own = small_problem(seed)
    own = with_external_profile(own, seed) if external else own
    found = list(violations(own, [CHAINS[i] for i in chains]))
    assert len(found) >= len(chains)
    for keys, wider, loss in found:
        assert loss <= 1e-6, f"{keys} is {loss:.2%} faster than {wider}"


def test_with_a_external_profile_unlike_cards_shard_a_tied_table():
    """Its bytes are those of two tables, but one is stepped: drafts with unlike owners of it hid others."""
    own = with_external_profile(small_problem(58), 58)
    steps = [
        tool.search_plan(own, SearchConfig(optimizer_sharding=key), micro_batch_size=1).best.step_seconds
        for key in (None, (True,))
    ]
    assert steps[0] <= steps[1] * (1 + 1e-6)
