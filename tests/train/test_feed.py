"""The feed: the samples of the blend, read ahead in a thread, and only what a rank uses."""

import threading
from typing import cast

import numpy as np
import pytest

from yuan_train.config.errors import DataError
from yuan_train.data.loader import Batch, Blend
from yuan_train.parallel.device import CPU
from yuan_train.train.stage import Feed, Share

GLOBAL, SIZE, LENGTH = 8, 2, 3


class Numbers:
    """A blend whose sample n holds n; reading sample `broken` fails. Records what is read."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken
        self.read: list[int] = []
        self.readers: set[int] = set()

    def batch(self, first: int, count: int) -> Batch:
        self.readers.add(threading.get_ident())
        if self.broken in range(first, first + count):
            raise DataError(f"sample {self.broken} is broken")
        self.read += range(first, first + count)
        rows = np.repeat(np.arange(first, first + count)[:, None], LENGTH, axis=1)
        return Batch(rows, np.where(rows % 3 == 0, -100, rows))


def share(**changes: object) -> Share:
    """The second half of each batch, in micro-batches of two, of which the last stage runs here."""
    options = {
        "first_sequence": 4,
        "micro_batch_size": SIZE,
        "takers": {0: 1, 1: 1},
        "with_tokens": True,
        "with_targets": frozenset({0, 1}),
        "resets": {"eod_id": None},
        "device": CPU,
    }
    return Share(**(options | changes))  # pyright: ignore[reportArgumentType]


def as_blend(numbers: Numbers) -> Blend:
    return cast(Blend, numbers)


def test_passes_are_read_ahead_by_a_thread_and_taken_in_any_order() -> None:
    numbers, other = Numbers(), Numbers()
    with Feed(share(takers={0: 2, 1: 1})) as feed:
        feed.begin(as_blend(numbers), 0, then=GLOBAL)
        # Samples 4 to 7, without the multiples of 3.
        assert feed.count_trained(as_blend(numbers), 0) == 3 * LENGTH
        for micro_batch, first in ((1, 6), (0, 4), (0, 4)):
            batch = feed.take(micro_batch)
            assert batch.tokens_BS is not None and batch.targets_BS is not None
            assert batch.tokens_BS.tolist() == [[first] * LENGTH, [first + 1] * LENGTH]
            assert batch.trained_tokens == int((batch.targets_BS != -100).sum())
        # The step after is there before it begins; a pass over other data does not lose it.
        assert feed.count_trained(as_blend(numbers), GLOBAL) == 2 * LENGTH
        feed.begin(as_blend(other), 0)
        assert feed.take(0).tokens_BS is not None
        feed.begin(as_blend(numbers), GLOBAL, then=2 * GLOBAL)
        assert feed.take(1).tokens_BS is not None
        assert feed.count_trained(as_blend(numbers), 2 * GLOBAL) == 3 * LENGTH
        assert numbers.read == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
    assert threading.get_ident() not in numbers.readers | other.readers
    assert not [thread for thread in threading.enumerate() if thread.name == "feed"]


def test_a_rank_reads_only_what_it_uses() -> None:
    numbers = Numbers()
    with Feed(share(takers={1: 1}, with_tokens=False, with_targets=frozenset({1}))) as feed:
        feed.begin(as_blend(numbers), 0)
        batch = feed.take(1)
        assert batch.tokens_BS is None and batch.targets_BS is not None
        assert numbers.read == [6, 7]
    with Feed(share(takers={}, with_tokens=False, with_targets=frozenset())) as feed:
        feed.begin(as_blend(numbers), 0, then=GLOBAL)
        assert feed.count_trained(as_blend(numbers), GLOBAL) == 0
    assert numbers.read == [6, 7]


def test_an_error_is_raised_where_its_micro_batch_is_taken() -> None:
    numbers = Numbers(broken=14)
    with Feed(share()) as feed:
        feed.begin(as_blend(numbers), 0, then=GLOBAL)
        assert feed.count_trained(as_blend(numbers), GLOBAL) == LENGTH
        assert feed.take(0).tokens_BS is not None and feed.take(1).tokens_BS is not None
        feed.begin(as_blend(numbers), GLOBAL)
        assert feed.take(0).tokens_BS is not None
        with pytest.raises(DataError, match="sample 14 is broken"):
            feed.take(1)
