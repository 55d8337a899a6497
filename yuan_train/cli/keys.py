"""Prints the keys of a kind of file: run, cluster, model, rl, plan or rl_plan. A prefix prints those that
begin with it, or have a part that does: `yuan-train keys run optimizer`, `yuan-train keys learning_rate`.

--schema prints a JSON schema. Editors complete and explain the keys of a file whose first line names it:
# yaml-language-server: $schema=run.schema.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import textwrap
from typing import TYPE_CHECKING

from yuan_train.config.errors import ConfigError

if TYPE_CHECKING:
    from yuan_train.report.keys import Key


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="KIND PREFIX",
        help="run, cluster, model, rl, plan or rl_plan, and the beginning of a key; without a kind, of all",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    output.add_argument("--schema", action="store_true", help="print the JSON schema of a kind of file")


def run(arguments: argparse.Namespace) -> int:
    """Print. Raises ConfigError if no key begins so."""
    from yuan_train.report.keys import KINDS, file_keys, schema_text

    what: list[str] = arguments.what
    kind = what[0] if what and what[0] in KINDS else None
    rest = what if kind is None else what[1:]
    if len(rest) > 1:
        raise ConfigError(f"{' '.join(what)}: wanted a kind ({', '.join(KINDS)}) and the beginning of a key")
    prefix = rest[0] if rest else ""
    if arguments.schema:
        if kind is None or prefix:
            raise ConfigError(f"--schema: wanted one kind of file and no key (has: {', '.join(KINDS)})")
        print(schema_text(kind), end="")
        return 0
    if kind is None and prefix:
        found = _anywhere(prefix)
    else:
        found = {name: file_keys(name, prefix) for name in ([kind] if kind else KINDS)}
    if arguments.json:
        values = {name: [dataclasses.asdict(key) for key in keys] for name, keys in found.items()}
        print(json.dumps(values, ensure_ascii=False))
        return 0
    width = min(shutil.get_terminal_size().columns, 110)
    print("\n\n".join("\n".join(_lines(name, keys, width)) for name, keys in found.items()))
    return 0


def _anywhere(prefix: str) -> dict[str, tuple[Key, ...]]:
    """The kinds of files that have such keys, with them. Raises ConfigError if none has."""
    from yuan_train.report.keys import KINDS, file_keys

    found: dict[str, tuple[Key, ...]] = {}
    errors: list[ConfigError] = []
    for kind in KINDS:
        try:
            found[kind] = file_keys(kind, prefix)
        except ConfigError as error:
            errors.append(error)
    if not found:
        hinted = [error for error in errors if "did you mean" in str(error)]
        raise (hinted or errors)[0]
    return found


def _lines(kind: str, keys: tuple[Key, ...], width: int) -> list[str]:
    from yuan_train.report.keys import KINDS

    lines = [f"Keys of {KINDS[kind][2]}:"]
    for key in keys:
        lines.append(f" {key.path}: {key_words(key)}")
        lines += textwrap.wrap(
            key.meaning, width, initial_indent="     ", subsequent_indent="     ", break_on_hyphens=False
        )
    return lines


def key_words(key: Key) -> str:
    """What may stand at a key, and what does without it: `quantity above 0 (seconds); 1 min`."""
    unit = f" ({key.unit})" if key.unit else ""
    if key.default is None:
        return f"{key.type}{unit}; required"
    return f"{key.type}{unit}" + (f"; default {key.default}" if key.default else "")
