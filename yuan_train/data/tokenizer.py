"""Training of sentencepiece tokenizers; encoding and decoding with our own models, Yuan's or others.

Our own: byte-pair encoding with byte fallback over unchanged text: no normaliser, spaces kept, digits one by
one, newlines and tabs as bytes. Decoding restores the text, except U+2581, which sentencepiece writes for a
space.

A chat template, the Jinja text beside a tokenizer, turns messages into a prompt, or into training data. It is
rendered as transformers renders it: in Jinja's immutable sandbox, which lets a template neither reach
Python's attributes nor change what it is given. A template is not trusted, but it is not bounded either: it
can loop for long.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import sentencepiece

from yuan_train.config.errors import DataError
from yuan_train.config.model import newest_steps
from yuan_train.data.text import END_OF_DOCUMENT, check_inputs, decode_item, read_items

MODEL_NAME = "tokenizer.model"
HUGGING_FACE_NAME = "tokenizer.json"
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
# Strings that the published Yuan tokenizer recognises; those without a piece are appended in this order.
YUAN_SPECIALS = (
    END_OF_DOCUMENT,
    "<sep>",
    "<pad>",
    "<mask>",
    "<predict>",
    "<FIM_SUFFIX>",
    "<FIM_PREFIX>",
    "<FIM_MIDDLE>",
    "<commit_before>",
    "<commit_msg>",
    "<commit_after>",
    "<jupyter_start>",
    "<jupyter_text>",
    "<jupyter_code>",
    "<jupyter_output>",
    "<empty_output>",
)
TRAINING_BYTES = 64_000_000  # of text; more makes training longer, and the pieces no better
LINE_CHARACTERS = 1_000  # sentencepiece drops lines above 4,192 bytes; 1,000 characters are at most 4,000
FATAL_ONLY = 4  # below this level sentencepiece logs to stderr itself; its exceptions say the same


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
    or_fewer: bool = False,
) -> TrainedTokenizer:
    """Trains on the documents of `inputs` and writes `OUT_DIR/tokenizer.model` atomically.

    Of inputs larger than `max_bytes` a fixed share of the lines is used, evenly spread. The same inputs give
    the same bytes. Where the text gives fewer than `vocab_size` pieces, these are taken if `or_fewer`. Raises
    DataError for unreadable inputs and for a vocabulary size that the text does not allow.
    """
    check_inputs(inputs)
    path = Path(out_dir) / MODEL_NAME
    if Path(out_dir).exists() and not Path(out_dir).is_dir():
        raise DataError(f"{out_dir}: is a file; wanted a folder for {MODEL_NAME}")
    sample = _LineSample(inputs, text_key=text_key, max_bytes=max_bytes)
    try:
        model = _train(sample.lines(), vocab_size)
    except _TooMany as error:
        if not or_fewer:
            raise
        vocab_size, sample = error.most, _LineSample(inputs, text_key=text_key, max_bytes=max_bytes)
        model = _train(sample.lines(), vocab_size)
    if not sample.training_bytes:
        raise DataError(f"{', '.join(map(str, inputs))}: no text to train a tokenizer on")
    _write_atomically(path, model)
    counts = sample.documents, sample.undecodable, sample.training_bytes
    return TrainedTokenizer(str(path), vocab_size, *counts)


class _TooMany(DataError):
    most: int
    """The pieces that a text gives."""


class _LineSample:
    """The lines to train on, and counts of what was read to select them."""

    def __init__(self, inputs: Sequence[str | Path], *, text_key: str, max_bytes: int) -> None:
        total_bytes = sum(Path(path).stat().st_size for path in inputs)
        self._threshold = min(1.0, max_bytes / max(total_bytes, 1)) * 2**32
        self._inputs, self._text_key = inputs, text_key
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
        for item in read_items(self._inputs, text_key=self._text_key):
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
    """Ends the lines at an error and stores it: an exception must not cross sentencepiece's C++ frames."""
    try:
        yield from lines
    except Exception as error:
        failure.append(error)


def _training_refused(message: str, vocab_size: int) -> DataError:
    if found := re.search(r"too high .*<= (\d+)", message):
        error = _TooMany(
            f"--vocab-size: {vocab_size} is more than this text gives; choose at most {found[1]}, or add text"
        )
        error.most = int(found[1])
        return error
    if found := re.search(r"required_chars\. \d+ vs (\d+)", message):
        return DataError(
            f"--vocab-size: {vocab_size} is too small for bytes, characters and special symbols; "
            f"choose at least {found[1]}"
        )
    if "sentences_.empty()" in message:
        return DataError("--input: no text to train a tokenizer on")
    return DataError(f"--vocab-size: {vocab_size}: sentencepiece cannot train: {message}")


