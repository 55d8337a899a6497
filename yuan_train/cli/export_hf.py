"""Writes safetensors under the published names, config.json, and the tokenizer if there is one. transformers
loads it; a Yuan model comes with code, for trust_remote_code. One tensor is in memory at a time."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from yuan_train.checkpoint.hf import push_model
from yuan_train.cli.main import place_to_write
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import HUB_NAME


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="a checkpoint, or a directory of checkpoints")
    add("--out", type=place_to_write, required=True, metavar="DIR", help="directory to create")
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="default: as imported, or the precision of the run",
    )
    add("--shard-size", type=float, default=5.0, metavar="GB", help="maximum size of a file, default 5")
    add("--tokenizer", metavar="DIR", help="tokenizer instead of the checkpoint's")
    add("--adapter", action="store_true", help="the adapters (LoRA) alone, in PEFT's format, not merged")
    add("--push", metavar="ORG/NAME", help="also put the folder on the Hugging Face Hub, as a private model")
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Export and report."""
    if not 0 < arguments.shard_size < float("inf"):
        raise ConfigError(f"--shard-size: {arguments.shard_size}; wanted a number of gigabytes above 0")
    if arguments.push and not HUB_NAME.fullmatch(arguments.push):
        raise ConfigError(f"--push: {arguments.push!r}; wanted ORG/NAME, as models of the Hub are called")
    from yuan_train.checkpoint.hf import export_hf
    from yuan_train.checkpoint.load import find_checkpoint
    from yuan_train.checkpoint.peft import export_adapter

    checkpoint = find_checkpoint(arguments.checkpoint)
    for note in checkpoint.notes:
        print(f"note: {note}", file=sys.stderr)
    if arguments.adapter:
        done = export_adapter(checkpoint, Path(arguments.out), dtype=arguments.dtype)
    else:
        tokenizer, token_ids = _tokenizer(arguments.tokenizer or checkpoint.tokenizer)
        done = export_hf(
            checkpoint,
            arguments.out,
            dtype=arguments.dtype,
            tokenizer=tokenizer,
            token_ids=token_ids,
            shard_bytes=round(arguments.shard_size * 1e9),
        )
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    address = push_model(Path(arguments.out), arguments.push) if arguments.push else None
    if arguments.json:
        print(json.dumps(asdict(done) | ({"address": address} if address else {})))
    else:
        print(f"{done.path}: {done.parameters:,} parameters, {done.dtype}, {done.tensors} tensors")
        if address:
            print(f"on the Hub: {address}")
    return 0


def _tokenizer(path: str | Path | None) -> tuple[Path | None, dict[str, int] | None]:
    """A tokenizer's file, and its ids for config.json; None without a tokenizer."""
    if path is None:
        return None, None
    from yuan_train.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(path)
    ids = {"eod": tokenizer.eod_id, "pad": tokenizer.eod_id}
    for key in ("bos", "eos", "pad"):
        role_id = tokenizer.role_id(f"{key}_token")
        if role_id is not None:
            ids[key] = role_id
    for key, piece in (("sep", "<sep>"), ("mask", "<mask>")):
        piece_id = tokenizer.piece_id(piece)
        if piece_id is not None:
            ids[key] = piece_id
    return tokenizer.path, ids
