"""Unequal nodes on one Linux machine: for each a network namespace, a shaped link and a share of a core.

Each node's `eth0` is one end of a veth pair; the other end is a port of a bridge, which has its own
namespace. `tc tbf` limits both ends to the node's rate, and a cgroup (v1 or v2) limits the node's processes
to its share, in periods that are short compared to a layer's compute. Needs root. Names contain the id of
this process, so that two testbeds do not clash; everything is removed at the end, also after an error or a
signal.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Annotated

from annotated_types import Gt, Le, MinLen

from tests.support.networks import Host, hosts_on_a_bridge
from yuan_train.config.devices import BytesPerSecond
from yuan_train.config.errors import TrainingError, Violation, YuanError
from yuan_train.config.load import build, read_document

PERIOD_US = 10_000
"""Of the CPU quotas."""
PRIORITY = 100
"""Weight of a node's processes; the machine's other processes have 1 and must not slow the nodes."""
FAST_BYTES_PER_SECOND = 500e6 / 8
"""From this rate on, the kernel's timers need a larger burst to reach the rate."""
BURSTS = ("128kb", "512kb")
"""Below FAST_BYTES_PER_SECOND, and from it on. Not less than 64 KiB, the size of the kernel's large packets:
it would cut them into small ones, which costs a node 8 % of its core at 100 Mb/s."""
QUEUE = "100ms"
"""Longest time that a packet waits at a shaped end before it is dropped."""
MOST_NODES = 200
MOUNTS = Path("/proc/self/mounts")


class NoTestbed(YuanError):
    """This machine or user lacks something that a testbed needs."""


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """A node as the user wrote it."""

    name: Annotated[str, MinLen(1)]
    cpu: Annotated[float, Gt(0), Le(1)]
    """Share of a core."""
    network: BytesPerSecond
    """Rate of its NIC, each way."""


@dataclass(frozen=True, kw_only=True)
class TestbedSpec:
    """A testbed file."""

    __test__ = False  # not a test, though its name begins with Test
    nodes: Annotated[tuple[NodeSpec, ...], MinLen(1)]


def load_nodes(path: str | Path) -> tuple[NodeSpec, ...]:
    """Read a testbed file. Raises ConfigError with all its errors, NoTestbed on another system than Linux."""
    return build(read_document(path), TestbedSpec, validate=_validate).nodes


def _validate(spec: TestbedSpec) -> Iterator[Violation]:
    """Yield what is wrong between the nodes of a testbed, and with their names."""
    shares = [node.cpu for node in spec.nodes]
    cores = find_cores()
    if place_on_cores(shares, cores) is None:
        words = " + ".join(f"{share:g}" for share in shares)
        yield Violation(
            ("nodes",), f"shares of {words} do not fit on {len(cores)} cores, each on one; make them smaller"
        )
    if len(spec.nodes) > MOST_NODES:
        yield Violation(("nodes",), f"{len(spec.nodes)} nodes; at most {MOST_NODES}")
    seen: set[str] = set()
    for i, node in enumerate(spec.nodes):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*", node.name):
            yield Violation(("nodes", i, "name"), f"wanted letters, digits and '-'; got {node.name!r}")
        if node.name in seen:
            yield Violation(("nodes", i, "name"), f"there is a node {node.name!r} already; use another name")
        seen.add(node.name)


def find_cores() -> list[int]:
    """The cores that this process may use. Raises NoTestbed on another system than Linux."""
    if sys.platform != "linux":
        raise NoTestbed(f"a testbed needs Linux; this is {sys.platform}")
    return sorted(os.sched_getaffinity(0))


def place_on_cores(shares: Sequence[float], cores: Sequence[int]) -> list[int] | None:
    """A core for each share, in the order of `shares`: the largest share first, each on the first core with
    room; None if one does not fit.

    Left to the kernel, two nodes would share one core for a while and leave another to other programs.
    """
    room = dict.fromkeys(cores, 1.0)
    core_of: dict[int, int] = {}
    for i in sorted(range(len(shares)), key=lambda i: -shares[i]):
        core = next((core for core in cores if room[core] >= shares[i] - 1e-9), None)
        if core is None:
            return None
        room[core] -= shares[i]
        core_of[i] = core
    return [core_of[i] for i in range(len(shares))]