def _write_atomically(path: Path, content: bytes) -> None:
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


# --- encoding and decoding -------------------------------------------------------------------------------


Special = bool | frozenset[str]
"""Which special strings in a text become their ids: none, all, or those named."""


class Backend(Protocol):
    """A format of tokenizers; `specials` are the special strings that `encode` can turn into ids."""

    vocab_size: int
    eod_id: int | None
    specials: Mapping[str, int]
    has_settings: bool
    """Whether the files beside it hold for it."""

    def prefix_ids(self, settings: TokenizerSettings) -> list[int]: ...

    def piece_id(self, piece: str) -> int | None: ...

    def piece(self, number: int) -> str: ...

    def encode(self, text: str, special: Special) -> list[int]: ...

    def decode(self, ids: list[int], special: bool) -> str: ...


class Tokenizer:
    """A sentencepiece model, or a Hugging Face `tokenizer.json`.

    `path` is its file, `digest` the sha256 of the file's bytes, `vocab_size` the largest id plus one,
    `specials` the special strings, such as `<sep>`, and their ids. `eod_id` ends a document, each of
    `stop_ids` a generated text; `prefix_ids` stand before a text, as Llama's <|begin_of_text|>.
    """

    def __init__(self, backend: Backend, path: Path, digest: str, settings: TokenizerSettings) -> None:
        self._backend, self.path, self.digest, self.settings = backend, path, digest, settings
        self.vocab_size = backend.vocab_size
        self.specials = backend.specials
        eos_id = self.role_id("eos_token")
        self.eod_id = self._end_of_document(eos_id if backend.eod_id is None else backend.eod_id)
        self.stop_ids = settings.stop_ids | {self.eod_id if eos_id is None else eos_id, self.eod_id}
        self.prefix_ids = backend.prefix_ids(settings)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Loads a file, a folder's `tokenizer.model`, else its `tokenizer.json`, or that of a checkpoint.

        Raises DataError when there is none, when it is incomplete or in another format, when no piece can end
        a document, or when a `tokenizer.json` is given and the package `tokenizers` is not installed.
        """
        file = _file_of(Path(path))
        advice = "make one with: yuan-train tokenizer --input TEXT --vocab-size N --out DIR"
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(
                f"{file}: no tokenizer: cannot read it: {error.strerror or error}; {advice}"
            ) from error
        opened = HuggingFaceBackend.open if file.suffix == ".json" else SentencePieceBackend.open
        backend = opened(file, content, advice)
        settings = read_settings(file.parent) if backend.has_settings else TokenizerSettings()
        return cls(backend, file, hashlib.sha256(content).hexdigest(), settings)

    def role_id(self, role: str) -> int | None:
        """The id of the special token that `tokenizer_config.json` names for a role such as `bos_token`."""
        piece = self.settings.special_tokens.get(role)
        return None if piece is None else self.piece_id(piece)

    def piece_id(self, piece: str) -> int | None:
        """The id of a piece such as `<sep>`; None if there is no such piece."""
        return self._backend.piece_id(piece)

    def encode(self, text: str, *, special: Special = False) -> list[int]:
        """Token ids of the text; nothing is added at its ends, `prefix_ids` neither.

        With `special`, strings such as `<sep>` in the text become their ids (all of them, or those named),
        and the text between two of them is encoded as a separate string, as in the published Yuan tokenizer.
        Without it, special strings are encoded as text. Raises DataError for what UTF-8 cannot hold.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            shown = repr(text[max(error.start - 20, 0) : error.start + 20])
            raise DataError(f"{shown} holds half a surrogate pair, which is no text") from None
        return self._backend.encode(text, special)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of token ids; special tokens are left out unless `special`.

        Raises DataError for ids beyond the vocabulary.
        """
        numbers = [int(number) for number in ids]
        beyond = [number for number in numbers if not 0 <= number < self.vocab_size]
        if beyond:
            raise DataError(
                f"{self.path}: token id {beyond[0]} is beyond the vocabulary of {self.vocab_size}; "
                "use the tokenizer that the tokens were made with"
            )
        return self._backend.decode(numbers, special)

    def piece_bytes(self, number: int) -> bytes | None:
        """The bytes of a piece that is no text by itself, such as a part of a character; None of a piece that
        does not stand for bytes."""
        piece = self._backend.piece(number)
        if found := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(found[1])
        return bytes(map(_BYTES.__getitem__, piece)) if _BYTES.keys() >= set(piece) else None

    def _end_of_document(self, number: int | None) -> int:
        if number is None:
            raise DataError(
                f"{self.path}: has neither {END_OF_DOCUMENT} nor an end-of-sentence piece, so nothing can "
                "end a document; train a tokenizer of your own"
            )
        return number


_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + n): byte for n, byte in enumerate(_HIDDEN)}
"""By the letter that stands for it in pieces of bytes, as GPT-2's code has them (`bytes_to_unicode`)."""


