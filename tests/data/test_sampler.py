"""Orders as pure functions: permutations, epochs, splits, blends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.config.errors import DataError
from yuan_train.data import sampler
from yuan_train.data.sampler import (
    EpochOrder,
    blend_order,
    fill_epoch_order,
    hash_key,
    mix,
    mix_array,
    permutation,
    permuted,
    sample_position,
    samples_in,
    split_documents,
    split_size,
)

repeatable = settings(derandomize=True, deadline=None, max_examples=60)


@repeatable
@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_permutations_hold_every_number_once(size: int, key: int) -> None:
    assert sorted(permutation(size, key).tolist()) == list(range(size))
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


def test_permutations_differ_by_key_and_look_random() -> None:
    first, second = permutation(1_000, 1), permutation(1_000, 2)
    assert (first != second).mean() > 0.9
    walked = np.array([permuted(index, 1_000, 1) for index in range(1_000)])
    for order in (first.astype(np.int64), walked):
        assert abs(np.corrcoef(np.arange(1_000), order)[0, 1]) < 0.1
        assert np.count_nonzero(np.diff(order) == 1) < 10


def test_orders_are_the_same_on_every_machine() -> None:
    """Written down once: a change here changes the data order of every resumed run."""
    assert hash_key("documents", 1234, "corpus", 0) == 12478403801740361322
    assert permutation(8, 5).tolist() == [4, 5, 3, 6, 1, 0, 2, 7]
    assert [permuted(index, 8, 5) for index in range(8)] == [0, 2, 1, 7, 4, 3, 6, 5]
    assert blend_order((0.5, 0.3, 0.2)).corpora.tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 1, 0]


@repeatable
@given(values=st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_the_array_hash_equals_the_scalar_one(values: list[int]) -> None:
    assert mix_array(np.array(values, dtype=np.uint64)).tolist() == [mix(value) for value in values]


@repeatable
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=20), key=st.integers(0, 99), data=st.data())
def test_pieces_of_an_epoch_are_its_documents_end_to_end(
    lengths: list[int], key: int, data: st.DataObject
) -> None:
    total = sum(lengths)
    if not total:
        return
    order = EpochOrder(np.empty(len(lengths), np.uint32), np.empty(len(lengths) + 1, np.int64))
    fill_epoch_order(order, np.array(lengths).__getitem__, key, part=None)
    stream = [(int(document), token) for document in order.documents for token in range(lengths[document])]
    first = data.draw(st.integers(0, total - 1))
    last = data.draw(st.integers(first + 1, total))
    found = [(d, token) for d, start, stop in order.pieces(first, last) for token in range(start, stop)]
    assert found == stream[first:last]
    assert sorted(order.documents.tolist()) == list(range(len(lengths)))


@repeatable
@given(num_tokens=st.integers(3, 400), sequence_length=st.integers(1, 50), seed=st.integers(0, 9))
def test_an_epoch_reads_every_slot_once(num_tokens: int, sequence_length: int, seed: int) -> None:
    count = samples_in(num_tokens, sequence_length)
    if not count:
        assert num_tokens < sequence_length + 1
        return
    for epoch in (0, 3):
        positions = [
            sample_position(
                index, num_tokens=num_tokens, sequence_length=sequence_length, seed=seed, identity="a"
            )
            for index in range(epoch * count, (epoch + 1) * count)
        ]
        assert {position.epoch for position in positions} == {epoch}
        firsts = sorted(position.first for position in positions)
        assert firsts == [slot * sequence_length for slot in range(count)]
        assert firsts[-1] + sequence_length + 1 <= num_tokens < firsts[-1] + 2 * sequence_length + 1


@repeatable
@given(num_documents=st.integers(2, 500), share=st.floats(0.01, 0.99), key=st.integers(0, 99))
def test_splits_are_disjoint_and_complete(num_documents: int, share: float, key: int) -> None:
    split = (1 - share, share)
    if not 0 < round(num_documents * share) < num_documents:
        with pytest.raises(DataError, match=r"corpus: split .* leaves none for (train|validation)"):
            split_size(num_documents, split, where="corpus")
        return
    size = split_size(num_documents, split, where="corpus")
    assert size == round(num_documents * share)
    validation, train = parts(num_documents, size, key)
    order = permutation(num_documents, key)
    assert train.tolist() == sorted(order[size:]) and validation.tolist() == sorted(order[:size])


def parts(num_documents: int, size: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    validation, train = np.empty(size, np.uint32), np.empty(num_documents - size, np.uint32)
    split_documents(num_documents, key, train, validation)
    return validation, train


def test_a_split_is_not_by_position() -> None:
    validation, _ = parts(1_000, 100, 7)
    assert validation.min() < 100 and validation.max() >= 900


@pytest.mark.parametrize("split", [(0.9, 0.2), (1.0, 0.0), (-0.5, 1.5), (0.5, float("nan"))])
def test_invalid_shares_are_refused(split: tuple[float, float]) -> None:
    with pytest.raises(DataError, match=r"data\.split: .* wanted two shares above 0 that sum to 1"):
        split_size(100, split, where="corpus")


@pytest.mark.parametrize("size", [1, 5_000, 77_777])
def test_orders_made_in_pieces_are_those_of_one_sort(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large corpora are sorted in buckets, and read in pieces: their order is the one of small corpora."""
    numbers = np.arange(size, dtype=np.uint64) * np.uint64(sampler.GOLDEN) + np.uint64(9)
    whole = np.argsort(mix_array(numbers), kind="stable")
    monkeypatch.setattr(sampler, "BUCKET_BITS", 6)
    monkeypatch.setattr(sampler, "CHUNK", 1_000)
    assert np.array_equal(permutation(size, 9), whole)
    if size > 1:
        validation, train = parts(size, size // 3, 9)
        assert np.array_equal(validation, np.sort(whole[: size // 3]))
        assert np.array_equal(train, np.sort(whole[size // 3 :]))
    part, lengths = np.arange(size, dtype=np.uint32) * 2, np.arange(2 * size) % 7
    order = EpochOrder(np.empty(size, np.uint32), np.empty(size + 1, np.int64))
    fill_epoch_order(order, lengths.__getitem__, 9, part)
    assert np.array_equal(order.documents, part[whole])
    assert np.array_equal(order.stream_starts, np.cumsum([0, *lengths[part[whole]]]))


@repeatable
@given(units=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_blends_stay_within_one_sample_of_their_shares(units: list[int]) -> None:
    order = blend_order(tuple(map(float, units)))
    shares = np.array(units) / sum(units)
    counts = np.zeros(len(units), dtype=np.int64)
    for index in range(2 * len(order.corpora) + 3):
        corpus, number = order.locate(index)
        assert number == counts[corpus]
        counts[corpus] += 1
        assert np.abs(counts - shares * (index + 1)).max() < 1


def test_a_dominant_corpus_among_many_small_ones_stays_within_one_sample() -> None:
    weights = (0.91, *(0.01,) * 9)
    order = blend_order(weights)
    counts = np.cumsum(np.eye(10)[order.corpora], axis=0)
    assert np.abs(counts - np.outer(np.arange(1, 101), weights)).max() < 1


def test_blends_are_exact_at_large_sample_numbers() -> None:
    order = blend_order((0.7, 0.2, 0.1))
    assert order.units == (7, 2, 1)
    assert order.locate(10**12) == (0, 7 * 10**11)


def test_awkward_weights_are_rounded_and_none_is_lost() -> None:
    order = blend_order((2_300_000.0, 6_800_000.0, 24_000_123.0, 1.0))
    assert order.units[3] == 1
    shares = np.array(order.units) / sum(order.units)
    wanted = np.array([2_300_000, 6_800_000, 24_000_123, 1]) / 33_100_124
    assert np.abs(shares - wanted).max() < 1e-4
    counts = np.cumsum(np.eye(4)[order.corpora], axis=0)
    assert np.abs(counts - np.outer(np.arange(1, len(counts) + 1), shares)).max() < 1
