"""yuan-train launch --config F --plan F: starts this machine's ranks, or prints torchrun commands.

`launch_hosts.py` starts this on several machines.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from yuan_train.cli.host_options import add_host_options, names_hosts
from yuan_train.cli.launch_hosts import launch_on
from yuan_train.cli.node_faults import NodeFaults
from yuan_train.cli.plan_nodes import (
    DEFAULT_PORT,
    Node,
    named_nodes,
    nodes_of,
    parse_address,
    torchrun_lines,
)
from yuan_train.config.errors import CAUSE, INTERRUPTED, ConfigError, NoDriver, YuanError, say
from yuan_train.config.express import check_engine, express
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import check_plan_of_run, load_plan
from yuan_train.config.rl import is_rl_run, load_rl, policy_run
from yuan_train.config.rl_plan import RlPlan, check_rl_plan_of_run, load_rl_plan, names_rl_plan
from yuan_train.config.run import TrainConfig, load_run
from yuan_train.parallel.environment import (
    TOLD,
    count_cores,
    has_told,
    is_host_name,
    is_job_here,
    network_defaults,
    rank_defaults,
    unknown_host,
)

logger = logging.getLogger(__name__)

GRACE_SECONDS = 8.0
"""How long the other ranks may take to notice that one has failed, and to say so, before they are killed."""

STOPPED_SECONDS = 2.0
"""How much longer than its time-out a rank may be stopped: until then the others may say that it is."""

TERMINAL_SECONDS = 1.0
"""In which a rank that a terminal's Ctrl-C has reached takes no notice of a second one any more."""

_SIGNALS = tuple(-number for number in signal.valid_signals())
"""Exit codes of a process that a signal has ended."""
_OWN_CODES = (0, 1, 2, 3, INTERRUPTED)
"""Exit codes with which a rank has said why."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal a process gets when its parent dies."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "launch",
        help="start this machine's ranks of a plan",
        description="Starts one process for each rank that the plan has on this machine, and exits when they "
        "do. If all cards are simulated (have a slowdown), all ranks run here. With --hosts, --hostfile or "
        "--slurm it starts all nodes of the plan from this machine.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run file")
    parser.add_argument("--plan", required=True, metavar="FILE", help="the plan")
    parser.add_argument(
        "--engine", choices=("yuan", "megatron"), help="who trains, whatever `engine` the run file names"
    )
    add_node_options(parser)
    add_host_options(parser)
    parser.add_argument(
        "--sbatch",
        metavar="OPTIONS",
        help="with --slurm --print: options for each component, --sbatch=--time=1:00",
    )
    parser.add_argument("--meet-at", dest="rendezvous", action=_EarlierName, help=argparse.SUPPRESS)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the run, such as train.steps=50"
    )
    parser.set_defaults(run=run)


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add what `start_or_print` reads."""
    parser.add_argument("--print", action="store_true", help="print one torchrun command per node and exit")
    parser.add_argument("--this-node", metavar="NAME", help="this machine's node in the plan; or `all`")
    parser.add_argument(
        "--rendezvous", metavar="HOST[:PORT]", help="where the ranks meet (default: the plan's first node)"
    )


