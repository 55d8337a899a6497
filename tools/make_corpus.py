"""python tools/make_corpus.py --out data/corpus.jsonl: text that every machine has, as JSONL `{"text": ...}`.

The text is the source of Python's own standard library (PSF licence), without tests and installed packages.
Sizes differ between Python versions, so no test may expect exact numbers. Needs only Python. With --stories
there are little stories in it too, of few words: a model learns to write them within a minute.
"""

import argparse
import hashlib
import json
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
NAMES = "Anna Ben Clara David Emma Felix Greta Hugo".split()
ANIMALS = "cat dog bird fox horse rabbit bear mouse".split()
PLACES = "forest garden river house village hill lake road".split()
THINGS = "ball book cake hat lamp key boat flower".split()
MOODS = "happy sad tired brave hungry kind".split()
STORIES = 20  # of a document


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
    most = "at most this many bytes of text; a file that does not fit is left out"
    parser.add_argument("--max-bytes", type=int, metavar="N", help=most)
    here, source = (
        Path(sysconfig.get_paths()["stdlib"]),
        "folder of *.py files (default: the standard library)",
    )
    parser.add_argument("--source", type=Path, default=here, metavar="DIR", help=source)
    stories = f"also N documents of {STORIES} little stories, spread among the others (default: 0)"
    parser.add_argument("--stories", type=int, default=0, metavar="N", help=stories)
    options = parser.parse_args(arguments)
    try:
        counts = write_corpus(options.out, options.source, options.max_bytes, options.stories)
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
    told = f" and {options.stories} stories" if options.stories else ""
    print(
        f"{options.out}: {counts.documents} documents, {counts.text_bytes} bytes of text{told}; skipped "
        f"{counts.repeated} repeated, {counts.blank} blank, {counts.undecodable} not UTF-8, "
        f"{counts.too_large} over the limit",
        file=sys.stderr,
    )
    return 0


def write_corpus(out: Path, source: Path, max_bytes: int | None = None, stories: int = 0) -> Counts:
    """Writes under a temporary name and renames when complete; keeps an older FILE if nothing was found."""
    counts = Counts()
    temporary = out.with_name(out.name + ".tmp")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            found = list(texts(source, counts, max_bytes))
            if found and stories:
                generator = random.Random(0)
                found += ["".join(story(generator) for _ in range(STORIES)) for _ in range(stories)]
                generator.shuffle(found)
            for text in found:
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


def story(generator: random.Random) -> str:
    """One line. What may follow is clear from the two words before, so that little training is enough."""
    name, friend = generator.sample(NAMES, 2)
    animal, place, thing, mood = (generator.choice(words) for words in (ANIMALS, PLACES, THINGS, MOODS))
    return (
        f"One day {name} walked to the {place}. There sat a {mood} {animal}, who asked: "
        f'"Did you lose this {thing}?" "Yes!" cried {name}. They played until evening, then {friend} came, '
        "and everyone went home happy.\n"
    )


def sources(source: Path) -> list[Path]:
    """Python files below the folder, sorted by their names with "/" on every system."""
    found = []
    for folder, subfolders, names in os.walk(source):
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(source).as_posix())


if __name__ == "__main__":
    sys.exit(main())
