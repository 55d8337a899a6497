"""Sentencepiece tokenizers: training one, and turning text to ids and back.

Byte-pair encoding with byte fallback over unchanged text: no normaliser, spaces kept, digits one by one,
newlines and tabs as bytes. Text comes back as it was, but for U+2581, the sign that sentencepiece writes for
a space.
"""

import hashlib
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from yuan_train.config.errors import DataError
from yuan_train.data.text import check_inputs, decode_item, read_items

MODEL_NAME = "tokenizer.model"
END_OF_DOCUMENT = "<eod>"
# Control symbols: no text is ever encoded to one of them.
CONTROL_SYMBOLS = (
    END_OF_DOCUMENT,
    "<sep>",
    "<pad>",
    "<mask>",
    "<FIM_PREFIX>",
    "<FIM_MIDDLE>",
    "<FIM_SUFFIX>",
)
TRAINING_BYTES = 64_000_000  # of text; more makes training longer and the pieces no better
LINE_CHARACTERS = 1_000  # sentencepiece drops lines above 4,192 bytes; 1,000 characters are at most 4,000
FATAL_ONLY = 4  # sentencepiece logs to stderr by itself below this level; its exceptions carry the same words


@dataclass(frozen=True)
class TrainedTokenizer:
    """A trained tokenizer: its file, and what it was trained on."""

    path: str
    vocab_size: int
    documents: int
    undecodable: int
    training_bytes: int


def train_tokenizer(
    inputs: Sequence[str | Path],
    vocab_size: int,
    out_dir: str | Path,
    *,
    text_key: str = "text",
    max_bytes: int = TRAINING_BYTES,
) -> TrainedTokenizer:
    """Trains on the documents of `inputs` and writes `OUT_DIR/tokenizer.model` when it is whole.

    Of inputs above `max_bytes` a fixed share of the lines is taken, spread evenly. The same inputs give the
    same bytes. Raises DataError for unreadable inputs and for a vocabulary size that the text cannot give.
    """
    check_inputs(inputs)
    path = Path(out_dir) / MODEL_NAME
    if Path(out_dir).exists() and not Path(out_dir).is_dir():
        raise DataError(f"{out_dir}: is a file; wanted a folder for {MODEL_NAME}")
    sample = _LineSample(inputs, text_key=text_key, max_bytes=max_bytes)
    model = _train(sample.lines(), vocab_size)
    if not sample.training_bytes:
        raise DataError(f"{', '.join(map(str, inputs))}: no text to train a tokenizer on")
    _write_whole(path, model)
    return TrainedTokenizer(
        path=str(path),
        vocab_size=vocab_size,
        documents=sample.documents,
        undecodable=sample.undecodable,
        training_bytes=sample.training_bytes,
    )


class _LineSample:
    """Lines to train on, and counts of what was read while they were drawn."""

    def __init__(self, inputs: Sequence[str | Path], *, text_key: str, max_bytes: int) -> None:
        total_bytes = sum(Path(path).stat().st_size for path in inputs)
        self._threshold = min(1.0, max_bytes / max(total_bytes, 1)) * 2**32
        self._inputs = inputs
        self._text_key = text_key
        self.documents = 0
        self.undecodable = 0
        self.training_bytes = 0

    def lines(self) -> Iterator[str]:
        number = 0
        for text in self._documents():
            for line in _pieces_of_text(text):
                number += 1
                # A checksum of the line's number: evenly spread, and the same on every machine.
                if zlib.crc32(number.to_bytes(8, "little")) < self._threshold:
                    self.training_bytes += len(line.encode())
                    yield line

    def _documents(self) -> Iterator[str]:
        for item in read_items(self._inputs):
            text = decode_item(item, text_key=self._text_key)
            if text is None:
                self.undecodable += 1
            elif text.strip():
                self.documents += 1
                yield text


