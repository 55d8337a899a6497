"""Files with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from yuan_train.config.errors import DataError


def read_records(path: Path, *, keys: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each object of a JSON-lines file stands (`path:line`), and the object; empty lines are skipped.

    Raises DataError, which names `keys` of the run file if the file cannot be read, else file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}; check {keys}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON ({error}); wanted one JSON object a line") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}:{number}: {type(record).__name__}; wanted a JSON object")
        yield f"{path}:{number}", record
