"""yuan-train train --config F [--plan F]: trains; one process alone, or each rank under a launcher."""

from __future__ import annotations

import argparse
import logging

from yuan_train.config.errors import YuanError
from yuan_train.config.plan import load_plan
from yuan_train.config.run import load_run


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "train",
        help="train",
        description="Trains a model. Without a plan: one process, the whole model. With one: start each of "
        "its ranks, by `yuan-train launch` or torchrun. SIGTERM saves a checkpoint and ends with 0.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run file")
    parser.add_argument("--plan", metavar="FILE", help="the plan, as `yuan-train plan` or a person wrote it")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the run, train.steps=50"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the files, then train. What is wrong with the files is said once per machine."""
    config = load_run(arguments.config, tuple(arguments.overrides))
    plan = load_plan(arguments.plan) if arguments.plan else None
    from yuan_train.train.loop import find_position, prepare, train

    position = find_position()
    _choose_who_speaks(position.rank)
    try:
        job = prepare(config, plan, position)
    except YuanError as error:
        # Every rank finds the same; one voice per machine is enough.
        if position.local_rank > 0:
            return error.exit_code
        raise
    train(job)
    return 0


def _choose_who_speaks(rank: int) -> None:
    """Rank 0 tells of data and of the kernels in use; the others would only repeat it."""
    logging.getLogger("yuan_train").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("yuan_kernels").setLevel(logging.INFO if rank == 0 else logging.WARNING)
