"""Supervised runs on this machine: nodes that are processes, what runs on each, and what is done to them."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from tests.support.networks import Host
from tests.support.project import make_project, read_metrics
from yuan_train.checkpoint.in_memory import run_folder
from yuan_train.report.lines import Entry, read_entries

SECONDS = 300.0
NETWORK = {"bandwidth": "2 GB/s", "latency": "100 us"}
CARD = {
    "memory": "2 GiB",
    "reserved": "300 MiB",
    **dict.fromkeys(("fp32", "bf16"), "80 GFLOP/s"),
    "memory_bandwidth": "10 GB/s",
    "host_link": "10 GB/s",
}
SSH = """\
#!/bin/sh
# Instead of ssh: a node is down while there is a file of its name.
[ ! -e "$(dirname "$0")/down-$1" ] || { echo "ssh: connect to host $1: No route to host" >&2; exit 255; }
reach=
case "$1" in
{cases}esac
shift
exec $reach sh -c "$*"
"""
PORT = 29400
"""Where agents with a network of their own meet, on which nobody else is."""


def make_supervised(folder: Path, cards: Mapping[str, int]) -> None:
    """Write a run, and a cluster of nodes with so many cards each."""
    make_project(folder)
    nodes = [
        {"name": name, "device": "core", "devices": count, "link": NETWORK, "network": NETWORK}
        | {"host": {"memory": "16 GiB"}}
        for name, count in cards.items()
    ]
    cluster = {"name": "some", "nodes": nodes, "device_types": {"core": CARD}}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))


def words(steps: int) -> tuple[str, ...]:
    return (f"train.steps={steps}", "optimizer.decay_steps=20", "validation.every=0")


@contextmanager
def supervised(
    project: Path, folder: Path, *more: str, network: Mapping[str, Host] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A supervised run in a folder, which is ended at the end. `network`: the host of each node, and under ""
    the one on which the command runs; None: all is here."""
    reach = {name: " ".join(host.prefix) for name, host in (network or {}).items() if name}
    cases = [f'  {name}) reach="{words}" ;;\n' for name, words in reach.items()]
    stand_in = folder / "ssh"
    stand_in.write_text(SSH.replace("{cases}", "".join(cases)))
    stand_in.chmod(0o755)
    line = [sys.executable, "-m", "yuan_train", "supervise", "--cluster", str(project / "cluster.yaml")]
    if network is not None:
        line = [*network[""].prefix, *line, "--meet", f"{network[''].address}:{PORT}"]
    line += ["--config", str(project / "run.yaml"), "--ssh", str(stand_in)]
    line += [f"log.directory={folder / 'log'}", f"checkpoint.directory={folder / 'checkpoints'}"]
    line += ["search.use_all_devices=true", "supervise.gain=0", "supervise.grace=2 s"]
    # Three ranks on two cores are not as fast as their cards: a test that is not about that asks for none.
    line += ["supervise.slow=1000", *more]
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(line, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=SECONDS)


def group_of(node: str, folder: Path) -> int:
    """The process group of all that runs on a node for the run of a folder."""
    wanted = {b"--this-node", node.encode(), b"supervise", f"log.directory={folder / 'log'}".encode()}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted <= set((entry / "cmdline").read_bytes().split(b"\0")):
                return os.getpgid(int(entry.name))
    raise AssertionError(f"{node} has no agent")


def lose_node(node: str, folder: Path) -> None:
    """Kill all that runs on a node for the run of a folder, with what the node has in memory."""
    os.killpg(group_of(node, folder), signal.SIGKILL)
    # What is killed may still write for a moment.
    time.sleep(0.3)
    shutil.rmtree(run_folder(folder / "checkpoints") / node, ignore_errors=True)


def wait_until(is_so: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < end, (folder / "out").read_text()[-4000:]
        time.sleep(0.1)


def steps_done(folder: Path) -> int:
    path = folder / "log"
    return len(read_metrics(path)) if (path / "metrics.jsonl").exists() else 0


def entries(folder: Path) -> list[Entry]:
    return read_entries(folder / "log")[0]


@contextmanager
def slowed(node: str, folder: Path) -> Iterator[None]:
    """Inside, the ranks of a node run a third of the time."""
    over = threading.Event()

    def hold() -> None:
        while not over.is_set():
            ranks = ranks_of(node, folder)
            for _ in range(60):
                for number, seconds in ((signal.SIGSTOP, 0.01), (signal.SIGCONT, 0.005)):
                    for rank in ranks:
                        with suppress(ProcessLookupError):
                            os.kill(rank, number)
                    over.wait(seconds)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def ranks_of(node: str, folder: Path) -> list[int]:
    """The processes of a node's ranks."""
    group, found = group_of(node, folder), list[int]()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_rank = b"LOCAL_RANK=" in (entry / "environ").read_bytes()
            if is_rank and os.getpgid(int(entry.name)) == group:
                found.append(int(entry.name))
    return found
