"""Unlike nodes on one Linux machine: for each a network namespace, a shaped link and a share of a core.

Each node's `eth0` is one end of a veth pair; the other end is a port of a bridge, which has a namespace of
its own. `tc tbf` holds both ends to the node's rate, and a cgroup (v1 or v2) holds the node's processes to
its share, in periods short beside a layer's work. Needs root. Names carry the number of this process, so
that two testbeds do not meet; everything is removed at the end, whatever the end is.
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

from yuan_train.config.devices import BytesPerSecond
from yuan_train.config.errors import Problem, TrainingError, YuanError
from yuan_train.config.load import build, read_document

PERIOD_US = 10_000
"""Of the CPU quotas."""
PRIORITY = 100
"""Weight of a node's processes beside others of the machine, which have 1: those must not slow the nodes."""
FAST_BYTES_PER_SECOND = 500e6 / 8
"""From this rate on the kernel's timers need a larger burst to reach it."""
BURSTS = ("64kb", "512kb")
QUEUE = "100ms"
"""Longest time that a packet waits in a shaped end before it is dropped."""
MOST_NODES = 200
SUBNET = "10.77.0"
MOUNTS = Path("/proc/self/mounts")


class NoTestbed(YuanError):
    """The machine, or the right to change it, lacks something that a testbed needs."""


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """A node as the user wrote it."""

    name: Annotated[str, MinLen(1)]
    cpu: Annotated[float, Gt(0), Le(1)]
    """Share of a core."""
    network: BytesPerSecond
    """Rate of its network card, each way."""


@dataclass(frozen=True, kw_only=True)
class TestbedSpec:
    """A testbed file."""

    __test__ = False  # not a test, whatever its name begins with
    nodes: Annotated[tuple[NodeSpec, ...], MinLen(1)]


def load_nodes(path: str | Path) -> tuple[NodeSpec, ...]:
    """Read a testbed file. Raises ConfigError with all its faults."""
    return build(read_document(path), TestbedSpec, laws=_laws).nodes


def _laws(spec: TestbedSpec) -> Iterator[Problem]:
    shares = [node.cpu for node in spec.nodes]
    cores = find_cores()
    if place_on_cores(shares, cores) is None:
        words = " + ".join(f"{share:g}" for share in shares)
        yield Problem(
            ("nodes",), f"shares of {words} do not fit on {len(cores)} cores, each on one; make them smaller"
        )
    if len(spec.nodes) > MOST_NODES:
        yield Problem(("nodes",), f"{len(spec.nodes)} nodes; at most {MOST_NODES}")
    seen: set[str] = set()
    for i, node in enumerate(spec.nodes):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*", node.name):
            yield Problem(("nodes", i, "name"), f"wanted letters, digits and '-'; got {node.name!r}")
        if node.name in seen:
            yield Problem(("nodes", i, "name"), f"there is a node {node.name!r} already; use another name")
        seen.add(node.name)


def find_cores() -> list[int]:
    """The cores that this process may use. Raises NoTestbed where the system does not say."""
    if sys.platform != "linux":
        raise NoTestbed(f"a testbed needs Linux; this is {sys.platform}")
    return sorted(os.sched_getaffinity(0))


def place_on_cores(shares: Sequence[float], cores: Sequence[int]) -> list[int] | None:
    """A core for each share, the largest first, each on the first with room; None if there is none.

    Left to the kernel, two nodes would for a while share one core and leave another to other programs.
    """
    room = dict.fromkeys(cores, 1.0)
    places: dict[int, int] = {}
    for i in sorted(range(len(shares)), key=lambda i: -shares[i]):
        core = next((core for core in cores if room[core] >= shares[i] - 1e-9), None)
        if core is None:
            return None
        room[core] -= shares[i]
        places[i] = core
    return [places[i] for i in range(len(shares))]


