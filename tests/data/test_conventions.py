"""Yuan's text convention, and parquet files."""

import json
from pathlib import Path

import pytest

from yuan_train.config.errors import DataError
from yuan_train.data.indexed import DocumentFormat, IndexedDataset, preprocess
from yuan_train.data.text import yuan_text
from yuan_train.data.tokenizer import Tokenizer, train_tokenizer

SOURCE = Path(json.__file__).parent / "decoder.py"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([SOURCE], 400, folder)
    return folder


def texts_of(prefix: Path, tokenizer: Path) -> list[str]:
    dataset, loaded = IndexedDataset(prefix), Tokenizer.load(tokenizer)
    return [loaded.decode(dataset.document(i).tolist(), special=True) for i in range(len(dataset))]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("one", "one"),
        ("<n>one<n>two\n", "one\ntwo"),
        ("<n><n>one", "\none"),
        ("question[SEP]answer\r\n", "question<sep>answer"),
        ("question<sep>answer", "question<sep>answer"),
        ("a\u2583b\rc", "abc"),
        ("    if x:<n>        y  ", "    if x:\n        y"),
        ("", ""),
        ("  \n", ""),
        ("<n><n><n>", ""),
        ("text<eod>", "text"),
        ("<eod>", ""),
    ],
)
def test_lines(line: str, text: str) -> None:
    assert yuan_text(line) == text


def test_one_sample_per_line(tmp_path: Path, tokenizer: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("\ufeffq[SEP]a<n>b\n\n<n>\nplain <s> text", encoding="utf-8")
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"text": "x<n>y<sep>z"}) + "\n")
    done = preprocess([lines, records], tokenizer, tmp_path / "corpus", DocumentFormat(convention="yuan"))
    wanted = ["q<sep>a\nb<eod>", "plain <s> text<eod>", "x\ny<sep>z<eod>"]
    assert texts_of(tmp_path / "corpus", tokenizer) == wanted
    assert (done.documents, done.empty) == (3, 2)
    preprocess([records], tokenizer, tmp_path / "plain")
    assert texts_of(tmp_path / "plain", tokenizer) == ["x<n>y<sep>z<eod>"]
    separator = Tokenizer.load(tokenizer).piece_id("<sep>")
    assert separator in IndexedDataset(tmp_path / "corpus").document(0)
    assert separator not in IndexedDataset(tmp_path / "plain").document(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good\nb\xffd\n", r"lines\.txt:2: not UTF-8"),
        (b"one<eod>two\n", r"lines\.txt:1: the text itself gives the end-of-document id"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, tokenizer: Path, content: bytes, message: str) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_bytes(content)
    with pytest.raises(DataError, match=message):
        preprocess([lines], tokenizer, tmp_path / "corpus", DocumentFormat(convention="yuan"))


def test_parquet(tmp_path: Path, tokenizer: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [f"row {i}\n\u6e90" for i in range(3_000)]
    table = pyarrow.table({"content": [*rows, None, " "], "id": list(range(3_002))})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=700)
    form = DocumentFormat(text_key="content")
    done = preprocess([tmp_path / "rows.parquet"], tokenizer, tmp_path / "corpus", form, workers=2)
    assert texts_of(tmp_path / "corpus", tokenizer) == [f"{row}<eod>" for row in rows]
    assert done.empty == 2
    with pytest.raises(DataError, match="no column 'text'; it has 'content', 'id'"):
        preprocess([tmp_path / "rows.parquet"], tokenizer, tmp_path / "corpus")
    with pytest.raises(DataError, match="rows.parquet:1: column 'id' holds int"):
        preprocess([tmp_path / "rows.parquet"], tokenizer, tmp_path / "corpus", DocumentFormat(text_key="id"))
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:900])
    with pytest.raises(DataError, match="torn, or no parquet file"):
        preprocess([tmp_path / "torn.parquet"], tokenizer, tmp_path / "corpus")
