"""Text to token files: documents are encoded by worker processes and written in the order of the input.

Every document ends in the end-of-document id exactly once, and begins with what the tokenizer puts before a
text (Llama's <|begin_of_text|>; nothing in most tokenizers). The bytes depend on the inputs and the tokenizer
alone, not on the number of workers. Memory is bounded: a few chunks of text per worker are in flight at any
time. It stands alone because its worker processes import it, and need no command.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from yuan_train.config.errors import DataError
from yuan_train.data.indexed import IndexedWriter, answers_prefix, bin_path, token_dtype
from yuan_train.data.text import Convention, Item, check_inputs, decode_item, decode_messages, read_items
from yuan_train.data.tokenizer import Tokenizer, check_messages, encode_chat

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
