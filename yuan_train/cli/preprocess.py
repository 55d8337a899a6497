"""Encodes documents, ends each with <eod>, and writes PREFIX.bin and PREFIX.idx. A .jsonl or .parquet file
holds one document per line or row; any other file is one document. The bytes do not depend on --workers."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from yuan_train.cli.main import place_to_write

if TYPE_CHECKING:
    from yuan_train.data.indexed import CorpusCounts

REPORT_SECONDS = 2.0
NAMED_FILES = 5  # skipped files named one by one; the rest are only counted


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="text, .jsonl or .parquet files, in order")
    add("--tokenizer", required=True, metavar="DIR", help="folder with tokenizer.model or .json, or the file")
    text = "path of the token files without .bin or .idx"
    add("--out", type=place_to_write, required=True, metavar="PREFIX", help=text)
    add("--workers", type=int, default=1, metavar="N", help="processes that encode (default 1)")
    add("--text-key", default="text", metavar="KEY", help="key or column of the text")
    add(
        "--convention",
        choices=["plain", "yuan"],
        default="plain",
        help="yuan: one sample per line of any other file, <n> for a newline, [SEP] between question and "
        "answer; special strings such as <sep> are recognised",
    )
    add(
        "--messages-key",
        metavar="KEY",
        help="each line is a chat: a list of messages under this key, rendered by the tokenizer's chat "
        "template; also writes which tokens are answers, for data.loss_on_answers",
    )
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Encodes and reports. Raises DataError for inputs that cannot be read, with file:line."""
    from yuan_train.data.indexed import DocumentFormat, preprocess

    done = preprocess(
        arguments.input,
        arguments.tokenizer,
        arguments.out,
        DocumentFormat(
            text_key=arguments.text_key, convention=arguments.convention, messages_key=arguments.messages_key
        ),
        workers=arguments.workers,
        report=_progress_line(),
    )
    for path in done.undecodable[:NAMED_FILES]:
        print(f"skipped {path}: not UTF-8", file=sys.stderr)
    if len(done.undecodable) > NAMED_FILES:
        print(f"skipped {len(done.undecodable) - NAMED_FILES} more that are not UTF-8", file=sys.stderr)
    if arguments.json:
        facts = asdict(done)
        if done.answer_tokens is None:
            del facts["answer_tokens"]
        print(json.dumps(facts))
    else:
        answers = "" if done.answer_tokens is None else f", {done.answer_tokens} of them in answers"
        print(
            f"{done.prefix}.bin, .idx: {done.documents} documents, {done.tokens} tokens{answers}, "
            f"{done.dtype}; skipped {done.empty} empty, {len(done.undecodable)} not UTF-8"
        )
    return 0


def _progress_line() -> "Callable[[CorpusCounts], None]":
    """A report that prints to stderr at most every two seconds."""
    started = last = time.monotonic()

    def report(progress: "CorpusCounts") -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < REPORT_SECONDS:
            return
        last = now
        rate = progress.text_bytes / (now - started) / 1e6
        print(
            f"preprocess: {progress.documents} documents, {progress.tokens} tokens, {rate:.1f} MB/s",
            file=sys.stderr,
            flush=True,
        )

    return report
