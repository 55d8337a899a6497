"""The solver against hand-solved cases, known optima, and an independent brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.instances import CASES, brute_force, case_instance, event_simulation, random_case
from yuan_train.planner.solver.cost_tables import CostTables
from yuan_train.planner.solver.dynamic_program import threshold_bounds
from yuan_train.planner.solver.seeds import count_order, slot_classes
from yuan_train.planner.solver.solve import solve


def two_cards(**changes):
    """Six equal units: forward and backward 1 s each on card A, 3 s each on card B; free links."""
    layer = {
        "fwd": {"A": 1.0, "B": 3.0},
        "bwd": {"A": 1.0, "B": 3.0},
        "weight_bytes": 10,
        "act_bytes": 1,
        "out_bytes": 0,
    }
    case = {
        "num_microbatches": 10,
        "layers": [dict(layer) for _ in range(6)],
        "devices": [{"type": kind, "mem_bytes": 1000, "reserved_bytes": 0} for kind in ("A", "B")],
        "links": {"latency": [[0.0, 0.0], [0.0, 0.0]], "bandwidth": [[1.0, 1.0], [1.0, 1.0]]},
        "order": None,
        "use_all_devices": True,
    }
    return case | changes


def test_two_stages_by_hand():
    # Per micro-batch, 4:2 takes 8 | 12 s and 5:1 takes 10 | 6 s. With m = 10 the slowest stage decides: 4:2
    # takes at least 12 * 10 s. 5:1 with the slow card first takes 3 + 10 * 10 + 3 = 106 s. With the fast card
    # first, its 100 s of work wait twice for 1 s: F0 runs 0-5, F1 5-10, and B0 starts when the slow card is
    # done at 5 + 6 = 11; the last backward waits again. So 102 s.
    solution = solve(case_instance(two_cards()))
    assert solution.cuts[0].step_seconds == pytest.approx(102)
    assert solution.cuts[0].order == (0, 1)
    sizes = dict(zip(solution.cuts[0].order, np.diff(solution.cuts[0].bounds).tolist(), strict=True))
    assert sizes == {0: 5, 1: 1}


def test_memory_overrules_speed():
    # Card A holds 3 units: as the first stage with 2 micro-batches in flight, 3 * 12 = 36 bytes; as the last
    # stage 33. The slow card as the first stage never waits: while it runs F1, the other runs F0 and B0. So
    # 10 * 18 = 180 s.
    devices = [
        {"type": "A", "mem_bytes": 36, "reserved_bytes": 0},
        {"type": "B", "mem_bytes": 1000, "reserved_bytes": 0},
    ]
    solution = solve(case_instance(two_cards(devices=devices)))
    cut = solution.cuts[0]
    sizes = dict(zip(cut.order, np.diff(cut.bounds).tolist(), strict=True))
    assert sizes == {0: 3, 1: 3}
    assert cut.order == (1, 0)
    assert cut.step_seconds == pytest.approx(180)


def test_a_slow_card_stays_idle_if_allowed():
    case = two_cards(num_microbatches=1, use_all_devices=False)
    cut = solve(case_instance(case)).cuts[0]
    assert cut.order == (0,)
    assert cut.step_seconds == pytest.approx(12)


@pytest.mark.parametrize("name", list(CASES))
def test_known_optimum(name):
    case, expect = CASES[name]["case"], CASES[name]["expect"]
    solution = solve(case_instance(case))
    if expect["optimum_s"] is None:
        assert not solution.cuts
        return
    cut = solution.cuts[0]
    counts = tuple(np.diff(cut.bounds).tolist())
    simulated = event_simulation(case | {"overlap": case.get("overlap", True)}, cut.order, counts)
    assert simulated == pytest.approx(cut.step_seconds)
    assert simulated <= expect["optimum_s"] * 1.01


@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_dynamic_programming_finds_what_fits(seed):
    """`threshold_bounds` finds a cut of a fixed order if and only if one fits."""
    case = random_case(seed) | {"order": None, "use_all_devices": True}
    order = tuple(range(len(case["devices"])))
    found = threshold_bounds(CostTables(case_instance(case)), order)
    fixed = brute_force(case | {"order": list(order)})
    assert bool(found) == (fixed is not None)


def test_order_by_counting_states_uses_both_cards():
    # Six units on two cards, one three times as fast: both are needed for the smallest slowest stage.
    case = two_cards()
    tables = CostTables(case_instance(case))
    order = count_order(tables)
    assert order is not None
    assert sorted(order) == [0, 1]


def test_interchangeable_cards_are_one_class():
    case = CASES["c1_a100x2_v100x2_12L_compute_bound"]["case"]
    assert slot_classes(case_instance(case)).tolist() == [0, 0, 2, 2]
    skewed = dict(case["links"], latency=[row[:] for row in case["links"]["latency"]])
    skewed["latency"][0][2] = 1.0
    assert slot_classes(case_instance(case | {"links": skewed})).tolist() == [0, 1, 2, 3]


def test_same_instance_same_cuts():
    case = CASES["c1_a100x2_v100x2_12L_compute_bound"]["case"]
    assert solve(case_instance(case)).cuts == solve(case_instance(case)).cuts


def test_two_micro_batches_fill_two_stages():
    # Two equal cards, m = 2: stage 0 has T / 2 for a micro-batch, stage 1 half of the rest, T / 4. A
    # micro-batch takes 12 s, so T >= 16. Four units on stage 0 and two on stage 1 reach it: 2 * 8, and 8 + 2
    # * 4.
    devices = [{"type": "A", "mem_bytes": 1000, "reserved_bytes": 0} for _ in range(2)]
    case = two_cards(devices=devices, num_microbatches=2)
    assert solve(case_instance(case)).cuts[0].step_seconds == pytest.approx(16)
