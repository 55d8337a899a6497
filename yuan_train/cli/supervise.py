"""Starts an agent on each node of the cluster. The agents plan for the nodes that answer, start the ranks,
and when nodes go or come plan anew and go on from the newest checkpoint. What was decided, and why, is in
supervise.jsonl of the log directory. SIGTERM and Ctrl-C save and end."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from yuan_train.config.cluster import Cluster, load_cluster
from yuan_train.config.errors import INTERRUPTED, ConfigError, hearing
from yuan_train.config.load import dump, write_text
from yuan_train.config.profile import read_profiles
from yuan_train.config.rl import is_rl_run
from yuan_train.machine.hosts import ssh_words
from yuan_train.parallel.environment import SUPERVISED, holding

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from yuan_train.config.plan import Plan
    from yuan_train.config.profile import Profile
    from yuan_train.config.run import RunConfig
    from yuan_train.planner.costs.workload import PlanProblem
    from yuan_train.supervise.agent import Supervised
    from yuan_train.supervise.launched import Nursery

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
"""How long the agent that holds the store waits for the others to read how the run has ended."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--cluster", required=True, metavar="F", help="the cluster file, or its name")
    add("--config", required=True, metavar="F", help="the run file")
    add("--profile", metavar="F[,F]", help="measured times, as `plan` takes them")
    add("--nodes", metavar="A,B,C", help="the nodes to start (default: all of the cluster)")
    add("--ssh", default="ssh", metavar="CMD", help="called as CMD HOST COMMAND... (ssh)")
    add("--this-node", metavar="NAME", help="be the agent of one node, and start no others")
    add("--meet", metavar="HOST:PORT", help="where agents meet (default: a port of this machine)")
    add("overrides", nargs="*", metavar="key=value", help="changes to the run, such as train.steps=50")


def run(arguments: argparse.Namespace) -> int:
    """Check the files; then start the agents of all nodes, or be one."""
    from yuan_train.cli.plan import read_run_config

    if is_rl_run(arguments.config):
        raise ConfigError(
            f"--config {arguments.config}: supervise is for training, not reinforcement learning"
        )
    run_config = read_run_config(arguments.config, None, tuple(arguments.overrides))
    for key, value in (("log", run_config.log.directory), ("checkpoint", run_config.checkpoint.directory)):
        if value is None:
            raise ConfigError(f"{key}.directory: not set; supervise needs it, on a disk that all nodes see")
    cluster = load_cluster(arguments.cluster)
    nodes = _nodes(cluster, arguments.nodes)
    if arguments.this_node is not None:
        return _be_agent(arguments, run_config, cluster, nodes)
    # The ranks would find it too, but the journal and the plans would be both runs' by then.
    with holding(str(run_config.log.directory), ".supervised", "another supervise"):
        return _start_all(arguments, nodes)


def _nodes(cluster: Cluster, wanted: str | None) -> tuple[str, ...]:
    """The nodes that take part. Raises ConfigError for one that the cluster does not have."""
    known = tuple(cluster.groups)
    if wanted is None:
        return known
    nodes = tuple(name.strip() for name in wanted.split(",") if name.strip())
    for name in nodes:
        if name not in known:
            raise ConfigError(f"--nodes: {name!r} is no node of the cluster; it has {', '.join(known)}")
    if not nodes:
        raise ConfigError(f"--nodes: names no node; wanted some of {', '.join(known)}")
    return tuple(name for name in known if name in nodes)


# --- one agent -------------------------------------------------------------------------------------------