def _file_of(path: Path) -> Path:
    """The tokenizer's file in a folder; of a checkpoint, or a directory of them, its own."""
    if not path.is_dir():
        return path
    folders = [path, path / "tokenizer", *(step / "tokenizer" for step in newest_steps(path))]
    names = (MODEL_NAME, HUGGING_FACE_NAME)
    files = (folder / name for folder in folders for name in names)
    return next((file for file in files if file.is_file()), path / MODEL_NAME)


class SentencePieceBackend:
    """A sentencepiece model: one of our own, Yuan's, or another.

    Our own hold `<eod>`, `<sep>`, ... as control symbols, to which no text is encoded. Yuan's holds some of
    its special strings as ordinary pieces and five not at all: those have the ids right after the last piece,
    in the order of `YUAN_SPECIALS` (IEIT-Yuan/Yuan-2.0:megatron/tokenizer/tokenizer.py:44-46).
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor
        size = processor.get_piece_size()
        self._is_yuan = all(self._is_ordinary(piece) for piece in (END_OF_DOCUMENT, "<sep>", "<pad>"))
        # The published code passes other settings than the file beside its model says.
        self.has_settings = not self._is_yuan
        self.specials: Mapping[str, int] = self._find_specials(size)
        self._texts = {number: piece for piece, number in self.specials.items()}
        self.vocab_size = max(size, 1 + max(self.specials.values(), default=0))
        self.eod_id = self._end_of_document()

    @classmethod
    def open(cls, file: Path, content: bytes, advice: str) -> SentencePieceBackend:
        """Parse the model. Raises DataError, with `advice`, for content in another format."""
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(content)
            if not processor.get_piece_size():  # an empty file loads without complaint
                raise RuntimeError("no pieces")
        except RuntimeError as error:
            raise DataError(f"{file}: not a sentencepiece model, or a torn one; {advice}") from error
        return cls(processor)

    def prefix_ids(self, settings: TokenizerSettings) -> list[int]:
        return [self._processor.bos_id()] if settings.add_bos_token and self._processor.bos_id() >= 0 else []

    def piece_id(self, piece: str) -> int | None:
        if piece in self.specials:
            return self.specials[piece]
        number = self._processor.piece_to_id(piece)
        return number if self._processor.id_to_piece(number) == piece else None

    def piece(self, number: int) -> str:
        return self._texts.get(number) or self._processor.id_to_piece(number)

    def encode(self, text: str, special: Special) -> list[int]:
        recognised = frozenset(self.specials) & special if isinstance(special, frozenset) else self.specials
        if not special or not recognised:
            return self._processor.encode(text)
        ids: list[int] = []
        for number, part in enumerate(_splitter(frozenset(recognised)).split(text)):
            if number % 2:
                ids.append(self.specials[part])
            elif part:  # each gets its own dummy prefix
                ids += self._processor.encode(part)
        return ids

    def decode(self, ids: list[int], special: bool) -> str:
        if not self._is_yuan and not special:
            return self._processor.decode(ids)
        parts, first = [], 0
        for index, number in enumerate(ids):
            if number in self._texts:
                parts.append(self._processor.decode(ids[first:index]))
                parts.append(self._texts[number] if special else "")
                first = index + 1
        return "".join([*parts, self._processor.decode(ids[first:])])

    def _is_ordinary(self, piece: str) -> bool:
        number = self._processor.piece_to_id(piece)
        known = self._processor.id_to_piece(number) == piece
        return known and not self._processor.is_control(number) and not self._processor.is_unknown(number)

    def _find_specials(self, size: int) -> dict[str, int]:
        found: dict[str, int] = {}
        for piece in YUAN_SPECIALS if self._is_yuan else CONTROL_SYMBOLS:
            number = self._processor.piece_to_id(piece)
            if self._processor.id_to_piece(number) == piece:
                found[piece] = number
            elif self._is_yuan:
                found[piece] = size
                size += 1
        if self._is_yuan:
            # Registered by the published tokenizer too, as its own control pieces; `</s>` is not.
            found |= {piece: self._processor.piece_to_id(piece) for piece in ("<s>", "<unk>")}
        return found

    def _end_of_document(self) -> int | None:
        number = self._processor.piece_to_id(END_OF_DOCUMENT)
        if self._processor.id_to_piece(number) == END_OF_DOCUMENT:
            return number
        # Without <eod>, the end-of-sentence symbol ends documents.
        return self._processor.eos_id() if self._processor.eos_id() >= 0 else None


@functools.lru_cache(maxsize=8)
def _splitter(words: frozenset[str]) -> re.Pattern[str]:
    """Pattern whose `split` cuts a text at the words and keeps them: every second part is a word."""
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


ENDS = (END_OF_DOCUMENT, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Pieces that end documents in pre-training, in the order in which they are looked for."""

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """What `tokenizer_config.json`, `generation_config.json` and `chat_template.jinja` say of a tokenizer."""

    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    """By role: `bos_token`, `eos_token`, `pad_token`, ..."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a generated text."""
    add_bos_token: bool = False
    """A sentencepiece model puts `bos_token` before a text; a tokenizer.json says that itself."""
    chat_template: str | None = None


