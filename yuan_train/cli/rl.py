"""yuan-train rl --config F [--plan F]: reinforcement learning, as a single process or as one rank."""

from __future__ import annotations

import argparse
import os

from yuan_train.config.document import is_mapping, read_document
from yuan_train.config.environment import set_rank_defaults
from yuan_train.config.errors import PlanError, YuanError
from yuan_train.config.plan import Plan
from yuan_train.config.plan_files import load_plan
from yuan_train.config.rl_files import load_rl


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "rl",
        help="train a model by reinforcement learning",
        description="Trains a model by reinforcement learning: draws answers to prompts, scores them, and "
        "makes those more probable that scored better. Without a plan, one process does everything. With "
        "one, start all ranks with torchrun. SIGTERM saves a checkpoint and exits with 0.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run file, with `algorithm`")
    parser.add_argument("--plan", metavar="FILE", help="the policy's plan, under which it also generates")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the run, such as train.steps=50"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the files, then train. What one rank finds wrong ends all, and is printed once per machine."""
    set_rank_defaults()
    config, plan, fault = None, None, None
    try:
        config = load_rl(arguments.config, tuple(arguments.overrides))
        plan = _load_plan(arguments.plan) if arguments.plan else None
    except YuanError as error:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            # Said at once, without torch.
            raise
        config, fault = None, error
    from yuan_train.cli.train import set_log_levels
    from yuan_train.rl.job import prepare_rl
    from yuan_train.rl.loop import train_rl
    from yuan_train.train.job import find_position
    from yuan_train.train.run import fail_together

    position = find_position()
    set_log_levels(position.rank)
    if config is not None:
        try:
            job = prepare_rl(config, plan, position)
        except YuanError as error:
            fault = error
        else:
            train_rl(job)
            return 0
    assert fault is not None
    try:
        fail_together(fault, position)
    except YuanError as error:
        if position.local_rank > 0:
            return error.exit_code
        raise


def _load_plan(path: str) -> Plan:
    value = read_document(path).value
    if is_mapping(value) and value.get("kind") == "rl":
        raise PlanError(
            f"{path}: roles on cards of their own are not run yet; give the policy's plan alone, under which "
            "it also generates"
        )
    return load_plan(path)
