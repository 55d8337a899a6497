"""What reports say of bounds."""

from __future__ import annotations

from yuan_train.planner.report.reasons import bound_values, bound_words
from yuan_train.planner.search.equal_bound import Scope
from yuan_train.planner.search.lower_bounds import Bounds

SCOPE = Scope(schedules=("1f1b",), sizes=(1, 2), any_replicas=False, uneven_shares=False)


def test_a_search_that_ended_before_it_had_a_bound_says_so() -> None:
    none = Bounds(equal_seconds=0.0, any_seconds=0.0, scope=SCOPE, knows_memory=False)
    assert bound_words(none, 2.0) == ["no bound was found (1f1b, micro-batches of 1/2)"]
    values = bound_values(none, 2.0)
    assert values is not None and values["gap_any"] is values["gap_equal"] is None
    some = Bounds(equal_seconds=1.6, any_seconds=1.0, scope=SCOPE, knows_memory=False)
    values = bound_values(some, 2.0)
    assert "gap 100.0%" in bound_words(some, 2.0)[0] and values is not None and values["gap_any"] == 1.0