def _be_agent(
    arguments: argparse.Namespace, run_config: RunConfig, cluster: Cluster, nodes: Sequence[str]
) -> int:
    """Be the agent of --this-node until the run ends."""
    if arguments.this_node not in nodes:
        raise ConfigError(f"--this-node: {arguments.this_node!r} is none of {', '.join(nodes)}")
    if arguments.meet is None:
        raise ConfigError("--this-node: give --meet HOST:PORT too, the same on all nodes")
    address = _address(arguments.meet)
    os.environ[SUPERVISED] = arguments.meet
    profile = read_profiles(arguments.profile, cluster)
    from yuan_train.supervise.launched import RANK_MODULES, Nursery

    with closing(Nursery(RANK_MODULES["train"])) as nursery:
        job = _job(arguments, run_config, cluster, nodes, profile, nursery)
        return _supervise(job, arguments.this_node, cluster, address)


def _job(
    arguments: argparse.Namespace,
    run_config: RunConfig,
    cluster: Cluster,
    nodes: Sequence[str],
    profile: Profile | None,
    nursery: Nursery,
) -> Supervised:
    """The run as an agent knows it: how it is planned, priced and started."""
    from yuan_train.cli.plan import problem_of
    from yuan_train.planner.search.what_if import Pace, plan_at_pace, step_at_pace, with_nodes
    from yuan_train.supervise.agent import Supervised

    def problem_here(here: Sequence[str]) -> PlanProblem:
        gone = {name: None for name in cluster.groups if name not in here}
        return problem_of(run_config, with_nodes(cluster, gone), profile)

    # A move is weighed with the plan that it then is, and a node that comes back is one that was there.
    @cache
    def find(here: tuple[str, ...], pace: tuple[tuple[str, float], ...]) -> Plan:
        search, size = run_config.feasible_search, run_config.train.micro_batch_size
        copies = run_config.host_copies
        return plan_at_pace(problem_here(here), dict(pace), search, micro_batch_size=size, copies=copies)

    def find_plan(here: Sequence[str], pace: Pace) -> Plan:
        return find(tuple(here), tuple(sorted(pace.items())))

    def price_plan(plan: Plan, here: Sequence[str], pace: Pace) -> float:
        return step_at_pace(problem_here(here), pace, plan)

    return Supervised(
        run=run_config,
        nodes=nodes,
        find_plan=find_plan,
        price_plan=price_plan,
        nursery=nursery,
    )


def _supervise(job: Supervised, node: str, cluster: Cluster, address: tuple[str, int]) -> int:
    """Take part, and hold the store if it is to be here."""
    from yuan_train.report.run_log import CLUSTER
    from yuan_train.supervise.agent import run_agent
    from yuan_train.supervise.room import open_store_if_here

    held = open_store_if_here(*address)
    with ExitStack() as own:
        if held is not None:
            # Refused before the others, which wait for this agent so long, begin without it.
            within = job.run.supervise.grace / 2
            own.enter_context(holding(job.folder, ".supervised", "another supervise", within))
            own.callback(time.sleep, LEAVE_SECONDS)
        with suppress(ConfigError):
            # For `show` and `watch`, without which the run goes on.
            write_text(job.folder / CLUSTER, dump(cluster))
        return run_agent(job, node, address)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--meet: wanted HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


# --- the agents of all nodes -----------------------------------------------------------------------------


def _start_all(arguments: argparse.Namespace, nodes: Sequence[str]) -> int:
    """Hold the store, keep an agent running on each node, and return the run's exit code."""
    from yuan_train.supervise.room import open_store

    here = socket.gethostname()
    host, port = _address(arguments.meet) if arguments.meet else (here, 0)
    if arguments.meet is None and all(_is_here(node, here) for node in nodes):
        host = "127.0.0.1"
    store = open_store(host, port)
    meeting = f"{host}:{store.port}"
    lines = {node: _line(arguments, node, meeting, is_here=_is_here(node, here)) for node in nodes}
    return keep_agents(lines, store)


def _is_here(node: str, here: str) -> bool:
    return node in (here, here.partition(".")[0], "localhost", "127.0.0.1")


