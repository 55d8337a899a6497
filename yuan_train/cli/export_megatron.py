"""Writes the weights as DIR/release/mp_rank_TT[_PPP]/model_optim_rng.pt."""

from __future__ import annotations

import argparse
import json
import sys

from yuan_train.cli.main import place_to_write
from yuan_train.config.errors import ConfigError

_FILTER = (
    "the original code has no word for reset_filter: its filter sees earlier documents, as training here did "
    "not; give the model one document at a time (import-megatron takes it up again)"
)
_ATTENTION = "reset_attention: with --use-flash-attn the original code ignores its reset_attention_mask"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("checkpoint", metavar="CKPT", help="a checkpoint, or a directory of checkpoints")
    add("--out", type=place_to_write, required=True, metavar="DIR", help="directory to create")
    add("--tensor", type=int, default=1, metavar="N", help="tensor-parallel ranks, default 1")
    add("--stages", metavar="2,5,5", help="layers of each pipeline stage; default: one stage")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as in the checkpoint")
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Export and report."""
    words = arguments.stages.split(",") if arguments.stages else []
    if not all(word.strip().isdigit() for word in words):
        raise ConfigError(f"--stages: wanted layers per stage such as 2,5,5; got {arguments.stages!r}")
    if arguments.tensor < 1:
        raise ConfigError(f"--tensor: {arguments.tensor}; wanted at least 1")
    import torch

    from yuan_train.checkpoint.load import find_checkpoint
    from yuan_train.checkpoint.megatron import export_megatron

    checkpoint = find_checkpoint(arguments.checkpoint)
    for note in checkpoint.notes:
        print(f"note: {note}", file=sys.stderr)
    path = export_megatron(
        checkpoint,
        arguments.out,
        tensor=arguments.tensor,
        stages=[int(word) for word in words] or None,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
    )
    if checkpoint.resets["reset_filter"]:
        print(f"note: {_FILTER}", file=sys.stderr)
    if checkpoint.resets["reset_attention"]:
        print(f"note: {_ATTENTION}", file=sys.stderr)
    print(json.dumps({"path": str(path)}) if arguments.json else f"{path}")
    return 0