class _EarlierName(argparse.Action):
    """An option under the name that it had: read for one more release, with a warning."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        logger.warning(
            "%s is now called --%s; the earlier name is read until the next release", option_string, self.dest
        )
        setattr(namespace, self.dest, values)


def run(arguments: argparse.Namespace) -> int:
    """Check config and plan, then start the ranks or print the commands that do."""
    overrides = (*arguments.overrides, *([f"engine={arguments.engine}"] if arguments.engine else []))
    with telling_other_nodes(arguments):
        plan, name, speaker, train = _read_plan(arguments, overrides)
        command = [name, "--config", arguments.config, "--plan", arguments.plan, *overrides]
        spare = _ranks_to_spare(arguments.config, overrides, plan) if isinstance(plan, RlPlan) else range(0)
        if names_hosts(arguments):
            return launch_on(plan, named_nodes(plan), arguments, spare=spare)
        return start_or_print(
            arguments,
            plan,
            command,
            device=train.device,
            speaker=speaker,
            spare=spare,
            timeout_seconds=_patience_of(plan, train),
        )


@contextmanager
def telling_other_nodes(arguments: argparse.Namespace) -> Iterator[None]:
    """Around what a launcher does before its ranks run: what it finds wrong is said, and told to the other
    nodes of its `plan`, which would wait for it."""
    try:
        yield
    except YuanError as error:
        if not arguments.print and not names_hosts(arguments):
            say(error)
            faults = _faults_of(arguments)
            if faults is not None:
                faults.tell(str(error), error.exit_code)
        raise


def _faults_of(arguments: argparse.Namespace) -> NodeFaults | None:
    """What is known of the nodes of a launcher's run, whose files may be wrong; None: not where they meet."""
    with suppress(YuanError):
        try:
            plan = (load_rl_plan if names_rl_plan(arguments.plan) else load_plan)(arguments.plan)
            nodes = _nodes_for(plan, arguments)
        except YuanError:
            if arguments.rendezvous is None:
                return None
            host, port = parse_address(arguments.rendezvous)
            return NodeFaults(None, (), 0, (host, port or DEFAULT_PORT))
        host, port = parse_address(arguments.rendezvous or nodes[0].name)
        address = host, port or DEFAULT_PORT
        try:
            node = _this_node(nodes, arguments.this_node)
        except ConfigError:
            # It may be the plan of another run.
            return NodeFaults(None, (), 0, address)
        return NodeFaults(node.name, node.ranks, plan.world_size, address)
    return None


def start_or_print(
    arguments: argparse.Namespace,
    plan: Plan | RlPlan,
    command: Sequence[str],
    *,
    device: str,
    speaker: int = 0,
    spare: Sequence[int] = (),
    timeout_seconds: float = math.inf,
) -> int:
    """Start this machine's ranks of a plan, each with `yuan-train COMMAND`, or print what does on each node.

    `device` as `train.device`, the others as `start_ranks`. Returns the exit code. Raises YuanError.
    """
    nodes = _nodes_for(plan, arguments)
    if arguments.print:
        _note_unknown_hosts(nodes, arguments.rendezvous)
        for line in torchrun_lines(nodes, command, rendezvous=arguments.rendezvous):
            print(line)
        return 0
    node = _this_node(nodes, arguments.this_node)
    if device != "cpu" and len(node.ranks) == plan.world_size:
        # Else the ranks find it, and tell those on other nodes.
        check_driver(plan, node.ranks)
    host, port = _rendezvous_address(nodes, node, arguments.rendezvous)
    if not is_host_name(host):
        raise ConfigError(unknown_host(host))
    if 0 in node.ranks:
        _check_port(port)
    size = plan.world_size
    return start_ranks(
        node,
        command,
        world_size=size,
        address=(host, port),
        speaker=speaker,
        spare=spare,
        timeout_seconds=timeout_seconds,
    )


def _nodes_for(plan: Plan | RlPlan, arguments: argparse.Namespace) -> list[Node]:
    return nodes_of(plan) if arguments.this_node in (None, "all") else named_nodes(plan)


def _patience_of(plan: Plan | RlPlan, train: TrainConfig) -> float:
    """Seconds that each rank waits for another at least: two steps of the forecast, if those are more."""
    plans = plan.plans.values() if isinstance(plan, RlPlan) else (plan,)
    steps = [2 * own.forecast.step_seconds for own in plans if own.forecast is not None]
    return max(train.timeout, *steps) if steps else train.timeout


def _ranks_to_spare(config: str, overrides: Sequence[str], roles: RlPlan) -> range:
    """The ranks whose loss the policy decides about: those of engines, if it may go on without some."""
    goes_on = load_rl(config, tuple(overrides)).generation.on_lost_engine == "go_on"
    return roles.role_ranks.get("generation", range(0)) if goes_on else range(0)


