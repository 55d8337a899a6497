"""Token files: Megatron's `PREFIX.bin` (concatenated token ids) and `PREFIX.idx` (where documents start).

Bytes of `.idx`, little-endian: magic, u64 version, u8 type code, u64 N sequences, u64 D document entries,
then int32 lengths [N] in tokens, int64 byte offsets [N] into `.bin`, int64 documents [D] (first 0, last N).
The arrays start at byte 34, so they are unaligned. The writer makes one sequence per document.

`preprocess` makes them of text: documents are encoded by worker processes and written in the order of the
input. Every document ends in the end-of-document id exactly once, and begins with what the tokenizer puts
before a text (Llama's <|begin_of_text|>; nothing in most tokenizers). The bytes depend on the inputs and the
tokenizer alone, not on the number of workers. Memory is bounded: a few chunks of text per worker are in
flight at any time.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from shlex import quote
from typing import BinaryIO

import numpy as np

from yuan_train.config.errors import DataError
from yuan_train.data.text import Convention, Item, check_inputs, decode_item, decode_messages, read_items
from yuan_train.data.tokenizer import Tokenizer, check_messages, encode_chat

logger = logging.getLogger(__name__)

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TYPE_CODES = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
FLOAT_TYPE_CODES = (6, 7)
SMALL_VOCABULARY = 65_500  # Megatron's threshold, not 65,536: the same vocabulary must give the same bytes.
CHUNK_ENTRIES = 1 << 20  # index entries processed at a time, to bound the memory of checks


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype in which Megatron stores ids of this vocabulary: uint16 below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < SMALL_VOCABULARY else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    """`PREFIX.bin`. A prefix may contain dots, so no suffix is replaced."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """`PREFIX.idx`."""
    return Path(f"{prefix}.idx")


def answers_prefix(prefix: str | Path) -> str:
    """Of the files beside a corpus that say which of its tokens are part of an answer."""
    return f"{prefix}.answers"


class IndexedWriter:
    """Writes documents to `PREFIX.bin.tmp` and `PREFIX.idx.tmp`; renames both when they are complete.

    Use as a context manager: leaving it normally commits, leaving it by an exception removes the temporaries
    and keeps an older pair. Memory is 4 bytes per document.

    Raises DataError when the prefix names no file, when a file cannot be written, or when nothing was added.
    """

    def __init__(self, prefix: str | Path, *, dtype: np.dtype) -> None:
        if str(prefix).endswith(("/", os.sep)) or not Path(prefix).name:
            raise DataError(
                f"{prefix}: is a folder; wanted a prefix of files such as {Path(prefix) / 'corpus'}"
            )
        if Path(prefix).suffix in (".bin", ".idx"):
            raise DataError(f"{prefix}: wanted the prefix alone, {Path(prefix).with_suffix('')}")
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self.num_tokens = 0
        self._lengths = array("i")
        self._bin_tmp = Path(f"{prefix}.bin.tmp")
        self._idx_tmp = Path(f"{prefix}.idx.tmp")
        try:
            self._bin_tmp.parent.mkdir(parents=True, exist_ok=True)
            self._bin: BinaryIO = self._bin_tmp.open("wb")
        except OSError as error:
            raise self._cannot_write(error) from error

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def add(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Appends one document of token ids [T]."""
        self.add_many(np.asarray(tokens, dtype=self.dtype), [len(tokens)])

    def add_many(self, tokens: np.ndarray, lengths: Sequence[int]) -> None:
        """Appends documents that are concatenated in `tokens` [sum of lengths], of the writer's dtype."""
        assert tokens.dtype == self.dtype and tokens.ndim == 1 and len(tokens) == sum(lengths)
        try:
            self._bin.write(tokens.tobytes())
        except OSError as error:
            raise self._cannot_write(error) from error
        self._lengths.extend(lengths)
        self.num_tokens += len(tokens)

    def commit(self) -> None:
        """Completes both files and renames them, `.idx` last, so that an index implies a complete pair.

        Raises DataError if nothing was added, or if a file cannot be written.
        """
        try:
            if not self._lengths:
                raise DataError(f"{self.prefix}: no documents to write; the input held no text")
            self._finish()
        except OSError as error:
            self.discard()
            raise self._cannot_write(error) from error
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Removes the temporaries."""
        # On a full disk closing fails too, because it flushes; the file is removed all the same.
        with contextlib.suppress(OSError):
            self._bin.close()
        self._bin_tmp.unlink(missing_ok=True)
        self._idx_tmp.unlink(missing_ok=True)

    def _finish(self) -> None:
        _sync_and_close(self._bin)
        with self._idx_tmp.open("wb") as idx:
            idx.writelines(_index_bytes(self._lengths, self.dtype))
            _sync_and_close(idx)
        # An older index must not outlive its .bin: between the two renames there is no index at all.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._bin_tmp, bin_path(self.prefix))
        os.replace(self._idx_tmp, idx_path(self.prefix))
        _sync_folder(self._bin_tmp.parent)

    def _cannot_write(self, error: OSError) -> DataError:
        return DataError(
            f"{self.prefix}: cannot write the token files: {error.strerror or error}; "
            "free the space or choose another --out"
        )


def _index_bytes(lengths: array, dtype: np.dtype) -> Iterator[bytes]:
    """The content of `.idx` for one sequence per document, in pieces."""
    num_sequences = len(lengths)
    type_code = next(code for code, known in TYPE_CODES.items() if known == dtype)
    yield HEADER.pack(MAGIC, VERSION, type_code, num_sequences, num_sequences + 1)
    all_lengths = np.frombuffer(lengths, dtype=np.intc)
    for first in range(0, num_sequences, CHUNK_ENTRIES):
        yield all_lengths[first : first + CHUNK_ENTRIES].astype("<i4").tobytes()
    offset_bytes = 0
    for first in range(0, num_sequences, CHUNK_ENTRIES):
        ends = offset_bytes + np.cumsum(
            all_lengths[first : first + CHUNK_ENTRIES].astype(np.int64) * dtype.itemsize
        )
        yield np.concatenate(([offset_bytes], ends[:-1])).astype("<i8").tobytes()
        offset_bytes = int(ends[-1])
    for first in range(0, num_sequences + 1, CHUNK_ENTRIES):
        yield np.arange(first, min(first + CHUNK_ENTRIES, num_sequences + 1), dtype="<i8").tobytes()


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_folder(folder: Path) -> None:
    """Makes the renames durable, on file systems that can sync a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class IndexedFacts:
    """Summary of a pair of token files; lengths are in tokens."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    shortest_document: int
    longest_document: int
    bin_bytes: int
    idx_bytes: int
    note: str | None


class IndexedDataset:
    """The documents of `PREFIX.bin` and `PREFIX.idx`, memory-mapped and checked on opening.

    `prefix` may also be the path of either file. `note` holds one sentence when the index deviates from
    Megatron's format in a way that is safe to read. Checking reads all of the index: `num_tokens`, if another
    process of the node has found it, says that the index is sound.

    Raises DataError for files that are missing, incomplete or in another format.
    """

    def __init__(self, prefix: str | Path, *, num_tokens: int | None = None) -> None:
        self.prefix = strip_suffix(prefix)
        self.note: str | None = None
        missing = [path for path in (bin_path(self.prefix), idx_path(self.prefix)) if not path.is_file()]
        if missing:
            names = " and ".join(map(str, missing))
            raise DataError(f"{self.prefix}: no {names}; {_what_to_do(self.prefix)}")
        self._idx_bytes = idx_path(self.prefix).stat().st_size
        self._bin_bytes = bin_path(self.prefix).stat().st_size
        self.dtype, self.num_sequences, num_entries = self._read_header()
        self._check_idx_size(num_entries)
        index = np.memmap(idx_path(self.prefix), dtype=np.uint8, mode="r")
        bounds = HEADER.size + np.cumsum([0, 4 * self.num_sequences, 8 * self.num_sequences, 8 * num_entries])
        self._lengths = index[bounds[0] : bounds[1]].view("<i4")
        self._offsets = index[bounds[1] : bounds[2]].view("<i8")
        documents = index[bounds[2] : bounds[3]].view("<i8")
        self._documents = None if self._is_index_empty(documents) else documents
        self.num_tokens = self._check_sequences() if num_tokens is None else num_tokens
        if num_tokens is None and self._documents is not None:
            self._check_documents(documents)
        self._tokens: np.ndarray = (
            np.memmap(bin_path(self.prefix), dtype=self.dtype, mode="r")
            if self.num_tokens
            else np.zeros(0, dtype=self.dtype)
        )

    @property
    def num_documents(self) -> int:
        """Number of documents: D - 1, or N where Yuan's own preprocessing left the document index empty."""
        return self.num_sequences if self._documents is None else len(self._documents) - 1

    def __len__(self) -> int:
        return self.num_documents

    def document_starts(self, documents: np.ndarray | None = None) -> np.ndarray:
        """First token of each document (of all of them without `documents`), int64 [D]."""
        documents = np.arange(self.num_documents) if documents is None else documents
        return self._sequence_starts(documents if self._documents is None else self._documents[documents])

    def document_lengths(self, documents: np.ndarray | None = None) -> np.ndarray:
        """Tokens of each document (of all of them without `documents`), int64 [D]."""
        if self._documents is None or len(self._documents) == self.num_sequences + 1:
            return (self._lengths if documents is None else self._lengths[documents]).astype(np.int64)
        documents = np.arange(self.num_documents) if documents is None else documents
        next_starts = self._sequence_starts(self._documents[documents.astype(np.int64) + 1])
        return next_starts - self.document_starts(documents)

    def document(self, number: int) -> np.ndarray:
        """Token ids [T] of one document, a view of the file. Raises IndexError beyond the last document."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        first = int(self.document_starts(np.array([number]))[0])
        last = self.num_tokens
        if number + 1 < self.num_documents:
            last = int(self.document_starts(np.array([number + 1]))[0])
        return self._tokens[first:last]

    def tokens(self, first: int, last: int) -> np.ndarray:
        """Token ids [first, last) of the file, a view."""
        return self._tokens[first:last]

    def sequence_lengths(self) -> np.ndarray:
        """Tokens of each sequence as stored, int32 [N], a view of the file."""
        return self._lengths

    def facts(self) -> IndexedFacts:
        """Summary of the files, for `inspect`."""
        lengths = self.document_lengths()
        return IndexedFacts(
            prefix=self.prefix,
            documents=self.num_documents,
            sequences=self.num_sequences,
            tokens=self.num_tokens,
            dtype=self.dtype.name,
            shortest_document=int(lengths.min()),
            longest_document=int(lengths.max()),
            bin_bytes=self._bin_bytes,
            idx_bytes=self._idx_bytes,
            note=self.note,
        )

    def _sequence_starts(self, sequences: np.ndarray) -> np.ndarray:
        """First token of sequences, int64. Sequence N is the end: an empty last document may start there."""
        starts = self._offsets[np.minimum(sequences, self.num_sequences - 1)] // self.dtype.itemsize
        return np.where(sequences == self.num_sequences, self.num_tokens, starts)

    def _read_header(self) -> tuple[np.dtype, int, int]:
        path = idx_path(self.prefix)
        with path.open("rb") as file:
            header = file.read(HEADER.size)
        if header.startswith(OLD_MAGIC):
            raise DataError(
                f"{path}: foreign magic: this is the older TNTIDX format, which cannot be memory-mapped; "
                "preprocess the text again"
            )
        if not header.startswith(MAGIC[: len(header)]):
            raise DataError(f"{path}: foreign magic {header[:9]!r}; wanted {MAGIC!r} of a Megatron .idx file")
        if len(header) < HEADER.size:
            raise DataError(
                f"{path}: {len(header)} bytes, shorter than the header of {HEADER.size}; preprocess again"
            )
        _, version, type_code, num_sequences, num_entries = HEADER.unpack(header)
        if version != VERSION:
            raise DataError(
                f"{path}: version {version}; wanted {VERSION}; write it with a current preprocess"
            )
        if type_code in FLOAT_TYPE_CODES:
            raise DataError(f"{path}: type code {type_code} holds floating-point numbers; wanted token ids")
        if type_code not in TYPE_CODES:
            raise DataError(f"{path}: unknown type code {type_code}; wanted one of {sorted(TYPE_CODES)}")
        if not num_sequences:
            raise DataError(f"{path}: holds no sequences; preprocess text that is not empty")
        return TYPE_CODES[type_code], num_sequences, num_entries

    def _check_idx_size(self, num_entries: int) -> None:
        path = idx_path(self.prefix)
        wanted = HEADER.size + 12 * self.num_sequences + 8 * num_entries
        if self._idx_bytes == wanted + self.num_sequences:
            raise DataError(f"{path}: holds modes of multimodal sequences; wanted text alone")
        if self._idx_bytes != wanted:
            state = "torn" if self._idx_bytes < wanted else "too long"
            raise DataError(
                f"{path}: {state}: {self._idx_bytes} bytes, wanted {wanted} for {self.num_sequences} "
                f"sequences and {num_entries} document entries; copy or preprocess it again"
            )

    def _check_sequences(self) -> int:
        """Check lengths, offsets and the size of `.bin`; return the number of tokens."""
        path = idx_path(self.prefix)
        end_bytes = 0
        for first in range(0, self.num_sequences, CHUNK_ENTRIES):
            lengths = self._lengths[first : first + CHUNK_ENTRIES].astype(np.int64)
            if lengths.min() < 0:
                bad = first + int(np.argmin(lengths))
                raise DataError(f"{path}: sequence {bad} has length {lengths.min()}; preprocess again")
            ends = end_bytes + np.cumsum(lengths * self.dtype.itemsize)
            starts = ends - lengths * self.dtype.itemsize
            differs = self._offsets[first : first + CHUNK_ENTRIES] != starts
            if differs.any():
                bad = int(np.argmax(differs))
                raise DataError(
                    f"{path}: offsets must increase by the lengths: sequence {first + bad} starts at byte "
                    f"{self._offsets[first + bad]}, wanted {starts[bad]}; preprocess again"
                )
            end_bytes = int(ends[-1])
        if self._bin_bytes != end_bytes:
            state = "truncated" if self._bin_bytes < end_bytes else "too long"
            raise DataError(
                f"{bin_path(self.prefix)}: {state}: {self._bin_bytes} bytes, wanted {end_bytes} by the "
                f"lengths in {path.name}; copy or preprocess it again"
            )
        return end_bytes // self.dtype.itemsize

    def _is_index_empty(self, documents: np.ndarray) -> bool:
        """Whether the document index is empty, as Yuan's own: then each sequence is a document."""
        if len(documents) != 1 or documents[0] != 0:
            return False
        self.note = "empty document index, as Yuan's own preprocessing writes it: each sequence is a document"
        logger.info("%s: %s", idx_path(self.prefix), self.note)
        return True

    def _check_documents(self, documents: np.ndarray) -> None:
        path = idx_path(self.prefix)
        if len(documents) < 2 or documents[0] != 0:
            first = documents[0] if len(documents) else "nothing"
            raise DataError(
                f"{path}: the document index starts with {first}, wanted 0 and an end; preprocess again"
            )
        if documents[-1] != self.num_sequences:
            raise DataError(
                f"{path}: the last document entry is {documents[-1]}, wanted the number of sequences "
                f"{self.num_sequences}; preprocess again"
            )
        for first in range(0, len(documents), CHUNK_ENTRIES):
            # One entry more than the chunk, to check the step between chunks too.
            if (np.diff(documents[first : first + CHUNK_ENTRIES + 1]) < 0).any():
                raise DataError(f"{path}: document entries must increase; preprocess again")


