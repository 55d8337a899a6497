"""`yuan-train show RUN`: what a run has reached, and the forecast beside what was measured."""

from __future__ import annotations

import argparse
import sys


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "show",
        help="what a run has reached; the forecast beside what was measured",
        description="Summarises the log directory of a run of any kind, also while it goes on: loss or "
        "reward, speed, and of every rank its layers, seconds and memory as forecast and as measured.",
    )
    parser.add_argument("directory", metavar="RUN", help="log directory of the run (log.directory)")
    parser.add_argument("--out", metavar="F.html", help="also write a page with curves, stages and the plan")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print, and write the page. Raises ConfigError if the directory has no finished step."""
    from yuan_train.config.load import write_text
    from yuan_train.report.run_log import read_run
    from yuan_train.report.run_page import run_html, run_lines

    found = read_run(arguments.directory)
    if arguments.out:
        write_text(arguments.out, run_html(found))
    print("\n".join(run_lines(found)))
    if arguments.out:
        print(f"written: {arguments.out}", file=sys.stderr)
    return 0
