"""yuan-train tokenizer --input F... --vocab-size N --out DIR: trains a sentencepiece model."""

import argparse
import json
import sys
from dataclasses import asdict


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "tokenizer",
        description="Trains a byte-pair tokenizer with byte fallback and writes DIR/tokenizer.model.",
    )
    text = "text files; a .jsonl file holds one document per line"
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help=text)
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="pieces, special ones included"
    )
    parser.add_argument("--or-fewer", action="store_true", help="or as many as the text gives, if fewer")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for tokenizer.model")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="key of the text in .jsonl lines")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run)


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