def strip_suffix(prefix: str | Path) -> str:
    """The prefix of a corpus, of which either file may be named."""
    text = str(prefix)
    named_a_file = text.endswith((".idx", ".bin")) and not idx_path(text).exists()
    return text[: -len(".idx")] if named_a_file else text


def _what_to_do(prefix: str) -> str:
    advice = f"make them with: yuan-train preprocess --input TEXT --tokenizer DIR --out {quote(prefix)}"
    if Path(f"{prefix}.bin.tmp").exists():
        return f"an interrupted preprocess left {prefix}.bin.tmp; {advice}"
    folder, name = Path(prefix).parent, Path(prefix).name
    if not folder.is_dir():
        return f"there is no folder {folder}; {advice}"
    others = sorted(path.stem for path in folder.glob("*.idx") if path.stem.startswith(name))
    if others:
        return f"did you mean {folder / others[0]}? Otherwise {advice}"
    return advice


# --- made of text -------------------------------------------------------------------------------------------


CHUNK_BYTES = 1 << 20  # of text per task of a worker: some tenths of a second of work
CHUNK_ITEMS = 4_096
CHUNKS_PER_WORKER = 3  # in flight: one being encoded, one waiting, one being written


@dataclass(frozen=True)
class Preprocessed:
    """What was written, and what was skipped."""

    prefix: str
    documents: int
    tokens: int
    empty: int
    undecodable: tuple[str, ...]
    vocab_size: int
    dtype: str
    bin_bytes: int
    answer_tokens: int | None = None
    """Of chats: tokens that are part of an answer."""


