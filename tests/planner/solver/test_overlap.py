"""Tables of what a stage's compute hides, against a chain of buckets for every range of units."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.planner.solver.instance import Halves
from yuan_train.planner.solver.overlap import exposed_grad_reduce, exposed_weight_sync, with_halves
from yuan_train.schedule.flow import group_units


def buckets_of(seconds, latency, sizes, first, end, bucket_size):
    """(units, seconds) of each bucket of a stage; one without parameters takes none."""
    for units in group_units([0] * (end - first), sizes[first:end], bucket_size=bucket_size):
        own = [first + u for u in units]
        total = sum(seconds[u] for u in own)
        yield own, total + latency * (total > 0)


def chain_after_backward(backward, buckets, first):
    """End of the last reduction after the backward, one bucket at a time."""
    end = -np.inf
    for own, seconds in reversed(buckets):
        end = max(-sum(backward[first : own[0]]), end) + seconds
    return max(end, 0.0)


def wait_of_forwards(forward, buckets, first):
    """The longest wait of a unit for its weights."""
    there, wait = 0.0, 0.0
    for own, seconds in buckets:
        there += seconds
        wait = max(wait, *(there - sum(forward[first:u]) for u in own))
    return wait


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), num_units=st.integers(1, 6), bucket_size=st.integers(1, 12))
def test_every_range_is_as_its_buckets_one_by_one(seed, num_units, bucket_size):
    rng = np.random.default_rng(seed)
    shape = (2, 3, num_units)
    compute = rng.uniform(0, 2, shape)
    sizes = rng.integers(1, 6, num_units).tolist()
    sizes[0] *= int(rng.integers(0, 2))
    seconds = rng.uniform(0, 1, 3)[:, None] * np.array(sizes, dtype=float)
    latency = rng.uniform(0, 1, 3)
    ends = range(1, num_units + 1)
    starts = [0, *(group_units([0] * e, sizes[:e], bucket_size=bucket_size)[-1].start for e in ends)]
    if sizes[0] == 0:
        # As a tied embedding: a bucket of its own.
        starts = [max(start, min(e - 1, 1)) for e, start in enumerate(starts)]
    tables = [
        table(compute, seconds, latency, np.array(starts))
        for table in (exposed_grad_reduce, exposed_weight_sync)
    ]
    for c, k in np.ndindex(2, 3):
        for first in range(num_units):
            for end in range(first + 1, num_units + 1):
                begin = 1 if first == 0 and sizes[0] == 0 and end > 1 else first
                found = list(buckets_of(seconds[k], latency[k], sizes, begin, end, bucket_size))
                reduce = chain_after_backward(compute[c, k], found, first)
                sync = wait_of_forwards(compute[c, k], found, first)
                assert np.isclose(tables[0][c, k, first, end], reduce)
                assert np.isclose(tables[1][c, k, first, end], sync)


def test_by_hand():
    # Three units of 2 s, each a bucket of 3 s: the last one's starts 4 s before the end, the others follow.
    # Of the weights, the third ones come after 9 s and are needed after 4.
    arrays = np.full((1, 1, 3), 2.0), np.full((1, 3), 3.0), np.zeros(1), np.array([0, 0, 1, 2])
    assert exposed_grad_reduce(*arrays)[0, 0, 0].tolist() == [0, 3, 4, 5]
    assert exposed_weight_sync(*arrays)[0, 0, 0].tolist() == [0, 3, 4, 5]
    # All in one bucket, nothing is hidden.
    whole = (*arrays[:3], np.zeros(4, dtype=int))
    assert exposed_grad_reduce(*whole)[0, 0, 0].tolist() == [0, 3, 6, 9]
    assert exposed_weight_sync(*whole)[0, 0, 0].tolist() == [0, 3, 6, 9]


def test_a_layer_of_two_buckets_by_hand():
    # As above, but the last unit is two buckets: the attention takes a quarter of the compute and a third of
    # the bytes. With it alone, the feed-forward's 2 s start 0.5 s before the end, and 1 s of attention
    # follows. With all three, the feed-forward starts 4.5 s before the end, and 9 s follow one another.
    halves = Halves(units=np.array([False, False, True]), seconds=0.25, parameters=1 / 3)
    arrays = np.full((1, 1, 3), 2.0), np.full((1, 3), 3.0), np.zeros(1), np.array([0, 0, 1, 2])
    reduce = with_halves(exposed_grad_reduce, halves, halves.seconds)(*arrays)
    assert np.allclose(reduce[0, 0, 2], [0, 0, 0, 2.5])
    assert np.allclose(reduce[0, 0, 0], [0, 3, 4, 4.5])
    # Weights: the last layer waits for both halves, so nothing changes but a second latency.
    late = (*arrays[:2], np.ones(1), arrays[3])
    sync = with_halves(exposed_weight_sync, halves, 0.0)(*late)
    assert np.allclose(sync[0, 0, 0], [0, 4, 6, 9]) and np.allclose(sync[0, 0, 2], [0, 0, 0, 5])