def _read_plan(
    arguments: argparse.Namespace, overrides: Sequence[str]
) -> tuple[Plan | RlPlan, str, int, TrainConfig]:
    """The plan, the command that each of its ranks runs, the rank that logs, and the run's `train`.

    Raises PlanError if the plan is not the run's.
    """
    if names_rl_plan(arguments.plan):
        roles = load_rl_plan(arguments.plan)
        run = load_rl(arguments.config, tuple(overrides))
        check_rl_plan_of_run(roles, run)
        return roles, "rl", 0, run.train
    plan = load_plan(arguments.plan)
    if is_rl_run(arguments.config):
        run = load_rl(arguments.config, tuple(overrides))
        length = max(plan.sequence_length, run.sequence_length)
        check_plan_of_run(plan, policy_run(run, sequence_length=length))
        return plan, "rl", 0, run.train
    config = load_run(arguments.config, tuple(overrides))
    check_plan_of_run(plan, config)
    check_engine(plan, config)
    # megatron-core numbers the ranks in its own order, and its rank 0 logs.
    speaker = express(plan).rank_of.index(0) if config.engine == "megatron" else 0
    return plan, "train", speaker, config.train


def check_driver(plan: Plan | RlPlan, ranks: Sequence[int]) -> None:
    """Raise NoDriver where none of these ranks could find its card here: the machine has no driver of any.

    Said at once; each rank would find it after it has imported torch, as it finds all else about its card.
    """
    roles = plan.plans.values() if isinstance(plan, RlPlan) else (plan,)
    needs = [role.needs_card(entry) for role in roles for entry in role.ranks]
    real = [entry for entry in plan.ranks if entry.rank in ranks and needs[entry.rank]]
    if not real or has_driver():
        return
    listed = ", ".join(f"rank {entry.rank} ({entry.device}: {entry.type})" for entry in real[:4])
    raise NoDriver(
        f"{listed}{', ...' if len(real) > 4 else ''}: the plan has cards there, but this machine has no "
        "driver of one. Start this where they are (--this-node names the node), or set train.device=cpu, and "
        "the ranks compute on the CPU"
    )


def check_driver_of_rank(plan: Plan | RlPlan) -> None:
    """As `check_driver`, in a rank: of its own card; of all if all ranks are here, for each finds it."""
    rank = os.environ.get("RANK", "0")
    check_driver(plan, range(plan.world_size) if is_job_here() else [int(rank)] if rank.isdigit() else [])


def has_driver() -> bool:
    """Whether a driver of NVIDIA's or AMD's cards is there, without which torch finds no card."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True


def _this_node(nodes: list[Node], wanted: str | None) -> Node:
    """The node of this machine: by the option --this-node, else the only one, else by host name."""
    if wanted == "all":
        return Node("all", tuple(rank for node in nodes for rank in node.ranks))
    names = [node.name for node in nodes]
    name = wanted or (names[0] if len(nodes) == 1 else socket.gethostname())
    if name not in names:
        raise ConfigError(
            f"the plan has the nodes {', '.join(names)}; this machine is called {name}. "
            "Give its name in the plan with --this-node NAME (or `all` to start every rank here)"
        )
    return nodes[names.index(name)]


def _rendezvous_address(nodes: list[Node], node: Node, rendezvous: str | None) -> tuple[str, int]:
    """Host and port of the rendezvous: as given, else on this machine, else on the first node."""
    if rendezvous is not None:
        host, port = parse_address(rendezvous)
        return host, port or DEFAULT_PORT
    if len(nodes) == 1 or node.name == "all":
        return "127.0.0.1", free_port()
    return nodes[0].name, DEFAULT_PORT


def _note_unknown_hosts(nodes: Sequence[Node], rendezvous: str | None) -> None:
    """Say whether the lines that are printed name a meeting point that this machine does not know."""
    host, _ = parse_address(rendezvous or nodes[0].name)
    if (rendezvous or len(nodes) > 1) and not is_host_name(host):
        logger.warning(
            "note: %r is no host name on this machine; it must be one on every node of the plan, or give the "
            "address of %s with --rendezvous HOST[:PORT]",
            host,
            nodes[0].name,
        )


def _check_port(port: int) -> None:
    """Raise ConfigError unless a port of this machine is free, at which the first rank will listen."""
    fault = None
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family) as probe:
                # As torch does: connections of a run that has just ended are no hindrance.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT and error.errno != errno.EADDRNOTAVAIL:
                fault = error
    if fault is not None:
        raise ConfigError(
            f"port {port} of this machine cannot be had ({fault.strerror}), so the ranks cannot meet there: "
            "give every node another one, --rendezvous HOST:PORT"
        )


def free_port() -> int:
    """A free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class _Child:
    """The process of a rank."""

    rank: int
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None
    """Its captured output; None if it writes to this process's streams."""
    stopped_at: float | None = None
    """Since when it is seen stopped by a signal; None: it runs."""