@dataclass(frozen=True)
class CorpusCounts:
    """Counts so far."""

    documents: int
    tokens: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class DocumentFormat:
    """How input files hold documents; see `preprocess`."""

    text_key: str = "text"
    convention: Convention = "plain"
    messages_key: str | None = None


@dataclass(frozen=True)
class _Encoder:
    """What a worker needs, in a form that can be pickled."""

    tokenizer: str
    digest: str
    form: DocumentFormat


@dataclass(frozen=True)
class _Encoded:
    """The documents of one chunk, concatenated."""

    tokens: np.ndarray
    answers: np.ndarray
    """uint8, 1 for each token that is part of an answer; of chats alone."""
    lengths: list[int]
    text_bytes: int
    empty: int
    undecodable: list[str]


def preprocess(
    inputs: Sequence[str | Path],
    tokenizer: str | Path,
    prefix: str | Path,
    form: DocumentFormat = DocumentFormat(),
    *,
    workers: int = 1,
    report: Callable[[CorpusCounts], None] | None = None,
) -> Preprocessed:
    """Encodes the documents of `inputs` to `PREFIX.bin` and `PREFIX.idx`.

    A `.jsonl` or `.parquet` file holds one document per line or row, under the form's `text_key`; any other
    file is one document, or under the convention `yuan` one sample per line (`text.yuan_text`), in which
    `<sep>` and the other special strings become their ids. Otherwise special strings are encoded as text.
    Blank documents and files that are not UTF-8 are skipped and counted. `report` is called after each chunk.

    With a `messages_key`, each line of a `.jsonl` file is a chat: a list of messages under it, which the
    tokenizer's chat template renders. Then `PREFIX.answers.bin` and `.idx` say which tokens are part of an
    answer, for `data.loss_on_answers`.

    Raises DataError for unreadable inputs, a malformed line (with file:line), a missing tokenizer, a worker
    that died, and when no document is left; then nothing is written and older files are kept.
    """
    if workers < 1:
        raise DataError(f"--workers: {workers}; wanted at least 1")
    check_inputs(inputs)
    loaded = Tokenizer.load(tokenizer)
    dtype = token_dtype(loaded.vocab_size)
    encoder = _Encoder(str(loaded.path), loaded.digest, form)
    items = read_items(inputs, text_key=form.text_key, convention=form.convention)
    empty, text_bytes, answer_tokens, undecodable = 0, 0, 0, list[str]()
    with ExitStack() as stack:
        writer = stack.enter_context(IndexedWriter(prefix, dtype=dtype))
        answers = None
        if form.messages_key is not None:
            # Committed before the tokens, which are of no use without them.
            answers = stack.enter_context(IndexedWriter(answers_prefix(prefix), dtype=np.dtype(np.uint8)))
        for encoded in _encode_in_order(encoder, _chunks(items), workers):
            writer.add_many(encoded.tokens, encoded.lengths)
            if answers is not None:
                answers.add_many(encoded.answers, encoded.lengths)
                answer_tokens += int(encoded.answers.sum())
            empty += encoded.empty
            text_bytes += encoded.text_bytes
            undecodable += encoded.undecodable
            if report:
                report(CorpusCounts(writer.num_documents, writer.num_tokens, text_bytes))
    return Preprocessed(
        prefix=str(prefix),
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        empty=empty,
        undecodable=tuple(undecodable),
        vocab_size=loaded.vocab_size,
        dtype=dtype.name,
        bin_bytes=bin_path(prefix).stat().st_size,
        answer_tokens=None if form.messages_key is None else answer_tokens,
    )


