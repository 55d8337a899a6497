"""What reports say of bounds."""

from __future__ import annotations

from yuan_train.planner.report.reasons import bound_values, bound_words
from yuan_train.planner.search.bounds import Bound


def test_a_bound_is_said_with_its_plans_and_what_it_knows() -> None:
    bound = Bound(seconds=1.6, schedules=("1f1b",), sizes=(1, 2))
    first, knows = bound_words(bound, 2.0)
    assert first == ("no plan takes less than 1.6 s (1f1b, micro-batches of 1/2); the step is 25.0% longer")
    assert "work, memory and filling" in knows
    assert bound_values(bound) == {"seconds": 1.6, "schedules": ["1f1b"], "micro_batch_sizes": [1, 2]}
    assert bound_values(None) is None
