"""Training a tokenizer, round trips of source text, and the refusals."""

import json
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from yuan_train.config.errors import DataError
from yuan_train.data.tokenizer import CONTROL_SYMBOLS, Tokenizer, train_tokenizer

SOURCE = Path(json.__file__).parent / "decoder.py"
SYMBOLS = (*CONTROL_SYMBOLS, "<s>", "</s>", "<unk>")
TEXTS = [
    "def f(x):\n\tif x:\n\t\treturn x  # tabs\n\n\n    indented = 'four'\n",
    "  leading and trailing  ",
    "\r\nWindows\r\n",
    "\n",
    " ",
    "",
    "源2.0 é ñ 😀 \u200d 👩‍👩‍👧 \x00 \x7f",
    "<eod><sep><s></s><unk><pad> <FIM_PREFIX>x",
    "<0x0A> 1234567890",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([SOURCE], 700, folder)
    return Tokenizer.load(folder)


def test_a_text_that_gives_fewer_pieces(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more than this text gives; choose at most"):
        train_tokenizer([SOURCE], 100_000, tmp_path)
    found = train_tokenizer([SOURCE], 100_000, tmp_path, or_fewer=True)
    assert 1_000 < found.vocab_size == Tokenizer.load(tmp_path).vocab_size < 100_000
    assert found.documents == 1 and found.training_bytes <= SOURCE.stat().st_size


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_restores_the_text(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text


def test_python_source_takes_fewer_tokens_than_bytes(trained: Tokenizer) -> None:
    text = SOURCE.read_text(encoding="utf-8")
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert len(ids) < len(text) / 2
    assert max(ids) < trained.vocab_size == 700


@settings(derandomize=True, deadline=None, max_examples=150)
@given(parts=st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(SYMBOLS)))
@example(parts=["x", "<eod>", "y"])
def test_no_text_gives_a_control_symbol(trained: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = trained.encode(text)
    control = {trained.piece_id(piece) for piece in SYMBOLS}
    assert not control & set(ids)
    assert trained.decode(ids) == text.replace("\u2581", " ")


def test_control_symbols_have_ids_and_no_text(trained: Tokenizer) -> None:
    ids = [trained.piece_id(piece) for piece in CONTROL_SYMBOLS]
    assert None not in ids and len(set(ids)) == len(CONTROL_SYMBOLS)
    assert trained.eod_id == trained.piece_id("<eod>")
    assert trained.piece_id("no such piece") is None
    assert trained.decode([*trained.encode("end"), trained.eod_id]) == "end"


def test_ids_beyond_the_vocabulary_are_refused(trained: Tokenizer) -> None:
    with pytest.raises(DataError, match="token id 700 is beyond the vocabulary of 700"):
        trained.decode([5, 700])


def test_half_a_surrogate_pair_is_no_text(trained: Tokenizer) -> None:
    with pytest.raises(DataError, match="half a surrogate pair"):
        trained.encode("said \ud800")


def test_training_is_repeatable_and_leaves_one_file(tmp_path: Path) -> None:
    train_tokenizer([SOURCE], 400, tmp_path / "a")
    train_tokenizer([SOURCE], 400, tmp_path / "b" / "deep")
    first = (tmp_path / "a" / "tokenizer.model").read_bytes()
    assert first == (tmp_path / "b" / "deep" / "tokenizer.model").read_bytes()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["tokenizer.model"]
    assert Tokenizer.load(tmp_path / "a" / "tokenizer.model").vocab_size == 400


def test_large_inputs_are_sampled(tmp_path: Path) -> None:
    whole = train_tokenizer([SOURCE], 400, tmp_path / "whole").training_bytes
    part = train_tokenizer([SOURCE], 400, tmp_path / "part", max_bytes=6_000).training_bytes
    assert 3_000 < part < 9_000 < whole


def test_long_lines_are_not_lost(tmp_path: Path) -> None:
    text = tmp_path / "line.txt"
    text.write_text("源码好 " * 3_000, encoding="utf-8")
    assert train_tokenizer([text], 272, tmp_path).training_bytes == 30_000


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        (50, "50 is too small .* choose at least 3"),
        (200_000, "200000 is more than this text gives; choose at most"),
        (0, "0; wanted a number above 0"),
        (-5, "-5; wanted"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path: Path, vocab_size: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        train_tokenizer([SOURCE], vocab_size, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_wrong_inputs_are_refused(tmp_path: Path) -> None:
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n\n", encoding="utf-8")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a"}\n{"text": }\n', encoding="utf-8")
    only_bad = tmp_path / "bad.jsonl"
    only_bad.write_text("[]\n", encoding="utf-8")
    for inputs, message in [
        ([blank], "no text to train"),
        ([lines], r"lines\.jsonl:2: not JSON"),
        ([only_bad], r"bad\.jsonl:1: list; wanted a JSON object"),
        ([tmp_path / "absent.txt"], r"absent\.txt: cannot read"),
        ([tmp_path], "is a folder"),
        ([], "no files"),
    ]:
        with pytest.raises(DataError, match=message):
            train_tokenizer(inputs, 400, tmp_path / "out")
    with pytest.raises(DataError, match="is a file; wanted a folder"):
        train_tokenizer([SOURCE], 400, blank)
    assert not (tmp_path / "out").exists()


def test_a_missing_or_torn_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer: .*yuan-train tokenizer"):
        Tokenizer.load(tmp_path)
    model = tmp_path / "tokenizer.model"
    for content in (b"", b"not a model"):
        model.write_bytes(content)
        with pytest.raises(DataError, match="not a sentencepiece model"):
            Tokenizer.load(tmp_path)


def test_foreign_models_end_documents_by_their_own_symbol(tmp_path: Path) -> None:
    for name, eos_id in (("with", 2), ("without", -1)):
        sentencepiece.SentencePieceTrainer.train(
            input=str(SOURCE), model_prefix=str(tmp_path / name), vocab_size=300, eos_id=eos_id, minloglevel=4
        )
    assert Tokenizer.load(tmp_path / "with.model").eod_id == 2
    with pytest.raises(DataError, match="has neither <eod> nor an end-of-sentence piece"):
        Tokenizer.load(tmp_path / "without.model")