def start_ranks(
    node: Node,
    command: Sequence[str],
    *,
    world_size: int,
    address: tuple[str, int],
    speaker: int = 0,
    spare: Sequence[int] = (),
    timeout_seconds: float = math.inf,
) -> int:
    """Run the ranks of a node until they exit; returns 0, or the exit code of the rank at fault.

    The rank `speaker`, or on another node the first, writes to this process's streams. Each rank runs
    `yuan-train COMMAND`; `address` is the rendezvous, host and port. Forwards SIGTERM to the ranks. A rank of
    `spare` that fails once its links stand leaves the others as they are. A rank that is stopped for longer
    than `timeout_seconds`, in which the others give it up, is killed: it would never hear of the end.
    """
    children: list[_Child] = []
    faults = NodeFaults(node.name, node.ranks, world_size, address)

    def forward_signal(signum: int, frame: object) -> None:
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signum)

    told = tempfile.TemporaryDirectory(prefix="yuan-train-")
    previous = signal.signal(signal.SIGTERM, forward_signal)
    try:
        for local_rank, rank in enumerate(node.ranks):
            environment = _environment(node, rank, local_rank, world_size, *address)
            environment[TOLD] = told.name
            speaks = rank == (speaker if speaker in node.ranks else node.ranks[0])
            children.append(_start_rank(command, rank, environment, inherits_output=speaks))
        patience = timeout_seconds + STOPPED_SECONDS
        return _wait(
            children,
            lambda child: child.rank in spare and has_told(told.name, child.rank, "linked"),
            lambda child: has_told(told.name, child.rank, "tells") or _tell_end(child, faults),
            patience,
        )
    except KeyboardInterrupt:
        _interrupt(children)
        if not all(has_told(told.name, child.rank, "tells") for child in children):
            faults.tell("interrupted (Ctrl-C)", INTERRUPTED)
        raise
    finally:
        _kill(children)
        told.cleanup()
        signal.signal(signal.SIGTERM, previous)
        for child in children:
            if child.output is not None:
                child.output.close()


