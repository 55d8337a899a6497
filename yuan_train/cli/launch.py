"""yuan-train launch --config F --plan F: starts this machine's ranks, or prints a torchrun line per node."""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from yuan_train.config.errors import ConfigError, PlanError
from yuan_train.config.plan import Plan, RankPlan, check_belongs, load_plan
from yuan_train.config.run import load_run

GRACE_SECONDS = 10.0
"""How long the other ranks may take to notice that one has failed, before they are ended."""

DEFAULT_PORT = 29500
PR_SET_PDEATHSIG = 1


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "launch",
        help="start this machine's ranks of a plan",
        description="Starts one process per rank that the plan gives to this machine, and ends when they "
        "end. Simulated cards (with a slowdown) all run here.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run file")
    parser.add_argument("--plan", required=True, metavar="FILE", help="the plan")
    parser.add_argument("--print", action="store_true", help="print one torchrun line per node and stop")
    parser.add_argument("--this-node", metavar="NAME", help="node of the plan that this machine is; or `all`")
    parser.add_argument(
        "--meet-at", metavar="HOST[:PORT]", help="where ranks meet (default: the plan's first node)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the run")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Node:
    """A machine and the ranks that the plan gives to it."""

    name: str
    ranks: tuple[int, ...]


def run(arguments: argparse.Namespace) -> int:
    """Check config and plan, then start the ranks or print how."""
    plan = load_plan(arguments.plan)
    check_belongs(plan, load_run(arguments.config, tuple(arguments.overrides)))
    nodes = nodes_of(plan)
    command = ["train", "--config", arguments.config, "--plan", arguments.plan, *arguments.overrides]
    if arguments.print:
        for line in torchrun_lines(nodes, command, meet_at=arguments.meet_at):
            print(line)
        return 0
    node = _this_node(nodes, arguments.this_node)
    host, port = _meeting_place(nodes, node, arguments.meet_at)
    return start_ranks(node, command, world_size=plan.world_size, host=host, port=port)


def nodes_of(plan: Plan) -> list[Node]:
    """The machines of a plan, in the order of ranks; one machine if all its cards are simulated."""
    types = [plan.device_type(entry.rank) for entry in plan.ranks]
    if all(device is not None and device.slowdown is not None for device in types):
        return [Node("all", tuple(range(plan.world_size)))]
    nodes: dict[str, list[int]] = {}
    for entry in plan.ranks:
        nodes.setdefault(_node_name(entry), []).append(entry.rank)
    for name, ranks in nodes.items():
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            raise PlanError(f"ranks: those of node {name} are {ranks}; ranks must be numbered node by node")
    return [Node(name, tuple(ranks)) for name, ranks in nodes.items()]


def torchrun_lines(nodes: Sequence[Node], command: Sequence[str], *, meet_at: str | None) -> list[str]:
    """What to run on each node; nodes may have unequal numbers of cards."""
    host, port = _split_place(meet_at or ("127.0.0.1" if len(nodes) == 1 else nodes[0].name))
    return [
        f"torchrun --nnodes={len(nodes)} --node-rank={i} --nproc-per-node={len(node.ranks)} "
        f"--master-addr={host} --master-port={port or DEFAULT_PORT} -m yuan_train {shlex.join(command)}"
        + ("" if len(nodes) == 1 else f"    # on {node.name}")
        for i, node in enumerate(nodes)
    ]


def _node_name(entry: RankPlan) -> str:
    return entry.device.rpartition("/")[0] or entry.device


def _this_node(nodes: list[Node], wanted: str | None) -> Node:
    if wanted == "all":
        return Node("all", tuple(rank for node in nodes for rank in node.ranks))
    names = [node.name for node in nodes]
    name = wanted or (names[0] if len(nodes) == 1 else socket.gethostname())
    if name not in names:
        raise ConfigError(
            f"the plan has the nodes {', '.join(names)}; this machine is called {name}. "
            "Say which it is with --this-node NAME (or `all` to start every rank here)"
        )
    return nodes[names.index(name)]


def _meeting_place(nodes: list[Node], node: Node, meet_at: str | None) -> tuple[str, int]:
    if meet_at is not None:
        host, port = _split_place(meet_at)
        return host, port or DEFAULT_PORT
    if len(nodes) == 1 or node.name == "all":
        return "127.0.0.1", free_port()
    return nodes[0].name, DEFAULT_PORT


def _split_place(place: str) -> tuple[str, int | None]:
    host, colon, port = place.partition(":")
    if colon and not port.isdigit():
        raise ConfigError(f"--meet-at: wanted HOST:PORT, got {place!r}")
    return host, int(port) if colon else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes] | None
    """What the rank said; None if it speaks for itself."""


def start_ranks(node: Node, command: Sequence[str], *, world_size: int, host: str, port: int) -> int:
    """Run the ranks of a node to their end; the exit code is that of the rank at fault."""
    children: list[_Child] = []

    def pass_on(signum: int, frame: object) -> None:
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signum)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        for local_rank, rank in enumerate(node.ranks):
            environment = _environment(node, rank, local_rank, world_size, host, port)
            children.append(_start_rank(command, rank, environment, speaks=local_rank == 0))
        return _wait(children)
    finally:
        _end(children)
        signal.signal(signal.SIGTERM, before)
        for child in children:
            if child.errors is not None:
                child.errors.close()


def _environment(
    node: Node, rank: int, local_rank: int, world_size: int, host: str, port: int
) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // len(node.ranks))
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(len(node.ranks)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _start_rank(command: Sequence[str], rank: int, environment: dict[str, str], *, speaks: bool) -> _Child:
    errors = None if speaks else tempfile.TemporaryFile()
    process = subprocess.Popen(
        [sys.executable, "-m", "yuan_train", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if speaks else errors,
        stderr=None if speaks else errors,
        preexec_fn=_end_with_launcher,
    )
    return _Child(rank, process, errors)


def _end_with_launcher() -> None:
    """In the new process: should the launcher be killed, save and end as on SIGTERM (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(children: list[_Child]) -> int:
    """Wait for all; once one fails the others get a grace period, and the failures are told last."""
    deadline = None
    while any(child.process.poll() is None for child in children):
        if deadline is None and any(child.process.poll() for child in children):
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.05)
    failed = [child for child in children if child.process.poll() not in (None, 0)]
    _end(children)
    if not failed:
        return 0
    culprit = min(failed, key=_innocence)
    _tell(culprit)
    return culprit.process.returncode if culprit.process.returncode > 0 else 1


def _innocence(child: _Child) -> tuple[int, int]:
    """Ask first who met bad input, then who was killed: the others fail by the silence of these."""
    code = child.process.returncode
    return (0 if code in (2, 3) else 1 if code < 0 else 2), child.rank


def _tell(child: _Child) -> None:
    """Print why a rank failed, unless it has done so itself."""
    code = child.process.returncode
    if code < 0:
        print(f"error: rank {child.rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    if child.errors is not None:
        child.errors.seek(0)
        for line in child.errors.read().decode(errors="replace").splitlines()[-30:]:
            print(f"rank {child.rank}: {line}", file=sys.stderr)


def _end(children: list[_Child]) -> None:
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait()
