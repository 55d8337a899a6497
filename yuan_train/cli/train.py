"""Trains a model. Without a plan, one process trains the whole model. With one, start all ranks with
`yuan-train launch` or torchrun. SIGTERM saves a checkpoint and exits with 0."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from yuan_train.cli.launch import check_driver_of_rank
from yuan_train.config.errors import INSTALL, ConfigError, NoDriver, say
from yuan_train.config.plan_constraints import load_plan
from yuan_train.config.run import DataConfig, EngineName, load_run
from yuan_train.data.indexed import IndexedDataset, idx_path, strip_suffix
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.parallel.environment import is_job_here, is_rank_of_several, set_rank_defaults

if TYPE_CHECKING:
    from yuan_train.train.engine import BuildEngine
    from yuan_train.train.job import Position

    PrepareRank = Callable[[Position], Callable[[], object]]
    """Prepares what a rank does at its place, and returns what does it."""

TELL_SECONDS = 4.0
"""How long a process for which there is no card may take to import torch and to tell that to the others."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="the run file")
    add("--plan", metavar="FILE", help="the plan, from `yuan-train plan` or written by hand")
    add("overrides", nargs="*", metavar="key=value", help="changes to the run, such as train.steps=50")


def run(arguments: argparse.Namespace) -> int:
    """Check the files, then train."""
    set_rank_defaults()
    return run_rank(lambda: _read(arguments))


def _read(arguments: argparse.Namespace) -> PrepareRank:
    """Check the files; returns what prepares the run of them."""
    config = load_run(arguments.config, tuple(arguments.overrides))
    plan = load_plan(arguments.plan) if arguments.plan else None
    if config.engine == "megatron":
        _check_installed()
    if plan is not None and config.train.device != "cpu":
        check_driver_of_rank(plan)
    _check_there(config.data)

    def prepare_rank(position: Position) -> Callable[[], object]:
        from yuan_train.train.job import prepare
        from yuan_train.train.run import train

        job = prepare(config, plan, position)
        return lambda: train(job, _engine(config.engine))

    return prepare_rank


def run_rank(read: Callable[[], PrepareRank]) -> int:
    """Read a rank's files, prepare what it does, and do it; `read` does without torch. Returns 0.

    What one rank finds wrong ends all, and is printed once per machine.
    """
    prepare_rank: PrepareRank | None = None
    fault: Exception | KeyboardInterrupt | None = None
    try:
        prepare_rank = read()
    except Exception as error:
        _say_without_torch(error)
        fault = error
    with _ending_in_time(fault):
        from yuan_train.train.ending import fail_together, telling_interrupts
        from yuan_train.train.job import find_position

        position = find_position()
        _set_log_levels(position.rank)
        if prepare_rank is not None:
            try:
                start = prepare_rank(position)
            except (Exception, KeyboardInterrupt) as error:
                fault = error
            else:
                with telling_interrupts(position):
                    start()
                return 0
        assert fault is not None
        fail_together(fault, position)


def _say_without_torch(error: Exception) -> None:
    """Say what this rank has found wrong, once on each machine, before seconds go by in which torch is
    imported to tell it to the others. Raises the error where nobody has to be told: alone, and of a machine
    without the plan's cards if all ranks are here, each of which finds it by itself."""
    alone = not is_rank_of_several()
    if alone or (isinstance(error, NoDriver) and is_job_here()):
        raise error
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(error)


@contextmanager
def _ending_in_time(fault: BaseException | None) -> Iterator[None]:
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


def _set_log_levels(rank: int) -> None:
    """Rank 0 logs the data and the kernels in use, which the other ranks would only repeat."""
    for name in ("yuan_train", "yuan_kernels"):
        logging.getLogger(name).setLevel(logging.INFO if rank == 0 else logging.WARNING)