@dataclass(frozen=True)
class Node:
    """A running node."""

    spec: NodeSpec
    host: Host
    """Its network."""
    quota: Path
    """Its cgroup."""
    core: int
    """The core that its processes run on."""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """To be killed before the cgroup is removed: a process that has just started may not be in it yet."""

    @property
    def address(self) -> str:
        return self.host.address

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a command on the node, under its quota from the first instruction on.

        Ctrl-C does not reach it: the testbed kills it.
        """
        join_cgroup = 'echo $$ > "$0" && exec "$@"'
        prefix = ["sh", "-c", join_cgroup, str(self.quota / "cgroup.procs"), *self.host.prefix]
        with _signals_deferred():
            process = subprocess.Popen(
                [*prefix, *command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(os.sched_setaffinity, 0, {self.core}),
            )
            self.started.append(process)
        return process


SSH = """\
#!/bin/sh
# Stands for ssh to the nodes of a testbed: called as CMD HOST COMMAND..., by name or address.
case "$1" in
{cases}
*) echo "ssh: $1: no node of the testbed" >&2; exit 255 ;;
esac
shift
echo $$ > "$group/cgroup.procs" && exec taskset -c "$core" $enter sh -c "$*"
"""


def write_ssh(nodes: Sequence[Node], path: Path) -> None:
    """Write a program that stands for ssh to these nodes, which runs a command under the node's quota."""
    cases = [
        f'{node.spec.name}|{node.address}) enter="{" ".join(node.host.prefix)}" group={node.quota} '
        f"core={node.core} ;;"
        for node in nodes
    ]
    path.write_text(SSH.format(cases="\n".join(cases)))
    path.chmod(0o755)


@contextmanager
def make_nodes(specs: Sequence[NodeSpec]) -> Iterator[tuple[Node, ...]]:
    """Make the nodes, and at the end remove them with every process that is left on them.

    Raises NoTestbed if the machine cannot have them; nothing is left behind then either.
    """
    quotas = find_quotas(MOUNTS)
    _check_rights()
    prefix = f"yt{os.getpid()}"
    with ExitStack() as cleanup:
        try:
            with _signals_deferred():
                nodes = _make(specs, prefix, quotas, cleanup)
            yield nodes
        finally:
            with _signals_deferred():
                cleanup.close()


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block: neither making nor removing may stop half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals only in the main thread
        return
    deferred: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: deferred.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in deferred:
            signal.raise_signal(number)


