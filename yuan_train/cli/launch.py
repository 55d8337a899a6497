"""Starts one process for each rank that the plan has on this machine, and exits when they do. If all cards
are simulated (have a slowdown), all ranks run here. With --hosts, --hostfile or --slurm it starts all nodes
of the plan from this machine."""

from __future__ import annotations

import argparse
import ctypes
import errno
import logging
import math
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from yuan_train.cli.launch_hosts import (
    DEFAULT_PORT,
    add_host_options,
    launch_on,
    meeting_address,
    named_nodes,
    names_hosts,
    nodes_of,
    parse_address,
    torchrun_lines,
)
from yuan_train.config.errors import ConfigError, NoDriver, YuanError
from yuan_train.config.express import check_engine, express
from yuan_train.config.plan import Node, Plan, is_real_card
from yuan_train.config.plan_constraints import check_plan_of_run, load_plan
from yuan_train.config.rl import is_rl_run, load_rl, policy_run
from yuan_train.config.rl_plan import RlPlan, check_rl_plan_of_run, load_rl_plan, names_rl_plan
from yuan_train.config.run import TrainConfig, load_run
from yuan_train.parallel.environment import free_port, is_host_name, is_job_here, unknown_host
from yuan_train.parallel.grid import Grid
from yuan_train.supervise.launched import NodeFaults, start_ranks, telling_other_nodes

logger = logging.getLogger(__name__)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="the run file")
    add("--plan", required=True, metavar="FILE", help="the plan")
    add("--engine", choices=("yuan", "megatron"), help="who trains, whatever `engine` the run file names")
    add_node_options(parser)
    add_host_options(parser)
    add(
        "--sbatch",
        metavar="OPTIONS",
        help="with --slurm --print: options for each component, --sbatch=--time=1:00",
    )
    add("--meet-at", dest="rendezvous", action=_EarlierName, help=argparse.SUPPRESS)
    add("overrides", nargs="*", metavar="key=value", help="changes to the run, such as train.steps=50")


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
    with telling_other_nodes(lambda: None if names_hosts(arguments) else faults_of(arguments)):
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


def faults_of(arguments: argparse.Namespace) -> NodeFaults | None:
    """What is known of the nodes of a launcher's run, whose files may be wrong; None: not where they meet, or
    this command starts no rank of them."""
    if arguments.print:
        return None
    known: tuple[str | None, tuple[int, ...], int] = None, (), 0
    meeting = arguments.rendezvous
    with suppress(YuanError):
        plan = (load_rl_plan if names_rl_plan(arguments.plan) else load_plan)(arguments.plan)
        nodes = _nodes_for(plan, arguments)
        meeting = meeting or nodes[0].name
        # A node that it does not have may be one of another plan.
        node = _this_node(nodes, arguments.this_node)
        known = node.name, node.ranks, plan.world_size
    with suppress(YuanError):
        return NodeFaults(*known, meeting_address(meeting)) if meeting else None
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
    return start_ranks(
        node,
        command,
        world_size=plan.world_size,
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
    Grid(plan).check_resident_parts()
    # megatron-core numbers the ranks in its own order, and its rank 0 logs.
    speaker = express(plan).rank_of.index(0) if config.engine == "megatron" else 0
    return plan, "train", speaker, config.train


def check_driver(plan: Plan | RlPlan, ranks: Sequence[int]) -> None:
    """Raise NoDriver where none of these ranks could find its card here: the machine has no driver of any.

    Said at once; each rank would find it after it has imported torch, as it finds all else about its card.
    """
    roles = plan.plans.values() if isinstance(plan, RlPlan) else (plan,)
    needs = [is_real_card(entry.type, role.find_type(entry.type)) for role in roles for entry in role.ranks]
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
        called = "--this-node says" if wanted else "this machine is called"
        raise ConfigError(
            f"the plan has the nodes {', '.join(names)}; {called} {name}. Give its name in the plan with "
            "--this-node NAME (or `all` to start every rank here); the plan may leave this node out"
        )
    return nodes[names.index(name)]


def _rendezvous_address(nodes: list[Node], node: Node, rendezvous: str | None) -> tuple[str, int]:
    """Host and port of the rendezvous: as given, else on this machine, else on the first node."""
    if rendezvous is not None:
        return meeting_address(rendezvous)
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
