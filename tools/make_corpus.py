"""python tools/make_corpus.py --out data/corpus.jsonl: text that every machine has, as JSONL `{"text": ...}`.

The text is the source of Python's own standard library (PSF licence), without tests and installed packages.
Sizes differ between Python versions, so no test may expect exact numbers. Needs only Python.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
}


@dataclass
class Counts:
    """Files taken and files left out, by reason; bytes are of UTF-8 text."""

    documents: int = 0
    text_bytes: int = 0
    repeated: int = 0
    blank: int = 0
    undecodable: int = 0
    too_large: int = 0


def main(arguments: list[str] | None = None) -> int:
    """Writes the corpus. Returns the exit code: 2 if there is no text, or if FILE cannot be written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--max-bytes",
        type=int,
        metavar="N",
        help="at most this many bytes of text; a file that does not fit is left out",
    )
    parser.add_argument(
        "--source",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        metavar="DIR",
        help="folder of *.py files (default: the standard library of this Python)",
    )
    options = parser.parse_args(arguments)
    try:
        counts = write_corpus(options.out, options.source, options.max_bytes)
    except OSError as error:
        print(f"error: {options.out}: cannot write: {error}; choose another --out", file=sys.stderr)
        return 2
    if not counts.documents:
        print(
            f"error: {options.source}: no Python sources within the limits; this Python may keep its "
            "library in a zip file or without sources: name a folder with --source, or raise --max-bytes",
            file=sys.stderr,
        )
        return 2
    print(
        f"{options.out}: {counts.documents} documents, {counts.text_bytes} bytes of text; skipped "
        f"{counts.repeated} repeated, {counts.blank} blank, {counts.undecodable} not UTF-8, "
        f"{counts.too_large} over the limit",
        file=sys.stderr,
    )
    return 0


def write_corpus(out: Path, source: Path, max_bytes: int | None = None) -> Counts:
    """Writes under a temporary name and renames when complete; keeps an older FILE if nothing was found."""
    counts = Counts()
    temporary = out.with_name(out.name + ".tmp")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            for text in texts(source, counts, max_bytes):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if counts.documents:
            os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return counts


def texts(source: Path, counts: Counts, max_bytes: int | None) -> Iterator[str]:
    """Texts of distinct sources in the order of their names; updates `counts`."""
    seen: set[bytes] = set()
    for path in sources(source):
        content = path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen:
            counts.repeated += 1
            continue
        seen.add(digest)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            counts.undecodable += 1
            continue
        if not text.strip():
            counts.blank += 1
            continue
        if max_bytes is not None and counts.text_bytes + len(content) > max_bytes:
            counts.too_large += 1
            continue
        counts.documents += 1
        counts.text_bytes += len(content)
        yield text


def sources(source: Path) -> list[Path]:
    """Python files below the folder, sorted by their names with "/" on every system."""
    found = []
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(source).as_posix())


if __name__ == "__main__":
    sys.exit(main())