def _environment(
    node: Node, rank: int, local_rank: int, world_size: int, host: str, port: int
) -> dict[str, str]:
    """The environment of a rank, with the variables that torchrun sets."""
    return {
        **os.environ,
        **rank_defaults(os.environ, local_ranks=len(node.ranks), num_cores=count_cores()),
        **(network_defaults(os.environ, host) if len(node.ranks) < world_size else {}),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(len(node.ranks)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _start_rank(
    command: Sequence[str], rank: int, environment: dict[str, str], *, inherits_output: bool
) -> _Child:
    """Start the process of a rank; unless it inherits our streams, its output goes to a temporary file."""
    output = None if inherits_output else tempfile.TemporaryFile()
    process = subprocess.Popen(
        [sys.executable, "-m", "yuan_train", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if inherits_output else output,
        stderr=None if inherits_output else output,
        preexec_fn=_terminate_with_launcher,
    )
    return _Child(rank, process, output)


def _terminate_with_launcher() -> None:
    """In the new process: get SIGTERM, so save and exit, if the launcher is killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(
    children: list[_Child],
    is_spared: Callable[[_Child], bool],
    tell: Callable[[_Child], object],
    patience: float,
) -> int:
    """Wait for all ranks and return the exit code; `tell` has the other nodes hear of the first failure.

    After a failure the other ranks get a grace period and are then killed; the failure is printed last. One
    that is spared is printed at once, and the others go on; if they end well, so has the job.
    """
    deadline = None
    spared: list[_Child] = []
    runs = True
    while runs:
        # Once more when the last one has ended, which may be the first that fails.
        runs = any(child.process.poll() is None for child in children)
        for child in children:
            _end_if_stopped(child, patience)
            if child not in spared and child.process.poll() in (1, *_SIGNALS) and is_spared(child):
                spared.append(child)
                _report(child)
        ended = [child for child in children if child not in spared and child.process.poll()]
        if deadline is None and ended:
            tell(ended[0])
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.05 if runs else 0.0)
    failed = [child for child in children if child.process.poll() not in (None, 0)]
    others = [child for child in children if child not in spared]
    _kill(children)
    if not failed or (others and not any(child in failed for child in others)):
        return 0
    culprit = min(failed, key=_blame_order)
    _report(culprit)
    return culprit.process.returncode if culprit.process.returncode > 0 else 1


def _end_if_stopped(child: _Child, patience: float) -> None:
    """Kill a rank that SIGSTOP or a like signal has stopped for more than `patience` seconds, and say so."""
    if not _is_stopped(child):
        child.stopped_at = None
    elif child.stopped_at is None:
        child.stopped_at = time.monotonic()
    elif time.monotonic() > child.stopped_at + patience:
        print(
            f"error: rank {child.rank} was stopped by a signal (SIGSTOP or like it) for longer than "
            "train.timeout, and is killed",
            file=sys.stderr,
        )
        child.process.kill()
        child.process.wait()


def _is_stopped(child: _Child) -> bool:
    if child.process.poll() is not None:
        return False
    try:
        return os.waitid(os.P_PID, child.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        # It has ended just now.
        return False


def _blame_order(child: _Child) -> tuple[int, bool, int]:
    """Sort key: ranks with bad input first, then ranks that were killed; the others fail because of these,
    those last that say so."""
    code = child.process.returncode
    follows = any(line.startswith(f"error: {CAUSE}") for line in _captured(child))
    return (0 if code in (2, 3) else 1 if code < 0 else 2), follows, child.rank


def _tell_end(child: _Child, faults: NodeFaults) -> None:
    """Tell the other nodes the end of a rank that has not come to tell it by itself."""
    code, said = child.process.returncode, _captured(child)
    why = _why_ended(code) or (said[-1].removeprefix("error: ") if said else f"ended with exit code {code}")
    faults.tell("interrupted (Ctrl-C)" if code == INTERRUPTED else why, max(code, 1), rank=child.rank)


def _why_ended(code: int) -> str | None:
    """What has ended a rank, if it cannot have said so."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code not in _OWN_CODES:
        return f"was ended with exit code {code}, by something that has not said why"
    return None


def _report(child: _Child) -> None:
    """Print why a rank failed: the signal, and the end of its captured output."""
    why = _why_ended(child.process.returncode)
    if why is not None:
        print(f"error: rank {child.rank} {why}", file=sys.stderr)
    for line in _captured(child)[-30:]:
        print(f"rank {child.rank}: {line}", file=sys.stderr)


def _interrupt(children: list[_Child]) -> None:
    """Have the ranks end after Ctrl-C, and tell those on other nodes whose end it was; another one kills.

    A terminal has interrupted them too; those that do not end by that are asked here.
    """
    for seconds in (TERMINAL_SECONDS, GRACE_SECONDS):
        deadline = time.monotonic() + seconds
        while any(child.process.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        for child in children:
            if child.process.poll() is None and seconds == TERMINAL_SECONDS:
                child.process.send_signal(signal.SIGINT)


def _captured(child: _Child) -> list[str]:
    """The lines of a rank's output, if it is captured."""
    if child.output is None:
        return []
    child.output.seek(0)
    return child.output.read().decode(errors="replace").splitlines()


def _kill(children: list[_Child]) -> None:
    """Kill the ranks that still run, and wait for all."""
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()