@dataclass(frozen=True)
class Node:
    """A node that is there."""

    spec: NodeSpec
    namespace: str
    address: str
    quota: Path
    """Its cgroup."""
    core: int
    """Where its processes run."""
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """To be ended before the quota is removed: a process may be on its way into it."""

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a command on the node, under its quota from the first instruction on.

        Ctrl-C does not reach it: it is for the testbed to end.
        """
        join = 'echo $$ > "$0" && exec "$@"'
        enter = ["sh", "-c", join, str(self.quota / "cgroup.procs"), "ip", "netns", "exec", self.namespace]
        with _undisturbed():
            process = subprocess.Popen(
                [*enter, *command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(os.sched_setaffinity, 0, {self.core}),
            )
            self.started.append(process)
        return process


@contextmanager
def make_nodes(specs: Sequence[NodeSpec]) -> Iterator[tuple[Node, ...]]:
    """Make the nodes, and at the end remove them with every process that is left on them.

    Raises NoTestbed if the machine cannot have them; nothing is left then either.
    """
    quotas = find_quotas(MOUNTS)
    _check_rights()
    prefix = f"yt{os.getpid()}"
    with ExitStack() as made:
        try:
            with _undisturbed():
                nodes = _make(specs, prefix, quotas, made)
            yield nodes
        finally:
            with _undisturbed():
                made.close()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put Ctrl-C and SIGTERM off: neither making nor removing may stop half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python gives signals to the main thread alone
        return
    late: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: late.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in late:
            signal.raise_signal(number)


def _check_rights() -> None:
    missing = []
    if os.geteuid() != 0:
        missing.append("root: start it as root")
    missing += [f"the program `{name}` (iproute2)" for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise NoTestbed(f"a testbed needs what is missing here: {'; '.join(missing)}")


def _make(specs: Sequence[NodeSpec], prefix: str, quotas: Quotas, made: ExitStack) -> tuple[Node, ...]:
    quotas.open(made)
    bridge = f"{prefix}-bridge"
    _add_namespace(bridge, made)
    _do("ip", "-n", bridge, "link", "add", "bridge0", "type", "bridge")
    _do("ip", "-n", bridge, "link", "set", "bridge0", "up")
    cores = place_on_cores([spec.cpu for spec in specs], find_cores())
    assert cores is not None, "_laws checks it"
    nodes: list[Node] = []
    for i, (spec, core) in enumerate(zip(specs, cores, strict=True)):
        name, address = f"{prefix}-{i}-{spec.name}", f"{SUBNET}.{i + 1}"
        _make_network(i, spec, name, bridge, address, made)
        node = Node(spec, name, address, quotas.add(name, spec.cpu, made), core)
        made.callback(_end_all, node.started)
        nodes.append(node)
    return tuple(nodes)


def _make_network(i: int, spec: NodeSpec, name: str, bridge: str, address: str, made: ExitStack) -> None:
    _add_namespace(name, made)
    _do(*f"ip link add eth0 netns {name} type veth peer name port{i} netns {bridge}".split())
    _do(*f"ip -n {bridge} link set port{i} master bridge0 up".split())
    _do(*f"ip -n {name} address add {address}/24 dev eth0".split())
    _do(*f"ip -n {name} link set eth0 up".split())
    _do(*f"ip -n {name} link set lo up".split())
    burst = BURSTS[spec.network >= FAST_BYTES_PER_SECOND]
    for place, end in ((name, "eth0"), (bridge, f"port{i}")):
        shape = f"root tbf rate {round(8 * spec.network)}bit burst {burst} latency {QUEUE}"
        _do(*f"tc -n {place} qdisc add dev {end} {shape}".split())


def _add_namespace(name: str, made: ExitStack) -> None:
    """Its end of every veth pair goes with it, and with one end the other."""
    _do("ip", "netns", "add", name)
    made.callback(_do, "ip", "netns", "delete", name)


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise NoTestbed(f"`{' '.join(words)}` failed: {done.stderr.strip()}; does this kernel offer it?")


# --- quotas ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quotas:
    """The cgroup tree whose groups can have CPU quotas."""

    root: Path
    version: int

    def open(self, made: ExitStack) -> None:
        """Under version 2, let the root's groups have quotas, until the end."""
        switch = self.root / "cgroup.subtree_control"
        if self.version == 2 and "cpu" not in switch.read_text().split():
            _write(switch, "+cpu")
            made.callback(_write, switch, "-cpu")

    def add(self, name: str, share: float, made: ExitStack) -> Path:
        """A group of processes that get `share` of a core."""
        group = self.root / name
        try:
            group.mkdir()
        except OSError as error:
            raise NoTestbed(f"no group {group} for a CPU quota: {error}") from None
        made.callback(_remove_group, group)
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
    for _, place, kind, options, *_ in lines:
        if kind == "cgroup" and "cpu" in options.split(","):
            return Quotas(Path(place), 1)
        controllers = Path(place) / "cgroup.controllers"
        if kind == "cgroup2" and controllers.exists() and "cpu" in controllers.read_text().split():
            return Quotas(Path(place), 2)
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
    """End the group's processes, each by its id, and remove it."""
    deadline = time.monotonic() + 10
    while pids := (group / "cgroup.procs").read_text().split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            print(f"warning: {group}: processes {', '.join(pids)} do not end", file=sys.stderr)
            return
        time.sleep(0.02)
    group.rmdir()


def _end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        _end(process)


# --- processes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A command on a node."""

    node: Node
    command: Sequence[str]
    environment: Mapping[str, str]


def run_together(tasks: Sequence[Task], folder: Path, *, timeout_seconds: float) -> None:
    """Run the tasks at the same time, to their ends; what they say goes to `folder`.

    Raises TrainingError, with the last words of the one at fault, if one fails or is not done in time; the
    others are ended then.
    """
    with ExitStack() as running:
        logs = [folder / f"{task.node.spec.name}.log" for task in tasks]
        processes: list[subprocess.Popen[bytes]] = []
        for task, log in zip(tasks, logs, strict=True):
            output = running.enter_context(log.open("wb"))
            process = task.node.start(task.command, environment=task.environment, output=output)
            running.callback(_end, process)
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


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