def _pieces_of_text(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        for first in range(0, len(line), LINE_CHARACTERS):
            yield line[first : first + LINE_CHARACTERS]


def _train(lines: Iterator[str], vocab_size: int) -> bytes:
    if vocab_size < 1:
        raise DataError(f"--vocab-size: {vocab_size}; wanted a number above 0")
    model = io.BytesIO()
    failure: list[Exception] = []
    try:
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=_keep_error(lines, failure),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            split_digits=True,
            add_dummy_prefix=True,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            control_symbols=list(CONTROL_SYMBOLS),
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,
            minloglevel=FATAL_ONLY,
        )
    except RuntimeError as error:
        if not failure:
            raise _training_refused(str(error), vocab_size) from error
    if failure:
        raise failure[0]
    return model.getvalue()


def _keep_error(lines: Iterator[str], failure: list[Exception]) -> Iterator[str]:
    """Ends the lines at an error and keeps it: an exception must not cross sentencepiece's C++ frames."""
    try:
        yield from lines
    except Exception as error:
        failure.append(error)


def _training_refused(message: str, vocab_size: int) -> DataError:
    if found := re.search(r"too high .*<= (\d+)", message):
        return DataError(
            f"--vocab-size: {vocab_size} is more than this text gives; choose at most {found[1]}, or add text"
        )
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return DataError(
            f"--vocab-size: {vocab_size} is too small for bytes, characters and special symbols; "
            f"choose at least {found[1]}"
        )
    if "sentences_.empty()" in message:
        return DataError("--input: no text to train a tokenizer on")
    return DataError(f"--vocab-size: {vocab_size}: sentencepiece cannot train: {message}")


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot write: {error.strerror or error}; choose another --out") from error


class Tokenizer:
    """A sentencepiece model; `path` is the model's file, `digest` the sha256 of its bytes."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, path: Path, digest: str) -> None:
        self._processor = processor
        self.path = path
        self.digest = digest
        self.vocab_size: int = processor.get_piece_size()
        self.eod_id = self._end_of_document()

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Loads a model file, or `tokenizer.model` of a folder.

        Raises DataError when there is none, when it is not a sentencepiece model, or when no piece can end a
        document.
        """
        file = Path(path) / MODEL_NAME if Path(path).is_dir() else Path(path)
        advice = "make one with: yuan-train tokenizer --input TEXT --vocab-size N --out DIR"
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(
                f"{file}: no tokenizer: cannot read it: {error.strerror or error}; {advice}"
            ) from error
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(content)
            if not processor.get_piece_size():  # an empty file loads without complaint
                raise RuntimeError("no pieces")
        except RuntimeError as error:
            raise DataError(f"{file}: not a sentencepiece model, or a torn one; {advice}") from error
        return cls(processor, file, hashlib.sha256(content).hexdigest())

    def piece_id(self, piece: str) -> int | None:
        """The id of a piece such as `<sep>`; None if the model has no such piece."""
        number = self._processor.piece_to_id(piece)
        return number if self._processor.id_to_piece(number) == piece else None

    def encode(self, text: str) -> list[int]:
        """Token ids of the text; nothing is added at its ends."""
        return self._processor.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; control symbols give no text, ids beyond the vocabulary are a DataError."""
        numbers = [int(number) for number in ids]
        beyond = [number for number in numbers if not 0 <= number < self.vocab_size]
        if beyond:
            raise DataError(
                f"{self.path}: token id {beyond[0]} is beyond the vocabulary of {self.vocab_size}; "
                "use the tokenizer that the tokens were made with"
            )
        return self._processor.decode(numbers)

    def _end_of_document(self) -> int:
        number = self.piece_id(END_OF_DOCUMENT)
        # A foreign model has no <eod>; its end-of-sentence symbol does the same work.
        if number is None:
            number = self._processor.eos_id()
        if number < 0:
            raise DataError(
                f"{self.path}: has neither {END_OF_DOCUMENT} nor an end-of-sentence piece, so nothing can "
                "end a document; train a tokenizer of your own"
            )
        return number
