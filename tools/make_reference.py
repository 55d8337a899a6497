"""python tools/make_reference.py: writes docs/reference.md and configs/schema/*.json from the dataclasses.

With --check it writes nothing, and exits with 1 if a file is not what it would write.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from yuan_train.cli.keys import KINDS, Key, file_keys, key_words, schema_text

ROOT = Path(__file__).parents[1]
COLUMNS = 120
HEAD = """\
# Reference of keys

Every key of the files that people write, as `yuan-train keys` prints them. Written by `python
tools/make_reference.py` from the docstrings of the code; do not edit it here.

A quantity is a number with a unit: `80 GiB`, `200 Gb/s` (bits), `25 GB/s` (bytes), `10 us`, `312 TFLOP/s`.
Keys of a list are shown as `nodes[].name`, those of named things as `device_types.NAME.memory`. On the
command line a key is changed by `train.steps=500`, an item of a list by its number: `data.train.0.weight=2`.

The folder `configs/schema` has a JSON schema for each kind of file; `yuan-train keys run --schema` prints the
same. Editors with a YAML language server complete and explain the keys of a file that begins so:
`# yaml-language-server: $schema=PATH/configs/schema/run.json`.
"""


def main(arguments: list[str] | None = None) -> int:
    """Write or check; the exit code is 1 where a file is not fresh."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which files are not fresh")
    given = parser.parse_args(arguments)
    stale = [path for path, text in texts().items() if _read(path) != text]
    for path in stale:
        if not given.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts()[path], encoding="utf-8")
        print(f"{'not fresh' if given.check else 'written'}: {path.relative_to(ROOT)}")
    return 1 if stale and given.check else 0


def texts() -> dict[Path, str]:
    """Each file, and what it must hold."""
    found = {ROOT / "configs" / "schema" / f"{kind}.json": schema_text(kind) for kind in KINDS}
    return found | {ROOT / "docs" / "reference.md": "\n".join(page())}


def page() -> Iterator[str]:
    """The lines of docs/reference.md."""
    yield HEAD
    for kind, (_, _, title) in KINDS.items():
        yield f"## {title[0].upper()}{title[1:]}\n"
        for key in file_keys(kind):
            yield from item(key)
        yield ""


def item(key: Key) -> list[str]:
    """A key as an item of a list, in lines that fit."""
    text = f"- `{key.path}`: {key_words(key)}. {key.meaning}".rstrip()
    return textwrap.wrap(
        text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
