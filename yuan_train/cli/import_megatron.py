"""Reads mp_rank_TT[_PPP]/model_optim_rng.pt of any tensor and pipeline parallelism, and writes a checkpoint
of step 0 with weights only. export-megatron then writes it for any partition. No code in the files is run."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from yuan_train.cli.main import place_to_write
from yuan_train.config.model import load_model


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("folder", metavar="DIR", help="folder with mp_rank_*, or with iterations")
    add("--out", type=place_to_write, required=True, metavar="CKPT", help="folder of checkpoints to make")
    add("--model", metavar="FILE", help="model file, if the files' arguments lack the sizes")
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Import and report."""
    model = load_model(arguments.model) if arguments.model else None
    from yuan_train.checkpoint.megatron import import_megatron

    done = import_megatron(arguments.folder, arguments.out, model=model)
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(asdict(done)))
    else:
        print(f"{done.path}: {done.parameters:,} parameters, {done.dtype}")
    return 0
