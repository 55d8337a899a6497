"""Batches: what a sample holds, any sample at any time, blends, splits, refusals."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.config.errors import DataError
from yuan_train.data.indexed import IndexedWriter, token_dtype
from yuan_train.data.loader import Blend, SampleSpec, open_corpora

EOD = 1


def make_corpus(prefix: Path, num_documents: int, *, first: int = 10, seed: int = 0) -> list[list[int]]:
    """Documents in which all tokens are different, each ended by EOD."""
    generator = np.random.RandomState(seed)
    documents = []
    for length in generator.randint(1, 30, size=num_documents):
        documents.append([*range(first, first + int(length)), EOD])
        first += int(length)
    with IndexedWriter(prefix, dtype=token_dtype(135_040)) as writer:
        for document in documents:
            writer.add(document)
    return documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    make_corpus(folder / "small", 40)
    make_corpus(folder / "large", 90, first=5_000, seed=1)
    return folder


def open_small(folder: Path, *, seed: int = 3, sequence_length: int = 16) -> Blend:
    return open_corpora(
        [(str(folder / "small"), 1.0)],
        SampleSpec(sequence_length=sequence_length, seed=seed, vocab_size=135_040),
    )


def rows(blend: Blend, first: int, count: int) -> np.ndarray:
    batch = blend.batch(first, count)
    return np.concatenate([batch.inputs, batch.targets[:, -1:]], axis=1)


def test_targets_are_inputs_shifted_by_one_token(folder: Path) -> None:
    batch = open_small(folder).batch(0, 5)
    assert batch.inputs.shape == batch.targets.shape == (5, 16)
    assert batch.inputs.dtype == batch.targets.dtype == np.int64
    assert batch.inputs.flags.c_contiguous and batch.targets.flags.c_contiguous
    assert (batch.inputs[:, 1:] == batch.targets[:, :-1]).all()


@pytest.mark.parametrize("sequence_length", [1, 7, 16, 200])
def test_an_epoch_trains_every_token_of_the_stream_once(folder: Path, sequence_length: int) -> None:
    blend = open_small(folder, sequence_length=sequence_length)
    (corpus,) = blend.corpora
    for epoch in (0, 1):
        targets = blend.batch(epoch * corpus.samples_per_epoch, corpus.samples_per_epoch).targets.ravel()
        texts = targets[targets != EOD]
        assert len(set(texts.tolist())) == len(texts)  # no token twice
        # Missing: the first token, which is no label, and what is left of one sample.
        assert corpus.num_tokens - sequence_length <= targets.size + 1 <= corpus.num_tokens


def test_samples_are_concatenated_documents(folder: Path) -> None:
    blend = open_small(folder)
    dataset = blend.corpora[0].dataset
    followed_by = {}
    for number in range(len(dataset)):
        document = dataset.document(number).tolist()
        followed_by.update(zip(document[:-1], document[1:], strict=True))
    first_tokens = {int(dataset.document(number)[0]) for number in range(len(dataset))}
    for row in rows(blend, 0, 40):
        for token, following in zip(row[:-1].tolist(), row[1:].tolist(), strict=True):
            assert following in first_tokens if token == EOD else following == followed_by[token]


def test_orders_differ_by_seed_and_epoch_and_are_not_the_file(folder: Path) -> None:
    blend = open_small(folder)
    count = blend.corpora[0].samples_per_epoch
    first = rows(blend, 0, count)
    assert not np.array_equal(first, rows(blend, count, count))
    assert not np.array_equal(first, rows(open_small(folder, seed=4), 0, count))
    assert np.array_equal(first, rows(open_small(folder), 0, count))
    starts = first[:, 0]
    assert not np.array_equal(starts, np.sort(starts))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(first=st.integers(0, 10**9), counts=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_a_batch_does_not_depend_on_how_it_is_split(folder: Path, first: int, counts: list[int]) -> None:
    """Pipelines and micro-batches read sub-ranges, on other machines and after a resume."""
    sources = [(str(folder / "small"), 0.3), (str(folder / "large"), 0.7)]
    whole = open_corpora(sources, SampleSpec(sequence_length=8, seed=1, vocab_size=None)).batch(
        first, sum(counts)
    )
    again = open_corpora(sources, SampleSpec(sequence_length=8, seed=1, vocab_size=None))
    starts = first + np.cumsum([0, *counts])
    order = list(range(len(counts)))[::-1]
    parts = {number: again.batch(int(starts[number]), counts[number]).inputs for number in order}
    assert np.array_equal(whole.inputs, np.concatenate([parts[number] for number in sorted(order)]))


def test_epoch_orders_are_evicted(folder: Path) -> None:
    blend = open_small(folder)
    count = blend.corpora[0].samples_per_epoch
    before = rows(blend, 0, count)
    for epoch in range(5):
        blend.batch(epoch * count, 1)
        assert len(blend.corpora[0]._epochs) <= 2
    assert np.array_equal(before, rows(blend, 0, count))


def test_a_blend_reads_each_corpus_by_its_weight(folder: Path) -> None:
    sources = [(str(folder / "small"), 3.0), (str(folder / "large"), 1.0)]
    blend = open_corpora(sources, SampleSpec(sequence_length=8, seed=1, vocab_size=None))
    assert blend.weights == (0.75, 0.25)
    from_large = [row.max() >= 5_000 for row in rows(blend, 0, 40)]
    assert sum(from_large) == 10
    assert from_large == [blend.locate(index)[0] == 1 for index in range(40)]


def test_the_same_corpus_twice_is_not_read_in_the_same_order(folder: Path) -> None:
    twice = open_corpora(
        [(str(folder / "small"), 1.0)] * 2, SampleSpec(sequence_length=8, seed=1, vocab_size=None)
    )
    read = rows(twice, 0, 40)
    assert not np.array_equal(read[0::2], read[1::2])


def test_a_corpus_keeps_its_order_when_it_is_moved(folder: Path, tmp_path: Path) -> None:
    make_corpus(tmp_path / "elsewhere", 40)
    moved = open_corpora(
        [(str(tmp_path / "elsewhere"), 1.0)], SampleSpec(sequence_length=16, seed=3, vocab_size=None)
    )
    assert np.array_equal(rows(moved, 0, 20), rows(open_small(folder), 0, 20))


def test_parts_of_a_split_share_no_document(folder: Path) -> None:
    def texts(part: str, seed: int) -> set[int]:
        blend = open_corpora(
            [(str(folder / "large"), 1.0)],
            SampleSpec(sequence_length=4, seed=seed, vocab_size=None),
            split=(0.8, 0.2),
            part=part,  # pyright: ignore[reportArgumentType]
        )
        assert blend.corpora[0].num_documents == {"train": 72, "validation": 18}[part]
        # Several epochs, so that the tokens left over at an epoch's end are seen as well.
        return set(rows(blend, 0, 8 * blend.corpora[0].samples_per_epoch).ravel().tolist()) - {EOD}

    assert not texts("train", 1) & texts("validation", 1)
    assert texts("train", 1) | texts("validation", 1) == set(rows_of(folder / "large"))
    # Another seed holds out the same documents.
    assert texts("validation", 1) == texts("validation", 2)


def rows_of(prefix: Path) -> list[int]:
    blend = open_corpora([(str(prefix), 1.0)], SampleSpec(sequence_length=1, seed=0, vocab_size=None))
    dataset = blend.corpora[0].dataset
    return [token for token in dataset.tokens(0, dataset.num_tokens).tolist() if token != EOD]


def test_a_short_corpus_is_refused(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"small: \d+ tokens in 40 documents, but one sample needs .* = 100001"
    ):
        open_small(folder, sequence_length=100_000)


def test_ids_beyond_the_vocabulary_are_refused(folder: Path) -> None:
    blend = open_corpora(
        [(str(folder / "large"), 1.0)], SampleSpec(sequence_length=8, seed=0, vocab_size=5_000)
    )
    with pytest.raises(
        DataError, match=r"large: token id \d{4} is beyond the model's vocabulary of 5000; pre"
    ):
        blend.batch(0, 8)


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "corpus", dtype=np.dtype("<i4")) as writer:
        writer.add([5, -7, 5])
    blend = open_corpora(
        [(str(tmp_path / "corpus"), 1.0)], SampleSpec(sequence_length=2, seed=0, vocab_size=None)
    )
    with pytest.raises(DataError, match="token id -7; wanted ids from 0 on"):
        blend.batch(0, 1)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_must_be_above_zero(folder: Path, weight: float) -> None:
    with pytest.raises(DataError, match=r"small: weight .*; wanted a number above 0"):
        open_corpora(
            [(str(folder / "small"), weight)], SampleSpec(sequence_length=8, seed=0, vocab_size=None)
        )


def test_missing_corpora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no corpora"):
        open_corpora([], SampleSpec(sequence_length=8, seed=0, vocab_size=None))
    with pytest.raises(DataError, match=r"absent: no .*absent\.bin"):
        open_corpora(
            [(str(tmp_path / "absent"), 1.0)], SampleSpec(sequence_length=8, seed=0, vocab_size=None)
        )
