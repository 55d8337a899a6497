"""Serves a checkpoint's model: /v1/models, /v1/completions, /v1/chat/completions, /health, and a page at / to
try it. With a plan of several ranks it starts those of this machine, as `launch` does; rank 0 answers. Ctrl-C
or SIGTERM ends it."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from yuan_train.cli.launch import add_node_options, check_driver_of_rank, faults_of, start_or_print
from yuan_train.cli.train import run_rank
from yuan_train.config.errors import ConfigError, PlanError, hearing
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import load_plan
from yuan_train.config.rl_plan import names_rl_plan
from yuan_train.parallel.environment import is_rank_of_several, set_rank_defaults
from yuan_train.supervise.launched import telling_other_nodes

if TYPE_CHECKING:
    from yuan_train.cli.train import PrepareRank
    from yuan_train.serve.ranks import ServeJob
    from yuan_train.train.job import Position

logger = logging.getLogger(__name__)

DEFAULT_LENGTH = 4096
INTERRUPTS = 3
"""Presses of Ctrl-C after which the program ends where it stands."""
OF_THE_SERVER = (
    "host",
    "port",
    "slots",
    "queue",
    "max_length",
    "timeout",
    "tokenizer",
    "precision",
    "device",
)
"""Options that each rank is given."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a folder of them")
    add("--plan", metavar="FILE", help="of the same model (default: one process, one card)")
    add("--host", default="127.0.0.1", help="address to listen at; default 127.0.0.1")
    add("--port", type=int, default=8000, help="0: a free one, which is said; default 8000")
    add("--slots", type=int, default=16, metavar="N", help="answers at a time; default 16")
    add("--queue", type=int, default=256, metavar="N", help="answers that may wait; default 256")
    add(
        "--max-length",
        type=int,
        metavar="N",
        help=f"tokens of a prompt and its answer; default the model's, at most {DEFAULT_LENGTH}",
    )
    add("--timeout", type=float, default=600.0, metavar="S", help="of a request; default 600 s")
    add("--tokenizer", metavar="DIR", help="in place of the one in the checkpoint")
    add("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--allow-weights",
        action="store_true",
        help="let requests put other weights in place, as a trainer does; without it no request changes "
        "anything",
    )
    add_node_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Check the options, start the ranks of a plan, or serve as one of them."""
    set_rank_defaults()
    if arguments.plan is not None and not is_rank_of_several():
        with telling_other_nodes(lambda: faults_of(arguments)):
            plan = _check(arguments)
            if plan is not None and (arguments.print or plan.world_size > 1):
                return start_or_print(arguments, plan, _command_of_rank(arguments), device=arguments.device)
    return run_rank(lambda: _read(arguments))


def _read(arguments: argparse.Namespace) -> PrepareRank:
    """Check what is installed, the options and the plan; returns what prepares a rank of them."""
    plan = _check(arguments)

    def prepare_rank(position: Position) -> Callable[[], object]:
        job = _prepare(arguments, plan, position)
        listening = _listen(arguments.host, arguments.port) if position.rank == 0 else None
        return lambda: _serve(job, listening, takes_weights=arguments.allow_weights)

    return prepare_rank


def _check(arguments: argparse.Namespace) -> Plan | None:
    """Check what is installed and the options; the plan, if one is given. Raises YuanError."""
    _check_installed()
    _check_options(arguments)
    return _read_plan(arguments)


def _check_installed() -> None:
    """Raise ConfigError unless the packages of the extra are there."""
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serve needs {' and '.join(missing)}, not installed here; "
            "run: pip install -c constraints.txt -e '.[serve]'"
        )


def _check_options(arguments: argparse.Namespace) -> None:
    least = {"slots": 1, "queue": 0, "max_length": 2, "port": 0}
    for name, most in (("slots", 4096), ("queue", 1 << 20), ("max_length", 1 << 30), ("port", 65535)):
        value = getattr(arguments, name)
        if value is not None and not least[name] <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')}: {value}; wanted {least[name]} to {most}")
    if not 0 < arguments.timeout <= 1e6:
        raise ConfigError(f"--timeout: {arguments.timeout:g}; wanted seconds above 0, at most a million")
    if arguments.print and arguments.plan is None:
        raise ConfigError("--print: prints the commands of a plan's nodes; give --plan")


def _read_plan(arguments: argparse.Namespace) -> Plan | None:
    if arguments.plan is None:
        return None
    if names_rl_plan(arguments.plan):
        raise PlanError(
            f"--plan: {arguments.plan} is a plan of reinforcement learning; give one of the model alone "
            "(yuan-train plan --cluster F --model F)"
        )
    plan = load_plan(arguments.plan)
    if arguments.device != "cpu" and is_rank_of_several():
        check_driver_of_rank(plan)
    return plan


def _command_of_rank(arguments: argparse.Namespace) -> list[str]:
    """What each rank runs: this command, with all that was given."""
    command = ["serve", "--checkpoint", arguments.checkpoint, "--plan", arguments.plan]
    for name in OF_THE_SERVER:
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return [*command, *(["--allow-weights"] if arguments.allow_weights else [])]


def _prepare(arguments: argparse.Namespace, plan: Plan | None, position: Position) -> ServeJob:
    from yuan_train.checkpoint.load import find_checkpoint
    from yuan_train.serve.ranks import Limits, prepare_serve

    checkpoint = find_checkpoint(arguments.checkpoint)
    for note in checkpoint.notes:
        logger.info("note: %s", note)
    length = arguments.max_length or min(checkpoint.model.max_sequence_length, DEFAULT_LENGTH)
    return prepare_serve(
        checkpoint,
        plan,
        position,
        tokenizer=arguments.tokenizer,
        precision=arguments.precision,
        device=arguments.device,
        limits=Limits(arguments.slots, arguments.queue, length, arguments.timeout),
    )


def _listen(host: str, port: int) -> socket.socket:
    """A socket at an address of this machine. Raises ConfigError if it cannot be had."""
    listening = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, UnicodeError) as error:
        if listening is not None:
            listening.close()
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {error}; give a free port (0: any), and an "
            "address of this machine"
        ) from None
    return listening


def _serve(job: ServeJob, listening: socket.socket | None, *, takes_weights: bool) -> None:
    """Serve, or follow rank 0, until that is told to stop."""
    from yuan_train.serve.app import Api, make_app, web_server
    from yuan_train.serve.protocol import Served
    from yuan_train.serve.ranks import opened_lane
    from yuan_train.serve.scheduler import Scheduler

    with _stopping() as stop_requested, opened_lane(job) as lane:
        if listening is None:
            lane.follow()
            return
        model, limits = job.checkpoint.model, job.limits
        scheduler = Scheduler(lane.num_slots(limits.slots), queue=limits.queue)
        served = Served(
            name=model.name,
            created=int(time.time()),
            tokenizer=job.tokenizer,
            vocab_size=model.vocab_size,
            max_length=limits.max_length,
            most_answers=scheduler.most,
            takes_weights=takes_weights,
        )
        api = Api(served, scheduler, timeout_seconds=limits.timeout_seconds)
        with web_server(make_app(api), listening):
            host, port = listening.getsockname()[:2]
            logger.info(
                "serving %s at http://%s:%d/ (%d slots of %d tokens; Ctrl-C ends it)",
                model.name,
                f"[{host}]" if ":" in host else host,
                port,
                scheduler.load()["slots"],
                limits.max_length,
            )
            scheduler.run(lane.asks(), lane.pipeline, stop_requested)
        logger.info("the server has ended")


@contextmanager
def _stopping() -> Iterator[list[bool]]:
    """Inside, SIGTERM and Ctrl-C only set element 0 of the yielded list: rank 0 then ends all."""
    stop_requested = [False]
    left = [INTERRUPTS]

    def request_stop(signum: int, frame: Any) -> None:
        stop_requested[0] = True
        if signum == signal.SIGINT:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

    with hearing({signal.SIGTERM: request_stop, signal.SIGINT: request_stop}):
        yield stop_requested
