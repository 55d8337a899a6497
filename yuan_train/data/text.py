"""Reading of documents from files, and conventions for their text.

A `.jsonl` or `.parquet` file holds one document per line or row, any other file is one document. Under Yuan's
convention any other file holds one sample per line, with `<n>` for a newline and `[SEP]` between question and
answer.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from yuan_train.config.errors import DataError
from yuan_train.config.load import is_list

LINE_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
PARQUET_ROWS = 1_024  # read at once

Convention = Literal["plain", "yuan"]
NEWLINE, SEPARATOR, SEPARATOR_TEXT = "<n>", "<sep>", "[SEP]"
FILLER = "\N{LOWER THREE EIGHTHS BLOCK}"
END_OF_DOCUMENT = "<eod>"


@dataclass(frozen=True)
class Item:
    """One document, undecoded: a line or row of a file, or a whole file (`line_number` 0, read later)."""

    path: str
    line_number: int = 0
    line: bytes = b""
    form: Literal["json", "text"] = "json"
    """Whether the line is a JSON object or the text itself."""

    @property
    def size_bytes(self) -> int:
        """Bytes to decode."""
        return len(self.line) if self.line_number else Path(self.path).stat().st_size


def check_inputs(paths: Sequence[str | Path]) -> None:
    """Raises DataError unless every input is a file that can be read."""
    if not paths:
        raise DataError("--input: no files; name at least one text or .jsonl file")
    for path in map(Path, paths):
        if path.is_dir():
            raise DataError(f"{path}: is a folder; name its files, for instance {path}/*.txt")
        try:
            path.open("rb").close()
        except OSError as error:
            raise DataError(f"{path}: cannot read: {error.strerror or error}; check --input") from error


def read_items(
    paths: Sequence[str | Path], *, text_key: str = "text", convention: Convention = "plain"
) -> Iterator[Item]:
    """The documents of the files in order, undecoded. Raises DataError for an unreadable parquet file."""
    for path in map(Path, paths):
        if path.suffix == PARQUET_SUFFIX:
            yield from _read_parquet(path, text_key)
        elif path.suffix in LINE_SUFFIXES:
            yield from _read_lines(path, "json")
        elif convention == "yuan":
            yield from _read_lines(path, "text")
        else:
            yield Item(str(path))


def _read_lines(path: Path, form: Literal["json", "text"]) -> Iterator[Item]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            yield Item(str(path), number, line, form)


def _read_parquet(path: Path, text_key: str) -> Iterator[Item]:
    """The rows of one column, read in batches; texts are passed on as bytes, as lines are."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(
            f"{path}: reading it needs the package pyarrow: pip install -e '.[parquet]' in the checkout"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_key not in columns:
                keys = ", ".join(map(repr, columns[:8])) or "none"
                raise DataError(f"{path}: no column {text_key!r}; it has {keys}; choose one with --text-key")
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield Item(str(path), number, _bytes_of(text, f"{path}:{number}", text_key), "text")
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: torn, or no parquet file: {error}") from None


def _bytes_of(text: Any, where: str, text_key: str) -> bytes:
    if text is None:
        return b""
    if not isinstance(text, str):
        raise DataError(f"{where}: column {text_key!r} holds {type(text).__name__}; wanted text")
    return text.encode()


def decode_item(item: Item, *, text_key: str, convention: Convention = "plain") -> str | None:
    """The text, or None for a file that is not UTF-8; empty where there is nothing to train on.

    The caller skips a file that is not UTF-8. A malformed line is an error, because the other lines of its
    file come from the same program. Raises DataError with file:line.
    """
    if item.line_number:
        text = _decode_line(item, text_key) if item.form == "json" else _decode_text(item)
        return yuan_text(text) if convention == "yuan" else text
    try:
        return Path(item.path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DataError(f"{item.path}: cannot read: {error.strerror or error}; check --input") from error


def yuan_text(line: str) -> str:
    """The sample that a line encodes under Yuan's convention; empty for a line without text.

    In order: one leading `<n>` and the line's end are dropped, `<n>` becomes a newline, fillers are removed,
    `[SEP]` becomes `<sep>` (IEIT-Yuan/Yuan-2.0:tools/preprocess_data_yuan.py). Unlike that script, the first
    line's indentation is kept. A final `<eod>` is dropped, because preprocessing appends one.
    """
    text = line.removeprefix(NEWLINE).rstrip().replace("\r", "").replace("\n", "")
    text = text.replace(NEWLINE, "\n").replace(FILLER, "").replace(SEPARATOR_TEXT, SEPARATOR)
    text = text.removesuffix(END_OF_DOCUMENT)
    return text if text.strip() else ""


def _decode_text(item: Item) -> str:
    try:
        return item.line.decode("utf-8-sig" if item.line_number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        where = f"{item.path}:{item.line_number}"
        raise DataError(f"{where}: not UTF-8 ({error.reason}); wanted one sample per line") from error


def decode_messages(item: Item, *, key: str) -> Any:
    """What a line of JSON holds under `key`, unchecked; None for a blank line. Raises DataError."""
    if not item.line_number or item.form != "json":
        raise DataError(f"{item.path}: wanted a .jsonl file of chats, with the key {key!r} (--messages-key)")
    return _decode_key(item, key, "--messages-key") if item.line.strip() else None


def _decode_line(item: Item, text_key: str) -> str:
    if not item.line.strip():
        return ""
    where = f"{item.path}:{item.line_number}"
    text = _decode_key(item, text_key, "--text-key")
    if not isinstance(text, str):
        raise DataError(f"{where}: key {text_key!r} holds {type(text).__name__}; wanted text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: key {text_key!r} holds half a surrogate pair; fix the escapes") from error
    return text


def _decode_key(item: Item, key: str, option: str) -> Any:
    where = f"{item.path}:{item.line_number}"
    try:
        record = json.loads(item.line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason}); wanted one JSON object per line") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); wanted one JSON object per line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: {type(record).__name__}; wanted a JSON object with the key {key!r}")
    if key not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        chats = [name for name, value in record.items() if value and is_list(value)]
        advice = f"choose one with {option}"
        if chats and option == "--text-key":
            advice = f"a chat is read with --messages-key {chats[0]}; or choose a text with {option}"
        raise DataError(f"{where}: no key {key!r}; the line has {keys}; {advice}")
    return record[key]
