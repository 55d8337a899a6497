"""Reads config.json and the weights (safetensors, or PyTorch .bin; one file or shards) of a Yuan 2.0 (dense
or M32), Llama or Qwen model, and writes a checkpoint of step 0 for generate, evaluate and train. One tensor
is in memory at a time. No code in the folder is run. Adapters in PEFT's format are put beside the weights of
--base."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from yuan_train.checkpoint.load import TOKENIZER
from yuan_train.cli.main import place_to_write
from yuan_train.config.errors import ConfigError, DataError
from yuan_train.config.load import dump_plain
from yuan_train.config.model import HUB_NAME, RotaryForm

if TYPE_CHECKING:
    from yuan_train.checkpoint.hf import Imported


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "folder",
        metavar="MODEL",
        help="folder with config.json and the weights; ORG/NAME, fetched from the Hugging Face Hub; or a "
        "folder of adapters (adapter_config.json)",
    )
    add("--base", metavar="CKPT", help="of adapters: the checkpoint of the model they belong to")
    add("--out", type=place_to_write, required=True, metavar="CKPT", help="folder of checkpoints to make")
    add(
        "--rope-base",
        type=float,
        metavar="X",
        help="base of the rotary frequencies, over config.json's; Yuan 2.0-M32 of 16K, which has none there, "
        "wants 40890",
    )
    add(
        "--rotary-form",
        choices=get_args(RotaryForm),
        help="rounding of the rotary tables (docs/m32.md); default: exact",
    )
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Import and report."""
    from yuan_train.checkpoint.peft import is_adapter

    folder = Path(arguments.folder)
    adapters = is_adapter(folder)
    if adapters != (arguments.base is not None):
        raise ConfigError(
            f"{folder}: adapters (adapter_config.json); name the checkpoint of their base: --base CKPT"
            if adapters
            else f"--base {arguments.base}: is for adapters, and {folder} holds no adapter_config.json"
        )
    done = _import_adapters(folder, arguments) if adapters else _import_model(folder, arguments)
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(asdict(done)))
    else:
        print(f"{done.path}: {done.parameters:,} parameters, {done.dtype}, from {done.tensors} tensors")
        print("\n".join(_next_lines(arguments.out, Path(done.path))))
    return 0


def _import_adapters(folder: Path, arguments: argparse.Namespace) -> Imported:
    from yuan_train.checkpoint.load import find_checkpoint
    from yuan_train.checkpoint.peft import import_adapter

    return import_adapter(folder, find_checkpoint(arguments.base), arguments.out)


def _import_model(folder: Path, arguments: argparse.Namespace) -> Imported:
    """Import a folder, or a model of the Hub, which is fetched first."""
    from yuan_train.checkpoint.hf import check_is_published, fetch_model, import_hf

    name = None
    check_is_published(folder)
    if not folder.exists() and HUB_NAME.fullmatch(arguments.folder):
        name = folder.name
        folder = fetch_model(arguments.folder)
    _check_tokenizer(folder)
    return import_hf(
        folder, arguments.out, name=name, rope_base=arguments.rope_base, rotary_form=arguments.rotary_form
    )


def _next_lines(out: str, step: Path) -> Iterator[str]:
    """What a run file says to train the model."""
    yield "to train it, in a run file (its model need not be said again):"
    yield dump_plain({"start": {"checkpoint": out}}).rstrip()
    if (step / TOKENIZER).is_dir():
        yield dump_plain({"data": {"tokenizer": out}}).rstrip()
        yield "next:"
        where = shlex.quote(out)
        yield f"  yuan-train generate --checkpoint {where} --prompt Hello"
        yield f"  yuan-train preprocess --input TEXT.jsonl --tokenizer {where} --out data/corpus"
        yield "  yuan-train init pretrain      (or sft, dpo, grpo)"


def _check_tokenizer(folder: Path) -> None:
    """Check the tokenizer, if there is one, before any weight is read.

    Raises DataError if it cannot be read, or if it has more pieces than config.json has vocabulary rows.
    """
    from yuan_train.checkpoint.hf import TOKENIZER_FILES
    from yuan_train.data.tokenizer import Tokenizer

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return
    tokenizer = Tokenizer.load(folder)
    try:
        vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # The import reports what is wrong with it.
    if isinstance(vocab_size, int) and tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{tokenizer.path}: has {tokenizer.vocab_size} pieces, but config.json says vocab_size "
            f"{vocab_size}: it is the tokenizer of another model; remove it, or replace it with the right one"
        )
