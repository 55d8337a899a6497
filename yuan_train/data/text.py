"""Documents in text files: a `.jsonl` file holds one per line, any other file is one document."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from yuan_train.config.errors import DataError

LINE_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Item:
    """One document, undecoded: a line of a file, or a whole file (`line_number` 0, read when decoded)."""

    path: str
    line_number: int = 0
    line: bytes = b""

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


def read_items(paths: Sequence[str | Path]) -> Iterator[Item]:
    """The documents of the files in order, undecoded."""
    for path in map(Path, paths):
        if path.suffix not in LINE_SUFFIXES:
            yield Item(str(path))
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield Item(str(path), number, line)


def decode_item(item: Item, *, text_key: str) -> str | None:
    """The text, or None for a file that is not UTF-8.

    A foreign file among many is skipped by the caller; a line that is not as agreed is an error, for its
    neighbours come from the same program. Raises DataError with file:line.
    """
    if item.line_number:
        return _decode_line(item, text_key)
    try:
        return Path(item.path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DataError(f"{item.path}: cannot read: {error.strerror or error}; check --input") from error


def _decode_line(item: Item, text_key: str) -> str:
    where = f"{item.path}:{item.line_number}"
    if not item.line.strip():
        return ""
    try:
        record = json.loads(item.line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason}); wanted one JSON object per line") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); wanted one JSON object per line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: {type(record).__name__}; wanted a JSON object with the key {text_key!r}")
    if text_key not in record:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise DataError(f"{where}: no key {text_key!r}; the line has {keys}; choose one with --text-key")
    text = record[text_key]
    if not isinstance(text, str):
        raise DataError(f"{where}: key {text_key!r} holds {type(text).__name__}; wanted text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: key {text_key!r} holds half a surrogate pair; mend the escapes") from error
    return text
