"""Summarises the log directory of a run of any kind, also while it goes on: loss or reward, speed, and of
every card its layers, seconds and memory as forecast and as measured."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from yuan_train.cli.main import file_to_write

if TYPE_CHECKING:
    from yuan_train.report.run_log import RunReader


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run_options(parser)
    text = "also write a page with curves, stages and the plan"
    parser.add_argument("--out", type=file_to_write, metavar="F.html", help=text)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add what `reader_of` reads."""
    parser.add_argument("directory", metavar="RUN", help="log directory of the run (log.directory)")
    parser.add_argument(
        "--cluster", metavar="F", help="for cards that are not used, and rent (default: RUN/cluster.yaml)"
    )


def reader_of(arguments: argparse.Namespace) -> RunReader:
    """What reads the run. Raises ConfigError if the cluster file cannot be read."""
    from yuan_train.config.cluster import load_cluster
    from yuan_train.report.run_log import RunReader

    return RunReader(arguments.directory, load_cluster(arguments.cluster) if arguments.cluster else None)


def run(arguments: argparse.Namespace) -> int:
    """Print, and write the page. Raises ConfigError if the directory has no finished step."""
    from yuan_train.config.load import write_text
    from yuan_train.report.run_page import run_html, run_lines

    found = reader_of(arguments).read()
    if arguments.out:
        write_text(arguments.out, run_html(found))
    print("\n".join(run_lines(found)))
    if arguments.out:
        print(f"written: {arguments.out}", file=sys.stderr)
    return 0