def _line(arguments: argparse.Namespace, node: str, meeting: str, *, is_here: bool) -> list[str]:
    """The command that is the agent of a node; on another machine in the same folder, over ssh."""
    words = [sys.executable, "-m", "yuan_train", "supervise", "--this-node", node, "--meet", meeting]
    for name in ("cluster", "config", "profile", "nodes"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name}", value]
    words += arguments.overrides
    if is_here:
        return words
    from pathlib import Path

    return [*ssh_words(arguments.ssh), node, *map(shlex.quote, ["env", "-C", str(Path.cwd()), *words])]


POLL_SECONDS = 0.5
RETRY_SECONDS = 5.0
"""Between two starts of an agent on a node that does not answer."""
REFUSALS = 3
"""Agents of a node that may find its files wrong before no other one is started."""
END_SECONDS = 60.0
"""In which all agents have ended once the run has."""


@dataclass(frozen=True)
class _Agent:
    """The process of an agent, here or at the end of an ssh connection."""

    node: str
    process: subprocess.Popen[bytes] | None
    ended_at: float = 0.0
    refusals: int = 0
    """How often one has ended in a row because it found its input wrong."""


def keep_agents(lines: Mapping[str, Sequence[str]], store: TCPStore) -> int:
    """Keep the agent of each node running, by its command, until the run ends; returns the exit code.

    SIGTERM and Ctrl-C have all save and end. Raises ConfigError where a command cannot be started.
    """
    from yuan_train.supervise.room import halt, note_end, read_end

    agents = [_Agent(node, _spawn(line)) for node, line in lines.items()]
    with _stopping() as asked:
        try:
            while (ended := read_end(store)) is None:
                if asked[0]:
                    halt(store)
                before = agents
                agents = [_kept_alive(agent, lines[agent.node], may_start=not asked[0]) for agent in agents]
                for agent, old in zip(agents, before, strict=True):
                    if (agent.process is None) != (old.process is None):
                        note_end(store, agent.node, is_gone=agent.process is None)
                if all(agent.process is None for agent in agents):
                    if asked[0]:
                        return INTERRUPTED if asked[0] == signal.SIGINT else 0
                    if all(agent.refusals >= REFUSALS for agent in agents):
                        return ConfigError.exit_code
                time.sleep(POLL_SECONDS)
        finally:
            _end(agents)
    if ended.code:
        print(f"error: {ended.reason}", file=sys.stderr)
    return ended.code


def _spawn(line: Sequence[str]) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"{line[0]}: cannot be started: {error}; --ssh names the command") from None


def _kept_alive(agent: _Agent, line: Sequence[str], *, may_start: bool) -> _Agent:
    """The agent, or another one some seconds after it has ended: its node may be back."""
    if agent.process is not None:
        code = agent.process.poll()
        if code is None:
            return agent
        logger.warning("supervise: the agent of %s has ended (exit code %d)", agent.node, code)
        refusals = agent.refusals + 1 if code == ConfigError.exit_code else 0
        if refusals == REFUSALS:
            logger.warning(
                "supervise: %s is started no more: what it says above has to be mended", agent.node
            )
        return replace(agent, process=None, ended_at=time.monotonic(), refusals=refusals)
    too_early = time.monotonic() < agent.ended_at + RETRY_SECONDS
    if too_early or not may_start or agent.refusals >= REFUSALS:
        return agent
    return replace(agent, process=_spawn(line))


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """Inside, SIGTERM and Ctrl-C only set element 0 of the yielded list, to their number."""
    asked = [0]

    def ask(signum: int, frame: object) -> None:
        asked[0] = signum

    with hearing({signal.SIGTERM: ask, signal.SIGINT: ask}):
        yield asked


def _end(agents: Sequence[_Agent]) -> None:
    """Wait for the agents, which know that the run has ended; then have those end that do not."""
    end = time.monotonic() + END_SECONDS
    for agent in agents:
        if agent.process is None:
            continue
        try:
            agent.process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.process.terminate()
            agent.process.wait(timeout=END_SECONDS)
