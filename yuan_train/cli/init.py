"""Writes a valid, commented file to begin with: a run of pre-training (pretrain), fine-tuning on chats (sft),
preferences (dpo) or reinforcement learning (grpo), or a cluster. What must be changed is marked FILL IN. A
file that is there is never overwritten."""

from __future__ import annotations

import argparse
import sys

from yuan_train.cli.main import file_to_write
from yuan_train.config.errors import ConfigError

KINDS = {"pretrain": "run", "sft": "run", "dpo": "run", "grpo": "rl", "cluster": "cluster"}
"""Files that can be written, and the kind of keys that they have."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("kind", choices=tuple(KINDS), help="what to write")
    add("--out", type=file_to_write, metavar="F", help="file to write; KIND.yaml if not given")


def run(arguments: argparse.Namespace) -> int:
    """Write the file, with the schema for editors in its first line. Raises ConfigError if it is there."""
    from pathlib import Path

    from yuan_train.config.load import CONFIGS

    kind: str = arguments.kind
    path = Path(arguments.out or f"{kind}.yaml")
    text = (CONFIGS / "init" / f"{kind}.yaml").read_text(encoding="utf-8").replace("THIS_FILE", str(path))
    schema = CONFIGS / "schema" / f"{KINDS[kind]}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(f"# yaml-language-server: $schema={schema.resolve()}\n{text}")
    except OSError as error:
        there = "is there already; wanted another name (--out F), or remove it"
        raise ConfigError(f"{path}: {there if path.exists() else f'cannot be written: {error}'}") from None
    places = text.count("FILL IN:")
    what = f"change what is marked FILL IN ({places} lines)" if places else "change what is not as yours"
    print(f"written: {path}; {what}", file=sys.stderr)
    return 0
