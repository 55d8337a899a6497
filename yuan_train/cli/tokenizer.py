"""Trains a byte-pair tokenizer with byte fallback and writes DIR/tokenizer.model."""

import argparse
import json
import sys
from dataclasses import asdict

from yuan_train.cli.main import place_to_write


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    text = "text files; a .jsonl file holds one document per line"
    add("--input", nargs="+", required=True, metavar="FILE", help=text)
    add("--vocab-size", type=int, required=True, metavar="N", help="pieces, special ones included")
    add("--or-fewer", action="store_true", help="or as many as the text gives, if fewer")
    add("--out", type=place_to_write, required=True, metavar="DIR", help="folder for tokenizer.model")
    add("--text-key", default="text", metavar="KEY", help="key of the text in .jsonl lines")
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Trains and reports. Raises DataError for unusable inputs or an impossible vocabulary size."""
    from yuan_train.data.tokenizer import train_tokenizer

    trained = train_tokenizer(
        arguments.input,
        arguments.vocab_size,
        arguments.out,
        text_key=arguments.text_key,
        or_fewer=arguments.or_fewer,
    )
    if trained.undecodable:
        print(f"skipped {trained.undecodable} files that are not UTF-8", file=sys.stderr)
    if arguments.json:
        print(json.dumps(asdict(trained)))
    else:
        print(
            f"{trained.path}: {trained.vocab_size} pieces from {trained.documents} documents "
            f"({trained.training_bytes} bytes of text)"
        )
    return 0
