"""Special strings: the published tokenizer, where its file exists, and a small model of the same kind."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from yuan_train.config.errors import DataError
from yuan_train.data.indexed import preprocess
from yuan_train.data.tokenizer import YUAN_SPECIALS, Tokenizer, train_tokenizer

SOURCE = Path(json.__file__).parent / "decoder.py"
CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "tokenizer"
HAS_CASES = pytest.mark.skipif(not CASES.is_dir(), reason="the published tokenizer is not available")

BY_HAND = {
    "a<sep>b": "263 77187 289",
    "a <sep> b": "263 29871 77187 29871 289",
    "<sep>好": "77187 29871 31076",
    "好<eod>": "29871 31076 77185",
    "1+1=?<sep>2": "29871 29896 29974 29896 115798 77187 29871 29906",
    "<FIM_PREFIX>x<FIM_SUFFIX>y<FIM_MIDDLE>": "134956 921 134955 343 134957",
    "Hello world": "15043 3186",
    "源2.0": "29871 31193 29906 29889 29900",
    "😀": "29871 243 162 155 131",
    "\n": "29871 13",
    "": "",
    "<s>": "1",
    "</s>": "1533 29879 29958",
}


@pytest.fixture(scope="module")
def published() -> Tokenizer:
    return Tokenizer.load(CASES)


@HAS_CASES
def test_published_ids(published: Tokenizer) -> None:
    samples = json.loads((CASES / "expected_ids.json").read_text(encoding="utf-8"))["samples"]
    wanted = {sample["text"]: sample["ids"] for sample in samples}
    wanted |= {text: [int(word) for word in ids.split()] for text, ids in BY_HAND.items()}
    assert {text: published.encode(text, special=True) for text in wanted} == wanted
    assert {published.decode(ids, special=True): ids for ids in wanted.values()} == wanted


@HAS_CASES
def test_published_sizes(published: Tokenizer) -> None:
    assert (published.vocab_size, published.eod_id) == (134_958, 77_185)
    assert published.piece_id("<sep>") == 77_187 and published.piece_id("<FIM_MIDDLE>") == 134_957
    assert published.encode("<eod>") == [529, 80687, 29881, 29958]  # as text, without `special`


@pytest.fixture(scope="module")
def similar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model like the published one: three special strings are ordinary pieces, others are missing."""
    path = tmp_path_factory.mktemp("similar") / "tokenizer.model"
    words = ["<eod>", "<n>", "<sep>", "<pad>"]
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
        input=str(SOURCE),
        model_prefix=str(path.with_suffix("")),
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        control_symbols=words,
        minloglevel=4,
    )
    content = path.read_bytes()
    for word in words:
        # In the file a piece is: its text, four bytes of score, its type (3 control, 1 ordinary).
        text = word.encode()
        pattern = re.escape(b"\x0a" + bytes([len(text)]) + text + b"\x15") + rb"(.{4})\x18\x03"
        content, count = re.subn(pattern, lambda m: m[0][:-1] + b"\x01", content, flags=re.DOTALL)
        assert count == 1
    path.write_bytes(content)
    return path


def test_missing_special_strings_are_appended(similar: Path) -> None:
    tokenizer = Tokenizer.load(similar)
    appended = [word for word in YUAN_SPECIALS if word not in ("<eod>", "<sep>", "<pad>")]
    assert [tokenizer.piece_id(word) for word in appended] == list(range(420, 433))
    assert tokenizer.vocab_size == 433
    assert tokenizer.eod_id == tokenizer.piece_id("<eod>")
    assert tokenizer.piece_id("<n>") is not None and "<n>" not in tokenizer.specials


@pytest.mark.parametrize(
    "text",
    [
        "a<sep>b",
        "a <sep> b",
        "<sep><sep>",
        " <eod> ",
        "x<FIM_PREFIX>\ny<n>z",
        "<eod",
        "<s>",
        "",
        " ",
        "源<pad>",
    ],
)
def test_special_strings_split_the_text(similar: Path, text: str) -> None:
    tokenizer = Tokenizer.load(similar)
    ids = tokenizer.encode(text, special=True)
    wanted: list[int] = []
    for part in re.split("(<sep>|<eod>|<pad>|<FIM_PREFIX>|<s>)", text):
        number = tokenizer.specials.get(part)
        wanted += tokenizer.encode(part) if number is None else [number]
    assert ids == wanted
    assert tokenizer.decode(ids, special=True) == text
    assert not set(tokenizer.encode(text)) & set(tokenizer.specials.values())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_only_the_strings_that_are_named(similar: Path) -> None:
    tokenizer = Tokenizer.load(similar)
    ids = tokenizer.encode("a<sep><s>", special=frozenset({"<sep>"}))
    assert tokenizer.piece_id("<sep>") in ids and 1 not in ids
    assert tokenizer.decode(ids, special=True) == "a<sep><s>"


def test_our_own_models_recognise_special_strings_on_request(tmp_path: Path) -> None:
    train_tokenizer([SOURCE], 400, tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("if<sep>else", special=True)
    assert ids.count(tokenizer.piece_id("<sep>") or -1) == 1
    assert tokenizer.decode(ids, special=True) == "if<sep>else"
    assert tokenizer.piece_id("<sep>") not in tokenizer.encode("if<sep>else")


# --- tokenizer.json --------------------------------------------------------------------------------------


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    # Its types know no modules, and no setters.
    tokenizers: Any = importlib.import_module("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<eod>", "<sep>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train([str(SOURCE)], trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_hugging_face_tokenizer(hugging_face: Path) -> None:
    tokenizer = Tokenizer.load(hugging_face)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (400, 0)
    text = "def f(x): 源😀\n\treturn <sep>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 1 not in tokenizer.encode(text) and 1 in tokenizer.encode(text, special=True)
    assert tokenizer.decode(tokenizer.encode(text, special=True)) == text.removesuffix("<sep>")
    preprocess([SOURCE], hugging_face, hugging_face / "corpus", workers=2)


def test_a_torn_hugging_face_tokenizer(hugging_face: Path) -> None:
    path = hugging_face / "tokenizer.json"
    path.write_text(path.read_text()[:500])
    with pytest.raises(DataError, match="not a tokenizer.json, or a torn one"):
        Tokenizer.load(hugging_face)
