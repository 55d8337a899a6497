"""yuan-train train --config F [--plan F]: trains, as a single process or as one rank under a launcher."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from yuan_train.cli.launch import check_driver_of_rank
from yuan_train.config.errors import ConfigError, NoDriver, say
from yuan_train.config.express import INSTALL
from yuan_train.config.plan_constraints import load_plan
from yuan_train.config.run import DataConfig, EngineName, load_run
from yuan_train.data.indexed import IndexedDataset, idx_path, strip_suffix
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.parallel.environment import is_job_here, is_rank_of_several, set_rank_defaults

if TYPE_CHECKING:
    from yuan_train.train.engine import BuildEngine

TELL_SECONDS = 4.0
"""How long a process for which there is no card may take to import torch and to tell that to the others."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "train",
        help="train a model",
        description="Trains a model. Without a plan, one process trains the whole model. With one, start all "
        "ranks with `yuan-train launch` or torchrun. SIGTERM saves a checkpoint and exits with 0.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run file")
    parser.add_argument("--plan", metavar="FILE", help="the plan, from `yuan-train plan` or written by hand")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the run, such as train.steps=50"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the files, then train. What one rank finds wrong ends all, and is printed once per machine."""
    set_rank_defaults()
    config, plan = None, None
    fault: Exception | KeyboardInterrupt | None = None
    try:
        config = load_run(arguments.config, tuple(arguments.overrides))
        plan = load_plan(arguments.plan) if arguments.plan else None
        if config.engine == "megatron":
            _check_installed()
        if plan is not None and config.train.device != "cpu":
            check_driver_of_rank(plan)
        _check_there(config.data)
    except Exception as error:
        say_without_torch(error)
        config, fault = None, error
    with ending_in_time(fault):
        from yuan_train.train.ending import fail_together, telling_interrupts
        from yuan_train.train.job import find_position, prepare
        from yuan_train.train.run import train

        position = find_position()
        set_log_levels(position.rank)
        if config is not None:
            try:
                job = prepare(config, plan, position)
            except (Exception, KeyboardInterrupt) as error:
                fault = error
            else:
                with telling_interrupts(position):
                    train(job, _engine(config.engine))
                return 0
        assert fault is not None
        fail_together(fault, position)


def say_without_torch(error: Exception) -> None:
    """Say what this rank has found wrong, once on each machine, before seconds go by in which torch is
    imported to tell it to the others. Raises the error where nobody has to be told: alone, and of a machine
    without the plan's cards if all ranks are here, each of which finds it by itself."""
    alone = not is_rank_of_several()
    if alone or (isinstance(error, NoDriver) and is_job_here()):
        raise error
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(error)


@contextmanager
def ending_in_time(fault: BaseException | None) -> Iterator[None]:
    """Around the telling of a fault: a process for which there is no card here ends within TELL_SECONDS."""
    timer = threading.Timer(TELL_SECONDS, os._exit, (NoDriver.exit_code,))
    timer.daemon = True
    if isinstance(fault, NoDriver):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _engine(name: EngineName) -> BuildEngine:
    """What builds the engine; megatron-core is imported only where it is asked for."""
    if name == "megatron":
        from yuan_train.megatron.engine import build

        return build
    from yuan_train.train.build import build_engine

    return build_engine


def _check_there(data: DataConfig) -> None:
    """Raise DataError for a tokenizer or a corpus that is missing here: seconds before torch is there."""
    if data.tokenizer is not None and not Path(data.tokenizer).exists():
        Tokenizer.load(data.tokenizer)
    for source in (*data.train, *data.validation):
        if not idx_path(strip_suffix(source.prefix)).exists():
            IndexedDataset(source.prefix)


def _check_installed() -> None:
    """Raise ConfigError unless megatron-core is there."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ImportError:
        found = None
    if found is None:
        raise ConfigError(
            f"engine: megatron, but megatron-core is not installed; {INSTALL}, or use engine: yuan"
        )


def set_log_levels(rank: int) -> None:
    """Rank 0 logs the data and the kernels in use, which the other ranks would only repeat."""
    logging.getLogger("yuan_train").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logging.getLogger("yuan_kernels").setLevel(logging.INFO if rank == 0 else logging.WARNING)
