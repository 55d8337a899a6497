"""Arrays that the processes of a node share: the same samples, written once, wherever there is room."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_loader import make_corpus, rows
from yuan_train.config.errors import DataError
from yuan_train.data import loader
from yuan_train.data.loader import Blend, NodeCache, SampleSpec, open_corpora

SIZES = {"numbers": (5, np.dtype(np.int64))}


def fill(arrays: Mapping[str, np.ndarray]) -> None:
    arrays["numbers"][:] = np.arange(5)


def refuse(arrays: Mapping[str, np.ndarray]) -> None:
    raise AssertionError("written twice")


def open_parts(prefix: Path) -> list[Blend]:
    spec = SampleSpec(sequence_length=16, seed=3, vocab_size=135_040)
    return [
        open_corpora([(str(prefix), 1.0)], spec),
        open_corpora([(str(prefix), 1.0)], spec, split=(0.8, 0.2)),
        open_corpora([(str(prefix), 1.0)], spec, split=(0.8, 0.2), part="validation"),
    ]


def test_a_large_corpus_gives_the_samples_of_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_corpus(tmp_path / "corpus", 90)
    wanted = [rows(blend, 0, 40) for blend in open_parts(tmp_path / "corpus")]
    assert not (tmp_path / "corpus.cache").exists(), "a small corpus is not worth files"
    monkeypatch.setattr(loader, "SHARED_FROM", 1)
    first = [rows(blend, 0, 40) for blend in open_parts(tmp_path / "corpus")]
    entries = {path.name: path.stat().st_ino for path in (tmp_path / "corpus.cache").iterdir()}
    kinds = {name.partition("-")[0] for name in entries if not name.startswith(".")}
    assert kinds == {"checked", "split", "order"}
    again = [rows(blend, 0, 40) for blend in open_parts(tmp_path / "corpus")]
    for a, b, c in zip(wanted, first, again, strict=True):
        assert np.array_equal(a, b) and np.array_equal(a, c)
    assert entries == {path.name: path.stat().st_ino for path in (tmp_path / "corpus.cache").iterdir()}
    # A corpus that was written anew is checked anew.
    make_corpus(tmp_path / "corpus", 50, seed=2)
    assert open_parts(tmp_path / "corpus")[0].corpora[0].num_documents == 50


def test_an_entry_is_written_once_and_again_if_it_is_damaged(tmp_path: Path) -> None:
    cache = NodeCache((tmp_path / "cache",))
    assert cache.arrays("a", SIZES, fill)["numbers"].tolist() == [0, 1, 2, 3, 4]
    found = NodeCache((tmp_path / "elsewhere", tmp_path / "cache")).arrays("a", SIZES, refuse)
    assert isinstance(found["numbers"], np.memmap) and not found["numbers"].flags.writeable
    assert cache.facts("f", lambda: {"n": 1}) == cache.facts("f", dict) == {"n": 1}
    (tmp_path / "cache" / "a" / "numbers.npy").write_bytes(b"torn")
    assert cache.arrays("a", SIZES, fill)["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".a.lock", ".f.lock", "a", "f"]


def test_where_nothing_can_be_written_beside_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(loader.tempfile, "gettempdir", lambda: str(tmp_path))
    cache = loader.cache_of(str(tmp_path / "file" / "corpus"))
    assert cache.arrays("a", SIZES, fill)["numbers"].tolist() == [0, 1, 2, 3, 4]
    (mine,) = tmp_path.glob("yuan-train-*")
    monkeypatch.setattr(loader.os, "getuid", lambda: mine.stat().st_uid + 1)
    with pytest.raises(DataError, match=r"cannot be written: .*corpus\.cache.*; .*yuan-train-.* cannot be w"):
        cache.arrays("a", SIZES, refuse)