def _chunks(items: Iterable[Item]) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    size_bytes = 0
    for item in items:
        chunk.append(item)
        size_bytes += item.size_bytes
        if size_bytes >= CHUNK_BYTES or len(chunk) >= CHUNK_ITEMS:
            yield chunk
            chunk, size_bytes = [], 0
    if chunk:
        yield chunk


def _encode_in_order(encoder: _Encoder, chunks: Iterator[list[Item]], workers: int) -> Iterator[_Encoded]:
    if workers == 1:
        yield from (_encode_chunk(encoder, chunk) for chunk in chunks)
        return
    # spawn: a forked copy of a process with threads (sentencepiece, numpy) can hang. An executor rather than
    # a Pool: it raises when a worker is killed, where a Pool would hang.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        yield from _drain_in_order(pool, encoder, chunks, limit=CHUNKS_PER_WORKER * workers)
    except BrokenProcessPool as error:
        raise DataError(
            "a preprocessing worker died, most likely out of memory; nothing was written; "
            "use fewer --workers or split the largest documents"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _drain_in_order(
    pool: ProcessPoolExecutor, encoder: _Encoder, chunks: Iterator[list[Item]], *, limit: int
) -> Iterator[_Encoded]:
    """Results in the order of the chunks, with at most `limit` chunks in flight."""
    in_flight: deque[Future[_Encoded]] = deque()
    for chunk in chunks:
        in_flight.append(pool.submit(_encode_chunk, encoder, chunk))
        if len(in_flight) >= limit:
            yield in_flight.popleft().result()
    while in_flight:
        yield in_flight.popleft().result()


@functools.lru_cache(maxsize=1)
def _loaded(tokenizer: str, digest: str) -> Tokenizer:
    """The tokenizer, loaded once per worker; the digest distinguishes it from a retrained one."""
    loaded = Tokenizer.load(tokenizer)
    if loaded.digest != digest:
        raise DataError(f"{tokenizer}: changed during preprocessing; run preprocess again")
    return loaded


def _encode_chunk(encoder: _Encoder, chunk: list[Item]) -> _Encoded:
    tokenizer, form = _loaded(encoder.tokenizer, encoder.digest), encoder.form
    documents: list[np.ndarray] = []
    answers: list[np.ndarray] = []
    undecodable: list[str] = []
    empty, text_bytes = 0, 0
    for item in chunk:
        if form.messages_key is not None:
            chat = _encode_messages(tokenizer, item, form.messages_key)
            if chat is None:
                empty += 1
            else:
                documents.append(chat[0])
                answers.append(chat[1])
                text_bytes += item.size_bytes
            continue
        text = decode_item(item, text_key=form.text_key, convention=form.convention)
        if text is None:
            undecodable.append(item.path)
        elif not text.strip():
            empty += 1
        else:
            documents.append(_encode_document(tokenizer, text, item, form.convention))
            text_bytes += item.size_bytes
    dtype = token_dtype(tokenizer.vocab_size)
    return _Encoded(
        tokens=np.concatenate(documents) if documents else np.zeros(0, dtype=dtype),
        answers=np.concatenate(answers) if answers else np.zeros(0, dtype=np.uint8),
        lengths=[len(document) for document in documents],
        text_bytes=text_bytes,
        empty=empty,
        undecodable=undecodable,
    )


def _encode_messages(tokenizer: Tokenizer, item: Item, key: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The tokens of a chat, and which are part of an answer; None for a blank line."""
    messages = decode_messages(item, key=key)
    if messages is None:
        return None
    where = f"{item.path}:{item.line_number}"
    check_messages(messages, where)
    tokens, is_answer = encode_chat(tokenizer, messages, where)
    return _checked(tokenizer, tokens), np.array(is_answer, dtype=np.uint8)


def _encode_document(tokenizer: Tokenizer, text: str, item: Item, convention: Convention) -> np.ndarray:
    # `<s>` and `<unk>` are never part of a text, even where special strings are recognised.
    recognised = frozenset(tokenizer.specials) - {"<s>", "<unk>"}
    ids = tokenizer.encode(text, special=recognised) if convention == "yuan" else tokenizer.encode(text)
    # No text is encoded to a control symbol of our own models; another model may hold <eod> as an ordinary
    # piece.
    if tokenizer.eod_id in ids:
        where = f"{item.path}:{item.line_number}" if item.line_number else item.path
        raise DataError(
            f"{where}: the text itself gives the end-of-document id {tokenizer.eod_id}; escape that text"
        )
    return _checked(tokenizer, [*tokenizer.prefix_ids, *ids, tokenizer.eod_id])


def _checked(tokenizer: Tokenizer, ids: Sequence[int]) -> np.ndarray:
    tokens = np.array(ids, dtype=np.int64)
    if tokens.max() >= tokenizer.vocab_size:
        raise DataError(f"{tokenizer.path}: gives id {tokens.max()} beyond its {tokenizer.vocab_size} pieces")
    return tokens.astype(token_dtype(tokenizer.vocab_size))
