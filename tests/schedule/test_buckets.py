"""Which units share a bucket: by hand, and as properties of every division."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.schedule.flow import group_units


def test_a_run_is_divided_from_its_end():
    # Of three units of 4, 4 and 4 in buckets of 8, the last two share one: their gradients come first. A unit
    # of 9 has a bucket of its own, and another owner begins a run.
    assert group_units("aaa", [4, 4, 4], bucket_size=8) == (range(0, 1), range(1, 3))
    assert group_units("aaa", [4, 9, 1], bucket_size=8) == (range(0, 1), range(1, 2), range(2, 3))
    assert group_units("aab", [1, 1, 1], bucket_size=8) == (range(0, 2), range(2, 3))
    assert group_units("", [], bucket_size=8) == ()


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    units=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6)), max_size=12),
    bucket_size=st.integers(1, 12),
)
def test_every_unit_is_in_one_bucket_that_could_not_be_larger(units, bucket_size):
    owners, sizes = [owner for owner, _ in units], [size for _, size in units]
    buckets = group_units(owners, sizes, bucket_size=bucket_size)
    assert [u for bucket in buckets for u in bucket] == list(range(len(units)))
    for bucket in buckets:
        assert len({owners[u] for u in bucket}) == 1
        held = [u for u in bucket if sizes[u]]
        assert sum(sizes[u] for u in bucket) <= bucket_size or len(held) == 1
    # A bucket ends only where the unit before it has other owners, or no room in it.
    for before, bucket in itertools.pairwise(buckets):
        unit = before[-1]
        full = sizes[unit] + sum(sizes[u] for u in bucket) > bucket_size
        assert full or owners[unit] != owners[bucket.start]