def _check_rights() -> None:
    missing = []
    if os.geteuid() != 0:
        missing.append("root: start it as root")
    missing += [f"the program `{name}` (iproute2)" for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise NoTestbed(f"a testbed needs what is missing here: {'; '.join(missing)}")


def _make(specs: Sequence[NodeSpec], prefix: str, quotas: Quotas, cleanup: ExitStack) -> tuple[Node, ...]:
    quotas.open(cleanup)
    cores = place_on_cores([spec.cpu for spec in specs], find_cores())
    assert cores is not None, "_validate checks it"
    try:
        *hosts, _ = cleanup.enter_context(hosts_on_a_bridge(len(specs)))
        for spec, host in zip(specs, hosts, strict=True):
            _shape(spec, host)
    except subprocess.CalledProcessError as error:
        words, said = " ".join(error.cmd), error.stderr.decode().strip()
        raise NoTestbed(f"`{words}` failed: {said}; does this kernel offer it?") from None
    nodes: list[Node] = []
    for i, (spec, host, core) in enumerate(zip(specs, hosts, cores, strict=True)):
        node = Node(spec, host, quotas.add(f"{prefix}-{i}-{spec.name}", spec.cpu, cleanup), core)
        cleanup.callback(_kill_all, node.started)
        nodes.append(node)
    return tuple(nodes)


def _shape(spec: NodeSpec, host: Host) -> None:
    """Limit both ends of a host's link to its rate."""
    burst = BURSTS[spec.network >= FAST_BYTES_PER_SECOND]
    shape = f"root tbf rate {round(8 * spec.network)}bit burst {burst} latency {QUEUE}"
    for end, namespace in host.ends.items():
        words = f"tc -n {namespace} qdisc add dev {end} {shape}".split()
        subprocess.run(words, capture_output=True, check=True, start_new_session=True)


# --- quotas ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quotas:
    """The cgroup tree whose groups can have CPU quotas."""

    root: Path
    version: int

    def open(self, cleanup: ExitStack) -> None:
        """Under version 2, let the groups of the root have quotas, until `cleanup` closes."""
        switch = self.root / "cgroup.subtree_control"
        if self.version == 2 and "cpu" not in switch.read_text().split():
            _write(switch, "+cpu")
            cleanup.callback(_write, switch, "-cpu")

    def add(self, name: str, share: float, cleanup: ExitStack) -> Path:
        """A cgroup whose processes get `share` of a core, until `cleanup` closes.

        Raises NoTestbed if it cannot be made.
        """
        group = self.root / name
        try:
            group.mkdir()
        except OSError as error:
            raise NoTestbed(f"no group {group} for a CPU quota: {error}") from None
        cleanup.callback(_remove_group, group)
        quota = round(share * PERIOD_US)
        if self.version == 2:
            _write(group / "cpu.max", f"{quota} {PERIOD_US}")
            _write(group / "cpu.weight", str(100 * PRIORITY))
        else:
            _write(group / "cpu.cfs_period_us", str(PERIOD_US))
            _write(group / "cpu.cfs_quota_us", str(quota))
            _write(group / "cpu.shares", str(1024 * PRIORITY))
        return group


def find_quotas(mounts: Path) -> Quotas:
    """The mounted tree with the cpu controller. Raises NoTestbed without one."""
    lines = [line.split() for line in mounts.read_text().splitlines()] if mounts.exists() else []
    for _, mount, kind, options, *_ in lines:
        if kind == "cgroup" and "cpu" in options.split(","):
            return Quotas(Path(mount), 1)
        controllers = Path(mount) / "cgroup.controllers"
        if kind == "cgroup2" and controllers.exists() and "cpu" in controllers.read_text().split():
            return Quotas(Path(mount), 2)
    raise NoTestbed(
        "a testbed needs what is missing here: a mounted cgroup tree with the cpu controller (Linux)"
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise NoTestbed(
            f"{path} does not take {text!r}: {error}; does this kernel offer CPU quotas?"
        ) from None


def _remove_group(group: Path) -> None:
    """Kill the cgroup's processes, each by its id, and remove it."""
    deadline = time.monotonic() + 10
    while pids := (group / "cgroup.procs").read_text().split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            print(f"warning: {group}: processes {', '.join(pids)} do not exit", file=sys.stderr)
            return
        time.sleep(0.02)
    group.rmdir()


def _kill_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _kill(process)


# --- processes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A command on a node."""

    node: Node
    command: Sequence[str]
    environment: Mapping[str, str]
    name: str = ""
    """Of its log; that of the node if empty."""


def run_together(tasks: Sequence[Task], folder: Path, *, timeout_seconds: float) -> None:
    """Run the tasks at the same time until all exit; their output goes to `folder`, a log per task.

    Raises TrainingError, with the end of the failed task's log, if a task fails or is not done in time; the
    others are killed then.
    """
    with ExitStack() as running:
        logs = [folder / f"{task.name or task.node.spec.name}.log" for task in tasks]
        processes: list[subprocess.Popen[bytes]] = []
        for task, log in zip(tasks, logs, strict=True):
            output = running.enter_context(log.open("wb"))
            process = task.node.start(task.command, environment=task.environment, output=output)
            running.callback(_kill, process)
            processes.append(process)
        deadline = time.monotonic() + timeout_seconds
        while any(process.poll() is None for process in processes):
            failed = [log for log, process in zip(logs, processes, strict=True) if process.poll()]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        codes = [process.poll() for process in processes]
    for log, code in zip(logs, codes, strict=True):
        if code:
            raise TrainingError(f"node {log.stem} failed (exit code {code}):\n{log.read_text()[-2000:]}")
    late = [log.stem for log, code in zip(logs, codes, strict=True) if code is None]
    if late:
        raise TrainingError(f"not done within {timeout_seconds:g} s: {', '.join(late)}; see {folder}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
