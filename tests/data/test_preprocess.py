"""Text to token files: order, counts, refusals, worker processes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.project import write_lines
from yuan_train.config.errors import DataError
from yuan_train.data import indexed as module
from yuan_train.data.indexed import DocumentFormat, IndexedDataset, bin_path, idx_path, preprocess
from yuan_train.data.tokenizer import Tokenizer, train_tokenizer

SOURCE = Path(json.__file__).parent / "decoder.py"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([SOURCE], 400, folder)
    return folder


def read_texts(prefix: Path, tokenizer: Path) -> list[str]:
    dataset, loaded = IndexedDataset(prefix), Tokenizer.load(tokenizer)
    texts = []
    for number in range(len(dataset)):
        ids = dataset.document(number).tolist()
        assert ids[-1] == loaded.eod_id and ids.count(loaded.eod_id) == 1
        texts.append(loaded.decode(ids))
    return texts


def test_documents_in_the_order_of_the_inputs(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_lines(
        tmp_path / "b.jsonl", [{"text": "one <eod>"}, {"text": "two\n\tlines"}, {"text": "  "}]
    )
    whole = tmp_path / "a.py"
    whole.write_bytes(b"\xef\xbb\xbfdef f():\r\n    pass\n")
    foreign = tmp_path / "c.txt"
    foreign.write_bytes(b"caf\xe9")
    blank = tmp_path / "d.txt"
    blank.touch()
    done = preprocess([lines, foreign, whole, blank], tokenizer, tmp_path / "corpus")
    wanted = ["one <eod>", "two\n\tlines", "def f():\r\n    pass\n"]
    assert read_texts(tmp_path / "corpus", tokenizer) == wanted
    assert (done.documents, done.empty, done.undecodable) == (3, 2, (str(foreign),))
    assert done.tokens == IndexedDataset(tmp_path / "corpus").num_tokens
    assert (done.dtype, done.bin_bytes) == ("uint16", 2 * done.tokens)


def test_bytes_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 2_000)  # many chunks, of very different work
    # The first chunk holds the longest text, so that a worker overtakes it.
    records = [{"text": f"text {number} " * (4_000 if number == 0 else number % 7)} for number in range(300)]
    lines = write_lines(tmp_path / "lines.jsonl", records)
    reports = []
    one = preprocess([lines, SOURCE], tokenizer, tmp_path / "one", report=reports.append)
    three = preprocess([lines, SOURCE], tokenizer, tmp_path / "three", workers=3)
    assert bin_path(tmp_path / "one").read_bytes() == bin_path(tmp_path / "three").read_bytes()
    assert idx_path(tmp_path / "one").read_bytes() == idx_path(tmp_path / "three").read_bytes()
    assert one.documents == three.documents == reports[-1].documents
    assert one.empty == three.empty == 42
    assert len(reports) > 5


def test_another_text_key(tmp_path: Path, tokenizer: Path) -> None:
    lines = write_lines(tmp_path / "lines.jsonl", [{"content": "x", "text": 3}])
    preprocess([lines], tokenizer, tmp_path / "corpus", DocumentFormat(text_key="content"))
    assert read_texts(tmp_path / "corpus", tokenizer) == ["x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"lines\.jsonl:3: not JSON"),
        pytest.param(b'{"n": ' + b"9" * 5000 + b"}", r"lines\.jsonl:3: not JSON .*digits", id="digits"),
        (b'["text"]', r"lines\.jsonl:3: list; wanted a JSON object with the key 'text'"),
        (b'{"txt": "a", "id": 1}', r"lines\.jsonl:3: no key 'text'; the line has 'txt', 'id'; .*--text-key"),
        (b'{"text": 5}', r"lines\.jsonl:3: key 'text' holds int; wanted text"),
        (b'{"text": "\xe9"}', r"lines\.jsonl:3: not UTF-8"),
        (b'{"text": "\\ud800"}', r"lines\.jsonl:3: key 'text' holds half a surrogate pair"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, tokenizer: Path, line: bytes, message: str) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        preprocess([lines], tokenizer, tmp_path / "corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


def test_a_malformed_line_is_named_by_a_worker_too(tmp_path: Path, tokenizer: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(b'{"text": "a"}\n{\n')
    with pytest.raises(DataError, match=r"lines\.jsonl:2: not JSON"):
        preprocess([lines], tokenizer, tmp_path / "corpus", workers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


def test_a_worker_that_dies_is_an_error(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_encode_chunk", _Deadly())
    with pytest.raises(DataError, match="a preprocessing worker died"):
        preprocess([SOURCE], tokenizer, tmp_path / "corpus", workers=2)
    assert list(tmp_path.iterdir()) == []


class _Deadly:
    """Ends the process that unpickles it, as the kernel does with one that takes too much memory."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (9,)


def test_wrong_inputs_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    blank = tmp_path / "blank.txt"
    blank.write_text("\n", encoding="utf-8")
    for inputs, source, message in [
        ([blank], tokenizer, "no documents to write"),
        ([tmp_path / "absent.txt"], tokenizer, r"absent\.txt: cannot read"),
        ([tmp_path], tokenizer, "is a folder; name its files"),
        ([SOURCE], tmp_path / "absent", "no tokenizer"),
    ]:
        with pytest.raises(DataError, match=message):
            preprocess(inputs, source, tmp_path / "corpus")
    with pytest.raises(DataError, match="--workers: 0"):
        preprocess([SOURCE], tokenizer, tmp_path / "new/corpus", workers=0)
    assert not (tmp_path / "new").exists()


def test_text_that_gives_the_end_of_document_is_refused(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign model may hold <eod> as an ordinary piece."""
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **_: [5, self.eod_id, 6])
    with pytest.raises(DataError, match=r"decoder\.py: the text itself gives the end-of-document id"):
        preprocess([SOURCE], tokenizer, tmp_path / "corpus")


def test_a_retrained_tokenizer_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    for vocab_size in (380, 400):
        train_tokenizer([SOURCE], vocab_size, tmp_path / "tokenizer")
        preprocess([SOURCE], tmp_path / "tokenizer", tmp_path / "corpus")
        (text,) = read_texts(tmp_path / "corpus", tmp_path / "tokenizer")
        assert text == SOURCE.read_text(encoding="utf-8")


def test_few_chunks_are_in_flight() -> None:
    """Memory is bounded: the input is read only as far as the workers need."""
    read = 0

    def chunks() -> Iterator[list[module.Item]]:
        nonlocal read
        for _ in range(1_000):
            read += 1
            yield []

    class Pool:
        def submit(self, *_: object) -> "Pool":
            return self

        def result(self) -> None:
            return None

    results = module._drain_in_order(Pool(), None, chunks(), limit=6)  # pyright: ignore
    next(results)
    assert read == 6
    assert sum(1 for _ in results) == 999