def read_settings(folder: Path) -> TokenizerSettings:
    """The settings in a tokenizer's folder; files may be absent. Raises DataError for malformed ones."""
    config = _read_object(folder / TOKENIZER_CONFIG)
    generation = _read_object(folder / GENERATION_CONFIG)
    ends = generation.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if wrong := [end for end in ends if not isinstance(end, int) or isinstance(end, bool) or end < 0]:
        raise DataError(f"{folder / GENERATION_CONFIG}: eos_token_id {wrong[0]!r}; wanted token ids")
    return TokenizerSettings(
        special_tokens={
            role: text for role in sorted(config) if role.endswith("_token") and (text := _text(config[role]))
        },
        stop_ids=frozenset(ends),
        add_bos_token=config.get("add_bos_token") is True,
        chat_template=_chat_template(folder, config),
    )


def _text(token: Any) -> str | None:
    """A special token: a string, or an object with its `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template in its own file, else in the config: a string, or a list of which one is `default`."""
    file = folder / CHAT_TEMPLATE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: cannot be read: {error}") from None
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: holds {type(value).__name__}; wanted a JSON object")
    return value


class HuggingFaceBackend:
    """A `tokenizer.json`, read by the package `tokenizers`."""

    has_settings = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.specials: Mapping[str, int] = {
            token.content: number for number, token in added.items() if token.special
        }
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.eod_id = next((self.piece_id(piece) for piece in ENDS if self.piece_id(piece) is not None), None)

    @classmethod
    def open(cls, file: Path, content: bytes, advice: str) -> HuggingFaceBackend:
        """Parse the file. Raises DataError for content in another format."""
        import tokenizers

        try:
            return cls(tokenizers.Tokenizer.from_str(content.decode("utf-8")))
        except Exception as error:  # tokenizers raises bare Exceptions for what it cannot read
            raise DataError(f"{file}: not a tokenizer.json, or a torn one: {error}; {advice}") from None

    def prefix_ids(self, settings: TokenizerSettings) -> list[int]:
        """What the file's post-processor puts before a text, such as Llama's <|begin_of_text|>."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[: next(starts, 0)]

    def piece_id(self, piece: str) -> int | None:
        return self._tokenizer.token_to_id(piece)

    def piece(self, number: int) -> str:
        return self._tokenizer.id_to_token(number) or ""

    def encode(self, text: str, special: bool | frozenset[str]) -> list[int]:
        self._tokenizer.encode_special_tokens = not special
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], special: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=not special)


Message = Mapping[str, str]
"""`role` (system, user, assistant) and `content`."""


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], where: str = "", *, add_generation_prompt: bool = True
) -> str:
    """The text of a chat; special tokens are written out in it. By default up to where the model answers.

    Raises DataError without a template, and, naming `where`, for one that cannot be rendered with them.
    """
    template = tokenizer.settings.chat_template
    if template is None:
        raise DataError(
            f"{tokenizer.path.parent}: no chat template: wanted chat_template.jinja, or chat_template in "
            "tokenizer_config.json; give the prompt as the model knows it, with --special"
        )
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **tokenizer.settings.special_tokens,
        )
    except Exception as error:  # a template can raise anything: TypeError, RecursionError, ...
        folder = f"{where}: {tokenizer.path.parent}" if where else f"{tokenizer.path.parent}"
        raise DataError(
            f"{folder}: the chat template cannot be rendered: {type(error).__name__}: {error}"
        ) from None


def continue_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """What a template writes behind an answer's text up to where the next one begins: the end of the answer,
    the messages, and what opens an answer. Raises DataError, as `render_chat` does."""
    mark = "an answer that is nowhere else"
    before = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": mark}]
    _, found, behind = render_chat(tokenizer, [*before, *messages]).rpartition(mark)
    if not found:
        raise DataError(
            f"{tokenizer.path.parent}: the chat template leaves answers out that have others behind them, so "
            "an environment's messages cannot be added to one"
        )
    return behind


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def check_messages(value: Any, where: str) -> None:
    """Raise DataError unless `value` is a list of messages with an answer in it."""
    wanted = 'wanted [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    _check_form(value, where, wanted)
    if not any(message["role"] == "assistant" for message in value):
        raise DataError(f"{where}: no message of the assistant, so nothing to learn; {wanted}")


def check_question(value: Any, where: str) -> None:
    """Raise DataError unless `value` is a list of messages that a model is to answer."""
    wanted = 'wanted [..., {"role": "user", "content": "..."}]'
    _check_form(value, where, wanted)
    if not value or value[-1]["role"] == "assistant":
        last = "the last message is the assistant's" if value else "no messages"
        raise DataError(f"{where}: {last}, so there is nothing to answer; {wanted}")


def _check_form(value: Any, where: str, wanted: str) -> None:
    if not are_messages(value):
        raise DataError(f"{where}: not a list of messages; {wanted}")


def are_messages(value: Any) -> TypeGuard[list[dict[str, str]]]:
    """Whether it is a list of messages, each with a role and its content."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content"))
        for one in value
    )


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], where: str
) -> tuple[list[int], list[bool]]:
    """Tokens of a chat, and for each whether it is part of an answer: what the assistant would generate.

    Each answer is encoded by itself, after the tokens of its prompt: the tokens that generation meets. It
    ends with the first token that ends a generated text, that one included; if the template writes none, with
    the end-of-document token after the chat. Raises DataError, naming `where`, if the template writes an
    answer otherwise than the prompt and its continuation, or another end of a document inside the chat.
    """
    tokens: list[int] = []
    is_answer: list[bool] = []
    for text, answered in _segments(tokenizer, messages, where):
        ids = tokenizer.encode(text, special=True)
        stops = (i + 1 for i, token in enumerate(ids) if token in tokenizer.stop_ids)
        end = next(stops, len(ids)) if answered else 0
        tokens += ids
        is_answer += [i < end for i in range(len(ids))]
    if not tokens or tokens[-1] != tokenizer.eod_id:
        is_open = bool(tokens) and is_answer[-1] and tokens[-1] not in tokenizer.stop_ids
        tokens.append(tokenizer.eod_id)
        is_answer.append(is_open)
    if tokenizer.eod_id in tokens[:-1]:
        raise DataError(
            f"{where}: the chat gives the end-of-document id {tokenizer.eod_id} before its end; train on "
            "chats of one answer, or with a template whose turns end in another token"
        )
    return tokens, is_answer


def _segments(tokenizer: Tokenizer, messages: Sequence[Message], where: str) -> Iterator[tuple[str, bool]]:
    """The text of a chat in pieces, and whether each is an answer."""
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render_chat(tokenizer, messages[:number], where)
        whole = render_chat(tokenizer, messages[: number + 1], where, add_generation_prompt=False)
        if not prompt.startswith(done) or not whole.startswith(prompt):
            raise DataError(
                f"{where}: with message {number + 1} the chat template writes what came before it otherwise, "
                "so the answers' tokens cannot be told; give each answer a line of its own"
            )
        yield prompt[len(done) :], False
        yield whole[len(prompt) :], True
        done = whole
    whole = render_chat(tokenizer, messages, where, add_generation_prompt=False)
    if whole.startswith(done):
        yield whole[len(done) :], False


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As the filter of transformers; Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
